#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Prints the changes between two result files: compare.py OLDER NEWER."""
import json
import pathlib
import sys

TOO_MUCH = 0.2  # smallest relative change that earns a line
MOST_LINES = 60
NO_RESULT = ("seconds",)  # figures of the run, not of the check


def _flat(figures, prefix=""):
    """Returns the numbers of nested objects, by their path."""
    found = {}
    for key, value in figures.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            found.update(_flat(value, name + "."))
        elif isinstance(value, (int, float)) and not isinstance(value, bool) and key not in NO_RESULT:
            found[name] = value
    return found


def _by_name(document):
    return {(c["step"], c["name"]): c for c in document["checks"]}


def _name(step, name):
    return name if step in ("", name) else f"{step}/{name}"


def changes(older, newer):
    """Returns lines: first the checks with another result, then the figures of the remaining checks, the largest change
    first."""
    before, after = _by_name(older), _by_name(newer)
    results, figures = [], []
    for key in (k for k in after if k in before):
        one, other = before[key], after[key]
        if one["result"] != other["result"]:
            detail = " ".join(other.get("detail", "").split())[:200]
            results.append(f"{_name(*key)}: {one['result']} -> {other['result']}: {detail}")
            continue
        old, new = _flat(one.get("figures", {})), _flat(other.get("figures", {}))
        for figure in (f for f in new if f in old and old[f] != new[f]):
            change = (new[figure] - old[figure]) / abs(old[figure]) if old[figure] else float("inf")
            if abs(change) > TOO_MUCH:
                text = f"{100 * change:+.0f} %" if old[figure] else "from nothing"
                figures.append((abs(change), f"{_name(*key)} {figure}: {old[figure]:g} -> {new[figure]:g} ({text})"))
    figures.sort(key=lambda figure: -figure[0])
    return results + [line for _, line in figures]


def _about(document):
    return f"{document.get('gpu', {}).get('name', '-')}, vrambroker {document.get('vrambroker', {}).get('revision', '-')}"


def say(path, older, newer):
    lines = changes(older, newer)
    common = len(_by_name(older).keys() & _by_name(newer).keys())
    print(f"\nagainst {path} ({_about(older)}), {common} checks in common: {len(lines) or 'no'} changes", flush=True)
    for line in lines[:MOST_LINES]:
        print(f"changed  {line}", flush=True)
    if len(lines) > MOST_LINES:
        print(f"         and {len(lines) - MOST_LINES} more: compare.py {path} ...", flush=True)


def newest(folders, path, document):
    """Returns the newest older result in `folders` that has a step of `document` and the same device; else None."""
    # File names begin with the time of the run.
    found = {other.resolve() for folder in folders for other in folder.glob("*.json")}
    for other in sorted(found, key=lambda f: f.name, reverse=True):
        if path and other.name >= path.name:
            continue
        try:
            older = json.loads(other.read_text(encoding="utf-8"))
            if older["device"] == document["device"] and set(older["steps"]) & set(document["steps"]):
                return other, older
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return None


def say_against_newest(folders, path, document):
    found = newest(folders, path, document)
    if found:
        say(*found, document)
    else:
        print("\nthere is no older result to compare with", flush=True)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    files = [json.loads(pathlib.Path(name).read_text(encoding="utf-8")) for name in sys.argv[1:]]
    say(sys.argv[1], *files)
