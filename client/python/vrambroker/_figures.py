# SPDX-License-Identifier: Apache-2.0
"""What a client can be asked: its devices, figures and recordings, with PyTorch's names."""
from __future__ import annotations

import ctypes
import json
import os
import sys
import tempfile
from typing import Any, ContextManager, Dict, List, NamedTuple, Optional, Tuple, Union

from . import _library
from ._errors import Code, Error

_MAX_ENTRIES = 1_000_000  # that the library keeps


class Device(NamedTuple):
    """One device of the daemon. Sizes are bytes."""

    ordinal: int
    total_bytes: int
    capacity_bytes: int  # what the daemon hands out of it
    # When this was asked: the session's, which an operator may change, or that of set_per_process_memory_fraction().
    limit_bytes: int
    kind: str  # "host" or "cuda"
    uuid: str
    name: str


class Figures:
    """What a client of the library can be asked; subclasses say which one. A `device` is an ordinal; None is the first."""

    _library: _library.Library

    def _using(self) -> ContextManager[ctypes.c_void_p]:
        raise NotImplementedError

    def _call(self, function: str, *arguments: Any) -> None:
        with self._using() as handle:
            self._library.check(getattr(self._library.lib, function)(handle, *arguments))

    def _text(self, function: str, *arguments: Any) -> bytes:
        """Of a function that fills a buffer, which may have grown out of the one that it asked for."""
        size = 8192
        while True:
            text = ctypes.create_string_buffer(size)
            needed = ctypes.c_size_t()
            try:
                self._call(function, *arguments, text, size, ctypes.byref(needed))
                return text.value
            except Error as error:
                if error.code != Code.OUT_OF_RANGE or needed.value <= size:
                    raise
                size = needed.value + needed.value // 8

    @property
    def name(self) -> str:
        """As the daemon made it unique among its sessions."""
        session = _library.Session()
        self._call("vrambroker_get_session", ctypes.byref(session))
        return session.name.decode()

    @property
    def devices(self) -> List[Device]:
        """The daemon's devices, by ordinal, with the limits as they are now."""
        count = ctypes.c_int()
        self._call("vrambroker_device_count", ctypes.byref(count))
        return [self.device(ordinal) for ordinal in range(count.value)]

    def device(self, ordinal: int) -> Device:
        """Error NOT_FOUND when there is no such device."""
        if ordinal is None:
            raise TypeError("ordinal: None is not an integer")
        info = _library.Device()
        self._call("vrambroker_get_device", _library.ordinal(ordinal), ctypes.byref(info))
        return Device(**info.fields())

    def status(self) -> None:
        """Returns while the session lives; else raises the Error that says why it does not."""
        self._call("vrambroker_status")

    def empty_cache(self) -> int:
        """Gives wholly free segments back to the daemon. Returns their bytes."""
        released = ctypes.c_uint64()
        self._call("vrambroker_empty_cache", ctypes.byref(released))
        return released.value

    def memory_info(self, device: Optional[int] = None) -> Tuple[int, int]:
        """(free, total) in bytes: what Device.limit_bytes leaves beyond what is allocated, and that limit."""
        free, total = ctypes.c_uint64(), ctypes.c_uint64()
        self._call("vrambroker_memory_info", _library.ordinal(device), ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def memory_stats(self, device: Optional[int] = None) -> Dict[str, int]:
        """All keys of torch.cuda.memory_stats(), with its meanings: {"allocated_bytes.all.current": 5120, ...}."""
        return json.loads(self._text("vrambroker_memory_stats_json", _library.ordinal(device)))

    def memory_summary(self, device: Optional[int] = None, abbreviated: bool = False) -> str:
        """The table of torch.cuda.memory_summary(), which `vramctl summary` prints, too. `abbreviated`: without its rows by
        pool. It ends in a newline."""
        return self._text("vrambroker_memory_summary", _library.ordinal(device), int(bool(abbreviated))).decode()

    def memory_allocated(self, device: Optional[int] = None) -> int:
        """Bytes in blocks handed out, rounded as the allocator does: "allocated_bytes.all.current" of memory_stats()."""
        return self._main_stats(device).allocated_bytes

    def max_memory_allocated(self, device: Optional[int] = None) -> int:
        """The most of memory_allocated(), in bytes, since the client began or reset_peak_memory_stats()."""
        return self._main_stats(device).allocated_bytes_peak

    def memory_reserved(self, device: Optional[int] = None) -> int:
        """Bytes in segments held, in use or not: what counts against the limit."""
        return self._main_stats(device).reserved_bytes

    def max_memory_reserved(self, device: Optional[int] = None) -> int:
        """The most of memory_reserved(), in bytes, since the client began or reset_peak_memory_stats()."""
        return self._main_stats(device).reserved_bytes_peak

    def _main_stats(self, device: Optional[int]) -> _library.MemoryStats:
        stats = _library.MemoryStats()
        self._call("vrambroker_get_memory_stats", _library.ordinal(device), ctypes.byref(stats))
        return stats

    def set_per_process_memory_fraction(self, fraction: float, device: Optional[int] = None) -> None:
        """As torch.cuda.set_per_process_memory_fraction(), of this client: from now on it reserves at most this fraction
        (a float from 0.0 to 1.0) of the device's capacity, and never more than the session's limit; 1.0 ends that. What is
        held beyond it stays. A request that does not fit is an OutOfMemoryError with the cause LIMIT, whose limit_bytes
        is this one; the daemon does not hear of it. Any thread may call it. TypeError and ValueError for what is no such
        fraction; Error FAILED_PRECONDITION of a remote session, which the daemon alone bounds."""
        if not isinstance(fraction, float):
            raise TypeError(f"fraction: {fraction!r} is not a float, such as 0.5")
        if not 0.0 <= fraction <= 1.0:
            raise ValueError(f"fraction: {fraction!r} is not between 0.0 and 1.0")
        self._call("vrambroker_set_memory_fraction", fraction, _library.ordinal(device))

    def reset_peak_memory_stats(self, device: Optional[int] = None) -> None:
        """Peaks begin again at what is now."""
        self._call("vrambroker_reset_peak_memory_stats", _library.ordinal(device))

    def reset_memory_stats(self, device: Optional[int] = None) -> None:
        """The same, and the totals begin again at 0."""
        self._call("vrambroker_reset_memory_stats", _library.ordinal(device))

    def reset_accumulated_memory_stats(self, device: Optional[int] = None) -> None:
        """The totals ("allocated", "freed", "num_...") begin again at 0, the peaks stay. Error FAILED_PRECONDITION of a
        remote session, which has reset_memory_stats()."""
        self._call("vrambroker_reset_accumulated_memory_stats", _library.ordinal(device))

    # ---- Recordings ----

    def record_memory_history(self, enabled: Union[str, bool, None] = "all", context: Optional[str] = "all",
                              stacks: str = "all", max_entries: int = sys.maxsize, device: Any = None,
                              clear_history: bool = False, compile_context: bool = False,
                              global_record_annotations: bool = False,
                              skip_actions: Optional[List[str]] = None) -> None:
        """As torch.cuda.memory._record_memory_history(): from now on each device keeps its last `max_entries` events for
        dump_snapshot(), 1000000 at most, beside those that it has kept so far.

        enabled  "all" or True: that; None or False: ends it; "state": the same, since snapshots always have the state

        Other than PyTorch: ended, the session keeps again what the daemon's configuration has every session record
        (record_events), not necessarily nothing. It is never cleared: clear_history=True is a ValueError. There are no
        tracebacks, and all devices record all actions: `context` (None, "state", "alloc" or "all"), `stacks` ("python" or
        "all"), `device`, `compile_context`, `global_record_annotations` and `skip_actions` have no effect.

        Any thread may call it. TypeError and ValueError for wrong arguments; Error RESOURCE_EXHAUSTED when the remote
        sessions of this user record as many events as the daemon allows."""
        if enabled is not None and not isinstance(enabled, (str, bool)):
            raise TypeError(f"enabled: {enabled!r} is neither None, \"state\" nor \"all\"")
        if isinstance(enabled, str) and enabled not in ("state", "all"):
            raise ValueError(f"enabled: {enabled!r} is neither None, \"state\" nor \"all\"")
        # What PyTorch refuses must not pass here, or it is found out only when the program runs there.
        if context not in (None, "state", "alloc", "all"):
            raise ValueError(f"context: {context!r} is neither None, \"state\", \"alloc\" nor \"all\"")
        if stacks not in ("python", "all"):
            raise ValueError(f"stacks: {stacks!r} is neither \"python\" nor \"all\"")
        if isinstance(max_entries, bool) or not isinstance(max_entries, int):
            raise TypeError(f"max_entries: {max_entries!r} is not an integer")
        if max_entries < 1:
            raise ValueError(f"max_entries: {max_entries!r} is below 1; enabled=None ends the recording")
        if clear_history:
            raise ValueError("clear_history: the events so far cannot be cleared; the oldest make room beyond max_entries")
        records = enabled is True or enabled == "all"
        self._call("vrambroker_set_recording", min(max_entries, _MAX_ENTRIES) if records else 0)

    def dump_snapshot(self, filename: Union[str, bytes, "os.PathLike[Any]"] = "dump_snapshot.pickle") -> None:
        """As torch.cuda.memory._dump_snapshot(): writes all devices' segments, blocks and recorded events as a file for
        pytorch.org/memory_viz and `vramctl replay`. Other than PyTorch, a name that ends in ".json" makes it JSON, and
        the file is whole at any time: an Error names it, and leaves what was there. A leasing session can do it after the
        daemon has gone, too. Any thread may call it."""
        path = os.fsencode(filename)
        if b"\0" in path:
            raise ValueError(f"filename: {filename!r} has a null byte")
        self._call("vrambroker_dump_snapshot", path)

    def snapshot(self, device: Any = None) -> Dict[str, Any]:
        """As torch.cuda.memory._snapshot(): what dump_snapshot() writes, of all devices whatever `device` is. Addresses
        are labels, as in `vramctl map`, and no pointers."""
        # By a file, since the text may have hundreds of megabytes.
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "snapshot.json")
            self.dump_snapshot(path)
            with open(path, encoding="utf-8") as file:
                found: Dict[str, Any] = json.load(file)
        _tuples(found["segments"])
        return found

    def memory_snapshot(self) -> List[Dict[str, Any]]:
        """As torch.cuda.memory_snapshot(): the segments of all devices with their blocks, by address. Sizes are bytes,
        addresses labels, as in `vramctl map`, and no pointers."""
        return _tuples(json.loads(self._text("vrambroker_snapshot_json", 0))["segments"])

    _record_memory_history = record_memory_history
    _dump_snapshot = dump_snapshot
    _snapshot = snapshot


def _tuples(segments: List[Dict[str, Any]]) -> List[Dict[str, Any]]:
    """With what JSON has no form for as PyTorch has it."""
    for segment in segments:
        segment["segment_pool_id"] = tuple(segment["segment_pool_id"])
    return segments
