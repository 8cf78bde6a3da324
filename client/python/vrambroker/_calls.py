# SPDX-License-Identifier: Apache-2.0
"""How a client's calls of the library are made: counted, with handlers of signals in between, on threads of their own."""
from __future__ import annotations

import ctypes
import threading
from typing import Any, Callable, Iterator, Optional

SLICE = 0.2  # seconds; how often who waits looks whether it still has to


def always() -> bool:
    return True


class Call:
    """A call under way, in a `with` block. It ends with this object at the latest: a signal's handler may raise before
    the block is entered."""

    __slots__ = ("_client", "_number", "_may", "_give_up")

    def __init__(self, client: Any, may: Callable[[], bool], give_up: Optional[ctypes.c_int] = None) -> None:
        self._client = client
        self._number = next(client._numbers)
        self._may = may  # False: there is no call, and None instead of the library's client
        self._give_up = give_up

    def __enter__(self) -> Any:
        client = self._client
        try:
            with client._idle:
                client._calls[self._number] = threading.get_ident(), self._give_up  # first: now the session does not end
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
    """A request of the main thread that may wait. A caller that stops waiting for it sets `give_up`, and drops it: a
    buffer that comes all the same goes back."""

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
            self.error = error.with_traceback(None)  # without what it would keep
        finally:
            self.done.set()


def call_once(call: Iterator[int], then: Callable[[], object] = always) -> int:
    """Makes a call of the library on what only one may have, which map() takes with pop() and hands on in one step: no
    handler of a signal runs in between, and loses it with an exception. `then` runs after it. OK, and no `then`, when
    somebody else has had it."""
    try:
        code = next(call)
    except LookupError:
        return 0
    then()
    return code
