#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Real PyTorch on a real GPU with the broker's memory (client/python): the checks of tests/gpu that need PyTorch.

Usage: torch_training.py --daemon VRAMBROKERD --library LIBVRAMBROKER [--out FILE.json] [--seconds N] [--only NAME,...]
       torch_training.py --self-test [--daemon VRAMBROKERD --library LIBVRAMBROKER] [--out FILE.json]

Prints a line for each check, "ok|FAIL|not run  name  figures", and writes {"checks": [{"name", "result", "detail",
"figures"}, ...]} with results ok, fail and not_run. Exit code 1 when a check failed. Checks named experiment_... say what
was seen, whatever it is. Each check starts daemons and programs of its own, with time limits; after N seconds (default
230) what has not begun is not run, and what has not ended after a quarter more is given up.
--self-test does what can be done without PyTorch and a GPU.
"""
import argparse
import contextlib
import ctypes
import json
import os
import queue
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

HERE = os.path.dirname(os.path.abspath(__file__))
MIB, GIB = 1 << 20, 1 << 30
LIBC = ctypes.CDLL(None)
MARK = "@@vrambroker "  # begins the lines of a worker that are for the orchestrator

# ====================================================================================================================
# In a worker: one process, one task. Only these import torch.
# ====================================================================================================================


def say(**event):
    print(MARK + json.dumps(event), flush=True)


def hear():
    line = sys.stdin.readline()
    if not line:
        sys.exit(0)  # the orchestrator is gone
    return line.strip()


def prepare(arguments):
    """Imports torch, made deterministic, and enables the broker when the task says so."""
    import torch

    torch.manual_seed(7)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    if arguments.get("enable") is not None:
        import vrambroker.torch

        vrambroker.torch.enable(**arguments["enable"])
    return torch


def daemon_reserved():
    import vrambroker.torch

    return sum(device.reserved_bytes for device in vrambroker.torch.status().devices)


def one_hot(torch, labels, classes):
    return (labels.unsqueeze(-1) == torch.arange(classes, device=labels.device)).float()


def cross_entropy(torch, scores, labels):
    """By its formula: of the library's functions for it and for embeddings some are not deterministic on a GPU."""
    return -(torch.log_softmax(scores, -1) * one_hot(torch, labels, scores.shape[-1])).sum(-1).mean()


def make_gpt(torch):
    nn = torch.nn
    vocabulary, width, heads, length, batch = 512, 384, 6, 256, 16

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x):
            n, t, _ = x.shape
            q, k, v = self.qkv(self.norm1(x)).view(n, t, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
            scores = q @ k.transpose(-2, -1) / (width // heads) ** 0.5
            later = torch.ones(t, t, dtype=torch.bool, device=x.device).triu(1)
            x = x + self.out((scores.masked_fill(later, float("-inf")).softmax(-1) @ v).transpose(1, 2).reshape(n, t, width))
            return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))

    class Gpt(nn.Module):
        def __init__(self):
            super().__init__()
            self.token = nn.Linear(vocabulary, width, bias=False)
            self.place = nn.Parameter(torch.randn(length, width) / 50)
            self.blocks = nn.Sequential(*[Block() for _ in range(6)])
            self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

        def forward(self, tokens):
            x = self.token(one_hot(torch, tokens, vocabulary)) + self.place[: tokens.shape[1]]
            return self.head(self.norm(self.blocks(x)))

    model = Gpt().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    data = torch.Generator().manual_seed(11)

    def step():
        tokens = torch.randint(vocabulary, (batch, length + 1), generator=data)
        tokens[:, 1::2] = tokens[:, :-1:2].clone()  # something to learn
        tokens = tokens.cuda()
        loss = cross_entropy(torch, model(tokens[:, :-1]), tokens[:, 1:])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss

    return step


