#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Real PyTorch on a real GPU with the broker's memory (client/python): the checks of tests/gpu that need PyTorch.

Usage: torch_training.py --daemon VRAMBROKERD --library LIBVRAMBROKER [--out FILE.json] [--seconds N]
                         [--only NAME,...] [--skip NAME,...]
       torch_training.py --self-test [--daemon VRAMBROKERD --library LIBVRAMBROKER] [--out FILE.json]

Prints a line for each check, "ok|FAIL|not run  name  figures", and writes {"checks": [{"name", "result", "detail",
"figures"}, ...]} with results ok, fail and not_run. Exit code 1 when a check failed. Checks named experiment_... only
report their findings. Each check starts daemons and programs of its own, with time limits. After N seconds (default
230) no further check begins; after a quarter more, a check still running is given up.
--self-test does the part that works without PyTorch and a GPU.
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
MARK = "@@vrambroker "  # begins a worker's lines for the orchestrator
# Multiplies the usual time limits; run.py knows the machine's factor.
PATIENCE = float(os.environ.get("VRAMBROKER_TEST_PATIENCE") or 1)

# ====================================================================================================================
# Workers: a process runs a single task. Only workers import torch.
# ====================================================================================================================


def say(**event):
    print(MARK + json.dumps(event), flush=True)


def hear():
    line = sys.stdin.readline()
    if not line:
        sys.exit(0)  # the orchestrator has ended
    return line.strip()


