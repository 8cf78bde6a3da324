# SPDX-License-Identifier: Apache-2.0
"""Settings of PyTorch's allocator, as far as they decide whether its memory comes from the broker."""
from __future__ import annotations

import os
import re
import warnings
from typing import Any, Callable, List, Optional

from ._library import Code, Error
from ._torch_patches import Patches

# What to do instead of what PyTorch's out-of-memory errors advise.
INSTEAD_OF_EXPANDABLE = (
    "expandable_segments does not work with the broker: PyTorch would take that memory from the driver, outside of the "
    "session's limit. Against fragmentation, let `vramctl tune` try other settings on a recording of this session, or call "
    "torch.cuda.empty_cache() between phases")

_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_EXPANDABLE = re.compile(r"expandable_segments\s*:\s*(true|1)\b", re.IGNORECASE)
_RELEASE_LOCK = "release_lock_on_cudamalloc:True"
# Each sets all settings anew. The newer one is called by the older.
_SETTERS = ("_cuda_cudaCachingAllocator_set_allocator_settings", "_accelerator_setAllocatorSettings")


def wants_expandable(text: str) -> bool:
    return _EXPANDABLE.search(text) is not None


def check_environment(torch: Any) -> None:
    """Before anything is connected. Error FAILED_PRECONDITION."""
    for variable in _VARIABLES:
        if wants_expandable(os.environ.get(variable, "")):
            raise Error(Code.FAILED_PRECONDITION, f"${variable}: with expandable_segments, PyTorch bypasses the broker and "
                        "gets its memory from the driver: remove expandable_segments")
    if os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING", "0") not in ("", "0"):
        raise Error(Code.FAILED_PRECONDITION, "$PYTORCH_NO_CUDA_MEMORY_CACHING: without its cache PyTorch would lease 2 MiB "
                    "from the daemon for every tensor: unset it")
    get_backend = getattr(torch.cuda, "get_allocator_backend", None)
    if get_backend is not None and get_backend() != "native":
        raise Error(Code.FAILED_PRECONDITION, f"PyTorch's allocator is {get_backend()!r}, not its own: remove backend:... "
                    "from $PYTORCH_ALLOC_CONF, and anything else that changes the allocator")
    if is_expandable(torch):
        raise Error(Code.FAILED_PRECONDITION, "expandable_segments is switched on, by a call of "
                    "torch.cuda.memory._set_allocator_settings(), as some libraries make it when they are imported: PyTorch "
                    "bypasses the broker with it. Call enable() first, or "
                    "torch.cuda.memory._set_allocator_settings(\"expandable_segments:False\") before it")


def _snapshot_settings(torch: Any) -> dict:
    """What PyTorch says of its settings; nothing where it cannot."""
    try:
        return dict(torch.cuda.memory._snapshot()["allocator_settings"])
    except Exception:  # versions that do not have it, or not yet
        return {}


def is_expandable(torch: Any) -> bool:
    """Now, by whatever way it was set."""
    return bool(_snapshot_settings(torch).get("expandable_segments", False))


class AllocatorSettings:
    """Watches how they are changed, from now on. `notices` are for status()."""

    def __init__(self, torch: Any, patches: Patches) -> None:
        self.notices: List[str] = []
        # PyTorch's allocator is locked while it asks for memory, unless this is set.
        self.releases_lock = False
        self._torch = torch
        self._setter: Optional[Callable[[str], Any]] = None
        for name in _SETTERS:
            setter = getattr(torch._C, name, None)
            if setter is not None:
                self._setter = setter
        before = _snapshot_settings(torch)
        text = str(before.get("PYTORCH_CUDA_ALLOC_CONF") or before.get("PYTORCH_ALLOC_CONF") or
                   next((os.environ[name] for name in _VARIABLES if os.environ.get(name)), ""))
        self._set(text)
        for name in _SETTERS:
            patches.around(torch._C, name, self._watched)
        self._before = text

    def stop(self) -> None:
        """As it was. The setters are restored already."""
        if self.releases_lock and self._setter is not None:
            self._setter(self._before)

    def _set(self, text: str) -> None:
        """The same settings, and that other threads may free while one asks for memory."""
        if self._setter is None:
            return
        kept = [part for part in text.split(",") if part.strip() and "release_lock_on_cudamalloc" not in part]
        try:
            self._setter(",".join([*kept, _RELEASE_LOCK]))
            self.releases_lock = True
        except Exception:  # PyTorch before 2.2 does not know it; what it knows stays as it was
            self._setter(text)

    def _watched(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def set_allocator_settings(text: str) -> None:
            if not isinstance(text, str):
                return original(text)
            if wants_expandable(text):
                notice = f"expandable_segments was asked for and is not used: {INSTEAD_OF_EXPANDABLE}"
                if notice not in self.notices:
                    self.notices.append(notice)
                warnings.warn(f"vrambroker.torch: {notice}", RuntimeWarning, stacklevel=3)
                text = _EXPANDABLE.sub("expandable_segments:False", text)
            self._before = text
            if self.releases_lock and "release_lock_on_cudamalloc" not in text:
                text = ",".join(part for part in (text, _RELEASE_LOCK) if part)
            return original(text)
        return set_allocator_settings
