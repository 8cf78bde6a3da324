# SPDX-License-Identifier: Apache-2.0
"""libvrambroker.so.1 for Python: its place and its structs. vrambroker.h describes the structs."""
from __future__ import annotations

import ctypes
import json
import os
import threading
from typing import Any, Callable, Dict, Iterable, List, Optional, Union

from ._errors import Code, Error, OutOfMemoryError

ABI_VERSION = 1
LIBRARY_NAME = "libvrambroker.so.1"
LIBRARY_VARIABLE = "VRAMBROKER_LIBRARY"
_REPORT_BYTES = 8192  # expected maximum of a refusal's report

# ---- Structs ----


class _Struct(ctypes.Structure):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.struct_size = ctypes.sizeof(self)

    def fields(self) -> Dict[str, Any]:
        """Returns all fields but struct_size, texts as str."""
        values = {name: getattr(self, name) for name, _ in self._fields_[1:]}
        return {name: value.decode(errors="replace") if isinstance(value, bytes) else value
                for name, value in values.items()}


class OutOfMemory(_Struct):
    _fields_ = [("struct_size", ctypes.c_size_t), ("cause", ctypes.c_int), ("device", ctypes.c_int)] + [
        (name, ctypes.c_uint64) for name in (
            "requested_bytes", "segment_bytes", "limit_bytes", "reserved_bytes", "allocated_bytes", "idle_bytes",
            "largest_free_block_bytes", "device_capacity_bytes", "device_available_bytes")] + [
        ("advice", ctypes.c_char * 512)] + [
        (name, ctypes.c_uint64) for name in (
            "guarantee_bytes", "inactive_split_bytes", "device_kept_free_bytes", "device_idle_bytes",
            "device_quarantined_bytes", "idle_elsewhere_bytes", "waited_ms", "block_bytes", "room_bytes", "hole_bytes",
            "holes", "hole_segments")] + [("explanation", ctypes.c_char * 1024)]


LOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p)
LOG_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_char_p)


class Options(_Struct):
    _fields_ = [("struct_size", ctypes.c_size_t), ("abi_version", ctypes.c_uint32), ("placement", ctypes.c_uint32),
                ("socket_dir", ctypes.c_char_p), ("name", ctypes.c_char_p), ("limit", ctypes.c_char_p),
                ("alloc_conf", ctypes.c_char_p), ("idle_decay_ms", ctypes.c_int64),
                ("connect_timeout_ms", ctypes.c_int64), ("call_timeout_ms", ctypes.c_int64),
                ("on_lost", LOST_FUNCTION), ("log", LOG_FUNCTION), ("context", ctypes.c_void_p),
                ("guarantee", ctypes.c_char_p), ("wait_ms", ctypes.c_int64), ("devices", ctypes.c_char_p)]


class Session(_Struct):
    _fields_ = [("struct_size", ctypes.c_size_t), ("session_id", ctypes.c_uint64), ("calls", ctypes.c_uint64),
                ("name", ctypes.c_char * 128)]


class Device(_Struct):
    _fields_ = [("struct_size", ctypes.c_size_t), ("ordinal", ctypes.c_int), ("total_bytes", ctypes.c_uint64),
                ("capacity_bytes", ctypes.c_uint64), ("limit_bytes", ctypes.c_uint64), ("kind", ctypes.c_char * 16),
                ("uuid", ctypes.c_char * 64), ("name", ctypes.c_char * 128)]


class MemoryStats(_Struct):
    _fields_ = [("struct_size", ctypes.c_size_t)] + [
        (name, ctypes.c_uint64) for name in (
            "allocated_bytes", "allocated_bytes_peak", "reserved_bytes", "reserved_bytes_peak", "active_bytes",
            "active_bytes_peak", "requested_bytes", "requested_bytes_peak", "inactive_split_bytes", "allocations",
            "segments", "num_alloc_retries", "num_ooms", "num_device_alloc", "num_device_free")]


class SegmentUse(_Struct):
    _fields_ = [("struct_size", ctypes.c_size_t)] + [
        (name, ctypes.c_uint64) for name in ("allocated_bytes", "requested_bytes", "inactive_split_bytes", "idle_bytes",
                                             "allocated_bytes_peak")]


class Trim(_Struct):
    _fields_ = [("struct_size", ctypes.c_size_t), ("number", ctypes.c_uint64), ("bytes", ctypes.c_uint64),
                ("time_ms", ctypes.c_int64), ("device", ctypes.c_int)]


class TorchRefusalOrigin(_Struct):
    _fields_ = [("struct_size", ctypes.c_size_t), ("thread", ctypes.c_uint64), ("age_ms", ctypes.c_int64),
                ("served_since", ctypes.c_int)]


