#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The checks of vrambroker itself, each by name: checks.py NAME --out FILE --device cuda|host --programs FOLDER...

Each check is a function that starts a daemon and clients, returns (detail, figures), and raises Failed, NotRun or
Refused. On the host device, in a rehearsal, everything but CUDA is real. README.md says what each check proves.
"""
import argparse
import ctypes
import json
import os
import pathlib
import re
import shutil
import signal
import statistics
import tempfile
import time
import traceback

import broker
import machine
from broker import (GIB, MIB, PATIENCE, Client, Daemon, Failed, NotRun, Programs, Refused, expect, now_us, print_logs,
                    visible_gpus, wait_for)


def needs_gpu(programs, why):
    if programs.device != "cuda":
        raise NotRun(f"needs a GPU: {why}")


# ---- Death ----

def daemon_killed(programs):
    """kill -9 of the daemon: kernels go on, growth fails, a new daemon counts right."""
    cuda = programs.device == "cuda"
    daemon = Daemon(programs, None if cuda else "512MiB")  # cuda: all free memory
    before = daemon.device()["capacity_bytes"]
    client = Client(daemon, "survivor")
    size = 4 * GIB if cuda else 256 * MIB  # far more than the client's own CUDA context takes
    held = client.lease(bytes=size)["block"]
    counter = client.malloc(bytes=4096)["block"]
    client.fill(block=held, seed=1)
    stream = client.new_stream()["stream"]
    client.increment(block=counter, ms=int(15000 * PATIENCE), stream=stream)
    daemon.kill()
    value = client.read_word(block=counter)["value"]
    wait_for(lambda: client.read_word(block=counter)["value"] > value, "the kernel goes on after the daemon's death", 10)
    client.expect_holds(held, 1, "after the daemon's death")
    client.fill(block=held, seed=2)
    client.expect_holds(held, 2, "written after the daemon's death")
    refused = client.refusal("lease", bytes=64 * MIB)
    expect(refused.code == "UNAVAILABLE", f"growth without a daemon ended in {refused}, not UNAVAILABLE")
    daemon.start()
    after = daemon.device()["capacity_bytes"]
    if cuda:
        expect(after <= before - size,
               f"the new daemon claims {after} B although a client of the old one still holds {size} B of {before} B")
        expect(after >= before - 8 * GIB, f"the new daemon claims only {after} B of {before} B")
    else:
        expect(after == before, f"capacity was {before}, now {after}")

    def leased():
        try:
            return client.lease(bytes=2 * MIB)
        except Refused:
            return None
    start = time.monotonic()
    wait_for(leased, "the client reaches the new daemon", 30)
    client.expect_holds(held, 2, "with a new daemon")
    return "memory worked on, growth was UNAVAILABLE, a new daemon took over", {
        "capacity_before_bytes": before, "capacity_after_bytes": after,
        "reached_again_s": round(time.monotonic() - start, 2)}


def write_without_end(writer):
    """Lets a kernel of this client write to all of the daemon's memory, for 20 s and more."""
    block = writer.lease(bytes=256 * MIB)["block"]
    writer.fill(block=block, seed=7)
    writer.increment(block=block, ms=int(20000 * PATIENCE), stream=writer.new_stream()["stream"])
    value = writer.read_word(block=block)["value"]
    wait_for(lambda: writer.read_word(block=block)["value"] > value, "the kernel runs")


def expect_unchanged(heir, block):
    """Checks that the next holder's words stay unchanged."""
    heir.fill(block=block, seed=9)
    watched = heir.watch(block=block, seed=9, ms=2000)
    expect(watched["wrong_words"] == 0,
           f"somebody else wrote to the next holder's memory: {watched['wrong_words']} words in {watched['looks']} looks")
    return watched


def client_killed(programs):
    """kill -9 of a client whose kernel writes: another client gets the memory only after the process's end, free of
    foreign writes."""
    daemon = Daemon(programs, "256MiB", 'settle_time: "300ms"\n')
    writer = Client(daemon, "writer")
    heir = Client(daemon, "heir", wait_ms=int(30000 * PATIENCE))  # before the kernel begins: the start may take long
    write_without_end(writer)
    heir.send("lease", bytes=256 * MIB)
    expect(not heir.answered(0.3), "memory in use was given to another client")
    killed = now_us()
    writer.kill()
    gone = now_us()
    got = heir.receive()
    ms = (got["ended_us"] - killed) / 1e3
    expect(ms >= 300, f"the memory went on {ms:.0f} ms after the kill, before the settle time of 300 ms")
    watched = expect_unchanged(heir, got["block"])
    return f"went on {ms:.0f} ms after the kill (300 of them settling), then unchanged for 2 s", {
        "kill_to_exit_ms": round((gone - killed) / 1e3, 2), "kill_to_next_holder_ms": round(ms, 1), **watched}


