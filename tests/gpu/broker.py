# SPDX-License-Identifier: Apache-2.0
"""A daemon and clients for the checks. The daemon and the clients end with the process."""
import atexit
import contextlib
import json
import os
import pathlib
import select
import shutil
import signal
import subprocess
import tempfile
import time

import runner
from runner import die_with_parent

MIB = 1 << 20
GIB = 1 << 30
# Multiplies the usual time limits; run.py knows the machine's factor.
PATIENCE = float(os.environ.get("VRAMBROKER_TEST_PATIENCE") or 1)


class Failed(Exception):
    """The check has failed; the text says why."""


class NotRun(Exception):
    """The check cannot run here; the text says why."""


class Refused(Exception):
    """A client's command ended in an error."""

    def __init__(self, code, message):
        super().__init__(f"{code}: {message}")
        self.code = code


def expect(condition, text):
    if not condition:
        raise Failed(text)


def now_us():
    return time.clock_gettime(time.CLOCK_MONOTONIC) * 1e6


def wait_for(condition, what, seconds=20):
    seconds *= PATIENCE
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise Failed(f"{what}: not within {seconds:g} s")
        time.sleep(0.01)


def start(command, environment):
    """Starts a program for a check, with pipes to and from the program. The program ends with this process."""
    process = subprocess.Popen(command, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=_environment(environment),
                               preexec_fn=_begin_client)
    _processes.append(process)
    return process


@atexit.register
def end_all():
    """Ends all running daemons and clients."""
    for pid in _others:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for process in reversed(_processes):  # clients before their daemons
        if process.stdin is not None:
            process.stdin.close()  # a program that waits at the end of `vramctl run` ends by itself
        stuck = runner.end(process)
        if stuck:
            print(stuck, flush=True)
    for folder in _folders:
        shutil.rmtree(folder, ignore_errors=True)
    for list_of in (_others, _processes, _folders, _daemons):
        list_of.clear()


client_uid = None  # user of the clients; None: the daemon's user

_processes = []
_others = []  # processes started by clients
_folders = []
_daemons = []


def print_logs():
    """Prints the end of each daemon's log, to find the reason of a failed check."""
    for daemon in _daemons:
        print(f"---- log of the daemon {daemon.process.pid}:\n{daemon.log()[-1500:]}", flush=True)


def visible_gpus():
    """Returns the GPUs that the checks may use, by CUDA_VISIBLE_DEVICES' names. The machine may have fewer."""
    return [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",") if name]


def _environment(more):
    # All processes see the same GPU: a check looks at the first device of each daemon.
    return {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(visible_gpus()[:1]), **(more or {})}


def _begin_client():
    """Prepares a new child process."""
    if client_uid is not None:
        os.setgroups([])
        os.setgid(client_uid)
        os.setuid(client_uid)
    die_with_parent()  # last: the kernel clears the setting when a process changes its user


class Programs:
    """`folders`: folders of the programs. `device`: "cuda", or "host" in a rehearsal."""

    def __init__(self, folders, device):
        self.folders = [pathlib.Path(f) for f in folders]
        self.device = device

    def find(self, name):
        for folder in self.folders:
            if (folder / name).is_file():
                return str(folder / name)
        raise NotRun(f"there is no program {name}: not built, or not in this bundle")


class Daemon:
    def __init__(self, programs, capacity=None, config="", environment=None):
        self.programs = programs
        self.folder = tempfile.mkdtemp(prefix="vrambroker-")
        _folders.append(self.folder)
        os.chmod(self.folder, 0o755)
        self._command = [programs.find("vrambrokerd"), f"--config={self.folder}/config", f"--socket_dir={self.folder}",
                         f"--device={programs.device}", "--http_address=off"]
        if capacity is not None:
            self._command.append(f"--capacity={capacity}")
        mode = "" if client_uid is None else 'socket_mode: "0666"\n'
        pathlib.Path(self.folder, "config").write_text('drain_timeout: "500ms"\n' + mode + config, encoding="utf-8")
        self._environment = _environment(environment)
        self.process = None
        self.start()
        _daemons.append(self)

    def start(self):
        with open(f"{self.folder}/log", "wb") as log:
            self.process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                            env=self._environment, preexec_fn=die_with_parent)
        _processes.append(self.process)
        print(f"daemon {self.process.pid}", flush=True)
        wait_for(lambda: "daemon ready" in self.log() or self.process.poll() is not None, "the daemon is ready")
        if self.process.poll() is not None:
            raise Failed(f"the daemon does not start: {' | '.join(self.log().splitlines()[-3:])}")

    def log(self):
        return pathlib.Path(self.folder, "log").read_text(encoding="utf-8", errors="replace")

    def kill(self):
        _end(self.process, "the daemon")

    def ctl(self, *arguments):
        """Returns the output of `vramctl ARGUMENTS --format=json`; raises Failed after a refusal."""
        try:
            done = subprocess.run([self.programs.find("vramctl"), *arguments, f"--socket_dir={self.folder}", "--format=json"],
                                  stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=30 * PATIENCE, check=False)
        except subprocess.TimeoutExpired:
            raise Failed(f"vramctl {' '.join(arguments)}: no answer within {30 * PATIENCE:g} s") from None
        if done.returncode != 0:
            raise Failed(f"vramctl {' '.join(arguments)}: {done.stderr.decode().strip()}")
        return json.loads(done.stdout or b"{}")

    def device(self):
        return self.ctl("status")["devices"][0]

    def held(self):
        """Returns the bytes that sessions hold or dead sessions left, without the bytes that the daemon keeps for
        reuse."""
        device = self.device()
        return device["reserved_bytes"] - device["idle_bytes"]


