# SPDX-License-Identifier: Apache-2.0
"""Scopes: what a thread allocates for, for snapshots, `vramctl map` and reports of refusals."""
from __future__ import annotations

import contextlib
import sys
import threading
from types import FrameType
from typing import Any, List, Optional, Tuple

from . import _library

_MAX_FRAMES = 32  # the innermost ones; a scope and all around it are at most 64 deep, with 48 frames


class _Scope(contextlib.ContextDecorator):
    """Of memory_scope(). Any number of threads may be inside of it, each any number of times."""

    def __init__(self, name: str, stack: bool) -> None:
        self._name = _text(name)
        self._stack = stack
        self._outer = _Outer()

    def __enter__(self) -> None:
        lib = _library.load().lib
        frames = _frames() if self._stack else []
        outer: int = lib.vrambroker_scope_begin(None, None, 0)
        try:
            for function, file, line in frames:
                lib.vrambroker_scope_begin(_text(function), _text(file), line)
            lib.vrambroker_scope_begin(self._name, None, 0)
            self._outer.scopes.append(outer)
        except BaseException:  # of a signal's handler: __exit__() is not called then
            lib.vrambroker_scope_end(outer)
            raise

    def __exit__(self, *_: Any) -> None:
        # Nothing on a thread that has not entered it, as where an ExitStack is closed by another one.
        if self._outer.scopes:
            enter(self._outer.scopes.pop())


class _Outer(threading.local):
    """What this thread was in when it entered the scope, each time that it is inside."""

    def __init__(self) -> None:
        self.scopes: List[int] = []


def memory_scope(name: str, *, stack: bool = False) -> _Scope:
    """What this thread allocates inside is for `name`: a layer of a model, a phase of a step.

        with vrambroker.memory_scope("forward"), vrambroker.memory_scope("layer3"):
            activations = client.malloc(24 << 20)      # in the scope "forward/layer3"

    Also a decorator: `@vrambroker.memory_scope("backward")`. What it returns can be entered again, and by any thread. Scopes
    nest, at most 64 deep: what is deeper counts for the 64th. Other threads are not in them, so what PyTorch's
    autograd threads allocate is in none. It names what goes through vrambroker one block at a time: buffers of clients, and
    PyTorch's tensors in mode "plain". `stack`: the Python functions that have led here are kept, too, for the viewer at
    pytorch.org/memory_viz; that costs some microseconds.

    At most 4094 different names are kept in a process, of 128 bytes each, 256 KiB with the frames; what comes later is
    shown as one. So a name should not have the number of a step in it. Safe to use from any thread; coroutines of one
    thread that take turns inside of scopes mix them up. TypeError for a name that is not a string.
    """
    if not isinstance(name, str):
        raise TypeError(f"name: {name!r} is not a string")
    return _Scope(name, stack)


def current() -> int:
    """The scope of this thread, for enter()."""
    scope: int = _library.load().lib.vrambroker_scope_begin(None, None, 0)
    return scope


def enter(scope: int) -> None:
    """This thread goes on in the scope of another one."""
    _library.load().lib.vrambroker_scope_end(scope)


def _text(value: str) -> bytes:
    return value.replace("\0", "").encode(errors="replace")


def _frames() -> List[Tuple[str, str, int]]:
    """Function, file and line of each, outermost first, without this file and contextlib."""
    frames = []
    frame: Optional[FrameType] = sys._getframe(1)
    while frame is not None and len(frames) < _MAX_FRAMES:
        code = frame.f_code
        if code.co_filename not in (__file__, contextlib.__file__):
            frames.append((code.co_name, code.co_filename, frame.f_lineno or 0))
        frame = frame.f_back
    return frames[::-1]
