#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks that PyTorch's readers can read a memory snapshot. Usage: torch_snapshot_readable.py FILE...

The script needs no PyTorch. Exit code: 0, or 1 and a line for each fault. Before checking the files, the script checks
snapshots with known faults: a check that misses its fault makes the script fail.
"""
import bisect
import copy
import io
import pickle
import pickletools
import sys

# Opcodes known to the viewer's own reader (a script in a web page).
VIEWER_OPCODES = {
    "PROTO", "FRAME", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1",
    "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE", "EMPTY_LIST", "EMPTY_DICT", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2",
    "TUPLE3", "LIST", "DICT", "APPEND", "APPENDS", "SETITEM", "SETITEMS", "BINPUT", "LONG_BINPUT", "MEMOIZE", "BINGET",
    "LONG_BINGET"}
STATES = {"active_allocated", "active_pending_free", "inactive"}
BLOCK_ACTIONS = {"alloc", "free_requested", "free_completed"}
SEGMENT_ACTIONS = {"segment_alloc", "segment_free"}
MAX_ITEMS_PER_APPEND = 1000
SEGMENT_KEYS = {"device": int, "address": int, "total_size": int, "allocated_size": int, "active_size": int,
                "requested_size": int, "stream": int, "segment_type": str, "segment_pool_id": tuple,
                "is_expandable": bool, "frames": list, "blocks": list}
BLOCK_KEYS = {"address": int, "size": int, "requested_size": int, "state": str, "frames": list}
SETTINGS_KEYS = {"PYTORCH_CUDA_ALLOC_CONF": str, "max_split_size": int, "garbage_collection_threshold": float,
                 "expandable_segments": bool, "roundup_power2_divisions": dict}


class PlainUnpickler(pickle.Unpickler):
    def find_class(self, module, name):
        raise pickle.UnpicklingError(f"the file asks for {module}.{name}")

    def persistent_load(self, pid):
        raise pickle.UnpicklingError("the file has persistent ids")


class Fault(Exception):
    pass


def need(condition, message):
    if not condition:
        raise Fault(message)


def need_keys(value, keys, path):
    need(type(value) is dict, f"{path}: not a dict")
    for key, kind in keys.items():
        need(key in value, f"{path}.{key}: missing")
        need(type(value[key]) is kind, f"{path}.{key}: {type(value[key]).__name__}, not {kind.__name__}")


def check_opcodes(data):
    """Checks limits of the viewer: few opcodes, protocols 2 to 4, integers of 8 bytes, short lists as arguments."""
    since_mark = []  # number of values above each mark
    for opcode, argument, position in pickletools.genops(data):
        need(opcode.name in VIEWER_OPCODES, f"byte {position}: the viewer does not know {opcode.name}")
        if opcode.name == "PROTO":
            need(2 <= argument <= 4, f"byte {position}: protocol {argument}, the viewer reads 2 to 4")
        if opcode.name == "LONG1":
            need(-2**63 <= argument < 2**63, f"byte {position}: the viewer does not calculate with {argument}")
        # Counts the values that the opcode takes from the stack and puts there.
        if opcode.name == "MARK":
            since_mark.append(0)
        elif pickletools.markobject in opcode.stack_before:
            values = since_mark.pop()
            if opcode.name == "APPENDS":
                need(values <= MAX_ITEMS_PER_APPEND, f"byte {position}: {values} items at once")
            if since_mark and opcode.name in ("TUPLE", "LIST", "DICT"):
                since_mark[-1] += 1
        elif since_mark:
            since_mark[-1] += len(opcode.stack_after) - len(opcode.stack_before)


def check_frames(frames, path):
    for i, frame in enumerate(frames):
        need_keys(frame, {"filename": str, "line": int, "name": str}, f"{path}[{i}]")


def check_segment(segment, path):
    need_keys(segment, SEGMENT_KEYS, path)
    need(segment["segment_type"] in ("small", "large"), f"{path}.segment_type: {segment['segment_type']!r}")
    need(len(segment["segment_pool_id"]) == 2, f"{path}.segment_pool_id: not a pair")
    check_frames(segment["frames"], f"{path}.frames")
    need(segment["blocks"], f"{path}.blocks: empty")
    address = segment["address"]
    allocated = active = requested = 0
    for i, block in enumerate(segment["blocks"]):
        where = f"{path}.blocks[{i}]"
        need_keys(block, BLOCK_KEYS, where)
        check_frames(block["frames"], f"{where}.frames")
        need(block["state"] in STATES, f"{where}.state: {block['state']!r}")
        need(block["address"] == address, f"{where}.address: {block['address']}, the block before it ends at {address}")
        need(block["size"] > 0, f"{where}.size: {block['size']}")
        need(0 <= block["requested_size"] <= block["size"],
             f"{where}.requested_size: {block['requested_size']} of {block['size']}")
        address += block["size"]
        if block["state"] == "active_allocated":
            allocated += block["size"]
        if block["state"] != "inactive":
            active += block["size"]
            requested += block["requested_size"]
    need(address == segment["address"] + segment["total_size"],
         f"{path}: the blocks end at {address - segment['address']} of {segment['total_size']} bytes")
    for key, value in (("allocated_size", allocated), ("active_size", active), ("requested_size", requested)):
        need(segment[key] == value, f"{path}.{key}: {segment[key]}, the blocks say {value}")


def check_entry(entry, path):
    need_keys(entry, {"action": str, "size": int, "stream": int, "time_us": int}, path)
    need("category" not in entry, f"{path}.category: the viewer fails with it")
    need_keys(entry, {"device_free" if entry["action"] == "oom" else "addr": int}, path)
    need(entry["size"] >= 0, f"{path}.size: {entry['size']}")
    check_frames(entry.get("frames", []), f"{path}.frames")
    if entry["action"] == "annotate":
        need_keys(entry, {"user_metadata": str}, path)
    else:
        need(entry["action"] in BLOCK_ACTIONS | SEGMENT_ACTIONS | {"snapshot", "oom"},
             f"{path}.action: {entry['action']!r}")


def rewind(segments, entries, path):
    """Plays the entries backwards from the segments, like the viewer."""
    starts = sorted(segment["address"] for segment in segments)
    sizes = {segment["address"]: segment["total_size"] for segment in segments}
    blocks = {block["address"]: block["state"] for segment in segments for block in segment["blocks"]
              if block["state"] != "inactive"}

    def segment_at(address):
        i = bisect.bisect_right(starts, address) - 1
        return starts[i] if i >= 0 and address < starts[i] + sizes[starts[i]] else None

    for i in range(len(entries) - 1, -1, -1):
        entry, where = entries[i], f"{path}[{i}]"
        action, address = entry["action"], entry.get("addr")
        if action in BLOCK_ACTIONS:
            need(segment_at(address) is not None, f"{where}: {action} of {address}, in no segment of that moment")
        if action == "alloc":
            need(blocks.pop(address, None) != "active_pending_free",
                 f"{where}: {address} was freed without a free_requested")
        elif action == "free_requested":
            need(blocks.get(address) == "active_pending_free", f"{where}: the free of {address} neither completes nor waits")
            blocks[address] = "active_allocated"
        elif action == "free_completed":
            need(address not in blocks, f"{where}: {address} is in use after its free")
            blocks[address] = "active_pending_free"
        elif action == "segment_alloc":
            need(sizes.get(address) == entry["size"], f"{where}: no such segment afterwards")
            inside = [block for block in blocks if address <= block < address + entry["size"]]
            need(not inside, f"{where}: has blocks in use before it exists: {inside[:3]}")
            starts.remove(address)
            del sizes[address]
        elif action == "segment_free":
            need(segment_at(address) is None, f"{where}: overlaps another segment")
            bisect.insort(starts, address)
            sizes[address] = entry["size"]


def check_snapshot(snapshot):
    need_keys(snapshot, {"segments": list, "device_traces": list, "allocator_settings": dict,
                         "external_annotations": list}, "snapshot")
    need_keys(snapshot["allocator_settings"], SETTINGS_KEYS, "allocator_settings")
    divisions = snapshot["allocator_settings"]["roundup_power2_divisions"]
    need(list(divisions) == [str(2**i) for i in range(16)], f"roundup_power2_divisions: keys {list(divisions)}")
    last = {}
    for i, segment in enumerate(snapshot["segments"]):
        check_segment(segment, f"segments[{i}]")
        device = segment["device"]
        need(0 <= device < len(snapshot["device_traces"]), f"segments[{i}].device: {device} has no list in device_traces")
        need(segment["address"] >= last.get(device, 0), f"segments[{i}].address: overlaps, or not in order")
        last[device] = segment["address"] + segment["total_size"]
    for device, entries in enumerate(snapshot["device_traces"]):
        path = f"device_traces[{device}]"
        need(type(entries) is list, f"{path}: not a list")
        for i, entry in enumerate(entries):
            check_entry(entry, f"{path}[{i}]")
        for i in range(1, len(entries)):
            need(entries[i - 1]["time_us"] <= entries[i]["time_us"], f"{path}[{i}].time_us: earlier than the one before")
        rewind([segment for segment in snapshot["segments"] if segment["device"] == device], entries, path)


def check_bytes(data):
    check_opcodes(data)
    try:
        snapshot = PlainUnpickler(io.BytesIO(data)).load()
    except Exception as error:  # broken files may raise any exception
        raise Fault(f"cannot be loaded: {error}") from error
    check_snapshot(snapshot)
    return snapshot


def good_snapshot():
    def block(address, size, state):
        return {"address": address, "size": size, "requested_size": size, "state": state, "frames": []}

    def entry(action, addr, size):
        return {"action": action, "device_free" if action == "oom" else "addr": addr, "size": size, "stream": 0,
                "time_us": 1}

    return {
        "segments": [{
            "device": 0, "address": 4096, "total_size": 2048, "allocated_size": 512, "active_size": 1024,
            "requested_size": 1024, "stream": 0, "segment_type": "small", "segment_pool_id": (0, 0),
            "is_expandable": False, "frames": [],
            "blocks": [block(4096, 512, "active_allocated"), block(4608, 512, "active_pending_free"),
                       block(5120, 1024, "inactive")]}],
        "device_traces": [[
            entry("segment_alloc", 8192, 512), entry("alloc", 8192, 512), entry("free_requested", 8192, 512),
            entry("free_completed", 8192, 512), entry("segment_free", 8192, 512), entry("oom", 0, 99),
            entry("segment_alloc", 4096, 2048), entry("alloc", 4096, 512), entry("alloc", 4608, 512),
            entry("free_requested", 4608, 512), entry("snapshot", 0, 1024)]],
        "allocator_settings": {
            "PYTORCH_CUDA_ALLOC_CONF": "", "max_split_size": -1, "garbage_collection_threshold": 0.0,
            "expandable_segments": False, "roundup_power2_divisions": {str(2**i): 0 for i in range(16)}},
        "external_annotations": []}


def self_test():
    """Returns the faults of the checks themselves."""
    def segment(s):
        return s["segments"][0]

    def block(s, i):
        return segment(s)["blocks"][i]

    def entries(s):
        return s["device_traces"][0]

    faults = []
    bad = {
        "segments: missing": lambda s: s.pop("segments"),
        "device_traces: missing": lambda s: s.pop("device_traces"),
        "allocator_settings: missing": lambda s: s.pop("allocator_settings"),
        "roundup_power2_divisions: keys": lambda s: s["allocator_settings"]["roundup_power2_divisions"].pop("1"),
        "stream: missing": lambda s: segment(s).pop("stream"),
        "is_expandable: int": lambda s: segment(s).update(is_expandable=0),
        "device: 1 has no list": lambda s: segment(s).update(device=1),
        "not in order": lambda s: s["segments"].append(copy.deepcopy(segment(s))),
        "segment_type: 'tiny'": lambda s: segment(s).update(segment_type="tiny"),
        "the blocks end at 1024 of 2048": lambda s: segment(s)["blocks"].pop(),
        "ends at 4608": lambda s: block(s, 1).update(address=4609),
        "state: 'active_awaiting_free'": lambda s: block(s, 1).update(state="active_awaiting_free"),
        "requested_size: 513 of 512": lambda s: block(s, 0).update(requested_size=513),
        "allocated_size: 0, the blocks say 512": lambda s: segment(s).update(allocated_size=0),
        "active_size: 0, the blocks say 1024": lambda s: segment(s).update(active_size=0),
        "requested_size: 0, the blocks say 1024": lambda s: segment(s).update(requested_size=0),
        "frames[0].line: missing": lambda s: block(s, 0).update(frames=[{"filename": "a", "name": "b"}]),
        "[1].addr: missing": lambda s: entries(s)[1].pop("addr"),
        "[5].device_free: missing": lambda s: entries(s)[5].pop("device_free"),
        "[1].category: the viewer fails": lambda s: entries(s)[1].update(category="x"),
        "[1].action: 'dance'": lambda s: entries(s)[1].update(action="dance"),
        "[10].time_us: earlier": lambda s: entries(s)[10].update(time_us=0),
        "[2]: the free of 8192 neither completes": lambda s: entries(s).pop(3),
        "[11]: 4608 is in use after its free": lambda s: entries(s).append(dict(entries(s)[3], addr=4608)),
        "[9]: free_completed of 99999, in no segment": lambda s: entries(s).insert(9, dict(entries(s)[3], addr=99999)),
        "[6]: has blocks in use before it exists": lambda s: entries(s).pop(7),
        "[6]: no such segment afterwards": lambda s: entries(s)[6].update(size=512),
        "[7]: overlaps another segment": lambda s: entries(s).insert(7, dict(entries(s)[4], addr=4608)),
        "[8]: 4608 was freed without": lambda s: entries(s).pop(9),
    }
    try:
        check_bytes(pickle.dumps(good_snapshot(), 4))
        check_bytes(pickle.dumps(good_snapshot(), 2))
    except Fault as fault:
        faults.append(f"the good one: {fault}")
    for expected, spoil in bad.items():
        snapshot = good_snapshot()
        spoil(snapshot)
        try:
            check_bytes(pickle.dumps(snapshot, 4))
            faults.append(f"nothing was said of: {expected}")
        except Fault as fault:
            if expected not in str(fault):
                faults.append(f"instead of {expected!r}: {fault}")
    for expected, data in (
            ("does not know GLOBAL", b"\x80\x02cos\nsystem\n."), ("protocol 5", pickle.dumps(good_snapshot(), 5)),
            ("1001 items at once", b"\x80\x04](" + b"N" * 1001 + b"e."), ("calculate", pickle.dumps(2**63, 4)),
            ("1001 items at once", b"\x80\x04](" + b"](NNe" * 1001 + b"e.")):
        try:
            check_opcodes(data)
            faults.append(f"nothing was said of: {expected}")
        except Fault as fault:
            if expected not in str(fault):
                faults.append(f"instead of {expected!r}: {fault}")
    try:
        PlainUnpickler(io.BytesIO(b"\x80\x02cos\nsystem\n.")).load()
        faults.append("a class was loaded")
    except pickle.UnpicklingError:
        pass
    return faults


def main():
    faults = self_test()
    for fault in faults:
        print(f"self-test: {fault}")
    if faults or len(sys.argv) < 2:
        print(__doc__.splitlines()[0])
        return 2
    result = 0
    for name in sys.argv[1:]:
        try:
            with open(name, "rb") as file:
                snapshot = check_bytes(file.read())
            blocks = sum(len(segment["blocks"]) for segment in snapshot["segments"])
            entries = sum(len(trace) for trace in snapshot["device_traces"])
            print(f"{name}: {len(snapshot['segments'])} segments, {blocks} blocks, {entries} entries")
        except (Fault, OSError, ValueError) as fault:  # pickletools raises ValueError on rubbish
            print(f"{name}: {fault}")
            result = 1
    return result


if __name__ == "__main__":
    sys.exit(main())
