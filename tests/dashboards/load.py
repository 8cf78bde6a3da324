# SPDX-License-Identifier: Apache-2.0
"""Runs a real daemon under a load with known figures, and a real Prometheus that scrapes it with the shipped rules.

CMakeLists.txt sets the environment.
"""
import contextlib
import json
import math
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
import unittest
import urllib.error
import urllib.parse
import urllib.request

SOURCE = pathlib.Path(os.environ.get("VRAMBROKER_SOURCE", pathlib.Path(__file__).parents[2]))
PATIENCE = 600  # seconds until a wait counts as hanging
KIB, MIB = 1 << 10, 1 << 20

CAPACITY = 320 * MIB
# No idle memory decays: every figure stays as the load left it. Clients may be slow.
CONFIG = """
device: "host" host_devices: 2 capacity: "320MiB" http_address: "127.0.0.1:0" idle_decay: "1h"
client_timeout: "20s"
rules { name: "serving" session_name: "serve*" tenant: "serving" limit { fraction: 0.5 } guarantee { bytes: "64MiB" } }
rules { name: "research" session_name: "train*" tenant: "research" }
rules { name: "guests" tenant: "guests" }
"""


def wait_for(what, condition):
    """Returns the first true answer of condition(). Until then condition() may raise AssertionError."""
    deadline = time.monotonic() + PATIENCE
    while True:
        failure = None
        try:
            if answer := condition():
                return answer
        except AssertionError as error:
            failure = error
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {PATIENCE} s for {what}") from failure
        time.sleep(0.1)


class Daemon:
    """Runs vrambrokerd with two host devices; everything happens on device 0."""

    def __init__(self):
        self.dir = pathlib.Path(tempfile.mkdtemp(prefix="vrambroker-dashboards-"))
        config = self.dir / "config.textproto"
        config.write_text(CONFIG, encoding="utf-8")
        self._process = subprocess.Popen([os.environ["VRAMBROKERD"], f"--config={config}", f"--socket_dir={self.dir}"],
                                         stderr=subprocess.PIPE, text=True)
        log = ""
        self.http = None  # HOST:PORT
        for line in self._process.stderr:
            log += line
            if found := re.search(r"\bhttp=http://([^/\s]+)", line):
                self.http = found[1]
            if "daemon ready" in line:
                break
        else:
            raise AssertionError("the daemon does not serve; its log:\n" + log)
        # A thread reads the log: a full pipe would stop the daemon.
        threading.Thread(target=lambda: [None for _ in self._process.stderr], daemon=True).start()

    def metrics(self):
        with urllib.request.urlopen(f"http://{self.http}/metrics", timeout=PATIENCE) as answer:
            return answer.read().decode()

    def ctl(self, *words):
        """Returns vramctl's output, as JSON where vramctl writes JSON."""
        out = subprocess.run([os.environ["VRAMCTL"], *words, f"--socket_dir={self.dir}", "--format=json"], check=True,
                             stdout=subprocess.PIPE, text=True, timeout=PATIENCE).stdout
        return json.loads(out) if out.startswith(("{", "[")) else out

    @contextlib.contextmanager
    def stopped(self):
        """Stops the daemon inside the `with`, so that the daemon answers no request."""
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def close(self):
        self._process.kill()
        self._process.wait()
        self._process.stderr.close()
        shutil.rmtree(self.dir, ignore_errors=True)


class Client:
    """Runs a test_client process with a session of its own."""

    def __init__(self, daemon, name, limit="-", *options, claim=None):
        folder = daemon.dir / "claims" / claim if claim else daemon.dir
        self._process = subprocess.Popen([os.environ["TEST_CLIENT"], str(folder)], stdin=subprocess.PIPE,
                                         stdout=subprocess.PIPE, text=True)
        self.call("connect", name, limit, *options)

    def send(self, *words):
        self._process.stdin.write(" ".join(map(str, words)) + "\n")
        self._process.stdin.flush()

    def answer(self):
        """Returns the words of the answer; None when the daemon refused the command for lack of memory."""
        words = self._process.stdout.readline().split()
        if words[:1] == ["ok"]:
            return words[1:]
        if words[:2] == ["error", "8"]:  # RESOURCE_EXHAUSTED
            return None
        raise AssertionError(f"test_client said: {words[:2]} {bytes.fromhex(words[2]).decode() if words[2:3] else ''}")

    def call(self, *words):
        self.send(*words)
        return self.answer()

    def allocate(self, size):
        """Allocates a buffer, and returns the buffer's index."""
        words = self.call("alloc", size)
        assert words is not None, f"{size} bytes were refused"
        return words[0]

    def free(self, index):
        assert self.call("free", index) is not None

    def refused(self, size):
        assert self.call("alloc", size) is None, f"{size} bytes were not refused"

    def die_before_its_child(self):
        """Kills the process; its forked child lives on until kill(), with all open files of the process."""
        assert self.call("fork") is not None
        self._process.kill()
        self._process.wait()

    def kill(self):
        """Kills the process and its child, which ends with its input."""
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()


