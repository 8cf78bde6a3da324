#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Snapshots in the forms of PyTorch's releases, and vramctl's reading of the files without a daemon.

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
FRAMES = {"model": [{"filename": "/x/modules.py", "line": 7, "name": "forward"},
                    {"filename": "/x/train.py", "line": 40, "name": "step"}],
          "cache": [{"filename": "??", "line": 0, "name": "c10::raw_alloc"},
                    {"filename": "/x/cache.py", "line": 12, "name": "append"}]}


def vramctl(*args):
    return subprocess.run([sys.argv[1], *map(str, args)], capture_output=True, text=True, timeout=600, check=False)


def held(count, device, frames=()):
    """Returns segments of 20 MiB, each with two blocks of 7 MiB and a hole of 6 MiB, like PyTorch's allocator."""
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
    """Returns PyTorch's recording of a trace: vramctl's snapshot without vramctl's own key."""
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
    """Each of a free's two events is enough alone. skip_actions of _record_memory_history can drop the other event."""
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
            # A block of a trace with one stream is free as soon as the free is requested, so no figure is lost.
            keys = ["allocations", "ooms"] + (["peak_allocated_bytes", "peak_reserved_bytes", "operations"]
                                              if trace == "frag_mixed500.trace" else [])
            if any(found[key] != wanted[key] for key in keys):
                yield f"{trace} without {kind}: {found}, not {wanted}"
            if trace == "frag_mixed500.trace" and "differs" in one.stderr:
                yield f"{trace} without {kind} differs from what was recorded: {one.stderr}"
        neither = vramctl("replay", write(folder / "none.pickle", without(whole, *kinds)))
        if neither.returncode != 2 or "not of one recording without a gap" not in neither.stderr:
            yield f"{trace} without any frees is not refused: {neither}"
    # The first block still waits at the end, and the second became free. The first keeps waiting.
    events, state = held(1, 0)
    state[0]["blocks"][0]["state"] = "active_pending_free"
    state[0]["blocks"][1:] = [{**state[0]["blocks"][2], "size": 13 * MIB, "address": BASE + 7 * MIB}]
    events += [{"action": "free_requested", "addr": BASE + at * 7 * MIB, "size": 7 * MIB, "stream": 0} for at in (0, 1)]
    snapshot = {"segments": state, "device_traces": [events]}
    done = vramctl("replay", write(folder / "waits.pickle", snapshot))
    if done.returncode != 0 or "1 free had to wait" not in done.stderr or "skips free_completed" not in done.stderr:
        yield f"a block that waits at the end: {done}"
    events[-2]["action"] = "oom"  # the waiting block has no free: free_requested was skipped
    events[-2].update(device_free=0)
    events[-1]["action"] = "free_completed"
    done = vramctl("replay", write(folder / "waits.pickle", snapshot))
    if done.returncode != 0 or "skips free_requested" not in done.stderr or "had to wait" in done.stderr:
        yield f"a block whose free_requested was skipped: {done}"


def device_faults(folder):
    """A rank's file has only the events of the rank's device."""
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
    """The advice fits the PyTorch release that wrote the file. Advice for a newer release names the release."""
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


def line_to_use_faults(folder):
    """The line to use replaces all settings of the job, and so includes the settings that a replay leaves out."""
    events, state = held(20, device=0)
    had = "per_process_memory_fraction:0.4,expandable_segments:False,pinned_use_cuda_host_register:True"
    file = write(folder / "left_out.pickle", {"segments": state, "device_traces": [events], "allocator_settings": settings(had)})
    ignored = "expandable_segments:False,pinned_use_cuda_host_register:True"
    for args, rest in (([], f"per_process_memory_fraction:0.4,{ignored}"), (["--for=torch-2.6"], ignored),
                       (["--alloc-conf=backend:native,max_split_size_mb:512"], "backend:native"),
                       (["--alloc-conf=max_split_size_mb:512"], "")):
        best = json.loads(vramctl("tune", file, *args, "--format=json").stdout)["by_peak_reserved"]
        if not best and "--for=torch-2.6" in args:
            continue  # tune finds no better settings
        conf = best[0]["alloc_conf"]
        wanted = f"PYTORCH_CUDA_ALLOC_CONF={conf}" + (f",{rest}" if rest else "")
        if best[0]["use"] != wanted or f"  {wanted}\n" not in (done := vramctl("tune", file, *args)).stdout:
            yield f"tune {args}: {best[0]['use']!r} instead of {wanted!r}"


