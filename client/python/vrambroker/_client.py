# SPDX-License-Identifier: Apache-2.0
"""Client and Buffer."""
from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import itertools
import os
import sys
import threading
import weakref
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Tuple, Union

from . import _library, _scopes
from ._calls import SLICE, Call, Request, always, call_once
from ._figures import Figures
from ._errors import Code, Error

_PLACEMENTS = {"leased": 0, "remote": 1}
_Devices = Union[int, str, Iterable[Union[int, str]], None]


class Client(Figures):
    """A session with vrambrokerd, as long as this object is open. Any thread and any signal handler may use a client.

    limit, guarantee  bytes (int), a fraction of each device's capacity (float), or a text such as "8GiB" or "40%"
    devices           the daemon's devices used by the session, by ordinal or UUID: 0, "GPU-...", [0, 1] or "0,1". The
                      session gets no memory and no guarantee on any further device. Default: the GPUs visible to this
                      process, or all devices if all or none are visible
    name              the session's name in metrics, logs and tools; default: the command name of this process.
                      Characters other than letters, digits and . _ - / : @ become _, and the log says so
    socket_dir        default: $VRAMBROKER_SOCKET_DIR, or else /run/vrambroker
    wait              how long a request waits for other programs to give memory back; at most an hour
    alloc_conf        the allocator's settings in PyTorch's syntax; default: PyTorch's environment variables
    placement         "leased": blocks are cut in this process; "remote": every request is a call to the daemon
    idle_decay        idle time before segments without blocks go back by themselves; 0 or None: never
    connect_timeout, call_timeout  default 5 and 30 seconds
    on_lost           called as on_lost(error) whenever the daemon is lost, on a thread of the library; must not block
    log               called as log(line) for lines about a lost daemon; default: stderr
    library           path of libvrambroker.so.1; see load()

    Times are numbers of seconds, or texts such as "10m" or "500ms". Defaults of limit, guarantee, devices, name and wait
    are $VRAMBROKER_LIMIT, $VRAMBROKER_GUARANTEE, $VRAMBROKER_DEVICES, $VRAMBROKER_NAME and $VRAMBROKER_WAIT.

    Raises Error: UNAVAILABLE without a daemon, INVALID_ARGUMENT for a limit that is not a size, and others. Using the
    client or its buffers after close(), or in a child made by fork(), raises FAILED_PRECONDITION.
    """

    def __init__(self, *, limit: Union[int, float, str, None] = None, guarantee: Union[int, float, str, None] = None,
                 name: Optional[str] = None, socket_dir: Union[str, "os.PathLike[str]", None] = None,
                 wait: Union[float, str, None] = None, alloc_conf: Optional[str] = None, placement: str = "leased",
                 idle_decay: Union[float, str, None] = None, connect_timeout: Union[float, str, None] = None,
                 call_timeout: Union[float, str, None] = None, on_lost: Optional[Callable[[Error], None]] = None,
                 log: Optional[Callable[[str], None]] = None,
                 library: Union[str, "os.PathLike[str]", None] = None, devices: _Devices = None) -> None:
        self._reset()
        self._calls_back = on_lost is not None or log is not None
        _clients.add(self)
        if placement not in _PLACEMENTS:
            raise ValueError(f"placement: {placement!r} is neither \"leased\" nor \"remote\"")
        self._library = _library.load(library)
        options = make_options(limit=limit, guarantee=guarantee, devices=devices, name=name, socket_dir=socket_dir,
                               wait=wait, alloc_conf=alloc_conf, connect_timeout=connect_timeout, library=library)
        options.placement = _PLACEMENTS[placement]
        options.idle_decay_ms = _library.milliseconds("idle_decay", idle_decay, library)
        options.call_timeout_ms = _library.milliseconds("call_timeout", call_timeout, library)
        if on_lost is not None:
            options.on_lost = _library.LOST_FUNCTION(
                _from_library(lambda _, code, message: on_lost(Error(code, message.decode(errors="replace")))))
        if log is not None:
            options.log = _library.LOG_FUNCTION(_from_library(lambda _, line: log(line.decode(errors="replace"))))
        self._options = options
        self._may_wait = options.wait_ms > 0 or bool(os.environ.get("VRAMBROKER_WAIT"))
        handle = ctypes.c_void_p()
        _called[id(options)] = options
        try:
            self._library.check(self._library.lib.vrambroker_connect(ctypes.byref(options), ctypes.byref(handle)))
        finally:
            if handle.value:  # also if a signal handler raises right after the call
                self._session.append(handle)
                self._open = True
            else:
                _called.pop(id(options))

    def _reset(self) -> None:
        # The condition's lock guards the fields below against other threads. The holder may take the lock again: signal
        # handlers and destructors run between any two steps. So calls are counted before any check, and an object with a
        # single owner is taken with a single pop().
        self._idle = threading.Condition()
        self._open = False
        self._forked = False
        self._session: List[ctypes.c_void_p] = []  # the library's client, until disconnected
        # Calls under way, by number: the thread, and the flag that ends its wait.
        self._calls: Dict[int, Tuple[int, Optional[ctypes.c_int]]] = {}
        self._blocks: Dict[int, _Block] = {}  # memory of buffers, by number
        self._numbers = itertools.count(1)

    def _after_fork_in_child(self) -> None:
        """Drops the parent's state: threads missing in the child may hold the lock, or have calls under way."""
        self._reset()
        self._forked = True

    def _closed_error(self) -> Error:
        if self._forked:
            return Error(Code.FAILED_PRECONDITION,
                         "this client belongs to the parent process: a child made by fork() cannot use it")
        return Error(Code.FAILED_PRECONDITION, "the client is closed")

    def _using(self, give_up: Optional[ctypes.c_int] = None) -> Call:
        """Wraps calls of the library: the library's client stays alive until the calls are done. `give_up` as in
        vrambroker_malloc_until()."""
        return Call(self, self._check_open, give_up)

    def _inside(self) -> Call:
        """Like _using(), also for a closed client with memory left."""
        return Call(self, always)

    def _check_open(self) -> bool:
        if not self._open:
            raise self._closed_error()
        return True

    def _end_call(self, number: int) -> None:
        """Ends a call. Does nothing the second time."""
        if self._calls.pop(number, None) is None or self._open:
            return
        with self._idle:
            self._idle.notify_all()
        self._settle()

    def close(self) -> None:
        """Gives back the buffers' memory, and ends the session, after calls of other threads have ended; calls waiting for
        memory fail. Inside another call of the same thread, as from a signal handler, close() leaves the work to the end of
        the outer call; inside on_lost and log, to the calls of other threads. The buffers become unusable. Memory still used
        by memoryviews, arrays or GPU libraries stays in place; the last user gives the memory back and ends the session: see
        Buffer. close() waits for seconds for an unresponsive daemon; the daemon learns of the end when it answers again."""
        try:
            with self._idle:
                self._open = False
                for _, give_up in list(self._calls.values()):
                    if give_up is not None:
                        give_up.value = 1
                self._wait_for_others()
        finally:
            self._settle()
        with self._idle:
            self._wait_for_others()  # another thread may settle first

    def _wait_for_others(self) -> None:
        """Caller holds the lock."""
        if getattr(_callback, "is_running", False):
            return  # the library, and so the calls, may wait for the callback's end
        me = threading.get_ident()
        while any(thread != me for thread, _ in list(self._calls.values())):
            if sys.is_finalizing():
                return  # the calls' threads no longer run
            self._idle.wait(SLICE)

    def _settle(self) -> None:
        """Gives back the buffers' memory of a closed client without calls under way. Ends the session unless memory may
        still be in use."""
        with Call(self, self._has_to_settle) as handle:
            if handle is not None and self._blocks:
                self._give_back_all(handle)
            elif handle is not None:
                self._disconnect()
        # The end of the call has run _settle() again.

    def _has_to_settle(self) -> bool:
        if self._open or len(self._calls) > 1 or not self._session:
            return False
        return not self._blocks or any(not block.is_exported() for block in list(self._blocks.values()))

    def _give_back_all(self, handle: ctypes.c_void_p) -> None:
        self._library.lib.vrambroker_begin_disconnect(handle)
        for number in list(self._blocks):  # other threads may give back at once
            self._give_back(number)
        if self._blocks:  # gives the cache to other sessions
            self._library.lib.vrambroker_empty_cache(handle, ctypes.byref(ctypes.c_uint64()))

    def _disconnect(self) -> None:
        disconnect, options = self._library.lib.vrambroker_disconnect, self._options
        if not getattr(_callback, "is_running", False):
            code = call_once(map(disconnect, iter(self._session.pop, None)), then=lambda: _called.pop(id(options)))
            self._library.check(code)
            return

        # The library waits for its callbacks: a client ending in a callback must not wait for the library.
        def disconnect_apart(session: ctypes.c_void_p) -> None:
            disconnect(session)
            _called.pop(id(options))

        with contextlib.suppress(IndexError):  # another thread disconnects
            session = self._session.pop()
            thread = threading.Thread(target=disconnect_apart, args=(session,), daemon=True)
            _ending.add(thread)
            try:
                thread.start()
            except RuntimeError:  # no thread is available
                self._session.append(session)
                raise

    def _abandon(self) -> None:
        """Ends the session after close(), forgetting the blocks left."""
        with self._idle:
            self._wait_for_others()
            self._blocks.clear()
        self._settle()

    def _give_back(self, number: int) -> None:
        """Gives back a buffer's block of a closed client, unless the block may still be in use."""
        with self._inside() as handle:
            with self._idle:
                block = self._blocks.get(number)
                if block is None or block.is_exported():
                    return
            self._return(handle, number, block)

    def _return(self, handle: ctypes.c_void_p, number: int, block: "_Block", stream: Optional[int] = None) -> None:
        """Returns a block to the library. Raises Error only while the client is open."""
        lib, take = self._library.lib, iter(functools.partial(self._blocks.pop, number), None)
        if stream is None:
            call = map(lib.vrambroker_return_segment if block.whole else lib.vrambroker_free, itertools.repeat(handle), take)
        else:
            call = map(lib.vrambroker_return_segment_stream if block.whole else lib.vrambroker_free_stream,
                       itertools.repeat(handle), take, [ctypes.c_void_p(stream)])
        code = call_once(call)
        if code != 0 and stream is not None and not block.whole:
            self._blocks[number] = block  # the stream cannot be waited for: nothing was freed
        if self._open:
            self._library.check(code)

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # in a child made by fork(), or in an ending interpreter
            self.close()

    @property
    def warnings(self) -> List[str]:
        """A sentence for each allocator setting without effect."""
        found: List[str] = []
        with self._using() as handle:
            while True:
                text = self._library.lib.vrambroker_warning(handle, len(found))
                if text is None:
                    return found
                found.append(text.decode(errors="replace"))

    def malloc(self, bytes: Union[int, str], device: Optional[int] = None, stream: Any = 0) -> "Buffer":  # noqa: A002
        """Allocates at least 1 byte, given as a number or a text such as "24MiB", on the first device by default. `stream`
        will use the memory: a cudaStream_t, or an object such as torch.cuda.Stream; None is the default stream. Raises
        OutOfMemoryError if the device has no memory. Signal handlers run while the main thread waits for memory; an exception
        from a handler ends the wait."""
        number = 0 if stream is None else _library.stream_number(stream)
        return self._obtain("vrambroker_malloc_until", bytes, device, ctypes.c_void_p(number))

    def lease_segment(self, bytes: Union[int, str], device: Optional[int] = None) -> "Buffer":  # noqa: A002
        """Leases a whole segment, rounded up to 2 MiB, on the first device by default, for programs with their own allocator.
        Leasing and returning each take a round trip to the daemon."""
        return self._obtain("vrambroker_lease_segment_until", bytes, device, whole=True)

    def _obtain(self, function: str, bytes: Union[int, str], device: Optional[int], *arguments: Any, whole: bool = False) -> "Buffer":  # noqa: A002
        size = self._library.size("bytes", bytes) if isinstance(bytes, str) else _count("bytes", bytes)
        arguments = (size, _library.ordinal(device)) + arguments

        def obtain(give_up: Optional[ctypes.c_int]) -> Buffer:
            return self._obtain_here(function, arguments, whole, give_up)

        if not self._may_wait:
            return obtain(None)
        if threading.get_ident() != threading.main_thread().ident:
            return obtain(ctypes.c_int())
        # Python runs signal handlers on the main thread, and not inside the library: so the main thread never waits there.
        try:
            return obtain(ctypes.c_int(1))
        except Error as error:
            if error.code != Code.CANCELLED:
                raise
        return self._obtain_apart(obtain)

    def _obtain_here(self, function: str, arguments: Tuple[Any, ...], whole: bool,
                     give_up: Optional[ctypes.c_int]) -> "Buffer":
        buffer = Buffer(self, next(self._numbers), arguments[0], arguments[1])
        block = _Block(whole)
        # Register the block before the library sets its address: a signal handler may raise right afterwards.
        self._blocks[buffer._number] = block
        flag = None if give_up is None else ctypes.byref(give_up)
        try:
            with self._using(give_up) as handle:
                request = getattr(self._library.lib, function)
                self._library.check(request(handle, *arguments, flag, ctypes.byref(block._as_parameter_)))
        except BaseException as error:
            with contextlib.suppress(Error):
                buffer.free()
            if isinstance(error, Error) and error.code == Code.CANCELLED and not self._open:
                raise self._closed_error() from None
            raise
        return buffer

    def _obtain_apart(self, obtain: "Callable[[ctypes.c_int], Buffer]") -> "Buffer":
        scope = _scopes.current()

        def obtain_in_scope(give_up: ctypes.c_int) -> Buffer:
            _scopes.enter(scope)
            return obtain(give_up)

        request = Request(obtain_in_scope)
        try:
            request.start()
            while not request.done.wait(SLICE):
                if self._forked:  # in a signal handler: the thread is the parent's
                    raise self._closed_error()
        except BaseException as error:
            if isinstance(error, RuntimeError) and request.ident is None:
                return obtain(ctypes.c_int())  # no thread can be started, as while the interpreter ends
            request.give_up.value = 1
            del request  # the traceback would keep the request's buffer
            raise
        if request.error is not None:
            raise request.error
        assert request.buffer is not None
        return request.buffer

    def __repr__(self) -> str:
        return f"<vrambroker.Client {self.name if self._open else 'closed'}>"


