#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""vrambroker.Client and Buffer, with a real daemon. Every test is a program of its own: a process loads a library
once."""
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

import support

# Counts the Python functions that C may call: ctypes' function objects, by their name in CPython.
FUNCTIONS = """
    import gc
    import vrambroker
    from support import wait_for

    def living():
        return sum(type(found).__name__ == "CThunkObject" for found in gc.get_objects()) - others

    others = 0
    others = living()
"""


class LibraryTest(unittest.TestCase):
    """Finding libvrambroker.so.1."""

    def test_it_says_where_it_looked(self):
        support.run("""
            import os
            import vrambroker
            del os.environ["VRAMBROKER_LIBRARY"]
            try:
                vrambroker.load()
            except vrambroker.Error as error:
                text = str(error)
                assert error.code == vrambroker.Code.NOT_FOUND, error.code
                package = os.path.dirname(vrambroker.__file__)
                assert package + "/libvrambroker.so.1: no such file" in text, text
                assert os.path.join(os.path.dirname(os.path.dirname(package)), "lib", "libvrambroker.so.1") in text, text
                assert "$VRAMBROKER_LIBRARY" in text, text
            else:
                raise AssertionError("a library that nobody named was found")
            for path, why in (("/nonexistent/lib.so", "no such file"), ("/bin/sh", "cannot"), ("/etc/passwd", "")):
                try:
                    vrambroker.load(path)
                except vrambroker.Error as error:
                    assert path in str(error) and why in str(error), error
                else:
                    raise AssertionError(path)
            # Loaded, whatever failed before, and then no other.
            os.environ["VRAMBROKER_LIBRARY"] = %r
            library = vrambroker.load()
            assert library.version and vrambroker.load() is library
            assert vrambroker.load(os.environ["VRAMBROKER_LIBRARY"]) is library
            try:
                vrambroker.load("/bin/sh")
            except vrambroker.Error as error:
                assert error.code == vrambroker.Code.FAILED_PRECONDITION, error
            else:
                raise AssertionError("two libraries")
        """ % support.LIBRARY)

    def test_a_bundle_and_beside_the_package(self):
        for place in ("python/vrambroker", "lib"):
            with tempfile.TemporaryDirectory() as bundle:
                shutil.copytree(os.path.join(support.PYTHON_DIR, "vrambroker"), os.path.join(bundle, "python", "vrambroker"))
                os.makedirs(os.path.join(bundle, place), exist_ok=True)
                os.symlink(support.LIBRARY, os.path.join(bundle, place, "libvrambroker.so.1"))
                support.run("""
                    import os
                    del os.environ["VRAMBROKER_LIBRARY"]
                    sys.path.insert(0, %r)
                    import vrambroker
                    assert vrambroker.load().path == %r, vrambroker.load().path
                """ % (os.path.join(bundle, "python"), os.path.join(bundle, place, "libvrambroker.so.1")))

    def test_no_daemon(self):
        with tempfile.TemporaryDirectory() as nowhere:
            support.run("""
                import vrambroker
                try:
                    vrambroker.Client(socket_dir=%r, connect_timeout=0.2)
                except vrambroker.Error as error:
                    assert error.code == vrambroker.Code.UNAVAILABLE, error
                    assert "no vrambrokerd" in str(error), error
                else:
                    raise AssertionError("connected to nothing")
            """ % nowhere)

    def test_pip_installs_it(self):
        # Installs into a new environment, without a network, by README.md's command.
        if subprocess.run([sys.executable, "-c", "import ensurepip"], stderr=subprocess.DEVNULL, check=False).returncode:
            self.skipTest("this Python has no ensurepip (Debian: python3-venv)")
        without_path = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

        def run(*command):
            return subprocess.run(command, check=True, timeout=support.PATIENCE, env=dict(without_path, PIP_NO_INDEX="1"),
                                  stdout=subprocess.PIPE, universal_newlines=True).stdout

        with tempfile.TemporaryDirectory() as work:
            source = shutil.copytree(support.PYTHON_DIR, os.path.join(work, "source"))
            python = os.path.join(work, "venv", "bin", "python")
            run(sys.executable, "-m", "venv", os.path.join(work, "venv"))
            show = ("import importlib.metadata, vrambroker, vrambroker.torch, os;"
                    "print(vrambroker.__version__, importlib.metadata.version('vrambroker'), os.path.dirname(vrambroker.__file__))")
            for options, folder in (([], os.path.join(work, "venv", "lib")), (["--editable"], source)):
                run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *options, source)
                imported, installed, where = run(python, "-c", show).split()
                self.assertEqual(imported, installed)
                self.assertEqual(imported, vrambroker_version())
                self.assertTrue(where.startswith(folder), where)
                self.assertIn("py.typed", os.listdir(where))
                run(python, "-m", "pip", "uninstall", "--quiet", "--yes", "vrambroker")
                self.assertEqual(run(python, "-c", "import importlib.util as u; print(u.find_spec('vrambroker'))").strip(), "None")
            run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", self.sdist(python, source, work))
            self.assertIn(vrambroker_version(), run(python, "-c", show))

    @staticmethod
    def sdist(python, source, folder):
        """Builds the source package like packaging tools, and returns its path."""
        name = subprocess.run([python, "-c", "import build_backend; print(build_backend.build_sdist(%r))" % folder], cwd=source,
                              check=True, stdout=subprocess.PIPE, universal_newlines=True).stdout.strip()
        return os.path.join(folder, name)


def vrambroker_version():
    """Returns the version of the whole project, from the first line of Debian's changelog."""
    with open(os.path.join(support.PYTHON_DIR, "..", "..", "deploy", "debian", "changelog"), encoding="utf-8") as file:
        return re.match(r"vrambroker \(([0-9.]+)\) ", file.readline()).group(1)


# Prelude of tests whose request waits for memory with an hour's patience: a thread has to end the waiting.
WAITING = """
    import ctypes, os, threading, time
    import vrambroker
    def hold():
        holder = vrambroker.Client(name="holder")
        return holder, holder.malloc(250 << 20)  # of 256 MiB
    def calls(client):
        session = vrambroker._library.Session()
        client._call("vrambroker_get_session", ctypes.byref(session))
        return session.calls
    def wait_for_calls(client, count):
        while calls(client) < count:
            time.sleep(0.001)
    def refused(client):
        try:
            client.malloc(200 << 20)
        except vrambroker.Error as error:
            assert error.code == vrambroker.Code.FAILED_PRECONDITION, error
            return str(error)
        raise AssertionError("not refused")
    def lives(name):
        with vrambroker.Client(name=name) as probe:
            return probe.name != name
"""


HELPERS = """
    import os, subprocess, threading
    from support import wait_for
    def refused(call, error, text):
        try:
            call()
        except (TypeError, ValueError, vrambroker.Error) as raised:
            assert getattr(raised, "code", type(raised)) == error and text in str(raised), repr(raised)
        else:
            raise AssertionError("not refused: " + text)
    def ctl(*arguments):
        environment = dict(os.environ)
        environment.pop("LD_PRELOAD", None)  # a sanitizer's run-time library: vramctl has its own
        return subprocess.run([os.environ["VRAMCTL"], "--socket-dir", os.environ["VRAMBROKER_SOCKET_DIR"], *arguments],
                              env=environment, stdout=subprocess.PIPE, check=True, universal_newlines=True).stdout
"""


