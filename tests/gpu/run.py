#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks vrambroker on this machine's NVIDIA GPU: run.sh [OPTIONS]. Prints a line per check, and writes a file with all
figures. The run first prints what this machine allows. Checks that need more do not run; all remaining checks run.

Exit codes: 0 all checks that ran are ok; 1 a check failed; 2 wrong use; 3 no check could run, for want of a GPU.
"""
import argparse
import datetime
import fnmatch
import json
import math
import os
import pathlib
import re
import subprocess
import sys
import time

import capabilities
import checks
import compare
import machine
import runner
from runner import Check, Step

HERE = pathlib.Path(__file__).resolve().parent
TOP = HERE.parent.parent  # folder of the source tree, or of the bundle

# The design's assumptions among the probe's findings: (experiment, figure, required value, purpose).
ASSUMED = (
    ("ipc_exporter_killed", "readAfterKill", "data intact", "clients read on after the daemon's death"),
    ("ipc_exporter_killed", "writeAfterKill", "ok", "clients write on after the daemon's death"),
    ("ipc_importer_killed", "exporterData", "intact", "a client's death leaves the daemon's memory as it is"),
    ("kill_inflight_writes", "writesAfterWaitpid", 0, "a dead client's kernels write nothing any more"),
    ("crash_isolation", "owner", "unharmed", "a client's fault stays in its process"),
    ("many_handles", "opened", 1000, "a process can open as many handles as it needs"),
    ("fresh_memory_zero", "", "no old data seen across processes", "new memory has no bytes of other processes"),
    ("cross_uid", "legacyOpen", "ok", "clients may be of other users than the daemon"),
    ("graph_on_imported", "", "graph replay on imported memory works", "CUDA graphs work on the broker's memory"),
)
# Calls of the machine, by device: without these calls a session or its memory cannot exist. The daemon needs no pidfds.
BROKER_NEEDS = {
    "cuda": ("so_peercred", "cuda_context", "cuda_ipc"),
    "host": ("so_peercred", "scm_rights", "memfd_seals"),
}
GROUPS = {"experiments": (*checks.EXPERIMENTS, "probe")}  # groups for --only and --skip
# Proofs that an experiment has worked: (experiment, figure that must be more than 0).
CONTROLS = {"kill_inflight_writes": "aliveDelta100ms"}  # the kernel did write while its process lived


def probe_experiments(outcome):
    found = []
    for e in json.loads((outcome.folder / "probe.json").read_text(encoding="utf-8"))["experiments"]:
        text = e["outcome"]
        answered = not re.match(r"no-agent|failed |skipped|timeout|controller ", text)
        found.append(Check(e["name"], "ok" if answered else "not_run", "no time left" if text == "skipped" else text,
                           "experiment", e.get("figures", {}), seconds=e.get("seconds")))
    return found


def assumed_checks(outcome):
    found = probe_experiments(outcome)
    experiments = {c.name: c for c in found}
    for experiment, figure, wanted, meaning in ASSUMED:
        e = experiments.get(experiment, Check(experiment, "not_run"))
        seen = e.figures.get(figure) if figure else e.detail
        control = CONTROLS.get(experiment)
        if seen is None or e.result != "ok":
            result, detail = "not_run", f"{meaning}: the probe did not find out"
        elif control and not e.figures.get(control, 0) > 0:
            result, detail = "not_run", f"{meaning}: the probe shows nothing: {control} is {e.figures.get(control)!r}"
        else:
            result, detail = "ok" if seen == wanted else "fail", f"{meaning}: {figure or 'outcome'} is {seen!r}"
            if result == "fail":
                detail += f", not {wanted!r}: the design must change (README.md)"
        found.append(Check(f"assumed_{experiment}" + (f"_{figure}" if figure else ""), result, detail))
    return found


def gtest_checks(outcome):
    """Reads the program's printed output: the JSON is missing if the program was cut off, or died."""
    results = {"OK": "ok", "FAILED": "fail", "SKIPPED": "not_run"}
    found, running, text = [], None, []
    for line in (outcome.folder / "output").read_text(encoding="utf-8", errors="replace").splitlines():
        match = re.match(r"\[ +(RUN|OK|FAILED|SKIPPED) +\] ([\w/.]+)(?:, .*)?(?: \((\d+) ms\))?$", line)
        if match and match.group(1) == "RUN":
            running, text = match.group(2), []
        elif match and match.group(2) == running:
            result = results[match.group(1)]
            found.append(Check(running, result, "" if result == "ok" else " ".join(text)[:1000],
                               seconds=int(match.group(3) or 0) / 1000))
            running = None
        elif running:
            text.append(line)
    if running:
        cut_off = outcome.exit_code is None and outcome.short  # the test is not at fault
        found.append(Check(running, "not_run" if cut_off else "fail", "did not end; what came after it was not run: "
                           + " ".join(text)[-800:]))
    return found