_callback = threading.local()  # is_running: the thread runs a callback


def _from_library(function: "Callable[..., None]") -> "Callable[..., None]":
    def call(*arguments: object) -> None:
        outer = getattr(_callback, "is_running", False)  # a client made in a callback calls `log`, too
        _callback.is_running = True
        try:
            function(*arguments)
        finally:
            _callback.is_running = outer

    return call


# Options with the functions called by the library, until the library has ended their sessions. A client may be destroyed
# earlier: a function may drop the last reference to the client, while another function runs or is about to run.
_called: Dict[int, _library.Options] = {}  # by id() of the options
_ending: "weakref.WeakSet[threading.Thread]" = weakref.WeakSet()  # threads ending sessions outside of callbacks
_clients: "weakref.WeakSet[Client]" = weakref.WeakSet()


def _at_exit() -> None:
    # A thread of the library must not call into an ending interpreter.
    for client in list(_clients):
        if client._calls_back:
            with contextlib.suppress(Error):
                client.close()
            with contextlib.suppress(Error):
                client._abandon()
    for thread in list(_ending):
        with contextlib.suppress(RuntimeError):  # not started yet
            thread.join()


def _after_fork_in_child() -> None:
    for client in list(_clients):
        client._after_fork_in_child()


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_after_fork_in_child)