def without_daemon_faults(folder):
    """vramctl draws and sums a file's heap without a daemon."""
    empty = folder / "no_daemon"  # a folder without a socket
    _, state = held(2, device=1, frames=FRAMES["cache"])
    file = write(folder / "moment.pickle", {"segments": state, "device_traces": [[], []]})
    sums = ("device 1: 40.00 MiB reserved in 2 segments: 28.00 MiB allocated in 4 blocks, 12.00 MiB fragmented (2 holes, the "
            "largest 6.00 MiB), 0 B reclaimable\n")
    drawn = vramctl("map", file, f"--socket-dir={empty}")
    for part in (sums, "20.00 MiB large [", "append (/x/cache.py:12)", "PINS HOLES"):
        if drawn.returncode != 0 or part not in drawn.stdout or "AT PEAK" in drawn.stdout:
            yield f"map does not print {part!r}: {drawn}"
    maps = json.loads(vramctl("map", file, "--format=json", f"--socket-dir={empty}").stdout)
    if [(each["id"], each["device"], len(each["segments"])) for each in maps["maps"]] != [(None, 1, 2)]:
        yield f"map as JSON: {maps}"
    diagnosed = vramctl("diagnose", file, f"--socket-dir={empty}")
    for part in (sums, "No setting can be tried: the file has no history"):
        if diagnosed.returncode != 0 or part not in diagnosed.stdout or diagnosed.stderr:
            yield f"diagnose does not print {part!r}: {diagnosed}"
    events, state = held(20, device=0)
    history = write(folder / "history.pickle", {"segments": state, "device_traces": [events]})
    diagnosed = vramctl("diagnose", history, f"--socket-dir={empty}")
    for part in ("device 0: 400.00 MiB reserved in 20 segments", "Least reserved memory", "PyTorch 2.2 or older wrote it"):
        if diagnosed.returncode != 0 or part not in diagnosed.stdout:
            yield f"diagnose of a history does not print {part!r}: {diagnosed}"
    (folder / "text.pickle").write_text("a 0 512 0\n", encoding="utf-8")
    for command in ("map", "diagnose"):
        for path, why in ((folder / "missing.pickle", "No such file"), (folder / "text.pickle", "is no pickled snapshot"),
                          (write(folder / "list.pickle", [1]), "snapshot: is a list, not a dict")):
            done = vramctl(command, path)
            if done.returncode != 2 or why not in done.stderr:
                yield f"{command} {path}: {done}"
        done = vramctl(command, file, "--device=2")
        if done.returncode != 2 or "no device 2; the file has 2 devices" not in done.stderr:
            yield f"{command} of a device that is not there: {done}"
        # A name without a file or a path is a session, known only to a daemon.
        if "snapshot" in (done := vramctl(command, "trainer", f"--socket-dir={empty}")).stderr or done.returncode == 0:
            yield f"{command} of a session: {done}"


def growth_faults(folder):
    """vramctl shows the growth between two snapshots by place."""
    def snapshot(name, *parts):
        state = []
        for count, frames in parts:
            _, more = held(count, device=0, frames=frames)
            for segment in more:
                segment["address"] += 1024 * MIB * len(state)
            state += more
        return write(folder / name, {"segments": state, "device_traces": [[]]})

    named = [*FRAMES["model"], {"filename": "", "line": 0, "name": "layer1"}]
    before = snapshot("before.pickle", (2, FRAMES["model"]), (3, FRAMES["cache"]), (1, ()))
    after = snapshot("after.pickle", (1, FRAMES["model"]), (7, FRAMES["cache"]), (1, ()), (2, named))
    done = vramctl("snapshot", "--diff", before, after)
    rows = [" ".join(line.split()) for line in done.stdout.splitlines()]
    wanted = ["GROWTH BEFORE AFTER BLOCKS WHERE", "+56.00 MiB 42.00 MiB 98.00 MiB +8 append (cache.py:12)",
              "+28.00 MiB 0 B 28.00 MiB +4 layer1: forward (modules.py:7) < step (train.py:40)",
              "-14.00 MiB 28.00 MiB 14.00 MiB -2 forward (modules.py:7) < step (train.py:40)"]
    if done.returncode != 0 or rows[-4:] != wanted:
        yield f"growth: {done}"
    if not rows[0].startswith(f"before, {before}: 120.00 MiB reserved in 6 segments: 84.00 MiB allocated in 12 blocks"):
        yield f"sums: {done}"
    found = json.loads(vramctl("snapshot", "--diff", before, after, "--format=json").stdout)
    if [(place["scope"], place["growth_bytes"] // MIB) for place in found["places"]] != [("", 56), ("layer1", 28), ("", -14)]:
        yield f"growth as JSON: {found}"
    if found["after"]["allocated_bytes"] - found["before"]["allocated_bytes"] != 70 * MIB:
        yield f"sums as JSON: {found}"
    if "The same blocks are in use in both" not in (done := vramctl("snapshot", "--diff", before, before)).stdout:
        yield f"no growth: {done}"
    for args, why in ((["--diff", before], "--diff: one file; two are compared"), (["--diff", before, folder / "missing"], "No such file"),
                      (["trainer", "--diff", before, after], "goes with neither SESSION nor -o"),
                      (["--diff", before, after, "-o", folder / "x"], "goes with neither SESSION nor -o"),
                      ([], "SESSION is required, or --diff"), (["trainer"], "say where to: -o FILE")):
        done = vramctl("snapshot", *args)
        if done.returncode != 2 or why not in done.stderr:
            yield f"snapshot {args}: {done}"
    for words in (["snapshot", "--diff", ""], ["snapshot", "--diff", "a", ""]):
        if vramctl("__complete", *words).stdout != ":files\n":
            yield f"completion of {words}"


def main():
    golden = pathlib.Path(sys.argv[2])
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        faults = [*skipped_faults(golden, folder), *device_faults(folder), *release_faults(folder),
                  *line_to_use_faults(folder), *without_daemon_faults(folder), *growth_faults(folder)]
    for fault in faults:
        print(fault)
    print(f"{len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
