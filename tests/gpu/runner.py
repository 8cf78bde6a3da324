# SPDX-License-Identifier: Apache-2.0
"""Runs steps in sequence within a time budget, and keeps the steps' findings in a file, whatever happens to a step.

A step is a program that ends by itself; a step may report several findings ("checks"). The runner knows nothing of
GPUs.
"""
import ctypes
import dataclasses
import datetime
import json
import os
import pathlib
import signal
import subprocess
import tempfile
import time
from typing import Callable, Dict, List, Optional, Tuple

RESULTS = ("ok", "fail", "not_run")
# "check": without ok the run has failed. "experiment": any fact is fine; without an answer the experiment is not run.
KINDS = ("check", "experiment")

_libc = ctypes.CDLL(None)


def die_with_parent():
    """Makes a new child process end with its parent, even if SIGKILL ends the parent."""
    _libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _begin_step():
    os.setpgrp()
    die_with_parent()


END_PATIENCE = 15.0  # seconds for a killed process to end


def _stat(pid) -> Optional[List[str]]:
    """Returns the fields of /proc/PID/stat from the state on: state, parent, process group, ...; None without a
    process."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return None


def _why_alive(pid: int) -> str:
    stat = _stat(pid)
    try:
        where = pathlib.Path(f"/proc/{pid}/wchan").read_text(encoding="utf-8").strip("0\n")
    except OSError:
        where = ""
    return f"process {pid} cannot be ended: state {stat[0] if stat else '?'}" + (f", in {where}" if where else "")


def end(process: subprocess.Popen) -> str:
    """Kills the process, and waits for its end. Returns "", or why the process lives on: a process in a driver call
    that never returns cannot be killed, and must not hold up the run."""
    process.kill()
    try:
        process.wait(timeout=END_PATIENCE)
    except subprocess.TimeoutExpired:
        return _why_alive(process.pid)
    return ""


def _end_group(process: subprocess.Popen) -> str:
    """Ends a step and all processes in the step's process group, like end()."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    until = time.monotonic() + END_PATIENCE
    while True:
        process.poll()
        alive = []
        for entry in os.listdir("/proc"):
            stat = _stat(entry) if entry.isdigit() else None
            if stat and stat[2] == str(process.pid) and stat[0] not in "ZX":
                alive.append(int(entry))
        if not alive and process.returncode is not None:
            return ""
        if time.monotonic() > until:
            return "; ".join(_why_alive(pid) for pid in alive or [process.pid])
        time.sleep(0.01)


@dataclasses.dataclass
class Check:
    name: str
    result: str
    detail: str = ""
    kind: str = "check"
    figures: Dict = dataclasses.field(default_factory=dict)
    step: str = ""
    seconds: Optional[float] = None
    output: str = ""  # end of the program's output after a failure


@dataclasses.dataclass
class Outcome:
    """Tells how a step's program ended."""
    exit_code: Optional[int]  # negative: the signal; None: out of time
    seconds: float
    output: str  # end of the program's output
    folder: pathlib.Path  # folder for the program's files
    short: bool = False  # the budget left the step less time than its limit
    stuck: str = ""  # the processes that could not be ended


@dataclasses.dataclass
class Step:
    name: str
    # Makes the command line from a folder for results and the seconds left. None: `missing` says why.
    command: Optional[Callable[[pathlib.Path, float], List[str]]] = None
    limit: float = 60  # seconds
    least: float = 5  # with less time left the step does not begin
    share: float = 0  # share of the budget that earlier steps leave to this step
    environment: Dict[str, str] = dataclasses.field(default_factory=dict)
    # Reads the step's findings. May raise: then the findings are unreadable.
    read: Callable[[Outcome], List[Check]] = lambda outcome: []
    missing: str = ""  # why the step cannot run at all
    needs: Tuple[str, ...] = ()  # needs of the step, by the names in capabilities.py
    kind: str = "check"  # kind of the step itself, for a report that the step did not work


class Results:
    """The result file. Each step rewrites the file, in a single piece."""

    def __init__(self, path: Optional[pathlib.Path], head: Dict):
        self.path = path
        self.head = head
        self.checks: List[Check] = []
        self.started = time.monotonic()

    def add(self, check: Check) -> None:
        if check.result not in RESULTS or check.kind not in KINDS:
            check = dataclasses.replace(check, result="fail", kind="check",
                                        detail=f"bad result {check.result!r} of kind {check.kind!r}: {check.detail}")
        self.checks.append(check)

    def count(self, result: str, kind: Optional[str] = None) -> int:
        return sum(c.result == result and kind in (None, c.kind) for c in self.checks)

    def document(self, complete: bool) -> Dict:
        document = dict(self.head)
        document["complete"] = complete
        document["seconds"] = round(time.monotonic() - self.started, 1)
        document["summary"] = {result: self.count(result) for result in RESULTS}
        document["checks"] = [{k: v for k, v in dataclasses.asdict(c).items() if v not in ("", {}, None)}
                              for c in self.checks]
        return document

    def save(self, complete: bool) -> None:
        if self.path is None:
            return
        document = self.document(complete)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        os.replace(part, self.path)

    def exit_code(self) -> int:
        if self.count("fail"):
            return 1
        return 0 if self.count("ok") else 3


