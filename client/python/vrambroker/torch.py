# SPDX-License-Identifier: Apache-2.0
"""PyTorch on memory of vrambrokerd.

    import vrambroker.torch
    vrambroker.torch.enable(limit=0.4)      # before or after CUDA is initialised, best before the first tensor

`mode` selects the way. Statements on PyTorch come from its sources (c10/cuda/CUDACachingAllocator.cpp of about 2.11,
torch/csrc/cuda/CUDAPluggableAllocator.cpp); tests/gpu/torch_training.py checks them with the real PyTorch.

"segments"  PyTorch's own caching allocator stays as it is, and the broker answers its cudaMalloc(), cudaFree() and
            cudaMemGetInfo() (vrambroker_torch_serve() in vrambroker.h). All threads, the memory of CUDA graphs, and
            torch.cuda.MemPool objects without their own allocator are covered; caching, statistics, record_stream,
            empty_cache() and the flush before an out-of-memory error are PyTorch's.
"pool"      A torch.cuda.MemPool over the broker, made active for all threads with _cuda_beginAllocateToPool. PyTorch
            treats an active pool like a graph capture under way (PyTorch's list is named captures_underway). So while the
            pool is active, memory used by several streams is not reused before disable()
            (https://github.com/pytorch/pytorch/issues/175015); nothing is flushed before an out-of-memory error
            (https://github.com/pytorch/pytorch/issues/159674); memory of CUDA graphs does not come from the broker.
            empty_cache() is replaced: PyTorch's own would give nothing back from a pool in use. Serves builds of PyTorch
            with a statically linked CUDA runtime, where "segments" is not available.
"plain"     The whole process's allocator (CUDAPluggableAllocator): the broker's caching allocator instead of PyTorch's,
            before CUDA is used for the first time. Functions of torch.cuda not answered by PyTorch then are answered with
            the broker's figures. No CUDA graphs, no torch.cuda.memory_snapshot(), no torch.backends.cudnn.benchmark.
            Serves PyTorch before 2.5, without MemPool, where "segments" fails.
"auto"      "segments", or "pool" if "segments" is not available.

expandable_segments and backend:cudaMallocAsync get memory past the broker and are refused.
"""
from __future__ import annotations

import ctypes
import functools
import importlib
import os
import threading
import warnings
from typing import Any, Callable, Dict, Iterable, List, NamedTuple, Optional, Tuple, Union

from . import _library
from ._client import make_options
from ._errors import Code, Error
from ._figures import Device, Figures
from ._library import format_size
from ._torch_captures import Captures
from ._torch_idle import GivenBack, IdleGiver
from ._torch_patches import Patches
from ._torch_settings import INSTEAD_OF_EXPANDABLE, AllocatorSettings, check_environment, is_expandable

MODES = ("auto", "segments", "pool", "plain")


class ServedDevice(NamedTuple):
    """A GPU of this process served by the daemon. Sizes are bytes."""

    cuda: int  # PyTorch's ordinal
    ordinal: int  # the daemon's
    uuid: str
    limit_bytes: int
    reserved_bytes: int  # segments held by the session


class Status(NamedTuple):
    """Routes of PyTorch's memory; str() is for people."""

    mode: Optional[str]  # None: not enabled
    reason: str  # why "auto" could not choose "segments"
    session: str
    library: str
    devices: Tuple[ServedDevice, ...]
    outside_bytes: int  # reserved by PyTorch from CUDA itself before enable()
    answered: Tuple[str, ...]  # functions of torch.cuda answered by this package; PyTorch answers the rest
    given_back: Optional[GivenBack] = None  # None: not enabled, or mode "plain", where the broker's cache gives back
    bypass_bytes: int = 0  # reserved by PyTorch since enable() without the broker
    notices: Tuple[str, ...] = ()  # settings requested from PyTorch and not available

    def __str__(self) -> str:
        if self.mode is None:
            return "vrambroker.torch: not enabled; PyTorch's memory comes from CUDA"
        what = {"segments": "PyTorch's caching allocator over segments of the broker, all threads",
                "pool": "a MemPool over the broker, all threads, without CUDA graphs",
                "plain": "the broker's caching allocator for the whole process"}[self.mode]
        lines = [f"vrambroker.torch: mode {self.mode}: {what}"]
        if self.reason:
            lines.append(f"  because {self.reason}")
        lines.append(f"  session {self.session}, library {self.library}")
        lines += [f"  cuda:{device.cuda} is device {device.ordinal} of the daemon ({device.uuid}): "
                  f"{format_size(device.reserved_bytes)} reserved of {format_size(device.limit_bytes)}"
                  for device in self.devices]
        if self.outside_bytes:
            lines.append(f"  outside of the broker: {format_size(self.outside_bytes)} reserved before enable()")
        if self.bypass_bytes:
            lines.append(f"  PAST the broker, outside of the limit: {format_size(self.bypass_bytes)} reserved since enable()")
        if self.given_back is not None:
            lines.append(f"  {self.given_back}")
        lines += [f"  note: {notice}" for notice in self.notices]
        lines.append(f"  answered here: {', '.join(self.answered)}; all else by PyTorch")
        return "\n".join(lines)