def reported_checks(outcome):
    """Reads the report of checks.py and torch_training.py."""
    document = json.loads((outcome.folder / "checks.json").read_text(encoding="utf-8"))
    return [Check(c["name"], c["result"], c.get("detail", ""),
                  c.get("kind", "experiment" if c["name"].startswith("experiment_") else "check"), c.get("figures", {}))
            for c in document["checks"]]


class Programs:
    """Finds the programs of a bundle or of a build, by name."""

    def __init__(self, build_dir):
        if (HERE / "bin").is_dir():
            self.source, self.folders = "bundle", [HERE / "bin"]
        else:
            self.source = "build"
            self.folders = [build_dir / f for f in ("server", "client", "tests/gpu", "tests/unit", "tests/integration")]

    def find(self, name):
        return next((str(f / name) for f in self.folders if (f / name).is_file()), None)

    def environment(self):
        return {"VRAMBROKER_TEST_BIN": str(HERE / "bin")} if self.source == "bundle" else {}

    def library(self):
        places = [TOP / "lib"] if self.source == "bundle" else [self.folders[1] / "c"]
        return next((str(p / "libvrambroker.so.1") for p in places if (p / "libvrambroker.so.1").exists()), None)

    def preload(self):
        places = [TOP / "lib"] if self.source == "bundle" else [self.folders[1] / "preload"]
        return next((str(p / "libvrambroker-preload.so") for p in places if (p / "libvrambroker-preload.so").exists()), None)

    def version(self):
        daemon = self.find("vrambrokerd")
        if daemon is None:
            return {"source": self.source}
        words = subprocess.run([daemon, "--version"], stdout=subprocess.PIPE, check=True).stdout.decode().split()
        return {"version": words[1], "revision": words[2].strip("()"), "source": self.source}


