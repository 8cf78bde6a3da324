# SPDX-License-Identifier: Apache-2.0
"""What calls of the library raise, and what the report of a refusal consists of."""
from __future__ import annotations

import enum
from typing import Any, Dict, NamedTuple, Optional, Tuple, Type


class Code(enum.IntEnum):
    """What went wrong: those of gRPC's status codes that the library uses."""

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
    """A call failed. `code` says how a program may react, the text what to do. What is held stays usable."""

    def __init__(self, code: int, message: str) -> None:
        try:
            self.code = Code(code)
        except ValueError:
            self.code = Code.UNKNOWN
        self.message = message
        super().__init__(f"{self.code.name}: {message}")

    def __reduce__(self) -> Tuple[Any, ...]:
        # For copies, and what another process gets of it: `args` has the text alone.
        return type(self), (self.code, self.message), self.__dict__


# ---- The lists of a report: client/JSON.md, "out of memory". Sizes are bytes. ----


class Holder(NamedTuple):
    """A session that holds memory of the device."""

    client: str  # its name
    reserved_bytes: int
    allocated_bytes: int


class IdleHolder(NamedTuple):
    """Idle bytes of another session that were not to be had."""

    client: str  # its name
    idle_bytes: int
    why: str  # "WITHIN_GUARANTEE", "IN_PART_USED", "DID_NOT_ANSWER", "DISCONNECTED", "NOT_ASKED" or "KEPT"


class PinningBlock(NamedTuple):
    """A block in use that keeps its segment from being given back."""

    address: int  # a label, as in snapshots; no pointer
    block_bytes: int
    held_seconds: int  # since it was handed out
    scope: str  # in which it was allocated; "": none


class PinnedSegment(NamedTuple):
    """A segment of the session with holes between its blocks."""

    address: int  # a label, as in snapshots; no pointer
    segment_bytes: int
    hole_bytes: int
    largest_hole_bytes: int
    pinning_blocks: int  # how many blocks are in use in it
    longest_held: Tuple[PinningBlock, ...]  # of these, at most 3, the one held for longest first


class ScopeUse(NamedTuple):
    """What a scope holds (memory_scope()), without the scopes within it."""

    scope: str  # its name, or the end of a long one; "": what is in none
    allocated_bytes: int
    bytes_at_peak: int  # when the session's allocated bytes on the device were at their peak
    blocks: int  # in use
    pinned_hole_bytes: int  # holes of the segments that its blocks keep from being given back


_LISTS: Dict[str, Type[Any]] = {"largest_holders": Holder, "idle_holders": IdleHolder, "pinned_segments": PinnedSegment,
                                "longest_held": PinningBlock, "scopes": ScopeUse}


def _typed(name: str, value: Any) -> Any:
    """The field `name` of a report as Python has it."""
    kind = _LISTS.get(name)
    if kind is None:
        return value
    # A newer library may say more.
    return tuple(kind(**{field: _typed(field, item[field]) for field in kind._fields}) for item in value)


class OutOfMemoryError(Error, MemoryError):
    """A device has no memory for a request. Its attributes are the fields of vrambroker_out_of_memory (vrambroker.h), and
    the rest of the report, as `vramctl ooms --format=json` has it (client/JSON.md). In bytes where they end in _bytes;
    `cause` is "LIMIT", "CAPACITY", "FRAGMENTATION", "LARGER_THAN_DEVICE" or "UNKNOWN". It can be copied and pickled.
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
    # Of the report alone. So they stay where the process had no memory left to keep it.
    largest_holders: Tuple[Holder, ...] = ()  # sessions that have reserved most on the device, at most 3, largest first
    idle_holders: Tuple[IdleHolder, ...] = ()  # who has idle_elsewhere_bytes, at most 5, most bytes first
    pinned_segments: Tuple[PinnedSegment, ...] = ()  # at most 3 of hole_segments, the one with most bytes of holes first
    scope: str = ""  # of the request; "": none
    scopes: Tuple[ScopeUse, ...] = ()  # at most 3, those that hold or pin most first; none without memory_scope()
    user_limit_bytes: int = 0  # what the user's sessions may have together; 0: no such limit
    user_reserved_bytes: int = 0  # what they have, or what is guaranteed to them; 0 without such a limit
    claim: str = ""  # the session's, whose limit it shares; "": it is in none
    claim_limit_bytes: int = 0  # what the claim's sessions may have together
    claim_reserved_bytes: int = 0  # what they have, or what is guaranteed to them
    refusal: int = 0  # its number, from 1 since the daemon started: `vramctl ooms --diagnose N`; 0: it is not on record

    def __init__(self, message: str, fields: Dict[str, Any], report: Optional[Dict[str, Any]] = None) -> None:
        """`fields` of the struct, and the whole `report` as it was read from JSON."""
        if report is not None:
            own = {name: _typed(name, report[name]) for name in OutOfMemoryError.__annotations__ if name in report}
            fields = {**own, "cause": fields["cause"]}  # which has a name for causes of a newer daemon
        advice = fields["advice"]
        super().__init__(Code.RESOURCE_EXHAUSTED, message if not advice or advice in message else f"{message}. {advice}")
        self.__dict__.update(fields)

    def __reduce__(self) -> Tuple[Any, ...]:
        return type(self), (self.message, {"advice": self.advice}), self.__dict__