def forked_child(programs):
    """kill -9 of a client whose kernel writes and whose forked child lives on: the driver keeps the memory for the
    child, so the daemon keeps the memory, too; the memory comes back with the child's end."""
    daemon = Daemon(programs, "256MiB", 'settle_time: "300ms"\n')
    writer = Client(daemon, "writer")
    heir = Client(daemon, "heir", wait_ms=int(60000 * PATIENCE))
    write_without_end(writer)
    child = writer.fork()
    heir.send("lease", bytes=256 * MIB)
    writer.kill()
    killed = now_us()

    def holders():
        return [pid for entry in daemon.ctl("quarantine")["quarantine"] for pid in entry["holders"]]
    wait_for(lambda: child in holders() or heir.answered(), "the daemon finds the child that holds the memory")
    expect(not heir.answered(3), f"the memory went on within {(now_us() - killed) / 1e3:.0f} ms, while a child of its holder "
           "still had it")
    expect(daemon.device()["reserved_bytes"] == 256 * MIB, f"the daemon no longer counts it: {daemon.device()}")
    ended = now_us()
    os.kill(child, signal.SIGKILL)
    got = heir.receive(60)
    ms = (got["ended_us"] - ended) / 1e3
    watched = expect_unchanged(heir, got["block"])
    return f"kept for 3 s while the child lived, went on {ms:.0f} ms after its end, then unchanged for 2 s", {
        "child_end_to_next_holder_ms": round(ms, 1), **watched}


def client_crashed(programs):
    """A sticky error of a client (an illegal address) harms neither the daemon nor another client."""
    needs_gpu(programs, "an illegal address on the device")
    daemon = Daemon(programs, "1GiB")
    healthy, broken = Client(daemon, "healthy"), Client(daemon, "broken")
    block = healthy.lease(bytes=64 * MIB)["block"]
    healthy.fill(block=block, seed=1)
    lost = broken.lease(bytes=64 * MIB)["block"]
    error = broken.crash()["error"]
    expect(error != "cudaSuccess", "writing to nowhere was no error")
    healthy.expect_holds(block, 1, "after another client's crash")
    healthy.lease(bytes=64 * MIB)
    expect(daemon.process.poll() is None, f"the daemon has ended: {daemon.log()}")
    try:
        broken.free(block=lost)
        returned = "OK"
    except Refused as refused:
        returned = str(refused)
    broken.kill()
    wait_for(lambda: daemon.held() == 128 * MIB, "the broken client's memory comes back")
    healthy.expect_holds(block, 1, "in the end")
    return f"{error} stayed in its process", {"error": error, "returning_memory_after_it": returned}


# ---- Limits ----

def limit_to_the_byte(programs):
    daemon = Daemon(programs, "512MiB")
    limit = 100 * MIB
    exact = Client(daemon, "exact", limit=str(limit))
    less = Client(daemon, "less", limit=str(limit - 1))
    block = exact.lease(bytes=limit)["block"]  # the last byte of the limit
    exact.fill(block=block, seed=1)
    for command, size in (("lease", 2 * MIB), ("malloc", 1)):
        refused = exact.refusal(command, bytes=size)
        expect(refused.code == "RESOURCE_EXHAUSTED" and "limit" in str(refused).lower(), f"at the limit: {refused}")
    refused = less.refusal("lease", bytes=limit)  # a byte above the limit
    expect(refused.code == "RESOURCE_EXHAUSTED" and "limit" in str(refused).lower(), f"over the limit by 1: {refused}")
    less.lease(bytes=limit - 2 * MIB)
    rest = Client(daemon, "rest")
    rest.lease(bytes=512 * MIB - limit - (limit - 2 * MIB))  # the last byte of the capacity
    refused = rest.refusal("malloc", bytes=1)
    expect(refused.code == "RESOURCE_EXHAUSTED" and "capacity" in str(refused).lower(), f"at the capacity: {refused}")
    exact.expect_holds(block, 1, "after the refusals")
    exact.free(block=block)
    rest.lease(bytes=limit)
    return "limit and capacity were served to the last byte, and not one more", {"limit_bytes": limit}