class _TorchClient(Figures):
    """The process's only client for PyTorch; never closed."""

    def __init__(self, library: _library.Library) -> None:
        self._library = library
        self._handle = ctypes.c_void_p()
        library.check(library.lib.vrambroker_torch_client(ctypes.byref(self._handle)))

    def _using(self) -> Any:
        return self

    def __enter__(self) -> ctypes.c_void_p:
        return self._handle

    def __exit__(self, *_: Any) -> None:
        pass


_lock = threading.RLock()
_pools_lock = threading.RLock()  # taken last; also by the thread giving back reclaimable memory
_taken_lock = threading.RLock()  # guards _taken


def _after_fork_in_child() -> None:
    global _lock, _pools_lock, _taken_lock
    _lock, _pools_lock, _taken_lock = (threading.RLock() for _ in range(3))  # threads of the parent may have held the locks


os.register_at_fork(after_in_child=_after_fork_in_child)

_connected: Optional[Tuple[Any, ...]] = None  # options of the process's client
_active: Optional["_Route"] = None


def enable(limit: Union[int, float, str, None] = None, *, guarantee: Union[int, float, str, None] = None,
           name: Optional[str] = None, socket_dir: Union[str, "os.PathLike[str]", None] = None,
           wait: Union[float, str, None] = None, alloc_conf: Optional[str] = None, mode: str = "auto",
           library: Union[str, "os.PathLike[str]", None] = None, connect_timeout: Union[float, str, None] = None,
           give_back_idle: bool = True, devices: Union[int, str, Iterable[Union[int, str]], None] = None) -> Status:
    """Makes PyTorch's CUDA memory in this process come from the daemon, from now on. Returns status().

    limit, guarantee  bytes (int), a fraction of each GPU's capacity at the daemon (float), or a text such as "8GiB" or
                      "40%"
    devices, name, socket_dir, wait, connect_timeout, library  as for vrambroker.Client
    alloc_conf        settings of the broker's allocator, for mode "plain"; PyTorch's own settings come from the environment
    mode              see the module's docstring
    give_back_idle    when other programs need memory, have PyTorch release segments without a tensor from its cache
                      (torch.cuda.empty_cache(), on a thread of this package; never while a CUDA graph is captured)

    Raises vrambroker.Error with advice in the text: FAILED_PRECONDITION when PyTorch is missing, has no CUDA or no GPU, or
    has settings excluding the mode, or when enable() was called already; UNAVAILABLE without a daemon; NOT_FOUND when the
    daemon does not serve a GPU of this process. After an error PyTorch's memory is as before, except in mode "plain" once
    PyTorch has changed its allocator: status() tells. The session, with its limit, belongs to the process: once granted by
    the daemon, the session lives until the process ends, even if enable() raised afterwards; other options need another
    process.
    """
    global _active
    if mode not in MODES:
        raise ValueError(f"mode: {mode!r} is not one of {', '.join(MODES)}")
    with _lock:
        if _active is not None:
            raise Error(Code.FAILED_PRECONDITION, f"already enabled, in mode {_active.mode}: call disable() first")
        options = make_options(limit=limit, guarantee=guarantee, devices=devices, name=name, socket_dir=socket_dir,
                               wait=wait, alloc_conf=alloc_conf, connect_timeout=connect_timeout, library=library)
        torch = _import_torch()
        check_environment(torch)
        if mode == "plain":
            _check_plain(torch)
        lib = _library.load(library)
        _connect(lib, options)
        client = _TorchClient(lib)
        devices = _served(torch, lib, client)
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        route, route.reason = _start(mode, torch, lib, client, devices)
        _active = route
        try:
            route.start_giver(give_back_idle)
            outside = route.outside_bytes
            if outside:
                warnings.warn(f"vrambroker.torch: {format_size(outside)} that PyTorch reserved before enable() stay outside "
                              "the broker and the limit until PyTorch frees them", stacklevel=2)
            return status()
        except BaseException:  # the daemon is lost, or warnings are errors
            if not route.is_final:
                _active = None
                route.stop()
            raise


