# SPDX-License-Identifier: Apache-2.0
"""Errors raised by calls of the library, and the parts of a refusal's report."""
from __future__ import annotations

import enum
from typing import Any, Dict, NamedTuple, Optional, Tuple, Type


class Code(enum.IntEnum):
    """Kinds of errors: the gRPC status codes used by the library."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14


class Error(Exception):
    """A call failed. `code` says how a program may react, the text what to do. Memory held stays usable."""

    def __init__(self, code: int, message: str) -> None:
        try:
            self.code = Code(code)
        except ValueError:
            self.code = Code.UNKNOWN
        self.message = message
        super().__init__(f"{self.code.name}: {message}")

    def __reduce__(self) -> Tuple[Any, ...]:
        # Serves copying and pickling: `args` has only the text.
        return type(self), (self.code, self.message), self.__dict__


# ---- The lists of a report: client/JSON.md, "out of memory". Sizes are bytes. ----


class Holder(NamedTuple):
    """A session holding memory of the device."""

    client: str  # the session's name
    reserved_bytes: int
    allocated_bytes: int


class IdleHolder(NamedTuple):
    """Idle bytes of another session, unavailable to the request."""

    client: str  # the session's name
    idle_bytes: int
    why: str  # "WITHIN_GUARANTEE", "IN_PART_USED", "DID_NOT_ANSWER", "DISCONNECTED", "NOT_ASKED" or "KEPT"


class PinningBlock(NamedTuple):
    """A block in use that keeps its segment from going back."""

    address: int  # a label as in snapshots, not a pointer
    block_bytes: int
    held_seconds: int  # since the block was handed out
    scope: str  # scope of the allocation; "": none


class PinnedSegment(NamedTuple):
    """A segment of the session with holes between its blocks."""

    address: int  # a label as in snapshots, not a pointer
    segment_bytes: int
    hole_bytes: int
    largest_hole_bytes: int
    pinning_blocks: int  # number of blocks in use in the segment
    longest_held: Tuple[PinningBlock, ...]  # at most 3 of the blocks in use, longest held first


class ScopeUse(NamedTuple):
    """Memory held by a scope (memory_scope()), without the scopes nested inside."""

    scope: str  # name, or the end of a long name; "": memory in no scope
    allocated_bytes: int
    bytes_at_peak: int  # at the peak of the session's allocated bytes on the device
    blocks: int  # blocks in use
    pinned_hole_bytes: int  # holes of segments kept from going back by the scope's blocks


_LISTS: Dict[str, Type[Any]] = {"largest_holders": Holder, "idle_holders": IdleHolder, "pinned_segments": PinnedSegment,
                                "longest_held": PinningBlock, "scopes": ScopeUse}


def _typed(name: str, value: Any) -> Any:
    """Converts the field `name` of a report to Python's types."""
    kind = _LISTS.get(name)
    if kind is None:
        return value
    # A newer library may send more fields.
    return tuple(kind(**{field: _typed(field, item[field]) for field in kind._fields}) for item in value)


class OutOfMemoryError(Error, MemoryError):
    """A device has no memory for a request. Attributes are the fields of vrambroker_out_of_memory (vrambroker.h), and the
    rest of the report, as in `vramctl ooms --format=json` (client/JSON.md). Attributes ending in _bytes are in bytes; `cause`
    is "LIMIT", "CAPACITY", "FRAGMENTATION", "LARGER_THAN_DEVICE" or "UNKNOWN". The error can be copied and pickled.
    """

    cause: str
    device: int
    requested_bytes: int
    segment_bytes: int
    limit_bytes: int
    reserved_bytes: int
    allocated_bytes: int
    idle_bytes: int
    largest_free_block_bytes: int
    device_capacity_bytes: int
    device_available_bytes: int
    advice: str
    guarantee_bytes: int
    inactive_split_bytes: int
    device_kept_free_bytes: int
    device_idle_bytes: int
    device_quarantined_bytes: int
    idle_elsewhere_bytes: int
    waited_ms: int
    block_bytes: int
    room_bytes: int
    hole_bytes: int
    holes: int
    hole_segments: int
    explanation: str
    # Fields of the report alone. Defaults stay if the process had no memory left to keep the report.
    largest_holders: Tuple[Holder, ...] = ()  # at most 3 sessions with most reserved bytes on the device, largest first
    idle_holders: Tuple[IdleHolder, ...] = ()  # sessions with idle_elsewhere_bytes, at most 5, most bytes first
    pinned_segments: Tuple[PinnedSegment, ...] = ()  # at most 3 of hole_segments, most bytes of holes first
    scope: str = ""  # scope of the request; "": none
    scopes: Tuple[ScopeUse, ...] = ()  # at most 3, most held or pinned first; none without memory_scope()
    user_limit_bytes: int = 0  # limit of the user's sessions together; 0: no limit
    user_reserved_bytes: int = 0  # reserved by the user's sessions, or guaranteed to them; 0 without a user limit
    claim: str = ""  # the session's claim, sharing a limit; "": no claim
    claim_limit_bytes: int = 0  # limit of the claim's sessions together
    claim_reserved_bytes: int = 0  # reserved by the claim's sessions, or guaranteed to them
    refusal: int = 0  # the refusal's number, from 1 since the daemon started: `vramctl ooms --diagnose N`; 0: not on record

    def __init__(self, message: str, fields: Dict[str, Any], report: Optional[Dict[str, Any]] = None) -> None:
        """Takes the struct's `fields`, and the whole `report` read from JSON."""
        if report is not None:
            own = {name: _typed(name, report[name]) for name in OutOfMemoryError.__annotations__ if name in report}
            fields = {**own, "cause": fields["cause"]}  # the struct has a name for causes of a newer daemon
        advice = fields["advice"]
        super().__init__(Code.RESOURCE_EXHAUSTED, message if not advice or advice in message else f"{message}. {advice}")
        self.__dict__.update(fields)

    def __reduce__(self) -> Tuple[Any, ...]:
        return type(self), (self.message, {"advice": self.advice}), self.__dict__
