# SPDX-License-Identifier: Apache-2.0
"""Settings of PyTorch's allocator that decide whether PyTorch's memory comes from the broker."""
from __future__ import annotations

import os
import re
import warnings
from typing import Any, Callable, List, Optional, Tuple

from ._errors import Code, Error
from ._torch_patches import Patches

# Advice replacing the advice of PyTorch's out-of-memory errors.
INSTEAD_OF_EXPANDABLE = (
    "expandable_segments does not work with the broker: PyTorch would take that memory from the driver, outside of the "
    "session's limit. Against fragmentation, let `vramctl tune` try other settings on a recording of this session, or call "
    "torch.cuda.empty_cache() between phases")

# PyTorch uses the first variable set, even if empty (2.14.1's sources). Before 2.10, PyTorch knows only the first variable
# (2.6.0's sources; for 2.9.1, pytorch/pytorch #183387).
_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_EXPANDABLE = re.compile(r"expandable_segments\s*:\s*(true|1)\b", re.IGNORECASE)
_RELEASE_LOCK = "release_lock_on_cudamalloc"
# Each setter sets all settings anew. The older setter calls the newer.
_SETTERS = ("_cuda_cudaCachingAllocator_set_allocator_settings", "_accelerator_setAllocatorSettings")


def wants_expandable(text: str) -> bool:
    return _EXPANDABLE.search(text) is not None


def in_force(torch: Any) -> Tuple[str, str]:
    """Returns the environment variable with this release's settings, and the variable's text."""
    release = re.match(r"(\d+)\.(\d+)", torch.__version__)
    knows_all = release is None or (int(release[1]), int(release[2])) >= (2, 10)
    for variable in _VARIABLES if knows_all else _VARIABLES[:1]:
        if variable in os.environ:
            return variable, os.environ[variable]
    return _VARIABLES[0], ""


def check_environment(torch: Any) -> None:
    """Checks the settings before any connection. Raises Error FAILED_PRECONDITION."""
    variable, text = in_force(torch)
    if wants_expandable(text):
        raise Error(Code.FAILED_PRECONDITION, f"${variable}: with expandable_segments, PyTorch bypasses the broker and "
                    "gets its memory from the driver: remove expandable_segments")
    if os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING", "0") not in ("", "0"):
        raise Error(Code.FAILED_PRECONDITION, "$PYTORCH_NO_CUDA_MEMORY_CACHING: without its cache PyTorch would lease 2 MiB "
                    "from the daemon for every tensor: unset it")
    get_backend = getattr(torch.cuda, "get_allocator_backend", None)
    if get_backend is not None and get_backend() != "native":
        raise Error(Code.FAILED_PRECONDITION, f"PyTorch's allocator is {get_backend()!r}, not its own: remove backend:... "
                    f"from ${variable}, and anything else that changes the allocator")
    if is_expandable(torch):
        raise Error(Code.FAILED_PRECONDITION, "expandable_segments is switched on, by a call of "
                    "torch.cuda.memory._set_allocator_settings(), as some libraries make it when they are imported: PyTorch "
                    "bypasses the broker with it. Call enable() first, or "
                    "torch.cuda.memory._set_allocator_settings(\"expandable_segments:False\") before it")


def _snapshot_settings(torch: Any) -> dict:
    """Returns the settings reported by PyTorch; empty if PyTorch reports none."""
    try:
        return dict(torch.cuda.memory._snapshot()["allocator_settings"])
    except Exception:  # versions without the report, or called too early
        return {}


def is_expandable(torch: Any) -> bool:
    """Returns whether expandable_segments is on now, set in any way."""
    return bool(_snapshot_settings(torch).get("expandable_segments", False))


class AllocatorSettings:
    """Watches changes of the settings from now on. `notices` are for status()."""

    def __init__(self, torch: Any, patches: Patches) -> None:
        self.notices: List[str] = []
        # Unless set, PyTorch's allocator is locked while asking for memory.
        self.releases_lock = False
        self._torch = torch
        self._setter: Optional[Callable[[str], Any]] = None
        for name in _SETTERS:
            setter = getattr(torch._C, name, None)
            if setter is not None:
                self._setter = setter
        before = _snapshot_settings(torch)
        # The program's own settings.
        self._text = str(next((before[name] for name in _VARIABLES if name in before), in_force(torch)[1]))
        self._released = bool(before.get(_RELEASE_LOCK, False))
        self._release_lock()
        for name in _SETTERS:
            patches.around(torch._C, name, self._watched)

    def stop(self) -> None:
        """Restores the program's settings. The setters are restored already."""
        if self.releases_lock and self._setter is not None:
            # Name the lock setting in any case: an unnamed lock setting would keep its value (seen in 2.6).
            self._setter(_with(self._text, self._released))

    def _release_lock(self) -> None:
        if self._setter is None:
            return
        try:
            self._setter(_with(self._text, True))
            self.releases_lock = True
        except Exception:  # PyTorch before 2.2 does not know the lock setting; known settings stay
            self._setter(self._text)

    def _watched(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def set_allocator_settings(text: str) -> Any:
            if not isinstance(text, str):
                return original(text)
            if wants_expandable(text):
                notice = f"expandable_segments was asked for and is not used: {INSTEAD_OF_EXPANDABLE}"
                if notice not in self.notices:
                    self.notices.append(notice)
                warnings.warn(f"vrambroker.torch: {notice}", RuntimeWarning, stacklevel=3)
                text = _EXPANDABLE.sub("expandable_segments:False", text)
            result = original(_with(text, True) if self.releases_lock else text)
            self._text = text
            wish = re.search(_RELEASE_LOCK + r"\s*:\s*(\w+)", text)
            if wish is not None:
                self._released = wish.group(1).lower() in ("true", "1")
            return result
        return set_allocator_settings


def _with(text: str, released: bool) -> str:
    """Adds to the settings whether other threads may use the allocator while a thread asks for memory."""
    kept = [part.strip() for part in text.split(",") if part.strip() and _RELEASE_LOCK not in part]
    return ",".join([*kept, f"{_RELEASE_LOCK}:{released}"])
