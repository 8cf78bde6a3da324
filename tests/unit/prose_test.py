#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Keeps comments readable: names for pronouns, and a name or a verb at the head of a sentence.

Usage: prose_test.py ROOT

Measures the comments of C, C++ and proto files by folder: pronouns in 100 words, and the share of sentences that begin
with a pronoun or with "Of". For comparison, measured in the same way in November 2026: LevelDB 4.1 and 2.4 %, TCMalloc
3.8 and 5.8 %, snmalloc 5.7 and 13.2 %, RMM 1.3 and 0.4 %.
"""
import collections
import pathlib
import re
import sys

PRONOUNS = set("it its they them their that this these those what which who whom whose one ones others other same such itself "
               "themselves he his".split())
HEADS = set("Of What That Those Whose Who Which One Nobody Nothing It They Such Others This".split())
MOST_PRONOUNS = 5  # in 100 words
MOST_HEADS = 3     # in 100 sentences
FEW_WORDS = 300    # a folder with fewer counts with the folder above
FOLDERS = ("allocator", "client", "deploy", "proto", "server")


def comments(text):
    """Yields each comment as one line. Comments behind code on a line do not count."""
    block = []
    for line in [*text.splitlines(), ""]:
        match = re.match(r"\s*(?://+|/?\*+) ?(.*)", line)
        words = match.group(1).replace("*/", "").strip() if match else ""
        if words:
            block.append(words)
        elif block:
            yield " ".join(block)
            block = []


def measure(text):
    """Returns the counts of words, pronouns, sentences, and sentences that begin with one of HEADS."""
    counts = [0, 0, 0, 0]
    for comment in comments(text):
        for sentence in re.split(r"(?<=[.;:!?])\s+", comment.replace("SPDX-License-Identifier: Apache-2.0", "")):
            words = re.findall(r"[A-Za-z']+", sentence)
            if len(words) >= 3:
                counts[0] += len(words)
                counts[1] += sum(word.lower() in PRONOUNS for word in words)
                counts[2] += 1
                counts[3] += words[0] in HEADS
    return counts


def self_test():
    """Returns the faults of the check itself."""
    text = "/* Of that which it says, nothing.\n * The heap keeps its lock. */\nint x;  // that\n// Names a free block.\n"
    return [] if measure(text) == [15, 4, 3, 1] else [f"counts {measure(text)}"]


def main():
    faults = [f"self-test: {fault}" for fault in self_test()]
    root = pathlib.Path(sys.argv[1])
    totals = collections.defaultdict(lambda: [0, 0, 0, 0])
    for path in (path for folder in FOLDERS for path in (root / folder).rglob("*")):
        if path.suffix in (".cc", ".h", ".c", ".proto") and path.is_file():
            counts = measure(path.read_text())
            place = path.relative_to(root).parent
            for folder in (place, *place.parents):
                totals[str(folder)] = [a + b for a, b in zip(totals[str(folder)], counts)]
    for folder, (words, pronouns, sentences, heads) in sorted(totals.items()):
        if words < FEW_WORDS:
            continue
        if 100 * pronouns > MOST_PRONOUNS * words:
            faults.append(f"{folder}: {100 * pronouns / words:.1f} pronouns in 100 words of its comments, at most {MOST_PRONOUNS} "
                          "may be; name what is meant")
        if 100 * heads > MOST_HEADS * sentences:
            faults.append(f"{folder}: {100 * heads / sentences:.1f} % of the sentences of its comments begin with a pronoun or "
                          f"\"Of\", at most {MOST_HEADS} % may; begin with a name or a verb")
    for fault in faults:
        print(fault)
    words, pronouns, sentences, heads = totals["."]
    print(f"{words} words, {100 * pronouns / max(words, 1):.1f} pronouns in 100, {100 * heads / max(sentences, 1):.1f} % begin so")
    return 1 if faults or words == 0 else 0


sys.exit(main())