def make_resnet(torch):
    nn = torch.nn
    batch = 128

    class Block(nn.Module):
        def __init__(self, inside, outside, stride):
            super().__init__()
            self.one = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
            self.two = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
            self.norm1, self.norm2 = nn.BatchNorm2d(outside), nn.BatchNorm2d(outside)
            self.skip = nn.Conv2d(inside, outside, 1, stride, bias=False) if stride > 1 else nn.Identity()

        def forward(self, x):
            y = self.norm2(self.two(self.norm1(self.one(x)).relu()))
            return (y + self.skip(x)).relu()

    layers = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    for inside, outside, stride in ((64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)):
        layers += [Block(inside, outside, stride), Block(outside, outside, 1)]
    body, head = nn.Sequential(*layers).cuda(), nn.Linear(512, 10).cuda()
    optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.01, momentum=0.9)
    data = torch.Generator().manual_seed(13)

    def step():
        images = torch.randn(batch, 3, 32, 32, generator=data)
        labels = torch.randint(10, (batch,), generator=data)
        images[:, 0] += (labels.float() / 2 - 2.5)[:, None, None]  # something to learn
        images, labels = images.cuda(), labels.cuda()
        loss = cross_entropy(torch, head(body(images).mean((2, 3))), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss

    return step


MODELS = {"gpt": make_gpt, "resnet": make_resnet}


def work_probe(arguments):
    try:
        import torch
    except ImportError as error:
        say(reason="no PyTorch: %s" % error)
        return
    if torch.version.cuda is None or not torch.cuda.is_available():
        say(reason="no GPU: PyTorch %s sees none" % torch.__version__)
        return
    properties = torch.cuda.get_device_properties(0)
    say(reason="", torch=torch.__version__, cuda=torch.version.cuda, gpu=properties.name, total_bytes=properties.total_memory)


def work_train(arguments):
    torch = prepare(arguments)
    step = MODELS[arguments["model"]](torch)
    losses = []
    for number in range(arguments["steps"]):
        losses.append(float(step().item()).hex())
        if number == arguments.get("tell_after", -1):
            say(event="under way")
    torch.cuda.synchronize()
    event = {"losses": losses, "torch_reserved": torch.cuda.memory_reserved(),
             "torch_peak": torch.cuda.max_memory_reserved()}
    if arguments.get("enable") is not None:
        import vrambroker.torch

        event.update(daemon_reserved=daemon_reserved(), status=str(vrambroker.torch.status()),
                     mode=vrambroker.torch.status().mode)
    say(**event)
    if arguments.get("hold"):
        hear()


def work_timed(arguments):
    torch = prepare(arguments)
    step = MODELS[arguments["model"]](torch)
    for _ in range(arguments["warm_up"]):
        step()
    torch.cuda.synchronize()
    say(event="warm")
    while hear() == "go":
        times = []
        for _ in range(arguments["steps"]):
            begin = time.perf_counter()
            step()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
        say(times=times)


def work_oom(arguments):
    torch = prepare(arguments)
    seen = {}
    held = torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda")
    try:
        torch.empty(arguments["too_much"], dtype=torch.uint8, device="cuda")
        seen["forward"] = ""
    except torch.cuda.OutOfMemoryError as error:
        seen["forward"] = str(error)
    # On autograd's thread, from a function in C++.
    leaf = torch.ones(arguments["leaf"] // 4, device="cuda", requires_grad=True)
    total = leaf.exp().sum()
    filler = torch.empty(arguments["filler"], dtype=torch.uint8, device="cuda")
    try:
        total.backward()
        seen["backward"] = ""
    except torch.cuda.OutOfMemoryError as error:
        seen["backward"] = str(error)
    # It goes on.
    del filler
    total = leaf.exp().sum()
    total.backward()
    seen["goes_on"] = bool(leaf.grad.sum().isfinite()) and int(held.sum().item()) == 0
    say(**seen)


def work_stats(arguments):
    torch = prepare(arguments)
    import vrambroker.torch

    cuda, limit, size = torch.cuda, arguments["limit"], 64 * MIB
    seen = {"mem_get_info": cuda.mem_get_info()[1] == limit}
    tensor = torch.ones(size, dtype=torch.uint8, device="cuda")
    stats = cuda.memory_stats()
    seen["memory_stats"] = stats["allocated_bytes.all.current"] >= size and stats["reserved_bytes.all.current"] >= size
    seen["memory_allocated"] = cuda.memory_allocated() >= size and cuda.max_memory_allocated() >= size
    seen["memory_reserved"] = cuda.memory_reserved() == daemon_reserved()
    seen["mem_get_info_free"] = cuda.mem_get_info() == (limit - daemon_reserved(), limit)
    seen["memory_summary"] = "PyTorch CUDA memory summary" in cuda.memory_summary()
    cuda.synchronize()
    del tensor
    seen["cached"] = daemon_reserved() >= size
    cuda.reset_peak_memory_stats()
    seen["reset_peak_memory_stats"] = cuda.max_memory_allocated() < size
    cuda.empty_cache()
    seen["empty_cache"] = daemon_reserved() < size
    fraction = (limit / 2) / cuda.get_device_properties(0).total_memory
    cuda.set_per_process_memory_fraction(fraction)
    seen["fraction_mem_get_info"] = abs(cuda.mem_get_info()[1] - limit // 2) < MIB
    try:
        torch.empty(limit * 3 // 4, dtype=torch.uint8, device="cuda")
        seen["fraction_refuses"] = False
    except cuda.OutOfMemoryError:
        seen["fraction_refuses"] = True
    cuda.set_per_process_memory_fraction(1.0)
    tensor = torch.empty(limit * 3 // 4, dtype=torch.uint8, device="cuda")
    seen["fraction_lifted"] = tensor.data_ptr() != 0
    say(seen=seen, mode=vrambroker.torch.status().mode)


def work_graph(arguments):
    torch = prepare(arguments)
    weights = torch.randn(1024, 1024, device="cuda") / 32
    into = torch.randn(256, 1024, device="cuda")

    def compute(x):
        return (torch.relu(x @ weights) @ weights).sum(1)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            compute(into)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = compute(into)
    worst = 0.0
    for _ in range(5):
        data = torch.randn(256, 1024, device="cuda")
        into.copy_(data)
        graph.replay()
        others = [torch.full((1 << 20,), 7.0, device="cuda") for _ in range(8)]  # would be in the way of a graph's memory
        torch.cuda.synchronize()
        worst = max(worst, float((out - compute(data)).abs().max().item()))
        del others
    say(worst=worst, torch_reserved=torch.cuda.memory_reserved(), daemon_reserved=daemon_reserved())


def work_idle(arguments):
    torch = prepare(arguments)
    tensor = torch.ones(arguments["bytes"], dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    if arguments["release"]:
        del tensor
        torch.cuda.empty_cache()
    say(daemon_reserved=daemon_reserved())
    hear()


def work_streams(arguments):
    """Whether memory that two streams used is reused when they are done, and whether the cache is flushed for a request."""
    torch = prepare(arguments)
    tensor = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    address, side = tensor.data_ptr(), torch.cuda.Stream()
    with torch.cuda.stream(side):
        tensor.record_stream(side)
        tensor.add_(1)
    del tensor
    torch.cuda.synchronize()
    tensor = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    reused = tensor.data_ptr() == address
    del tensor
    parts = [torch.empty(100 * MIB, dtype=torch.uint8, device="cuda") for _ in range(8)]
    del parts
    try:
        torch.empty(700 * MIB, dtype=torch.uint8, device="cuda")
        flushed = True
    except torch.cuda.OutOfMemoryError:
        flushed = False
    say(reused_after_record_stream=reused, cache_flushed_before_out_of_memory=flushed)


def work_lost(arguments):
    torch = prepare(arguments)
    step = make_resnet(torch)
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    say(event="training")
    hear()  # the daemon has been killed
    losses = [float(step().item()) for _ in range(20)]
    text = ""
    held = []
    try:
        for _ in range(100):
            held.append(torch.empty(256 * MIB, dtype=torch.uint8, device="cuda"))
    except torch.cuda.OutOfMemoryError as error:
        text = str(error)
    say(steps=len(losses), finite=all(loss == loss for loss in losses), refusal=text)


def work_share(arguments):
    torch = prepare(arguments)
    tensor = torch.ones(4 * MIB, dtype=torch.uint8, device="cuda")
    try:
        tensor.untyped_storage()._share_cuda_()
        say(shared="an IPC handle was made")
    except Exception as error:
        say(shared="refused: %s" % str(error).splitlines()[0])


def work_late(arguments):
    import torch

    before = torch.ones(32 * MIB, dtype=torch.uint8, device="cuda")
    import vrambroker.torch

    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        status = vrambroker.torch.enable(**arguments["enable"])
    after = torch.ones(32 * MIB, dtype=torch.uint8, device="cuda")
    sums = [int(tensor.sum().item()) for tensor in (before, after)]
    say(outside=status.outside_bytes, daemon_reserved=daemon_reserved(), sums=sums)


def work_self_test(arguments):
    """Stands for all the others where there is no PyTorch: answers, ends badly, or never ends."""
    if arguments["do"] == "hold":
        import vrambroker

        with vrambroker.Client(name="holder", limit=0.5) as client:
            held = client.lease_segment(20 * MIB)
            say(bytes=held.bytes)
            hear()
            held.free()
            say(bytes=0)
            hear()
    elif arguments["do"] == "answer":
        say(heard=[])
        say(heard=[hear(), hear()])
    elif arguments["do"] == "fail":
        raise ValueError("as it should")
    elif arguments["do"] == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        threading.Event().wait()


# ====================================================================================================================
# The orchestrator: never imports torch.
# ====================================================================================================================


class Failed(Exception):
    pass


class NotRun(Exception):
    pass


def end_with_parent():
    """In a new child process: it ends when the one that started it does, even by SIGKILL."""
    LIBC.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def environment_of_one_gpu():
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    return dict(os.environ, CUDA_VISIBLE_DEVICES=first)


class Settings:
    def __init__(self, daemon, library, seconds):
        self.daemon = daemon
        self.library = library
        self.end = time.monotonic() + seconds  # of beginning checks
        self._given_up = time.monotonic() + 1.25 * seconds

    def left(self, at_most):
        return max(1.0, min(at_most, self._given_up - time.monotonic()))

    def too_late(self, text):
        """The error for what did not come within left(): no fault of what was waited for when the time was over."""
        return NotRun("no time left: " + text) if time.monotonic() >= self._given_up else Failed(text)


class Worker:
    """A program that runs work_NAME(arguments). Killed at the end of a `with` block."""

    def __init__(self, settings, name, arguments, daemon=None, at_most=60.0):
        self.name = name
        self._settings = settings
        self._until = time.monotonic() + settings.left(at_most)
        environment = dict(environment_of_one_gpu(), CUBLAS_WORKSPACE_CONFIG=":4096:8", PYTHONUNBUFFERED="1")
        for variable in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "VRAMBROKER_LIMIT", "VRAMBROKER_NAME"):
            environment.pop(variable, None)
        if settings.library:
            environment["VRAMBROKER_LIBRARY"] = os.path.abspath(settings.library)
        if daemon is not None:
            environment["VRAMBROKER_SOCKET_DIR"] = daemon.dir
        self._log = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            [sys.executable, os.path.abspath(__file__), "--worker", name, "--arguments", json.dumps(arguments)],
            env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
            preexec_fn=end_with_parent)
        self._events = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self._process.stdout:
            if line.startswith(MARK):
                self._events.put(json.loads(line[len(MARK):]))
        self._events.put(None)

    def event(self):
        """The next thing that it says. Failed when it ends, fails or is too late."""
        try:
            event = self._events.get(timeout=max(0.1, self._until - time.monotonic()))
        except queue.Empty:
            raise self._settings.too_late("%s: no answer in time; %s" % (self.name, self._last_words())) from None
        if event is None:
            code = self._process.wait()
            raise Failed("%s: ended with code %d; %s" % (self.name, code, self._last_words()))
        return event

    def tell(self, line):
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except OSError:
            pass  # it has ended; event() says how

    def _last_words(self):
        # Seeking would move the program's own place in the file.
        text = os.pread(self._log.fileno(), MIB, max(0, os.fstat(self._log.fileno()).st_size - MIB)).decode(errors="replace")
        lines = [line for line in text.splitlines() if line.strip()]
        return " | ".join(lines[-6:]) or "it said nothing"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.kill()
        self._process.wait()
        self._reader.join()
        with contextlib.suppress(OSError):  # what it never read
            self._process.stdin.close()
        self._process.stdout.close()
        self._log.close()


class Daemon:
    """vrambrokerd on the GPU, with its sockets in a folder of its own. Killed at the end of a `with` block."""

    def __init__(self, settings, capacity, device="cuda"):
        self.dir = tempfile.mkdtemp(prefix="vrambroker-torch-")
        self._log_path = os.path.join(self.dir, "log")
        with open(self._log_path, "w") as log:
            self._process = subprocess.Popen(
                [settings.daemon, "--socket_dir=" + self.dir, "--device=" + device, "--capacity=%d" % capacity,
                 "--http_address=127.0.0.1:0"], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env=environment_of_one_gpu(), preexec_fn=end_with_parent)
        until = time.monotonic() + settings.left(30)
        while "daemon ready" not in self.log():
            ended = self._process.poll() is not None
            if ended or time.monotonic() > until:
                text = "the daemon does not serve: " + " | ".join(self.log().splitlines()[-6:])
                self.__exit__()
                raise Failed(text) if ended else settings.too_late(text)
            time.sleep(0.02)
        self.url = self.log().split("http=", 1)[1].split()[0]

    def log(self):
        with open(self._log_path) as log:
            return log.read()

    def kill(self):
        self._process.kill()
        self._process.wait()

    def metrics(self, name):
        """By the value of the label client; of all GPUs together."""
        with urllib.request.urlopen(self.url, timeout=10) as answer:
            text = answer.read().decode()
        values = {}
        for line in text.splitlines():
            if line.startswith(name + "{") and 'client="' in line:
                client = line.split('client="', 1)[1].split('"', 1)[0]
                values[client] = values.get(client, 0) + float(line.rsplit(" ", 1)[1])
        return values

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()
        shutil.rmtree(self.dir, ignore_errors=True)


class Sampler:
    """The most that each client of a daemon had reserved while the `with` block ran, by the daemon's metrics."""

    def __init__(self, daemon):
        self._daemon = daemon
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.most = {}
        self.samples = 0
        self.problem = ""

    def _run(self):
        try:
            while not self._stop.wait(0.02):
                for client, value in self._daemon.metrics("vrambroker_client_reserved_bytes").items():
                    self.most[client] = max(value, self.most.get(client, 0))
                self.samples += 1
        except OSError as error:
            self.problem = str(error)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()


def need(condition, text):
    if not condition:
        raise Failed(text)


def compare_curves(name, without, with_broker):
    for number, (one, other) in enumerate(zip(without, with_broker)):
        need(one == other, "%s: the loss of step %d is %s without the broker and %s with it" % (
            name, number, float.fromhex(one), float.fromhex(other)))
    need(len(without) == len(with_broker) and without, "%s: %d and %d steps" % (name, len(without), len(with_broker)))


CAPACITY = 12 * GIB
STEPS = 40


class Checks:
    """Each check_... and experiment_... returns (detail, figures), or raises Failed or NotRun."""

    def __init__(self, settings):
        self.settings = settings
        self.warm = False  # one has run: PyTorch's libraries have been read from disk
        self._curves = {}
        self._no_curves = None

    def worker(self, name, daemon=None, **arguments):
        return Worker(self.settings, name, arguments, daemon, at_most=60.0 if self.warm else 120.0)

    def daemon(self, capacity=CAPACITY):
        return Daemon(self.settings, capacity)

    def curves(self):
        """Without the broker, both at once. Tried once."""
        if self._no_curves:
            raise self._no_curves
        if not self._curves:
            try:
                with contextlib.ExitStack() as stack:
                    workers = {model: stack.enter_context(self.worker("train", model=model, steps=STEPS)) for model in MODELS}
                    self._curves = {model: worker.event()["losses"] for model, worker in workers.items()}
            except (Failed, NotRun) as error:
                self._no_curves = type(error)("without the broker: %s" % error)
                raise self._no_curves from error
        return self._curves

    def check_curves_equal(self):
        without, figures = self.curves(), {}
        with self.daemon() as daemon:
            for model in MODELS:
                with self.worker("train", daemon, model=model, steps=STEPS, enable={"limit": 0.9, "name": model}) as worker:
                    done = worker.event()
                compare_curves(model, without[model], done["losses"])
                first, last = (float.fromhex(done["losses"][i]) for i in (0, -1))
                need(len(set(done["losses"])) > STEPS // 2 and last == last, "%s: no curve: %f to %f" % (model, first, last))
                figures[model + "_first_loss"], figures[model + "_last_loss"] = first, last
                figures[model + "_reserved_bytes"] = done["daemon_reserved"]
                figures["mode"] = done["mode"]
        return "%d steps each, bit for bit" % STEPS, figures

    def check_two_at_once(self):
        without = self.curves()
        limits = {"gpt": 0.6, "resnet": 0.3}
        with contextlib.ExitStack() as stack:
            daemon = stack.enter_context(self.daemon())
            sampler = stack.enter_context(Sampler(daemon))
            workers = {model: stack.enter_context(self.worker(
                "train", daemon, model=model, steps=STEPS, hold=True, enable={"limit": limit, "name": model}))
                for model, limit in limits.items()}
            done = {model: worker.event() for model, worker in workers.items()}
            now = daemon.metrics("vrambroker_client_reserved_bytes")
            granted = daemon.metrics("vrambroker_client_limit_bytes")
        need(not sampler.problem, "metrics: " + sampler.problem)
        figures = {"samples": sampler.samples}
        for model, limit in limits.items():
            compare_curves(model, without[model], done[model]["losses"])
            need(abs(granted[model] - limit * CAPACITY) < 2 * MIB, "%s has a limit of %d" % (model, granted[model]))
            most = max(sampler.most.get(model, 0), now[model])
            need(0 < most <= granted[model], "%s reserved %d of %d" % (model, most, granted[model]))
            figures[model + "_most_reserved_bytes"], figures[model + "_limit_bytes"] = most, granted[model]
        return "equal curves, each within its limit", figures

    def check_step_time(self):
        figures = {}
        with self.daemon() as daemon, contextlib.ExitStack() as stack:
            for model in MODELS:
                with contextlib.ExitStack() as pair:
                    workers = {
                        "own": pair.enter_context(self.worker("timed", None, model=model, warm_up=10, steps=15)),
                        "broker": pair.enter_context(self.worker(
                            "timed", daemon, model=model, warm_up=10, steps=15, enable={"limit": 0.9, "name": model}))}
                    for worker in workers.values():
                        worker.event()
                    times = {who: [] for who in workers}
                    for turn in range(6):  # one works, the other waits; each is first as often
                        for who in sorted(workers, reverse=turn % 2 == 1):
                            workers[who].tell("go")
                            times[who] += workers[who].event()["times"]
                medians = {who: statistics.median(values) for who, values in times.items()}
                figures[model + "_own_ms"] = round(1000 * medians["own"], 4)
                figures[model + "_broker_ms"] = round(1000 * medians["broker"], 4)
                figures[model + "_ratio"] = round(medians["broker"] / medians["own"], 4)
        worst = max(figures[model + "_ratio"] for model in MODELS)
        figures["target"] = 1.03
        need(worst <= 1.03, "a step takes %.4f times as long: %s" % (worst, figures))
        return "medians of 90 steps, alternating", figures

    def check_out_of_memory(self):
        figures = {}
        for mode in ("segments", "plain"):
            with self.daemon(4 * GIB) as daemon, self.worker(
                    "oom", daemon, too_much=2 * GIB, leaf=256 * MIB, filler=350 * MIB,
                    enable={"limit": GIB, "name": "oom", "mode": mode}) as worker:
                seen = worker.event()
            for where in ("forward", "backward"):
                text = seen[where]
                need("out of memory (limit) on device" in text and "limit 1073741824 B" in text,
                     "%s, %s: the error does not say the broker's reason: %r" % (mode, where, text[:1000]))
            need(seen["goes_on"], mode + ": it does not go on")
            figures[mode] = seen["forward"].splitlines()[-1][:400]
        return "torch.cuda.OutOfMemoryError with the broker's reason, on both threads; it goes on", figures

    def check_stats(self):
        figures = {}
        for mode in ("segments", "plain"):
            with self.daemon(4 * GIB) as daemon, self.worker(
                    "stats", daemon, limit=2 * GIB, enable={"limit": 2 * GIB, "name": "stats", "mode": mode}) as worker:
                seen = worker.event()["seen"]
            wrong = sorted(name for name, good in seen.items() if not good)
            need(not wrong, "%s: %s" % (mode, ", ".join(wrong)))
            figures[mode] = len(seen)
        return "memory_stats, memory_summary, peaks, empty_cache, fraction, mem_get_info", figures

    def check_all_threads_covered(self):
        with self.daemon() as daemon, self.worker(
                "train", daemon, model="gpt", steps=5, hold=True, enable={"limit": 0.9, "name": "covered"}) as worker:
            done = worker.event()
            held = daemon.metrics("vrambroker_client_reserved_bytes")["covered"]
        need(done["torch_reserved"] == held, "PyTorch has reserved %d, the daemon accounts for %d" % (
            done["torch_reserved"], held))
        return "all that PyTorch reserved, backward included, is the daemon's", {"reserved_bytes": held}

    def check_cuda_graph(self):
        with self.daemon() as daemon, self.worker("graph", daemon, enable={"limit": 0.5, "name": "graph"}) as worker:
            done = worker.event()
        need(done["worst"] < 1e-3, "a replay differs by %g" % done["worst"])
        need(done["torch_reserved"] == done["daemon_reserved"], "PyTorch has reserved %d, the daemon accounts for %d" % (
            done["torch_reserved"], done["daemon_reserved"]))
        return "captured and replayed 5 times; its memory is the daemon's, too", done

    def check_idle_memory_goes_to_others(self):
        with self.daemon(4 * GIB) as daemon:
            with self.worker("idle", daemon, bytes=3 * GIB, release=True, enable={"limit": 0.9, "name": "first"}) as first:
                left = first.event()["daemon_reserved"]
                with self.worker("idle", daemon, bytes=3 * GIB, release=False, enable={"limit": 0.9, "name": "second"}) as second:
                    taken = second.event()["daemon_reserved"]
        need(taken >= 3 * GIB, "the second process got %d" % taken)
        return "after empty_cache() of a living process", {"first_reserved_bytes": left, "second_reserved_bytes": taken}

    def experiment_pool_mode(self):
        """Of all threads: what PyTorch's sources say of a pool that is always active."""
        seen, enable = {}, {"limit": GIB, "name": "pool", "mode": "pool"}
        with self.daemon(4 * GIB) as daemon:
            for name, arguments in (("streams", {}), ("graph", {}), ("stats", {"limit": GIB})):
                seen[name] = self.observe(name, daemon, enable=enable, **arguments)
        with self.daemon() as daemon:
            done = self.observe("train", daemon, model="gpt", steps=10, enable={"limit": 0.9, "name": "pool", "mode": "pool"})
            if "losses" in done:
                done["curve_equal"] = done.pop("losses") == self.curves()["gpt"][:10]
            seen["train"] = done
        return "observed", seen

    def experiment_segments_streams(self):
        with self.daemon(4 * GIB) as daemon:
            return "observed", self.observe("streams", daemon, enable={"limit": GIB, "name": "streams", "mode": "segments"})

    def experiment_daemon_killed_in_training(self):
        with self.daemon() as daemon, self.worker("lost", daemon, enable={"limit": 0.9, "name": "lost"}) as worker:
            try:
                worker.event()
                daemon.kill()
                worker.tell("killed")
                seen = worker.event()
            except Failed as failed:
                return "observed: " + str(failed), {}
        seen["refusal"] = seen["refusal"].splitlines()[-1][:300] if seen["refusal"] else ""
        return "observed", seen

    def experiment_torch_multiprocessing_handle(self):
        with self.daemon() as daemon:
            return "observed", self.observe("share", daemon, enable={"limit": 0.5, "name": "share"})

    def experiment_enabled_after_first_use(self):
        with self.daemon() as daemon:
            return "observed", self.observe("late", daemon, enable={"limit": 0.5, "name": "late"})

    def observe(self, name, daemon, **arguments):
        with self.worker(name, daemon, **arguments) as worker:
            try:
                return worker.event()
            except Failed as failed:
                return {"observed": str(failed)}


def names_of_checks():
    return [name for name in vars(Checks) if name.startswith(("check_", "experiment_"))]


def run_checks(settings, wanted, reason, report):
    checks = Checks(settings)
    for name in names_of_checks():
        if wanted and name not in wanted:
            continue
        begin = time.monotonic()
        try:
            if reason:
                raise NotRun(reason)
            if settings.end - begin < 5:
                raise NotRun("no time left")
            detail, figures = getattr(checks, name)()
            result = "ok"
        except NotRun as error:
            result, detail, figures = "not_run", str(error), {}
        except Exception as error:  # whatever it is, the others go on
            kind = "" if isinstance(error, Failed) else type(error).__name__ + ": "
            # An experiment has no wrong answer; one that could not be carried out is not run.
            result, detail, figures = "not_run" if name.startswith("experiment_") else "fail", kind + str(error), {}
        checks.warm = True
        report(name, result, detail, dict(figures, seconds=round(time.monotonic() - begin, 1)) if result != "not_run" else {})


class Report:
    """Prints each check, and keeps the file as it is so far: a run that is cut off loses nothing."""

    def __init__(self, path, about):
        self.path = path
        self.document = dict(about, checks=[])
        self.failed = 0

    def __call__(self, name, result, detail, figures):
        self.document["checks"].append({"name": name, "result": result, "detail": detail, "figures": figures})
        self.failed += result == "fail"
        shown = {"ok": "ok", "fail": "FAIL", "not_run": "not run"}[result]
        print("%-8s %-42s %s %s" % (shown, name, detail, json.dumps(figures) if figures else ""), flush=True)
        self.write()

    def write(self):
        if self.path:
            with open(self.path + ".new", "w") as file:
                json.dump(self.document, file, indent=1)
                file.write("\n")
            os.replace(self.path + ".new", self.path)


def probe(settings):
    """What there is, and why nothing can be run, if so."""
    try:
        with Worker(settings, "probe", {}, at_most=120) as worker:
            about = worker.event()
    except (Failed, NotRun) as failed:
        return {}, "PyTorch cannot be asked: %s" % failed
    return about, about.pop("reason")


# ---- Without PyTorch ----


def self_test(daemon_path, library, out):
    settings = Settings(daemon_path or "/nonexistent/vrambrokerd", library or "", 200)

    def fails(call, *texts):
        try:
            call()
        except Failed as failed:
            for text in texts:
                assert text in str(failed), (text, str(failed))
            return
        raise AssertionError("did not fail: %s" % (texts,))

    with Worker(settings, "self_test", {"do": "answer"}) as worker:
        assert worker.event() == {"heard": []}
        worker.tell("one")
        worker.tell("two")
        assert worker.event() == {"heard": ["one", "two"]}
        fails(worker.event, "ended with code 0")
    with Worker(settings, "self_test", {"do": "fail"}) as worker:
        fails(worker.event, "ended with code 1", "ValueError: as it should")
        worker.tell("anybody there")
    with Worker(settings, "self_test", {"do": "die"}) as worker:
        fails(worker.event, "ended with code -9")
    with Worker(settings, "self_test", {"do": "hang"}, at_most=1) as worker:
        fails(worker.event, "no answer in time")
    with Worker(Settings("", "", 0), "self_test", {"do": "hang"}) as worker:
        try:
            worker.event()
            raise AssertionError("did not fail")
        except NotRun as late:
            assert "no time left" in str(late), late
    # Daemon, its figures, and the package as a worker finds it: on the host device.
    if daemon_path and library:
        with Daemon(settings, 256 * MIB, device="host") as daemon:
            with Sampler(daemon) as sampler, Worker(settings, "self_test", {"do": "hold"}, daemon) as worker:
                assert worker.event() == {"bytes": 20 * MIB}
                seen = sampler.samples
                while sampler.samples < seen + 2 and not sampler.problem:
                    time.sleep(0.01)
                assert daemon.metrics("vrambroker_client_limit_bytes") == {"holder": 128 * MIB}
                worker.tell("free")
                assert worker.event() == {"bytes": 0}
                assert daemon.metrics("vrambroker_client_reserved_bytes") == {"holder": 0}
            assert sampler.most == {"holder": 20 * MIB} and not sampler.problem, (sampler.most, sampler.problem)
        assert not os.path.exists(daemon.dir)
        fails(lambda: Daemon(settings, 5, device="host"), "the daemon does not serve", "capacity")
    compare_curves("same", ["0x1.8p+1"], ["0x1.8p+1"])
    fails(lambda: compare_curves("m", [(1.5).hex(), (2.0).hex()], [(1.5).hex(), (2.5).hex()]), "m: the loss of step 1", "2.5")
    fails(lambda: compare_curves("m", [], []), "0 and 0 steps")
    fails(lambda: compare_curves("m", [(1.5).hex()] * 2, [(1.5).hex()]), "2 and 1 steps")

    # A check that fails or breaks does not stop the others.
    lines = []
    original = {name: getattr(Checks, name) for name in names_of_checks()}
    assert len(original) >= 12, sorted(original)
    outcomes = [lambda self: ("fine", {"x": 1}), lambda self: need(False, "bad"), lambda self: {}["missing"]]
    wanted = list(original)[:3] + [name for name in original if name.startswith("experiment_")][:1]
    try:
        for name, outcome in zip(wanted, [*outcomes, outcomes[1]]):
            setattr(Checks, name, outcome)
        run_checks(settings, wanted, "", lambda *line: lines.append(line))
    finally:
        for name, function in original.items():
            setattr(Checks, name, function)
    assert [line[1] for line in lines] == ["ok", "fail", "fail", "not_run"] and lines[0][3]["x"] == 1, lines
    assert lines[1][2] == "bad" and "KeyError" in lines[2][2], lines

    about, reason = probe(settings)
    if not reason:
        reason = "self-test"
    report = Report(out, about)
    run_checks(settings, [], reason, report)
    results = [check["result"] for check in report.document["checks"]]
    assert results == ["not_run"] * len(original) and not report.failed, results
    if out:
        with open(out) as file:
            assert json.load(file) == report.document
    print("self-test ok")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--daemon", help="path of vrambrokerd")
    parser.add_argument("--library", help="path of libvrambroker.so.1")
    parser.add_argument("--out", default="", help="the JSON file to write")
    parser.add_argument("--seconds", type=float, default=230.0, help="begin no check after so many")
    parser.add_argument("--only", default="", help="names of checks, with commas between")
    parser.add_argument("--self-test", action="store_true")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--arguments", default="{}", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        # The package as in the source, or as in a bundle; else as installed.
        for folder in ("client/python", "python"):
            path = os.path.join(os.path.dirname(os.path.dirname(HERE)), folder)
            if os.path.isdir(os.path.join(path, "vrambroker")):
                sys.path.insert(0, path)
                break
        globals()["work_" + options.worker](json.loads(options.arguments))
        return 0
    if options.self_test:
        self_test(options.daemon, options.library, options.out)
        return 0
    if not options.daemon or not options.library:
        parser.error("--daemon and --library are needed")
    for path in (options.daemon, options.library):
        if not os.path.exists(path):
            parser.error("%s: no such file" % path)
    wanted = [name for name in options.only.split(",") if name]
    for name in wanted:
        if name not in names_of_checks():
            parser.error("--only: %s is none of %s" % (name, ", ".join(names_of_checks())))
    settings = Settings(os.path.abspath(options.daemon), options.library, options.seconds)
    about, reason = probe(settings)
    report = Report(options.out, dict(about, date=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())))
    report.write()
    if about:
        print("PyTorch %(torch)s, CUDA %(cuda)s, %(gpu)s" % about if "torch" in about else "", flush=True)
    run_checks(settings, wanted, reason, report)
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
