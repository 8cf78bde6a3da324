#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Snapshots as PyTorch's releases write them, and what vramctl makes of the files without a daemon.

  torch_files_test.py VRAMCTL GOLDEN_DIR
"""
import json
import pathlib
import pickle
import subprocess
import sys
import tempfile

MIB = 1 << 20
BASE = 0x7F0000000000


def vramctl(*args):
    return subprocess.run([sys.argv[1], *map(str, args)], capture_output=True, text=True, timeout=600, check=False)


def held(count, device, frames=()):
    """Segments of 20 MiB, each with two blocks of 7 MiB, as PyTorch's allocator places them: with a hole of 6 MiB."""
    events, state = [], []
    for i in range(count):
        at = BASE + i * 32 * MIB
        events.append({"action": "segment_alloc", "addr": at, "size": 20 * MIB, "stream": 0})
        blocks = []
        for j in range(2):
            events.append({"action": "alloc", "addr": at + j * 7 * MIB, "size": 7 * MIB, "stream": 0})
            blocks.append({"size": 7 * MIB, "requested_size": 7 * MIB, "address": at + j * 7 * MIB,
                           "state": "active_allocated", "frames": list(frames)})
        blocks.append({"size": 6 * MIB, "requested_size": 0, "address": at + 14 * MIB, "state": "inactive", "frames": []})
        state.append({"device": device, "address": at, "total_size": 20 * MIB, "allocated_size": 14 * MIB,
                      "active_size": 14 * MIB, "requested_size": 14 * MIB, "stream": 0, "segment_type": "large",
                      "segment_pool_id": (0, 0), "is_expandable": False, "frames": [], "blocks": blocks})
    return events, state


def write(path, value):
    path.write_bytes(pickle.dumps(value, protocol=4))
    return path


def settings(text="", **more):
    return {"PYTORCH_CUDA_ALLOC_CONF": text, "max_split_size": -1, "expandable_segments": False, **more}


def recorded(trace, folder):
    """What PyTorch would have recorded of a trace: a snapshot of vramctl's without the key that is its own."""
    file = folder / "recorded.pickle"
    done = vramctl("replay", trace, "-o", file)
    assert done.returncode == 0, done
    snapshot = pickle.loads(file.read_bytes())
    for entry in snapshot["device_traces"][0]:
        entry.pop("block_size", None)
    return snapshot


def without(snapshot, *actions):
    kept = [entry for entry in snapshot["device_traces"][0] if entry["action"] not in actions]
    return {**snapshot, "device_traces": [kept]}


def skipped_faults(golden, folder):
    """skip_actions of _record_memory_history: one of the two events of a free is enough."""
    kinds = ("free_requested", "free_completed")
    for trace in ("frag_mixed500.trace", "two_stream_overlap.trace.gz"):
        whole = recorded(golden / trace, folder)
        both = vramctl("replay", write(folder / "both.pickle", whole), "--format=json")
        if both.returncode != 0 or "skips" in both.stderr:
            yield f"{trace}, both kinds: {both}"
            continue
        wanted = json.loads(both.stdout)
        for kind in kinds:
            one = vramctl("replay", write(folder / "one.pickle", without(whole, kind)), "--format=json")
            if one.returncode != 0 or f"the recording skips {kind}: each block is taken to be" not in one.stderr:
                yield f"{trace} without {kind}: {one}"
                continue
            found = json.loads(one.stdout)
            # On one stream a block is free as soon as its free is requested: nothing is lost.
            keys = ["allocations", "ooms"] + (["peak_allocated_bytes", "peak_reserved_bytes", "operations"]
                                              if trace == "frag_mixed500.trace" else [])
            if any(found[key] != wanted[key] for key in keys):
                yield f"{trace} without {kind}: {found}, not {wanted}"
            if trace == "frag_mixed500.trace" and "differs" in one.stderr:
                yield f"{trace} without {kind} differs from what was recorded: {one.stderr}"
        neither = vramctl("replay", write(folder / "none.pickle", without(whole, *kinds)))
        if neither.returncode != 2 or "not of one recording without a gap" not in neither.stderr:
            yield f"{trace} without any frees is not refused: {neither}"
    # A block that still waits at the end, and one that became free: the first keeps waiting.
    events, state = held(1, 0)
    state[0]["blocks"][0]["state"] = "active_pending_free"
    state[0]["blocks"][1:] = [{**state[0]["blocks"][2], "size": 13 * MIB, "address": BASE + 7 * MIB}]
    events += [{"action": "free_requested", "addr": BASE + at * 7 * MIB, "size": 7 * MIB, "stream": 0} for at in (0, 1)]
    snapshot = {"segments": state, "device_traces": [events]}
    done = vramctl("replay", write(folder / "waits.pickle", snapshot))
    if done.returncode != 0 or "1 free had to wait" not in done.stderr or "skips free_completed" not in done.stderr:
        yield f"a block that waits at the end: {done}"
    events[-2]["action"] = "oom"  # no free at all of that block, which waits: free_requested was skipped
    events[-2].update(device_free=0)
    events[-1]["action"] = "free_completed"
    done = vramctl("replay", write(folder / "waits.pickle", snapshot))
    if done.returncode != 0 or "skips free_requested" not in done.stderr or "had to wait" in done.stderr:
        yield f"a block whose free_requested was skipped: {done}"


