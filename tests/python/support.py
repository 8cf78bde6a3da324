# SPDX-License-Identifier: Apache-2.0
"""A daemon for tests, and programs in processes of their own. The environment is set by CMakeLists.txt."""
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import threading
import unittest

LIBRARY = os.environ["VRAMBROKER_TEST_LIBRARY"]
PYTHON_DIR = os.environ["VRAMBROKER_PYTHON_DIR"]
STANDINS = os.environ["VRAMBROKER_STANDINS"]
HERE = os.path.dirname(os.path.abspath(__file__))
PATIENCE = 120  # seconds


class Daemon:
    """vrambrokerd, with its sockets in a folder of its own."""

    def __init__(self, device="host", **environment):
        self.dir = tempfile.mkdtemp(prefix="vrambroker-python-")
        command = [os.environ["VRAMBROKERD"], "--socket_dir=" + self.dir, "--device=" + device, "--capacity=256MiB",
                   "--http_address=off"]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=dict(os.environ, **environment))
        log = ""
        for line in self.process.stderr:
            log += line
            if "daemon ready" in line:  # the last thing that it says before it serves
                threading.Thread(target=self.process.stderr.read, daemon=True).start()  # a full pipe would hold it up
                return
        raise AssertionError("the daemon does not serve; its log:\n" + log)

    def kill(self):
        self.process.kill()
        self.process.wait()

    def close(self):
        if self.process.returncode is None:
            self.kill()
        shutil.rmtree(self.dir, ignore_errors=True)


def run(code, daemon=None, **environment):
    """Runs a program in a new process, and returns what it printed. It must end with 0."""
    text = "import sys; sys.path[:0] = [%r, %r]\n" % (PYTHON_DIR, HERE) + textwrap.dedent(code)
    variables = dict(os.environ, VRAMBROKER_LIBRARY=LIBRARY, **environment)
    if daemon is not None:
        variables["VRAMBROKER_SOCKET_DIR"] = daemon.dir
    if os.environ.get("VRAMBROKER_TEST_PRELOAD"):
        variables["LD_PRELOAD"] = os.environ["VRAMBROKER_TEST_PRELOAD"]
    result = subprocess.run([sys.executable, "-c", text], env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            stdin=subprocess.DEVNULL, text=True, timeout=PATIENCE, check=False)
    if result.returncode != 0:
        raise AssertionError("exit code %d\n%s%s" % (result.returncode, result.stdout, result.stderr))
    return result.stdout + result.stderr


class DaemonTest(unittest.TestCase):
    """Each test has a daemon of its own."""

    def setUp(self):
        self.daemon = Daemon()
        self.addCleanup(self.daemon.close)

    def run_with_daemon(self, *code, **environment):
        """Parts of a program, each indented in a way of its own."""
        return run("".join(textwrap.dedent(part) for part in code), self.daemon, **environment)
