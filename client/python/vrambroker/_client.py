# SPDX-License-Identifier: Apache-2.0
"""Client and Buffer."""
from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import threading
import weakref
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Tuple, Union

from . import _library
from ._library import Code, Error

_PLACEMENTS = {"leased": 0, "remote": 1}


class Device(NamedTuple):
    """One device of the daemon. Sizes are bytes."""

    ordinal: int
    total_bytes: int
    capacity_bytes: int  # what the daemon hands out of it
    limit_bytes: int  # the session's, when this was asked: an operator may change it
    kind: str  # "host" or "cuda"
    uuid: str
    name: str


class _Figures:
    """What a client of the library can be asked; subclasses say which one."""

    _library: _library.Library

    @contextlib.contextmanager
    def _using(self) -> Iterator[ctypes.c_void_p]:
        raise NotImplementedError

    def _call(self, function: str, *arguments: Any) -> None:
        with self._using() as handle:
            self._library.check(getattr(self._library.lib, function)(handle, *arguments))

    @property
    def name(self) -> str:
        """As the daemon made it unique among its sessions."""
        session = _library.Session()
        self._call("vrambroker_get_session", ctypes.byref(session))
        return session.name.decode()

    @property
    def devices(self) -> List[Device]:
        """The daemon's devices, by ordinal, with the limits as they are now."""
        count = ctypes.c_int()
        self._call("vrambroker_device_count", ctypes.byref(count))
        return [self.device(ordinal) for ordinal in range(count.value)]

    def device(self, ordinal: int) -> Device:
        """Error NOT_FOUND when there is no such device."""
        info = _library.Device()
        self._call("vrambroker_get_device", ordinal, ctypes.byref(info))
        return Device(**info.fields())

    def status(self) -> None:
        """Returns while the session lives; else raises the Error that says why it does not."""
        self._call("vrambroker_status")

    def empty_cache(self) -> int:
        """Gives wholly free segments back to the daemon. Returns their bytes."""
        released = ctypes.c_uint64()
        self._call("vrambroker_empty_cache", ctypes.byref(released))
        return released.value

    def memory_info(self, device: int = 0) -> Tuple[int, int]:
        """(free, total) in bytes: what the limit leaves beyond what is allocated, and the limit."""
        free, total = ctypes.c_uint64(), ctypes.c_uint64()
        self._call("vrambroker_memory_info", device, ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def memory_stats(self, device: int = 0) -> Dict[str, int]:
        """All keys of torch.cuda.memory_stats(), with its meanings: {"allocated_bytes.all.current": 5120, ...}."""
        size = 8192
        while True:
            text = ctypes.create_string_buffer(size)
            needed = ctypes.c_size_t()
            try:
                self._call("vrambroker_memory_stats_json", device, text, size, ctypes.byref(needed))
                return json.loads(text.value)
            except Error as error:
                if error.code != Code.OUT_OF_RANGE or needed.value <= size:
                    raise
                size = needed.value

    def memory_summary(self, device: int = 0) -> str:
        """The main figures of memory_stats() as a table for people."""
        stats = self.memory_stats(device)
        info = self.device(device)
        free, total = self.memory_info(device)
        lines = [f"session {self.name} on device {device}: {info.name} ({info.kind}, {info.uuid})",
                 f"  limit {_mib(total)}, {_mib(free)} of it free; the daemon hands out {_mib(info.capacity_bytes)}",
                 f"  {'':22}{'now':>14}{'peak':>14}{'in all':>14}"]
        for key, title in (("allocated_bytes", "allocated"), ("requested_bytes", "requested"), ("active_bytes", "active"),
                           ("reserved_bytes", "reserved"), ("inactive_split_bytes", "inactive split")):
            figures = [stats[f"{key}.all.{which}"] for which in ("current", "peak", "allocated")]
            lines.append(f"  {title:22}" + "".join(f"{_mib(figure):>14}" for figure in figures))
        for key, title in (("allocation", "blocks"), ("segment", "segments")):
            figures = [stats[f"{key}.all.{which}"] for which in ("current", "peak", "allocated")]
            lines.append(f"  {title:22}" + "".join(f"{figure:>14}" for figure in figures))
        lines.append(f"  out-of-memory errors: {stats['num_ooms']}, "
                     f"cache flushes before a retry: {stats['num_alloc_retries']}")
        return "\n".join(lines)

    def reset_peak_memory_stats(self, device: int = 0) -> None:
        """Peaks begin again at what is now."""
        self._call("vrambroker_reset_peak_memory_stats", device)

    def reset_memory_stats(self, device: int = 0) -> None:
        """The same, and the totals begin again at 0."""
        self._call("vrambroker_reset_memory_stats", device)


def _mib(count: int) -> str:
    return f"{count / (1 << 20):.1f} MiB"


class Client(_Figures):
    """A session with vrambrokerd, for as long as this object is open. Any thread may use it.

    limit, guarantee  bytes (int), a fraction of each device's capacity (float), or a text such as "8GiB"
    name              what the session is called in metrics, logs and tools; default: the command name of this process
    socket_dir        default: $VRAMBROKER_SOCKET_DIR, or else /run/vrambroker
    wait              seconds that a request without memory waits for others to give some back; at most an hour
    alloc_conf        the allocator's settings in PyTorch's syntax; default: PyTorch's environment variables
    placement         "leased": blocks are cut in this process; "remote": every request is a call to the daemon
    idle_decay        seconds after which segments without blocks go back by themselves; 0 or None: never
    connect_timeout, call_timeout  seconds; default 5 and 30
    on_lost           on_lost(error), each time that the daemon is lost, on a thread of the library; must not block
    log               log(line) for lines about a lost daemon; default: stderr
    library           path of libvrambroker.so.1; see load()

    Raises Error: UNAVAILABLE when there is no daemon, INVALID_ARGUMENT for a limit that is no size, and others. Use
    after close() is a FAILED_PRECONDITION.
    """

    def __init__(self, *, limit: Union[int, float, str, None] = None, guarantee: Union[int, float, str, None] = None,
                 name: Optional[str] = None, socket_dir: Union[str, "os.PathLike[str]", None] = None,
                 wait: Optional[float] = None, alloc_conf: Optional[str] = None, placement: str = "leased",
                 idle_decay: Optional[float] = None, connect_timeout: Optional[float] = None,
                 call_timeout: Optional[float] = None, on_lost: Optional[Callable[[Error], None]] = None,
                 log: Optional[Callable[[str], None]] = None,
                 library: Union[str, "os.PathLike[str]", None] = None) -> None:
        self._handle: Optional[ctypes.c_void_p] = None
        self._calls = 0  # under way; guarded by _idle
        self._idle = threading.Condition()
        if placement not in _PLACEMENTS:
            raise ValueError(f"placement: {placement!r} is neither \"leased\" nor \"remote\"")
        self._library = _library.load(library)
        options = make_options(limit=limit, guarantee=guarantee, name=name, socket_dir=socket_dir, wait=wait,
                               alloc_conf=alloc_conf, connect_timeout=connect_timeout)
        options.placement = _PLACEMENTS[placement]
        options.idle_decay_ms = _library.milliseconds("idle_decay", idle_decay)
        options.call_timeout_ms = _library.milliseconds("call_timeout", call_timeout)
        if on_lost is not None:
            options.on_lost = _library.LOST_FUNCTION(
                lambda _, code, message: on_lost(Error(code, message.decode(errors="replace"))))
        if log is not None:
            options.log = _library.LOG_FUNCTION(lambda _, line: log(line.decode(errors="replace")))
        self._options = options  # the library calls its functions
        handle = ctypes.c_void_p()
        self._library.check(self._library.lib.vrambroker_connect(ctypes.byref(options), ctypes.byref(handle)))
        self._handle = handle
        if on_lost is not None or log is not None:
            # A thread of the library must not call into an interpreter that is ending.
            reference = weakref.ref(self)
            atexit.register(lambda: _close(reference))

    @contextlib.contextmanager
    def _using(self) -> Iterator[ctypes.c_void_p]:
        with self._idle:
            if self._handle is None:
                raise Error(Code.FAILED_PRECONDITION, "the client is closed")
            handle = self._handle
            self._calls += 1
        try:
            yield handle
        finally:
            with self._idle:
                self._calls -= 1
                self._idle.notify_all()

    def close(self) -> None:
        """Ends the session, after calls of other threads have ended. What has not been given back stays usable, and
        charged, until the process ends."""
        with self._idle:
            handle, self._handle = self._handle, None
            while self._calls > 0:
                self._idle.wait()
        if handle is not None:
            self._library.check(self._library.lib.vrambroker_disconnect(handle))

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # a child made by fork(), or an interpreter that is ending
            self.close()

    @property
    def warnings(self) -> List[str]:
        """A sentence for each setting of the allocator that has no effect."""
        found: List[str] = []
        with self._using() as handle:
            while True:
                text = self._library.lib.vrambroker_warning(handle, len(found))
                if text is None:
                    return found
                found.append(text.decode(errors="replace"))

    def malloc(self, bytes: int, device: int = 0, stream: int = 0) -> "Buffer":  # noqa: A002
        """At least 1 byte. `stream` is the cudaStream_t that the memory is for. OutOfMemoryError when there is none."""
        pointer = ctypes.c_void_p()
        self._call("vrambroker_malloc_stream", _count("bytes", bytes), device, ctypes.c_void_p(stream),
                   ctypes.byref(pointer))
        return Buffer(self, pointer.value or 0, bytes, device, whole=False)

    def lease_segment(self, bytes: int, device: int = 0) -> "Buffer":  # noqa: A002
        """A whole segment, rounded up to 2 MiB, for programs with an allocator of their own. A round trip to the daemon,
        both ways."""
        pointer = ctypes.c_void_p()
        self._call("vrambroker_lease_segment", _count("bytes", bytes), device, ctypes.byref(pointer))
        return Buffer(self, pointer.value or 0, bytes, device, whole=True)

    def __repr__(self) -> str:
        return f"<vrambroker.Client {'closed' if self._handle is None else self.name}>"


def _close(reference: "weakref.ref[Client]") -> None:
    client = reference()
    if client is not None:
        with contextlib.suppress(Error):
            client.close()


def _count(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: {value!r} is not an integer")
    if not 0 <= value < 1 << 64:
        raise ValueError(f"{name}: {value!r} is not a number of bytes")
    return value


def make_options(*, limit: Union[int, float, str, None], guarantee: Union[int, float, str, None], name: Optional[str],
                 socket_dir: Union[str, "os.PathLike[str]", None], wait: Optional[float], alloc_conf: Optional[str],
                 connect_timeout: Optional[float]) -> _library.Options:
    """As Client takes them."""
    options = _library.Options()
    options.abi_version = _library.ABI_VERSION
    options.socket_dir = None if socket_dir is None else os.fsencode(socket_dir)
    options.name = None if name is None else name.encode()
    options.limit = _library.size_text("limit", limit)
    options.guarantee = _library.size_text("guarantee", guarantee)
    options.alloc_conf = None if alloc_conf is None else alloc_conf.encode()
    options.wait_ms = _library.milliseconds("wait", wait)
    options.connect_timeout_ms = _library.milliseconds("connect_timeout", connect_timeout)
    return options


class Buffer:
    """Memory of a device, given back by free(), at the end of a `with` block, or with this object. `pointer` is the
    address: a device pointer on cuda, ordinary memory on a host device. `bytes` is the size as asked for."""

    def __init__(self, client: Client, pointer: int, bytes: int, device: int, whole: bool) -> None:  # noqa: A002
        self.client = client
        self.pointer = pointer
        self.bytes = bytes
        self.device = device
        self._whole = whole
        self._view: Optional[Callable[[], Any]] = None  # a weak reference to what memoryview() hands out

    def __len__(self) -> int:
        return self.bytes

    def _address(self) -> ctypes.c_void_p:
        if self.pointer == 0:
            raise Error(Code.FAILED_PRECONDITION, "the buffer was freed")
        return ctypes.c_void_p(self.pointer)

    def _check_range(self, offset: int, count: int) -> None:
        # The library knows the block only, which is rounded up.
        if offset + count > self.bytes:
            raise Error(Code.OUT_OF_RANGE, f"bytes [{offset}, +{count}) are outside the buffer of {self.bytes} bytes")

    def free(self, stream: Optional[int] = None) -> None:
        """Gives it back; `stream` (a cudaStream_t) is one that used it last, beside its own. A second time: nothing.
        BufferError while a memoryview or array of it is alive."""
        if self.pointer == 0:
            return
        if self._view is not None and self._view() is not None:
            raise BufferError("free: a memoryview or an array of this buffer is still in use")
        address = self._address()
        self.pointer = 0
        if self._whole:
            self.client._call("vrambroker_return_segment", address)
        elif stream is not None:
            self.client._call("vrambroker_free_stream", address, ctypes.c_void_p(stream))
        else:
            self.client._call("vrambroker_free", address)

    def record_stream(self, stream: int) -> None:
        """`stream` (a cudaStream_t) uses the memory, too: after free() it is not reused before the work queued there
        until then is done."""
        self.client._call("vrambroker_record_stream", self._address(), ctypes.c_void_p(stream))

    def write(self, data: Any, offset: int = 0) -> None:
        """Copies a bytes-like object into [offset, offset + its size). On any device; done when it returns."""
        with memoryview(data) as view:
            raw = view.cast("B") if view.c_contiguous else memoryview(view.tobytes())
            self._check_range(_count("offset", offset), len(raw))
            source = (ctypes.c_char * len(raw)).from_buffer_copy(raw) if raw.readonly else \
                (ctypes.c_char * len(raw)).from_buffer(raw)
            self.client._call("vrambroker_write", self._address(), offset, source, len(raw))
            del source
            raw.release()

    def read(self, bytes: Optional[int] = None, offset: int = 0) -> bytes:  # noqa: A002
        """The bytes of [offset, offset + bytes), by default all from offset on."""
        wanted = _count("bytes", max(0, self.bytes - offset) if bytes is None else bytes)
        self._check_range(_count("offset", offset), wanted)
        into = ctypes.create_string_buffer(wanted)
        self.client._call("vrambroker_read", self._address(), offset, into, wanted)
        return into.raw

    def memoryview(self) -> memoryview:
        """The memory itself, writable, on a host device; TypeError on a GPU, where read() and write() copy. It keeps the
        buffer alive."""
        if self.client.device(self.device).kind != "host":
            raise TypeError("memoryview: the memory is on a GPU: use read(), write() or __cuda_array_interface__")
        array = self._view() if self._view is not None else None
        if array is None:
            array = (ctypes.c_ubyte * self.bytes).from_address(self._address().value or 0)
            array._buffer = self
            self._view = weakref.ref(array)
        return memoryview(array).cast("B")

    def numpy(self, dtype: Any = "uint8") -> Any:
        """A numpy array over memoryview(). ImportError without NumPy."""
        import numpy

        return numpy.frombuffer(self.memoryview(), dtype=dtype)

    @property
    def __cuda_array_interface__(self) -> Dict[str, Any]:
        """For CuPy, Numba and torch.as_tensor(): bytes on the GPU. They must not outlive the buffer."""
        if self.client.device(self.device).kind != "cuda":
            raise AttributeError("__cuda_array_interface__: the memory is not on a GPU")
        return {"shape": (self.bytes,), "typestr": "|u1", "data": (self._address().value, False), "version": 3}

    def __enter__(self) -> "Buffer":
        return self

    def __exit__(self, *_: Any) -> None:
        self.free()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the client is closed, or the interpreter is ending
            self.free()

    def __repr__(self) -> str:
        return f"<vrambroker.Buffer of {self.bytes} bytes at {self.pointer:#x}>"
