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
    """A session with vrambrokerd, for as long as this object is open. Any thread may use it, and so may handlers of
    signals.

    limit, guarantee  bytes (int), a fraction of each device's capacity (float), or a text such as "8GiB" or "40%"
    devices           the daemon's devices that the session uses, each by its ordinal or its UUID: 0, "GPU-...", [0, 1] or
                      "0,1". It has nothing of the others, and its guarantee is taken on these alone. Default: the GPUs
                      that this process sees, or all devices if it sees all of them, or none
    name              what the session is called in metrics, logs and tools; default: the command name of this process.
                      Characters other than letters, digits and . _ - / : @ become _, and the log says so
    socket_dir        default: $VRAMBROKER_SOCKET_DIR, or else /run/vrambroker
    wait              how long a request without memory waits for others to give some back; at most an hour
    alloc_conf        the allocator's settings in PyTorch's syntax; default: PyTorch's environment variables
    placement         "leased": blocks are cut in this process; "remote": every request is a call to the daemon
    idle_decay        after how long segments without blocks go back by themselves; 0 or None: never
    connect_timeout, call_timeout  default 5 and 30 seconds
    on_lost           on_lost(error), each time that the daemon is lost, on a thread of the library; must not block
    log               log(line) for lines about a lost daemon; default: stderr
    library           path of libvrambroker.so.1; see load()

    A time is a number of seconds, or a text such as "10m" or "500ms". Where limit, guarantee, devices, name or wait is not
    given, $VRAMBROKER_LIMIT, $VRAMBROKER_GUARANTEE, $VRAMBROKER_DEVICES, $VRAMBROKER_NAME and $VRAMBROKER_WAIT count.

    Raises Error: UNAVAILABLE when there is no daemon, INVALID_ARGUMENT for a limit that is no size, and others. Use
    after close() is a FAILED_PRECONDITION, of its buffers, too, and so is use in a child made by fork().
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
            if handle.value:  # also when a signal's handler raises right after it
                self._session.append(handle)
                self._open = True
            else:
                _called.pop(id(options))

    def _reset(self) -> None:
        # Its lock guards the following, against other threads. The thread that has it may take it again: a signal's
        # handler, or an object that goes, runs between any two steps. So calls are counted before anything is looked
        # at, and what only one may have is taken with a single pop().
        self._idle = threading.Condition()
        self._open = False
        self._forked = False
        self._session: List[ctypes.c_void_p] = []  # the library's client, until it is disconnected
        # Calls under way, by number: on which thread, and what ends its waiting.
        self._calls: Dict[int, Tuple[int, Optional[ctypes.c_int]]] = {}
        self._blocks: Dict[int, _Block] = {}  # what buffers hold, by number
        self._numbers = itertools.count(1)

    def _after_fork_in_child(self) -> None:
        """All of it is the parent's, its lock may be held and its calls be under way by threads that are not here."""
        self._reset()
        self._forked = True

    def _closed_error(self) -> Error:
        if self._forked:
            return Error(Code.FAILED_PRECONDITION,
                         "this client belongs to the parent process: a child made by fork() cannot use it")
        return Error(Code.FAILED_PRECONDITION, "the client is closed")

    def _using(self, give_up: Optional[ctypes.c_int] = None) -> Call:
        """Around calls of the library: gives them its client, which lives until they are done. `give_up` as in
        vrambroker_malloc_until()."""
        return Call(self, self._check_open, give_up)

    def _inside(self) -> Call:
        """The same, also of a closed client that still has memory."""
        return Call(self, always)

    def _check_open(self) -> bool:
        if not self._open:
            raise self._closed_error()
        return True

    def _end_call(self, number: int) -> None:
        """The second time: nothing."""
        if self._calls.pop(number, None) is None or self._open:
            return
        with self._idle:
            self._idle.notify_all()
        self._settle()

    def close(self) -> None:
        """Gives back what its buffers hold, and ends the session, after calls of other threads have ended; those that
        wait for memory fail. Called inside another call of the same thread, as by a signal's handler, it leaves that to
        the end of that one; in on_lost and log, to the calls of other threads. The buffers cannot be used any more. Memory
        that memoryviews, arrays or GPU libraries may still use stays where it is; it goes back, and the session ends,
        with the last of them: see Buffer. A daemon that does not answer is waited for for seconds; it hears of it when it
        answers again."""
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
            self._wait_for_others()  # who may have been faster

    def _wait_for_others(self) -> None:
        """REQUIRES: the lock is held."""
        if getattr(_callback, "is_running", False):
            return  # the library, and so they, may wait for the end of the callback
        me = threading.get_ident()
        while any(thread != me for thread, _ in list(self._calls.values())):
            if sys.is_finalizing():
                return  # their threads do not run any more
            self._idle.wait(SLICE)

    def _settle(self) -> None:
        """Of a closed client, when no call is under way: gives back what its buffers hold, and ends the session unless
        somebody may still use some of it."""
        with Call(self, self._has_to_settle) as handle:
            if handle is not None and self._blocks:
                self._give_back_all(handle)
            elif handle is not None:
                self._disconnect()
        # The end of this call has come here again.

    def _has_to_settle(self) -> bool:
        if self._open or len(self._calls) > 1 or not self._session:
            return False
        return not self._blocks or any(not block.is_exported() for block in list(self._blocks.values()))

    def _give_back_all(self, handle: ctypes.c_void_p) -> None:
        self._library.lib.vrambroker_begin_disconnect(handle)
        for number in list(self._blocks):  # others may give back at the same time
            self._give_back(number)
        if self._blocks:  # others may have what is in the cache
            self._library.lib.vrambroker_empty_cache(handle, ctypes.byref(ctypes.c_uint64()))

    def _disconnect(self) -> None:
        disconnect, options = self._library.lib.vrambroker_disconnect, self._options
        if not getattr(_callback, "is_running", False):
            code = call_once(map(disconnect, iter(self._session.pop, None)), then=lambda: _called.pop(id(options)))
            self._library.check(code)
            return

        # The library waits for its callbacks: whatever ends in one must not wait for the library.
        def disconnect_apart(session: ctypes.c_void_p) -> None:
            disconnect(session)
            _called.pop(id(options))

        with contextlib.suppress(IndexError):  # somebody has
            session = self._session.pop()
            thread = threading.Thread(target=disconnect_apart, args=(session,), daemon=True)
            _ending.add(thread)
            try:
                thread.start()
            except RuntimeError:  # there is none to be had
                self._session.append(session)
                raise

    def _abandon(self) -> None:
        """After close(): ends the session, in so far as nobody uses its memory any more."""
        with self._idle:
            self._wait_for_others()
            self._blocks.clear()
        self._settle()

    def _give_back(self, number: int) -> None:
        """Of a closed client: a buffer's block, unless somebody may still use it."""
        with self._inside() as handle:
            with self._idle:
                block = self._blocks.get(number)
                if block is None or block.is_exported():
                    return
            self._return(handle, number, block)

    def _return(self, handle: ctypes.c_void_p, number: int, block: "_Block", stream: Optional[int] = None) -> None:
        """Error only while the client is open."""
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

    def malloc(self, bytes: Union[int, str], device: Optional[int] = None, stream: Any = 0) -> "Buffer":  # noqa: A002
        """At least 1 byte, as a number or a text such as "24MiB", of the first device by default. `stream` is what the memory is for: a cudaStream_t, or an object
        such as torch.cuda.Stream; None is the default stream. OutOfMemoryError when there is none. A signal's handler runs
        while the main thread waits for memory, and what it raises ends the waiting."""
        number = 0 if stream is None else _library.stream_number(stream)
        return self._obtain("vrambroker_malloc_until", bytes, device, ctypes.c_void_p(number))

    def lease_segment(self, bytes: Union[int, str], device: Optional[int] = None) -> "Buffer":  # noqa: A002
        """A whole segment, rounded up to 2 MiB, of the first device by default, for programs with an allocator of their own.
        A round trip to the daemon, both ways."""
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
        # Python's handlers of signals run on its main thread, and not while that is in the library: it does not wait there.
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
        # Before the library says where it is: a signal's handler may raise as soon as it has.
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
                if self._forked:  # by a signal's handler: the thread is the parent's
                    raise self._closed_error()
        except BaseException as error:
            if isinstance(error, RuntimeError) and request.ident is None:
                return obtain(ctypes.c_int())  # no thread can be started, as while the interpreter ends
            request.give_up.value = 1
            del request  # the traceback would keep its buffer
            raise
        if request.error is not None:
            raise request.error
        assert request.buffer is not None
        return request.buffer

    def __repr__(self) -> str:
        return f"<vrambroker.Client {self.name if self._open else 'closed'}>"