def all_steps(programs, device, patience=1.0, done=None):
    """Returns the steps in their order: first the design's assumptions, last the steps that also hold without a GPU,
    and the experiments that the code does not rely on. `patience`: factor for the time limits of a fast machine.
    `done`: by step, the checks that need no repetition."""
    done = done or {}
    broker = BROKER_NEEDS[device]

    def program(name, step, command, **more):
        path = programs.find(name)
        missing = "" if path else f"there is no program {name}: not built (no nvcc, or no toolkit?), or not in this bundle"
        return Step(step, command=lambda folder, seconds: command(path, folder, seconds), missing=missing, **more)

    def checks_step(name, limit, client_uid=None):
        kind = "check" if name in checks.CHECKS else "experiment"
        command = [sys.executable, "-B", str(HERE / "checks.py"), name, "--device", device, "--programs",
                   *map(str, programs.folders), *([] if client_uid is None else ["--client-uid", str(client_uid)]), "--out"]
        missing = "needs root, for clients of another user" if client_uid is not None and os.geteuid() != 0 else ""
        return Step(checks.step_name(name, client_uid), missing=missing,
                    command=lambda folder, seconds: [*command, str(folder / "checks.json"), "--seconds", str(seconds)],
                    limit=limit * patience, least=20, read=reported_checks, kind=kind,
                    needs=(*broker, *checks.NEEDS.get(name, ())))

    def gtest_step(name, pattern, limit, environment=None):
        without = "".join(f":{test}" for test in sorted(done.get(name, ())))
        return program(name, name, lambda path, folder, seconds: [path, f"--gtest_filter={pattern}-{without[1:]}"],
                       limit=limit * patience, least=20, read=gtest_checks, environment=environment or {}, needs=broker)

    def probe_step(name, read, limit, assumed):
        def command(path, folder, seconds):
            listed = subprocess.run([path, "list"], stdout=subprocess.PIPE, check=False).stdout.decode().splitlines()
            design = {a[0] for a in ASSUMED}
            names = [n for n in (line.split()[0] for line in listed)
                     if (n in design if assumed else (n not in design or steps[0].missing) and n not in done.get(name, ()))]
            return [path, "run", "--only", ",".join(names), "--json", str(folder / "probe.json"),
                    "--budget", str(int(seconds - 3))]
        return program("gpu_probe", name, command, limit=limit * patience, least=20, read=read, kind="experiment",
                       needs=("cuda_context", "cuda_ipc") if assumed else ("cuda_context",))

    checked = [checks_step(name, 40) for name in checks.CHECKS]
    measured = [checks_step(name, 40) for name in checks.EXPERIMENTS]
    others = [checks_step(name, 40, checks.ANOTHER_USER) for name in checks.AS_ANOTHER_USER]
    if device != "cuda":
        torch = Step("torch", missing="needs PyTorch and a GPU; torch_training.py --self-test needs neither")
        return [*checked, torch, *measured, *others]
    steps = [probe_step("assumed", assumed_checks, 90, True), gtest_step("device_test", "*/cuda*", 60), *checked,
             torch_step(programs, done.get("torch", ()), broker),
             unmodified_step(programs, done.get("unmodified", ()), broker), *measured, *others]
    steps.append(gtest_step("memory_promises_test", "*", 300,
                            {"VRAMBROKER_TEST_DEVICE": device, **programs.environment()}))
    steps.append(probe_step("probe", probe_experiments, 150, False))
    return steps


def torch_step(programs, done, needs):
    script = HERE / "torch_training.py"
    missing = ""
    if not script.is_file():
        missing = "there is no torch_training.py here"
    elif not programs.library() or not programs.find("vrambrokerd"):
        missing = "there is no libvrambroker.so.1 or no vrambrokerd here"
    paths = [str(p) for p in (TOP / "python", TOP / "client" / "python", os.environ.get("PYTHONPATH")) if p]
    return Step("torch", command=lambda folder, seconds: [
        sys.executable, "-B", str(script), "--daemon", programs.find("vrambrokerd"), "--library", programs.library(),
        "--out", str(folder / "checks.json"), "--seconds", str(int(seconds * 0.75)), "--skip", ",".join(sorted(done))],
        limit=240, least=40, share=1 / 3, read=reported_checks, missing=missing, needs=needs,
        environment={"PYTHONPATH": os.pathsep.join(paths)})


def unmodified_step(programs, done, needs):
    preload = programs.preload()
    missing = "" if preload and programs.find("vramctl") else "there is no libvrambroker-preload.so or no vramctl here"
    return Step("unmodified", command=lambda folder, seconds: [
        sys.executable, "-B", str(HERE / "unmodified.py"), "--preload", preload, "--programs", *map(str, programs.folders),
        "--out", str(folder / "checks.json"), "--seconds", str(int(seconds * 0.75)), "--skip", ",".join(sorted(done))],
        limit=240, least=40, share=1 / 5, read=reported_checks, missing=missing, needs=needs)


