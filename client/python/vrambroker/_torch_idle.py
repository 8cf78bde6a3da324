# SPDX-License-Identifier: Apache-2.0
"""A thread that gives back reclaimable memory of PyTorch's cache at the daemon's request, and reports PyTorch's use of its
memory."""
from __future__ import annotations

import atexit
import ctypes
import threading
import warnings
from typing import Any, Dict, NamedTuple, Optional

from . import _library
from ._errors import Code, Error
from ._library import format_size

# Maximum age of PyTorch's figures. Including the way to the daemon, the age stays under a second.
PERIOD_MS = 450
_END_PATIENCE = 2.0  # seconds


class GivenBack(NamedTuple):
    """Results of the daemon's requests for reclaimable memory, since enable()."""

    on: bool  # enable(give_back_idle=...)
    asked: int
    given_bytes: int
    refused: int  # requests without an emptying of PyTorch's cache
    why: str  # reason of the last refusal
    idle_bytes: int  # reclaimable by PyTorch at the last look

    def __str__(self) -> str:
        if not self.on:
            return "gives nothing back when others need memory (give_back_idle=False)"
        text = (f"gives memory back: {format_size(self.idle_bytes)} reclaimable; asked {self.asked} times, gave "
                f"{format_size(self.given_bytes)}")
        return f"{text}; refused {self.refused} times, the last time because of this: {self.why}" if self.refused else text


class _Use(NamedTuple):
    """Use of a device in bytes, by PyTorch's statistics."""

    reserved: int
    active: int
    allocated: int
    requested: int
    inactive_split: int
    allocated_peak: int
    kept: int  # in segments without a tensor, of pools not emptied with the cache

    @property
    def reclaimable(self) -> int:
        return max(0, self.reserved - self.active - self.inactive_split - self.kept)