def _end(process, what):
    stuck = runner.end(process)
    if stuck:
        raise Failed(f"{what} was killed: {stuck}")


class Lines:
    """Reads a program's output, a line at a time."""

    def __init__(self, process, name):
        self._process, self._name, self._unread = process, name, b""

    def ready(self, seconds=0):
        """Tells whether next() would return at once."""
        return b"\n" in self._unread or bool(select.select([self._process.stdout], [], [], seconds)[0])

    def next(self, seconds):
        seconds *= PATIENCE
        end = time.monotonic() + seconds
        while b"\n" not in self._unread:
            if not self.ready(max(end - time.monotonic(), 0)):
                raise Failed(f"{self._name} does not answer within {seconds:g} s")
            piece = os.read(self._process.stdout.fileno(), 65536)
            if not piece:
                raise Failed(f"{self._name} has ended: exit code {self._process.wait()}")
            self._unread += piece
        line, self._unread = self._unread.split(b"\n", 1)
        return line


class Client:
    """A gpu_client. Its commands are methods: client.malloc(bytes=4096)["block"]. `under`: a program that runs the
    client."""

    def __init__(self, daemon, name, environment=None, under=(), **options):
        self.name = name
        programs = daemon.programs
        program = programs.find("gpu_client" if programs.device == "cuda" else "gpu_client_host")
        try:
            self.process = subprocess.Popen(
                [*under, program], bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                env={**_environment(environment), "VRAMBROKER_SOCKET_DIR": daemon.folder, "CUDA_MODULE_LOADING": "EAGER"},
                preexec_fn=_begin_client)
        except PermissionError as error:
            raise NotRun(f"uid {client_uid} may not run {program}: {error}") from None
        _processes.append(self.process)
        self._said = ""
        self._lines = Lines(self.process, f"client {name}")
        self.terms = self.connect(name=name, **options)

    def __getattr__(self, command):
        if command.startswith("_"):
            raise AttributeError(command)
        return lambda **arguments: self.call(command, **arguments)

    def call(self, command, **arguments):
        self.send(command, **arguments)
        return self.receive()

    def send(self, command, **arguments):
        if command != self._said:  # shows the check's progress; a repeated command appears once
            print(f"{self.name}: {command} {arguments}", flush=True)
            self._said = command
        try:
            self.process.stdin.write(json.dumps({"do": command, **arguments}).encode() + b"\n")
        except BrokenPipeError:
            raise Failed(f"client {self.name} has ended: exit code {self.process.wait()}") from None

    def answered(self, seconds=0):
        """Tells whether receive() would return at once."""
        return self._lines.ready(seconds)

    def receive(self, seconds=20):
        answer = json.loads(self._lines.next(seconds))
        if answer.pop("ok"):
            return answer
        if answer["code"] == "NEEDS_GPU":
            raise NotRun(f"needs {answer['message']}")
        raise Refused(answer["code"], answer["message"])

    def refusal(self, command, **arguments):
        """Returns the error that the command must end in."""
        try:
            self.call(command, **arguments)
        except Refused as refused:
            return refused
        raise Failed(f"client {self.name}: {command} {arguments} was not refused")

    def kill(self):
        """Kills the client, and returns when the process has ended."""
        _end(self.process, f"client {self.name}")

    def fork(self):
        """Forks an idle child of the client that outlives the client, and returns the child's pid."""
        pid = self.fork_child()["pid"]
        _others.append(pid)
        return pid

    def expect_holds(self, block, seed, text):
        content = self.look(block=block, seed=seed)
        expect(content["equal"] == content["words"],
               f"{text}: {content['words'] - content['equal']} of {content['words']} words are not what client {self.name} "
               "wrote")
