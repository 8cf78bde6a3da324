# SPDX-License-Identifier: Apache-2.0
"""Stands in for PyTorch: the functions and exceptions that vrambroker.torch uses, with as much behaviour as the package
relies on. The standins follow PyTorch's sources; the tests prove how the package behaves towards such functions, and
nothing about PyTorch. Only tests/gpu/torch_training.py uses real PyTorch, on a machine with a GPU."""
import ctypes
import os
import sys
import threading
import types

SEGMENT = 2 << 20


class OutOfMemoryError(RuntimeError):
    pass


class Native:
    """PyTorch's caching allocator, reduced to segments: each tensor is a segment; freed segments go to the cache. Like
    PyTorch, the allocator holds its lock also while it asks for a segment, unless release_lock_on_cudamalloc is set."""

    def __init__(self, lib, settings=""):
        self.lib = lib
        self.segments = {}  # address -> (bytes, pool id or None); segments in use
        self.cached = []  # (address, bytes, pool id)
        self.pools = {}  # id -> [use count, allocator]
        self.active = []  # pool ids, like PyTorch's captures_underway
        self.fraction = 1.0
        self.peak = 0  # peak of the bytes in use
        self.deleted_in_use = 0
        self.first_use = lambda: None
        self.lock = threading.RLock()
        self.settings = {}
        self.settings_text = ""
        self.mallocs = 0  # number of cudaMalloc() calls
        self.capture_fails = False  # a failed capture never ends
        self.graphs_have_pools = False  # like PyTorch's graphs; a graph's pool lives until the graph's reset
        self.graphs = 0  # graphs under capture; PyTorch counts these graphs in captures_underway, too
        self.emptied_in_capture = 0
        self.before_empty = lambda: None
        self.stream = None  # the current stream
        self.set(settings)

    def set(self, text):
        # Settings that `text` does not name stay as they are.
        settings = {name: self.settings[name] for name in (*self.knows, "expandable_segments") if name in self.settings}
        for part in text.split(","):
            if part:
                key, value = part.replace(" ", "").split(":")
                if key not in ("max_split_size_mb", "expandable_segments", *self.knows):
                    raise RuntimeError("Unrecognized CachingAllocator option: " + key)
                settings[key] = value
        self.settings, self.settings_text = settings, text

    knows = ("release_lock_on_cudamalloc",)

    def is_set(self, name):
        return self.settings.get(name, "False").lower() == "true"

    def reserved(self):
        return sum(size for size, _ in self.segments.values()) + sum(size for _, size, _ in self.cached)

    def alloc(self, size):
        self.first_use()
        with self.lock:
            address = self._alloc(size)
            self.peak = max(self.peak, sum(size for size, _ in self.segments.values()))
            return address

    def _alloc(self, size):
        size = -(-size // SEGMENT) * SEGMENT
        pool = self.active[-1] if self.active else None
        for kept in self.cached:
            if kept[1] == size and kept[2] == pool:
                self.cached.remove(kept)
                self.segments[kept[0]] = (size, pool)
                return kept[0]
        address = self._segment(size, pool)
        if not address and not self.active and not self.graphs:  # PyTorch flushes only while no capture runs
            self.empty_cache()
            address = self._segment(size, pool)
        if not address:
            total, free = self.mem_get_info()
            allowed = "%d allowed; " % (self.fraction * self.mem_total()) if self.fraction < 1.0 else ""
            raise OutOfMemoryError("CUDA out of memory. Tried to allocate %.2f MiB. GPU 0 has a total capacity of %d of which "
                                   "%d is free. %sIf reserved but unallocated memory is large try setting "
                                   "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
                                   % (size / (1 << 20), total, free, allowed))
        self.segments[address] = (size, pool)
        return address

    def _segment(self, size, pool):
        if self.fraction < 1.0 and self.reserved() + size > self.fraction * self.mem_total():
            return None
        if pool is not None and self.pools[pool][1] is not None:
            return self.pools[pool][1].alloc(size, 0, self.stream)
        address = ctypes.c_void_p()
        if self.is_set("expandable_segments"):  # PyTorch bypasses cudaMalloc()
            self.lib.standin_outside.restype = ctypes.c_void_p
            return self.lib.standin_outside(ctypes.c_size_t(size))
        self.mallocs += 1
        released = self.is_set("release_lock_on_cudamalloc")
        if released:
            self.lock.release()
        try:
            return address.value if self.lib.standin_malloc(ctypes.byref(address), ctypes.c_size_t(size)) == 0 else None
        finally:
            if released:
                self.lock.acquire()

    def free(self, address):
        with self.lock:
            size, pool = self.segments.pop(address)
            self.cached.append((address, size, pool))

    def empty_cache(self):
        self.before_empty()
        with self.lock:
            if self.graphs:
                self.emptied_in_capture += 1
                raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")
            self._empty_cache()

    def _empty_cache(self):
        for kept in list(self.cached):
            address, size, pool = kept
            if pool is None and self.active or pool is not None and self.pools[pool][0] > 0:
                continue
            self.cached.remove(kept)
            if pool is not None and self.pools[pool][1] is not None:
                self.pools[pool][1].free(address, size, 0, self.stream)
            else:
                self.lib.standin_free(ctypes.c_void_p(address))

    def mem_get_info(self):
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        assert self.lib.standin_mem_get_info(ctypes.byref(free), ctypes.byref(total)) == 0
        return total.value, free.value

    def mem_total(self):
        return 8 << 30

    def use_pool(self, pool, change):
        count = self.pools[pool][0] + change
        assert count >= 0, "a pool released too often"
        self.pools[pool][0] = count


class PluggableInner:
    ALLOC = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
    FREE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)

    def __init__(self, alloc, free):
        self.alloc_address = alloc
        self.alloc, self.free = self.ALLOC(alloc), self.FREE(free)
        self.record_stream = None

    def set_record_stream_fn(self, address):
        self.record_stream = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(address)

    def set_reset_fn(self, address):
        self.reset = ctypes.CFUNCTYPE(None)(address)


