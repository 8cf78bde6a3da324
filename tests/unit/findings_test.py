#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks the form of findings/, which no test runs, and the entries at the top level. Usage: findings_test.py ROOT

Each finding is an executable script, NAME.sh, and has a row in findings/README.md. A finding names no host: packages
come from the sources in the machine's configuration.
"""
import os
import pathlib
import re
import subprocess
import sys
import tempfile

TOP = {".ci", ".clang-format", ".clang-tidy", ".editorconfig", ".github", ".gitignore", "CMakeLists.txt", "CMakePresets.json", "LICENSE",
       "README.md", "allocator", "client", "deploy", "findings", "proto", "server", "tests"}
HOST = re.compile(r"\w+://|\b[a-z0-9-]+\.(?:debian|npmjs|github)\.(?:org|com)\b")


def faults(folder):
    """Returns the faults of the findings of a folder."""
    found = []
    listed = re.findall(r"^\| \[([\w.]+)\]\(\1\) \|", (folder / "README.md").read_text(encoding="utf-8"), re.M)
    scripts = sorted(path.name for path in folder.iterdir() if path.name != "README.md")
    if listed != scripts:
        found.append(f"README.md has rows for {listed}, the folder has {scripts}")
    for name in scripts:
        if not re.fullmatch(r"[a-z0-9_]+\.sh", name) or not os.access(folder / name, os.X_OK):
            found.append(f"{name} is not an executable NAME.sh")
        if HOST.search((folder / name).read_text(encoding="utf-8")):
            found.append(f"{name} names a host")
    return found


def self_test():
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / "README.md").write_text("| [a.sh](a.sh) | x |\n| [gone.sh](gone.sh) | x |\n", encoding="utf-8")
        (folder / "a.sh").write_text("curl http://deb/x\n", encoding="utf-8")
        return [] if len(faults(folder)) == 3 else [f"self-test: it finds {faults(folder)}"]


def main():
    root = pathlib.Path(sys.argv[1])
    found = self_test() + [f"findings/: {fault}" for fault in faults(root / "findings")]
    git = subprocess.run(["git", "-C", str(root), "ls-files"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False)
    if git.returncode == 0:  # an archive of the source has no list of files
        top = {path.split("/")[0] for path in git.stdout.split()}
        found += [f"{entry} does not belong to the top level" for entry in sorted(top - TOP)]
        found += [f"{entry} is not at the top level" for entry in sorted(TOP - top)]
    for line in found:
        print(line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
