#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Idle memory of PyTorch's cache goes to a process that needs memory: several processes with the standins of
standin_torch.py on a daemon with 256 MiB."""
import os
import signal
import unittest

import support

PRELUDE = """
import ctypes, threading, warnings
import standin_torch
import vrambroker
vrambroker.torch._require_gpu = lambda devices: None
torch = standin_torch.install(%r + "/bound")
native = torch.native
held = []
MiB = 1 << 20
def status():
    return vrambroker.torch.status()
def enable(**options):
    vrambroker.torch.enable(**options)
def take(size, count=1):
    for _ in range(count):
        held.append(native.alloc(size * MiB))
def fill():
    for address in held:
        ctypes.memset(address, 7, 1)
def drop():
    while held:
        native.free(held.pop())
def given():
    return status().given_back._asdict()
in_thread = {}
def start(name, call):
    def run():
        try:
            call()
            in_thread[name] = "done"
        except BaseException as error:
            in_thread[name] = str(error)
    in_thread[name] = ""
    threading.Thread(target=run, daemon=True).start()
""" % support.STANDINS
MIB = 1 << 20


class TrainersTest(support.DaemonTest):
    # A busy machine answers late.
    CONFIG = "client_timeout: '20s' reclaim_timeout: '20s'"

    def trainer(self, name, code="", **options):
        program = self.start_program(PRELUDE + code)
        arguments = "".join(", %s=%r" % option for option in options.items())
        program.tell("enable(name=%r%s)" % (name, arguments))
        return program

    def figures(self, session):
        """Returns reserved, allocated and idle bytes of the same moment. A first look may still find an older report of
        a time when the session held more."""
        figures = self.session(session)
        return figures["reserved_bytes"], figures["allocated_bytes"], figures["idle_bytes"]


class IdleTest(TrainersTest):
    def check_cached_memory_goes_to_who_needs_it(self, mode):
        first, second = self.trainer("first", mode=mode), self.trainer("second", mode=mode)
        first.tell("take(20, 8)")
        first.tell("drop()")
        support.wait_for(lambda: self.figures("first") == (160 * MIB, 0, 160 * MIB))
        second.tell("take(20, 8)")  # 60 % of the device, like the first session's share; no wait
        second.tell("fill()")
        # The second session may have its memory before the first session finishes its answer.
        support.wait_for(lambda: first.tell("given()")["asked"] >= 1)
        given = first.tell("given()")
        self.assertGreaterEqual(given["given_bytes"], 64 * MIB)
        self.assertEqual((given["refused"], given["why"]), (0, ""))
        self.assertIn("gives memory back: ", first.tell("str(status())"))
        # The first session goes on, and leases anew.
        second.tell("drop()")
        first.tell("take(20, 8)")
        first.tell("fill()")
        self.assertEqual(self.session("first")["reserved_bytes"], 160 * MIB)

    def test_cached_memory_goes_to_who_needs_it(self):
        self.check_cached_memory_goes_to_who_needs_it("segments")

    def test_cached_memory_of_a_pool_goes_to_who_needs_it(self):
        self.check_cached_memory_goes_to_who_needs_it("pool")

    def test_an_operator_trims(self):
        first = self.trainer("first")
        first.tell("take(20, 3)")
        first.tell("native.free(held.pop())")
        self.assertEqual(self.vramctl("trim", "first")["released_bytes"], 20 * MIB)
        self.assertEqual(self.session("first")["reserved_bytes"], 40 * MIB)
        first.tell("fill()")
        self.assertEqual(self.vramctl("trim", "first")["released_bytes"], 0)

    def test_never_while_a_graph_is_captured(self):
        first, second = self.trainer("first"), self.trainer("second")
        first.tell("take(20, 8)")
        first.tell("drop()")
        first.tell("graph = torch.cuda.CUDAGraph()")
        first.tell("graph.capture_begin()")
        with self.assertRaisesRegex(support.ToldError, "OutOfMemoryError"):
            second.tell("take(160)")
        given = first.tell("given()")
        self.assertGreaterEqual(given["refused"], 1)
        self.assertEqual(given["given_bytes"], 0)
        self.assertIn("a CUDA graph is being captured", given["why"])
        self.assertIn("a CUDA graph is being captured", first.tell("str(status())"))
        self.assertEqual(first.tell("native.emptied_in_capture"), 0)
        # PyTorch calls cudaMalloc() only once during a capture: the daemon asks other sessions at once.
        second.tell("take(20, 4)")
        second.tell("drop()")
        before = first.tell("native.mallocs")
        first.tell("take(40, 2)")
        self.assertEqual(first.tell("native.mallocs"), before + 2)
        first.tell("drop()")
        first.tell("graph.capture_end()")
        second.tell("take(160)")

    def test_a_capture_that_failed_is_never_over(self):
        first, second = self.trainer("first"), self.trainer("second")
        first.tell("take(20, 4)")
        first.tell("drop()")
        first.tell("graph = torch.cuda.CUDAGraph()")
        first.tell("graph.capture_begin()")
        first.tell("native.capture_fails = True")
        with self.assertRaisesRegex(support.ToldError, "RuntimeError"):
            first.tell("graph.capture_end()")
        self.assertEqual(self.vramctl("trim", "first")["released_bytes"], 0)
        self.assertIn("a capture of a CUDA graph has failed", first.tell("given()")["why"])
        # PyTorch does not ask twice any more; the daemon asks other sessions all the same.
        second.tell("take(20, 8)")
        second.tell("drop()")
        first.tell("take(40)")

    def test_a_pool_in_use(self):
        first, second = self.trainer("first"), self.trainer("second")
        second.tell("take(20, 8)")
        second.tell("drop()")
        first.tell("pool = torch.cuda.MemPool()")
        first.tell("torch._C._cuda_beginAllocateToPool(0, pool.id)")
        first.tell("take(120)")  # PyTorch asks only once; the other session's idle memory serves the request
        first.tell("torch._C._cuda_endAllocateToPool(0, pool.id)")
        first.tell("drop()")

    def test_a_daemon_that_is_stopped_does_not_stop_pytorch(self):
        first = self.trainer("first")
        first.tell("take(20, 8)")
        first.tell("drop()")
        os.kill(self.daemon.process.pid, signal.SIGSTOP)
        first.tell("torch.cuda.empty_cache()")  # 8 segments; each call to the daemon may take 30 s
        self.assertEqual(first.tell("native.reserved()"), 0)
        os.kill(self.daemon.process.pid, signal.SIGCONT)
        support.wait_for(lambda: self.session("first")["reserved_bytes"] == 0)

    def test_no_capture_begins_while_the_cache_is_emptied(self):
        first, second = self.trainer("first"), self.trainer("second")
        first.tell("take(20, 8)")
        first.tell("drop()")
        first.tell("emptying, go_on, graph = threading.Event(), threading.Event(), torch.cuda.CUDAGraph()")
        first.tell("native.before_empty = lambda: (emptying.set(), go_on.wait())")
        second.begin("take(160)")
        first.tell("emptying.wait()")
        first.tell("start('capture', graph.capture_begin)")
        self.assertEqual(first.tell("native.graphs"), 0)
        first.tell("go_on.set()")
        support.wait_for(lambda: first.tell("in_thread['capture']") == "done")
        self.assertEqual(first.tell("(native.graphs, native.emptied_in_capture)"), [1, 0])

    def test_emptying_that_fails_is_said(self):
        first = self.trainer("first")
        first.tell("take(20)")
        first.tell("drop()")
        first.tell("native.before_empty = lambda: 1 / 0")
        self.assertEqual(self.vramctl("trim", "first")["released_bytes"], 0)
        self.assertIn("ZeroDivisionError", first.tell("given()")["why"])
        first.tell("native.before_empty = lambda: None")
        self.assertEqual(self.vramctl("trim", "first")["released_bytes"], 20 * MIB)

    def test_a_pool_of_its_own_keeps_nothing(self):
        first = self.trainer("first", mode="pool")
        for _ in range(2):
            first.tell("take(20)")
            first.tell("drop()")
            self.assertEqual(self.vramctl("trim", "first")["released_bytes"], 20 * MIB)
        first.tell("take(20)")
        first.tell("drop()")
        first.tell("def fail(): raise RuntimeError('another reason')")
        first.tell("native.before_empty = fail")
        self.assertEqual(self.vramctl("trim", "first")["released_bytes"], 0)
        self.assertEqual(first.tell("given()")["why"], "RuntimeError: another reason")

    def test_the_peak_is_pytorchs(self):
        first = self.trainer("first")
        first.tell("take(20, 3)")
        first.tell("drop()")  # only PyTorch has seen the peak
        first.tell("take(20)")
        support.wait_for(lambda: self.figures("first") == (60 * MIB, 20 * MIB, 40 * MIB))
        stats = "vrambroker.torch._active.client.memory_stats()"
        first.tell("torch.cuda.empty_cache()")
        support.wait_for(lambda: self.figures("first") == (20 * MIB, 20 * MIB, 0))
        self.assertEqual(first.tell(stats)["allocated_bytes.all.peak"], 60 * MIB)
        first.tell("drop()")
        # The second session's cache is larger than its bytes in use at any time.
        second = self.trainer("second")
        second.tell("take(20, 2)")
        second.tell("drop()")
        second.tell("take(30, 1)")
        support.wait_for(lambda: self.figures("second") == (70 * MIB, 30 * MIB, 40 * MIB))
        found = second.tell(stats)
        self.assertEqual((found["allocated_bytes.all.peak"], found["reserved_bytes.all.peak"]), (40 * MIB, 70 * MIB))

    def test_memory_of_a_graph_that_lives_is_not_idle(self):
        first = self.trainer("first")
        first.tell("native.graphs_have_pools = True")
        first.tell("graph = torch.cuda.CUDAGraph()")
        first.tell("take(20)")
        first.tell("drop()")
        first.tell("graph.capture_begin()")
        first.tell("take(30)")
        first.tell("drop()")
        first.tell("graph.capture_end()")
        support.wait_for(lambda: self.figures("first") == (50 * MIB, 0, 20 * MIB))
        self.assertEqual(self.vramctl("trim", "first")["released_bytes"], 20 * MIB)
        first.tell("graph.reset()")
        support.wait_for(lambda: self.figures("first") == (30 * MIB, 0, 30 * MIB))
        self.assertEqual(self.vramctl("trim", "first")["released_bytes"], 30 * MIB)

    def test_who_can_serve_itself_does_not_wait(self):
        other = self.trainer("other")
        other.tell("take(100)")
        trainer = self.trainer("trainer", wait=3600)  # longer than this test may take
        trainer.tell("take(20, 7)")
        trainer.tell("drop()")
        trainer.tell("take(60)")
        self.assertEqual(trainer.tell("native.mallocs"), 9)  # the daemon refused the last request's first call

    def test_others_free_while_one_waits(self):
        other = self.trainer("other")
        other.tell("take(100)")
        trainer = self.trainer("trainer", wait=3600)
        trainer.tell("take(20, 7)")
        trainer.tell("start('request', lambda: native.alloc(60 * MiB))")
        support.wait_for(lambda: trainer.tell("vrambroker.load().lib.vrambroker_torch_calls_under_way()") == 1)
        # PyTorch's allocator stays unlocked during the request, and its freed memory serves the request.
        trainer.tell("[native.free(held.pop()) for _ in range(2)]")
        trainer.tell("torch.cuda.memory_stats()")
        self.assertEqual(trainer.tell("in_thread['request']"), "")
        trainer.tell("native.free(held.pop())")
        support.wait_for(lambda: trainer.tell("in_thread['request']") == "done")

    def test_without_giving_back(self):
        first, second = self.trainer("first", give_back_idle=False), self.trainer("second")
        first.tell("take(20, 8)")
        first.tell("drop()")
        support.wait_for(lambda: self.figures("first") == (160 * MIB, 0, 0))
        with self.assertRaisesRegex(support.ToldError, "OutOfMemoryError"):
            second.tell("take(160)")
        self.assertIn("give_back_idle=False", first.tell("str(status())"))
        self.assertEqual(first.tell("native.reserved()"), 160 * MIB)

    def test_enabled_and_disabled_again_and_again(self):
        first = self.trainer("first")
        for _ in range(3):
            first.tell("take(20)")
            first.tell("vrambroker.torch.disable()")
            self.assertEqual(first.tell("[t.name for t in threading.enumerate() if 'vrambroker' in t.name]"), [])
            support.wait_for(lambda: self.session("first")["idle_bytes"] == 0)
            first.tell("drop()")
            first.tell("torch.cuda.empty_cache()")
            self.assertEqual(self.vramctl("trim", "first")["released_bytes"], 0)
            first.tell("enable(name='first')")
        first.tell("take(20)")
        first.tell("drop()")
        self.assertEqual(self.vramctl("trim", "first")["released_bytes"], 20 * MIB)

    def test_the_daemon_dies_and_comes_back(self):
        first = self.trainer("first")
        first.tell("take(20, 2)")
        self.daemon.kill()
        first.tell("drop()")
        self.daemon.start()
        support.wait_for(lambda: any(s["name"] == "first" for s in self.vramctl("sessions")["sessions"]))
        self.assertIsNotNone(self.vramctl("trim", "first"))
        support.wait_for(lambda: first.tell("native.reserved()") == 0)
        first.tell("take(20)")
        support.wait_for(lambda: self.session("first")["reserved_bytes"] == 20 * MIB)

    def test_the_process_ends_while_it_gives_back(self):
        first = self.trainer("first")
        first.tell("take(20)")
        first.tell("drop()")
        first.process.stdin.close()
        self.assertEqual(first.process.wait(support.PATIENCE), 0)
        first.process.stdin = open("/dev/null", "w")


class ImpatientTest(TrainersTest):
    CONFIG = "client_timeout: '2s' reclaim_timeout: '500ms'"

    def trimmed(self, name):
        """Returns the bytes that a trim takes back. Trims again if the answer came too late for the daemon on a busy
        machine."""
        released = []

        def answers():
            try:
                released.append(self.vramctl("trim", name)["released_bytes"])
            except AssertionError as error:
                if "does not answer" not in str(error):
                    raise
            return released
        support.wait_for(answers)
        return released[0]

    def test_the_daemon_is_not_kept_waiting(self):
        first, second = self.trainer("first"), self.trainer("second")
        first.tell("take(20, 8)")
        first.tell("drop()")
        first.tell("go_on = threading.Event()")
        first.tell("native.before_empty = go_on.wait")
        with self.assertRaisesRegex(support.ToldError, "OutOfMemoryError"):
            second.tell("take(160)")
        self.assertEqual(self.trimmed("first"), 0)
        first.tell("go_on.set()")
        support.wait_for(lambda: first.tell("given()")["given_bytes"] == 160 * MIB)
        second.tell("take(160)")


class SettingsTest(TrainersTest):
    """Settings of PyTorch's allocator, and PyTorch's memory past the broker."""

    EXPAND = "torch.cuda.memory._set_allocator_settings('max_split_size_mb:64,expandable_segments:True')"

    def test_expandable_segments_switched_on_later(self):
        first = self.trainer("first")
        first.tell("caught = warnings.catch_warnings(record=True); seen = caught.__enter__(); warnings.simplefilter('always')")
        first.tell(self.EXPAND)
        self.assertEqual(first.tell("native.settings"), {
            "max_split_size_mb": "64", "expandable_segments": "False", "release_lock_on_cudamalloc": "True"})
        said = first.tell("[str(warning.message) for warning in seen]")
        self.assertEqual(len(said), 1)
        self.assertIn("expandable_segments was asked for and is not used", said[0])
        self.assertIn("vramctl tune", said[0])
        self.assertIn(said[0].partition(": ")[2], first.tell("status().notices"))
        first.tell("take(20)")
        self.assertEqual(self.session("first")["reserved_bytes"], 20 * MIB)
        self.assertEqual(first.tell("status().bypass_bytes"), 0)
        # disable() restores PyTorch's own settings.
        first.tell("vrambroker.torch.disable()")
        self.assertEqual(first.tell("native.settings['release_lock_on_cudamalloc']"), "False")
        self.assertEqual(first.tell("native.settings['max_split_size_mb']"), "64")
        first.tell(self.EXPAND)
        self.assertEqual(first.tell("native.settings['expandable_segments']"), "True")

    def test_the_lock_is_released_whatever_the_program_says(self):
        first = self.start_program(PRELUDE)
        first.tell("torch.cuda.memory._set_allocator_settings('release_lock_on_cudamalloc:True')")
        first.tell("enable(name='first')")
        first.tell("torch.cuda.memory._set_allocator_settings('release_lock_on_cudamalloc:False,max_split_size_mb:50')")
        self.assertEqual(first.tell("native.settings"), {"release_lock_on_cudamalloc": "True", "max_split_size_mb": "50"})
        with self.assertRaisesRegex(support.ToldError, "Unrecognized CachingAllocator option: nonsense"):
            first.tell("torch.cuda.memory._set_allocator_settings('nonsense:1')")
        first.tell("vrambroker.torch.disable()")
        self.assertEqual(first.tell("native.settings"), {"release_lock_on_cudamalloc": "False", "max_split_size_mb": "50"})

    def test_expandable_segments_switched_on_before(self):
        first = self.start_program(PRELUDE)
        first.tell(self.EXPAND)
        with self.assertRaisesRegex(support.ToldError, "FAILED_PRECONDITION.*expandable_segments:False"):
            first.tell("enable()")
        first.tell("torch.cuda.memory._set_allocator_settings('expandable_segments:False')")
        first.tell("enable()")

    def test_what_comes_past_the_broker_is_said(self):
        first = self.start_program(PRELUDE)
        first.tell("warnings.simplefilter('ignore')")
        first.tell("take(4)")
        first.tell("enable(name='first')")
        first.tell("warnings.showwarning = lambda message, *rest: noticed.append(str(message))")
        first.tell("noticed = []")
        first.tell("warnings.simplefilter('always')")
        self.assertEqual(first.tell("(status().outside_bytes, status().bypass_bytes)"), [4 * MIB, 0])
        # Simulates a moment when the broker counts a segment that PyTorch does not count yet.
        first.tell("vrambroker.torch._active.giver._compare(0, MiB)")
        self.assertEqual(first.tell("(status().outside_bytes, status().bypass_bytes)"), [4 * MIB, 0])
        first.tell("native.set('expandable_segments:True')")  # the package does not see this change
        first.tell("take(20)")
        support.wait_for(lambda: first.tell("noticed"))  # the giver's thread notices by itself
        self.assertIn("20.00 MiB that PyTorch has on CUDA device 0 did not come from the broker", first.tell("noticed[0]"))
        self.assertIn("expandable_segments was switched on", first.tell("noticed[0]"))
        self.assertEqual(first.tell("status().bypass_bytes"), 20 * MIB)
        self.assertIn("PAST the broker, outside of the limit: 20.00 MiB", first.tell("str(status())"))
        self.assertEqual(first.tell("len(noticed)"), 1)

    def test_the_advice_of_pytorchs_error(self):
        first = self.trainer("first", limit=64 << 20)
        with self.assertRaises(support.ToldError) as caught:
            first.tell("take(80)")
        said = str(caught.exception)
        self.assertIn("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True", said)
        self.assertIn("vrambroker: expandable_segments does not work with the broker", said)

    def test_a_pytorch_that_cannot_release_its_lock(self):
        first = self.start_program(PRELUDE)
        first.tell("native.knows = ()")
        first.tell("torch.cuda.memory._set_allocator_settings('max_split_size_mb:64')")
        first.tell("enable(name='first')")
        self.assertEqual(first.tell("native.settings"), {"max_split_size_mb": "64"})
        first.tell("take(20)")
        first.tell("drop()")
        self.assertEqual(self.vramctl("trim", "first")["released_bytes"], 20 * MIB)

    def test_a_tensor_for_another_process(self):
        first = self.trainer("first")
        with self.assertRaisesRegex(support.ToldError, "FAILED_PRECONDITION.*cannot be passed to another process.*cpu"):
            first.tell("torch.UntypedStorage()._share_cuda_()")


if __name__ == "__main__":
    unittest.main(verbosity=2)