# ---- Bytes of earlier holders ----

RULES = """
rules { name: "a" session_name: "a-*" tenant: "a" }
rules { name: "b" session_name: "b-*" tenant: "b" }
rules { name: "strict" session_name: "strict-*" tenant: "s" isolation: STRICT }
"""


def tenants_see_nothing(programs):
    """The next session never sees bytes of another tenant, or of a strict session; the device has room for a single
    session."""
    daemon = Daemon(programs, "256MiB", RULES + 'settle_time: "0s"\n')
    figures = {}

    def old_bytes(first, second, how):
        writer = Client(daemon, first)
        block = writer.lease(bytes=256 * MIB)["block"]
        writer.fill(block=block, seed=5)
        writer.expect_holds(block, 5, "before it is given back")
        if how == "returned":
            writer.free(block=block)
        elif how == "killed":
            writer.kill()
        reader = Client(daemon, second, wait_ms=int(20000 * PATIENCE))
        content = reader.look(block=reader.lease(bytes=256 * MIB)["block"], seed=5)
        for client in (reader, writer):
            client.kill()
        wait_for(lambda: daemon.held() == 0, "the memory of both comes back")
        figures[f"{first}_to_{second}_{how}"] = content
        return content

    for first, second in (("a-1", "b-1"), ("strict-1", "strict-2")):
        for how in ("returned", "killed"):
            content = old_bytes(first, second, how)
            expect(content["equal"] == 0, f"{second} saw {content['equal']} words that {first} ({how}) had written")
            expect(content["nonzero"] == 0, f"{second} got {content['nonzero']} words that are not zero after {first}")
    # The control: within a tenant the daemon hands memory on unchanged, so the check above can find old bytes.
    same = old_bytes("a-1", "a-2", "returned")
    expect(same["equal"] > 0, f"the control: the next session of the same tenant should see old bytes, but saw {same}")
    return "nothing was seen across tenants; within a tenant, where it may, the next one sees old bytes", figures


# ---- Many segments, and device numbers ----

def thousand_segments(programs):
    count = 1000 if programs.device == "cuda" else 100
    daemon = Daemon(programs, f"{2 * count}MiB")
    client = Client(daemon, "many")
    leased = client.lease_many(bytes=2 * MIB, count=count)
    looked = client.look_at_many()
    expect(looked == {"segments": count, "wrong_words": 0}, f"segments disturb each other: {looked}")
    reserved = daemon.held()
    expect(reserved == count * 2 * MIB, f"the daemon counts {reserved} B for {count} segments of 2 MiB")
    returned = client.return_many()
    wait_for(lambda: daemon.held() == 0, "all comes back")
    return f"{count} segments of 2 MiB open at once, each with its own bytes", {"lease": leased, "return": returned}


def ordinals_differ(programs):
    """The client finds the daemon's GPU by its UUID, whatever numbers the client and the daemon use."""
    needs_gpu(programs, "CUDA_VISIBLE_DEVICES")
    visible = visible_gpus()
    first = Daemon(programs, "256MiB")
    uuid = first.device()["uuid"]
    first.kill()
    figures = {"uuid": uuid}
    by_uuid = Daemon(programs, "256MiB", environment={"CUDA_VISIBLE_DEVICES": visible[0]})
    client = Client(by_uuid, "by-uuid", environment={"CUDA_VISIBLE_DEVICES": uuid})
    block = client.malloc(bytes=2 * MIB)["block"]
    client.fill(block=block, seed=1)
    client.expect_holds(block, 1, "with CUDA_VISIBLE_DEVICES=UUID")
    try:
        hidden = Client(by_uuid, "hidden", environment={"CUDA_VISIBLE_DEVICES": ""}, use_device=False)
        hidden.malloc(bytes=2 * MIB)
        raise Failed("a client that may see no GPU got memory of one")
    except Refused as refused:
        figures["client_without_gpu"] = str(refused)
    if len(visible) == 1:
        return "by UUID; another number could not be tried: CUDA_VISIBLE_DEVICES leaves one GPU", figures
    try:
        other = Daemon(programs, "256MiB", environment={"CUDA_VISIBLE_DEVICES": visible[1]})
    except Failed as failed:
        figures["daemon_on_second_gpu"] = str(failed)[-500:]
        return "by UUID; another number could not be tried: no daemon starts on a second GPU here", figures
    client = Client(other, "other-number", environment={"CUDA_VISIBLE_DEVICES": ",".join(visible[:2])})
    figures["ordinal_in_client"] = client.terms["ordinal_here"]
    expect(client.terms["ordinal_here"] == 1, f"the daemon's GPU 0 should be the client's 1: {client.terms}")
    block = client.malloc(bytes=2 * MIB)["block"]
    client.fill(block=block, seed=1)
    client.expect_holds(block, 1, "with another number")
    return "by UUID, and with another number", figures


