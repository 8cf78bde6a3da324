#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs clang-tidy on every C++ file that has changed since it last passed: lint.py BUILD_DIR [--jobs N] [FILE...]

BUILD_DIR belongs to the preset `clang`, configured, with generated files (targets vrambroker_proto,
vrambroker_kubelet_proto and bench_health) built.

A file has changed when any byte of its inputs has changed: the file, every included file, the compiler command,
.clang-tidy, or clang-tidy itself. ~/.cache/vrambroker-lint ($XDG_CACHE_HOME) remembers the passed files, with paths
relative to the source tree and the build folder, so the cache serves other clones too.
"""
import argparse
import concurrent.futures
import functools
import hashlib
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
CLANG_TIDY = os.environ.get("CLANG_TIDY", "clang-tidy-22")
KEPT_DAYS = 30

# libstdc++ 12 implements std::stable_sort by functions that newer clangs call deprecated. g++ reports deprecated calls
# of the project itself.
COMMON = ["--extra-arg=-Wno-deprecated-declarations"]
# (files, clang-tidy's arguments, reason); the first rule that fits.
ANALYZER = ["--extra-arg=-Xclang", "--extra-arg=-analyzer-config", "--extra-arg=-Xclang", "--extra-arg=mode=shallow"]
NO_ANALYZER = ["--checks=-clang-analyzer-*"]
RULES = (
    (r"allocator/device/cuda_device_absent\.cc|allocator/device/cuda_headers/", None, "not in this build"),
    # Release and sanitizer builds compile several files at once. Here clang checks each file alone: does the file
    # include its needs?
    (r"tests/", ["--checks=-*,clang-diagnostic-*,misc-unused-using-decls"], "clang's warnings and thread-safety analysis only"),
    (r"client/vramctl/|deploy/|server/|allocator/wire/", NO_ANALYZER, "without the static analyzer, which takes long"),
    (r"allocator/|client/", ANALYZER, "where pointers are handled by hand; the deep mode takes three times as long as all the rest"),
)


@functools.lru_cache(maxsize=None)
def digest(path):
    """Returns the digest of a file's bytes; None for a missing file."""
    try:
        return hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest()
    except OSError:
        return None


class Linter:
    def __init__(self, build_dir):
        self.build_dir = build_dir.resolve()
        self.cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "vrambroker-lint"
        self.cache.mkdir(parents=True, exist_ok=True)
        try:
            version = subprocess.run([CLANG_TIDY, "--version"], capture_output=True, text=True, check=True).stdout
        except FileNotFoundError:
            sys.exit(f"lint.py: there is no {CLANG_TIDY}: deploy/packages.sh ci installs it on Debian 12; elsewhere $CLANG_TIDY names another one")
        self.common = version + (ROOT / ".clang-tidy").read_text(encoding="utf-8")
        commands = json.loads((self.build_dir / "compile_commands.json").read_text(encoding="utf-8"))
        paths = [(pathlib.Path(c["file"]).resolve(), c["command"]) for c in commands]
        self.commands = {path.relative_to(ROOT).as_posix(): command for path, command in paths if path.is_relative_to(ROOT)}

    def portable(self, text):
        """Returns a text that is the same in every clone."""
        return text.replace(str(self.build_dir), "{build}").replace(str(ROOT), "{root}")

    def local(self, text):
        return text.replace("{build}", str(self.build_dir)).replace("{root}", str(ROOT))

    def entry(self, name, arguments):
        key = json.dumps([name, COMMON, arguments, self.common, self.portable(self.commands[name])])
        return self.cache / hashlib.sha256(key.encode()).hexdigest()

    def passed(self, entry):
        try:
            known = json.loads(entry.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return False
        if any(digest(self.local(path)) != wanted for path, wanted in known.items()):
            return False
        entry.touch()
        return True

    def lint(self, name, arguments):
        """Returns (seconds, complaints, or ""). -H names the included files."""
        started = time.monotonic()
        run = subprocess.run([CLANG_TIDY, "--quiet", *COMMON, *arguments, "--extra-arg=-H", "-p", self.build_dir, ROOT / name],
                             capture_output=True, text=True, check=False)
        included = re.findall(r"^\.+ (.*)$", run.stderr, re.M)
        said = "\n".join(line for line in run.stderr.splitlines() if not re.match(r"\.+ |\d+ warnings? ", line))
        seconds = time.monotonic() - started
        if run.returncode != 0:
            return seconds, run.stdout + said
        if not included:
            return seconds, f"{name}: {CLANG_TIDY} named no file that it includes; {said}"
        directory = self.build_dir  # compile_commands.json's names are relative to this folder
        files = {os.path.realpath(os.path.join(directory, path)) for path in [*included, str(ROOT / name)]}
        entry = self.entry(name, arguments)
        temporary = entry.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps({self.portable(f): digest(f) for f in sorted(files)}), encoding="utf-8")
        temporary.rename(entry)
        return seconds, ""

    def forget_old(self):
        for entry in self.cache.iterdir():
            if entry.stat().st_mtime < time.time() - KEPT_DAYS * 86400:
                entry.unlink(missing_ok=True)


def arguments_for(name):
    return next((arguments for pattern, arguments, _ in RULES if re.match(pattern, name)), None)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build_dir", type=pathlib.Path)
    parser.add_argument("files", nargs="*", help="these only")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    options = parser.parse_args()
    linter = Linter(options.build_dir)
    tracked = subprocess.run(["git", "-C", ROOT, "ls-files", "*.cc"], capture_output=True, text=True, check=True).stdout.split()
    wanted = {name: arguments_for(name) for name in options.files or tracked}
    unknown = [name for name, arguments in wanted.items() if arguments is not None and name not in linter.commands]
    wanted = {name: arguments for name, arguments in wanted.items() if arguments is not None and name in linter.commands}
    todo = [name for name, arguments in wanted.items() if not linter.passed(linter.entry(name, arguments))]
    failed, times = 0, []
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        futures = {pool.submit(linter.lint, name, wanted[name]): name for name in todo}
        for future in concurrent.futures.as_completed(futures):
            seconds, wrong = future.result()
            times.append((seconds, futures[future]))
            if wrong:
                failed += 1
                print(wrong, flush=True)
    linter.forget_old()
    for name in unknown:
        # The installed packages decide which test programs exist; the build always has the shipped files.
        print(f"{name}: not in compile_commands.json, and so not looked at")
        failed += not name.startswith("tests/")
    for seconds, name in sorted(times, reverse=True)[:3]:
        print(f"{seconds:6.1f} s  {name}")
    print(f"{len(wanted)} files: {len(wanted) - len(todo)} unchanged since they passed, {len(todo)} looked at, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
