# SPDX-License-Identifier: Apache-2.0
"""A daemon for tests, and programs in processes of their own. CMakeLists.txt sets the environment."""
import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import unittest

LIBRARY = os.environ["VRAMBROKER_TEST_LIBRARY"]
PYTHON_DIR = os.environ["VRAMBROKER_PYTHON_DIR"]
STANDINS = os.environ["VRAMBROKER_STANDINS"]
HERE = os.path.dirname(os.path.abspath(__file__))
PATIENCE = 600  # seconds; no step takes so long, however slow the machine


class Daemon:
    """Runs vrambrokerd, with its sockets in a folder of its own."""

    def __init__(self, device="host", config="", **environment):
        self.dir = tempfile.mkdtemp(prefix="vrambroker-python-")
        command = [os.environ["VRAMBROKERD"], "--socket_dir=" + self.dir, "--device=" + device, "--capacity=256MiB",
                   "--http_address=off"]
        if config:
            path = os.path.join(self.dir, "config")
            with open(path, "w") as file:
                file.write(config)
            command.append("--config=" + path)
        self._command, self._environment = command, dict(os.environ, **environment)
        self.start()

    def start(self):
        self.process = subprocess.Popen(self._command, stderr=subprocess.PIPE, text=True, env=self._environment)
        log = ""
        for line in self.process.stderr:
            log += line
            if "daemon ready" in line:  # the daemon's last log line before it serves
                self._reader = threading.Thread(target=self.process.stderr.read, daemon=True)  # a full pipe blocks
                self._reader.start()
                return
        raise AssertionError("the daemon does not serve; its log:\n" + log)

    def kill(self):
        self.process.kill()
        self.process.wait()
        self._reader.join()
        self.process.stderr.close()

    def close(self):
        if self.process.returncode is None:
            self.kill()
        shutil.rmtree(self.dir, ignore_errors=True)


def _program(code, daemon, environment):
    text = "import sys; sys.path[:0] = [%r, %r]\n" % (PYTHON_DIR, HERE) + textwrap.dedent(code)
    variables = dict(os.environ, VRAMBROKER_LIBRARY=LIBRARY, **environment)
    if daemon is not None:
        variables["VRAMBROKER_SOCKET_DIR"] = daemon.dir
    if os.environ.get("VRAMBROKER_TEST_PRELOAD"):
        variables["LD_PRELOAD"] = os.environ["VRAMBROKER_TEST_PRELOAD"]
    return [sys.executable, "-c", text], variables


def run(code, daemon=None, **environment):
    """Runs a program in a new process, and returns its output. The program must end with 0."""
    command, variables = _program(code, daemon, environment)
    result = subprocess.run(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            stdin=subprocess.DEVNULL, text=True, timeout=PATIENCE, check=False)
    if result.returncode != 0:
        raise AssertionError("exit code %d\n%s%s" % (result.returncode, result.stdout, result.stderr))
    return result.stdout + result.stderr


class Program:
    """A program in a process of its own that evaluates, or executes, each line from the test in the globals of
    `code`."""

    LOOP = """
import json, traceback
for _line in sys.stdin:
    try:
        try:
            _code = compile(_line.strip(), "told", "eval")
        except SyntaxError:
            exec(_line.strip(), globals())
            _said = {"value": None}
        else:
            _said = {"value": eval(_code, globals())}
        _said = json.dumps(_said, default=str)
    except BaseException as _error:
        _said = json.dumps({"error": "%s: %s" % (type(_error).__name__, _error), "trace": traceback.format_exc()})
    print(_said, flush=True)
"""

    def __init__(self, code, daemon, **environment):
        command, variables = _program(textwrap.dedent(code) + self.LOOP, daemon, environment)
        self.process = subprocess.Popen(command, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.killer = threading.Timer(PATIENCE, self.process.kill)
        self.killer.start()

    def begin(self, line):
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def end(self):
        said = self.process.stdout.readline()
        if not said:
            raise AssertionError("the program has ended, or did not answer in time")
        said = json.loads(said)
        if "error" in said:
            raise ToldError(said["error"], said["trace"])
        return said["value"]

    def tell(self, line):
        self.begin(line)
        return self.end()

    def close(self):
        self.killer.cancel()
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


class ToldError(Exception):
    """A Program's line raised this error. str() gives the error's type and text."""

    def __init__(self, text, trace):
        super().__init__(text)
        self.trace = trace


def wait_for(condition):
    end = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > end:
            raise AssertionError("not so within %d s" % PATIENCE)
        time.sleep(0.01)


class DaemonTest(unittest.TestCase):
    """Gives each test a daemon of its own."""

    CONFIG = ""

    def setUp(self):
        self.daemon = Daemon(config=self.CONFIG)
        self.addCleanup(self.daemon.close)

    def start_program(self, code, **environment):
        program = Program(code, self.daemon, **environment)
        self.addCleanup(program.close)
        return program

    def vramctl(self, *arguments):
        """Returns vramctl's answer, from JSON."""
        result = subprocess.run([os.environ["VRAMCTL"], "--socket-dir", self.daemon.dir, "--format=json", *arguments],
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=PATIENCE, check=False)
        if result.returncode != 0:
            raise AssertionError("vramctl %s: exit code %d\n%s" % (" ".join(arguments), result.returncode, result.stderr))
        return json.loads(result.stdout)

    def session(self, name):
        """Returns the session's figures on the first device."""
        for session in self.vramctl("sessions")["sessions"]:
            if session["name"] == name:
                return session["devices"][0]
        raise AssertionError("no session " + name)

    def run_with_daemon(self, *code, **environment):
        """Runs a program made of parts, each with an indentation of its own."""
        return run("".join(textwrap.dedent(part) for part in code), self.daemon, **environment)
