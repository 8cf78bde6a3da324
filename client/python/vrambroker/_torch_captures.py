# SPDX-License-Identifier: Apache-2.0
"""Captures of CUDA graphs, and pools in use. PyTorch keeps both in a single list (captures_underway in
c10/cuda/CUDACachingAllocator.cpp of 2.6 to 2.11)."""
from __future__ import annotations

import functools
import threading
import weakref
from typing import Any, Callable, Dict, List, Tuple

from ._torch_patches import Patches

_POOL_BEGINS = ("_cuda_beginAllocateToPool", "_cuda_beginAllocateCurrentStreamToPool",
                "_cuda_beginAllocateCurrentThreadToPool")
_NO_POOL = (0, 0)
_POOL_ENDS = ("_cuda_endAllocateToPool", "_cuda_endAllocateCurrentStreamToPool")


class Captures:
    """Keeps the emptying of PyTorch's cache and captures of graphs apart: freeing memory on any thread can make a capture
    invalid. Also tells the library while PyTorch calls cudaMalloc() only once for a request. Thread-safe."""

    def __init__(self, torch: Any, lib: Any, patches: Patches) -> None:
        self._lib = lib
        self._changed = threading.Condition()
        self._torch = torch
        self._graphs: "weakref.WeakSet[Any]" = weakref.WeakSet()  # captures under way
        self._captured: "weakref.WeakSet[Any]" = weakref.WeakSet()  # captured graphs, keeping the pool of their memory
        self._changes = 0  # ends of captures, and resets
        # (_changes, number of captured graphs), and the bytes then, by PyTorch's ordinal.
        self._kept_idle: Tuple[Tuple[int, int], Dict[int, int]] = ((0, 0), {})
        self._pools: List[Tuple[Any, ...]] = []  # in use
        self._broken = 0  # captures whose end failed: PyTorch considers them under way forever (seen in 2.6)
        self._counted = 0  # count known to the library
        self._emptying = False
        graph = getattr(torch.cuda, "CUDAGraph", None)
        if graph is not None:
            patches.around(graph, "capture_begin", self._begins_graph)
            patches.around(graph, "capture_end", functools.partial(self._ends_graph, keeps_pool=True))
            patches.around(graph, "reset", functools.partial(self._ends_graph, keeps_pool=False))
        for owner in (torch._C, torch.cuda.memory):
            for name in _POOL_BEGINS:
                patches.around(owner, name, self._begins_pool)
            for name in _POOL_ENDS:
                patches.around(owner, name, self._ends_pool)

    def begin_emptying(self) -> bool:
        """Returns False if a graph is being captured. Otherwise no capture begins before end_emptying()."""
        with self._changed:
            self._count()
            if self._graphs or self._emptying:
                return False
            self._emptying = True
            return True

    def end_emptying(self) -> None:
        with self._changed:
            self._emptying = False
            self._changed.notify_all()

    def why_not(self) -> str:
        """Returns a likely reason for PyTorch's refusal to empty its cache."""
        with self._changed:
            if self._broken:
                return "a capture of a CUDA graph has failed, and PyTorch does not empty its cache after that"
            if self._pools:
                return "a torch.cuda.MemPool is in use, and this version of PyTorch does not empty its cache meanwhile"
            return ""

    def kept_idle(self, cuda: int, emptied_pools: Tuple[Any, ...]) -> int:
        """Returns the bytes of segments without a tensor in pools of live graphs, as of the last capture; `emptied_pools` do
        not count."""
        with self._changed:
            known = (self._changes, len(self._captured))
            if known[1] == 0:
                return 0
            if known == self._kept_idle[0] or self._graphs:
                return self._kept_idle[1].get(cuda, 0)
        kept: Dict[int, int] = {}
        for segment in self._torch.cuda.memory_snapshot():
            pool = tuple(segment.get("segment_pool_id", _NO_POOL))
            if pool != _NO_POOL and pool not in emptied_pools and segment["active_size"] == 0:
                kept[segment["device"]] = kept.get(segment["device"], 0) + int(segment["total_size"])
        with self._changed:
            self._kept_idle = known, kept
        return kept.get(cuda, 0)

    def stop(self) -> None:
        """Makes the library forget all captures and pools."""
        with self._changed:
            self._graphs.clear()
            self._pools.clear()
            self._broken = 0
            self._count()

    def _count(self) -> None:
        present = len(self._graphs) + len(self._pools) + self._broken
        if present != self._counted:
            self._lib.vrambroker_torch_count_captures(present - self._counted)
            self._counted = present

    def _begins_graph(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def capture_begin(graph: Any, *arguments: Any, **keywords: Any) -> Any:
            with self._changed:
                while self._emptying:
                    self._changed.wait()
                self._graphs.add(graph)
                self._count()
            try:
                return original(graph, *arguments, **keywords)
            except BaseException:
                self._forget(graph)
                raise
        return capture_begin

    def _ends_graph(self, original: Callable[..., Any], keeps_pool: bool) -> Callable[..., Any]:
        @functools.wraps(original)
        def capture_end(graph: Any, *arguments: Any, **keywords: Any) -> Any:
            try:
                result = original(graph, *arguments, **keywords)
            except BaseException:
                self._forget(graph, broken=True)
                raise
            self._forget(graph)
            with self._changed:
                self._changes += 1
                if keeps_pool:
                    self._captured.add(graph)
                else:
                    self._captured.discard(graph)
            return result
        return capture_end

    def _forget(self, graph: Any, broken: bool = False) -> None:
        with self._changed:
            self._broken += broken and graph in self._graphs
            self._graphs.discard(graph)
            self._count()

    def _begins_pool(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def begin(*arguments: Any) -> Any:
            result = original(*arguments)
            with self._changed:
                self._pools.append(arguments[:2])  # device and id
                self._count()
            return result
        return begin

    def _ends_pool(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def end(*arguments: Any) -> Any:
            result = original(*arguments)
            with self._changed:
                if arguments[:2] in self._pools:
                    self._pools.remove(arguments[:2])
                self._count()
            return result
        return end