class Load:
    """Memory of each session on device 0, in MiB (limit): a block is in use unless the line says otherwise.

    serve-api (160, 64 guaranteed)  40, 1000 bytes in a segment of 2, and a free segment of 12
    train-a (80)                    8 blocks of 5, and as many holes of 5 between them, in 4 segments of 20
    notebook (20)                   16, in the claim lab (128, 16 guaranteed)
    train-d                         24, which train-c had before
    train-b                         0: its 60 were reclaimable, and guest-big needed them
    guest-big                       60
    guest-late                      0; waits for 50
    guest-ended                     10; an operator has ended its session, and the client has not let go
    steady                          half a MiB in a segment of 2
    left behind                     30, of guest-dead, whose killed process has a child that holds the memory open
    cached                          14, of train-e, which said goodbye
    """
    LEASED = (54 + 80 + 16 + 24 + 60 + 10 + 2) * MIB
    RESERVED = LEASED + (30 + 14) * MIB
    ALLOCATED = (40 + 40 + 16 + 24 + 60 + 10) * MIB + 512 * KIB + KIB
    REQUESTED = ALLOCATED - 24
    RECLAIMABLE = 12 * MIB
    FRAGMENTED = LEASED - ALLOCATED - RECLAIMABLE
    CACHED = 14 * MIB
    LEFT_BEHIND = 30 * MIB
    COMMITTED = LEASED + (30 + 10) * MIB  # 30 left behind, 10 of serve-api's guarantee that serve-api does not hold

    def __init__(self, daemon, prometheus):
        self._clients = []
        self._daemon = daemon
        self.ooms = {"limit": 0, "capacity": 0, "fragmentation": 0, "larger_than_device": 0}
        self._prometheus = prometheus

    def _client(self, *arguments, **more):
        client = Client(self._daemon, *arguments, **more)
        self._clients.append(client)
        return client

    def _sessions(self):
        return self._daemon.ctl("sessions")["sessions"]

    def _leave(self, client, name):
        """Ends the session, and waits for the end: the client may say goodbye before the daemon knows."""
        assert client.call("goodbye") is not None
        wait_for(f"{name} to be gone", lambda: all(session["name"] != name for session in self._sessions()))

    def build_up(self):
        serve = self._client("serve-api")
        serve.allocate(40 * MIB)
        serve.allocate(1000)
        serve.free(serve.allocate(12 * MIB))
        train_a = self._client("train-a", "80MiB")
        blocks = [train_a.allocate(5 * MIB) for _ in range(16)]
        for block in blocks[::2]:
            train_a.free(block)
        self._daemon.ctl("claim", "create", "lab", "--limit=128MiB", "--guarantee=16MiB", "--tenant=guests", "--device=0", "--label=team=vision")
        self._notebook = self._client("notebook", "20MiB", claim="lab")
        self._notebook.allocate(16 * MIB)
        train_c = self._client("train-c")
        train_c.allocate(24 * MIB)
        self._leave(train_c, "train-c")
        self._client("train-d").allocate(24 * MIB)
        train_e = self._client("train-e")
        train_e.allocate(14 * MIB)
        train_b = self._client("train-b")
        train_b.free(train_b.allocate(60 * MIB))
        self._steady = self._client("steady", "20MiB")
        self._steady.allocate(512 * KIB)
        big = self._client("guest-big", "-", f"wait_ms={PATIENCE * 1000}")
        hasty = self._client("guest-hasty", "-", "wait_ms=300")
        dead = self._client("guest-dead")
        dead.allocate(30 * MIB)
        dead.die_before_its_child()
        wait_for("the child to be found", lambda: [held["holders"] for held in self._daemon.ctl("quarantine")["quarantine"]] > [[]])
        ended = self._client("guest-ended")
        ended.allocate(10 * MIB)
        self._daemon.ctl("end", "guest-ended")

        # Waits for a scrape: Prometheus must see a counter before its first count.
        self._prometheus.wait_until_scraped()
        big.allocate(60 * MIB)  # 20 are left; 60 of train-b are reclaimable
        hasty.refused(40 * MIB)
        self.ooms["capacity"] += 1
        hasty.refused(CAPACITY + MIB)
        self.ooms["larger_than_device"] += 1
        train_a.refused(12 * MIB)  # 40 are free in pieces of 5
        self.ooms["fragmentation"] += 1
        self._leave(hasty, "guest-hasty")
        self._leave(train_e, "train-e")

    def work(self, seconds):
        """Makes events for rates: allocations, refusals, and sessions that come, take over the daemon's cache, and
        go."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._steady.free(self._steady.allocate(512 * KIB))
            self._notebook.refused(8 * MIB)
            self.ooms["limit"] += 1
            visitor = Client(self._daemon, "train-visitor")
            visitor.allocate(14 * MIB)  # memory left by train-e
            self._leave(visitor, "train-visitor")
            visitor.kill()
            time.sleep(0.1)  # a pace, not a wait

    def rest(self):
        """Lets guest-late wait. Then the load stands still, and Prometheus knows."""
        late = self._client("guest-late", "-", "wait_ms=3600000")  # the longest allowed wait
        late.send("alloc", 50 * MIB)
        wait_for("guest-late to wait", lambda: any(
            device["waiting"] for session in self._sessions() for device in session["devices"] if session["name"] == "guest-late"))
        for session in self._sessions():  # a session reports at once when asked
            if session["state"] == "active":
                self._daemon.ctl("summary", str(session["id"]))
        self._prometheus.wait_until_scraped()

    def close(self):
        for client in self._clients:
            client.kill()


class Prometheus:
    """Scrapes `target` (HOST:PORT) every two seconds, with the configuration and rules of deploy/prometheus."""

    def __init__(self, target):
        self.dir = pathlib.Path(tempfile.mkdtemp(prefix="vrambroker-prometheus-"))
        shipped = SOURCE / "deploy" / "prometheus"
        config = (shipped / "prometheus.yml").read_text(encoding="utf-8")
        for old, new in (("15s", "2s"), ("localhost:9477", target)):
            assert old in config, f"prometheus.yml has no {old} any more"
            config = config.replace(old, new)
        (self.dir / "prometheus.yml").write_text(config, encoding="utf-8")
        shutil.copy(shipped / "vrambroker.rules.yml", self.dir)
        for _ in range(5):  # another process may take the port between the choice and its use
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                self.address = "127.0.0.1:%d" % free.getsockname()[1]
            log = open(self.dir / "log", "w", encoding="utf-8")
            self._process = subprocess.Popen(
                ["prometheus", f"--config.file={self.dir}/prometheus.yml", f"--storage.tsdb.path={self.dir}/data",
                 f"--web.listen-address={self.address}", "--log.level=warn"], stderr=log, stdout=log)
            log.close()
            if wait_for("Prometheus", lambda: self._process.poll() is not None or self._ready()) is not True or \
                    self._process.poll() is None:
                return
        raise AssertionError("Prometheus does not start:\n" + (self.dir / "log").read_text(encoding="utf-8"))

    def _ready(self):
        try:
            with urllib.request.urlopen(f"http://{self.address}/-/ready", timeout=5):
                return "ready"
        except OSError:
            return None

    def get(self, path, **parameters):
        """Returns the data of /api/v1/PATH; AssertionError when Prometheus refuses the query."""
        url = f"http://{self.address}/api/v1/{path}?{urllib.parse.urlencode(parameters, doseq=True)}"
        try:
            with urllib.request.urlopen(url, timeout=PATIENCE) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path} {parameters}: {error.read().decode()}") from error

    def get_range(self, expr, start):
        """Returns the result by the second from `start` until `at`."""
        return self.get("query_range", query=expr, start=start, end=self.at, step=1)["result"]

    def value(self, expr, **when):
        """Returns the value of a query with a single result, now or at `time`."""
        result = self.get("query", query=expr, **when)["result"]
        assert len(result) == 1, f"{expr}: {result}"
        return float(result[0]["value"][1])

    def wait_until_scraped(self):
        """Waits until Prometheus scrapes the daemon twice from now on, and evaluates the recording rules after the
        scrapes."""
        def scrape_after(moment):
            wait_for("a scrape", lambda: self.value("max(timestamp(vrambroker_build_info))") > moment)

        for _ in range(2):
            scrape_after(time.time())
        now = time.time()

        def whole():
            at = self.value("max(timestamp(gpu_client:vrambroker_limit_usage:ratio))")
            if at <= now:
                return None
            # A scrape that is too slow removes the values of the moment at which the scrape began. A scrape that began
            # after `at` has ended, so no scrape that began before `at` still runs.
            scrape_after(at)
            return at if self.get("query", query="vrambroker_build_info", time=at)["result"] else None
        # Seconds since 1970: a moment at which every series has a value, now and for ever. Queries of the load's memory
        # ask for this moment, or end at the moment.
        self.at = wait_for("recording rules", whole)

    def close(self):
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self.dir, ignore_errors=True)


class LoadedTest(unittest.TestCase):
    """Prepares its tests: a daemon that rests after WORK_SECONDS under the known load, and a Prometheus that saw the
    load."""

    @classmethod
    def setUpClass(cls):
        cls.daemon = Daemon()
        cls.addClassCleanup(cls.daemon.close)
        cls.prometheus = Prometheus(cls.daemon.http)
        cls.addClassCleanup(cls.prometheus.close)
        began = time.time()
        cls.load = Load(cls.daemon, cls.prometheus)
        cls.addClassCleanup(cls.load.close)
        cls.load.build_up()
        cls.load.work(cls.WORK_SECONDS)
        cls.load.rest()
        # Seconds since 1970, whole seconds before `at`, so that queries by the second end exactly at `at`.
        cls.began = cls.prometheus.at - math.ceil(cls.prometheus.at - began)