class TorchRefusal(_Struct):
    _fields_ = [("struct_size", ctypes.c_size_t), ("number", ctypes.c_uint64), ("requested_bytes", ctypes.c_uint64),
                ("device", ctypes.c_int), ("code", ctypes.c_int), ("message", ctypes.c_char * 2048),
                ("out_of_memory", OutOfMemory)]


def _declare(lib: ctypes.CDLL) -> None:
    pointer, out = ctypes.c_void_p, ctypes.POINTER
    u64, size, integer, text = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_int, ctypes.c_char_p
    for name, result, arguments in (
            ("vrambroker_last_error_code", integer, []),
            ("vrambroker_last_error_message", text, []),
            ("vrambroker_last_out_of_memory", integer, [out(OutOfMemory)]),
            ("vrambroker_last_out_of_memory_json", integer, [text, size, out(size)]),
            ("vrambroker_cause_name", text, [integer]),
            ("vrambroker_abi_version", integer, []),
            ("vrambroker_version", text, []),
            ("vrambroker_parse_bytes", integer, [text, out(u64)]),
            ("vrambroker_parse_duration", integer, [text, out(ctypes.c_int64)]),
            ("vrambroker_connect", integer, [out(Options), out(pointer)]),
            ("vrambroker_disconnect", integer, [pointer]),
            ("vrambroker_begin_disconnect", integer, [pointer]),
            ("vrambroker_status", integer, [pointer]),
            ("vrambroker_get_session", integer, [pointer, out(Session)]),
            ("vrambroker_warning", text, [pointer, size]),
            ("vrambroker_device_count", integer, [pointer, out(integer)]),
            ("vrambroker_get_device", integer, [pointer, integer, out(Device)]),
            ("vrambroker_malloc_until", integer, [pointer, u64, integer, pointer, out(integer), out(pointer)]),
            ("vrambroker_free", integer, [pointer, pointer]),
            ("vrambroker_free_stream", integer, [pointer, pointer, pointer]),
            ("vrambroker_record_stream", integer, [pointer, pointer, pointer]),
            ("vrambroker_lease_segment_until", integer, [pointer, u64, integer, out(integer), out(pointer)]),
            ("vrambroker_return_segment", integer, [pointer, pointer]),
            ("vrambroker_return_segment_stream", integer, [pointer, pointer, pointer]),
            ("vrambroker_report_segment_use", integer, [pointer, integer, out(SegmentUse)]),
            ("vrambroker_serve_trims", integer, [pointer, integer]),
            ("vrambroker_wait_for_trim", integer, [pointer, ctypes.c_int64, out(Trim)]),
            ("vrambroker_end_trim", integer, [pointer, u64]),
            ("vrambroker_write", integer, [pointer, pointer, u64, pointer, u64]),
            ("vrambroker_read", integer, [pointer, pointer, u64, pointer, u64]),
            ("vrambroker_empty_cache", integer, [pointer, out(u64)]),
            ("vrambroker_memory_info", integer, [pointer, integer, out(u64), out(u64)]),
            ("vrambroker_get_memory_stats", integer, [pointer, integer, out(MemoryStats)]),
            ("vrambroker_memory_stats_json", integer, [pointer, integer, text, size, out(size)]),
            ("vrambroker_reset_peak_memory_stats", integer, [pointer, integer]),
            ("vrambroker_reset_memory_stats", integer, [pointer, integer]),
            ("vrambroker_reset_accumulated_memory_stats", integer, [pointer, integer]),
            ("vrambroker_memory_summary", integer, [pointer, integer, integer, text, size, out(size)]),
            ("vrambroker_set_memory_fraction", integer, [pointer, ctypes.c_double, integer]),
            ("vrambroker_set_recording", integer, [pointer, u64]),
            ("vrambroker_dump_snapshot", integer, [pointer, text]),
            ("vrambroker_snapshot_json", integer, [pointer, integer, text, size, out(size)]),
            ("vrambroker_scope_begin", ctypes.c_uint32, [text, text, integer]),
            ("vrambroker_scope_end", None, [ctypes.c_uint32]),
            ("vrambroker_torch_connect", integer, [out(Options)]),
            ("vrambroker_torch_client", integer, [out(pointer)]),
            ("vrambroker_torch_device", integer, [integer, out(integer)]),
            ("vrambroker_torch_serve", integer, [text]),
            ("vrambroker_torch_unserve", None, []),
            ("vrambroker_torch_count_captures", None, [integer]),
            ("vrambroker_torch_calls_under_way", integer, []),
            ("vrambroker_torch_empty_cache", None, []),
            ("vrambroker_torch_set_cap", integer, [integer, u64]),
            ("vrambroker_torch_last_refusal", integer, [size, out(TorchRefusal)]),
            ("vrambroker_torch_get_refusal_origin", integer, [u64, out(TorchRefusalOrigin)]),
            ("vrambroker_torch_out_of_memory_json", integer, [u64, text, size, out(size)]),
    ):
        function = getattr(lib, name)
        function.restype = result
        function.argtypes = arguments