def execute(step: Step, seconds: float, folder: pathlib.Path) -> Outcome:
    """Runs the step's program. At the return all processes of the step's process group have ended, or cannot be
    ended."""
    log = folder / "output"
    started = time.monotonic()
    stuck = ""
    with log.open("wb") as output:
        process = subprocess.Popen(step.command(folder, seconds), stdin=subprocess.DEVNULL, stdout=output,
                                   stderr=subprocess.STDOUT, preexec_fn=_begin_step,
                                   env={**os.environ, **step.environment})
        try:
            exit_code = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            exit_code = None
        finally:
            seconds_run = time.monotonic() - started
            stuck = _end_group(process)
    text = log.read_text(encoding="utf-8", errors="replace")
    return Outcome(exit_code, seconds_run, text[-4000:], folder, seconds < step.limit, stuck)


def find_out(step: Step, seconds: float) -> List[Check]:
    """Runs a step and returns its findings: at least a check, and a failed check unless all went well."""
    with tempfile.TemporaryDirectory(prefix="vrambroker-gpu-") as name:
        folder = pathlib.Path(name)
        os.chmod(folder, 0o755)
        try:
            outcome = execute(step, seconds, folder)
        except OSError as error:
            return [Check(step.name, "fail", f"could not be started: {error}")]
        try:
            checks = step.read(outcome)
        except Exception as error:  # the file is missing, cut off, or in another format
            checks = []
            unreadable = f"its results cannot be read: {type(error).__name__}: {error}"
        else:
            unreadable = "" if checks else "it said nothing"
    for check in checks:
        check.step = step.name
    wrong, result = "", "not_run" if step.kind == "experiment" else "fail"
    if outcome.exit_code is None:
        wrong = f"did not end within {seconds:.0f} s"
        if outcome.short:  # the step is not at fault
            wrong, result = f"no time left: {wrong}, of {step.limit:.0f} s that it may take", "not_run"
    elif outcome.exit_code < 0:
        wrong = f"died by signal {-outcome.exit_code} ({signal.Signals(-outcome.exit_code).name})"
    elif unreadable:
        wrong = f"{unreadable} (exit code {outcome.exit_code})"
    elif outcome.exit_code != 0 and not any(c.result == "fail" for c in checks):
        wrong = f"ended with exit code {outcome.exit_code}"
    if wrong:
        checks.append(Check(step.name, result, wrong, step.kind, step=step.name, output=outcome.output))
    for check in checks:
        if check.result == "fail" and not check.output:
            check.output = outcome.output
    if len(checks) == 1:
        checks[0].seconds = round(outcome.seconds, 1)
    if outcome.stuck:
        checks.append(Check("left_behind", "ok", f"the run goes on without it: {outcome.stuck}", "experiment", step=step.name))
    return checks


def say(check: Check) -> None:
    name = check.name if check.step in ("", check.name) else f"{check.step}/{check.name}"
    seconds = "" if check.seconds is None else f"{check.seconds:.1f} s"
    text = " ".join(check.detail.split())
    print(f"{check.result.replace('_', ' '):7}  {name:44} {seconds:>7}  {text[:300]}", flush=True)


def run(steps: List[Step], budget: float, results: Results) -> int:
    """Runs the steps; returns the exit code: 0 all ok, 1 a check failed, 3 no step ran."""
    end = time.monotonic() + budget

    def stop(signum, frame):
        raise SystemExit(128 + signum)

    handlers = {s: signal.signal(s, stop) for s in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        for i, step in enumerate(steps):
            kept = budget * sum(later.share for later in steps[i + 1:] if not later.missing)
            left = end - kept - time.monotonic() - 1  # a second to end hanging processes
            if step.missing:
                found = [Check(step.name, "not_run", step.missing, step.kind, step=step.name)]
            elif left < step.least:
                found = [Check(step.name, "not_run", f"no time left: {max(left, 0):.0f} s of {budget:.0f} s", step.kind,
                               step=step.name)]
            else:
                found = find_out(step, min(step.limit, left))
            for check in found:
                results.add(check)
                say(results.checks[-1])
            results.save(complete=False)
    finally:
        for s, handler in handlers.items():
            signal.signal(s, handler)
    results.head["finished"] = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    results.save(complete=True)
    return results.exit_code()