def disable() -> None:
    """Makes new memory come from CUDA again, and torch.cuda answer as before; empties the cache. Memory in use stays the
    broker's until freed. Does nothing without enable(). Raises Error FAILED_PRECONDITION in mode "plain": PyTorch cannot
    change its allocator a second time."""
    global _active
    with _lock:
        if _active is None:
            return
        _active.stop()
        _active = None


def status() -> Status:
    """Returns the routes of PyTorch's memory."""
    with _lock:
        if _active is None:
            return Status(None, "", "", "", (), 0, ())
        route = _active
        served = []
        for cuda, device in sorted(route.devices.items()):
            info = route.client.device(device.ordinal)
            served.append(ServedDevice(cuda, device.ordinal, info.uuid, info.limit_bytes, route.reserved(cuda)))
        bypass = 0 if route.giver is None else route.giver.bypass_bytes()
        return Status(route.mode, route.reason, route.client.name, route.library.path, tuple(served),
                      route.outside_bytes, tuple(route.patches.names()),
                      None if route.giver is None else route.giver.given_back(), bypass,
                      () if route.settings is None else tuple(route.settings.notices))


# ---- Requirements ----


def _import_torch() -> Any:
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        raise Error(Code.FAILED_PRECONDITION, f"PyTorch cannot be imported: {error}") from error
    if torch.version.cuda is None:
        raise Error(Code.FAILED_PRECONDITION,
                    f"this PyTorch ({torch.__version__}) is built without CUDA: install one that has it")
    if not torch.cuda.is_available():
        raise Error(Code.FAILED_PRECONDITION,
                    "PyTorch sees no GPU: look at nvidia-smi, and at $CUDA_VISIBLE_DEVICES of this process")
    return torch


def _check_plain(torch: Any) -> None:
    if not hasattr(torch.cuda.memory, "change_current_allocator"):
        raise Error(Code.FAILED_PRECONDITION, f"mode \"plain\" needs PyTorch 2.0 or newer; this is {torch.__version__}")
    if torch.cuda.is_initialized():
        raise Error(Code.FAILED_PRECONDITION, "mode \"plain\": CUDA is already initialised, so PyTorch can no longer change "
                    "its allocator: call enable() before the first use of torch.cuda, or use mode \"segments\"")


def _connect(lib: _library.Library, options: _library.Options) -> None:
    global _connected
    wanted = tuple(getattr(options, name) for name in
                   ("socket_dir", "name", "limit", "guarantee", "devices", "wait_ms", "alloc_conf", "connect_timeout_ms"))
    if _connected is not None:
        if wanted != _connected:
            raise Error(Code.FAILED_PRECONDITION, "this process already has a session with other options: limit, guarantee, "
                        "devices, name, socket_dir, wait and alloc_conf cannot change until the process ends, even if enable() "
                        "failed; restart the process to choose others")
        return
    lib.check(lib.lib.vrambroker_torch_connect(ctypes.byref(options)))
    _connected = wanted


def _require_gpu(devices: List[Device]) -> None:
    if not any(device.kind == "cuda" for device in devices):
        raise Error(Code.FAILED_PRECONDITION, "the daemon serves host memory, not a GPU: start it with --device=cuda "
                    "(--device=auto takes host memory where it finds no usable GPU, and its log says why)")


def _served(torch: Any, lib: _library.Library, client: _TorchClient) -> Dict[int, Device]:
    devices = client.devices
    _require_gpu(devices)
    served: Dict[int, Device] = {}
    missing: List[Error] = []
    for cuda in range(torch.cuda.device_count()):
        ordinal = ctypes.c_int()
        if lib.lib.vrambroker_torch_device(cuda, ctypes.byref(ordinal)) == 0:
            served[cuda] = devices[ordinal.value]
        else:
            missing.append(lib.last_error())
    if missing:
        # A single allocator of PyTorch serves all GPUs: GPUs unknown to the daemon would always be out of memory.
        raise Error(Code.NOT_FOUND, f"{missing[0].message}: the daemon serves only the GPUs that it "
                    "sees: check its $CUDA_VISIBLE_DEVICES, or hide this GPU with this process's own")
    return served


