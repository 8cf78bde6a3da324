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
    after close() is a FAILED_PRECONDITION, of its buffers, too.
    """

    def __init__(self, *, limit: Union[int, float, str, None] = None, guarantee: Union[int, float, str, None] = None,
                 name: Optional[str] = None, socket_dir: Union[str, "os.PathLike[str]", None] = None,
                 wait: Optional[float] = None, alloc_conf: Optional[str] = None, placement: str = "leased",
                 idle_decay: Optional[float] = None, connect_timeout: Optional[float] = None,
                 call_timeout: Optional[float] = None, on_lost: Optional[Callable[[Error], None]] = None,
                 log: Optional[Callable[[str], None]] = None,
                 library: Union[str, "os.PathLike[str]", None] = None) -> None:
        self._idle = threading.Condition()  # its lock, which a thread may take again, guards the following
        self._open = False
        self._handle: Optional[ctypes.c_void_p] = None  # None: no call can be made any more
        self._calls = 0  # under way
        self._blocks: Dict[int, _Block] = {}  # what buffers hold, by number
        self._last_block = 0
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
                _from_library(lambda _, code, message: on_lost(Error(code, message.decode(errors="replace")))))
        if log is not None:
            options.log = _library.LOG_FUNCTION(_from_library(lambda _, line: log(line.decode(errors="replace"))))
        self._options = options  # the library calls its functions
        handle = ctypes.c_void_p()
        self._library.check(self._library.lib.vrambroker_connect(ctypes.byref(options), ctypes.byref(handle)))
        self._handle = handle
        self._open = True
        if on_lost is not None or log is not None:
            # A thread of the library must not call into an interpreter that is ending.
            reference = weakref.ref(self)
            atexit.register(lambda: _close(reference))

    @contextlib.contextmanager
    def _using(self) -> Iterator[ctypes.c_void_p]:
        with self._idle:
            if not self._open or self._handle is None:
                raise Error(Code.FAILED_PRECONDITION, "the client is closed")
            handle = self._handle
            self._calls += 1
        try:
            yield handle
        finally:
            self._end_call()

    def _end_call(self) -> None:
        with self._idle:
            self._calls -= 1
            self._idle.notify_all()
            if self._open or self._calls > 0 or self._blocks:
                return
            handle, self._handle = self._handle, None
        if handle is None:
            return

        def disconnect() -> None:
            self._library.check(self._library.lib.vrambroker_disconnect(handle))

        # The library waits for its callbacks: whatever ends in one must not wait for the library.
        if getattr(_callback, "is_running", False):
            threading.Thread(target=disconnect, daemon=True).start()
        else:
            disconnect()

    def close(self) -> None:
        """Gives back what its buffers hold, and ends the session, after calls of other threads have ended. The buffers
        cannot be used any more. Memory that memoryviews, arrays or GPU libraries may still use stays where it is; it
        goes back, and the session ends, with the last of them: see Buffer."""
        with self._idle:
            was_open, self._open = self._open, False
            while self._calls > 0:
                self._idle.wait()
            if not was_open:
                return
            self._calls += 1
        try:
            for number in list(self._blocks):  # others may give back at the same time
                self._give_back(number)
            with self._idle:
                handle = self._handle if self._blocks else None
            if handle is not None:  # others may have what is in the cache
                self._library.lib.vrambroker_empty_cache(handle, ctypes.byref(ctypes.c_uint64()))
        finally:
            self._end_call()

    def _abandon(self) -> None:
        """After close(): ends the session, in so far as nobody uses its memory any more."""
        with self._idle:
            while self._calls > 0:
                self._idle.wait()
            handle, self._handle = self._handle, None
            self._blocks.clear()
        if handle is not None:
            self._library.lib.vrambroker_disconnect(handle)

    def _give_back(self, number: int) -> None:
        """Of a closed client: a buffer's block, unless somebody may still use it."""
        with self._idle:
            block = self._blocks.get(number)
            if block is None or block.is_exported():
                return
            self._start_return(number)
        self._return(block)

    def _start_return(self, number: int) -> None:
        """From now on the block is nobody's but the caller's, who calls _return(). REQUIRES: the lock is held."""
        del self._blocks[number]
        self._calls += 1

    def _return(self, block: "_Block", stream: Optional[int] = None) -> None:
        """Error only while the client is open."""
        lib, handle, address = self._library.lib, self._handle, ctypes.c_void_p(block.pointer)
        try:
            if block.whole:
                code = lib.vrambroker_return_segment(handle, address)
            elif stream is not None:
                code = lib.vrambroker_free_stream(handle, address, ctypes.c_void_p(stream))
            else:
                code = lib.vrambroker_free(handle, address)
            if self._open:
                self._library.check(code)
        finally:
            self._end_call()

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
        return self._obtain("vrambroker_malloc_stream", bytes, device, ctypes.c_void_p(stream))

    def lease_segment(self, bytes: int, device: int = 0) -> "Buffer":  # noqa: A002
        """A whole segment, rounded up to 2 MiB, for programs with an allocator of their own. A round trip to the daemon,
        both ways."""
        return self._obtain("vrambroker_lease_segment", bytes, device, whole=True)

    def _obtain(self, function: str, bytes: int, device: int, *arguments: Any, whole: bool = False) -> "Buffer":  # noqa: A002
        pointer = ctypes.c_void_p()
        with self._using() as handle:  # close() comes after it, and finds the block
            self._library.check(getattr(self._library.lib, function)(handle, _count("bytes", bytes), device, *arguments,
                                                                     ctypes.byref(pointer)))
            with self._idle:
                self._last_block += 1
                self._blocks[self._last_block] = _Block(pointer.value or 0, whole)
                return Buffer(self, self._last_block, bytes, device)

    def __repr__(self) -> str:
        return f"<vrambroker.Client {self.name if self._open else 'closed'}>"


