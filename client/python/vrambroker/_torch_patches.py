# SPDX-License-Identifier: Apache-2.0
"""Functions of PyTorch replaced while vrambroker.torch is enabled."""
from __future__ import annotations

import types
from typing import Any, Callable, Dict, List, Tuple


class Patches:
    """Replaced attributes of PyTorch, with their old values."""

    def __init__(self) -> None:
        self._replaced: List[Tuple[Any, str, bool, Any, bool]] = []

    def set(self, owner: Any, name: str, value: Any, answered: bool = True) -> None:
        """Replaces an attribute. `answered`: callers get another answer than PyTorch's."""
        own = vars(owner)
        self._replaced.append((owner, name, name in own, own.get(name), answered))
        setattr(owner, name, value)

    def function(self, torch: Any, name: str, value: Callable[..., Any]) -> None:
        """Replaces torch.cuda.memory.NAME and its alias torch.cuda.NAME, where PyTorch has them."""
        for owner in (torch.cuda.memory, torch.cuda):
            if hasattr(owner, name):
                self.set(owner, name, value)

    def around(self, owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replaces OWNER.NAME by the result of `make` on the original. Does nothing without OWNER.NAME."""
        original = getattr(owner, name, None)
        if original is not None:
            self.set(owner, name, make(original), answered=False)

    def names(self) -> List[str]:
        """Returns the functions answered by this package."""
        found: Dict[str, None] = {}
        for owner, name, _, _, answered in self._replaced:
            if isinstance(owner, types.ModuleType) and answered:
                found[name] = None
        return sorted(found)

    def restore(self) -> None:
        while self._replaced:
            owner, name, had, value, _ = self._replaced.pop()
            if had:
                setattr(owner, name, value)
            else:
                delattr(owner, name)
