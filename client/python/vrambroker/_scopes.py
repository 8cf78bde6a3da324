# SPDX-License-Identifier: Apache-2.0
"""Scopes: what a thread allocates for, for snapshots, `vramctl map` and reports of refusals."""
from __future__ import annotations

import contextlib
import sys
from types import FrameType
from typing import Iterator, List, Optional, Tuple

from . import _library

_MAX_FRAMES = 32  # the innermost ones; a scope and all around it are at most 64 deep, with 48 frames


@contextlib.contextmanager
def memory_scope(name: str, *, stack: bool = False) -> Iterator[None]:
    """What this thread allocates inside is for `name`: a layer of a model, a phase of a step.

        with vrambroker.memory_scope("forward"), vrambroker.memory_scope("layer3"):
            activations = client.malloc(24 << 20)      # in the scope "forward/layer3"

    Also a decorator: `@vrambroker.memory_scope("backward")`. Scopes nest; other threads are not in them, so what PyTorch's
    autograd threads allocate is in none. It names what goes through vrambroker one block at a time: buffers of clients, and
    PyTorch's tensors in mode "plain". `stack`: the Python functions that have led here are kept, too, for the viewer at
    pytorch.org/memory_viz; that costs some microseconds.

    At most 4094 different names are kept in a process, of 128 bytes each, 256 KiB with the frames; what comes later is
    shown as one. So a name should not have the number of a step in it. Safe to use from any thread; coroutines of one
    thread that take turns inside of scopes mix them up.
    """
    if not isinstance(name, str):
        raise TypeError(f"name: {name!r} is no string")
    lib = _library.load().lib
    frames = _frames() if stack else []
    outer: int = lib.vrambroker_scope_begin(None, None, 0)
    try:
        for function, file, line in frames:
            lib.vrambroker_scope_begin(_text(function), _text(file), line)
        lib.vrambroker_scope_begin(_text(name), None, 0)
        yield
    finally:
        lib.vrambroker_scope_end(outer)


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