def _start(mode: str, torch: Any, lib: _library.Library, client: _TorchClient,
           devices: Dict[int, Device]) -> Tuple["_Route", str]:
    if mode == "pool":
        return _PoolRoute(torch, lib, client, devices), ""
    if mode == "plain":
        return _PlainRoute(torch, lib, client, devices), ""
    try:
        return _SegmentsRoute(torch, lib, client, devices), ""
    except Error as error:
        if mode == "segments" or error.code not in (Code.UNIMPLEMENTED, Code.NOT_FOUND):
            raise
        return _PoolRoute(torch, lib, client, devices), f"mode \"segments\" is not available: {error.message}"


# ---- Functions of torch.cuda ----


def _device_index(torch: Any, device: Any) -> int:
    """Returns PyTorch's ordinal of a `device` argument of PyTorch's functions."""
    if device is None:
        return int(torch.cuda.current_device())
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return int(torch.cuda.current_device()) if index is None else int(index)


def _refusals(lib: _library.Library) -> List[_library.TorchRefusal]:
    """Returns the refusals of all threads, newest first."""
    found: List[_library.TorchRefusal] = []
    while True:
        refusal = _library.TorchRefusal()
        if lib.lib.vrambroker_torch_last_refusal(len(found), ctypes.byref(refusal)) != 0:
            return found
        found.append(refusal)


_FRESH_MS = 5000  # maximum age of a refusal at PyTorch's error
_taken: Dict[int, str] = {}  # refusals by number: text of the resulting error; "": no error will follow


def _refused(lib: _library.Library, text: str) -> Optional[Error]:
    """Returns the broker's refusal behind an out-of-memory error of PyTorch with `text`; None if the broker was not asked, as
    when PyTorch enforces a limit of its own. If autograd ran the request, the exception reaches Python on another thread than
    the request; the size in the text tells requests apart. A refusal explains a single error: never a later error of equal
    size, and no error if the request was served in the end."""
    me = threading.get_native_id()
    with _taken_lock:
        best: Optional[_library.TorchRefusal] = None
        best_rank, thread, open_ones = -1, 0, []
        for refusal in _refusals(lib):
            origin = _library.TorchRefusalOrigin()
            if f"Tried to allocate {format_size(refusal.requested_bytes)}." not in text or \
                    lib.lib.vrambroker_torch_get_refusal_origin(refusal.number, ctypes.byref(origin)) != 0:
                continue
            is_open = refusal.number not in _taken and not origin.served_since and origin.age_ms <= _FRESH_MS
            if is_open:
                open_ones.append((origin.thread, refusal.number))
            elif _taken.get(refusal.number) != text:
                continue
            # Prefer this thread's refusal, then the refusal of a copied error, then another thread's refusal.
            rank = (2 if origin.thread == me else 0) if is_open else 1
            if rank > best_rank:
                best, best_rank, thread = refusal, rank, origin.thread
        if best is None:
            return None
        for owner, number in open_ones:  # PyTorch may have asked several times
            if owner == thread and number < best.number:
                _taken[number] = ""
        _taken[best.number] = text
        for old in [old for old in _taken if old + 16 < max(_taken)]:
            del _taken[old]
    return lib.refusal_error(best)


def _reason(error: Optional[Error]) -> str:
    if error is None:
        return ""
    return error.message if error.code == Code.RESOURCE_EXHAUSTED else f"{error} (so the daemon could not provide memory)"


