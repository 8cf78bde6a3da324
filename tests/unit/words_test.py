#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Keeps retired words out of code, comments and documents. Usage: words_test.py ROOT

A concept has the same name everywhere. A retired name must not come back by copying. Published names (metrics, flags,
proto fields, the client API) stay, whatever the names are.
"""
import pathlib
import re
import sys

# Words that no file may contain, and the replacements.
RETIRED = {
    r"Growth(Queue|Request|Outcome|Options|Figures)\w*|growth_queue\w*": "RequestQueue, QueuedRequest, WaitRecord, RequestOptions, WaitStats",
    r"OnRoom|RoomMade|TakeRoom": "OnCapacityFreed, CapacityFreed, TakeChanges",
    r"LimitIs|PriorityIs": "SetLimit, UpdatePriority",
    r"SessionWishes": "OpenOptions",
    r"ForgetTheQuiet": "EvictIdle",
    r"(Pool|User|Reclaim|Http|Account|DeviceMeter|DeviceCall|Get)Figures": "...Stats for counters, AccountState for an account",
    r"(Session|SessionDevice|Quarantined|Segment)Info": "SessionView, SessionDeviceView, QuarantinedView, SegmentView",
    r"TakeBack(AllBut)?|ReturnLeased|KeepOnly": "Return, ReturnAllBut, ReturnSegments",
    r"RandomTicket": "NewRandomToken",
    r"StopKeeper|session_keeper\w*|keeper thread": "the background thread",
    r"MayGrowLater": "BlockRequest: the allocator plans, its owner acts",
    r"CoreTimer|core_timer\w*": "SharedTimer",
    r"SettleElsewhere|SettleOutside": "DriverMemory",
    r"[Ww]ho(m|so)?ever": "name who it is",
}
FOLDERS = (".github", "allocator", "client", "deploy", "findings", "proto", "server", "tests")
NOT_OURS = re.compile(r"^tests/golden/|^tests/unit/words_test\.py$|/node_modules/|/__pycache__/")


def retired_words(name, text):
    """Returns lines "NAME:LINE: WORD, write ... instead"."""
    found = []
    for pattern, instead in RETIRED.items():
        for match in re.finditer(rf"\b(?:{pattern})\b", text):
            line = text.count("\n", 0, match.start()) + 1
            found.append(f"{name}:{line}: {match.group(0)!r} is retired; write instead: {instead}")
    return found


def self_test():
    """Returns the faults of the check itself."""
    faults = []
    if len(retired_words("a.cc", "// Whoever\nGrowthQueue queue_;\npool->TakeBack(1);\nnew growth_queue_test.cc")) != 4:
        faults.append("it misses retired words")
    if retired_words("a.cc", "fragmentation_growth_bytes_per_second, CheckGrowth(), takes back, RequestQueue"):
        faults.append("it reports words that are not retired")
    return faults


def main():
    faults = self_test()
    for fault in faults:
        print(f"self-test: {fault}")
    if faults:
        return 2
    root = pathlib.Path(sys.argv[1])
    paths = [*root.glob("*"), *(path for folder in FOLDERS for path in (root / folder).rglob("*"))]
    files, found = 0, []
    for path in sorted(path for path in paths if path.is_file()):
        name = path.relative_to(root).as_posix()
        if NOT_OURS.search(name):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        files += 1
        found += retired_words(name, text)
    for line in found:
        print(line)
    print(f"{files} files, {len(found)} retired words")
    return 1 if found or files < 50 else 0


if __name__ == "__main__":
    sys.exit(main())
