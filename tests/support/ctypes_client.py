#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Uses the C library from Python without a binding. Usage: ctypes_client.py LIBVRAMBROKER; daemon as in c_client.c."""
import ctypes
import json
import os
import sys

RESOURCE_EXHAUSTED, INVALID_ARGUMENT = 8, 3


def main():
    lib = ctypes.CDLL(os.path.abspath(sys.argv[1]))
    lib.vrambroker_last_error_message.restype = ctypes.c_char_p
    lib.vrambroker_version.restype = ctypes.c_char_p
    lib.vrambroker_torch_malloc.restype = ctypes.c_void_p
    lib.vrambroker_torch_malloc.argtypes = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
    lib.vrambroker_torch_free.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
    lib.vrambroker_malloc.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int, ctypes.POINTER(ctypes.c_void_p)]
    lib.vrambroker_free.argtypes = [ctypes.c_void_p, ctypes.c_void_p]

    def ok(code):
        assert code == 0, (code, lib.vrambroker_last_error_message())

    client = ctypes.c_void_p()
    ok(lib.vrambroker_connect(None, ctypes.byref(client)))
    pointer = ctypes.c_void_p()
    ok(lib.vrambroker_malloc(client, 5000, 0, ctypes.byref(pointer)))
    ctypes.memset(pointer, 7, 5000)
    assert ctypes.string_at(pointer, 5000) == b"\x07" * 5000
    text = ctypes.create_string_buffer(65536)
    ok(lib.vrambroker_memory_stats_json(client, 0, text, ctypes.c_size_t(len(text)), None))
    stats = json.loads(text.value)
    assert stats["allocated_bytes.all.current"] == 5120 and stats["requested_bytes.all.current"] == 5000, stats
    ok(lib.vrambroker_free(client, pointer))
    assert lib.vrambroker_free(client, pointer) == INVALID_ARGUMENT
    assert lib.vrambroker_malloc(client, 1 << 50, 0, ctypes.byref(pointer)) == RESOURCE_EXHAUSTED
    assert pointer.value is None and lib.vrambroker_last_error_message()
    ok(lib.vrambroker_disconnect(client))

    # Calls the functions like torch.cuda.memory.CUDAPluggableAllocator.
    block = lib.vrambroker_torch_malloc(20 << 20, 0, None)
    assert block, lib.vrambroker_last_error_message()
    ctypes.memset(block, 1, 20 << 20)
    lib.vrambroker_torch_free(block, 20 << 20, 0, None)
    assert lib.vrambroker_torch_malloc(2 << 20, 0, None)  # the process ends while this block is held
    print("ok", lib.vrambroker_version().decode())


if __name__ == "__main__":
    main()