class _Route:
    """Route of PyTorch's memory from the broker. The constructor starts the route, or changes nothing and raises."""

    mode = ""
    is_final = False  # PyTorch cannot change the route any more

    def __init__(self, torch: Any, library: _library.Library, client: _TorchClient, devices: Dict[int, Device]) -> None:
        self.torch = torch
        self.library = library
        self.client = client
        self.devices = devices  # by PyTorch's ordinal
        self.patches = Patches()
        self.reason = ""
        # Set if PyTorch's own allocator is in front.
        self.settings: Optional[AllocatorSettings] = None
        self.captures: Optional[Captures] = None
        self.giver: Optional[IdleGiver] = None

    def patch(self) -> None:
        """Applies the changes of every mode."""
        self.patches.function(self.torch, "mem_get_info", self.mem_get_info)
        self._patch_out_of_memory()

    def watch(self) -> None:
        """Applies the additional changes of modes with PyTorch's own allocator."""
        self.settings = AllocatorSettings(self.torch, self.patches)
        self.captures = Captures(self.torch, self.library.lib, self.patches)
        self._patch_sharing()
        self._patch_streams()

    def start_giver(self, gives_back: bool) -> None:
        if self.captures is not None:
            self.giver = IdleGiver(self, gives_back)
            self.giver.start()

    @property
    def outside_bytes(self) -> int:
        return 0 if self.giver is None else self.giver.outside_bytes()

    def release_idle(self) -> None:
        """Makes PyTorch give back segments without a tensor from its cache."""
        raise NotImplementedError

    def own_pools(self) -> Tuple[Any, ...]:
        """Returns the ids of the pools emptied by release_idle()."""
        return ()

    def kept_idle(self, cuda: int) -> int:
        """Returns the bytes of segments without a tensor kept after emptying the cache, by live graphs."""
        return 0 if self.captures is None else self.captures.kept_idle(cuda, self.own_pools())

    def bypass_reason(self) -> str:
        if is_expandable(self.torch):
            return f"expandable_segments was switched on. {INSTEAD_OF_EXPANDABLE}"
        return ("a torch.cuda.MemPool with an allocator of its own, or a setting of PyTorch's allocator, gets its memory "
                "elsewhere")

    def stop(self) -> None:
        if self.giver is not None:
            self.giver.stop()
        self.patches.restore()
        if self.captures is not None:
            self.captures.stop()
        if self.settings is not None:
            self.settings.stop()

    def _ordinal(self, device: Any) -> int:
        cuda = _device_index(self.torch, device)
        if cuda not in self.devices:
            raise Error(Code.NOT_FOUND, f"no CUDA device {cuda}; CUDA devices: {len(self.devices)}")
        return self.devices[cuda].ordinal

    def reserved(self, cuda: int) -> int:
        return self.client.memory_stats(self.devices[cuda].ordinal)["reserved_bytes.all.current"]

    def allowed(self, cuda: int) -> int:
        """Returns the lesser of the broker's limit and the limit of torch.cuda.set_per_process_memory_fraction()."""
        limit = self.client.device(self.devices[cuda].ordinal).limit_bytes
        get_fraction = getattr(self.torch.cuda.memory, "get_per_process_memory_fraction", None)
        if get_fraction is None or not self.torch.cuda.is_initialized():
            return limit
        total = self.torch.cuda.get_device_properties(cuda).total_memory
        return min(limit, int(get_fraction(cuda) * total))

    def mem_get_info(self, device: Any = None) -> Tuple[int, int]:
        """torch.cuda.mem_get_info(): (free, total) in bytes of this process's share of the GPU: total is the limit, free the
        limit minus reserved memory. Other programs may take the memory first."""
        cuda = _device_index(self.torch, device)
        self._ordinal(cuda)
        allowed = self.allowed(cuda)
        return max(0, allowed - self.reserved(cuda)), allowed

    def _patch_out_of_memory(self) -> None:
        error_type = self.torch.cuda.OutOfMemoryError
        library = self.library
        init, text = error_type.__init__, error_type.__str__

        # Runs when an error becomes a Python object, right after the request: later refusals would push the reason out.
        def new_init(self: Any, *arguments: Any) -> None:
            init(self, *arguments)
            self.vrambroker_error = _refused(library, str(arguments[0])) if arguments else None
            self.vrambroker = _reason(self.vrambroker_error)

        def new_text(self: Any) -> str:
            said = text(self)
            reason = getattr(self, "vrambroker", "")
            if reason:
                said += f"\nvrambroker: {reason}"
            if "expandable_segments" in said:
                said += f"\nvrambroker: {INSTEAD_OF_EXPANDABLE}."
            return said

        self.patches.set(error_type, "__init__", new_init)
        self.patches.set(error_type, "__str__", new_text)


    def _patch_sharing(self) -> None:
        storage = getattr(self.torch, "UntypedStorage", None)
        if storage is None:
            return

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def _share_cuda_(storage: Any, *arguments: Any, **keywords: Any) -> Any:
                try:
                    return original(storage, *arguments, **keywords)
                except RuntimeError as error:
                    raise Error(Code.FAILED_PRECONDITION,
                                "a CUDA tensor in memory of the broker cannot be passed to another process, as "
                                "torch.multiprocessing does it: CUDA exports only memory that the process got from CUDA itself. "
                                f"Pass tensor.cpu(), or let each process make its own ({error})") from error
            return _share_cuda_
        self.patches.around(storage, "_share_cuda_", make)

    def _patch_streams(self) -> None:
        """Makes a stream named by a caller the current stream, since PyTorch asks the broker for the current stream."""
        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def caching_allocator_alloc(size: Any, device: Any = None, stream: Any = None) -> Any:
                if stream is None:
                    return original(size, device)
                current = self.torch.cuda.ExternalStream(stream, device=device) if isinstance(stream, int) else stream
                with self.torch.cuda.stream(current):
                    return original(size, device, stream)
            return caching_allocator_alloc
        for owner in (self.torch.cuda.memory, self.torch.cuda):
            self.patches.around(owner, "caching_allocator_alloc", make)


