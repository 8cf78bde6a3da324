#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares the driver's answers to the real CUDA runtime, with libvrambroker-preload.so and without.

Usage: cudart_test.py DRIVER PRELOAD WITNESS ASKER PROGRAM...

The answers differ only for functions with a hook. The library answers with its own function of the driver's function
name, whatever name, version and flags the question has. A function missing in the driver stays missing.
"""
import os
import subprocess
import sys
import tempfile

DRIVER, PRELOAD = "libcuda.so.1", "libvrambroker-preload.so"


def exported(library):
    lines = subprocess.run(["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True).stdout.splitlines()
    return {line.split()[-1].split("@")[0] for line in lines}


def answers(arguments, driver, preload, folder):
    """Returns {question: answer}, and the program's output."""
    path = os.path.join(folder, "witness")
    environment = {**os.environ, "LD_LIBRARY_PATH": os.path.dirname(driver), "LD_PRELOAD": ":".join(preload), "WITNESS": path,
                   "VRAMBROKER_SOCKET_DIR": os.path.join(folder, "nobody"), "VRAMBROKER_IF_AVAILABLE": "1"}
    if os.path.exists(path):
        os.remove(path)
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=300)
    if done.returncode != 0 or not os.path.exists(path):
        sys.exit(f"{arguments[0]} ended with {done.returncode}\n{done.stdout}{done.stderr}")
    found = {}
    with open(path) as lines:
        for line in lines:
            *question, answer = line.split()
            found[tuple(question)] = answer
    return found, done.stdout


def compare(what, alone, preloaded, hooks):
    """Returns the number of questions, the number of answers with a hook, and a list of faults."""
    wrong, hooked = [], 0
    if set(alone) != set(preloaded):
        wrong += [f"asked only without it: {' '.join(each)}" for each in set(alone) - set(preloaded)]
        wrong += [f"asked only with it: {' '.join(each)}" for each in set(preloaded) - set(alone)]
    for question in sorted(set(alone) & set(preloaded)):
        expected = alone[question]
        library, _, function = expected.partition(":")
        if library == DRIVER and function in hooks:
            expected = f"{PRELOAD}:{function}"
            hooked += 1
        if preloaded[question] != expected:
            wrong.append(f"{' '.join(question)}: {preloaded[question]} instead of {expected}")
    print(f"{what}: {len(alone)} questions, {sum(each != '-' for each in alone.values())} answered, {hooked} of them by hooks, {len(wrong)} wrong")
    return len(alone), hooked, wrong


def main():
    driver, preload, witness, asker, *programs = sys.argv[1:]
    hooks = {name for name in exported(preload) if name.startswith("cu")}
    failures = []
    with tempfile.TemporaryDirectory() as folder:
        names = sorted({each for each in exported(driver) if each.startswith("cu")})
        bases = sorted({name for each in names for name in (each, each.split("_v")[0].split("_pt")[0])})
        for arguments in [[program] for program in programs] + [[asker, *bases, "cudnnCreate", "cuMemAlloc_v3", "cuNoSuchFunction"]]:
            alone, said_alone = answers(arguments, driver, [witness], folder)
            preloaded, said = answers(arguments, driver, [witness, preload], folder)
            what = os.path.basename(arguments[0])
            asked, hooked, wrong = compare(what, alone, preloaded, hooks)
            if said != said_alone:
                wrong.append(f"it printed\n{said}instead of\n{said_alone}")
            # A blind witness would make this test pass without a check.
            if asked < 300 or hooked < 5:
                wrong.append("too few questions: does the witness still see the runtime's?")
            failures += [f"{what}: {each}" for each in wrong]
    print("\n".join(failures))
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
