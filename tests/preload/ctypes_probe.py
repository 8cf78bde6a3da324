# SPDX-License-Identifier: Apache-2.0
"""Allocates 2 MiB at a time until the driver refuses, like a Python program with ctypes.

Usage: ctypes_probe.py default|deepbind
"""
import ctypes
import os
import sys

mode = os.RTLD_NOW | (os.RTLD_DEEPBIND if sys.argv[1] == "deepbind" else 0)
cuda = ctypes.CDLL("libcuda.so.1", mode=mode)
context = ctypes.c_void_p()
assert cuda.cuInit(0) == 0
assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
assert cuda.cuCtxSetCurrent(context) == 0
address = ctypes.c_ulonglong()
count = 0
while (error := cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(2 << 20))) == 0:
    count += 1
print(count, error)