class _SegmentsRoute(_Route):
    mode = "segments"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.library.check(self.library.lib.vrambroker_torch_serve(None))
        try:
            self.patch()
            self.watch()
        except BaseException:
            self.stop()
            raise

    def release_idle(self) -> None:
        self.torch._C._cuda_emptyCache()

    def stop(self) -> None:
        super().stop()
        self.library.lib.vrambroker_torch_unserve()
        self.torch.cuda.empty_cache()


class _PoolRoute(_Route):
    mode = "pool"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        torch = self.torch
        # Up to 2.7, PyTorch finds a pool's allocator through a thread's MemPoolContext: memory of backward threads would
        # go into the pool, but come from CUDA.
        missing = [name for name in ("_cuda_beginAllocateToPool", "_cuda_endAllocateToPool", "_cuda_releasePool")
                   if not hasattr(torch._C, name)]
        if not hasattr(torch.cuda, "MemPool") or hasattr(torch.cuda.memory, "MemPoolContext") or missing:
            raise Error(Code.UNIMPLEMENTED, f"mode \"pool\" needs PyTorch 2.8 or newer; this is {torch.__version__}")
        torch.cuda.init()
        self._allocator = torch.cuda.memory.CUDAPluggableAllocator(
            self.library.path, "vrambroker_torch_malloc", "vrambroker_torch_free")
        # PyTorch's own functions, unpatched: the pools here prevent no emptying.
        self._begin_allocating, self._end_allocating = torch._C._cuda_beginAllocateToPool, torch._C._cuda_endAllocateToPool
        self._pools: Dict[int, Any] = {}
        try:
            for cuda in self.devices:
                self._pools[cuda] = self._begin(cuda)
            self.patches.function(torch, "empty_cache", self.empty_cache)
            self.patch()
            self.watch()
        except BaseException:
            self.stop()
            raise

    def _begin(self, cuda: int) -> Any:
        with self.torch.cuda.device(cuda):
            pool = self.torch.cuda.MemPool(self._allocator.allocator())
        # A pool's destructor requires a pool without users, and otherwise ends the process; it would run when the
        # interpreter ends. The extra reference keeps the destructor from running: _end() does the work instead.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(pool))
        self._begin_allocating(cuda, pool.id)
        return pool

    def _end(self, cuda: int, pool: Any) -> None:
        self._end_allocating(cuda, pool.id)
        self.torch._C._cuda_releasePool(cuda, pool.id)  # of _cuda_beginAllocateToPool()
        self.torch._C._cuda_releasePool(cuda, pool.id)  # of the pool itself: now the pool may be emptied

    def empty_cache(self) -> None:
        """torch.cuda.empty_cache(): PyTorch frees memory only from pools not in use, so a new pool first replaces the pool in
        use. Memory still allocated in the old pool goes back with the first call after its free."""
        with _pools_lock:
            for cuda, pool in list(self._pools.items()):
                self._pools[cuda] = self._begin(cuda)
                self._end(cuda, pool)
            self.torch._C._cuda_emptyCache()

    def release_idle(self) -> None:
        self.empty_cache()

    def own_pools(self) -> Tuple[Any, ...]:
        return tuple(pool.id for pool in list(self._pools.values()))

    def stop(self) -> None:
        super().stop()
        with _pools_lock:
            for cuda, pool in self._pools.items():
                self._end(cuda, pool)
            self._pools.clear()
            self.torch._C._cuda_emptyCache()


