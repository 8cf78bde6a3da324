# SPDX-License-Identifier: Apache-2.0
"""Real PyTorch on memory of the broker, without a GPU: run.sh BUILD_DIR PACKAGES trainers.py. Prints a line for each
check.

A process caches 60 % of the device and is idle when another process asks for 60 %. The checks ignore the results of
kernels: kernels do nothing here."""
import sys
import threading
import time
import warnings

import torch
import torch.multiprocessing
import vrambroker.torch

MIB = 1 << 20
LARGE = 600 * MIB  # 60 % of 1 GiB


def check(condition, text):
    print("%-5s %s" % ("ok" if condition else "FAIL", text), flush=True)
    if not condition:
        sys.exit(1)


def enable(**options):
    vrambroker.torch._require_gpu = lambda devices: None  # the daemon here has host memory
    return vrambroker.torch.enable(**options)


def take(size):
    return torch.empty(size, dtype=torch.uint8, device="cuda")


def cached_and_idle():
    """Fills PyTorch's cache with 60 % of the device, and waits until PyTorch reports the cache as idle."""
    parts = [take(LARGE // 2) for _ in range(2)]
    del parts
    while vrambroker.torch.status().given_back.idle_bytes < LARGE:
        time.sleep(0.01)


def reason_of(call):
    try:
        call()
        return ""
    except torch.cuda.OutOfMemoryError as error:
        return str(error)


def other(asked, answers):
    """Takes each size from the queue, after giving the memory before back; the last memory goes back at the process's
    end."""
    enable(name="second")
    take(MIB)
    torch.cuda.empty_cache()
    answers.put("ready")
    held = []
    for size in iter(asked.get, 0):
        held.clear()
        torch.cuda.empty_cache()
        began = time.monotonic()
        reason = reason_of(lambda: held.append(take(size)))
        answers.put((reason, time.monotonic() - began))


def train():
    """Trains some steps of an optimizer, with workers that load data."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    data = torch.utils.data.TensorDataset(torch.zeros(64, 64), torch.zeros(64, dtype=torch.long))
    steps = 0
    for x, y in torch.utils.data.DataLoader(data, batch_size=16, num_workers=2):
        loss = torch.nn.functional.cross_entropy(model(x.cuda()), y.cuda())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        steps += 1
    return steps


def main():
    status = enable(name="first", wait=60)
    check(status.mode == "segments", "PyTorch %s: mode segments" % torch.__version__)
    check(train() == 4, "four steps of training, with forked workers that load data")
    status = vrambroker.torch.status()
    check(status.bypass_bytes == 0 and torch.cuda.memory_reserved() == status.devices[0].reserved_bytes,
          "all that PyTorch has reserved is the daemon's")
    torch.cuda.empty_cache()
    spawn = torch.multiprocessing.get_context("spawn")
    asked, answers = spawn.Queue(), spawn.Queue()
    process = spawn.Process(target=other, args=(asked, answers), daemon=True)
    process.start()
    answers.get(timeout=300)

    def second_asks(size=LARGE):
        asked.put(size)
        return answers.get(timeout=300)

    cached_and_idle()
    began = time.monotonic()
    torch.cuda.empty_cache()
    own = time.monotonic() - began
    cached_and_idle()
    reason, took = second_asks()
    check(not reason, "the other process has 60 %% of the device, after %.1f ms; PyTorch's own empty_cache() takes %.1f ms" % (
        1000 * took, 1000 * own))
    # The other process may have its memory before the first process finishes its answer.
    while (given := vrambroker.torch.status().given_back).asked == 0:
        time.sleep(0.01)
    check(given.given_bytes >= LARGE - 424 * MIB and not given.refused, "given back: %s" % (given,))
    second_asks(MIB)
    take(LARGE)
    check(torch.cuda.memory_reserved() >= LARGE, "the first goes on, and leases anew")

    cached_and_idle()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin()
        reason, _ = second_asks()
        graph.capture_end()
    check("vrambroker: out of memory (capacity)" in reason, "while a graph is captured nothing is given")
    check("a CUDA graph is being captured" in vrambroker.torch.status().given_back.why, "and status() says so")
    del graph

    # A request with wait=60 succeeds at once if the process's own cache has the memory.
    cached_and_idle()
    began = time.monotonic()
    large = take(900 * MIB)
    check(time.monotonic() - began < 30, "a request that the own cache can serve does not wait")
    del large
    second_asks(300 * MIB)
    large = take(600 * MIB)
    waiting = threading.Thread(target=lambda: take(400 * MIB))
    waiting.start()
    while vrambroker.load().lib.vrambroker_torch_calls_under_way() == 0:
        time.sleep(0.01)
    del large  # the free and the statistics do not wait for the waiting thread; the thread gets the freed memory
    torch.cuda.memory_stats()
    waiting.join()
    check(True, "frees go on while another thread waits, and serve it")
    torch.cuda.empty_cache()

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.memory._set_allocator_settings("max_split_size_mb:200,expandable_segments:True")
    settings = torch.cuda.memory._snapshot()["allocator_settings"]
    check(len(seen) == 1 and not settings["expandable_segments"] and settings["max_split_size"] == 200 * MIB,
          "expandable_segments is dropped, with a warning; the other settings count")
    reason = reason_of(lambda: take(5000 * MIB))
    check("vrambroker: out of memory (larger_than_device)" in reason and "vrambroker: expandable_segments does not" in reason,
          "an out-of-memory error says why, and what becomes of PyTorch's advice")
    asked.put(0)
    process.join(60)
    vrambroker.torch.disable()
    settings = torch.cuda.memory._snapshot()["allocator_settings"]
    check(not settings["release_lock_on_cudamalloc"] and settings["max_split_size"] == 200 * MIB,
          "disable() leaves the settings that the program wants")


if __name__ == "__main__":
    main()
