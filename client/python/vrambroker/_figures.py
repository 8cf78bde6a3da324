# SPDX-License-Identifier: Apache-2.0
"""Queries of a client: devices, figures and recordings, under PyTorch's names."""
from __future__ import annotations

import ctypes
import json
import os
import sys
import tempfile
from typing import Any, ContextManager, Dict, List, NamedTuple, Optional, Tuple, Union

from . import _library
from ._errors import Code, Error

_MAX_ENTRIES = 1_000_000  # kept by the library at most


class Device(NamedTuple):
    """A device of the daemon. Sizes are bytes."""

    ordinal: int
    total_bytes: int
    capacity_bytes: int  # handed out by the daemon at most
    # At the time of the query: the session's limit, changeable by an operator, or set_per_process_memory_fraction()'s.
    limit_bytes: int
    kind: str  # "host" or "cuda"
    uuid: str
    name: str


class Figures:
    """Queries of a client of the library; subclasses provide the client. A `device` is an ordinal; None is the first."""

    _library: _library.Library

    def _using(self) -> ContextManager[ctypes.c_void_p]:
        raise NotImplementedError

    def _call(self, function: str, *arguments: Any) -> None:
        with self._using() as handle:
            self._library.check(getattr(self._library.lib, function)(handle, *arguments))

    def _text(self, function: str, *arguments: Any) -> bytes:
        """Calls a function that fills a buffer. The text may outgrow the buffer size reported before."""
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
        """The session's name, made unique by the daemon."""
        session = _library.Session()
        self._call("vrambroker_get_session", ctypes.byref(session))
        return session.name.decode()

    @property
    def devices(self) -> List[Device]:
        """The daemon's devices, by ordinal, with their present limits."""
        count = ctypes.c_int()
        self._call("vrambroker_device_count", ctypes.byref(count))
        return [self.device(ordinal) for ordinal in range(count.value)]

    def device(self, ordinal: int) -> Device:
        """Returns a device. Raises Error NOT_FOUND for an unknown ordinal."""
        if ordinal is None:
            raise TypeError("ordinal: None is not an integer")
        info = _library.Device()
        self._call("vrambroker_get_device", _library.ordinal(ordinal), ctypes.byref(info))
        return Device(**info.fields())

    def status(self) -> None:
        """Returns while the session lives; else raises an Error with the reason of its end."""
        self._call("vrambroker_status")

    def empty_cache(self) -> int:
        """Gives wholly free segments back to the daemon. Returns their bytes."""
        released = ctypes.c_uint64()
        self._call("vrambroker_empty_cache", ctypes.byref(released))
        return released.value

    def memory_info(self, device: Optional[int] = None) -> Tuple[int, int]:
        """Returns (free, total) in bytes: Device.limit_bytes minus the allocated bytes, and Device.limit_bytes."""
        free, total = ctypes.c_uint64(), ctypes.c_uint64()
        self._call("vrambroker_memory_info", _library.ordinal(device), ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def memory_stats(self, device: Optional[int] = None) -> Dict[str, int]:
        """All keys of torch.cuda.memory_stats(), with PyTorch's meanings: {"allocated_bytes.all.current": 5120, ...}."""
        return json.loads(self._text("vrambroker_memory_stats_json", _library.ordinal(device)))

    def memory_summary(self, device: Optional[int] = None, abbreviated: bool = False) -> str:
        """Returns the table of torch.cuda.memory_summary(), as printed by `vramctl summary`. `abbreviated`: without the rows
        by pool. The table ends in a newline."""
        return self._text("vrambroker_memory_summary", _library.ordinal(device), int(bool(abbreviated))).decode()

    def memory_allocated(self, device: Optional[int] = None) -> int:
        """Bytes in blocks handed out, as rounded by the allocator: "allocated_bytes.all.current" of memory_stats()."""
        return self._main_stats(device).allocated_bytes

    def max_memory_allocated(self, device: Optional[int] = None) -> int:
        """Peak of memory_allocated(), in bytes, since the client began or reset_peak_memory_stats()."""
        return self._main_stats(device).allocated_bytes_peak

    def memory_reserved(self, device: Optional[int] = None) -> int:
        """Bytes in segments held, in use or not. Reserved bytes count against the limit."""
        return self._main_stats(device).reserved_bytes

    def max_memory_reserved(self, device: Optional[int] = None) -> int:
        """Peak of memory_reserved(), in bytes, since the client began or reset_peak_memory_stats()."""
        return self._main_stats(device).reserved_bytes_peak

    def _main_stats(self, device: Optional[int]) -> _library.MemoryStats:
        stats = _library.MemoryStats()
        self._call("vrambroker_get_memory_stats", _library.ordinal(device), ctypes.byref(stats))
        return stats

    def set_per_process_memory_fraction(self, fraction: float, device: Optional[int] = None) -> None:
        """Like torch.cuda.set_per_process_memory_fraction(), for this client: from now on the client reserves at most this
        fraction (a float from 0.0 to 1.0) of the device's capacity, and never more than the session's limit; 1.0 ends the
        restriction. Memory held beyond the fraction stays. A request exceeding the fraction raises OutOfMemoryError with the
        cause LIMIT and the reduced limit in limit_bytes; the daemon does not hear of the request. Any thread may call the
        function. Raises TypeError and ValueError for an invalid fraction, and Error FAILED_PRECONDITION in a remote session,
        bounded by the daemon alone."""
        if not isinstance(fraction, float):
            raise TypeError(f"fraction: {fraction!r} is not a float, such as 0.5")
        if not 0.0 <= fraction <= 1.0:
            raise ValueError(f"fraction: {fraction!r} is not between 0.0 and 1.0")
        self._call("vrambroker_set_memory_fraction", fraction, _library.ordinal(device))

    def reset_peak_memory_stats(self, device: Optional[int] = None) -> None:
        """Restarts the peaks at the present figures."""
        self._call("vrambroker_reset_peak_memory_stats", _library.ordinal(device))

    def reset_memory_stats(self, device: Optional[int] = None) -> None:
        """Restarts the peaks at the present figures, and the totals at 0."""
        self._call("vrambroker_reset_memory_stats", _library.ordinal(device))

    def reset_accumulated_memory_stats(self, device: Optional[int] = None) -> None:
        """Restarts the totals ("allocated", "freed", "num_...") at 0; the peaks stay. Raises Error FAILED_PRECONDITION in a
        remote session: use reset_memory_stats() there."""
        self._call("vrambroker_reset_accumulated_memory_stats", _library.ordinal(device))

    # ---- Recordings ----

    def record_memory_history(self, enabled: Union[str, bool, None] = "all", context: Optional[str] = "all",
                              stacks: str = "all", max_entries: int = sys.maxsize, device: Any = None,
                              clear_history: bool = False, compile_context: bool = False,
                              global_record_annotations: bool = False,
                              skip_actions: Optional[List[str]] = None) -> None:
        """Like torch.cuda.memory._record_memory_history(): from now on each device keeps its last `max_entries` events for
        dump_snapshot(), 1000000 at most, beside the events kept so far.

        enabled  "all" or True: records; None or False: ends the recording; "state": ends the recording, too, since snapshots
                 always have the state

        Differences from PyTorch: after the end, the session still keeps the events that the daemon's configuration has every
        session record (record_events). The history is never cleared: clear_history=True is a ValueError. There are no
        tracebacks, and all devices record all actions: `context` (None, "state", "alloc" or "all"), `stacks` ("python" or
        "all"), `device`, `compile_context`, `global_record_annotations` and `skip_actions` have no effect.

        Any thread may call the function. Raises TypeError and ValueError for wrong arguments, and Error RESOURCE_EXHAUSTED
        when the remote sessions of this user record as many events as the daemon allows."""
        if enabled is not None and not isinstance(enabled, (str, bool)):
            raise TypeError(f"enabled: {enabled!r} is neither None, \"state\" nor \"all\"")
        if isinstance(enabled, str) and enabled not in ("state", "all"):
            raise ValueError(f"enabled: {enabled!r} is neither None, \"state\" nor \"all\"")
        # Arguments refused by PyTorch must not pass here, or the mistake shows only when the program runs on PyTorch.
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
        """Like torch.cuda.memory._dump_snapshot(): writes all devices' segments, blocks and recorded events as a file for
        pytorch.org/memory_viz and `vramctl replay`. Unlike with PyTorch, a name ending in ".json" writes JSON, and the file
        is whole at any time: an Error names the file, and leaves its earlier contents. A leasing session can write snapshots
        even after the daemon has gone. Any thread may call the function."""
        path = os.fsencode(filename)
        if b"\0" in path:
            raise ValueError(f"filename: {filename!r} has a null byte")
        self._call("vrambroker_dump_snapshot", path)

    def snapshot(self, device: Any = None) -> Dict[str, Any]:
        """Like torch.cuda.memory._snapshot(): returns the contents of dump_snapshot(), always for all devices. Addresses are
        labels, as in `vramctl map`, not pointers."""
        # Uses a file, since the text may have hundreds of megabytes.
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "snapshot.json")
            self.dump_snapshot(path)
            with open(path, encoding="utf-8") as file:
                found: Dict[str, Any] = json.load(file)
        _tuples(found["segments"])
        return found

    def memory_snapshot(self) -> List[Dict[str, Any]]:
        """Like torch.cuda.memory_snapshot(): returns the segments of all devices with their blocks, by address. Sizes are
        bytes; addresses are labels, as in `vramctl map`, not pointers."""
        return _tuples(json.loads(self._text("vrambroker_snapshot_json", 0))["segments"])

    _record_memory_history = record_memory_history
    _dump_snapshot = dump_snapshot
    _snapshot = snapshot


def _tuples(segments: List[Dict[str, Any]]) -> List[Dict[str, Any]]:
    """Restores PyTorch's tuples, which JSON cannot express."""
    for segment in segments:
        segment["segment_pool_id"] = tuple(segment["segment_pool_id"])
    return segments
