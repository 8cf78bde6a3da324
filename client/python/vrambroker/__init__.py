# SPDX-License-Identifier: Apache-2.0
"""Memory from vrambrokerd, for Python.

    import vrambroker
    with vrambroker.Client(limit=0.4) as client:
        buffer = client.malloc(24 << 20)
        buffer.write(b"hello")

PyTorch gets all its GPU memory from the daemon after `vrambroker.torch.enable(limit=0.4)`.
"""
import importlib
from typing import Any

from ._client import Buffer, Client
from ._errors import Code, Error, Holder, IdleHolder, OutOfMemoryError, PinnedSegment, PinningBlock, ScopeUse
from ._figures import Device
from ._library import load
from ._scopes import memory_scope

__version__ = "0.1.0"

__all__ = ["Buffer", "Client", "Code", "Device", "Error", "Holder", "IdleHolder", "OutOfMemoryError", "PinnedSegment",
           "PinningBlock", "ScopeUse", "load", "memory_scope"]


def __getattr__(name: str) -> Any:
    if name == "torch":  # imported on first use
        return importlib.import_module(".torch", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