def device_faults(folder):
    """A rank's file has the events of its own device."""
    events, state = held(20, device=1)
    snapshot = {"segments": state, "device_traces": [[], events, [{"action": "snapshot", "addr": 0, "size": 0, "stream": 0}]]}
    rank = write(folder / "rank1.pickle", snapshot)
    for command in ("replay", "tune"):
        for device in (0, 2):
            done = vramctl(command, rank, f"--device={device}")
            wanted = f"device_traces[{device}]: records no events to replay; device 1 has 60 events: give --device 1\n"
            if done.returncode != 2 or not done.stderr.endswith(wanted):
                yield f"{command} of device {device}: {done}"
    done = vramctl("replay", rank, "--device=3")
    wanted = "the snapshot has 3 devices; device 1 has 60 events: give --device 1\n"
    if done.returncode != 2 or not done.stderr.endswith(wanted):
        yield f"a device that is not there: {done}"
    if vramctl("replay", rank, "--device=1").returncode != 0:
        yield "what is advised fails"
    snapshot["device_traces"].append(events[:1])
    done = vramctl("replay", write(folder / "two.pickle", snapshot))
    if "device 1 has 60 events, device 3 has 1 event: give --device 1" not in done.stderr:
        yield f"two devices with events: {done}"
    none = write(folder / "none.pickle", {"segments": state, "device_traces": [[], []]})
    if "device 1 has" in (done := vramctl("replay", none)).stderr or "_record_memory_history" not in done.stderr:
        yield f"no events at all: {done}"


def release_faults(folder):
    """What is advised is for the PyTorch that wrote the file; what needs a newer one says so."""
    events, state = held(20, device=0)
    old = {"segments": state, "device_traces": [events]}
    cases = [
        ("2.0", old, "torch-2.0", "PyTorch 2.2 or older wrote it"),
        ("2.3", {**old, "allocator_settings": settings()}, "torch-2.3", "PyTorch 2.3 or newer wrote it"),
        ("2.7", {**old, "allocator_settings": settings(graph_capture_record_stream_reuse=False)}, "torch-2.7",
         "PyTorch newer than 2.6 wrote it"),
        ("2.6", {**old, "allocator_settings": settings("max_non_split_rounding_mb:64")}, "torch-2.6",
         "PyTorch 2.6 or newer wrote it, by the settings that it had"),
        ("2.14", {**old, "allocator_settings": settings("throw_on_cudamalloc_oom:True")}, "torch-2.14",
         "PyTorch 2.14 or newer wrote it, by the settings that it had"),
    ]
    for name, snapshot, target, words in cases:
        file = write(folder / f"torch{name}.pickle", snapshot)
        text, found = vramctl("tune", file), vramctl("tune", file, "--format=json")
        if text.returncode != 0 or f"{words}" not in text.stdout or json.loads(found.stdout)["for"] != target:
            yield f"PyTorch {name}: {text}, for {json.loads(found.stdout)['for']}"
        advised = [line for line in text.stdout.splitlines() if line.startswith("  PYTORCH")]
        if name == "2.14":
            if not advised or "large_segment_size_mb" not in advised[0]:
                yield f"PyTorch {name} is not advised what it has: {text.stdout}"
            continue
        if any("large_segment_size_mb" in line for line in advised):
            yield f"PyTorch {name} is advised a key that it does not have: {text.stdout}"
        if "PyTorch 2.14 or newer has a better one, large_segment_size_mb:" not in text.stdout:
            yield f"PyTorch {name}: nothing says that a newer one would help: {text.stdout}"
        given = vramctl("tune", file, "--for=vrambroker").stdout
        if "wrote it: tried is" in given or "For that, PyTorch must be 2.14 or newer; " not in given:
            yield f"PyTorch {name}, --for vrambroker: {given}"
    ours = folder / "ours.pickle"
    vramctl("replay", folder / "torch2.0.pickle", "-o", ours)
    found = vramctl("tune", ours)
    if "wrote it" in found.stdout or json.loads(vramctl("tune", ours, "--format=json").stdout)["for"] != "vrambroker":
        yield f"a snapshot of vrambroker's own: {found}"


def main():
    golden = pathlib.Path(sys.argv[2])
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        faults = [*skipped_faults(golden, folder), *device_faults(folder), *release_faults(folder)]
    for fault in faults:
        print(fault)
    print(f"{len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