_callback = threading.local()  # is_running: this thread is the library's


def _from_library(function: "Callable[..., None]") -> "Callable[..., None]":
    def call(*arguments: object) -> None:
        outer = getattr(_callback, "is_running", False)  # a client made in one calls `log`, too
        _callback.is_running = True
        try:
            function(*arguments)
        finally:
            _callback.is_running = outer

    return call


# The functions that the library calls, until it has ended their sessions. A client may go before: with the last
# reference to it in one of them, while another runs or is about to.
_called: Dict[int, _library.Options] = {}  # by what id() says of each
_ending: "weakref.WeakSet[threading.Thread]" = weakref.WeakSet()  # what ends sessions apart from their callbacks
_clients: "weakref.WeakSet[Client]" = weakref.WeakSet()


def _at_exit() -> None:
    # A thread of the library must not call into an interpreter that is ending.
    for client in list(_clients):
        if client._calls_back:
            with contextlib.suppress(Error):
                client.close()
            with contextlib.suppress(Error):
                client._abandon()
    for thread in list(_ending):
        with contextlib.suppress(RuntimeError):  # it has not been started
            thread.join()


def _after_fork_in_child() -> None:
    for client in list(_clients):
        client._after_fork_in_child()


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_after_fork_in_child)


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


def make_options(*, limit: Union[int, float, str, None], guarantee: Union[int, float, str, None], devices: _Devices,
                 name: Optional[str], socket_dir: Union[str, "os.PathLike[str]", None], wait: Union[float, str, None],
                 alloc_conf: Optional[str], connect_timeout: Union[float, str, None],
                 library: Union[str, "os.PathLike[str]", None]) -> _library.Options:
    """As Client takes them."""
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
    """What a buffer holds. Guarded by its client's lock."""

    __slots__ = ("_as_parameter_", "whole", "view", "lent")

    def __init__(self, whole: bool) -> None:
        self._as_parameter_ = ctypes.c_void_p()  # its address: what ctypes passes for this object
        self.whole = whole  # of lease_segment()
        self.view: Optional[Callable[[], Any]] = None  # a weak reference to what memoryview() hands out
        self.lent = False  # its address went to a GPU library

    @property
    def pointer(self) -> int:
        return self._as_parameter_.value or 0

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
        if pointer == 0 and self.client._forked:
            raise self.client._closed_error()
        if pointer == 0:
            raise Error(Code.FAILED_PRECONDITION, "the buffer was freed" if self._freed else
                        "the buffer was given back when its client was closed")
        return ctypes.c_void_p(pointer)

    @contextlib.contextmanager
    def _exporting(self) -> Iterator[_Block]:
        """Holds the client's lock, so that close() sees what is exported here."""
        with self.client._idle:
            self._address()
            block = self.client._blocks.get(self._number)
            if block is None or not self.client._open:
                raise self.client._closed_error()
            yield block

    def _check_range(self, offset: int, count: int) -> None:
        # The library knows the block only, which is rounded up.
        if offset + count > self.bytes:
            raise Error(Code.OUT_OF_RANGE, f"bytes [{offset}, +{count}) are outside the buffer of {self.bytes} bytes")

    def free(self, stream: Any = None) -> None:
        """Gives it back; `stream` is one that used it last, beside its own, as malloc() takes it; of a segment of
        lease_segment(), the only one that is waited for. A remote client waits for what was queued on that. A second time:
        nothing. TypeError for what is no stream, BufferError while a memoryview or array of it is alive, FAILED_PRECONDITION
        where a remote client cannot wait, as while a CUDA graph is captured on `stream`: then nothing happens. Of a closed
        client no error, it then goes back with the last of them."""
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
        """`stream`, as malloc() takes it, uses the memory, too: after free() it is not reused before the work queued
        there until then is done."""
        number = ctypes.c_void_p(_library.stream_number(stream))
        self.client._call("vrambroker_record_stream", self._address(), number)

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