# ---- Loading ----

_loaded: Optional["Library"] = None
_loading = threading.RLock()  # a signal handler may load inside an interrupted load of the same thread


def _after_fork_in_child() -> None:
    global _loading
    _loading = threading.RLock()  # another thread of the parent may have held the lock


os.register_at_fork(after_in_child=_after_fork_in_child)


class Library:
    """The loaded library. `path` is the requested file."""

    def __init__(self, lib: ctypes.CDLL, path: str) -> None:
        self.lib = lib
        self.path = path

    @property
    def version(self) -> str:
        return self.lib.vrambroker_version().decode()

    def last_error(self) -> Error:
        """Returns the last error of the calling thread."""
        code = self.lib.vrambroker_last_error_code()
        message = self.lib.vrambroker_last_error_message().decode(errors="replace")
        oom = OutOfMemory()
        if self.lib.vrambroker_last_out_of_memory(ctypes.byref(oom)) == 0:
            return self._out_of_memory(message, oom, self.lib.vrambroker_last_out_of_memory_json)
        return Error(code, message)

    def refusal_error(self, refusal: TorchRefusal) -> Error:
        """Returns the error of a refused request of PyTorch."""
        message = refusal.message.decode(errors="replace")
        if refusal.out_of_memory.struct_size == 0:  # refused for a reason other than memory
            return Error(refusal.code, message)
        return self._out_of_memory(message, refusal.out_of_memory, self.lib.vrambroker_torch_out_of_memory_json,
                                   refusal.number)

    def _out_of_memory(self, message: str, oom: OutOfMemory, report: "Callable[..., int]",
                       *arguments: Any) -> OutOfMemoryError:
        fields = oom.fields()
        fields["cause"] = self.lib.vrambroker_cause_name(oom.cause).decode()
        size = _REPORT_BYTES
        while True:
            text = ctypes.create_string_buffer(size)
            needed = ctypes.c_size_t()
            code = report(*arguments, text, size, ctypes.byref(needed))
            if code == Code.OK:
                return OutOfMemoryError(message, fields, json.loads(text.value))
            if code != Code.OUT_OF_RANGE or needed.value <= size:  # no report, or pushed out by later refusals
                return OutOfMemoryError(message, fields)
            size = needed.value

    def check(self, code: int) -> None:
        if code != 0:
            raise self.last_error()

    def size(self, name: str, text: str) -> int:
        """Returns the bytes of a text such as "24MiB"."""
        value = ctypes.c_uint64()
        return self._amount(name, self.lib.vrambroker_parse_bytes, text, value)

    def milliseconds(self, name: str, text: str) -> int:
        """Returns the milliseconds of a text such as "10m"."""
        value = ctypes.c_int64()
        return self._amount(name, self.lib.vrambroker_parse_duration, text, value)

    def _amount(self, name: str, parse: "Callable[..., int]", text: str, value: Any) -> int:
        if parse(text.encode(errors="replace"), ctypes.byref(value)) != Code.OK:
            raise ValueError(f"{name}: {self.last_error().message}")
        return int(value.value)


def _candidates(path: Optional[str]) -> List[str]:
    if path is not None:
        return [os.fspath(path)]
    if os.environ.get(LIBRARY_VARIABLE):
        return [os.environ[LIBRARY_VARIABLE]]
    package = os.path.dirname(os.path.abspath(__file__))
    beside_the_root = os.path.join(os.path.dirname(os.path.dirname(package)), "lib")
    return [os.path.join(package, LIBRARY_NAME), os.path.join(beside_the_root, LIBRARY_NAME), LIBRARY_NAME]