class ClientTest(support.DaemonTest):
    def test_memory(self):
        self.run_with_daemon("""
            import vrambroker
            with vrambroker.Client(limit=0.5, name="a-job", wait=0.001, library=None) as client:
                assert client.name == "a-job" and "a-job" in repr(client)
                device, = client.devices
                assert device == client.device(0) and device.kind == "host", device
                assert device.limit_bytes == 128 << 20 and device.capacity_bytes == 256 << 20, device
                client.status()
                buffer = client.malloc(5000)
                assert len(buffer) == 5000 and buffer.pointer
                buffer.write(b"hello", offset=10)
                buffer.write(bytearray(b"x"), 4999)
                buffer.write(memoryview(bytearray(b"a-b-c-"))[::2], 20)  # not contiguous
                assert buffer.read(5, 10) == b"hello" and buffer.read(offset=4999) == b"x" and buffer.read(3, 20) == b"abc"
                assert len(buffer.read()) == 5000 and buffer.read(0) == b""
                stats = client.memory_stats()
                assert stats["allocated_bytes.all.current"] == 5120 and stats["requested_bytes.all.current"] == 5000, stats
                free, total = client.memory_info()
                assert total == 128 << 20 and free == total - 5120, (free, total)
                buffer.record_stream(7)
                buffer.free()
                buffer.free()  # nothing
                assert client.memory_stats()["allocated_bytes.all.current"] == 0
                with client.malloc(3 << 20, stream=5) as again:
                    again.free(stream=6)
                with client.lease_segment((2 << 20) + 1) as whole:
                    assert client.memory_stats()["allocated_bytes.all.current"] == 4 << 20
                    whole.write(b"end", 2 << 20 - 2)
                assert client.memory_stats()["reserved_bytes.all.peak"] >= 4 << 20
                client.reset_peak_memory_stats()
                assert client.memory_stats()["allocated_bytes.all.peak"] == 0
                assert client.memory_stats()["num_device_alloc"] > 0
                client.reset_memory_stats()
                assert client.memory_stats()["num_device_alloc"] == 0
                assert client.empty_cache() > 0
                assert client.memory_stats()["reserved_bytes.all.current"] == 0
                assert "device ID 0, session a-job" in client.memory_summary()
            # Remote, and settings that have no effect.
            with vrambroker.Client(placement="remote", alloc_conf="roundup_power2_divisions:4,pinned_num_register_threads:8") as client:
                with client.malloc(100) as buffer:
                    buffer.write(b"remote")
                    assert buffer.read(6) == b"remote"
                assert isinstance(client.warnings, list)
        """)

    def test_host_memory_as_a_view_and_as_numpy(self):
        self.run_with_daemon("""
            import gc
            import numpy
            import vrambroker
            client = vrambroker.Client()
            buffer = client.malloc(4096)
            view = buffer.memoryview()
            assert len(view) == 4096 and not view.readonly and view.format == "B"
            view[0:4] = b"view"
            assert buffer.read(4) == b"view"
            array = buffer.numpy("float32")
            assert array.shape == (1024,) and array.base is not None
            array[:] = numpy.arange(1024, dtype="float32")
            assert numpy.frombuffer(buffer.read(), dtype="float32").sum() == 1023 * 512
            numpy.copyto(buffer.numpy("uint8"), 9)
            assert buffer.read(2) == bytes([9, 9]) and view[4095] == 9
            for refused in (buffer.free, buffer.__exit__):
                try:
                    refused()
                except BufferError as error:
                    assert "still in use" in str(error)
                else:
                    raise AssertionError("freed under an array")
            assert client.memory_stats()["allocated_bytes.all.current"] == 4096
            del buffer, view, refused
            gc.collect()
            array[5] = 1.0  # it keeps the buffer alive
            assert client.memory_stats()["allocated_bytes.all.current"] == 4096
            del array
            gc.collect()
            assert client.memory_stats()["allocated_bytes.all.current"] == 0
            assert not hasattr(client.malloc(1), "__cuda_array_interface__")
        """)

    def test_a_closed_client_gives_back_what_it_holds(self):
        self.run_with_daemon("""
            import vrambroker
            for placement in ("leased", "remote"):
                left = []
                for run in range(3):
                    with vrambroker.Client(name="job", placement=placement) as client:
                        assert client.name == "job", (client.name, "of the run before is still there")
                        left += [client.malloc(24 << 20), client.malloc(100)]
                        if placement == "leased":
                            left.append(client.lease_segment(2 << 20))
                with vrambroker.Client() as other:
                    other.malloc(250 << 20)  # of 256 MiB
                for buffer in left:
                    for call in (buffer.read, lambda: buffer.write(b"x"), buffer.memoryview, buffer.numpy,
                                 lambda: buffer.record_stream(1)):
                        try:
                            call()
                        except vrambroker.Error as error:
                            assert error.code == vrambroker.Code.FAILED_PRECONDITION and "closed" in str(error), error
                        else:
                            raise AssertionError("used after its client was closed")
                    assert buffer.pointer == 0 and len(buffer) > 0
                    with buffer:
                        buffer.free()
                    buffer.free(stream=3)
            # What was freed before says so.
            with vrambroker.Client() as client:
                buffer = client.malloc(100)
                buffer.free()
            try:
                buffer.read()
            except vrambroker.Error as error:
                assert "freed" in str(error), error
        """)

    def test_views_outlive_a_closed_client(self):
        self.run_with_daemon("""
            import gc
            import vrambroker
            def lives(name):
                with vrambroker.Client(name=name) as probe:
                    return probe.name != name
            for placement in ("leased", "remote"):
                with vrambroker.Client(name="job", placement=placement) as client:
                    views = [client.malloc(1 << 20).memoryview()]
                    buffer = client.malloc(4096)
                    views.append(buffer.memoryview())
                    views.append(buffer.numpy("float32"))
                    views.append(views[1][100:200])
                    client.malloc(100 << 20)  # back at once
                    cached = client.malloc(50 << 20)
                client.close()
                assert lives("job")
                with vrambroker.Client() as other:  # only what the views show is still charged
                    other.malloc(220 << 20)
                views[0][5] = 7
                views[2][:] = 1.5
                assert views[0][5] == 7 and views[2].sum() == 1.5 * 1024
                for call in (buffer.read, buffer.memoryview, lambda: buffer.write(b"x"), client.status):
                    try:
                        call()
                    except vrambroker.Error as error:
                        assert "closed" in str(error), error
                    else:
                        raise AssertionError("used after its client was closed")
                buffer.free()  # goes with its last view
                assert buffer.pointer and lives("job")
                del views[0], views[0], views[0]  # the slice is left, and shows what the array wrote
                gc.collect()
                assert lives("job") and bytes(views[0][:4]) != bytes(4)
                del views[0]
                gc.collect()
                assert not lives("job") and buffer.pointer == 0
                buffer.free()
            # The client and the buffer may go first.
            with vrambroker.Client(name="job") as client:
                array = client.malloc(4096).numpy()
            del client
            gc.collect()
            array[:] = 3
            assert array.sum() == 3 * 4096 and lives("job")
            del array
            gc.collect()
            assert not lives("job")
        """)

    def test_closed_while_others_hold_and_free(self):
        self.run_with_daemon("""
            import threading
            import vrambroker
            problems = []
            for turn in range(10):
                client = vrambroker.Client(name="job")
                assert client.name == "job", client.name
                busy = threading.Barrier(5)
                def work():
                    held = [client.malloc(1000) for _ in range(10)]
                    busy.wait()
                    try:
                        while True:
                            held.append(client.malloc(1000))
                            held[-1].memoryview()[0:1] = b"x"
                            if len(held) > 20:
                                held.pop(0).free()
                    except vrambroker.Error as error:
                        if "closed" not in str(error):
                            problems.append(error)
                    try:
                        for buffer in held:
                            buffer.free()
                    except BaseException as error:
                        problems.append(error)
                threads = [threading.Thread(target=work) for _ in range(4)]
                [thread.start() for thread in threads]
                busy.wait()
                client.close()
                [thread.join() for thread in threads]
                assert not problems, problems
        """)

    def test_out_of_memory(self):
        self.run_with_daemon("""
            import vrambroker
            client = vrambroker.Client(limit=64 << 20)
            other = vrambroker.Client(name="holder")
            held = client.lease_segment(20 << 20)
            def refused(who, size):
                try:
                    who.malloc(size)
                except vrambroker.OutOfMemoryError as error:
                    assert isinstance(error, MemoryError) and isinstance(error, vrambroker.Error)
                    assert error.code == vrambroker.Code.RESOURCE_EXHAUSTED and error.requested_bytes == size
                    assert error.advice and str(error).count(error.advice) == 1, str(error)
                    assert error.explanation and str(error).count(error.explanation) == 1, str(error)
                    return error
                raise AssertionError("not refused")
            error = refused(client, 50 << 20)
            assert error.cause == "LIMIT" and error.limit_bytes == 64 << 20 and error.reserved_bytes == 20 << 20, vars(error)
            assert error.allocated_bytes == 20 << 20 and error.segment_bytes == 50 << 20 and error.device == 0, vars(error)
            assert error.device_capacity_bytes == 256 << 20, vars(error)
            most = other.lease_segment(220 << 20)
            error = refused(client, 30 << 20)
            assert error.cause == "CAPACITY" and error.device_available_bytes == 16 << 20, vars(error)
            assert "holder" in str(error), error  # who has the most
            assert refused(client, 1 << 40).cause == "LARGER_THAN_DEVICE"
            # All fields of the struct are there.
            for name in ("idle_bytes", "largest_free_block_bytes", "guarantee_bytes", "inactive_split_bytes", "waited_ms",
                         "device_kept_free_bytes", "device_idle_bytes", "device_quarantined_bytes", "idle_elsewhere_bytes",
                         "block_bytes", "room_bytes", "hole_bytes", "holes", "hole_segments"):
                assert getattr(error, name) >= 0
            most.free()
            last = client.malloc(30 << 20)  # and it goes on
            # Holes: 14 MiB can still be reserved, and half of the last 30 MiB are free, in pieces.
            last.free()
            client.empty_cache()
            blocks = [client.malloc(4 << 20) for _ in range(10)]
            [block.free() for block in blocks[::2]]
            error = refused(client, 24 << 20)
            assert error.cause == "FRAGMENTATION" and error.block_bytes == 24 << 20, vars(error)
            assert error.hole_bytes == error.holes * (4 << 20) == 20 << 20 and error.hole_segments == 2, vars(error)
            assert error.room_bytes == 4 << 20 and "20.00 MiB is fragmented: 5 holes" in error.explanation, vars(error)
        """)

    def test_a_refusal_has_the_whole_report(self):
        for placement in ("leased", "remote"):
            self.run_with_daemon("""
                import copy, json, os, pickle, subprocess
                import vrambroker
                MiB = 1 << 20
                placement = %r
                holder = vrambroker.Client(name="holder-" + placement)
                held = holder.lease_segment(100 * MiB)
                environment = dict(os.environ)
                environment.pop("LD_PRELOAD", None)  # a sanitizer's run-time library: vramctl has its own
                def vramctl(*arguments):
                    command = [environment["VRAMCTL"], "--socket-dir", environment["VRAMBROKER_SOCKET_DIR"], "--format=json"]
                    return subprocess.check_output([*command, *arguments], env=environment)
                vramctl("stats", holder.name)  # has the daemon ask it for its figures
                client = vrambroker.Client(name="scoped-" + placement, placement=placement, limit=64 * MiB)
                with vrambroker.memory_scope("forward"), vrambroker.memory_scope("layer3"):
                    blocks = [client.malloc(4 * MiB) for _ in range(8)]
                last = client.malloc(4 * MiB)
                del blocks[::2]  # frees them
                def refused(size):
                    with vrambroker.memory_scope("backward"):
                        try:
                            client.malloc(size)
                        except vrambroker.OutOfMemoryError as error:
                            return error
                    raise AssertionError("not refused")
                error = refused(36 * MiB)
                assert error.scope == "backward", vars(error)
                assert [use.scope for use in error.scopes] == ["forward/layer3", ""], error.scopes
                use = error.scopes[0]
                assert isinstance(use, vrambroker.ScopeUse), use
                assert (use.allocated_bytes, use.bytes_at_peak, use.blocks) == (16 * MiB, 32 * MiB, 4), use
                assert use.pinned_hole_bytes == error.hole_bytes == 20 * MiB, (use, vars(error))
                pinned = error.pinned_segments[0]
                assert isinstance(pinned, vrambroker.PinnedSegment) and len(error.pinned_segments) == error.hole_segments
                assert sum(pinned.hole_bytes for pinned in error.pinned_segments) == error.hole_bytes, error.pinned_segments
                block = pinned.longest_held[0]
                assert isinstance(block, vrambroker.PinningBlock), block
                assert (block.block_bytes, block.scope) == (4 * MiB, "forward/layer3"), block
                first = error.largest_holders[0]
                assert first == vrambroker.Holder("holder-" + placement, 100 * MiB, 100 * MiB), error.largest_holders
                assert error.refusal >= 1, vars(error)
                assert error.user_limit_bytes == error.user_reserved_bytes == 0, vars(error)
                # Nothing is missing, and nothing is called otherwise than by vramctl.
                report = json.loads(vramctl("ooms"))["events"][0]["out_of_memory"]
                def plain(value):
                    if hasattr(value, "_asdict"):
                        value = value._asdict()
                    if isinstance(value, dict):
                        return {name: plain(inner) for name, inner in value.items()}
                    return [plain(inner) for inner in value] if isinstance(value, tuple) else value
                assert plain({name: getattr(error, name) for name in report}) == report, (vars(error), report)
                # As other processes get it.
                for same in (copy.copy(error), copy.deepcopy(error), pickle.loads(pickle.dumps(error))):
                    assert type(same) is type(error) and str(same) == str(error) and vars(same) == vars(error), vars(same)
                # Others' idle memory, and in no scope. Sessions of clients that are gone may end a little later.
                blocks = client = last = held = None
                idler = vrambroker.Client(name="idler-" + placement, placement="remote")
                kept = idler.malloc(4 * MiB)  # of a segment of 20 MiB
                try:
                    holder.malloc(250 * MiB)
                except vrambroker.OutOfMemoryError as caught:
                    error = caught
                assert error.cause == "CAPACITY" and (error.scope, error.scopes) == ("", ()), vars(error)
                why = vrambroker.IdleHolder("idler-" + placement, 16 * MiB, "IN_PART_USED")
                assert why in error.idle_holders, error.idle_holders
                assert error.idle_elsewhere_bytes == sum(idle.idle_bytes for idle in error.idle_holders), vars(error)
            """ % placement)

    def test_a_report_that_is_longer_than_expected(self):
        self.run_with_daemon("""
            import vrambroker
            client = vrambroker.Client(name="long", limit=8 << 20)
            vrambroker._library._REPORT_BYTES = 100
            with vrambroker.memory_scope("x" * 30):
                try:
                    client.malloc(9 << 20)
                except vrambroker.OutOfMemoryError as caught:
                    error = caught
            assert error.scope == "x" * 30 and error.limit_bytes == 8 << 20, vars(error)
        """)

    def test_errors_can_be_pickled(self):
        support.run("""
            import copy, pickle
            import vrambroker
            error = vrambroker.Error(14, "no daemon")
            error.seen = True
            for same in (copy.copy(error), copy.deepcopy(error), pickle.loads(pickle.dumps(error))):
                assert type(same) is vrambroker.Error and str(same) == "UNAVAILABLE: no daemon", same
                assert same.code is vrambroker.Code.UNAVAILABLE and same.message == "no daemon" and same.seen, vars(same)
                assert same.args == error.args, same.args
        """)

    def test_amounts_as_text(self):
        self.run_with_daemon("""
            import vrambroker
            with vrambroker.Client(limit="40%", wait="10min", connect_timeout="5s", idle_decay="1m30s",
                                   call_timeout="1m") as client:
                assert client.device(0).limit_bytes == 256 * 1048576 * 4 // 10, client.device(0)
                with client.malloc("24MiB") as buffer, client.lease_segment("2.5m") as segment:
                    assert buffer.bytes == 24 * 1048576 and segment.bytes == 5 << 19, (buffer, segment)
                assert client._options.wait_ms == 600000 and client._options.idle_decay_ms == 90000
        """)

    def test_the_environment_says_what_is_left_open(self):
        environment = {"VRAMBROKER_LIMIT": "25%", "VRAMBROKER_NAME": "outside", "VRAMBROKER_WAIT": "1h"}
        self.run_with_daemon("""
            import vrambroker
            with vrambroker.Client() as client:
                assert client.device(0).limit_bytes == 64 << 20 and client.name == "outside", client.name
                assert client._may_wait
            with vrambroker.Client(limit="32MiB", name="own") as client:
                assert client.device(0).limit_bytes == 32 << 20 and client.name == "own", client.name
        """, **environment)
        self.run_with_daemon("""
            import vrambroker
            try:
                vrambroker.Client()
            except vrambroker.Error as error:
                assert error.code == vrambroker.Code.INVALID_ARGUMENT, error
                assert "VRAMBROKER_LIMIT: '3' is ambiguous" in str(error), error
            else:
                raise AssertionError("no error")
        """, VRAMBROKER_LIMIT="3")

    def test_the_table_of_amounts(self):
        support.run("""
            import re, unittest
            from vrambroker import _library
            library, check, seen = _library.load(%r), unittest.TestCase(), 0
            with open(%r) as file:
                for line in file:
                    kind, _, rest = line.rstrip("\\n").partition(" '")
                    text, _, value = rest.rpartition("' ")
                    read = {"size": library.size, "duration": library.milliseconds}.get(kind)
                    if read is None:
                        continue
                    seen += 1
                    if value.startswith("! "):
                        with check.assertRaisesRegex(ValueError, re.escape(value[2:]), msg=line):
                            read("it", text)
                    else:
                        check.assertEqual(read("it", text), int(value) if kind == "size" else -(-int(value) // 1000000), line)
            assert seen > 50, seen
        """ % (support.LIBRARY, os.path.join(support.HERE, os.pardir, "support", "amounts.txt")))

    def test_wrong_arguments(self):
        self.run_with_daemon("""
            import vrambroker
            def raises(kind, call, *texts):
                try:
                    call()
                except kind as error:
                    for text in texts:
                        assert text in str(error), (text, str(error))
                    return error
                raise AssertionError("no %s: %s" % (kind, texts))
            for limit in (0.0, 1.5, -0.1, 0, -5, float("nan")):
                raises(ValueError, lambda: vrambroker.Client(limit=limit), "limit", repr(limit))
            for limit in (True, [], b"8GiB"):
                raises(TypeError, lambda: vrambroker.Client(limit=limit), "limit")
            raises(ValueError, lambda: vrambroker.Client(wait=-1.0), "wait")
            raises(TypeError, lambda: vrambroker.Client(wait=[]), "wait")
            raises(TypeError, lambda: vrambroker.Client(name=5), "name", "5")
            raises(TypeError, lambda: vrambroker.Client(alloc_conf=5), "alloc_conf", "5")
            raises(TypeError, lambda: vrambroker.Client(socket_dir=5), "socket_dir", "5")
            raises(ValueError, lambda: vrambroker.Client(wait="soon"), "wait: 'soon' is not a duration")
            raises(ValueError, lambda: vrambroker.Client(connect_timeout="30"), "connect_timeout: ", "write 30s")
            raises(vrambroker.Error, lambda: vrambroker.Client(wait="2h"), "wait: 2h")
            raises(ValueError, lambda: vrambroker.Client(placement="near"), "placement", "near")
            assert raises(vrambroker.Error, lambda: vrambroker.Client(limit="8 apples"), "limit", "8 apples").code == 3
            assert raises(vrambroker.Error, lambda: vrambroker.Client(guarantee="x"), "guarantee").code == 3
            assert raises(vrambroker.Error, lambda: vrambroker.Client(devices=[0, "7"]), "devices: no device 7").code == 5
            assert raises(vrambroker.Error, lambda: vrambroker.Client(devices=[]), "devices: '' is neither").code == 3
            raises(TypeError, lambda: vrambroker.Client(devices=[0.5]), "devices: 0.5 is neither")
            raises(TypeError, lambda: vrambroker.Client(devices=True), "devices: True is neither")
            vrambroker.Client(devices=0).close()
            assert raises(vrambroker.Error, lambda: vrambroker.Client(guarantee="8MiB"), "guarantee", "policy").code == 7
            lines = []
            with vrambroker.Client(name="no spaces h\\u00e9re", log=lines.append) as client:
                assert client.name == "no_spaces_h_re", client.name
            assert len(lines) == 1 and "the session is called no_spaces_h_re: " in lines[0], lines
            raises(vrambroker.Error, lambda: vrambroker.Client(alloc_conf="max_split_size_mb:x"), "max_split_size_mb")
            client = vrambroker.Client()
            assert raises(vrambroker.Error, lambda: client.malloc(0), "bytes").code == 3
            raises(TypeError, lambda: client.malloc(1.5), "bytes")
            raises(ValueError, lambda: client.malloc("1 apple"), "bytes: '1 apple' is not a size")
            raises(ValueError, lambda: client.lease_segment("40%"), "bytes: '40%' is not a size")
            raises(ValueError, lambda: client.malloc(-1), "bytes")
            for call in (lambda: client.malloc(5, device=7), lambda: client.device(-1), lambda: client.memory_stats(3),
                         lambda: client.memory_info(1), lambda: client.lease_segment(5, 1)):
                assert raises(vrambroker.Error, call, "device").code == vrambroker.Code.NOT_FOUND
            buffer = client.malloc(100)
            assert raises(vrambroker.Error, lambda: buffer.write(b"x", 100)).code == vrambroker.Code.OUT_OF_RANGE
            assert raises(vrambroker.Error, lambda: buffer.read(2, 99)).code == vrambroker.Code.OUT_OF_RANGE
            raises(TypeError, lambda: buffer.write("text"))
            buffer.free()
            assert raises(vrambroker.Error, buffer.read, "freed").code == vrambroker.Code.FAILED_PRECONDITION
            client.close()
            client.close()
            for call in (lambda: client.malloc(5), client.status, lambda: client.name, client.empty_cache):
                assert raises(vrambroker.Error, call, "closed").code == vrambroker.Code.FAILED_PRECONDITION
            assert "closed" in repr(client)
            assert str(raises(vrambroker.Error, lambda: vrambroker.Client(placement="remote").lease_segment(5))).startswith(
                "FAILED_PRECONDITION")
        """)

    def test_streams(self):
        self.run_with_daemon("""
            import vrambroker
            class Stream:  # as torch.cuda.Stream
                def __init__(self, number):
                    self.cuda_stream = number
            class OtherStream:  # CUDA's protocol
                def __cuda_stream__(self):
                    return 0, 9
            with vrambroker.Client() as client:
                def allocated():
                    return client.memory_stats()["allocated_bytes.all.current"]
                for stream in (0, 5, (1 << 64) - 1, Stream(7), OtherStream()):
                    buffer = client.malloc(100, stream=stream)
                    buffer.record_stream(stream)
                    buffer.free(stream=stream)
                client.malloc(100, stream=None).free(stream=None)
                assert allocated() == 0
                buffer = client.malloc(100)
                for kind, streams in ((TypeError, ("3", 1.5, True, object(), Stream("7"), Stream(None))),
                                      (ValueError, (-1, 1 << 64, Stream(-1)))):
                    for stream in streams:
                        for call in (lambda: buffer.free(stream=stream), lambda: buffer.record_stream(stream),
                                     lambda: client.malloc(100, stream=stream)):
                            try:
                                call()
                            except kind as error:
                                assert "stream" in str(error), error
                            else:
                                raise AssertionError(stream)
                assert buffer.pointer and allocated() == 512
                buffer.free(stream=Stream(3))
                assert not buffer.pointer and allocated() == 0
                for device in (1 << 32, -(1 << 40)):
                    try:
                        client.malloc(100, device=device)
                    except vrambroker.Error as error:
                        assert error.code == vrambroker.Code.NOT_FOUND, error
                    else:
                        raise AssertionError(device)
        """)

    def test_threads(self):
        self.run_with_daemon("""
            import threading
            import vrambroker
            client = vrambroker.Client()
            problems = []
            def work(number):
                try:
                    for turn in range(200):
                        with client.malloc(1000 + number, device=0) as buffer:
                            buffer.write(bytes([number]) * 1000)
                            assert buffer.read(1000) == bytes([number]) * 1000
                        if turn % 50 == 0:
                            try:
                                client.malloc(1 << 40 + number)
                            except vrambroker.OutOfMemoryError as error:
                                assert error.requested_bytes == 1 << 40 + number  # the error of this thread
                except BaseException as error:
                    problems.append(error)
            threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
            [thread.start() for thread in threads]
            [thread.join() for thread in threads]
            assert not problems, problems
            assert client.memory_stats()["allocated_bytes.all.current"] == 0
            # Closed while others call: every call is done or refused.
            started = threading.Barrier(5)
            def use():
                started.wait()
                try:
                    while True:
                        client.malloc(100).free()
                except vrambroker.Error as error:
                    problems.append(error.code)
            threads = [threading.Thread(target=use) for _ in range(4)]
            [thread.start() for thread in threads]
            started.wait()
            client.close()
            [thread.join() for thread in threads]
            assert problems == [vrambroker.Code.FAILED_PRECONDITION] * 4, problems
        """)

    def test_fork(self):
        self.run_with_daemon("""
            import os
            import vrambroker
            client = vrambroker.Client()
            buffer = client.malloc(100)
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    client.malloc(100)
                except vrambroker.Error as error:
                    if error.code == vrambroker.Code.FAILED_PRECONDITION and "fork" in str(error):
                        code = 7
                del buffer, client  # frees nothing, and ends nothing
                os._exit(code)
            assert os.waitpid(child, 0)[1] == 7 << 8
            buffer.write(b"parent")
            assert buffer.read(6) == b"parent"
            assert client.memory_stats()["allocated_bytes.all.current"] == 512
        """)

    def test_children_that_end_as_programs_do(self):
        # The child ends with sys.exit(), which runs all exit handlers, and with a process of multiprocessing, which
        # does not.
        self.run_with_daemon(WAITING, """
            import multiprocessing, sys
            import vrambroker.torch
            client = vrambroker.Client(name="job", on_lost=print, log=print)
            held, view = client.malloc(100), client.malloc(100).memoryview()
            def work():
                assert "fork" in refused(client)
                sys.exit(7)
            child = os.fork()
            if child == 0:
                work()
            assert os.waitpid(child, 0)[1] == 7 << 8
            process = multiprocessing.get_context("fork").Process(target=work)
            process.start()
            process.join()
            assert process.exitcode == 7
            held.write(b"parent")
            assert lives("job") and client.memory_stats()["allocated_bytes.all.current"] == 1024
        """)

    def test_fork_while_other_threads_are_inside(self):
        # Other threads are inside a client, its lock, and the locks of the modules.
        self.run_with_daemon(WAITING, """
            import signal
            import vrambroker.torch
            client = vrambroker.Client(name="job", wait=3600)
            held = client.malloc(100)
            view = client.malloc(100).memoryview()
            holder, most = hold()
            threading.Thread(target=refused, args=(client,), daemon=True).start()
            wait_for_calls(client, 1)
            inside, done = threading.Barrier(2), threading.Event()
            def work():
                with client._idle, vrambroker._library._loading, vrambroker.torch._lock:
                    inside.wait()
                    done.wait()
            threading.Thread(target=work, daemon=True).start()
            inside.wait()
            child = os.fork()
            if child == 0:
                signal.alarm(60)  # ends a child that hangs
                code = 1
                try:
                    for call in (client.status, held.read, lambda: client.malloc(1), held.memoryview):
                        try:
                            call()
                        except vrambroker.Error as error:
                            assert error.code == vrambroker.Code.FAILED_PRECONDITION and "fork" in str(error), error
                    held.free()
                    client.close()
                    assert vrambroker.load() and vrambroker.torch.status().mode is None
                    del held, view, client
                    code = 7
                finally:
                    os._exit(code)
            assert os.waitpid(child, 0)[1] == 7 << 8
            done.set()
            held.write(b"parent")
            most.free()
        """)

    def test_fork_after_a_connect_that_found_no_daemon(self):
        self.run_with_daemon("""
            import os, tempfile
            import vrambroker
            with tempfile.TemporaryDirectory() as nowhere:
                try:
                    vrambroker.Client(socket_dir=nowhere)
                except vrambroker.Error as error:
                    assert error.code == vrambroker.Code.UNAVAILABLE, error
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    with vrambroker.Client() as client, client.malloc(100) as buffer:
                        buffer.write(b"child")
                        assert buffer.read(5) == b"child"
                    code = 7
                finally:
                    os._exit(code)
            assert os.waitpid(child, 0)[1] == 7 << 8
            vrambroker.Client().malloc(100)
        """)

    def test_signals_while_the_main_thread_waits(self):
        self.run_with_daemon(WAITING, """
            import signal
            def signal_soon(number):  # once the next request is under way
                while threading.active_count() > 1:  # of one that was given up
                    time.sleep(0.001)
                before = calls(client)
                def send():
                    wait_for_calls(client, before + 1)
                    os.kill(os.getpid(), number)
                threading.Thread(target=send, daemon=True).start()
            for placement in ("leased", "whole", "remote"):
                client = vrambroker.Client(wait=3600, placement=placement.replace("whole", "leased"))
                request = client.lease_segment if placement == "whole" else client.malloc
                holder, most = hold()
                for turn in range(3):
                    signal_soon(signal.SIGINT)
                    try:
                        request(200 << 20)
                    except KeyboardInterrupt:
                        pass
                    else:
                        raise AssertionError("Ctrl-C was lost")
                # A handler that raises nothing is called at once, too, and the waiting goes on.
                signal.signal(signal.SIGUSR1, lambda *_: most.free())
                signal_soon(signal.SIGUSR1)
                buffer = request(200 << 20)
                buffer.write(b"mine")
                buffer.free()
                # Nothing came of what was given up.
                assert client.memory_stats()["allocated_bytes.all.current"] == 0
                client.close()
                holder.malloc(250 << 20)
                holder.close()
        """)

    def test_a_request_of_the_main_thread_flushes_once(self):
        self.run_with_daemon(WAITING, """
            for placement in ("leased", "whole"):
                client = vrambroker.Client(wait=0.001, limit="64MiB")
                client.malloc(10 << 20).free()
                request = client.lease_segment if placement == "whole" else client.malloc
                try:
                    request(100 << 20)
                except vrambroker.OutOfMemoryError:
                    pass
                else:
                    raise AssertionError("beyond the limit")
                stats = client.memory_stats()
                assert stats["num_device_free"] == 1, stats["num_device_free"]  # given back
                assert stats["num_alloc_retries"] == (placement == "leased"), stats["num_alloc_retries"]
                client.close()
        """)

    def test_closed_by_a_signal_while_the_main_thread_waits(self):
        self.run_with_daemon(WAITING, """
            import signal
            holder, most = hold()
            client = vrambroker.Client(name="job", wait=3600)
            signal.signal(signal.SIGUSR1, lambda *_: client.close())
            def send():
                wait_for_calls(client, 1)
                os.kill(os.getpid(), signal.SIGUSR1)
            threading.Thread(target=send, daemon=True).start()
            assert "closed" in refused(client)
            assert not lives("job")
        """)

    def test_closed_by_a_handler_inside_a_call_of_its_thread(self):
        self.run_with_daemon(WAITING, """
            import signal
            for turn in range(3):
                client = vrambroker.Client(name="job")
                held = client.malloc(100)
                signal.signal(signal.SIGUSR1, lambda *_: client.close())
                check = vrambroker._library.Library.check
                def interrupted(library, code):
                    signal.raise_signal(signal.SIGUSR1)
                    check(library, code)
                client._library.check = interrupted.__get__(client._library)
                client.status() if turn else held.free()
                del client._library.check
                assert client.malloc and "closed" in refused(client) and not held.pointer
                assert not lives("job")  # it ended with the call
        """)

    # Calls a handler between any two steps of Python. The handler may close the client, or raise: no memory is lost
    # then.
    def test_handlers_at_any_step(self):
        self.run_with_daemon(WAITING, """
            import gc, sys
            package = os.path.dirname(vrambroker.__file__)
            def work(client):
                first, second = client.malloc(1000), client.malloc(5000)
                view = second.memoryview()
                first.write(b"x")
                first.free(stream=3)
                client.close()
                view.release()
            def interrupt(client):
                raise KeyboardInterrupt
            for handler in (vrambroker.Client.close, interrupt):
                step, interrupted = 0, True
                while interrupted:
                    client = vrambroker.Client(name="job")
                    assert client.name == "job", (handler, step, "the session before is still there")
                    count, interrupted = 0, False
                    def trace(frame, event, _):
                        global count, interrupted
                        if not frame.f_code.co_filename.startswith(package):
                            return None
                        frame.f_trace_opcodes = True
                        if event in ("line", "opcode") and not interrupted:
                            count += 1
                            if count > step:
                                interrupted = True
                                handler(client)
                        return trace
                    sys.settrace(trace)
                    try:
                        work(client)
                    except vrambroker.Error as error:
                        assert error.code == vrambroker.Code.FAILED_PRECONDITION, error
                    except (KeyboardInterrupt, SystemError):  # the latter from tracing itself, up to Python 3.9
                        pass
                    sys.settrace(None)
                    client.close()
                    gc.collect()
                    step += 7  # some of them: all take long
                assert step > 100, step
        """)

    def test_closed_while_others_wait(self):
        self.run_with_daemon(WAITING, """
            holder, most = hold()
            for placement in ("leased", "remote"):
                client = vrambroker.Client(name="job", wait=3600, placement=placement)
                errors = []
                threads = [threading.Thread(target=lambda: errors.append(refused(client))) for _ in range(3)]
                [thread.start() for thread in threads]
                wait_for_calls(client, 3)
                client.close()
                [thread.join() for thread in threads]
                assert len(errors) == 3 and all("closed" in error for error in errors), errors
                assert not lives("job")
        """)

    def test_the_interpreter_ends_while_others_wait(self):
        self.run_with_daemon(WAITING, """
            holder, most = hold()
            client = vrambroker.Client(name="job", wait=3600, log=print)
            threading.Thread(target=refused, args=(client,), daemon=True).start()
            wait_for_calls(client, 1)
        """)

    def test_the_daemon_dies_and_comes_back(self):
        program = """
            import os, signal, threading
            import vrambroker
            lost, logged = threading.Event(), threading.Event()
            def on_lost(error):
                assert isinstance(error, vrambroker.Error)
                lost.set()
            def log(line):
                assert isinstance(line, str)
                logged.set()
            client = vrambroker.Client(on_lost=on_lost, log=log, call_timeout=5)
            buffer, segment = client.malloc(5 << 20), client.lease_segment(2 << 20)
            buffer.write(b"kept")
            os.kill(%d, signal.SIGKILL)
            assert lost.wait(60)
            assert buffer.read(4) == b"kept"
            buffer.write(b"more", 4)
            try:
                client.malloc(100 << 20)
            except vrambroker.Error as error:
                assert error.code == vrambroker.Code.UNAVAILABLE, error
            else:
                raise AssertionError("grew without a daemon")
            try:
                client.status()
            except vrambroker.Error as error:
                assert error.code == vrambroker.Code.UNAVAILABLE, error
            else:
                raise AssertionError("no word of the dead daemon")
            assert logged.wait(60)
            buffer.free()
            client.malloc(4 << 20)  # in the segment of the other
            try:
                segment.free(stream=3)
            except vrambroker.Error as error:
                assert error.code == vrambroker.Code.UNAVAILABLE, error
            assert segment.pointer == 0  # it is not mapped any more
            print("done")
        """
        self.assertIn("done", self.run_with_daemon(program % self.daemon.process.pid))

    def test_figures_in_pytorchs_words(self):
        self.run_with_daemon(HELPERS, """
            import vrambroker
            MIB = 1 << 20
            def figures(client):
                return (client.memory_allocated() // MIB, client.max_memory_allocated() // MIB,
                        client.memory_reserved(device=0) // MIB, client.max_memory_reserved(0) // MIB)
            for placement in ("leased", "remote"):
                with vrambroker.Client(name="figures", placement=placement) as client:
                    assert figures(client) == (0, 0, 0, 0), figures(client)
                    held, more = client.malloc(12 * MIB), client.malloc(30 * MIB)
                    more.free()
                    assert figures(client) == (12, 42, 42, 42), figures(client)
                    assert client.empty_cache() == 30 * MIB
                    assert figures(client) == (12, 42, 12, 42), figures(client)
                    client.reset_peak_memory_stats()
                    assert figures(client) == (12, 12, 12, 12), figures(client)
                    stats = client.memory_stats()
                    for key in ("allocated_bytes.all.current", "allocated_bytes.large_pool.peak", "num_ooms",
                                "allocated_bytes.small_pool.allocated", "reserved_bytes.all.freed", "segment.all.current",
                                "active.all.peak", "active_bytes.all.current", "inactive_split.all.current",
                                "inactive_split_bytes.all.peak", "requested_bytes.all.current", "allocation.all.allocated",
                                "oversize_allocations.current", "oversize_segments.peak", "max_split_size",
                                "num_alloc_retries", "num_sync_all_streams", "num_device_alloc", "num_device_free"):
                        assert isinstance(stats[key], int), key
                    assert stats["allocated_bytes.all.current"] == client.memory_allocated()
                    # One table, here and in vramctl.
                    table = client.memory_summary()
                    lines = table.splitlines()
                    assert lines[5] == "|        Metric         | Cur Usage  | Peak Usage | Tot Alloc  | Tot Freed  |", table
                    assert lines[7] == "| Allocated memory      |  12288 KiB |  12288 KiB |  43008 KiB |  30720 KiB |", table
                    assert lines[8] == "|       from large pool |  12288 KiB |  12288 KiB |  43008 KiB |  30720 KiB |", table
                    names = [line[2:23].strip() for line in lines if line[24:25] == "|" and " from " not in line]
                    assert names == ["Metric", "Allocated memory", "Active memory", "Requested memory",
                                     "GPU reserved memory", "Non-releasable memory", "Allocations", "Active allocs",
                                     "GPU reserved segments", "Non-releasable allocs", "Oversize allocations",
                                     "Oversize GPU segments"], names
                    short = client.memory_summary(abbreviated=True)
                    assert short == "".join(line + chr(10) for line in lines if " from " not in line), short
                    assert client.memory_summary(0, False) == table
                    assert ctl("summary", client.name) == table
                    assert ctl("summary", client.name, "--abbreviated") == short
                    # None is the default device, as in PyTorch.
                    assert client.memory_allocated(None) == client.memory_allocated(0) == 12 * MIB
                    assert client.memory_summary(None) == table and client.memory_info(device=None) == client.memory_info(0)
                    client.reset_peak_memory_stats(None)
                    client.malloc(100, device=None).free()
                    refused(lambda: client.device(None), TypeError, "None")
                    # Totals alone.
                    if placement == "leased":
                        client.malloc(20 * MIB).free()
                        client.reset_accumulated_memory_stats()
                        assert client.max_memory_allocated() == 32 * MIB
                        assert client.memory_stats()["allocation.all.allocated"] == 0
                        assert client.memory_stats()["num_device_alloc"] == 0
                    else:
                        refused(client.reset_accumulated_memory_stats, vrambroker.Code.FAILED_PRECONDITION, "together with the peaks")
                    for call in (client.memory_allocated, client.max_memory_allocated, client.memory_reserved,
                                 client.max_memory_reserved, client.memory_stats, client.memory_summary,
                                 client.reset_peak_memory_stats, client.reset_accumulated_memory_stats):
                        refused(lambda: call(device="cuda"), TypeError, "device: 'cuda'")
                        refused(lambda: call(device=True), TypeError, "device: True")
                        refused(lambda: call(7), vrambroker.Code.NOT_FOUND, "no device 7")
                        refused(lambda: call(-1), vrambroker.Code.NOT_FOUND, "no device -1")
                for call in (client.memory_allocated, client.memory_reserved, client.memory_summary, client.empty_cache):
                    refused(call, vrambroker.Code.FAILED_PRECONDITION, "the client is closed")
        """)

    def test_one_table_here_and_in_vramctl(self):
        self.run_with_daemon(HELPERS, """
            import vrambroker
            MIB = 1 << 20
            def same(client, what):
                # At once: the daemon asks a session that leases for its figures.
                here, there = client.memory_summary(), ctl("summary", client.name)
                assert here == there, (what, here, there)
                return here.splitlines()
            def refused_memory(client):
                try:
                    client.malloc(1024 * MIB)
                except vrambroker.OutOfMemoryError:
                    return
                assert False, "it was not refused"
            for placement in ("leased", "remote"):
                with vrambroker.Client(name=placement + "-" * 56, placement=placement, limit="192MiB",
                                       alloc_conf="max_split_size_mb:32") as client:
                    same(client, "nothing yet")
                    held = [client.malloc(size) for size in (700, MIB, 3 * MIB, 5 * MIB, 4 * MIB, 40 * MIB)]
                    held.pop(2).free()
                    lines = same(client, "holes, and a block of its own size")
                    assert "   1   " in lines[43] and lines[43].startswith("| Oversize allocations"), lines
                    refused_memory(client)
                    assert "CUDA OOMs: 1 " in same(client, "a refusal")[3]
                    held.pop().free()
                    same(client, "something idle")
                    client.empty_cache()
                    same(client, "nothing idle")
                    if placement == "leased":
                        client.set_per_process_memory_fraction(0.5)
                        refused_memory(client)
                        same(client, "a refusal that the daemon does not hear of")
                        client.reset_accumulated_memory_stats()
                        same(client, "new totals")
                    client.reset_peak_memory_stats()
                    same(client, "new peaks")
                    client.reset_memory_stats()
                    same(client, "new everything")
                    held.clear()
        """)

    def test_a_memory_fraction(self):
        self.run_with_daemon(HELPERS, """
            import vrambroker
            MIB = 1 << 20
            client = vrambroker.Client(name="half", limit="192MiB")
            def oom(call):
                try:
                    call()
                except vrambroker.OutOfMemoryError as error:
                    return error
                raise AssertionError("no error")
            held = client.malloc(40 * MIB)
            client.set_per_process_memory_fraction(0.25)  # of 256 MiB
            assert client.device(0).limit_bytes == client.memory_info()[1] == 64 * MIB
            for call in (lambda: client.malloc(30 * MIB), lambda: client.lease_segment(30 * MIB)):
                error = oom(call)
                assert error.cause == "LIMIT" and error.limit_bytes == 64 * MIB, error.__dict__
                assert error.requested_bytes == 30 * MIB and error.reserved_bytes == error.allocated_bytes == 40 * MIB
                assert error.room_bytes == 24 * MIB and error.device_capacity_bytes == 256 * MIB
                assert "memory fraction that this process has set allows it" in str(error) and "24.00 MiB" in str(error), error
                assert "Set a larger memory fraction" in error.advice and error.advice in str(error)
            assert client.memory_stats()["num_ooms"] == 2
            # What fits is not refused, and what is idle makes room.
            client.malloc(24 * MIB).free()
            client.lease_segment(20 * MIB).free()
            assert client.memory_reserved() == 40 * MIB
            # Below what is held: nothing is taken away, and nothing more comes.
            client.set_per_process_memory_fraction(0.0, device=0)
            assert oom(lambda: client.malloc(2 * MIB)).room_bytes == 0
            held.write(b"kept")
            assert held.read(4) == b"kept" and client.memory_reserved() == 40 * MIB
            # Never above the session's limit.
            client.set_per_process_memory_fraction(1.0, 0)
            assert client.device(0).limit_bytes == 192 * MIB
            client.malloc(150 * MIB).free()
            error = oom(lambda: client.malloc(160 * MIB))
            assert error.limit_bytes == 192 * MIB and "fraction" not in str(error), error
            client.set_per_process_memory_fraction(0.9)
            assert client.device(0).limit_bytes == 192 * MIB
            error = oom(lambda: client.malloc(160 * MIB))
            assert error.limit_bytes == 192 * MIB and "fraction" not in str(error), error
            # An operator's limit and this one: the lower one.
            client.set_per_process_memory_fraction(0.5)
            ctl("limit", client.name, "96MiB")
            wait_for(lambda: client.device(0).limit_bytes == 96 * MIB)
            ctl("limit", client.name, "250MiB")
            wait_for(lambda: client.device(0).limit_bytes == 128 * MIB)
            assert oom(lambda: client.malloc(100 * MIB)).limit_bytes == 128 * MIB
            assert oom(lambda: client.malloc(1 << 40)).cause == "LARGER_THAN_DEVICE"
            # Threads that grow at the same time stay within it together.
            held.free()
            client.empty_cache()
            client.reset_peak_memory_stats()
            got = []
            def take():
                try:
                    got.append(client.malloc(12 * MIB))
                except vrambroker.OutOfMemoryError:
                    pass
            threads = [threading.Thread(target=take) for _ in range(20)]
            [thread.start() for thread in threads]
            [thread.join() for thread in threads]
            assert 0 < len(got) <= 10 and client.max_memory_reserved() <= 128 * MIB, len(got)
            # Wrong use.
            fraction = client.set_per_process_memory_fraction
            for wrong in (-0.1, 1.1, float("nan"), float("inf")):
                refused(lambda: fraction(wrong), ValueError, "fraction: ")
            for wrong in (1, True, "0.5", None):
                refused(lambda: fraction(wrong), TypeError, "fraction: ")
            refused(lambda: fraction(0.5, 7), vrambroker.Code.NOT_FOUND, "no device 7")
            refused(lambda: fraction(0.5, "cuda:0"), TypeError, "device: 'cuda:0'")
            assert client.device(0).limit_bytes == 128 * MIB
            client.close()
            refused(lambda: fraction(0.5), vrambroker.Code.FAILED_PRECONDITION, "the client is closed")
            with vrambroker.Client(placement="remote") as remote:
                refused(lambda: remote.set_per_process_memory_fraction(0.5), vrambroker.Code.FAILED_PRECONDITION,
                        "vramctl limit")
        """)

    def test_scopes(self):
        for placement in ("leased", "remote"):
            self.run_with_daemon("""
                import contextlib, threading
                import vrambroker
                placement = %r
                # With an hour's patience the main thread waits on another one, which is in its scopes.
                client = vrambroker.Client(name="scoped", placement=placement, limit=64 << 20, wait=3600)
                held = []

                def frames():
                    return {block["requested_size"]: [(frame["name"], frame["filename"]) for frame in block["frames"]]
                            for segment in client.memory_snapshot() for block in segment["blocks"]
                            if block["state"] == "active_allocated"}

                @vrambroker.memory_scope("layer3")
                def layer():
                    held.append(client.malloc(3000))

                with vrambroker.memory_scope("forward"):
                    layer()
                    other = threading.Thread(target=lambda: held.append(client.malloc(4000)))
                    other.start()
                    other.join()
                    held.append(client.malloc(5000))
                try:
                    with vrambroker.memory_scope("fails"):
                        raise KeyError
                except KeyError:
                    pass
                held.append(client.malloc(6000))
                found = frames()
                assert found == {3000: [("layer3", ""), ("forward", "")], 4000: [], 5000: [("forward", "")], 6000: []}, found

                # One object, entered again, within itself, and by another thread meanwhile.
                reused = vrambroker.memory_scope("reused")
                for size in (3100, 3200):
                    with reused:
                        held.append(client.malloc(size))
                        with reused:
                            other = threading.Thread(target=reused(lambda: held.append(client.malloc(size + 10))))
                            other.start()
                            other.join()
                            held.append(client.malloc(size + 20))
                        held.append(client.malloc(size + 30))
                    held.append(client.malloc(size + 40))
                    found = {bytes - size: [name for name, _ in of] for bytes, of in frames().items() if 0 <= bytes - size < 50}
                    assert found == {0: ["reused"], 10: ["reused"], 20: ["reused", "reused"], 30: ["reused"], 40: []}, found
                twice = contextlib.ExitStack()
                twice.enter_context(reused)
                other = threading.Thread(target=twice.close)  # is in no scope, and stays so
                other.start()
                other.join()
                reused.__exit__(None, None, None)
                held.append(client.malloc(3300))
                assert frames()[3300] == [], frames()

                # Opt-in: how the program has come there.
                def step():
                    with vrambroker.memory_scope("backward", stack=True):
                        held.append(client.malloc(7000))

                step()
                found = frames()[7000]
                assert found[0] == ("backward", ""), found
                assert [name for name, file in found[1:]] == ["step", "<module>"], found

                # Frames are deep, and names of any kind.
                def deep(n):
                    if n:
                        return deep(n - 1)
                    with vrambroker.memory_scope("bottom\\0\\ud800", stack=True):
                        held.append(client.malloc(8000))
                deep(200)
                assert frames()[8000][0][0].startswith("bottom"), frames()[8000]
                for wrong in (None, 7, b"bytes"):
                    try:
                        with vrambroker.memory_scope(wrong):
                            raise AssertionError(wrong)
                    except TypeError as error:
                        assert "name" in str(error), error
                while held:
                    held.pop().free()
                client.close()
            """ % placement)

    def test_recordings(self):
        with tempfile.TemporaryDirectory() as folder:
            for placement in ("leased", "remote"):
                self.run_with_daemon("""
                    import json, os, pathlib, pickle
                    import vrambroker
                    folder, placement = %r, %r
                    file = os.path.join(folder, placement + ".pickle")
                    client = vrambroker.Client(placement=placement)
                    client.record_memory_history(max_entries=1000)
                    with client.malloc(5000), client.malloc(7 << 20):
                        pass
                    held = client.malloc(3000)
                    client.dump_snapshot(file)
                    with open(file, "rb") as opened:
                        dumped = pickle.load(opened)
                    sizes = [event["size"] for event in dumped["device_traces"][0] if event["action"] == "alloc"]
                    assert sizes == [5000, 7 << 20, 3000], sizes
                    client.dump_snapshot(pathlib.Path(folder, placement + ".json"))
                    with open(os.path.join(folder, placement + ".json")) as opened:
                        assert len(json.load(opened)["device_traces"][0]) > len(dumped["device_traces"][0])
                    # The same in memory: what is held, and, in one of them, what happened.
                    snapshot = client.snapshot()
                    assert snapshot["segments"] == dumped["segments"] == client.memory_snapshot(), snapshot
                    assert snapshot["device_traces"][0][:3] == dumped["device_traces"][0][:3]
                    active = [block["requested_size"] for segment in client.memory_snapshot() for block in segment["blocks"]
                              if block["state"] == "active_allocated"]
                    assert active == [3000], active
                    # With PyTorch's names; and the last events only.
                    client._record_memory_history("all", max_entries=4)
                    for _ in range(9):
                        client.malloc(100).free()
                    assert 0 < len(client._snapshot()["device_traces"][0]) <= 8  # a free may be two
                    client._record_memory_history(True)
                    for _ in range(20):
                        client.malloc(100).free()
                    assert len(client._snapshot()["device_traces"][0]) > 20
                    client._dump_snapshot(file + "2")
                    assert os.path.getsize(file + "2") > 1000
                    for ends in (None, False, "state"):
                        client.record_memory_history(enabled=ends)
                    for context in (None, "state", "alloc", "all"):  # as PyTorch; the values say the same here
                        client.record_memory_history(None, context, "python")
                """ % (folder, placement))
                replayed = self.vramctl("replay", os.path.join(folder, placement + ".pickle"))
                self.assertEqual(replayed["allocations"], 3)
                self.assertEqual(replayed["peak_allocated_bytes"], 5120 + (7 << 20))

    def test_recordings_that_are_refused(self):
        with tempfile.TemporaryDirectory() as folder:
            self.run_with_daemon(HELPERS, """
                import resource, signal, time
                import vrambroker
                from vrambroker import Code
                folder, daemon = %r, %d
                client, remote = vrambroker.Client(log=lambda line: None), vrambroker.Client(placement="remote")
                record, dump = client.record_memory_history, client.dump_snapshot
                refused(lambda: record("some"), ValueError, "enabled: 'some'")
                refused(lambda: record(3), TypeError, "enabled: 3")
                for wrong in ("bad", True, 3):
                    refused(lambda: record(context=wrong), ValueError, "context: " + repr(wrong))
                for wrong in ("cpp", None):
                    refused(lambda: record(stacks=wrong), ValueError, "stacks: " + repr(wrong))
                refused(lambda: record(max_entries=0), ValueError, "max_entries: 0")
                refused(lambda: record(max_entries=-1), ValueError, "max_entries: -1")
                refused(lambda: record(max_entries=1.5), TypeError, "max_entries: 1.5")
                refused(lambda: record(max_entries=True), TypeError, "max_entries: True")
                refused(lambda: record(clear_history=True), ValueError, "clear_history")
                refused(lambda: dump(3), TypeError, "int")
                refused(lambda: dump("a\\0b"), ValueError, "null byte")
                refused(lambda: dump(""), Code.INVALID_ARGUMENT, "the name of a file is needed")
                refused(lambda: dump(folder), Code.INVALID_ARGUMENT, folder + ": it exists and is not a file")
                refused(lambda: dump(folder + "/no/file"), Code.NOT_FOUND, folder + "/no/file: cannot write into its folder")
                file = folder + "/file"
                dump(file)
                before = os.path.getsize(file)
                held = [client.malloc(512) for _ in range(100)]
                signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                resource.setrlimit(resource.RLIMIT_FSIZE, (1000, -1))  # as on a disk that is full
                try:
                    dump(file)
                except vrambroker.Error as error:
                    assert "cannot write " + file + ": write: File too large" in str(error), error
                else:
                    raise AssertionError("more than fits")
                resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
                assert os.listdir(folder) == ["file"] and os.path.getsize(file) == before
                # What is in this process outlasts the daemon.
                os.kill(daemon, signal.SIGKILL)
                refused(lambda: [time.sleep(0.01) for _ in iter(client.status, 1)], Code.UNAVAILABLE, "")
                dump(file)
                assert os.path.getsize(file) > before
                record(max_entries=10)
                assert client.memory_snapshot()
                refused(lambda: [time.sleep(0.01) for _ in iter(remote.status, 1)], Code.UNAVAILABLE, "")
                refused(lambda: remote.dump_snapshot(file), Code.UNAVAILABLE, "")
                refused(lambda: remote.record_memory_history(), Code.UNAVAILABLE, "")
                refused(remote.memory_snapshot, Code.UNAVAILABLE, "")
                client.close()
                for call in (record, dump, client.snapshot, client.memory_snapshot):
                    refused(call, Code.FAILED_PRECONDITION, "the client is closed")
            """ % (folder, self.daemon.process.pid))

    def test_closed_by_its_own_callback(self):
        self.run_with_daemon("""
            import os, signal, threading
            import vrambroker
            closed = threading.Event()
            def on_lost(error):
                client.close()
                closed.set()
            client = vrambroker.Client(on_lost=on_lost, log=lambda line: None)
            held = client.malloc(100)
            os.kill(%d, signal.SIGKILL)
            assert closed.wait(60)
            assert not held.pointer
        """ % self.daemon.process.pid)

    def test_the_last_reference_goes_in_a_callback_while_another_runs(self):
        # Functions that the library calls live on until both callbacks end, and no longer.
        self.assertIn("done", self.run_with_daemon(FUNCTIONS, """
            import os, signal, threading, weakref
            alive, logging, dropped = {}, threading.Event(), threading.Event()
            def on_lost(error):
                global client
                assert logging.wait(60)
                try:  # a callback within this one
                    vrambroker.Client(name="?", log=lambda line: None, socket_dir="/nowhere")
                except vrambroker.Error:
                    pass
                gone = weakref.ref(client)
                client = None
                alive["client"] = gone() is not None
                dropped.set()
                alive["on_lost"] = living()
            def log(line):
                if not dropped.is_set():
                    logging.set()
                    assert dropped.wait(60)
                    alive["log"] = living()
            client = vrambroker.Client(on_lost=on_lost, log=log)
            os.kill(%d, signal.SIGKILL)
            wait_for(lambda: len(alive) == 3)
            assert alive == {"client": False, "on_lost": 2, "log": 2}, alive
            wait_for(lambda: living() == 0)
            print("done")
        """ % self.daemon.process.pid))

    def test_what_the_library_calls_lives_as_long_as_the_session(self):
        self.run_with_daemon(FUNCTIONS, """
            with vrambroker.Client(log=print, on_lost=print) as client:
                assert living() == 2
            client = None
            assert living() == 0
            try:
                vrambroker.Client(log=print, on_lost=print, socket_dir="/nowhere")
            except vrambroker.Error as error:
                assert error.code == vrambroker.Code.UNAVAILABLE, error
            else:
                raise AssertionError("connected")
            assert living() == 0
        """)

    def test_closed_while_the_daemon_is_stopped(self):
        # Each pending call would wait for an hour.
        self.assertIn("done", self.run_with_daemon("""
            import os, signal
            import vrambroker
            daemon = %d
            client = vrambroker.Client(call_timeout=3600)
            held = [client.lease_segment(2 << 20) for _ in range(20)]
            view = client.malloc(1 << 10).memoryview()  # keeps its segment, and the session
            client.malloc(100 << 20).free()  # in the cache
            os.kill(daemon, signal.SIGSTOP)
            client.close()
            assert not any(buffer.pointer for buffer in held)
            os.kill(daemon, signal.SIGCONT)
            other = vrambroker.Client(wait=100, call_timeout=3600)
            most = other.malloc(254 << 20)  # all but that segment: the daemon has heard of the others
            view[0] = 1
            del view
            other.lease_segment(2 << 20)
            print("done")
        """ % self.daemon.process.pid))

    def test_what_is_held_when_the_interpreter_ends(self):
        self.assertEqual("", self.run_with_daemon("""
            import vrambroker
            client = vrambroker.Client(log=print, on_lost=print)
            held = [client.malloc(1 << 20) for _ in range(3)]
            view = held[0].memoryview()
            with vrambroker.Client(log=print, on_lost=print) as closed:
                kept = closed.malloc(1 << 20).memoryview()
        """))


if __name__ == "__main__":
    unittest.main(verbosity=2)