# ---- Streams ----

def freed_while_in_use(programs):
    """A freed block is not reused before the stream that works on it is done; a returned segment has no work left."""
    needs_gpu(programs, "work that is queued on streams")
    daemon = Daemon(programs, "256MiB")
    client = Client(daemon, "streams", limit=str(64 * MIB))
    stream = client.new_stream()["stream"]
    first = client.malloc(bytes=64 * MIB)["block"]  # all of the limit: the next block must wait for this block
    client.record_stream(block=first, stream=stream)
    started = client.spin(ms=600, stream=stream)["started_us"]
    client.fill(block=first, seed=3, stream=stream, queue=True)
    client.free(block=first)
    second = client.malloc(bytes=64 * MIB)
    waited = (second["ended_us"] - started) / 1e3
    expect(waited >= 550, f"the block was reused after {waited:.0f} ms, while a stream worked on it for 600 ms")
    client.fill(block=second["block"], seed=4)
    watched = client.watch(block=second["block"], seed=4, ms=1000)
    expect(watched["wrong_words"] == 0, f"the old stream wrote to the block's next owner: {watched}")
    client.free(block=second["block"])
    client.empty_cache()
    segment = client.lease(bytes=64 * MIB)["block"]
    started = client.spin(ms=600, stream=stream)["started_us"]
    client.fill(block=segment, seed=5, stream=stream, queue=True)
    returned = (client.free(block=segment)["ended_us"] - started) / 1e3
    expect(returned >= 550, f"a segment was back with the daemon after {returned:.0f} ms, with 600 ms of work on it")
    return "neither block nor segment went on before the stream was done", {
        "block_waited_ms": round(waited, 1), "segment_waited_ms": round(returned, 1)}


def trim_during_capture(programs):
    """A trim on the library's thread (cuCtxSynchronize, cuIpcCloseMemHandle) breaks no running capture, and the client
    answers the trim; memory that the capture withheld comes back after the capture's end."""
    needs_gpu(programs, "graph capture")
    figures = {}
    for mode in ("global", "thread_local", "relaxed"):
        daemon = Daemon(programs, "1GiB")
        client = Client(daemon, "capturing")
        client.free(block=client.malloc(bytes=256 * MIB)["block"])  # idle memory, for the trim
        stream = client.new_stream()["stream"]
        client.begin_capture(stream=stream, mode=mode)
        began = now_us()
        trimmed = daemon.ctl("trim", "capturing")  # raises Failed if the trim never completes
        took = (now_us() - began) / 1e3
        left = daemon.device()["reserved_bytes"]
        capture = client.end_capture(stream=stream)["result"]
        expect(capture == "ok", f"mode {mode}: a trim made the capture invalid: {capture}; the trim: {trimmed}")

        def is_back():
            daemon.ctl("trim", "capturing")
            return daemon.held() == 0
        wait_for(is_back, f"mode {mode}: what was idle comes back after the capture")
        client.fill(block=client.lease(bytes=64 * MIB)["block"], seed=1)
        figures[mode] = {"trim_ms": round(took, 1), "reserved_after_trim_bytes": left}
        client.kill()
        daemon.kill()
    return "; ".join(f"{mode}: capture ok, trim in {f['trim_ms']} ms" for mode, f in figures.items()), figures