def load(path: Union[str, "os.PathLike[str]", None] = None) -> Library:
    """Loads the library: from `path`; else from $VRAMBROKER_LIBRARY; else from beside this package, from `lib` beside the
    folder of this package, or from the system loader's folders. A process loads a single library: `path` must be the same
    each time. Raises Error (NOT_FOUND), listing the places searched."""
    global _loaded
    with _loading:
        asked = os.fspath(path) if path is not None else None
        if _loaded is not None:
            if asked is not None and os.path.realpath(asked) != os.path.realpath(_loaded.path):
                raise Error(Code.FAILED_PRECONDITION,
                            f"library: {asked}: this process has already loaded {_loaded.path} and can use only one")
            return _loaded
        looked = []
        for candidate in _candidates(asked):
            if os.sep in candidate and not os.path.exists(candidate):
                looked.append(f"{candidate}: no such file")
                continue
            try:
                lib = ctypes.CDLL(candidate)
                found = int(lib.vrambroker_abi_version())
            except (OSError, AttributeError) as error:
                looked.append(f"{candidate}: {error}")
                continue
            if found != ABI_VERSION:
                looked.append(f"{candidate}: ABI version {found}, but this package needs {ABI_VERSION}")
                continue
            try:
                _declare(lib)
            except AttributeError as error:
                looked.append(f"{candidate}: older than this package ({error})")
                continue
            if _loaded is None:
                _loaded = Library(lib, candidate)
            return _loaded
        raise Error(
            Code.NOT_FOUND,
            f"{LIBRARY_NAME} cannot be loaded. Looked for: {'; '.join(looked)}. Name it with the argument library= or in "
            f"${LIBRARY_VARIABLE}, or install vrambroker's C library (libvrambroker-core.so belongs beside it)")


def size_text(name: str, value: Union[int, float, str, None]) -> Optional[bytes]:
    """Converts a limit or guarantee for the library: an int is bytes, a float a fraction of each device's capacity."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise TypeError(f"{name}: {value!r} is neither bytes (int), a fraction (float) nor a text such as \"8GiB\"")
    if isinstance(value, float):
        if not 0.0 < value <= 1.0:
            raise ValueError(f"{name}: {value!r}: a fraction must be above 0 and at most 1.0; for bytes, pass an int")
        return format(value, ".12f").rstrip("0").ljust(3, "0").encode()
    if isinstance(value, int) and value <= 0:
        raise ValueError(f"{name}: {value!r}: must be more than 0 bytes")
    return str(value).encode()


def devices_text(value: Union[int, str, Iterable[Union[int, str]], None]) -> Optional[bytes]:
    """Converts devices for the library: ordinals and UUIDs, separated by commas."""
    if value is None:
        return None
    devices = [value] if isinstance(value, (int, str)) else list(value)
    for device in devices:
        if isinstance(device, bool) or not isinstance(device, (int, str)):
            raise TypeError(f"devices: {device!r} is neither an ordinal (int) nor a UUID (str)")
    return ",".join(str(device) for device in devices).encode()


def format_size(size: int) -> str:
    """Formats sizes like PyTorch's out-of-memory errors (format_size() in c10/cuda/CUDACachingAllocator.cpp)."""
    if size <= 1 << 10:
        return f"{size} bytes"
    for unit, name in ((1 << 10, "KiB"), (1 << 20, "MiB"), (1 << 30, "GiB")):
        if size <= unit << 10 or name == "GiB":
            return f"{size / unit:.2f} {name}"
    raise AssertionError


def milliseconds(name: str, seconds: Union[float, str, None], library: Union[str, "os.PathLike[str]", None]) -> int:
    if seconds is None:
        return 0
    if isinstance(seconds, str):
        return load(library).milliseconds(name, seconds)
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
        raise TypeError(f"{name}: {seconds!r} is neither a number of seconds nor a text such as \"10m\"")
    if not 0.0 <= seconds < 1e12:
        raise ValueError(f"{name}: {seconds!r}: must be a finite number of seconds, 0 or more")
    return max(1, round(seconds * 1000)) if seconds > 0 else 0


def ordinal(value: Optional[int]) -> int:
    """Converts a device's ordinal for C. None, as in PyTorch, is the default device: here the first device."""
    if value is None:
        return 0
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"device: {value!r} is not an integer")
    if not -1 << 31 <= value < 1 << 31:
        raise Error(Code.NOT_FOUND, f"no device {value}")
    return value


def stream_number(value: Any) -> int:
    """Returns a cudaStream_t, from an integer, a PyTorch stream, or an object with CUDA's stream protocol."""
    found = value
    if hasattr(value, "cuda_stream"):  # torch.cuda.Stream
        found = value.cuda_stream
    elif hasattr(value, "__cuda_stream__"):  # () -> (version, stream)
        found = value.__cuda_stream__()[1]
    if isinstance(found, bool) or not isinstance(found, int):
        raise TypeError(f"stream: {value!r} is neither a cudaStream_t (int) nor a stream object, such as torch.cuda.Stream")
    if not 0 <= found < 1 << 64:
        raise ValueError(f"stream: {found!r} is not a cudaStream_t: it must be within [0, 2**64)")
    return found
