#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs every command and program of the README and the guides, from top to bottom. Usage: guides_test.py TREE GUIDE...

TREE is a copy of the source tree, on a machine with the packages installed and the service running; in_debian.sh calls
the script as root. Each guide is a single bash, run by the guide's kind of reader. A command must succeed, unless its
comment says "exit code N". The test runs a fenced block by its language (sh, python, cpp, c, textproto); a block that
cannot run here says so in the source only: ```sh not run: REASON
"""
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile

ROOT = ("deploy/",)  # guides in these folders are for operators, all remaining guides for users
BLOCK = re.compile(r"^```(?P<language>\w*)(?: not run: (?P<reason>[^\n]+))?\n(?P<text>.*?)^```$", re.M | re.S)
# The packages are installed, so the guides need no build by quickstart.sh.
STAND_INS = {"./deploy/quickstart.sh": "./deploy/quickstart.sh --build-dir build/release --seconds 1"}

PROLOGUE = r"""
set -m
until_true() {  # waits for a minute
  for _ in $(seq 600); do if eval "$1"; then return; fi; sleep 0.1; done
  echo "waited for a minute: $1" >&2; exit 1
}
expect() {  # expect CODE WANTED PLACE
  [ "$1" = "$2" ] || { echo "FAILED: $3: exit code $1, not $2" >&2; exit 1; }
}
end() { for job in $(jobs -p); do kill -TERM -- -$job 2> /dev/null; done; wait; }
trap end EXIT
"""


def background(command):
    """Waits for the effect of a background command: the reader's wait of a second can be too short on a busy
    machine."""
    words = shlex.split(command, comments=True)
    if words[0] == "vrambrokerd":
        return f"until_true 'vramctl status --socket-dir {words[words.index('--socket-dir') + 1]} > /dev/null 2>&1'"
    name = words[words.index("--name") + 1]
    return f"until_true 'vramctl summary {name} 2> /dev/null | grep -q Allocated'"


def shell_lines(text, place):
    """Yields each command of a block, with a check of its exit code."""
    for command in re.sub(r"\\\n\s*", " ", text).splitlines():
        bare = " ".join(shlex.split(command, comments=True))
        if not bare:
            continue
        wanted = re.search(r"#.*exit code (\d+)", command)
        yield f"printf '+ %s\\n' {shlex.quote(command)}"
        yield STAND_INS.get(bare, command)
        if bare.endswith("& sleep 1"):
            yield background(bare)
        else:
            yield f"expect $? {wanted.group(1) if wanted else 0} {shlex.quote(place + ': ' + bare)}"


def whole_program(language, text):
    """Makes a program of a fragment."""
    if "main(" in text:
        return text
    headers = {"cpp": "#include <vrambroker/client.h>\n#include <iostream>\n",
               "c": "#include <stdio.h>\n#include <vrambroker/vrambroker.h>\n"}[language]
    declarations = {"cpp": "", "c": "vrambroker_client* client;\nvoid* memory;\n"}[language]
    return f"{headers}int main(void) {{\n{declarations}{text}\nreturn 0;\n}}\n"


def block_lines(language, text, place, folder):
    if language == "sh":
        yield from shell_lines(text, place)
        return
    file = folder / re.sub(r"\W", "_", place)
    runs = {
        "python": "python3 {0}.py",
        "cpp": "c++ -std=c++20 {0}.cpp $(pkg-config --cflags --libs vrambroker-client) -o {0} && {0}",
        "c": "cc -Wall -Werror {0}.c $(pkg-config --cflags --libs vrambroker) -o {0} && {0}",
        "textproto": "vrambrokerd --config {0}.textproto --check-config",
    }
    if language not in runs:
        raise ValueError(f"{place}: a block in '{language}' cannot be run: write ```{language} not run: REASON")
    source = file.with_suffix({"python": ".py"}.get(language, f".{language}"))
    source.write_text(whole_program(language, text) if language in ("c", "cpp") else text)
    source.chmod(0o644)
    yield f"printf '+ %s\\n' {shlex.quote(place)}"
    yield runs[language].format(file)
    yield f"expect $? 0 {shlex.quote(place)}"


def script(tree, guide, folder):
    """Returns the commands of a guide as a script, and the number of blocks that the script runs."""
    markdown = (tree / guide).read_text()
    fences = len(re.findall(r"^```", markdown, re.M))
    lines, blocks, seen = [PROLOGUE, f"cd {shlex.quote(str(tree))}"], 0, 0
    for match in BLOCK.finditer(markdown):
        seen += 2
        place = f"{guide}:{markdown.count(chr(10), 0, match.start('text'))}"
        if match["reason"]:
            print(f"   {place} is not run: {match['reason']}")
        elif match["language"]:
            blocks += 1
            lines += block_lines(match["language"], match["text"], place, folder)
    if seen != fences:
        raise ValueError(f"{guide}: {fences} lines begin with ```, but {seen} of them open or close a block")
    return "\n".join(lines) + "\n", blocks


def run_guides(tree, guides, folder):
    folder.chmod(0o777)
    failed = 0
    for guide in guides:
        user = "root" if guide.startswith(ROOT) else "alice"
        print(f"== {guide}, as {user}", flush=True)
        text, blocks = script(tree, guide, folder)
        if blocks == 0:
            raise ValueError(f"{guide} has nothing to run")
        as_user = ["setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups", "--reset-env"] if user != "root" else []
        done = subprocess.run([*as_user, "bash", "-c", text], stderr=subprocess.STDOUT, check=False, timeout=1800)
        if done.returncode != 0:
            failed += 1
            print(f"FAILED: {guide}", flush=True)
    return 1 if failed else 0


def main():
    tree = pathlib.Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory() as folder:
        return run_guides(tree, sys.argv[2:], pathlib.Path(folder))


if __name__ == "__main__":
    sys.exit(main())