def build():
    """Updates a build of the source tree, and returns its folder: an old build may have another purpose, and lack
    programs."""
    preset = next((p for p in ("release", "ci") if (TOP / "build" / p / "CMakeCache.txt").is_file()), None)
    commands = [["cmake", "--build", "--preset", preset or "release", "--target", "gpu_test_programs"]]
    if preset is None:
        commands = [["deploy/packages.sh", "build"], ["cmake", "--preset", "release"], *commands]
    print(f"building build/{preset or 'release'} (this is not counted in the budget)", flush=True)
    for command in commands:
        if subprocess.run(command, cwd=TOP, check=False).returncode != 0:
            print(f"run.sh: {' '.join(command)} failed. A bundle (deploy/bundle.sh) needs no building.", file=sys.stderr)
            raise SystemExit(2)
    return TOP / "build" / (preset or "release")


def unfit(build_dir):
    """Returns why this build is unfit for a GPU check, or ""."""
    try:
        cache = (build_dir / "CMakeCache.txt").read_text(encoding="utf-8")
    except OSError as error:
        return f"{build_dir} is no build folder: {error}"
    if re.search(r"^VRAMBROKER_SANITIZER:STRING=.", cache, re.MULTILINE):
        return f"{build_dir} was built with sanitizers"
    programs = Programs(build_dir)
    if not programs.find("device_test") or not programs.library():
        return f"{build_dir} lacks device_test or libvrambroker.so.1: build its target gpu_test_programs"
    return ""


def chosen(steps, only, skip):
    """Returns the steps that the options name; SystemExit if a name matches no step."""
    def matches(step, patterns):
        return any(fnmatch.fnmatch(step.name, p) or step.name in GROUPS.get(p, ()) for p in patterns)

    for pattern in (*only, *skip):
        if pattern not in GROUPS and not any(matches(step, [pattern]) for step in steps):
            raise SystemExit(f"run.sh: no step is called {pattern}; the steps: {' '.join(s.name for s in steps)}")
    return [s for s in steps if (not only or matches(s, only)) and not matches(s, skip)]


def unfinished(documents):
    """Returns the steps with a check that is not ok, as a dict of step and its ok checks. Later results win over
    earlier results."""
    results = {}
    for document in documents:
        for step in document["steps"]:
            known = results.setdefault(step, {})
            known.pop(step, None)  # the result of the step as a whole: a later run replaces it
            known.update({c["name"]: c["result"] for c in document["checks"] if c["step"] == step})
    return {step: {name for name, result in known.items() if result == "ok"} for step, known in results.items()
            if not known or any(result != "ok" for result in known.values())}


def patience_for(device, allowed):
    """Returns the factor for time limits: tests start many processes with the GPU, and a start takes seconds on some
    machines."""
    if device != "cuda":
        return 1
    return min(10, max(2, math.ceil(allowed.get("cuda_context", {}).get("seconds", 0))))


def read_results(parser, path):
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if not (isinstance(document, dict) and isinstance(document.get("steps"), list) and "checks" in document):
            raise ValueError("it lacks steps or checks")
    except (OSError, ValueError) as error:
        parser.error(f"{path} is no result file: {error}")
    return document


