# SPDX-License-Identifier: Apache-2.0
"""Scopes: names for the purpose of a thread's allocations, for snapshots, `vramctl map` and reports of refusals."""
from __future__ import annotations

import contextlib
import sys
import threading
from types import FrameType
from typing import Any, List, Optional, Tuple

from . import _library

_MAX_FRAMES = 32  # the innermost frames; a scope and its outer scopes are at most 64 deep, with 48 frames


class _Scope(contextlib.ContextDecorator):
    """Result of memory_scope(). Any number of threads may be inside a scope, each thread any number of times."""

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
        except BaseException:  # raised by a signal handler: __exit__() will not run
            lib.vrambroker_scope_end(outer)
            raise

    def __exit__(self, *_: Any) -> None:
        # Does nothing on a thread outside the scope, as when another thread closes an ExitStack.
        if self._outer.scopes:
            enter(self._outer.scopes.pop())


class _Outer(threading.local):
    """The thread's outer scope at each entry still open."""

    def __init__(self) -> None:
        self.scopes: List[int] = []


def memory_scope(name: str, *, stack: bool = False) -> _Scope:
    """Names the purpose of this thread's allocations inside: a layer of a model, a phase of a step.

        with vrambroker.memory_scope("forward"), vrambroker.memory_scope("layer3"):
            activations = client.malloc(24 << 20)      # in the scope "forward/layer3"

    Also a decorator: `@vrambroker.memory_scope("backward")`. The returned object can be entered again, and by any thread.
    Scopes nest, at most 64 deep: deeper allocations count for the 64th. A scope covers only the entering thread, so
    allocations of PyTorch's autograd threads are in no scope. Scopes name memory that goes through vrambroker block by block:
    buffers of clients, and PyTorch's tensors in mode "plain". `stack`: the calling Python functions are kept, too, for the
    viewer at pytorch.org/memory_viz; keeping them costs some microseconds.

    At most 4094 different names are kept in a process, of 128 bytes each, 256 KiB with the frames; later names are shown
    as a single name. So a name should not contain the number of a step. Safe to use from any thread; coroutines taking turns
    on a thread mix up their scopes. Raises TypeError for a name that is not a string.
    """
    if not isinstance(name, str):
        raise TypeError(f"name: {name!r} is not a string")
    return _Scope(name, stack)


def current() -> int:
    """Returns the scope of this thread, for enter()."""
    scope: int = _library.load().lib.vrambroker_scope_begin(None, None, 0)
    return scope


def enter(scope: int) -> None:
    """Continues this thread in `scope`, as returned by current() on another thread."""
    _library.load().lib.vrambroker_scope_end(scope)


def _text(value: str) -> bytes:
    return value.replace("\0", "").encode(errors="replace")


def _frames() -> List[Tuple[str, str, int]]:
    """Returns function, file and line of each frame, outermost first, without frames of this file and contextlib."""
    frames = []
    frame: Optional[FrameType] = sys._getframe(1)
    while frame is not None and len(frames) < _MAX_FRAMES:
        code = frame.f_code
        if code.co_filename not in (__file__, contextlib.__file__):
            frames.append((code.co_name, code.co_filename, frame.f_lineno or 0))
        frame = frame.f_back
    return frames[::-1]
