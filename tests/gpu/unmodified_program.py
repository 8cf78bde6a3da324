# SPDX-License-Identifier: Apache-2.0
"""An ordinary PyTorch program without any knowledge of vrambroker: unmodified_program.py TASK [ARGUMENTS as JSON].

Prints each finding as a line of JSON, and goes on after a line from unmodified.py, which runs the program.
"""
import json
import os
import sys
import time

MIB = 1 << 20


def say(**seen):
    print(json.dumps(dict(seen, pid=os.getpid())), flush=True)


def hear():
    if not sys.stdin.readline():
        sys.exit(0)  # unmodified.py has ended


def take(torch, size, index=0):
    return torch.empty(size, dtype=torch.uint8, device="cuda:%d" % index)


def task_probe(torch):
    """Tells whether PyTorch and a GPU are present."""
    say(torch=torch.__version__, cuda=torch.version.cuda, gpus=torch.cuda.device_count() if torch.cuda.is_available() else 0)


def task_sizes(torch):
    free, total = torch.cuda.mem_get_info()
    say(free=free, total=total, properties=torch.cuda.get_device_properties(0).total_memory)
    hear()
    free, total = torch.cuda.mem_get_info()
    say(free=free, total=total)


def task_fill(torch, piece):
    """Takes all memory that it gets, gives half of the memory back, and takes the half again."""
    def fill(held):
        try:
            while True:
                held.append(take(torch, piece))
        except torch.cuda.OutOfMemoryError as error:
            return str(error)

    held = []
    refusal = fill(held)
    say(bytes=len(held) * piece, refusal=refusal)
    hear()
    del held[len(held) // 2:]
    torch.cuda.empty_cache()
    fill(held)
    say(bytes=len(held) * piece)
    hear()


def task_hold(torch, size):
    say(asks=size)
    held = take(torch, size)
    say(bytes=size)
    hear()
    del held
    torch.cuda.empty_cache()
    say(bytes=0)
    hear()


def task_graph(torch, size):
    """Captures a graph that takes memory during the capture."""
    if not hasattr(torch.cuda, "CUDAGraph"):
        say(missing="this PyTorch has no CUDA graphs")
        return
    start = torch.ones(size // 4, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        _ = (start * 2 + 1).sum()  # makes the objects of the first use
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = (start * 2 + 1).sum()
    for value in (1.0, 3.0):
        start.fill_(value)
        graph.replay()
        torch.cuda.synchronize()
        expected = (value * 2 + 1) * (size // 4)
        if abs(result.item() - expected) > 1e-3 * expected:
            say(wrong="the graph has computed %g, not %g" % (result.item(), expected))
            return
    say(wrong="")
    hear()


def task_all_reduce(torch, size):
    """Runs NCCL between two GPUs, in two processes."""
    import torch.multiprocessing

    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29517")
    torch.multiprocessing.spawn(all_reduce_of_rank, args=(size,), nprocs=2)
    say(wrong="")


def all_reduce_of_rank(rank, size):
    import torch
    import torch.distributed

    torch.cuda.set_device(rank)
    torch.distributed.init_process_group("nccl", rank=rank, world_size=2)
    numbers = torch.full((size // 4,), float(rank + 1), device="cuda:%d" % rank)
    torch.distributed.all_reduce(numbers)
    torch.cuda.synchronize()
    if not bool((numbers == 3).all().item()):
        raise RuntimeError("all_reduce of 1 and 2 is not 3")
    torch.distributed.destroy_process_group()


def task_cost(torch, size, rounds):
    """Measures the seconds of each round. A round gets memory from the driver and gives the memory back."""
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        held = take(torch, size)
        del held
        torch.cuda.empty_cache()
        times.append(time.perf_counter() - begin)
    say(times=times)


if __name__ == "__main__":
    try:
        import torch as torch_module
    except ImportError as missing:
        say(missing="no PyTorch: %s" % missing)
        sys.exit(0)
    arguments = json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
    globals()["task_" + sys.argv[1]](torch_module, **arguments)
