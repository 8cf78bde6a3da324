#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks that files named in the documentation exist. Usage: documented_paths_test.py ROOT

The check covers all *.md: paths in `backticks` that begin with a folder of the project (with or without the ending),
and links to files.
"""
import pathlib
import re
import sys
import tempfile

FOLDERS = ("allocator", "client", "deploy", "findings", "proto", "server", "tests")
NAMED = re.compile(rf"`((?:{'|'.join(FOLDERS)})/[\w./-]*\w)`")
LINKED = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)")


def dead_paths(root):
    """Returns lines "FILE names X", and the number of checked paths."""
    found, paths = [], 0
    for document in sorted([*root.glob("*.md"), *root.glob(".github/*.md"), *(path for top in FOLDERS for path in (root / top).rglob("*.md"))]):
        text = document.read_text(encoding="utf-8")
        for name in NAMED.findall(text):
            paths += 1
            path = root / name
            if not path.exists() and not any(path.parent.glob(path.name + ".*")):
                found.append(f"{document.relative_to(root).as_posix()} names {name}")
        for name in LINKED.findall(text):
            paths += 1
            # Some documents are read elsewhere, for example at the root of a bundle.
            if not (document.parent / name).exists() and not (root / name).exists():
                found.append(f"{document.relative_to(root).as_posix()} links to {name}")
    return found, paths


def self_test():
    """Returns the faults of the check itself."""
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        (root / "server/core").mkdir(parents=True)
        (root / "server/core/there.cc").write_text("", encoding="utf-8")
        (root / "server/README.md").write_text("`server/core/there.cc`, `server/core/there`, `server/core`, `elsewhere/gone`, `server/gone`,"
                                               " [a](core/there.cc), [b](../server#c), [d](https://e), [f](gone.md)", encoding="utf-8")
        (root / "README.md").write_text("`server/gone.cc`", encoding="utf-8")
        found, paths = dead_paths(root)
        if (found, paths) == (["README.md names server/gone.cc", "server/README.md names server/gone", "server/README.md links to gone.md"], 8):
            return []
        return [f"of {paths} paths it says: {found}"]


def main():
    faults = self_test()
    for fault in faults:
        print(f"self-test: {fault}")
    if faults:
        return 2
    found, paths = dead_paths(pathlib.Path(sys.argv[1]))
    for line in found:
        print(f"{line}: there is no such file or folder")
    print(f"{paths} paths, {len(found)} dead")
    return 1 if found or paths < 50 else 0


if __name__ == "__main__":
    sys.exit(main())
