#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The caching allocator as a slow and plain program: the specification that allocator/ is compared with.

It was written from a description of what PyTorch's CUDA caching allocator does, not from its code, and reproduces every
row of the recorded traces beside it. It knows all that vrambroker's allocator does: small and large pool, best fit,
splitting and merging, streams and events, retries, garbage collection, oversize blocks, limits, every statistic.

  model.py [DIR] [NAME...]    replays DIR/NAME.{conf,trace} (default: all beside this file), compares with NAME.expected
  model.py --print DIR NAME   prints its own rows for DIR/NAME.{conf,trace}, in the format of NAME.expected

tests/unit/allocator/heap/differential_test.py imports it as a partner for random traces.
"""
import bisect
import gzip
import json
import os
import sys

MIB = 1 << 20
MIN_BLOCK = 512           # sizes are multiples of it
SMALL_MAX = MIB           # up to here: small pool; also what the rest of a large split must exceed
SMALL_SEGMENT = 2 * MIB
OWN_SEGMENT_MIN = 10 * MIB  # from here a request gets a segment of its own size, rounded up to SEGMENT_STEP
SEGMENT_STEP = 2 * MIB
NO_LIMIT = (1 << 64) - 1

HEADING = ("i,op,res,seg,off,segsize,bsize,alloc_b,alloc_n,active_b,active_n,resv_b,nseg,insplit_b,insplit_n,req_b,"
           "retries,ooms")
NAMES = ("allocation", "segment", "active", "inactive_split", "allocated_bytes", "reserved_bytes", "active_bytes",
         "inactive_split_bytes", "requested_bytes")
SHOWN = ("allocated_bytes", "allocation", "active_bytes", "active", "reserved_bytes", "segment",
         "inactive_split_bytes", "inactive_split", "requested_bytes")


class Settings:
    """A settings string, which must be right: errors are not the model's business."""

    def __init__(self, text=""):
        self.max_split = NO_LIMIT
        self.divisions = [0] * 16
        self.gc = 0.0
        self.large_segment = 20 * MIB
        self.fraction = 1.0
        self.reject = False
        items = dict(self.split(text))
        if "large_segment_size_mb" in items:
            self.large_segment = int(items["large_segment_size_mb"]) * MIB
        self.rounding = self.large_segment
        for key, value in items.items():
            if key == "max_split_size_mb":
                self.max_split = int(value) * MIB
            elif key == "max_non_split_rounding_mb":
                self.rounding = int(value) * MIB
            elif key == "garbage_collection_threshold":
                self.gc = float(value)
            elif key == "per_process_memory_fraction":
                self.fraction = float(value)
            elif key == "throw_on_cudamalloc_oom":
                self.reject = value == "True"
            elif key == "roundup_power2_divisions":
                self.set_divisions(value)

    @staticmethod
    def split(text):
        depth, item = 0, ""
        for ch in text + ",":
            if ch == "," and depth == 0:
                if item:
                    yield tuple(item.split(":", 1))
                item = ""
            else:
                depth += (ch == "[") - (ch == "]")
                item += ch

    def set_divisions(self, value):
        if not value.startswith("["):
            self.divisions = [int(value)] * 16
            return
        last = None
        for part in value.strip("[]").split(","):
            key, count = part.split(":")
            if key == ">":
                self.divisions[last + 1:] = [int(count)] * (15 - last)
                continue
            i = min(int(key).bit_length() - 1, 15)
            for j in range(i + 1) if last is None else (i,):  # the first key is for everything below, too
                self.divisions[j] = int(count)
            last = i

    def divisions_for(self, size):
        return self.divisions[min(max(size.bit_length() - 21, 0), 15)]


class Stat:
    def __init__(self):
        self.current = self.peak = self.allocated = self.freed = 0

    def add(self, n):
        self.current += n
        if n >= 0:
            self.allocated += n
            self.peak = max(self.peak, self.current)
        else:
            self.freed -= n

    def row(self):
        return [self.current, self.peak, self.allocated, self.freed]


