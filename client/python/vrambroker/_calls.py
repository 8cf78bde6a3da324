# SPDX-License-Identifier: Apache-2.0
"""Library calls of a client: counted, with signal handlers in between, on separate threads."""
from __future__ import annotations

import ctypes
import threading
from typing import Any, Callable, Iterator, Optional

SLICE = 0.2  # seconds between the checks of a waiting thread


def always() -> bool:
    return True


class Call:
    """A call under way, in a `with` block. The call ends with this object at the latest: a signal handler may raise
    before the block is entered."""

    __slots__ = ("_client", "_number", "_may", "_give_up")

    def __init__(self, client: Any, may: Callable[[], bool], give_up: Optional[ctypes.c_int] = None) -> None:
        self._client = client
        self._number = next(client._numbers)
        self._may = may  # False: no call is made, and __enter__() returns None
        self._give_up = give_up

    def __enter__(self) -> Any:
        client = self._client
        try:
            with client._idle:
                client._calls[self._number] = threading.get_ident(), self._give_up  # first: keeps the session alive
                if self._may():
                    return client._session[0] if client._session else ctypes.c_void_p()
                client._calls.pop(self._number)
                return None
        except BaseException:
            client._end_call(self._number)
            raise

    def __exit__(self, *_: Any) -> None:
        self._client._end_call(self._number)

    def __del__(self) -> None:
        number = getattr(self, "_number", None)
        if number is not None:
            self._client._end_call(number)


class Request(threading.Thread):
    """A request of the main thread, possibly waiting. To stop waiting, the caller sets `give_up` and drops the request:
    a buffer obtained nevertheless goes back."""

    def __init__(self, obtain: Callable[[ctypes.c_int], Any]) -> None:
        super().__init__(name="vrambroker-malloc", daemon=True)
        self.give_up = ctypes.c_int()
        self.done = threading.Event()
        self.buffer: Any = None
        self.error: Optional[BaseException] = None
        self._obtain = obtain

    def run(self) -> None:
        try:
            self.buffer = self._obtain(self.give_up)
        except BaseException as error:
            self.error = error.with_traceback(None)  # frees the objects held by a traceback
        finally:
            self.done.set()


def call_once(call: Iterator[int], then: Callable[[], object] = always) -> int:
    """Calls the library on an object with a single owner. map() takes the object with pop() and passes it on in one step:
    no signal handler can run in between, and lose the object with an exception. Runs `then` afterwards. Returns OK, without
    `then`, if another thread has taken the object."""
    try:
        code = next(call)
    except LookupError:
        return 0
    then()
    return code
