#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""vrambroker.torch over standins for PyTorch (standin_torch.py) and a real daemon on the host device. Only
tests/gpu/torch_training.py shows that real PyTorch behaves like its standins."""
import os
import shutil
import subprocess
import tempfile
import textwrap
import unittest

import support

# `standins` names a folder of CMakeLists.txt. The daemon here has host memory, which enable() refuses.
PRELUDE = """
import copy, ctypes, gc, json, threading, warnings
import standin_torch
import vrambroker
vrambroker.torch  # loaded by its name
def start(standins="bound", gpu=True, **options):
    if gpu:
        vrambroker.torch._require_gpu = lambda devices: None
    return standin_torch.install(%r + "/" + standins, **options)
def refused(call, kind=vrambroker.Error):
    try:
        call()
    except kind as error:
        return error
    raise AssertionError("not refused")
def daemon():
    client = vrambroker.torch._active.client
    return client.memory_stats()["reserved_bytes.all.current"]
MiB = 1 << 20
""" % support.STANDINS


class TorchTest(support.DaemonTest):
    def run_torch(self, code, **environment):
        return self.run_with_daemon(PRELUDE + textwrap.dedent(code), **environment)

    def check_segments(self, standins):
        self.run_torch("""
            torch = start(%r)
            native = torch.native
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of what is there before
                before = native.alloc(2 * MiB)
                status = vrambroker.torch.enable(limit=64 << 20, name="train")
            assert status.mode == "segments" and not status.reason, status
            assert status.session == "train" and status.devices[0].limit_bytes == 64 << 20, status
            assert status.answered == ("mem_get_info",), status
            assert "cuda:0 is device 0" in str(status) and "mode segments" in str(status), str(status)
            first = native.alloc(20 * MiB)
            second = []
            thread = threading.Thread(target=lambda: second.append(native.alloc(4 * MiB)))
            thread.start(); thread.join()
            assert daemon() == 24 * MiB, daemon()  # all threads; what was there before is not the daemon's
            ctypes.memset(first, 1, 20 * MiB)
            assert torch.cuda.mem_get_info() == (40 * MiB, 64 * MiB) == torch.cuda.memory.mem_get_info("cuda:0")
            assert native.mem_get_info() == (64 * MiB, 40 * MiB)  # what PyTorch's errors say
            torch.cuda.set_per_process_memory_fraction(48 / 8192)  # of 8 GiB
            assert torch.cuda.mem_get_info(0) == (24 * MiB, 48 * MiB)
            torch.cuda.set_per_process_memory_fraction(1.0)
            assert torch.cuda.memory_reserved() == 26 * MiB  # PyTorch's own
            native.free(first)
            assert daemon() == 24 * MiB  # cached
            torch.cuda.empty_cache()
            assert daemon() == 4 * MiB
            native.free(before)
            torch.cuda.empty_cache()
            runtime = ctypes.CDLL(%r + "/libcudart.so")
            assert runtime.standin_frees() == 1  # it went back to where it came from
            assert runtime.standin_devices_set() == 0  # nobody's device has changed
            # Cached memory is flushed before a request is refused.
            for size in (20, 20, 18):
                native.free(native.alloc(size * MiB))
            native.free(native.alloc(40 * MiB))
            vrambroker.torch.disable()
            assert not vrambroker.torch.status().mode and "not enabled" in str(vrambroker.torch.status())
            assert torch.cuda.mem_get_info is not None and torch.cuda.mem_get_info() == native.mem_get_info() == (8 << 30, 4 << 30)
            outside = native.alloc(20 * MiB)
            client = vrambroker.torch._TorchClient(vrambroker.load())
            assert client.memory_stats()["reserved_bytes.all.current"] == 4 * MiB
            native.free(second[0])
            torch.cuda.empty_cache()
            assert client.memory_stats()["reserved_bytes.all.current"] == 0
            # Once more, with the same options only.
            error = refused(lambda: vrambroker.torch.enable(limit=0.1))
            assert error.code == vrambroker.Code.FAILED_PRECONDITION and "until the process ends" in str(error), error
            vrambroker.torch.enable(limit=64 << 20, name="train")
            native.alloc(6 * MiB)
            assert daemon() == 6 * MiB
        """ % (standins, os.path.join(support.STANDINS, standins)))

    def test_segments(self):
        self.check_segments("bound")

    def test_segments_of_a_library_bound_at_the_first_call(self):
        self.check_segments("lazy")

    def test_out_of_memory_says_why(self):
        self.run_torch("""
            torch = start()
            vrambroker.torch.enable(limit=64 << 20, name="limited")
            held = torch.native.alloc(40 * MiB)
            error = refused(lambda: torch.native.alloc(30 * MiB), torch.cuda.OutOfMemoryError)
            text = str(error)
            assert text.startswith("CUDA out of memory. Tried to allocate 30.00 MiB."), text
            assert "total capacity of 67108864 of which 25165824 is free" in text, text
            assert "vrambroker: out of memory (limit) on device 0" in text and "reserved 40.00 MiB" in text, text
            assert "Raise the session's limit (vramctl limit)" in text, text
            assert isinstance(error, RuntimeError)
            why = error.vrambroker_error
            assert type(why) is vrambroker.OutOfMemoryError and why.message == error.vrambroker, vars(error)
            assert (why.cause, why.requested_bytes, why.limit_bytes) == ("LIMIT", 30 * MiB, 64 * MiB), vars(why)
            assert why.largest_holders == (vrambroker.Holder("limited", 40 * MiB, 40 * MiB),), why.largest_holders
            copied = copy.copy(error)
            assert vars(copied.vrambroker_error) == vars(why) and str(copied) == text, vars(copied)
            # Refused on another thread, as in autograd's, and made an exception here.
            texts = []
            def backward(size):
                try:
                    torch.native.alloc(size)
                except torch.cuda.OutOfMemoryError as caught:
                    texts.append(caught.args[0])
            for size in (50 * MiB, 28 * MiB):
                thread = threading.Thread(target=backward, args=(size,)); thread.start(); thread.join()
            assert "requested; it needs a segment of 50.00 MiB," in str(torch.cuda.OutOfMemoryError(texts[0]))
            assert "it needs a segment of 28.00 MiB," in str(torch.cuda.OutOfMemoryError(texts[1]))
            assert torch.cuda.OutOfMemoryError(texts[1]).vrambroker_error.segment_bytes == 28 * MiB
            assert len(torch.cuda.OutOfMemoryError(texts[0]).vrambroker_error.largest_holders) == 1
            # Not one of ours: nothing is made up.
            torch.cuda.set_per_process_memory_fraction(50 / 8192)
            own = refused(lambda: torch.native.alloc(24 * MiB), torch.cuda.OutOfMemoryError)
            assert "vrambroker: out of memory" not in str(own) and own.vrambroker_error is None, own
            torch.cuda.set_per_process_memory_fraction(1.0)
            # A refusal is the reason of its own error, and of no later one with the same size.
            def why_of(size, fraction=1.0):
                torch.cuda.set_per_process_memory_fraction(fraction)
                error = refused(lambda: torch.native.alloc(size * MiB), torch.cuda.OutOfMemoryError)
                torch.cuda.set_per_process_memory_fraction(1.0)
                return error.vrambroker_error
            assert why_of(32).segment_bytes == 32 * MiB
            assert why_of(32, 50 / 8192) is None, "of PyTorch's own limit"
            torch.native.free(held)
            torch.cuda.empty_cache()
            lib = vrambroker.load().lib
            lib.vrambroker_torch_malloc.restype = ctypes.c_void_p
            lib.vrambroker_torch_malloc.argtypes = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
            lib.vrambroker_torch_free.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
            part = lib.vrambroker_torch_malloc(40 * MiB, 0, None)
            assert lib.vrambroker_torch_malloc(34 * MiB, 0, None) is None  # C++ keeps such an error to itself, and asks again
            lib.vrambroker_torch_free(part, 40 * MiB, 0, None)
            lib.vrambroker_torch_free(lib.vrambroker_torch_malloc(34 * MiB, 0, None), 34 * MiB, 0, None)
            assert why_of(34, 20 / 8192) is None, "it was served in the end"
            # Two threads that ask for as much have a refusal each.
            held = torch.native.alloc(40 * MiB)
            errors, both = [], threading.Barrier(2)
            def ask():
                try:
                    torch.native.alloc(44 * MiB)
                except torch.cuda.OutOfMemoryError as error:
                    errors.append(error.vrambroker_error)
                both.wait()
            threads = [threading.Thread(target=ask) for _ in range(2)]
            [thread.start() for thread in threads]
            [thread.join() for thread in threads]
            assert all(error.segment_bytes == 44 * MiB for error in errors) and len(errors) == 2, errors
            assert str(torch.cuda.OutOfMemoryError()) == "" and str(torch.cuda.OutOfMemoryError(5)) == "5"
            assert torch.native.alloc(20 * MiB) and held  # and it goes on
            vrambroker.torch.disable()
            assert "__str__" not in vars(torch.cuda.OutOfMemoryError)
            assert "vrambroker" not in str(torch.cuda.OutOfMemoryError(texts[0]))
        """)

    def test_the_daemon_dies(self):
        self.run_torch("""
            import os, signal
            torch = start()
            vrambroker.torch.enable()
            held = torch.native.alloc(20 * MiB)
            os.kill(%d, signal.SIGKILL)
            # The refusal is the daemon's end as soon as that is known; before that, memory may still be had.
            while True:
                try:
                    torch.native.alloc(2 * MiB)
                except torch.cuda.OutOfMemoryError as error:
                    assert "UNAVAILABLE" in str(error), error
                    break
            ctypes.memset(held, 1, 20 * MiB)
            torch.native.free(held)
            torch.cuda.empty_cache()  # neither ends nor blocks
            assert "mode segments" in str(vrambroker.torch.status())
            vrambroker.torch.disable()
            assert torch.native.alloc(2 * MiB)  # CUDA's
        """ % self.daemon.process.pid)

    def test_pool(self):
        self.run_torch("""
            torch = start()
            native, own = torch.native, torch.cuda.empty_cache
            status = vrambroker.torch.enable(limit=64 << 20, mode="pool")
            assert torch.cuda.empty_cache != own
            assert status.mode == "pool" and status.answered == ("empty_cache", "mem_get_info"), status
            held, other = native.alloc(20 * MiB), native.alloc(4 * MiB)
            assert daemon() == 24 * MiB and len(native.active) == 1
            native.free(other)
            torch._C._cuda_emptyCache()
            assert daemon() == 24 * MiB  # PyTorch gives nothing back of a pool in use
            torch.cuda.empty_cache()
            assert daemon() == 20 * MiB and len(native.active) == 1
            native.free(held)
            torch.cuda.memory.empty_cache()
            assert daemon() == 0
            error = refused(lambda: native.alloc(100 * MiB), torch.cuda.OutOfMemoryError)
            assert "vrambroker: out of memory (limit)" in str(error), error
            last = native.alloc(2 * MiB)
            vrambroker.torch.disable()
            assert not native.active and torch.cuda.empty_cache is own is torch.cuda.memory.empty_cache
            native.free(last)
            torch.cuda.empty_cache()
            client = vrambroker.torch._TorchClient(vrambroker.load())
            assert client.memory_stats()["reserved_bytes.all.current"] == 0
            vrambroker.torch.enable(limit=64 << 20, mode="pool")
            gc.collect()
            assert native.deleted_in_use == 0
        """)

    def test_pool_where_segments_cannot_be_had(self):
        self.run_torch("""
            torch = start("without")
            error = refused(lambda: vrambroker.torch.enable(mode="segments"))
            assert error.code == vrambroker.Code.UNIMPLEMENTED and "does not import cudaMalloc" in str(error), error
            assert vrambroker.torch.status().mode is None
            status = vrambroker.torch.enable()
            assert status.mode == "pool" and "does not import cudaMalloc" in status.reason, status
            assert status.reason in str(status)
            assert torch.native.alloc(2 * MiB)
        """)

    def test_enable_that_fails_changes_nothing(self):
        self.run_torch("""
            torch = start()
            native = torch.native
            def breaks(name):
                original = getattr(vrambroker.torch, name)
                def fail(*arguments):
                    setattr(vrambroker.torch, name, original)
                    raise RuntimeError("broken: " + name)
                setattr(vrambroker.torch, name, fail)
            answers = torch.cuda.mem_get_info, torch.cuda.OutOfMemoryError.__init__, torch._C._cuda_beginAllocateToPool
            def check():
                assert not vrambroker.torch.status().mode
                native.free(native.alloc(2 * MiB))
                client = vrambroker.torch._TorchClient(vrambroker.load())
                assert client.memory_stats()["reserved_bytes.all.current"] == 0
                assert answers == (torch.cuda.mem_get_info, torch.cuda.OutOfMemoryError.__init__,
                                   torch._C._cuda_beginAllocateToPool)
            for mode in ("segments", "pool"):
                for name in ("AllocatorSettings", "Captures", "IdleGiver", "Status"):
                    breaks(name)
                    assert "broken" in str(refused(lambda: vrambroker.torch.enable(mode=mode), RuntimeError)), name
                    check()
            warnings.simplefilter("error")  # of the 2 MiB that are there before
            held = native.alloc(2 * MiB)
            assert "outside the broker" in str(refused(vrambroker.torch.enable, UserWarning))
            check()
            warnings.simplefilter("ignore")
            assert vrambroker.torch.enable().mode == "segments"
            native.alloc(4 * MiB)
            assert daemon() == 4 * MiB and held
        """)

    def test_plain_that_fails_changes_nothing(self):
        self.run_torch("""
            torch = start()
            def fail(allocator):
                raise RuntimeError("broken")
            before = torch.cuda.mem_get_info, torch.cuda.memory_stats
            torch.cuda.memory.change_current_allocator, change = fail, torch.cuda.memory.change_current_allocator
            refused(lambda: vrambroker.torch.enable(mode="plain"), RuntimeError)
            assert before == (torch.cuda.mem_get_info, torch.cuda.memory_stats) and not vrambroker.torch.status().mode
            torch.cuda.memory.change_current_allocator = change
            assert vrambroker.torch.enable(mode="plain").mode == "plain"
        """)

    def test_no_pool_in_old_versions(self):
        for options in ('pool=False, version="2.4.1"', 'version="2.6.0"'):
            self.run_torch("""
                torch = start("without", %s)
                if torch.__version__ == "2.6.0":
                    torch.cuda.memory.MemPoolContext = object
                error = refused(lambda: vrambroker.torch.enable())
                assert error.code == vrambroker.Code.UNIMPLEMENTED and torch.__version__ in str(error), error
                assert "2.8 or newer" in str(error), error
                assert vrambroker.torch.status().mode is None and not torch.native.active
                assert "__str__" not in vars(torch.cuda.OutOfMemoryError)
            """ % options)

    def test_plain(self):
        self.run_torch("""
            torch = start()
            status = vrambroker.torch.enable(limit=64 << 20, mode="plain")
            assert status.mode == "plain", status
            for name in ("empty_cache", "memory_stats", "mem_get_info", "reset_peak_memory_stats",
                         "reset_accumulated_memory_stats", "set_per_process_memory_fraction"):
                assert name in status.answered, name
            inner = torch.state.allocator
            pointer = inner.alloc(5000, 0, None)
            ctypes.memset(pointer, 1, 5000)
            assert torch.cuda.memory_stats()["allocated_bytes.all.current"] == 5120
            assert torch.cuda.memory.memory_stats_as_nested_dict(0)["requested_bytes"]["all"]["current"] == 5000
            assert torch.cuda.memory_reserved() == 2 * MiB == daemon()  # PyTorch's function on ours
            assert torch.cuda.mem_get_info() == (62 * MiB, 64 * MiB)
            inner.record_stream(pointer, 17)
            inner.free(pointer, 5000, 0, None)
            torch.cuda.reset_peak_memory_stats()
            assert torch.cuda.max_memory_allocated() == 0
            torch.cuda.empty_cache()
            assert daemon() == 0
            torch.cuda.reset_accumulated_memory_stats()
            assert torch.cuda.memory_stats()["num_device_alloc"] == 0
            # What PyTorch would take for memory is its exception instead.
            kind, pointer, text = standin_torch.call(torch, inner.alloc_address, 100 * MiB)
            assert kind == 2 and not pointer, (kind, text)
            assert text.startswith("CUDA out of memory (vrambroker). Tried to allocate 104857600 bytes on GPU 0."), text
            assert "out of memory (limit) on device 0" in text and "limit 64.00 MiB" in text, text
            kind, pointer, text = standin_torch.call(torch, inner.alloc_address, 10 * MiB)
            assert kind == 0 and pointer  # and it goes on
            inner.free(pointer, 10 * MiB, 0, None)
            kind, pointer, text = standin_torch.call(torch, inner.alloc_address, 0)
            assert kind == 0 and not pointer
            # A limit of the process's own.
            torch.cuda.set_per_process_memory_fraction(32 / 8192)
            assert torch.cuda.get_per_process_memory_fraction() == 32 / 8192
            assert torch.cuda.mem_get_info()[1] == 32 * MiB
            held = inner.alloc(20 * MiB, 0, None)
            kind, pointer, text = standin_torch.call(torch, inner.alloc_address, 13 * MiB)
            assert kind == 2 and "set_per_process_memory_fraction" in text, (kind, text)
            kind, pointer, text = standin_torch.call(torch, inner.alloc_address, 12 * MiB)
            assert kind == 0, text
            inner.free(pointer, 12 * MiB, 0, None)
            torch.cuda.set_per_process_memory_fraction(1.0)
            assert standin_torch.call(torch, inner.alloc_address, 30 * MiB)[0] == 0
            refused(lambda: torch.cuda.set_per_process_memory_fraction(2), TypeError)
            refused(lambda: torch.cuda.set_per_process_memory_fraction(2.0), ValueError)
            error = refused(vrambroker.torch.disable)
            assert error.code == vrambroker.Code.FAILED_PRECONDITION and "until the process ends" in str(error), error
            assert vrambroker.torch.status().mode == "plain"
        """)

    def test_plain_in_a_build_with_old_strings(self):
        self.run_torch("""
            torch = start("old")
            vrambroker.torch.enable(limit=64 << 20, mode="plain")
            kind, pointer, text = standin_torch.call(torch, torch.state.allocator.alloc_address, 100 * MiB)
            assert kind == 1 and "out of memory (limit)" in text, (kind, text)
        """)

    def test_errors_of_enable(self):
        self.run_torch("""
            def error(text, **options):
                found = refused(lambda: vrambroker.torch.enable(**options))
                assert text in str(found), found
                assert vrambroker.torch.status().mode is None
                return found.code
            PRE = vrambroker.Code.FAILED_PRECONDITION
            import sys
            sys.modules["torch"] = None
            assert error("PyTorch cannot be imported") == PRE
            start(gpu=False, cuda=None)
            assert error("without CUDA") == PRE
            start(gpu=False, available=False)
            assert error("PyTorch sees no GPU") == PRE
            torch = start(gpu=False)
            torch.cuda.get_allocator_backend = lambda: "cudaMallocAsync"
            assert error("cudaMallocAsync") == PRE
            start(gpu=False, initialized=True)
            assert error("CUDA is already initialised", mode="plain") == PRE
            torch = start(gpu=False)
            refused(lambda: vrambroker.torch.enable(mode="best"), ValueError)
            refused(lambda: vrambroker.torch.enable(limit=7.0), ValueError)
            assert error("no vrambrokerd", socket_dir="/nonexistent", connect_timeout=0.1) == vrambroker.Code.UNAVAILABLE
            assert error("limit: 'much'", limit="much") == vrambroker.Code.INVALID_ARGUMENT
            # The first of these connects; the daemon has no GPU, or not this one.
            assert error("--device=cuda") == PRE
            vrambroker.torch._require_gpu = lambda devices: None
            torch.cuda.device_count = lambda: 2
            assert error("no CUDA device 1") == vrambroker.Code.NOT_FOUND
            torch.cuda.device_count = lambda: 1
            assert vrambroker.torch.enable().mode == "segments"
            found = refused(vrambroker.torch.enable)
            assert found.code == PRE and "disable()" in str(found), found
        """)

    def test_settings_that_go_past_the_broker(self):
        for variable, value in (("PYTORCH_ALLOC_CONF", "max_split_size_mb:512, expandable_segments : True"),
                                ("PYTORCH_HIP_ALLOC_CONF", "expandable_segments:True"),
                                ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),
                                ("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")):
            self.run_torch("""
                start()
                found = refused(vrambroker.torch.enable)
                assert %r in str(found) and found.code == vrambroker.Code.FAILED_PRECONDITION, found
            """ % variable, **{variable: value})

    def test_settings_that_this_release_does_not_read(self):
        past = "expandable_segments:True"
        for version, text, variables in (
                ("2.14.1", "max_split_size_mb:64", {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64", "PYTORCH_ALLOC_CONF": past}),
                ("2.14.1", "", {"PYTORCH_CUDA_ALLOC_CONF": "", "PYTORCH_ALLOC_CONF": past, "PYTORCH_HIP_ALLOC_CONF": past}),
                ("2.9.1", "", {"PYTORCH_ALLOC_CONF": past}),
                ("2.6.0", "", {"PYTORCH_ALLOC_CONF": past, "PYTORCH_HIP_ALLOC_CONF": past})):
            self.run_torch("""
                torch = start(version=%r)
                vrambroker.torch.enable()
                vrambroker.torch.disable()
                assert torch.native.settings_text.replace("release_lock_on_cudamalloc:False", "").strip(",") == %r
            """ % (version, text), **variables)

    def test_memory_from_before(self):
        self.run_torch("""
            torch = start(initialized=True)
            cached, used = torch.native.alloc(2 * MiB), torch.native.alloc(4 * MiB)
            torch.native.free(cached)
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                status = vrambroker.torch.enable()
            assert status.outside_bytes == 4 * MiB, status  # the cache was emptied
            assert len(seen) == 1 and "4.00 MiB" in str(seen[0].message), seen
            assert "outside of the broker: 4.00 MiB" in str(status)
        """)

    def test_a_fork_gets_nothing(self):
        self.run_torch("""
            import os
            torch = start()
            vrambroker.torch.enable()
            held = torch.native.alloc(2 * MiB)
            child = os.fork()
            if child == 0:
                error = refused(lambda: torch.native.alloc(4 * MiB), torch.cuda.OutOfMemoryError)
                os._exit(7 if "fork" in str(error) else 1)
            assert os.waitpid(child, 0)[1] == 7 << 8
            assert torch.native.alloc(4 * MiB)
        """)

    def test_the_c_functions(self):
        self.run_torch("""
            from vrambroker import _library
            library = vrambroker.load()
            lib, byref = library.lib, ctypes.byref
            OK, INVALID, NOT_FOUND, PRECONDITION = 0, 3, 5, 9
            def last():
                return lib.vrambroker_last_error_message().decode()
            assert lib.vrambroker_torch_client(None) == INVALID and "client is NULL" in last()
            assert lib.vrambroker_torch_device(0, None) == INVALID and "device is NULL" in last()
            assert lib.vrambroker_torch_last_refusal(0, None) == INVALID and "out is NULL" in last()
            refusal = _library.TorchRefusal()
            refusal.struct_size = 100
            assert lib.vrambroker_torch_last_refusal(0, byref(refusal)) == INVALID and "struct_size is 100" in last()
            refusal = _library.TorchRefusal()
            assert lib.vrambroker_torch_last_refusal(0, byref(refusal)) == NOT_FOUND  # none yet
            options = _library.Options()
            options.abi_version = 7
            assert lib.vrambroker_torch_connect(byref(options)) == PRECONDITION and "for ABI version 7" in last(), last()
            options.abi_version, options.limit = 1, b"much"
            assert lib.vrambroker_torch_connect(byref(options)) == INVALID and "'much'" in last(), last()
            options.limit, options.name = b"64MiB", b"c"
            assert lib.vrambroker_torch_connect(byref(options)) == OK, last()
            assert lib.vrambroker_torch_connect(byref(options)) == PRECONDITION and "connected already" in last(), last()
            assert lib.vrambroker_torch_connect(None) == PRECONDITION
            device = ctypes.c_int(7)
            assert lib.vrambroker_torch_device(0, byref(device)) == OK and device.value == 0
            for wrong in (-1, 1, 1 << 30):
                assert lib.vrambroker_torch_device(wrong, byref(device)) == NOT_FOUND and device.value == -1
                assert "no CUDA device" in last(), last()
            assert lib.vrambroker_torch_set_cap(-1, 5) == NOT_FOUND == lib.vrambroker_torch_set_cap(64, 5)
            assert lib.vrambroker_torch_serve(b"libnone.so") == NOT_FOUND and "no libnone.so is loaded" in last(), last()
            assert lib.vrambroker_torch_serve(None) == NOT_FOUND
            lib.vrambroker_torch_unserve()
            malloc, free = lib.vrambroker_torch_malloc, lib.vrambroker_torch_free
            malloc.restype, malloc.argtypes = ctypes.c_void_p, [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
            free.restype, free.argtypes = None, [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
            # The last 16 refusals, the newest first.
            for number in range(1, 21):
                assert malloc((100 + number) * MiB, 0, None) is None
            for index in range(16):
                assert lib.vrambroker_torch_last_refusal(index, byref(refusal)) == OK
                assert (refusal.number, refusal.requested_bytes) == (20 - index, (120 - index) * MiB)
                assert refusal.code == 8 and refusal.out_of_memory.limit_bytes == 64 * MiB and refusal.struct_size > 2600
                assert b"out of memory (limit)" in refusal.message, refusal.message
            assert lib.vrambroker_torch_last_refusal(16, byref(refusal)) == NOT_FOUND
            # The reports of the same.
            report, text, needed = lib.vrambroker_torch_out_of_memory_json, ctypes.create_string_buffer(8192), ctypes.c_size_t()
            for number in range(5, 21):
                assert report(number, text, 8192, byref(needed)) == OK and needed.value == len(text.value) + 1
                found = json.loads(text.value)
                assert (found["cause"], found["requested_bytes"]) == ("LIMIT", (100 + number) * MiB), found
            assert report(20, text, needed.value - 1, byref(needed)) == 11  # OUT_OF_RANGE
            assert report(20, None, 0, byref(needed)) == 11 and needed.value == len(text.value) + 1
            for number in (0, 4, 21, 1 << 63):
                assert report(number, text, 8192, byref(needed)) == NOT_FOUND and needed.value == 0, number
            assert "out of memory (limit)" in last()  # as it was
            assert report(20, None, 100, byref(needed)) == INVALID and "buffer is NULL" in last(), last()
            assert malloc(-5, 0, None) is None and malloc(0, 0, None) is None and malloc(5, 3, None) is None
            assert lib.vrambroker_torch_last_refusal(0, byref(refusal)) == OK
            assert refusal.code == NOT_FOUND and refusal.out_of_memory.limit_bytes == 0, refusal.message
            assert report(refusal.number, text, 8192, None) == NOT_FOUND  # not for want of memory
            assert type(library.refusal_error(refusal)) is vrambroker.Error
            assert lib.vrambroker_torch_last_refusal(1, byref(refusal)) == OK and b"size is -5" in refusal.message
            # Without PyTorch a refused block is NULL, as ever.
            cached = lib.vrambroker_torch_cached_malloc
            cached.restype, cached.argtypes = ctypes.c_void_p, [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
            assert cached(100 * MiB, 0, None) is None
            lib.vrambroker_torch_empty_cache()
            free(malloc(5 * MiB, 0, None), 5 * MiB, 0, None)
            free(None, 0, 0, None)
        """)

    def test_many_threads(self):
        self.run_torch("""
            torch = start()
            vrambroker.torch.enable(limit=100 << 20)
            allocate, free = torch.lib.standin_malloc, torch.lib.standin_free
            problems = []
            def work(number):
                try:
                    for turn in range(40):
                        pointer = ctypes.c_void_p()
                        size = (2 + 2 * number) * MiB
                        if allocate(ctypes.byref(pointer), ctypes.c_size_t(size)) == 0:
                            ctypes.memset(pointer.value, number, 4096)
                            assert ctypes.string_at(pointer.value, 4096) == bytes([number]) * 4096
                            assert free(pointer) == 0
                        else:
                            assert not pointer.value
                        if turn % 10 == 0:
                            torch.cuda.mem_get_info()
                            str(torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate %d.00 MiB." % (size // MiB)))
                except BaseException as error:
                    problems.append(error)
            threads = [threading.Thread(target=work, args=(number,)) for number in range(12)]
            [thread.start() for thread in threads]
            [thread.join() for thread in threads]
            assert not problems, problems
            assert daemon() == 0
        """)

    def test_sizes_are_written_as_pytorch_does(self):
        self.run_torch("""
            size = vrambroker._library.format_size
            for count, text in ((0, "0 bytes"), (1024, "1024 bytes"), (1025, "1.00 KiB"), (1 << 20, "1024.00 KiB"),
                                (2 << 20, "2.00 MiB"), (1 << 30, "1024.00 MiB"), (3 << 29, "1.50 GiB"), (1 << 50, "1048576.00 GiB")):
                assert size(count) == text, (count, size(count))
        """)


@unittest.skipUnless("VRAMBROKER_MAKE_MACHINE" in os.environ, "built without CUDA")
class GpuTest(unittest.TestCase):
    """Tests the CUDA code path: two GPUs of the driver's substitute (tests/cuda_substitute)."""

    def setUp(self):
        self.machine = tempfile.mkdtemp(prefix="vrambroker-machine-")
        self.addCleanup(shutil.rmtree, self.machine, ignore_errors=True)
        subprocess.run([os.environ["VRAMBROKER_MAKE_MACHINE"], self.machine], check=True)

    def run_on_gpus(self, code, visible=None, visible_to_daemon=None, **more):
        def environment(devices):
            return {"VRAMBROKER_CUDA_SUBSTITUTE": self.machine, "LD_LIBRARY_PATH": os.environ["VRAMBROKER_CUDA_FOLDER"],
                    **({"CUDA_VISIBLE_DEVICES": devices} if devices else {})}
        daemon = support.Daemon("cuda", **environment(visible_to_daemon))
        self.addCleanup(daemon.close)
        return support.run(PRELUDE + textwrap.dedent(code), daemon, **environment(visible), **more)

    def test_a_remote_client_frees_nothing_that_a_captured_stream_uses(self):
        self.run_on_gpus("""
            import ctypes
            cuda, stream, graph = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_void_p()
            def succeeds(function, *arguments):
                assert getattr(cuda, function)(*arguments) == 0, function
            client = vrambroker.Client(placement="remote")
            buffer = client.malloc(5000)
            context = ctypes.c_void_p()
            succeeds("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
            succeeds("cuCtxSetCurrent", context)
            succeeds("cuStreamCreate", ctypes.byref(stream), 1)
            succeeds("cuStreamBeginCapture_v2", stream, 0)
            error = refused(lambda: buffer.free(stream.value), vrambroker.Error)
            assert error.code == vrambroker.Code.FAILED_PRECONDITION and "nothing was freed" in str(error), error
            buffer.write(b"still here")
            succeeds("cuStreamEndCapture", stream, ctypes.byref(graph))
            buffer.free(stream.value)
            assert buffer.pointer == 0
        """)

    def test_memory_of_a_gpu(self):
        self.run_on_gpus("""
            client = vrambroker.Client()
            assert [device.kind for device in client.devices] == ["cuda", "cuda"], client.devices
            buffer = client.malloc(5000, device=1)
            buffer.write(b"on the GPU", 7)
            assert buffer.read(10, 7) == b"on the GPU"
            error = refused(buffer.memoryview, TypeError)
            assert "on a GPU" in str(error), error
            interface = buffer.__cuda_array_interface__
            assert interface["shape"] == (5000,) and interface["data"] == (buffer.pointer, False), interface
            # Whether a GPU library uses it cannot be known: it stays with its buffer, and so does the session.
            other = client.malloc(5000, device=1)
            client.close()
            assert other.pointer == 0 and buffer.pointer == interface["data"][0]
            assert "closed" in str(refused(buffer.read, vrambroker.Error))
            assert "closed" in str(refused(lambda: buffer.__cuda_array_interface__, vrambroker.Error))
            buffer.free()
            assert buffer.pointer == 0 and not client._session
        """)

    def test_each_gpu_has_its_own(self):
        self.run_on_gpus("""
            torch = start(gpu=False)
            torch.cuda.device_count = lambda: 2
            runtime = ctypes.CDLL(%r)
            status = vrambroker.torch.enable(limit=64 << 20)
            assert [(device.cuda, device.ordinal) for device in status.devices] == [(0, 0), (1, 1)], status
            assert len({device.uuid for device in status.devices}) == 2, status
            current = ctypes.c_int()
            for device, size in ((0, 4), (1, 6)):
                runtime.cudaSetDevice(device)
                assert torch.native.alloc(size * MiB)
                runtime.cudaGetDevice(ctypes.byref(current))
                assert current.value == device
            assert [device.reserved_bytes for device in vrambroker.torch.status().devices] == [4 * MiB, 6 * MiB]
            assert torch.cuda.mem_get_info(1) == (58 * MiB, 64 * MiB)
            assert str(refused(lambda: torch.native.alloc(100 * MiB), torch.cuda.OutOfMemoryError)).count("on device 1") == 1
        """ % os.path.join(support.STANDINS, "bound", "libcudart.so"))

    def check_return(self, goes_back, before="", standins="bound", mode="segments"):
        """Checks whether a segment goes back to the daemon although the wait for the whole device fails. `before`: code
        to run before the allocation."""
        self.run_on_gpus("""
            torch = start(%r, gpu=False)
            runtime = ctypes.CDLL(%r)
            vrambroker.torch.enable(limit=64 << 20, mode=%r)
            %s
            torch.native.free(torch.native.alloc(40 * MiB))
            torch.cuda.empty_cache()
            if %r:
                assert torch.native.alloc(40 * MiB)
            else:
                assert refused(lambda: torch.native.alloc(40 * MiB), torch.cuda.OutOfMemoryError)
            assert runtime.cudaGetLastError() == 0
        """ % (standins, os.path.join(support.STANDINS, standins, "libcudart.so"), mode, before, goes_back),
            VRAMBROKER_CUDA_SUBSTITUTE_FAULTS="cuCtxSynchronize:1+=998")

    def test_a_segment_goes_back_when_its_own_stream_is_done(self):
        self.check_return(True)

    def test_a_segment_is_for_the_current_stream(self):
        # No stream has this number: the return would have to wait for all devices.
        self.check_return(False, "torch.lib.standin_set_stream(ctypes.c_void_p(0xABC0))")

    def test_memory_of_a_graph_is_for_all_streams(self):
        self.check_return(False, "runtime.standin_set_capturing(1)")
        self.check_return(False, "runtime.standin_set_capturing(906)")
        self.check_return(False, "vrambroker.load().lib.vrambroker_torch_count_captures(1)")

    def test_the_current_stream_is_not_known(self):
        self.check_return(False, standins="lazy")

    def test_a_segment_of_a_pool_goes_back_when_its_stream_is_done(self):
        self.check_return(True, mode="pool")
        self.check_return(False, "torch.native.stream = 0xABC0", mode="pool")

    def test_memory_for_a_stream_that_a_caller_names(self):
        self.run_on_gpus("""
            torch = start(gpu=False)
            vrambroker.torch.enable(limit=64 << 20)
            memory = torch.cuda.caching_allocator_alloc(2 * MiB, 0, 0xABC0)
            assert torch.streams == [0xABC0, None] and memory, torch.streams
            assert torch.cuda.memory.caching_allocator_alloc(2 * MiB)
            assert torch.streams == [0xABC0, None], torch.streams
            vrambroker.torch.disable()
            assert torch.cuda.caching_allocator_alloc(2 * MiB, 0, 0xABC0)
            assert torch.streams == [0xABC0, None], torch.streams
        """)

    def test_gpus_are_told_apart_by_uuid(self):
        self.run_on_gpus("""
            torch = start(gpu=False)
            status = vrambroker.torch.enable()
            assert [(device.cuda, device.ordinal) for device in status.devices] == [(0, 1)], status
            torch.native.alloc(4 * MiB)
            client = vrambroker.torch._active.client
            assert [client.memory_stats(ordinal)["reserved_bytes.all.current"] for ordinal in (0, 1)] == [0, 4 * MiB]
        """, visible="1")

    def test_a_gpu_that_the_daemon_does_not_serve(self):
        self.run_on_gpus("""
            torch = start(gpu=False)
            torch.cuda.device_count = lambda: 2
            error = refused(vrambroker.torch.enable)
            assert error.code == vrambroker.Code.NOT_FOUND, error
            assert "does not serve CUDA device 1 of this process; it serves GPU-" in str(error), error
            assert "$CUDA_VISIBLE_DEVICES" in str(error) and vrambroker.torch.status().mode is None, error
        """, visible_to_daemon="0")


if __name__ == "__main__":
    unittest.main(verbosity=2)
