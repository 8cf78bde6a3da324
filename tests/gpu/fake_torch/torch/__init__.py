# SPDX-License-Identifier: Apache-2.0
"""Stands in for PyTorch on machines without PyTorch: the functions that unmodified_program.py uses, over the driver
alone.

The stand-in has no cache: a tensor is an allocation of the driver, by the way that PYTORCH_CUDA_ALLOC_CONF names. CUDA
graphs and NCCL are missing.
"""
import ctypes
import os
import types

__version__ = "0.0-fake"
version = types.SimpleNamespace(cuda="13.0")
uint8 = "uint8"

_driver = ctypes.CDLL("libcuda.so.1")
_conf = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
_GRANULE = 2 << 20


class OutOfMemoryError(RuntimeError):
    pass


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _Properties(ctypes.Structure):  # CUmemAllocationProp
    _fields_ = [("type", ctypes.c_int), ("handle_types", ctypes.c_int), ("location", _Location),
                ("metadata", ctypes.c_void_p), ("flags", ctypes.c_ubyte * 8)]


class _Access(ctypes.Structure):  # CUmemAccessDesc
    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


def _call(name, *arguments):
    error = getattr(_driver, name)(*arguments)
    if error == 2:
        raise OutOfMemoryError("CUDA out of memory: %s" % name)
    if error != 0:
        raise RuntimeError("%s failed: %d" % (name, error))


def _context():
    if not _context.made:
        context = ctypes.c_void_p()
        _call("cuInit", 0)
        _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        _call("cuCtxSetCurrent", context)
        _context.made = True


_context.made = False


class _Mapped:
    """Memory by handle, like expandable segments."""

    def __init__(self, size):
        self.size = -(-size // _GRANULE) * _GRANULE
        place = _Location(1, 0)
        handle = ctypes.c_ulonglong()
        _call("cuMemCreate", ctypes.byref(handle), ctypes.c_size_t(self.size), ctypes.byref(_Properties(1, 0, place)),
              ctypes.c_ulonglong(0))
        self.address = ctypes.c_ulonglong()
        _call("cuMemAddressReserve", ctypes.byref(self.address), ctypes.c_size_t(self.size), ctypes.c_size_t(0),
              ctypes.c_ulonglong(0), ctypes.c_ulonglong(0))
        _call("cuMemMap", self.address, ctypes.c_size_t(self.size), ctypes.c_size_t(0), handle, ctypes.c_ulonglong(0))
        _call("cuMemRelease", handle)
        _call("cuMemSetAccess", self.address, ctypes.c_size_t(self.size), ctypes.byref(_Access(place, 3)), ctypes.c_size_t(1))

    def free(self):
        _call("cuMemUnmap", self.address, ctypes.c_size_t(self.size))
        _call("cuMemAddressFree", self.address, ctypes.c_size_t(self.size))


class _Pooled:
    """Memory of the device's pool, in stream order."""

    def __init__(self, size):
        self.address = ctypes.c_ulonglong()
        _call("cuMemAllocAsync", ctypes.byref(self.address), ctypes.c_size_t(size), None)

    def free(self):
        _call("cuMemFreeAsync", self.address, None)


class _Linear:
    def __init__(self, size):
        self.address = ctypes.c_ulonglong()
        _call("cuMemAlloc_v2", ctypes.byref(self.address), ctypes.c_size_t(size))

    def free(self):
        _call("cuMemFree_v2", self.address)


class _Tensor:
    def __init__(self, size):
        _context()
        kind = _Pooled if "cudaMallocAsync" in _conf else _Mapped if "expandable_segments" in _conf else _Linear
        self._memory = None
        self._memory = kind(size)

    def __del__(self):
        if self._memory is not None:
            self._memory.free()


def empty(size, dtype, device):
    if dtype != uint8 or device != "cuda:0":
        raise NotImplementedError("only bytes, only on the first GPU")
    return _Tensor(size)


def _device_count():
    count = ctypes.c_int()
    return count.value if _driver.cuInit(0) == 0 and _driver.cuDeviceGetCount(ctypes.byref(count)) == 0 else 0


def _mem_get_info():
    _context()
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    _call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    return free.value, total.value


def _get_device_properties(device):
    _context()
    total = ctypes.c_size_t()
    _call("cuDeviceTotalMem_v2", ctypes.byref(total), device)
    return types.SimpleNamespace(name="fake", total_memory=total.value)


def _empty_cache():
    _context()
    _call("cuCtxSynchronize")


cuda = types.SimpleNamespace(
    OutOfMemoryError=OutOfMemoryError, is_available=lambda: _device_count() > 0, device_count=lambda: min(_device_count(), 1),
    mem_get_info=_mem_get_info, get_device_properties=_get_device_properties, empty_cache=_empty_cache)


def ones(*_, **__):
    raise NotImplementedError("the stand-in computes nothing")
