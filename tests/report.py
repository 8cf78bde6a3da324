#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Prints run.sh's final table, why tests were skipped, and the output of failing tests: report.py FOLDER BEGAN

FOLDER has `phases` (name, seconds, ok or FAILED, by tabs) and ctest's reports on each preset's tests (PRESET.xml,
PRESET-unit.xml). BEGAN is the start of run.sh, in seconds since 1970: the build folders' .ninja_log tells the files
compiled later.
"""
import collections
import pathlib
import re
import sys
import xml.etree.ElementTree

ROOT = pathlib.Path(__file__).resolve().parent.parent
TESTED = {
    "Release tests": "ci",
    "AddressSanitizer and UndefinedBehaviorSanitizer unit tests": "asan-unit",
    "ThreadSanitizer unit tests": "tsan-unit",
    "AddressSanitizer and UndefinedBehaviorSanitizer tests": "asan",
    "ThreadSanitizer tests": "tsan",
}
SLOWEST = 10
LAST_LINES, MOST_FAILURES = 40, 5


def clock(seconds):
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def tests_of(path):
    """Returns [(seconds, name, result, output)], with ctest's results: run, fail, disabled, notrun."""
    try:
        cases = xml.etree.ElementTree.parse(path).getroot().iter("testcase")
    except (OSError, xml.etree.ElementTree.ParseError):
        return []
    return [(float(case.get("time") or 0), case.get("name"), case.get("status"), case.findtext("system-out") or "") for case in cases]


def compiled_since(began):
    """Returns [(seconds, file)] of all presets."""
    found = {}
    for log in ROOT.glob("build/*/.ninja_log"):
        for line in log.read_text(encoding="utf-8").splitlines()[1:]:
            start, end, written, output, _ = line.split("\t")
            if output.endswith(".o") and int(written) / 1e9 >= began:
                name = re.sub(r"CMakeFiles/|(__/)*unity/|\.o$", "", output.replace(".dir/", "/"))
                found[log.parent.name, name] = (int(end) - int(start)) / 1000
    return [(seconds, f"{preset} {name}") for (preset, name), seconds in found.items()]


def print_slowest(title, rows):
    if rows:
        print(f"\n{title}")
        for seconds, name in sorted(rows, reverse=True)[:SLOWEST]:
            print(f"{seconds:8.1f} s  {name}")


def reason(output):
    """Returns why a test was skipped: the line after GoogleTest's "FILE:LINE: Skipped", or the last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()] or ["no reason given"]
    said = [after for line, after in zip(lines, lines[1:]) if line.endswith(": Skipped")]
    return said[0] if said else lines[-1]


def print_skipped(outputs):
    if outputs:
        print("\nSkipped")
        for why, count in collections.Counter(reason(output) for output in outputs).most_common():
            print(f"{count:8}    {why}")


def telling(output):
    """Returns the lines that tell why a test failed: from GoogleTest's or a sanitizer's first report on, or else the
    last lines."""
    lines = output.splitlines()
    first = next((i for i, line in enumerate(lines) if re.search(r": Failure$|(WARNING|ERROR): \w+Sanitizer|: runtime error: ", line)), None)
    return lines[-LAST_LINES:] if first is None else lines[first : first + LAST_LINES]


def print_failures(failures):
    """Prints the failures last: people see the end of a long log, so the reason has to stand there."""
    for name, output in failures[:MOST_FAILURES]:
        print(f"\nWhat {name}, which failed, says")
        for line in telling(output):
            print(f"  | {line}")
    if len(failures) > MOST_FAILURES:
        print(f"\n{len(failures) - MOST_FAILURES} more failed: {' '.join(name for name, _ in failures[MOST_FAILURES:])}")


def main():
    folder, began = pathlib.Path(sys.argv[1]), int(sys.argv[2])
    results = {part: tests_of(folder / f"{part}.xml") for part in TESTED.values()}
    print("\n  TIME  TESTS  PHASE")
    total = 0
    for line in (folder / "phases").read_text(encoding="utf-8").splitlines():
        name, seconds, result = line.split("\t")
        total += int(seconds)
        tests = len(results[TESTED[name]]) if name in TESTED else ""
        print(f"{clock(int(seconds)):>6}  {tests:>5}  {name}{'' if result == 'ok' else f': {result}'}")
    everything = [(seconds, f"{part} {name}", *rest) for part, cases in results.items() for seconds, name, *rest in cases]
    print(f"{clock(total):>6}  {len(everything):>5}  in all")
    print_slowest("Slowest to compile; TARGET_N.cc is several files", compiled_since(began))
    print_slowest("Slowest tests", [(seconds, name) for seconds, name, *_ in everything])
    print_skipped([output for _, _, result, output in everything if result not in ("run", "fail")])
    print_failures([(name, output) for _, name, result, output in everything if result == "fail"])
    passed, failed = (sum(result == wanted for _, _, result, _ in everything) for wanted in ("run", "fail"))
    print(f"\n{passed} passed, {failed} failed, {len(everything) - passed - failed} skipped")


if __name__ == "__main__":
    main()