def judge_memcheck(said, problem):
    """Judges compute-sanitizer's log of a client that ended, or had `problem`."""
    errors = re.search(r"ERROR SUMMARY: (\d+) error", said)
    if errors and errors.group(1) != "0":
        raise Failed(f"compute-sanitizer found {errors.group(1)} errors: {said[:3000]}; {problem}")
    if not errors or "not supported" in said:  # some machines forbid the tool's access to the device
        raise NotRun(f"compute-sanitizer does not work here: {problem} {' '.join(said.split())[-500:]}")
    if problem:
        raise Failed(f"under compute-sanitizer, which found nothing: {problem}")
    return "memcheck found nothing", {"errors": 0}


def memory_errors(programs):
    """compute-sanitizer's memcheck finds no wrong access of the client, over memory from another process."""
    needs_gpu(programs, "compute-sanitizer")
    sanitizer = next((path for path in ("/usr/local/cuda/bin/compute-sanitizer", shutil.which("compute-sanitizer"))
                      if path and pathlib.Path(path).is_file()), None)
    if sanitizer is None:
        raise NotRun("there is no compute-sanitizer")
    daemon = Daemon(programs, "512MiB")
    with tempfile.TemporaryDirectory() as folder:
        log = pathlib.Path(folder, "log")
        problem = ""
        try:
            client = Client(daemon, "sanitized", under=[sanitizer, "--tool=memcheck", "--report-api-errors=no",
                                                        f"--log-file={log}"])
            for take in ("malloc", "lease"):
                block = client.call(take, bytes=64 * MIB)["block"]
                client.fill(block=block, seed=1)
                client.expect_holds(block, 1, "under compute-sanitizer")
                client.free(block=block)
            client.lease_many(bytes=2 * MIB, count=20)
            client.look_at_many()
            client.return_many()
            client.empty_cache()
            client.disconnect()
            client.process.stdin.close()
            wait_for(lambda: client.process.poll() is not None, "compute-sanitizer ends")
        except (Failed, Refused) as error:
            problem = str(error)
        said = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    return judge_memcheck(said, problem)


# ---- Costs ----

def bandwidth(programs):
    daemon = Daemon(programs, "4GiB" if programs.device == "cuda" else "512MiB")
    size = GIB if programs.device == "cuda" else 64 * MIB
    client = Client(daemon, "bandwidth")
    ours = [client.lease(bytes=size)["block"] for _ in range(2)]
    own = [client.own_malloc(bytes=size)["block"] for _ in range(2)]
    rates = {"broker": [], "own": []}
    for _ in range(5):  # alternation: a change of clock meets both kinds
        for name, (to, source) in (("broker", ours), ("own", own)):
            rates[name].append(client.bench_copy(to=to, **{"from": source}, times=20)["gigabytes_per_second"])
    medians = {name: statistics.median(values) for name, values in rates.items()}
    ratio = medians["broker"] / medians["own"]
    figures = {"broker_gigabytes_per_second": round(medians["broker"], 1),
               "own_gigabytes_per_second": round(medians["own"], 1), "ratio": round(ratio, 4), "copied_bytes": size}
    if programs.device == "cuda":
        expect(ratio > 0.97, f"kernels are slower on the broker's memory: {figures}")
    return f"{figures['broker_gigabytes_per_second']} GB/s on the broker's memory, {ratio:.3f} of the process's own", figures


def allocation_cost(programs):
    """Compares cudaMalloc and cudaFree with a new segment, an idle segment of the daemon, and a cached block."""
    cuda = programs.device == "cuda"
    sizes = (2 * MIB, 64 * MIB, GIB, 4 * GIB) if cuda else (2 * MIB, 64 * MIB)
    capacity = "12GiB" if cuda else "512MiB"
    warm = Client(Daemon(programs, capacity), "warm")  # the daemon keeps returned segments for reuse
    cold = Client(Daemon(programs, capacity, 'idle_limit: "1"\n'), "cold")  # the daemon keeps no segment
    figures = {}
    for size in sizes:
        count = 50 if size < GIB else 10
        row = {"driver": warm.bench_pair(of="own", bytes=size, count=count),
               "new_segment": cold.bench_pair(of="segment", bytes=size, count=count),
               "idle_segment": warm.bench_pair(of="segment", bytes=size, count=count),
               "cached_block": warm.bench_pair(of="block", bytes=size, count=1000)}
        warm.empty_cache()
        figures[f"{size // MIB}MiB"] = {
            what: {"take_p50_us": round(pair["take"]["p50_us"], 2), "take_p99_us": round(pair["take"]["p99_us"], 2),
                   "give_p50_us": round(pair["give"]["p50_us"], 2)} for what, pair in row.items()}
    small = (f"{what.replace('_', ' ')} {v['take_p50_us']} us" for what, v in figures["2MiB"].items())
    return "taking 2 MiB, p50: " + ", ".join(small), figures