def install(standins, version="2.11.0", pool=True, cuda="12.8", available=True, initialized=False):
    """Puts a `torch` into sys.modules, over the standins of libc10.so and its neighbours in the folder `standins`."""
    lib = ctypes.CDLL(standins + "/libc10_cuda.so")
    variables = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    if tuple(map(int, version.split(".")[:2])) < (2, 10):
        variables = variables[:1]
    native = Native(lib, next((os.environ[name] for name in variables if name in os.environ), ""))
    torch = types.ModuleType("torch")
    torch.cuda = types.ModuleType("torch.cuda")
    torch.cuda.memory = memory = types.ModuleType("torch.cuda.memory")
    torch._C = types.ModuleType("torch._C")
    torch.version = types.SimpleNamespace(cuda=cuda)
    torch.__version__ = version
    torch.native, torch.lib = native, lib
    state = types.SimpleNamespace(initialized=initialized, allocator=None)
    torch.state = state

    class Pluggable:
        def __init__(self, path, alloc, free):
            loaded = ctypes.CDLL(path)
            self._inner = PluggableInner(*(ctypes.cast(getattr(loaded, name), ctypes.c_void_p).value for name in (alloc, free)))

        def allocator(self):
            return self._inner

    class MemPool:
        def __init__(self, allocator=None):
            self.id = (0, len(native.pools) + 1)
            native.pools[self.id] = [1, allocator]

        def __del__(self):
            native.deleted_in_use += native.pools[self.id][0] != 1

    class OnDevice:
        def __init__(self, index):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    torch.streams = []  # every stream that became the current stream

    class OnStream:
        def __init__(self, stream):
            self.stream = stream

        def __enter__(self):
            torch.streams.append(self.stream)

        def __exit__(self, *_):
            torch.streams.append(None)

    def caching_allocator_alloc(size, device=None, stream=None):
        return native.alloc(size)

    def change_current_allocator(allocator):
        assert not state.initialized and state.allocator is None, "Can't swap an already initialized allocator"
        state.allocator = allocator.allocator()

    def init():
        state.initialized = True

    native.first_use = init

    def begin(device, pool):
        assert pool not in native.active, "already recording to mempool_id"
        native.use_pool(pool, 1)
        native.active.append(pool)

    def end(device, pool):
        native.active.remove(pool)

    def natively(function):
        def call(*arguments, **keywords):
            assert state.allocator is None, "CUDAPluggableAllocator does not yet support " + function.__name__
            return function(*arguments, **keywords)
        call.__name__ = function.__name__
        return call

    def figures():
        with native.lock:
            used = sum(size for size, _ in native.segments.values())
            return {"reserved_bytes": native.reserved(), "active_bytes": used, "allocated_bytes": used,
                    "requested_bytes": used, "inactive_split_bytes": 0}

    @natively
    def memory_stats(device=None):
        return {name + ".all.current": value for name, value in figures().items()}

    @natively
    def memory_stats_as_nested_dict(device=None):
        nested = {name: {"all": {"current": value}} for name, value in figures().items()}
        nested["allocated_bytes"]["all"]["peak"] = native.peak
        return nested

    def memory_snapshot():
        with native.lock:
            in_use = [(size, pool, size) for size, pool in native.segments.values()]
            return [{"device": 0, "total_size": size, "active_size": active, "segment_pool_id": pool or (0, 0)}
                    for size, pool, active in in_use + [(size, pool, 0) for _, size, pool in native.cached]]

    def _snapshot(device=None):
        return {"segments": [], "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": native.settings_text,
                                                       "expandable_segments": native.is_set("expandable_segments")}}

    def _set_allocator_settings(text):
        return torch._C._cuda_cudaCachingAllocator_set_allocator_settings(text)

    class CUDAGraph:
        pool = None

        def capture_begin(self, pool=None):
            native.graphs += 1
            if native.graphs_have_pools:
                self.pool = (len(native.pools) + 1, 0)
                native.pools[self.pool] = [1, None]
                native.active.append(self.pool)

        def capture_end(self):
            if native.capture_fails:
                raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
            native.graphs -= 1
            if self.pool is not None:
                native.active.remove(self.pool)

        def reset(self):
            if self.pool is not None:
                native.use_pool(self.pool, -1)
                self.pool = None

    class UntypedStorage:
        def _share_cuda_(self):
            raise RuntimeError("CUDA error: invalid argument")

    @natively
    def empty_cache():
        native.empty_cache()

    @natively
    def reset_peak_memory_stats(device=None):
        pass

    @natively
    def reset_accumulated_memory_stats(device=None):
        pass

    def mem_get_info(device=None):
        return native.mem_get_info()

    @natively
    def set_per_process_memory_fraction(fraction, device=None):
        native.fraction = fraction

    @natively
    def get_per_process_memory_fraction(device=None):
        return native.fraction

    # Like PyTorch's functions, these functions call their module's current functions.
    def memory_reserved(device=None):
        return memory.memory_stats(device=device).get("reserved_bytes.all.current", 0)

    def max_memory_allocated(device=None):
        return memory.memory_stats(device=device).get("allocated_bytes.all.peak", 0)

    for function in (memory_stats, memory_stats_as_nested_dict, empty_cache, reset_peak_memory_stats,
                     reset_accumulated_memory_stats, mem_get_info, set_per_process_memory_fraction,
                     get_per_process_memory_fraction, memory_reserved, max_memory_allocated, memory_snapshot, _snapshot,
                     _set_allocator_settings, caching_allocator_alloc):
        setattr(memory, function.__name__, function)
        setattr(torch.cuda, function.__name__, function)
    memory.CUDAPluggableAllocator, memory.change_current_allocator = Pluggable, change_current_allocator
    torch.cuda.OutOfMemoryError = OutOfMemoryError
    torch.cuda.is_available = lambda: available
    torch.cuda.is_initialized = lambda: state.initialized
    torch.cuda.init = init
    torch.cuda.device_count = lambda: 1
    torch.cuda.current_device = lambda: 0
    torch.cuda.device, torch.cuda.stream = OnDevice, OnStream
    torch.cuda.ExternalStream = lambda stream, device=None: stream
    torch.cuda.get_allocator_backend = lambda: "native"
    torch.cuda.get_device_properties = lambda device=None: types.SimpleNamespace(total_memory=native.mem_total())
    torch.device = lambda text: types.SimpleNamespace(index=int(text.split(":")[1]) if ":" in text else None)
    torch.cuda.CUDAGraph, torch.UntypedStorage = CUDAGraph, UntypedStorage
    torch._C._cuda_emptyCache = native.empty_cache
    torch._C._cuda_cudaCachingAllocator_set_allocator_settings = native.set
    if pool:
        torch.cuda.MemPool = MemPool
        torch._C._cuda_beginAllocateToPool, torch._C._cuda_endAllocateToPool = begin, end
        torch._C._cuda_releasePool = lambda device, pool: native.use_pool(pool, -1)
    sys.modules["torch"] = torch
    return torch


def call(torch, address, size):
    """Returns PyTorch's view of an allocation with the function at `address`: (kind, pointer, text); see
    standin_call()."""
    pointer, text = ctypes.c_void_p(), ctypes.create_string_buffer(4096)
    kind = torch.lib.standin_call(ctypes.c_void_p(address), ctypes.c_ssize_t(size), ctypes.byref(pointer), text,
                                  ctypes.c_size_t(4096))
    return kind, pointer.value, text.value.decode()
