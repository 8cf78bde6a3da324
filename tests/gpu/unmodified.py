#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Unchanged PyTorch under `vramctl run`: unmodified.py --out FILE --programs FOLDER... --preload LIBRARY [--skip A,B].

Each check is a function that starts a daemon, and programs that know nothing of the daemon (unmodified_program.py). A
check returns (detail, figures), and raises Failed or NotRun. README.md says what each check proves.
"""
import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
import traceback

import broker
from broker import GIB, MIB, PATIENCE, Daemon, Failed, NotRun, Programs, expect, print_logs, wait_for

HERE = pathlib.Path(__file__).resolve().parent
CAPACITY = 6 * GIB
LIMIT = 2 * GIB
PIECE = 64 * MIB
# Largest rounding by the driver's pools and PyTorch.
ROUNDING = 256 * MIB
TWO_GPUS = {"CUDA_VISIBLE_DEVICES": ",".join(broker.visible_gpus()[:2])}  # the first two GPUs
START = 120  # seconds, to import PyTorch and to start CUDA


class Program:
    """Runs unmodified_program.py, under `vramctl run` or (daemon None) by itself. The program ends with this
    process."""

    def __init__(self, settings, daemon, name, task, arguments=None, options=(), environment=None):
        command = [sys.executable, "-B", str(HERE / "unmodified_program.py"), task, json.dumps(arguments or {})]
        if daemon is not None:
            command = [settings.programs.find("vramctl"), "run", f"--socket_dir={daemon.folder}", f"--name={name}", *options,
                       "--", *command]
        self.name = name
        self.process = broker.start(command, {"VRAMBROKER_PRELOAD": settings.preload, "PYTORCH_CUDA_ALLOC_CONF": "",
                                              **(environment or {})})
        self._lines = broker.Lines(self.process, f"program {name}")

    def hear(self, seconds=START):
        """Returns the program's next finding."""
        line = self._lines.next(seconds)
        print(f"{self.name}: {line.decode()[:300]}", flush=True)
        seen = json.loads(line)
        if "missing" in seen:
            raise NotRun(seen["missing"])
        return seen

    def go_on(self):
        try:
            self.process.stdin.write(b"\n")
        except BrokenPipeError:
            raise Failed(f"program {self.name} has ended: exit code {self.process.wait()}") from None

    def end(self):
        """Lets the program go on to its end, and expects exit code 0."""
        self.process.stdin.close()
        code = self.process.wait(timeout=START * PATIENCE)
        expect(code == 0, f"program {self.name} has ended with exit code {code}")


def all_is_back(daemon):
    wait_for(lambda: daemon.held() == 0, "all memory of ended programs is given back")


def limit_option(limit=LIMIT):
    return [f"--limit={limit}"]


def hold(daemon, program, size):
    """Waits until the program holds `size`, checks that the daemon charges `size`, and returns the program's pid."""
    program.hear()
    pid = program.hear()["pid"]
    held = daemon.held()
    expect(held >= size, f"{program.name} holds {size}, and {held} are charged")
    return pid


# ---- Sizes ----