def new_segments_beside_busy(programs):
    """Measures the cost of a segment from the driver while busy clients use the device."""
    cuda = programs.device == "cuda"
    size = 64 * MIB
    daemon = Daemon(programs, "2GiB", 'idle_limit: "1"\n')  # the daemon keeps no segment for reuse: each segment is new
    client = Client(daemon, "growing")
    others = [Client(daemon, f"busy-{i}") for i in range(3)]
    blocks = [other.lease(bytes=size)["block"] for other in others]
    figures = {}
    for count in (0, 1, 3):
        for other, block in list(zip(others, blocks))[:count]:
            other.send("keep_busy", block=block, ms=10000 if cuda else 1000)
        pair = client.bench_pair(of="segment", bytes=size, count=100)
        figures[f"busy_{count}"] = {
            "beside": sum(not other.answered() for other in others[:count]),  # clients that were busy until the end
            "take_p50_us": round(pair["take"]["p50_us"], 1), "take_p99_us": round(pair["take"]["p99_us"], 1),
            "give_p50_us": round(pair["give"]["p50_us"], 1), "give_p99_us": round(pair["give"]["p99_us"], 1)}
        for other in others[:count]:
            other.receive(30)
    return "taking 64 MiB, p50 and p99: " + ", ".join(
        f"{f['take_p50_us']} and {f['take_p99_us']} us beside {name[5:]}" for name, f in figures.items()), figures


def hand_over(programs):
    """A process returns a segment, another process gets the segment: measures both calls together."""
    size = 256 * MIB
    daemon = Daemon(programs, str(size))
    clients = [Client(daemon, "ping"), Client(daemon, "pong")]
    block = clients[0].lease(bytes=size)["block"]
    took = []
    for turn in range(1, 101):
        giver, taker = clients[(turn - 1) % 2], clients[turn % 2]
        gave = giver.free(block=block)
        got = taker.lease(bytes=size)
        block = got["block"]
        took.append(gave["ended_us"] - gave["started_us"] + got["ended_us"] - got["started_us"])
    took.sort()
    figures = {"p50_us": round(took[49], 1), "p99_us": round(took[98], 1), "count": len(took), "bytes": size}
    return f"256 MiB change hands in {figures['p50_us']} us (p50), {figures['p99_us']} us (p99)", figures


# ---- Experiments: facts that the code does not rely on ----

def return_waits_for_others(programs):
    """How long does giving an idle segment back take while another stream of the process is busy for 500 ms?"""
    needs_gpu(programs, "work that is queued on streams")
    daemon = Daemon(programs, "256MiB")
    client = Client(daemon, "busy")
    segment = client.lease(bytes=64 * MIB)["block"]
    client.spin(ms=500, stream=client.new_stream()["stream"])
    gave = client.free(block=segment)
    ms = (gave["ended_us"] - gave["started_us"]) / 1e3
    return f"{ms:.1f} ms", {"return_ms": round(ms, 2), "other_stream_ms": 500}


class Nvml:
    """Asks NVIDIA's management library about the GPU with this UUID, in bytes; None without an answer."""

    class Process(ctypes.Structure):
        _fields_ = [("pid", ctypes.c_uint), ("used", ctypes.c_ulonglong), ("gi", ctypes.c_uint), ("ci", ctypes.c_uint)]

    def __init__(self, uuid):
        try:
            self._lib = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError as error:
            raise NotRun(f"no NVML: {error}") from None
        self._device = ctypes.c_void_p()
        found = self._lib.nvmlDeviceGetHandleByUUID
        if self._lib.nvmlInit_v2() != 0 or found(uuid.encode(), ctypes.byref(self._device)) != 0:
            raise NotRun(f"NVML does not know {uuid}")

    def used(self):
        memory = (ctypes.c_ulonglong * 3)()  # total, free, used
        return memory[2] if self._lib.nvmlDeviceGetMemoryInfo(self._device, memory) == 0 else None

    def used_by(self, pid):
        count, processes = ctypes.c_uint(256), (self.Process * 256)()
        call = self._lib.nvmlDeviceGetComputeRunningProcesses_v3
        if call(self._device, ctypes.byref(count), processes) != 0:
            return None
        return next((p.used for p in processes[:count.value] if p.pid == pid and p.used != 2**64 - 1), None)