def main():
    parser = argparse.ArgumentParser(prog="run.sh", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    names = lambda text: [name for name in text.split(",") if name]  # noqa: E731
    parser.add_argument("--only", type=names, default=[], metavar="A,B", help="these steps only; * matches all of a name;\n"
                        "experiments: all of those")
    parser.add_argument("--skip", type=names, default=[], metavar="A,B", help="not these")
    parser.add_argument("--again", type=pathlib.Path, nargs="+", default=[], metavar="FILE",
                        help="only what was not ok in these result files")
    parser.add_argument("--compare", type=pathlib.Path, metavar="FILE", help="say what has changed since this result file,\n"
                        "or since the newest in this folder that has a step in common (default: in results/ here)")
    parser.add_argument("--out", type=pathlib.Path, metavar="FOLDER", help="where the JSON file goes (default: results/ here)")
    parser.add_argument("--budget", type=float, default=480, metavar="SECONDS", help="for everything (default: 480)")
    parser.add_argument("--build-dir", type=pathlib.Path, metavar="DIR", help="use this build of the source tree")
    parser.add_argument("--patience", type=float, metavar="FACTOR", help="how many times the usual time things may take\n"
                        "(default: by how long the first CUDA context takes)")
    parser.add_argument("--anyway", action="store_true", help="also run what needs calls that this machine seems to lack")
    parser.add_argument("--list", action="store_true", help="print the steps and end")
    parser.add_argument("--rehearse", action="store_true", help="without a GPU: run the checks' own logic on the host device,\n"
                        "with threads for kernels. Proves nothing of CUDA.")
    args = parser.parse_args()
    if args.rehearse and args.out is None:
        parser.error("--rehearse needs --out: what it finds is no result")
    device = "host" if args.rehearse else "cuda"
    again = [read_results(parser, path) for path in args.again]
    before = read_results(parser, args.compare) if args.compare and not args.compare.is_dir() else None
    for document in again:
        if document.get("device") != device:
            parser.error(f"--again: a result of the device {document.get('device')} says nothing about {device}")
    gpu, allowed, begin = {"name": "rehearsal"}, {}, time.monotonic()
    if not args.list:
        gpu = gpu if args.rehearse else machine.gpu()
        allowed = capabilities.ask(device == "cuda" and "error" not in gpu, capabilities.say)
    asking = time.monotonic() - begin
    bundled = (HERE / "bin").is_dir()
    build_dir = args.build_dir
    if build_dir is None and not bundled:
        # Without a GPU no step runs, so no build is needed.
        build_dir = TOP / "build" / "release" if args.list or "error" in gpu else build()
    if device == "cuda" and not bundled and not args.list and "error" not in gpu:
        why = unfit(build_dir)
        if why:
            parser.error(why)
    programs = Programs(build_dir)
    patience = args.patience or patience_for(device, allowed)
    done = unfinished(again)
    steps = chosen(all_steps(programs, device, patience, done), args.only, args.skip)
    if again:
        steps = [step for step in steps if step.name in done]
        if not steps:
            print("run.sh: everything was ok in these results")
            return 0
    if len(steps) == 1:
        steps[0].limit = max(args.budget - 2, 1)  # the only step has the budget alone; a longer run has failed
    if args.list:
        print("\n".join(step.name for step in steps))
        return 0

    for step in steps:
        step.environment = {**step.environment, "VRAMBROKER_TEST_PATIENCE": f"{patience:g}"}
        if "error" in gpu:
            step.missing = f"no GPU: {gpu['error']}"
        elif not args.anyway:
            step.missing = step.missing or capabilities.missing(allowed, step.needs)
    now = datetime.datetime.now(datetime.timezone.utc)
    head = {"format": 1, "started": now.isoformat(timespec="seconds"), "device": device, "gpu": gpu,
            "machine": machine.description(), "allowed": list(allowed.values()), "patience": patience,
            "vrambroker": programs.version(), "budget_seconds": args.budget, "steps": [step.name for step in steps]}
    name = re.sub(r"[^A-Za-z0-9]+", "-", "no GPU" if "error" in gpu else gpu["name"]).strip("-").lower()
    folder = args.out or (None if "error" in gpu else HERE / "results")  # no GPU: a file only with --out
    path = folder and folder / f"{now:%Y-%m-%d-%H%M%S}-{name}.json"
    results = runner.Results(path, head)
    if "error" not in gpu:
        print(f"{gpu['name']}, driver {gpu.get('driver', '-')}, vrambroker {head['vrambroker'].get('revision', '-')}, "
              f"patience {patience:g}", flush=True)
    code = runner.run(steps, args.budget - asking, results)
    print(f"\n{results.count('ok')} ok, {results.count('fail')} failed, {results.count('not_run')} not run"
          + (f"; {path}" if path else ""))
    if "error" in gpu:
        print(f"run.sh: nothing was run, for want of a GPU: {gpu['error']}", file=sys.stderr)
    elif before:
        compare.say(args.compare, before, results.document(complete=True))
    else:
        compare.say_against_newest([args.compare] if args.compare else [folder, HERE / "results"], path,
                                   results.document(complete=True))
    return code


if __name__ == "__main__":
    sys.exit(main())