def _view_ended(reference: "weakref.ref[Client]", number: int) -> None:
    client = reference()
    if client is not None and not client._open:
        with contextlib.suppress(Exception):  # like Buffer.__del__()
            client._give_back(number)


def _count(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: {value!r} is not an integer")
    if not 0 <= value < 1 << 64:
        raise ValueError(f"{name}: {value!r} is not a number of bytes")
    return value


def make_options(*, limit: Union[int, float, str, None], guarantee: Union[int, float, str, None], devices: _Devices,
                 name: Optional[str], socket_dir: Union[str, "os.PathLike[str]", None], wait: Union[float, str, None],
                 alloc_conf: Optional[str], connect_timeout: Union[float, str, None],
                 library: Union[str, "os.PathLike[str]", None]) -> _library.Options:
    """Converts the arguments of Client."""
    options = _library.Options()
    options.abi_version = _library.ABI_VERSION
    if socket_dir is not None and not isinstance(socket_dir, (str, bytes, os.PathLike)):
        raise TypeError(f"socket_dir is a path, not {socket_dir!r}")
    options.socket_dir = None if socket_dir is None else os.fsencode(socket_dir)
    options.name = _encoded("name", name)
    options.limit = _library.size_text("limit", limit)
    options.guarantee = _library.size_text("guarantee", guarantee)
    options.devices = _library.devices_text(devices)
    options.alloc_conf = _encoded("alloc_conf", alloc_conf)
    options.wait_ms = _library.milliseconds("wait", wait, library)
    options.connect_timeout_ms = _library.milliseconds("connect_timeout", connect_timeout, library)
    return options


def _encoded(argument: str, text: Optional[str]) -> Optional[bytes]:
    if text is not None and not isinstance(text, str):
        raise TypeError(f"{argument} is a text, not {text!r}")
    return None if text is None else text.encode()


class _Block:
    """Memory of a buffer. Guarded by the client's lock."""

    __slots__ = ("_as_parameter_", "whole", "view", "lent")

    def __init__(self, whole: bool) -> None:
        self._as_parameter_ = ctypes.c_void_p()  # the address, passed by ctypes for this object
        self.whole = whole  # leased by lease_segment()
        self.view: Optional[Callable[[], Any]] = None  # a weak reference to the array of memoryview()
        self.lent = False  # a GPU library got the address

    @property
    def pointer(self) -> int:
        return self._as_parameter_.value or 0

    def is_viewed(self) -> bool:
        return self.view is not None and self.view() is not None

    def is_exported(self) -> bool:
        return self.lent or self.is_viewed()


class Buffer:
    """Memory of a device, given back by free(), at the end of a `with` block, with this object, or when its client is
    closed. `bytes` is the requested size.

    Closing the client leaves two kinds of memory in place: memory shown by memoryviews or arrays, until the last of them is
    gone; and memory handed out by __cuda_array_interface__, until this object is gone or freed.
    """

    def __init__(self, client: Client, number: int, bytes: int, device: int) -> None:  # noqa: A002
        self.client = client
        self.bytes = bytes
        self.device = device
        self._number = number  # key of the client's block
        self._freed = False

    def __len__(self) -> int:
        return self.bytes

    @property
    def pointer(self) -> int:
        """The address: a device pointer on cuda, ordinary memory on a host device. 0 once the memory was given back."""
        block = self.client._blocks.get(self._number)
        return 0 if block is None else block.pointer

    def _address(self) -> ctypes.c_void_p:
        pointer = self.pointer
        if pointer == 0 and self.client._forked:
            raise self.client._closed_error()
        if pointer == 0:
            raise Error(Code.FAILED_PRECONDITION, "the buffer was freed" if self._freed else
                        "the buffer was given back when its client was closed")
        return ctypes.c_void_p(pointer)

    @contextlib.contextmanager
    def _exporting(self) -> Iterator[_Block]:
        """Holds the client's lock, so that close() sees the export."""
        with self.client._idle:
            self._address()
            block = self.client._blocks.get(self._number)
            if block is None or not self.client._open:
                raise self.client._closed_error()
            yield block

    def _check_range(self, offset: int, count: int) -> None:
        # The library knows only the rounded block.
        if offset + count > self.bytes:
            raise Error(Code.OUT_OF_RANGE, f"bytes [{offset}, +{count}) are outside the buffer of {self.bytes} bytes")

    def free(self, stream: Any = None) -> None:
        """Gives the memory back; does nothing the second time. `stream`, as for malloc(), used the memory last, beside the
        buffer's own stream; for a segment of lease_segment(), no other stream is waited for. A remote client waits for work
        queued on `stream`. Raises TypeError for a value that is not a stream, BufferError while a memoryview or array of the
        buffer is alive, FAILED_PRECONDITION if a remote client cannot wait, as while a CUDA graph is captured on `stream`;
        after an error nothing was freed. On a closed client a live memoryview or array is no error: the last of them gives
        the memory back."""
        number = None if stream is None else _library.stream_number(stream)
        client = self.client
        with client._inside() as handle:
            with client._idle:
                block = client._blocks.get(self._number)
                if block is None:
                    return
                if block.is_viewed():
                    if not client._open:
                        return
                    raise BufferError("free: a memoryview or an array of this buffer is still in use")
                self._freed = True
            client._return(handle, self._number, block, number)

    def record_stream(self, stream: Any) -> None:
        """Notes that `stream`, as for malloc(), uses the memory, too: after free() the memory is not reused before the work
        queued on `stream` until then is done."""
        number = ctypes.c_void_p(_library.stream_number(stream))
        self.client._call("vrambroker_record_stream", self._address(), number)

    def write(self, data: Any, offset: int = 0) -> None:
        """Copies a bytes-like object into [offset, offset + its size), on any device. The copy is done on return."""
        with memoryview(data) as view:
            raw = view.cast("B") if view.c_contiguous else memoryview(view.tobytes())
            self._check_range(_count("offset", offset), len(raw))
            source = (ctypes.c_char * len(raw)).from_buffer_copy(raw) if raw.readonly else \
                (ctypes.c_char * len(raw)).from_buffer(raw)
            self.client._call("vrambroker_write", self._address(), offset, source, len(raw))
            del source
            raw.release()

    def read(self, bytes: Optional[int] = None, offset: int = 0) -> bytes:  # noqa: A002
        """Returns the bytes of [offset, offset + bytes), by default all bytes from `offset` on."""
        wanted = _count("bytes", max(0, self.bytes - offset) if bytes is None else bytes)
        self._check_range(_count("offset", offset), wanted)
        into = ctypes.create_string_buffer(wanted)
        self.client._call("vrambroker_read", self._address(), offset, into, wanted)
        return into.raw

    def memoryview(self) -> memoryview:
        """Returns a writable view of the memory on a host device. The view keeps the buffer alive. Raises TypeError on a GPU,
        where read() and write() copy."""
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
        """Returns a NumPy array over memoryview(). Raises ImportError without NumPy."""
        import numpy

        return numpy.frombuffer(self.memoryview(), dtype=dtype)

    @property
    def __cuda_array_interface__(self) -> Dict[str, Any]:
        """Bytes on the GPU, for CuPy, Numba and torch.as_tensor(). Arrays made from the bytes must not outlive the buffer."""
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