def sizes(settings):
    """Two programs size themselves at the same moment: each program sees its limit, whatever the neighbour does."""
    daemon = Daemon(settings.programs, CAPACITY)
    both = [Program(settings, daemon, name, "sizes", options=limit_option()) for name in ("first", "second")]
    for program in both:
        seen = program.hear()
        expect(seen["total"] == LIMIT, f"mem_get_info() of {program.name} says a total of {seen['total']}, not {LIMIT}")
        expect(seen["properties"] == LIMIT, f"total_memory of {program.name} is {seen['properties']}, not {LIMIT}")
        expect(LIMIT - ROUNDING <= seen["free"] <= LIMIT, f"mem_get_info() of {program.name} says {seen['free']} are free")
    neighbour = Program(settings, daemon, "neighbour", "hold", {"size": LIMIT // 2}, limit_option())
    hold(daemon, neighbour, LIMIT // 2)
    for program in both:
        program.go_on()
        seen = program.hear()
        expect(LIMIT - ROUNDING <= seen["free"] <= LIMIT, f"{program.name} sees what its neighbour holds: {seen['free']} are free")
    return "total is the limit, free does not know of neighbours", {}


# ---- Limits, by PyTorch's ways to get memory ----

def fill(settings, conf):
    daemon = Daemon(settings.programs, CAPACITY)
    program = Program(settings, daemon, "filler", "fill", {"piece": PIECE}, limit_option(),
                      {"PYTORCH_CUDA_ALLOC_CONF": conf})
    first = program.hear()
    expect(LIMIT - ROUNDING <= first["bytes"] <= LIMIT, f"a limit of {LIMIT} was reached at {first['bytes']}")
    charged = daemon.device()["reserved_bytes"]
    expect(first["bytes"] <= charged <= LIMIT, f"it has {first['bytes']}, and is charged {charged}")
    program.go_on()
    second = program.hear()
    expect(abs(second["bytes"] - first["bytes"]) <= ROUNDING,
           f"after half was given back it got {second['bytes']}, and {first['bytes']} before")
    program.end()
    all_is_back(daemon)
    return f"reached at {first['bytes'] >> 20} MiB of {LIMIT >> 20}: {first['refusal'][:120]}", {"bytes": first["bytes"]}


def limit(settings):
    """Checks PyTorch's own allocator, by cudaMalloc."""
    return fill(settings, "")


def limit_malloc_async(settings):
    return fill(settings, "backend:cudaMallocAsync")


def limit_expandable_segments(settings):
    return fill(settings, "expandable_segments:True")


def cuda_graph(settings):
    """Checks that a captured graph runs, and that its memory is charged and given back."""
    daemon = Daemon(settings.programs, CAPACITY)
    program = Program(settings, daemon, "graph", "graph", {"size": PIECE}, limit_option())
    seen = program.hear()
    expect(not seen["wrong"], seen["wrong"])
    expect(daemon.held() >= PIECE, f"the graph's tensors are {PIECE} and more; charged are {daemon.held()}")
    program.end()
    all_is_back(daemon)
    return "captured and replayed", {}


def all_reduce(settings):
    """Checks NCCL between two GPUs."""
    if settings.gpus < 2:
        raise NotRun("needs two GPUs")
    daemon = Daemon(settings.programs, CAPACITY, environment=TWO_GPUS)
    program = Program(settings, daemon, "ranks", "all_reduce", {"size": PIECE}, limit_option(), TWO_GPUS)
    seen = program.hear(2 * START)
    expect(not seen["wrong"], seen["wrong"])
    program.end()
    all_is_back(daemon)
    return "two ranks, two GPUs", {}


# ---- Together ----

def waits(settings):
    """A program with --wait gets its memory when the holder gives its memory back."""
    daemon = Daemon(settings.programs, CAPACITY)
    size = CAPACITY * 2 // 3
    holder = Program(settings, daemon, "holder", "hold", {"size": size}, limit_option(CAPACITY))
    hold(daemon, holder, size)
    waiter = Program(settings, daemon, "waiter", "hold", {"size": size}, [*limit_option(CAPACITY), "--wait=10m"])
    waiter.hear()

    def is_waiting():
        return any(device["waiting"] for session in daemon.ctl("sessions")["sessions"] for device in session["devices"])

    wait_for(is_waiting, "the second program waits", START)
    holder.go_on()
    holder.hear()
    got = waiter.hear()
    expect(got["bytes"] == size, f"it got {got['bytes']}")
    return "served when the other one gave it back", {}


def killed(settings):
    """kill -9 of a program: the program's memory is free at once."""
    daemon = Daemon(settings.programs, CAPACITY)
    program = Program(settings, daemon, "victim", "hold", {"size": LIMIT}, limit_option())
    os.kill(hold(daemon, program, LIMIT), 9)
    all_is_back(daemon)
    again = Program(settings, daemon, "next", "hold", {"size": LIMIT}, limit_option())
    hold(daemon, again, LIMIT)
    return "given back, and had again", {}


def charged_is_used(settings):
    """NVML reports as a program's use: the charged bytes, and the program's context."""
    daemon = Daemon(settings.programs, CAPACITY)
    program = Program(settings, daemon, "holder", "hold", {"size": LIMIT}, limit_option())
    pid = hold(daemon, program, LIMIT)
    found = []
    try:  # a daemon has no report right after its start
        wait_for(lambda: not daemon.device()["processes_fault"], "the daemon knows what processes use", 5)
    except Failed:
        raise NotRun(f"what processes use is not known: {daemon.device()['processes_fault']}") from None

    def is_found():
        found[:] = [p for p in daemon.device()["processes"] if p["pid"] == pid and p["used_bytes"] >= LIMIT]
        return bool(found)

    wait_for(is_found, "the driver tells what the program uses", 30)
    process, = found
    expect(process["kind"] == "client", f"it is {process['kind']}")
    expect(process["drift_bytes"] == 0, f"it uses {process['used_bytes']}, is charged {process['charged_bytes']}")
    return f"overhead {process['overhead_bytes'] >> 20} MiB", {"overhead_bytes": process["overhead_bytes"]}


def cost(settings):
    """Measures the microseconds that the broker adds to a round of memory from the driver and back."""
    daemon = Daemon(settings.programs, CAPACITY)
    arguments = {"size": PIECE, "rounds": 100}
    medians = {}
    for name, where in (("alone", None), ("counted", daemon)):
        program = Program(settings, where, name, "cost", arguments, limit_option())
        medians[name] = statistics.median(program.hear()["times"][10:]) * 1e6
    return (f"{medians['counted']:.0f} us for 64 MiB and back, {medians['alone']:.0f} us without",
            {"counted_us": medians["counted"], "alone_us": medians["alone"]})


CHECKS = {check.__name__: check for check in (sizes, limit, limit_malloc_async, limit_expandable_segments, cuda_graph, waits,
                                             killed, charged_is_used, all_reduce)}
EXPERIMENTS = {"experiment_cost": cost}


class Settings:
    def __init__(self, programs, preload):
        self.programs = programs
        self.preload = preload
        self.gpus = 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--programs", nargs="+", required=True)
    parser.add_argument("--preload", required=True, help="libvrambroker-preload.so")
    parser.add_argument("--skip", default="", help="names of checks, with commas between")
    parser.add_argument("--seconds", type=float, default=240, help="begin no check after so many")
    args = parser.parse_args()
    end = time.monotonic() + args.seconds
    settings = Settings(Programs(args.programs, "cuda"), args.preload)
    skipped, found = args.skip.split(","), []
    try:
        seen = Program(settings, None, "probe", "probe", environment=TWO_GPUS).hear()
        settings.gpus = seen["gpus"]
        nothing = "" if settings.gpus else f"no GPU: PyTorch {seen['torch']} sees none"
    except (Failed, NotRun) as why:
        nothing = str(why)
    for name, check in {**CHECKS, **EXPERIMENTS}.items():
        if name in skipped:
            continue
        kind = "check" if name in CHECKS else "experiment"
        result = {"name": name, "kind": kind, "result": "ok"}
        try:
            if nothing or time.monotonic() > end:
                raise NotRun(nothing or f"no time left: {args.seconds:.0f} s were given")
            result["detail"], result["figures"] = check(settings)
        except NotRun as why:
            result.update(result="not_run", detail=str(why))
        except (Failed, subprocess.TimeoutExpired) as why:
            result.update(result="fail" if kind == "check" else "not_run", detail=str(why))
            traceback.print_exc()
            print_logs()
        broker.end_all()
        found.append(result)
        # Writes the file after each check: the findings stay if the rest takes too long.
        args.out.write_text(json.dumps({"checks": found}), encoding="utf-8")
    return 1 if any(result["result"] == "fail" for result in found) else 0


if __name__ == "__main__":
    raise SystemExit(main())