_callback = threading.local()  # is_running: this thread is the library's


def _from_library(function: "Callable[..., None]") -> "Callable[..., None]":
    def call(*arguments: object) -> None:
        _callback.is_running = True
        try:
            function(*arguments)
        finally:
            _callback.is_running = False

    return call


def _close(reference: "weakref.ref[Client]") -> None:
    client = reference()
    if client is not None:
        with contextlib.suppress(Error):
            client.close()
        client._abandon()


def _view_ended(reference: "weakref.ref[Client]", number: int) -> None:
    client = reference()
    if client is not None and not client._open:
        with contextlib.suppress(Exception):  # as Buffer.__del__()
            client._give_back(number)


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


class _Block:
    """What a buffer holds. Guarded by its client's lock."""

    __slots__ = ("pointer", "whole", "view", "lent")

    def __init__(self, pointer: int, whole: bool) -> None:
        self.pointer = pointer
        self.whole = whole  # of lease_segment()
        self.view: Optional[Callable[[], Any]] = None  # a weak reference to what memoryview() hands out
        self.lent = False  # its address went to a GPU library

    def is_viewed(self) -> bool:
        return self.view is not None and self.view() is not None

    def is_exported(self) -> bool:
        return self.lent or self.is_viewed()


class Buffer:
    """Memory of a device, given back by free(), at the end of a `with` block, with this object, or when its client is
    closed. `bytes` is the size as asked for.

    Closing the client leaves two kinds of memory in place until they are done: what a memoryview or an array shows, until
    the last one has gone; and what __cuda_array_interface__ was asked for, until this object has gone or is freed.
    """

    def __init__(self, client: Client, number: int, bytes: int, device: int) -> None:  # noqa: A002
        self.client = client
        self.bytes = bytes
        self.device = device
        self._number = number  # of the client's block
        self._freed = False

    def __len__(self) -> int:
        return self.bytes

    @property
    def pointer(self) -> int:
        """The address: a device pointer on cuda, ordinary memory on a host device. 0 when it was given back."""
        block = self.client._blocks.get(self._number)
        return 0 if block is None else block.pointer

    def _address(self) -> ctypes.c_void_p:
        pointer = self.pointer
        if pointer == 0:
            raise Error(Code.FAILED_PRECONDITION, "the buffer was freed" if self._freed else
                        "the buffer was given back when its client was closed")
        return ctypes.c_void_p(pointer)

    @contextlib.contextmanager
    def _exporting(self) -> Iterator[_Block]:
        """Holds the client's lock, so that close() sees what is exported here."""
        with self.client._idle:
            self._address()
            if not self.client._open:
                raise Error(Code.FAILED_PRECONDITION, "the client is closed")
            yield self.client._blocks[self._number]

    def _check_range(self, offset: int, count: int) -> None:
        # The library knows the block only, which is rounded up.
        if offset + count > self.bytes:
            raise Error(Code.OUT_OF_RANGE, f"bytes [{offset}, +{count}) are outside the buffer of {self.bytes} bytes")

    def free(self, stream: Optional[int] = None) -> None:
        """Gives it back; `stream` (a cudaStream_t) is one that used it last, beside its own. A second time: nothing.
        BufferError while a memoryview or array of it is alive; of a closed client no error, it then goes back with the
        last of them."""
        with self.client._idle:
            block = self.client._blocks.get(self._number)
            if block is None:
                return
            if block.is_viewed():
                if not self.client._open:
                    return
                raise BufferError("free: a memoryview or an array of this buffer is still in use")
            self._freed = True
            self.client._start_return(self._number)
        self.client._return(block, stream)

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
        with self._exporting() as block:
            array = block.view() if block.view is not None else None
            if array is None:
                array = (ctypes.c_ubyte * self.bytes).from_address(block.pointer)
                array._buffer = self
                client, number = weakref.ref(self.client), self._number
                block.view = weakref.ref(array, lambda _: _view_ended(client, number))
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
        with self._exporting() as block:
            block.lent = True
            return {"shape": (self.bytes,), "typestr": "|u1", "data": (block.pointer, False), "version": 3}

    def __enter__(self) -> "Buffer":
        return self

    def __exit__(self, *_: Any) -> None:
        self.free()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the client is closed, or the interpreter is ending
            self.free()

    def __repr__(self) -> str:
        return f"<vrambroker.Buffer of {self.bytes} bytes at {self.pointer:#x}>"