class IdleGiver:
    """Runs from start() to stop(). `route`: the torch._Route owning the memory."""

    def __init__(self, route: Any, gives_back: bool) -> None:
        self._route = route
        self._lib = route.library.lib
        self._handle = route.client._handle
        self._gives_back = gives_back
        self._thread: Optional[threading.Thread] = None
        self._stopping = threading.Event()
        self._lock = threading.Lock()  # guards the figures of status()
        self._asked = self._given = self._refused = 0
        self._why = ""
        self._reported: Dict[int, _Use] = {}
        # By PyTorch's ordinal: bytes reserved before enable() and still held; bytes that bypassed the broker afterwards.
        self._outside: Dict[int, int] = {}
        self._suspected: Dict[int, int] = {}
        self._bypass: Dict[int, int] = {}
        self._warned = False

    # ---- For the other threads ----

    def start(self) -> None:
        if self._route.torch.cuda.is_initialized():
            for cuda in self._route.devices:
                before = self._stats(cuda).reserved_bytes
                reserved = self._use(cuda).reserved
                # Other threads allocate and free: the next looks correct an excess.
                self._outside[cuda] = max(0, reserved - min(before, self._stats(cuda).reserved_bytes))
        if self._gives_back:
            self._route.library.check(self._lib.vrambroker_serve_trims(self._handle, 1))
        self._thread = threading.Thread(target=self._run, name="vrambroker-idle", daemon=True)
        self._thread.start()
        atexit.register(self.stop)  # no thread of this package outlives the interpreter

    def stop(self) -> None:
        atexit.unregister(self.stop)
        self._stopping.set()
        self._lib.vrambroker_serve_trims(self._handle, 0)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_END_PATIENCE)
        try:
            for cuda in self._route.devices:
                self._report(cuda, None)
        except Error:  # in a child made by fork()
            pass

    def given_back(self) -> GivenBack:
        with self._lock:
            return GivenBack(self._gives_back, self._asked, self._given, self._refused, self._why,
                             sum(use.reclaimable for use in self._reported.values()))

    def outside_bytes(self) -> int:
        """Returns the bytes reserved from CUDA before enable()."""
        with self._lock:
            return sum(self._outside.values())

    def bypass_bytes(self) -> int:
        """Looks now, and returns the bytes reserved by PyTorch since enable() without the broker."""
        for _ in range(2):
            self._look()
        with self._lock:
            return sum(self._bypass.values())

    # ---- The thread ----

    def _run(self) -> None:
        trim = _library.Trim()
        while not self._stopping.is_set():
            if not self._gives_back:
                self._stopping.wait(PERIOD_MS / 1000)
                code = int(Code.DEADLINE_EXCEEDED)
            else:
                code = self._lib.vrambroker_wait_for_trim(self._handle, PERIOD_MS, ctypes.byref(trim))
            if self._stopping.is_set() or code not in (Code.OK, Code.DEADLINE_EXCEEDED):
                return
            try:
                if code == Code.OK:
                    self._answer(trim)
                else:
                    self._look()
            except Exception as error:  # the next look may succeed
                self._note(f"{type(error).__name__}: {error}", refused=False)

    def _answer(self, trim: _library.Trim) -> None:
        before = self._leased()
        why = ""
        try:
            why = self._empty()
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
        finally:
            given = max(0, before - self._leased())
            with self._lock:
                self._asked += 1
                self._given += given
            if why:
                self._note(why, refused=True)
            try:
                self._look()
            finally:
                self._lib.vrambroker_end_trim(self._handle, trim.number)

    def _note(self, why: str, refused: bool) -> None:
        with self._lock:
            self._refused += refused
            self._why = why

    def _empty(self) -> str:
        """Empties PyTorch's cache. Returns "", or the reason for not emptying."""
        if not self._route.torch.cuda.is_initialized():
            return ""
        if self._is_locked():
            return "a request of this process waits for memory, and this version of PyTorch locks its allocator meanwhile"
        if not self._route.captures.begin_emptying():
            return "a CUDA graph is being captured"
        try:
            self._route.release_idle()
            return ""
        except RuntimeError:
            why = self._route.captures.why_not()
            if not why:
                raise
            return why
        finally:
            self._route.captures.end_emptying()

    def _is_locked(self) -> bool:
        """Returns whether PyTorch's allocator may be locked until the daemon answers. A call into a locked allocator would
        wait, holding the GIL."""
        return not self._route.settings.releases_lock and self._lib.vrambroker_torch_calls_under_way() > 0

    def _leased(self) -> int:
        return sum(self._stats(cuda).reserved_bytes for cuda in self._route.devices)

    def _stats(self, cuda: int) -> _library.MemoryStats:
        stats = _library.MemoryStats()
        self._route.library.check(self._lib.vrambroker_get_memory_stats(
            self._handle, self._route.devices[cuda].ordinal, ctypes.byref(stats)))
        return stats

    def _look(self) -> None:
        if not self._route.torch.cuda.is_initialized() or self._is_locked():
            return
        for cuda in self._route.devices:
            before = self._stats(cuda).reserved_bytes
            use = self._use(cuda)
            leased = max(before, self._stats(cuda).reserved_bytes)
            self._compare(cuda, use.reserved - leased)
            with self._lock:
                new = self._reported.get(cuda) != use
                self._reported[cuda] = use
            if new:
                self._report(cuda, use)

    def _use(self, cuda: int) -> _Use:
        stats = self._route.torch.cuda.memory_stats_as_nested_dict(cuda)

        def figure(name: str, which: str = "current") -> int:
            return int(stats.get(name, {}).get("all", {}).get(which, 0))
        return _Use(figure("reserved_bytes"), figure("active_bytes"), figure("allocated_bytes"), figure("requested_bytes"),
                    figure("inactive_split_bytes"), figure("allocated_bytes", "peak"), self._route.kept_idle(cuda))

    def _report(self, cuda: int, use: Optional[_Use]) -> None:
        """Reports a device's use to the daemon. `use` None: all memory counts as in use."""
        stats = self._stats(cuda)
        figures = _library.SegmentUse()
        if use is None:
            figures.allocated_bytes = figures.requested_bytes = stats.reserved_bytes
        else:
            figures.allocated_bytes, figures.requested_bytes = use.allocated, use.requested
            figures.allocated_bytes_peak = use.allocated_peak
            figures.inactive_split_bytes = use.inactive_split + use.kept  # no trim returns these two
            if self._gives_back:
                figures.idle_bytes = use.reclaimable
            else:
                figures.inactive_split_bytes += use.reclaimable  # no session can get these bytes
        self._lib.vrambroker_report_segment_use(self._handle, self._route.devices[cuda].ordinal, ctypes.byref(figures))

    def _compare(self, cuda: int, elsewhere: int) -> None:
        """Notes `elsewhere`: bytes reserved by PyTorch and not from the broker. A request under way may distort a single
        look, but not two looks in a row."""
        elsewhere = max(0, elsewhere)
        with self._lock:
            outside = self._outside.get(cuda, 0)
            suspected = self._suspected.get(cuda, outside)
            self._suspected[cuda] = elsewhere
            self._outside[cuda] = min(outside, max(elsewhere, suspected))
            seen = min(elsewhere, suspected)
            self._bypass[cuda] = max(0, seen - self._outside[cuda])
            warn = self._bypass[cuda] > 0 and not self._warned
            self._warned = self._warned or warn
            size = self._bypass[cuda]
        if warn:
            warnings.warn(f"vrambroker.torch: {format_size(size)} that PyTorch has on CUDA device {cuda} did not come from the "
                          f"broker and are outside of the session's limit: {self._route.bypass_reason()}", RuntimeWarning,
                          stacklevel=1)