class Device:
    """A budget of bytes, and streams whose events finish on request. Addresses only grow."""

    def __init__(self, total):
        self.total, self.used = total, 0
        self.recorded, self.done = {}, {}

    def event(self, stream):
        self.recorded[stream] = self.recorded.get(stream, 0) + 1
        return stream, self.recorded[stream]

    def finished(self, event):
        return self.done.get(event[0], 0) >= event[1]

    def wait(self, event):
        self.done[event[0]] = max(self.done.get(event[0], 0), event[1])

    def sync(self, stream=None):
        for s in self.recorded if stream is None else [stream]:
            self.done[s] = self.recorded.get(s, 0)


class Segment:
    def __init__(self, order, size, stream, pool):
        self.order, self.size, self.stream, self.pool = order, size, stream, pool


class Block:
    """`offset` is from the start of the segment; (segment order, offset) stands for the address."""

    def __init__(self, segment, offset, size):
        self.segment, self.offset, self.size = segment, offset, size
        self.live, self.requested, self.prev, self.next = False, 0, None, None
        self.uses = []   # streams that use it, in the order of record_stream
        self.events = 0  # still to come, once freed
        self.born = 0    # the pool's searches when it was put among the free blocks

    def is_split(self):
        return self.prev is not None or self.next is not None

    def is_free(self):
        return not self.live and self.events == 0 and not self.uses

    def key(self):
        return self.segment.stream, self.size, self.segment.order, self.offset


class Pool:
    """Free blocks in the order of the search."""

    def __init__(self, small):
        self.small, self.searches = small, 0
        self.keys, self.blocks = [], []

    def put(self, block):
        block.born = self.searches
        i = bisect.bisect_left(self.keys, block.key())
        self.keys.insert(i, block.key())
        self.blocks.insert(i, block)

    def take(self, block):
        i = bisect.bisect_left(self.keys, block.key())
        assert self.blocks[i] is block
        del self.keys[i], self.blocks[i]

    def index_from(self, stream, size):
        return bisect.bisect_left(self.keys, (stream, size, -1, 0))

    def age(self, block):
        return self.searches - block.born