class _PlainRoute(_Route):
    mode = "plain"
    is_final = True

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        torch, lib = self.torch, self.library.lib
        self._fractions: Dict[int, float] = {}
        allocator = torch.cuda.memory.CUDAPluggableAllocator(
            self.library.path, "vrambroker_torch_cached_malloc", "vrambroker_torch_cached_free")
        inner = allocator.allocator()
        if not hasattr(inner, "set_record_stream_fn"):
            raise Error(Code.UNIMPLEMENTED, f"this PyTorch ({torch.__version__}) does not tell an allocator which streams "
                        "use its memory, so memory could not be reused safely")
        inner.set_record_stream_fn(ctypes.cast(lib.vrambroker_torch_record_stream, ctypes.c_void_p).value)
        if hasattr(inner, "set_reset_fn"):
            inner.set_reset_fn(ctypes.cast(lib.vrambroker_torch_empty_cache, ctypes.c_void_p).value)
        self._allocator = allocator
        try:
            for function in (self.empty_cache, self.memory_stats, self.memory_stats_as_nested_dict,
                             self.reset_peak_memory_stats, self.reset_accumulated_memory_stats,
                             self.set_per_process_memory_fraction, self.get_per_process_memory_fraction):
                self.patches.function(torch, function.__name__, function)
            self.patch()
            torch.cuda.memory.change_current_allocator(allocator)  # last: the change cannot be undone
        except BaseException:
            self.patches.restore()
            raise

    def stop(self) -> None:
        raise Error(Code.FAILED_PRECONDITION, "mode \"plain\" holds until the process ends: PyTorch cannot change its "
                    "allocator a second time")

    def allowed(self, cuda: int) -> int:
        limit = self.client.device(self.devices[cuda].ordinal).limit_bytes
        return min(limit, self._cap(cuda) or limit)

    def _cap(self, cuda: int) -> int:
        fraction = self._fractions.get(cuda, 1.0)
        if fraction >= 1.0:
            return 0
        return max(1, int(fraction * self.torch.cuda.get_device_properties(cuda).total_memory))

    def empty_cache(self) -> None:
        """torch.cuda.empty_cache(), for the broker's cache."""
        self.client.empty_cache()

    def memory_stats(self, device: Any = None) -> Dict[str, int]:
        """torch.cuda.memory_stats(), of the broker's allocator."""
        return self.client.memory_stats(self._ordinal(device))

    def memory_stats_as_nested_dict(self, device: Any = None) -> Dict[str, Any]:
        """torch.cuda.memory_stats_as_nested_dict(), of the broker's allocator."""
        nested: Dict[str, Any] = {}
        for key, value in self.memory_stats(device).items():
            inner = nested
            *path, last = key.split(".")
            for part in path:
                inner = inner.setdefault(part, {})
            inner[last] = value
        return nested

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        """torch.cuda.reset_peak_memory_stats(), of the broker's allocator."""
        self.client.reset_peak_memory_stats(self._ordinal(device))

    def reset_accumulated_memory_stats(self, device: Any = None) -> None:
        """torch.cuda.reset_accumulated_memory_stats(), of the broker's allocator; restarts the peaks, too."""
        self.client.reset_memory_stats(self._ordinal(device))

    def set_per_process_memory_fraction(self, fraction: float, device: Any = None) -> None:
        """torch.cuda.set_per_process_memory_fraction(): a fraction of the GPU's memory; the broker's limit holds as well."""
        if not isinstance(fraction, float):
            raise TypeError("Invalid type for fraction argument, must be `float`")
        if not 0 <= fraction <= 1:
            raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
        cuda = _device_index(self.torch, device)
        self._ordinal(cuda)
        self._fractions[cuda] = fraction
        self.library.check(self.library.lib.vrambroker_torch_set_cap(cuda, self._cap(cuda)))

    def get_per_process_memory_fraction(self, device: Any = None) -> float:
        """torch.cuda.get_per_process_memory_fraction()."""
        return self._fractions.get(_device_index(self.torch, device), 1.0)