def prepare(arguments):
    """Imports torch, makes torch deterministic, and enables the broker if the task says so."""
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
    """Computes the formula: some library functions for cross entropy and embeddings are not deterministic on a GPU."""
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
        tokens[:, 1::2] = tokens[:, :-1:2].clone()  # a pattern for the model to learn
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
        images[:, 0] += (labels.float() / 2 - 2.5)[:, None, None]  # a pattern for the model to learn
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
    # Raises on autograd's thread, from a function in C++.
    leaf = torch.ones(arguments["leaf"] // 4, device="cuda", requires_grad=True)
    total = leaf.exp().sum()
    filler = torch.empty(arguments["filler"], dtype=torch.uint8, device="cuda")
    try:
        total.backward()
        seen["backward"] = ""
    except torch.cuda.OutOfMemoryError as error:
        seen["backward"] = str(error)
    # The worker goes on after the errors.
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
        others = [torch.full((1 << 20,), 7.0, device="cuda") for _ in range(8)]  # would damage a graph's memory
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
    """Checks that memory of two streams is reused after both are done, and that a request flushes the cache."""
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
    hear()  # the orchestrator has killed the daemon
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


def timed_steps(torch, step, count):
    """Returns the median time of a step, in milliseconds."""
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return round(1000 * statistics.median(times), 4)


def driver_free(torch):
    """Returns the driver's free bytes, whatever the broker says; None without an answer."""
    try:
        return int(torch.cuda.cudart().cudaMemGetInfo(0)[0])
    except Exception:
        return None


def work_full(arguments):
    """Trains, takes all memory that it may have, gives a part back, and trains on."""
    torch = prepare(arguments)
    step = make_gpt(torch)
    for _ in range(5):
        step()
    torch.cuda.synchronize()
    say(event="trained")
    hear()
    held, refusal = [], ""
    while not refusal:
        try:
            held.append(torch.empty(256 * MIB, dtype=torch.uint8, device="cuda"))
        except torch.cuda.OutOfMemoryError as error:
            refusal = str(error)
    say(refusal=refusal, held=len(held), reserved_bytes=daemon_reserved(), driver_free_bytes=driver_free(torch))
    hear()  # the orchestrator answers once all workers are full
    del held[-12:]
    losses = [float(step().item()) for _ in range(5)]
    say(finite=all(loss == loss for loss in losses), driver_free_bytes=driver_free(torch))
    hear()


class Numbers:
    """A data set. At module level, so that a worker made by spawn() finds the class."""

    def __len__(self):
        return 512

    def __getitem__(self, index):
        import torch

        return torch.randn(3, 32, 32, generator=torch.Generator().manual_seed(index)), index % 10


def work_loader(arguments):
    torch = prepare(arguments)
    import torch.utils.data

    nn = torch.nn
    body = nn.Sequential(nn.Conv2d(3, 32, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(8192, 10)).cuda()
    optimizer = torch.optim.SGD(body.parameters(), lr=0.01)
    torch.cuda.synchronize()  # the GPU is in use before the loader makes its workers
    loader = torch.utils.data.DataLoader(Numbers(), batch_size=32, num_workers=2, persistent_workers=True, pin_memory=True,
                                         multiprocessing_context=arguments["start"])
    batches = 0
    for _ in range(2):
        for images, labels in loader:
            loss = cross_entropy(torch, body(images.cuda(non_blocking=True)), labels.cuda(non_blocking=True))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            batches += 1
    torch.cuda.synchronize()
    say(batches=batches, loss=float(loss.item()), torch_reserved=torch.cuda.memory_reserved(),
        daemon_reserved=daemon_reserved())
    hear()


def work_expandable(arguments):
    torch = prepare(arguments)
    import warnings

    import vrambroker.torch

    kept = torch.ones(64 * MIB, dtype=torch.uint8, device="cuda")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    kept = [kept] + [torch.ones(64 * MIB, dtype=torch.uint8, device="cuda") for _ in range(8)]
    step = make_gpt(torch)
    losses = [float(step().item()) for _ in range(3)]
    status = vrambroker.torch.status()
    say(warnings=[str(warning.message) for warning in caught], notices=list(status.notices), bypass_bytes=status.bypass_bytes,
        torch_reserved=torch.cuda.memory_reserved(), daemon_reserved=daemon_reserved(), finite=all(x == x for x in losses))


def work_compiled(arguments):
    torch = prepare(arguments)
    nn = torch.nn
    model = nn.Sequential(nn.Linear(512, 1024), nn.GELU(), nn.Linear(1024, 512)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = torch.compile(model, mode="reduce-overhead")
    into, wanted = torch.randn(256, 512, device="cuda"), torch.randn(256, 512, device="cuda")

    def step():
        torch.compiler.cudagraph_mark_step_begin()
        loss = (compiled(into) - wanted).pow(2).mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return float(loss.item())
    try:
        losses = [step()]
    except Exception as error:
        text = str(error)
        if "Failed to find C compiler" in text or "triton" in text.lower() and "find" in text.lower():
            say(reason=" ".join(text.split())[:300])
            return
        raise
    losses += [step() for _ in range(20)]
    torch.cuda.synchronize()
    skips = torch._dynamo.utils.counters["inductor"].get("cudagraph_skips", 0)
    say(reason="", first=losses[0], last=losses[-1], torch_reserved=torch.cuda.memory_reserved(),
        daemon_reserved=daemon_reserved(), without_graphs=int(skips))


def work_lender(arguments):
    """Holds a large idle cache, and obeys commands: "steps", "empty" or "status"."""
    torch = prepare(arguments)
    import vrambroker.torch

    step = make_resnet(torch)
    for _ in range(5):
        step()

    def cache():
        parts = [torch.empty(arguments["bytes"] // 16, dtype=torch.uint8, device="cuda") for _ in range(16)]
        torch.cuda.synchronize()
        del parts

    before = timed_steps(torch, step, 20)
    cache()
    say(step_ms=before, reserved=daemon_reserved())
    while True:
        what = hear()
        if what == "steps":
            say(step_ms=timed_steps(torch, step, 20), reserved=daemon_reserved())
        elif what == "empty":
            cache()
            cached = daemon_reserved()
            begin = time.perf_counter()
            torch.cuda.empty_cache()
            say(ms=round(1000 * (time.perf_counter() - begin), 3), bytes=cached - daemon_reserved())
        else:
            say(given_back=vrambroker.torch.status().given_back._asdict())


def work_borrower(arguments):
    torch = prepare(arguments)
    step = make_resnet(torch)
    for _ in range(5):
        step()
    say(step_ms=timed_steps(torch, step, 20))
    hear()
    begin, refusal, tensor = time.perf_counter(), "", None
    try:
        tensor = torch.empty(arguments["bytes"], dtype=torch.uint8, device="cuda")
    except torch.cuda.OutOfMemoryError as error:
        refusal = str(error)
    took = time.perf_counter() - begin
    if tensor is not None:
        tensor.fill_(1)
    say(ms=round(1000 * took, 3), refusal=refusal, step_ms=timed_steps(torch, step, 20), reserved=daemon_reserved())
    hear()


def work_self_test(arguments):
    """Stands in for all workers on a machine without PyTorch: answers, ends badly, or never ends."""
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
    """Makes a new child process end with its parent, even if SIGKILL ends the parent."""
    LIBC.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def end(process, patience=15):
    """Kills a process, and waits a limited time: a process in a driver call that never returns cannot be killed."""
    process.kill()
    try:
        process.wait(timeout=patience)
    except subprocess.TimeoutExpired:
        print("process %d cannot be ended, and is left behind" % process.pid, flush=True)
        process.returncode = -signal.SIGKILL


def environment_of_one_gpu():
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    return dict(os.environ, CUDA_VISIBLE_DEVICES=first)


class Settings:
    def __init__(self, daemon, library, seconds):
        self.daemon = daemon
        self.library = library
        self.end = time.monotonic() + seconds  # no check begins later
        self._given_up = time.monotonic() + 1.25 * seconds

    def left(self, at_most):
        return max(1.0, min(at_most, self._given_up - time.monotonic()))

    def too_late(self, text):
        """Returns the error for an answer that missed left(): NotRun if the time was over, else Failed."""
        return NotRun("no time left: " + text) if time.monotonic() >= self._given_up else Failed(text)


class Worker:
    """A program that runs work_NAME(arguments). The end of a `with` block kills the program."""

    def __init__(self, settings, name, arguments, daemon=None, at_most=60.0):
        self.name = name
        self._settings = settings
        self._until = time.monotonic() + settings.left(at_most)
        environment = dict(environment_of_one_gpu(), CUBLAS_WORKSPACE_CONFIG=":4096:8", PYTHONUNBUFFERED="1")
        for variable in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "VRAMBROKER_LIMIT",
                         "VRAMBROKER_NAME"):
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
        """Returns the worker's next event. Raises Failed if the worker ends, fails or is too late."""
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
            pass  # the worker has ended; event() says how

    def ended(self):
        """Waits for the worker's own end. Raises Failed if the worker says more, ends badly, or is too late."""
        try:
            event = self._events.get(timeout=max(0.1, self._until - time.monotonic()))
        except queue.Empty:
            raise self._settings.too_late("%s: does not end; %s" % (self.name, self._last_words())) from None
        need(event is None, "%s: says %s, and does not end" % (self.name, event))
        code = self._process.wait()
        need(code == 0, "%s: ended with code %d; %s" % (self.name, code, self._last_words()))

    def _last_words(self):
        # pread() is needed: a seek would move the program's own place in the file.
        text = os.pread(self._log.fileno(), MIB, max(0, os.fstat(self._log.fileno()).st_size - MIB)).decode(errors="replace")
        lines = [line for line in text.splitlines() if line.strip()]
        return " | ".join(lines[-6:]) or "it said nothing"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        end(self._process)
        self._reader.join(30)  # the worker's children may have its output open for a while
        with contextlib.suppress(OSError):  # lines that the worker never read
            self._process.stdin.close()
        if not self._reader.is_alive():
            self._process.stdout.close()
        self._log.close()


class Daemon:
    """Runs vrambrokerd on the GPU, with its sockets in a folder of its own. The end of a `with` block kills the daemon.
    `capacity` None: the daemon's default."""

    def __init__(self, settings, capacity, device="cuda"):
        self.dir = tempfile.mkdtemp(prefix="vrambroker-torch-")
        self._log_path = os.path.join(self.dir, "log")
        with open(self._log_path, "w") as log:
            self._process = subprocess.Popen(
                [settings.daemon, "--socket_dir=" + self.dir, "--device=" + device, "--http_address=127.0.0.1:0",
                 *(["--capacity=%d" % capacity] if capacity else [])], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env=environment_of_one_gpu(), preexec_fn=end_with_parent)
        until = time.monotonic() + settings.left(120 * PATIENCE)
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
        end(self._process)

    def metrics(self, name, label="client"):
        """Returns the metric by the value of the label; sums all GPUs."""
        with urllib.request.urlopen(self.url, timeout=120) as answer:
            text = answer.read().decode()
        values = {}
        for line in text.splitlines():
            if line.startswith(name + "{") and label + '="' in line:
                value = line.split(label + '="', 1)[1].split('"', 1)[0]
                values[value] = values.get(value, 0) + float(line.rsplit(" ", 1)[1])
        return values

    def held(self):
        """Returns the bytes that sessions hold, or ended processes left."""
        return sum(self.metrics("vrambroker_device_reserved_bytes", "gpu").values()) - sum(
            self.metrics("vrambroker_device_idle_bytes", "gpu").values())

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()
        shutil.rmtree(self.dir, ignore_errors=True)


class Sampler:
    """Records each client's largest reserved bytes during the `with` block, by the daemon's metrics."""

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
        self.warm = False  # an earlier check has read PyTorch's libraries from disk
        self._curves = {}
        self._no_curves = None

    def worker(self, name, daemon=None, **arguments):
        return Worker(self.settings, name, arguments, daemon, at_most=PATIENCE * (60.0 if self.warm else 120.0))

    def daemon(self, capacity=CAPACITY):
        return Daemon(self.settings, capacity)

    def curves(self):
        """Trains both models at once without the broker, and returns the curves. A failed try is final."""
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
                    for turn in range(6):  # a worker works, the other worker waits; each worker is first as often
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
                need("out of memory (limit) on device" in text and "limit 1.00 GiB" in text,
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
        self.all_is_the_daemons(done)
        return "captured and replayed 5 times; its memory is the daemon's, too", done

    def check_idle_memory_goes_to_others(self):
        with self.daemon(4 * GIB) as daemon:
            with self.worker("idle", daemon, bytes=3 * GIB, release=True, enable={"limit": 0.9, "name": "first"}) as first:
                left = first.event()["daemon_reserved"]
                with self.worker("idle", daemon, bytes=3 * GIB, release=False, enable={"limit": 0.9, "name": "second"}) as second:
                    taken = second.event()["daemon_reserved"]
        need(taken >= 3 * GIB, "the second process got %d" % taken)
        return "after empty_cache() of a living process", {"first_reserved_bytes": left, "second_reserved_bytes": taken}

    def check_cache_goes_to_others(self):
        """A job's idle cache goes to another job, which asks once and does not wait; the first job goes on."""
        share = CAPACITY * 6 // 10
        with self.daemon() as daemon, self.worker(
                "lender", daemon, bytes=share, enable={"limit": 0.9, "name": "lender"}) as lender:
            idle = lender.event()
            need(idle["reserved"] >= share, "the first job has only %d in its cache" % idle["reserved"])
            with self.worker("borrower", daemon, bytes=share, enable={"limit": 0.9, "name": "borrower"}) as borrower:
                ready = borrower.event()
                borrower.tell("go")
                got = borrower.event()
                need(not got["refusal"], "the second job was refused what the first one has idle: %s" % got["refusal"][-600:])
                lender.tell("steps")
                after = lender.event()
                lender.tell("status")
                given = lender.event()["given_back"]
            until = time.monotonic() + 30 * PATIENCE
            while daemon.held() > CAPACITY - share:  # the second job's bytes come back
                need(time.monotonic() < until, "%d bytes do not come back" % daemon.held())
                time.sleep(0.05)
            lender.tell("empty")
            own = lender.event()
        return "60 %% in %.1f ms; PyTorch's own time for it (empty_cache() alone) is %.1f ms" % (got["ms"], own["ms"]), {
            "got_ms": got["ms"], "torch_own_ms": own["ms"], "torch_own_bytes": own["bytes"],
            "lent_bytes": given["given_bytes"],
            "lender_step_before_ms": idle["step_ms"], "lender_step_after_ms": after["step_ms"],
            "borrower_step_before_ms": ready["step_ms"], "borrower_step_after_ms": got["step_ms"]}

    def check_three_at_default_capacity(self):
        """Clients that take all of the daemon's memory leave room for CUDA's own memory, by the daemon's default
        headroom."""
        names = ["one", "two", "three"]
        with self.daemon(None) as daemon, contextlib.ExitStack() as stack:
            workers = [stack.enter_context(self.worker("full", daemon, enable={"limit": 1 / 3, "name": name}))
                       for name in names]
            for worker in workers:
                worker.event()
            for worker in workers:
                worker.tell("take it")
            full = [worker.event() for worker in workers]
            for worker in workers:
                worker.tell("train")
            done = [worker.event() for worker in workers]
            capacity = sum(daemon.metrics("vrambroker_device_capacity_bytes", "gpu").values())
        for name, seen in zip(names, full):
            need("out of memory (limit)" in seen["refusal"], "%s was not stopped by its limit, but by this: %s" % (
                name, seen["refusal"][-800:]))
        need(all(seen["finite"] for seen in done), "a loss is not a number")
        free = [seen["driver_free_bytes"] for seen in (*full, *done) if seen["driver_free_bytes"] is not None]
        return "all three were full, and trained on", {
            "capacity_bytes": capacity, "reserved_bytes": sum(seen["reserved_bytes"] for seen in full),
            "least_driver_free_bytes": min(free, default=None)}

    def check_expandable_segments_switched_on(self):
        with self.daemon() as daemon, self.worker("expandable", daemon, enable={"limit": 0.9, "name": "expandable"}) as worker:
            seen = worker.event()
        need(any("expandable_segments" in text for text in seen["warnings"]), "there was no warning: %s" % seen["warnings"])
        need(any("expandable_segments" in text for text in seen["notices"]), "status() does not say so: %s" % seen["notices"])
        need(seen["bypass_bytes"] == 0, "%d came past the broker" % seen["bypass_bytes"])
        self.all_is_the_daemons(seen)
        return "the setting was dropped, with a warning", {"reserved_bytes": seen["daemon_reserved"]}

    def check_data_loaders(self):
        figures = {}
        for start in ("fork", "spawn"):
            for how in ("by_itself", "killed"):
                with self.daemon(4 * GIB) as daemon:
                    with self.worker("loader", daemon, start=start, enable={"limit": 0.9, "name": "loader"}) as worker:
                        done = worker.event()
                        need(done["batches"] == 32 and done["loss"] == done["loss"], "%s: %s" % (start, done))
                        self.all_is_the_daemons(done)
                        if how == "by_itself":
                            worker.tell("end")
                            worker.ended()
                    begin = time.monotonic()  # the job's data loaders see the kill within seconds
                    while daemon.held() > 0:
                        need(time.monotonic() < begin + 30 * PATIENCE, "%s, %s: %d bytes do not come back" % (
                            start, how, daemon.held()))
                        time.sleep(0.05)
                figures["%s_%s_back_s" % (start, how)] = round(time.monotonic() - begin, 2)
        return "trained with two workers, made by fork and by spawn; all came back", figures

    def check_compiled(self):
        with self.daemon() as daemon, self.worker("compiled", daemon, enable={"limit": 0.5, "name": "compiled"}) as worker:
            done = worker.event()
        if done.pop("reason"):
            raise NotRun("torch.compile() does not work here: it finds no compiler")
        need(done["last"] < done["first"], "it learns nothing: %s" % done)
        self.all_is_the_daemons(done)
        need(done["without_graphs"] == 0, "torch.compile() made no CUDA graphs: %s" % done)
        return "torch.compile(mode=\"reduce-overhead\") trains, and its graphs' memory is the daemon's", done

    @staticmethod
    def all_is_the_daemons(seen):
        need(seen["torch_reserved"] == seen["daemon_reserved"], "PyTorch has reserved %d, the daemon accounts for %d" % (
            seen["torch_reserved"], seen["daemon_reserved"]))

    def experiment_pool_mode(self):
        """Tests the claims of PyTorch's sources about an always active pool, for all threads."""
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


def run_checks(settings, wanted, reason, report, skipped=()):
    checks = Checks(settings)
    for name in names_of_checks():
        if wanted and name not in wanted or name in skipped:
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
        except Exception as error:  # whatever the error, the remaining checks go on
            kind = "" if isinstance(error, Failed) else type(error).__name__ + ": "
            # An experiment has no wrong answer; an experiment that failed counts as not run.
            result, detail, figures = "not_run" if name.startswith("experiment_") else "fail", kind + str(error), {}
        checks.warm = True
        report(name, result, detail, dict(figures, seconds=round(time.monotonic() - begin, 1)) if result != "not_run" else {})


class Report:
    """Prints each check, and keeps the file up to date: a run that is cut off loses no result."""

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
    """Returns a description of PyTorch and the GPU, and the reason why no check can run, or ""."""
    try:
        with Worker(settings, "probe", {}, at_most=120 * PATIENCE) as worker:
            about = worker.event()
    except (Failed, NotRun) as failed:
        return {}, "PyTorch cannot be asked: %s" % failed
    return about, about.pop("reason")


# ---- Without PyTorch ----

# Good answers of workers, and changes that count as failures: (worker, number of the answer, field, value).
GOOD_ANSWERS = {
    "check_cache_goes_to_others": (
        {"lender": [{"step_ms": 9, "reserved": CAPACITY}, {"step_ms": 9}, {"given_back": {"given_bytes": 1}},
                    {"ms": 5, "bytes": 1}],
         "borrower": [{"step_ms": 9}, {"ms": 7, "refusal": "", "step_ms": 9}]},
        (("lender", 0, "reserved", GIB), ("borrower", 1, "refusal", "out of memory"))),
    "check_three_at_default_capacity": (
        {"full": [{}, {"refusal": "vrambroker: out of memory (limit)", "reserved_bytes": 1, "driver_free_bytes": 3},
                  {"finite": True, "driver_free_bytes": None}]},
        (("full", 1, "refusal", "CUDA out of memory"), ("full", 2, "finite", False))),
    "check_expandable_segments_switched_on": (
        {"expandable": [{"warnings": ["no expandable_segments"], "notices": ["expandable_segments"], "bypass_bytes": 0,
                         "torch_reserved": 2, "daemon_reserved": 2}]},
        (("expandable", 0, "warnings", ["other"]), ("expandable", 0, "notices", []), ("expandable", 0, "bypass_bytes", 1),
         ("expandable", 0, "torch_reserved", 3))),
    "check_data_loaders": (
        {"loader": [{"batches": 32, "loss": 1.0, "torch_reserved": 2, "daemon_reserved": 2}]},
        (("loader", 0, "batches", 31), ("loader", 0, "loss", float("nan")), ("loader", 0, "daemon_reserved", 1))),
    "check_compiled": (
        {"compiled": [{"reason": "", "first": 2.0, "last": 1.0, "torch_reserved": 2, "daemon_reserved": 2,
                       "without_graphs": 0}]},
        (("compiled", 0, "last", 3.0), ("compiled", 0, "daemon_reserved", 1), ("compiled", 0, "without_graphs", 1))),
}


def self_test_answers(settings, fails):
    """Tests how the checks judge answers, with workers and daemons that only say the answers."""
    class Saying(contextlib.nullcontext):
        def __init__(self, events):
            super().__init__(self)
            self.events = iter(events)

        def event(self):
            return dict(next(self.events))

        def tell(self, line):
            pass

        def ended(self):
            pass

        def metrics(self, name, label="client"):
            return {}

        def held(self):
            return 0

    class Answered(Checks):
        answers = {}

        def worker(self, name, daemon=None, **arguments):
            return Saying(self.answers[name])

        def daemon(self, capacity=CAPACITY):
            return Saying([])

    for name, (answers, wrong) in GOOD_ANSWERS.items():
        checks = Answered(settings)
        checks.answers = answers
        detail, figures = getattr(checks, name)()
        assert detail and json.dumps(figures), name
        for worker, number, field, value in wrong:
            checks.answers = json.loads(json.dumps(answers))
            checks.answers[worker][number][field] = value
            fails(getattr(checks, name))
    checks = Answered(settings)
    checks.answers = {"compiled": [{"reason": "Failed to find C compiler"}]}
    try:
        checks.check_compiled()
        raise AssertionError("did not raise")
    except NotRun:
        pass


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
        fails(worker.ended, "does not end")
    # end() does not wait for a process that cannot be killed.
    with subprocess.Popen(["sleep", "1000"]) as process:
        kill, process.kill = process.kill, lambda: None
        end(process, 0.1)
        assert process.returncode == -signal.SIGKILL
        process.returncode = None
        kill()
    with Worker(Settings("", "", 0), "self_test", {"do": "hang"}) as worker:
        try:
            worker.event()
            raise AssertionError("did not fail")
        except NotRun as late:
            assert "no time left" in str(late), late
    # Starts a daemon on the host device, and checks its figures, and the package that a worker finds.
    if daemon_path and library:
        with Daemon(settings, 256 * MIB, device="host") as daemon:
            with Sampler(daemon) as sampler, Worker(settings, "self_test", {"do": "hold"}, daemon) as worker:
                assert worker.event() == {"bytes": 20 * MIB}
                seen = sampler.samples
                while sampler.samples < seen + 2 and not sampler.problem:
                    time.sleep(0.01)
                assert daemon.metrics("vrambroker_client_limit_bytes") == {"holder": 128 * MIB}
                assert daemon.held() == 20 * MIB
                assert list(daemon.metrics("vrambroker_device_capacity_bytes", "gpu").values()) == [256 * MIB]
                worker.tell("free")
                assert worker.event() == {"bytes": 0}
                assert daemon.metrics("vrambroker_client_reserved_bytes") == {"holder": 0}
                assert daemon.held() == 0
                worker.tell("end")
                worker.ended()
            assert sampler.most == {"holder": 20 * MIB} and not sampler.problem, (sampler.most, sampler.problem)
        assert not os.path.exists(daemon.dir)
        fails(lambda: Daemon(settings, 5, device="host"), "the daemon does not serve", "capacity")
    self_test_answers(settings, fails)
    compare_curves("same", ["0x1.8p+1"], ["0x1.8p+1"])
    fails(lambda: compare_curves("m", [(1.5).hex(), (2.0).hex()], [(1.5).hex(), (2.5).hex()]), "m: the loss of step 1", "2.5")
    fails(lambda: compare_curves("m", [], []), "0 and 0 steps")
    fails(lambda: compare_curves("m", [(1.5).hex()] * 2, [(1.5).hex()]), "2 and 1 steps")

    # A check that fails or breaks does not stop the remaining checks.
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
    parser.add_argument("--skip", default="", help="the same, not these; unknown ones do not matter")
    parser.add_argument("--self-test", action="store_true")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--arguments", default="{}", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        # Prefers the package of the source tree or the bundle; else uses the installed package.
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
    run_checks(settings, wanted, reason, report, options.skip.split(","))
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