class Allocator:
    """`search_after_flush`: whether the free blocks are searched once more when the last attempt at a new segment has
    failed. The original does not, and may refuse a request although the flush has just freed a block that fits
    (pytorch/pytorch issue 189504); vrambroker does. No recorded trace depends on it, random ones do."""

    def __init__(self, settings, device, search_after_flush=False):
        self.settings, self.device, self.search_after_flush = settings, device, search_after_flush
        self.small, self.large = Pool(True), Pool(False)
        self.segments, self.reserved, self.limit = 0, 0, None  # segments: obtained so far
        self.pending = {}  # stream -> [(event, block)], oldest first
        self.stats = {name: [Stat(), Stat(), Stat()] for name in NAMES}  # all, small, large
        self.oversize_allocations, self.oversize_segments = Stat(), Stat()
        self.retries = self.ooms = self.syncs = self.device_allocs = self.device_frees = self.rejections = 0
        # Not statistics: what happened, for those who want to know whether a trace reaches it.
        self.collected = self.oversize_released = self.rescued = 0
        self.set_fraction(settings.fraction)

    def bump(self, pool, name, n):
        for i in (0, 1 if pool.small else 2):
            self.stats[name][i].add(n)

    def set_fraction(self, x):
        self.limit = int(x * float(self.device.total)) if x < 1.0 else None

    def collects(self):
        return self.limit is not None and self.settings.gc > 0

    # -- sizes
    def round(self, n):
        if n < MIN_BLOCK:
            return MIN_BLOCK
        step = MIN_BLOCK
        divisions = self.settings.divisions_for(n)
        if divisions > 1 and n > MIN_BLOCK * divisions:
            step = (1 << (n.bit_length() - 1)) // divisions
        return -(-n // step) * step

    def segment_size(self, n):
        if n <= SMALL_MAX:
            return SMALL_SEGMENT
        if n < OWN_SEGMENT_MIN:
            return self.settings.large_segment
        return -(-n // SEGMENT_STEP) * SEGMENT_STEP

    # -- the request
    def malloc(self, requested, stream):
        """A block, or None."""
        self.poll_events()
        n = self.round(requested)
        pool = self.small if n <= SMALL_MAX else self.large
        if self.collects():
            pool.searches += 1
        block = self.search(pool, n, stream)
        if block is None:
            if self.collects():
                self.collect()
            block, no_retry = self.new_segment(pool, n, stream, False)
            if block is None and no_retry:
                return None
            if block is None and self.release_oversize(pool, n, stream):
                block, _ = self.new_segment(pool, n, stream, False)
            if block is None:
                self.release_all()
                block, _ = self.new_segment(pool, n, stream, True)
            if block is None and self.search_after_flush:
                block = self.search(pool, n, stream)
                self.rescued += block is not None
            if block is None:
                self.ooms += 1
                return None
        return self.hand_out(pool, block, n, requested)

    def search(self, pool, n, stream):
        i = pool.index_from(stream, n)
        if i == len(pool.blocks) or pool.blocks[i].segment.stream != stream:
            return None
        block, cap = pool.blocks[i], self.settings.max_split
        if n < cap <= block.size:
            return None
        if n >= cap and block.size >= n + self.settings.rounding:
            return None
        pool.take(block)
        return block

    def may_split(self, pool, block, n):
        rest = block.size - n
        if pool.small:
            return rest >= MIN_BLOCK
        return n < self.settings.max_split and rest > SMALL_MAX

    def hand_out(self, pool, block, n, requested):
        was_split = block.is_split()
        if self.may_split(pool, block, n):
            rest = block  # the upper part
            block = Block(rest.segment, rest.offset, n)
            block.prev, block.next, rest.prev = rest.prev, rest, block
            if block.prev:
                block.prev.next = block
            rest.offset += n
            rest.size -= n
            pool.put(rest)
            if was_split:
                self.bump(pool, "inactive_split_bytes", -n)
            else:
                self.bump(pool, "inactive_split_bytes", rest.size)
                self.bump(pool, "inactive_split", 1)
        elif was_split:
            self.bump(pool, "inactive_split_bytes", -block.size)
            self.bump(pool, "inactive_split", -1)
        block.live, block.requested = True, requested
        for name, change in (("allocation", 1), ("allocated_bytes", block.size), ("active", 1),
                             ("active_bytes", block.size), ("requested_bytes", requested)):
            self.bump(pool, name, change)
        if block.size >= self.settings.max_split:
            self.oversize_allocations.add(1)
        return block

    def new_segment(self, pool, n, stream, is_retry):
        """(block or None, whether the request is over without a retry)"""
        size = self.segment_size(n)
        self.retries += is_retry
        if self.limit is not None and self.reserved + size > self.limit:
            return None, False
        if self.settings.reject and self.reserved + size > int(self.settings.fraction * float(self.device.total)):
            self.rejections += 1
            return None, True
        if size > self.device.total - self.device.used:
            return None, False
        self.device.used += size
        self.reserved += size
        block = Block(Segment(self.segments, size, stream, pool), 0, size)
        self.segments += 1
        self.bump(pool, "segment", 1)
        self.bump(pool, "reserved_bytes", size)
        if size >= self.settings.max_split:
            self.oversize_segments.add(1)
        self.device_allocs += 1
        return block, False

    # -- freeing
    def record(self, block, stream):
        if stream != block.segment.stream and stream not in block.uses:
            block.uses.append(stream)

    def free(self, block):
        block.live = False
        self.bump(block.segment.pool, "allocation", -1)
        self.bump(block.segment.pool, "allocated_bytes", -block.size)
        if block.size >= self.settings.max_split:
            self.oversize_allocations.add(-1)
        uses, block.uses = block.uses, []
        for stream in uses:
            block.events += 1
            self.pending.setdefault(stream, []).append((self.device.event(stream), block))
        if not uses:
            self.complete_free(block)

    def complete_free(self, block):
        pool, size = block.segment.pool, block.size
        split_blocks = split_bytes = 0
        for other in (block.prev, block.next):
            if other is not None and other.is_free():
                split_blocks -= 1
                split_bytes -= other.size
                self.absorb(block, other)
        pool.put(block)
        if block.is_split():
            split_blocks += 1
            split_bytes += block.size
        # Only the net change is counted.
        if split_blocks:
            self.bump(pool, "inactive_split", split_blocks)
        if split_bytes:
            self.bump(pool, "inactive_split_bytes", split_bytes)
        self.bump(pool, "active", -1)
        self.bump(pool, "active_bytes", -size)
        self.bump(pool, "requested_bytes", -block.requested)

    def absorb(self, block, other):
        other.segment.pool.take(other)
        if block.prev is other:
            block.offset, block.prev = other.offset, other.prev
            if block.prev:
                block.prev.next = block
        else:
            block.next = other.next
            if block.next:
                block.next.prev = block
        block.size += other.size

    # Streams in the order of their numbers: the original's order is that of a hash table. It can change only totals
    # and peaks of inactive_split.
    def poll_events(self):
        for stream in sorted(self.pending):
            queue = self.pending[stream]
            while queue and self.device.finished(queue[0][0]):
                self.event_done(queue.pop(0)[1])
            if not queue:
                del self.pending[stream]

    def wait_events(self):
        self.syncs += 1
        for stream in sorted(self.pending):
            for event, block in self.pending.pop(stream):
                self.device.wait(event)
                self.event_done(block)

    def event_done(self, block):
        block.events -= 1
        if block.events == 0:
            self.complete_free(block)

    # -- giving back
    def release(self, block):
        pool = block.segment.pool
        self.device_frees += 1
        self.device.used -= block.size
        self.reserved -= block.size
        self.bump(pool, "segment", -1)
        self.bump(pool, "reserved_bytes", -block.size)
        if block.size >= self.settings.max_split:
            self.oversize_segments.add(-1)
        pool.take(block)

    def release_all(self):
        self.wait_events()
        for pool in (self.large, self.small):
            for block in [b for b in pool.blocks if not b.is_split()]:
                self.release(block)

    def release_oversize(self, pool, n, stream):
        """Whether so much was released that another attempt makes sense."""
        cap = self.settings.max_split
        if cap == NO_LIMIT:
            return False
        want = max(n, cap)
        i = pool.index_from(stream, want)
        if i < len(pool.blocks) and pool.blocks[i].segment.stream == stream:
            self.release(pool.blocks[i])
            self.oversize_released += 1
            return True
        todo, got = [], 0
        while i > 0 and got < want:
            i -= 1
            block = pool.blocks[i]
            if block.size < cap or block.segment.stream != stream:
                break
            got += block.size
            todo.append(block)
        for block in todo:
            self.release(block)
            self.oversize_released += 1
        return got >= want

    def collect(self):
        goal = int(self.settings.gc * float(self.limit))
        target, got = self.reserved - goal, 0
        pool = self.large
        candidates = [b for b in pool.blocks if not b.is_split()]
        while got < target and candidates:
            mean = sum(pool.age(b) for b in candidates) / len(candidates)
            old = [b for b in candidates if pool.age(b) >= mean]
            for block in old:
                got += block.size
                self.release(block)
                self.collected += 1
            candidates = [b for b in candidates if b not in old]

    def reset_peaks(self):
        for stat in [s for rows in self.stats.values() for s in rows] + [self.oversize_allocations,
                                                                          self.oversize_segments]:
            stat.peak = stat.current


class Replay:
    """One heap that performs the operations of a trace, a line at a time."""

    def __init__(self, settings, device_bytes, fraction=None, search_after_flush=False):
        self.device = Device(device_bytes)
        self.allocator = Allocator(Settings(settings), self.device, search_after_flush)
        if fraction is not None:
            self.allocator.set_fraction(fraction)
        self.live, self.i = {}, -1

    def do(self, line):
        """The row after the operation."""
        self.i += 1
        words = line.split()
        op, result, where = words[0], "ok", ",,,,"
        if op == "a":
            block = self.allocator.malloc(int(words[2]), int(words[3]))
            if block is None:
                self.live.pop(words[1], None)
                result = "oom"
            else:
                self.live[words[1]] = block
                where = f"{block.segment.order},{block.offset},{block.segment.size},{block.size},"
        elif op in ("f", "r"):
            block = self.live.get(words[1])
            if block is None:
                result = "nop"
            elif op == "f":
                self.allocator.free(self.live.pop(words[1]))
            else:
                self.allocator.record(block, int(words[2]))
        elif op == "s":
            self.device.sync(int(words[1]) if len(words) > 1 else None)
        elif op == "e":
            self.allocator.release_all()
        elif op == "frac":
            self.allocator.set_fraction(float(words[1]))
            op = "F"
        elif op == "p":
            self.allocator.reset_peaks()
        else:
            raise ValueError(f"unknown operation {line!r}")
        figures = [self.allocator.stats[name][0].current for name in SHOWN]
        figures += [self.allocator.retries, self.allocator.ooms]
        return f"{self.i},{op},{result},{where}" + ",".join(map(str, figures))

    def final(self):
        """Every statistic, as the last line has it."""
        a = self.allocator
        final = {f"{name}.{pool}": a.stats[name][i].row()
                 for name in NAMES for i, pool in enumerate(("all", "small_pool", "large_pool"))}
        final.update(oversize_allocations=a.oversize_allocations.row(), oversize_segments=a.oversize_segments.row(),
                     num_alloc_retries=a.retries, num_ooms=a.ooms, num_sync_all_streams=a.syncs,
                     num_device_alloc=a.device_allocs, num_device_free=a.device_frees,
                     num_oom_rejections=a.rejections, dev_used=self.device.used)
        return final

    def final_line(self):
        return "#final " + json.dumps(self.final(), separators=(",", ":"))


def read_lines(path):
    with gzip.open(path + ".gz", "rt") if os.path.exists(path + ".gz") else open(path, encoding="utf-8") as file:
        return file.read().splitlines()


def rows_of(folder, name):
    """Heading, rows and final line for the trace of a .conf file."""
    conf = dict(line.split("=", 1) for line in read_lines(f"{folder}/{name}.conf") if "=" in line and line[0] != "#")
    fraction = float(conf["fraction"])
    replay = Replay(conf["alloc_conf"], int(conf["device_bytes"]), fraction if fraction >= 0 else None)
    yield HEADING
    for line in read_lines(f"{folder}/{conf.get('trace', name)}.trace"):
        yield replay.do(line)
    yield replay.final_line()


def first_difference(folder, name):
    """The first row that is not as recorded, or None."""
    expected, got = read_lines(f"{folder}/{name}.expected"), list(rows_of(folder, name))
    for ours, theirs in zip(got, expected):
        if ours != theirs:
            return f"\n  model    {ours}\n  recorded {theirs}"
    return None if len(got) == len(expected) else f"{len(got)} rows, recorded {len(expected)}"


def main():
    if sys.argv[1:2] == ["--print"]:
        print("\n".join(rows_of(sys.argv[2], sys.argv[3])))
        return 0
    folder = sys.argv[1] if len(sys.argv) > 1 else os.path.dirname(os.path.abspath(__file__))
    names = sys.argv[2:] or sorted(f[:-5] for f in os.listdir(folder) if f.endswith(".conf"))
    failed = 0
    for name in names:
        difference = first_difference(folder, name)
        if difference:
            failed += 1
            print(f"FAIL {name}: {difference}")
    print(f"{len(names) - failed} passed, {failed} failed")
    return 1 if failed or not names else 0


if __name__ == "__main__":
    sys.exit(main())