def who_is_charged(programs):
    """Shows NVML's charge for each process, and the cost of a client's context: the headroom that the daemon leaves."""
    needs_gpu(programs, "NVML")
    nvml = Nvml(machine.gpu().get("uuid", "the GPU"))
    figures = {"empty": {"used": nvml.used()}}

    def note(when, *processes):
        figures[when] = {"used": nvml.used(), **{name: nvml.used_by(p.process.pid) for name, p in processes}}

    daemon = Daemon(programs, "4GiB")
    note("daemon", ("daemon", daemon))
    one = Client(daemon, "one")
    note("one_client", ("daemon", daemon), ("one", one))
    two = Client(daemon, "two")
    note("two_clients", ("daemon", daemon), ("one", one), ("two", two))
    one.fill(block=one.lease(bytes=GIB)["block"], seed=1)
    note("one_holds_1GiB", ("daemon", daemon), ("one", one), ("two", two))
    daemon.kill()
    time.sleep(1)
    note("daemon_killed", ("one", one), ("two", two))
    seen = two.memory_info()
    one.kill()
    back = -1.0
    start = time.monotonic()
    while time.monotonic() < start + 10:
        if two.memory_info()["free_bytes"] >= seen["free_bytes"] + GIB:
            back = time.monotonic() - start
            break
        time.sleep(0.01)
    note("holder_killed", ("two", two))
    figures["back_after_holder_s"] = round(back, 3)
    context = ((figures["two_clients"]["used"] or 0) - (figures["one_client"]["used"] or 0)) / MIB
    return (f"a client's context takes {context:.0f} MiB; a dead daemon's GiB came back {back:.2f} s after its holder's "
            "death"), figures


CHECKS = {function.__name__: function for function in (
    daemon_killed, client_killed, forked_child, client_crashed, limit_to_the_byte, tenants_see_nothing, thousand_segments,
    ordinals_differ, freed_while_in_use, trim_during_capture, bandwidth, memory_errors)}
# Checks that must also hold for clients with another user than the daemon's.
AS_ANOTHER_USER = ("daemon_killed", "client_killed", "client_crashed", "limit_to_the_byte", "tenants_see_nothing",
                   "thousand_segments", "freed_while_in_use")
ANOTHER_USER = 65534
EXPERIMENTS = {function.__name__: function for function in (
    allocation_cost, new_segments_beside_busy, hand_over, return_waits_for_others, who_is_charged)}
# Needs of the machine, beside the needs of every session; names of capabilities.py.
NEEDS = {"forked_child": ("proc_fd",), "who_is_charged": ("nvml",)}


def step_name(check, client_uid):
    return check if client_uid is None else f"{check}_as_uid_{client_uid}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("name", choices=[*CHECKS, *EXPERIMENTS])
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--device", choices=("cuda", "host"), default="cuda")
    parser.add_argument("--programs", nargs="+", required=True)
    parser.add_argument("--client-uid", type=int, help="run the clients as this user; for root")
    parser.add_argument("--seconds", type=float, default=0, help="when it will be killed: says before where it stands")
    args = parser.parse_args()

    def late(_, frame):
        traceback.print_stack(frame)
        print_logs()

    signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, max(args.seconds - 2, 0))
    kind = "check" if args.name in CHECKS else "experiment"
    broker.client_uid = args.client_uid
    check = {"name": step_name(args.name, args.client_uid), "kind": kind, "result": "ok"}
    try:
        check["detail"], check["figures"] = {**CHECKS, **EXPERIMENTS}[args.name](Programs(args.programs, args.device))
    except NotRun as why:
        check.update(result="not_run", detail=str(why))
    except (Failed, Refused) as why:
        # An experiment has no wrong answer; an experiment that failed counts as not run.
        check.update(result="fail" if kind == "check" else "not_run", detail=str(why))
        traceback.print_exc()
        print_logs()
    args.out.write_text(json.dumps({"checks": [check]}), encoding="utf-8")
    return 1 if check["result"] == "fail" else 0


if __name__ == "__main__":
    raise SystemExit(main())
