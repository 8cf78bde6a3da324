#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Programs with few descriptors, threads or little address space: gRPC would end such programs, or wait for ever."""
import os
import resource
import subprocess
import unittest

import support

MIB = 1 << 20
STACK = 8 * MIB  # stack of a thread on most machines
NOBODY = 64987  # a user without processes


def bounded(command, bound, **environment):
    """Runs `command` in a process that calls `bound` first."""
    return subprocess.run(command, preexec_fn=bound, env=dict(os.environ, **environment), stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=support.PATIENCE, check=False)


def with_address_space(size):
    def bound():
        resource.setrlimit(resource.RLIMIT_STACK, (STACK, STACK))
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
    return bound


def with_threads(most):
    def bound():
        if os.getuid() == 0:  # the kernel does not count root's processes
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
        resource.setrlimit(resource.RLIMIT_NPROC, (most, most))
    return bound


class StartingTest(support.DaemonTest):
    CONFIG = 'socket_mode: "0666"'

    def setUp(self):
        super().setUp()
        os.chmod(self.daemon.dir, 0o711)

    def vramctl_bounded(self, bound, *arguments):
        return bounded([os.environ["VRAMCTL"], "--socket-dir", self.daemon.dir, *arguments], bound)

    def refused(self, result):
        self.assertEqual(1, result.returncode, result)
        self.assertTrue(result.stderr.startswith("vramctl: "), result.stderr)
        return result.stderr

    def test_a_client_without_descriptors(self):
        program = """
            import os, resource
            import vrambroker
            from vrambroker import _library
            _library.load()
            try:
                vrambroker.Client(socket_dir="/nowhere")  # loads all that it needs
            except vrambroker.Error:
                pass
            most, held = 64, []
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
            try:
                while True:
                    held.append(os.open("/dev/null", os.O_RDONLY))
            except OSError:
                pass
            for _ in range(%d):
                os.close(held.pop())
            try:
                with vrambroker.Client() as client:
                    client.malloc(1 << 20).free()
                    print("served")
            except vrambroker.Error as error:
                assert error.code == vrambroker.Code.RESOURCE_EXHAUSTED, error
                print(error)
        """
        for free in (1, 2, 3, 4, 5):
            said = self.run_with_daemon(program % free)
            self.assertIn("needs 8 file descriptors to start, and %d can be opened" % (free - 1), said)
            self.assertIn("ulimit -n", said)
        self.assertIn("served", self.run_with_daemon(program % 12))

    def test_vramctl_without_descriptors(self):
        def bound():
            resource.setrlimit(resource.RLIMIT_NOFILE, (6, 6))
        self.assertIn("file descriptors", self.refused(self.vramctl_bounded(bound, "status")))

    @unittest.skipIf("VRAMBROKER_TEST_PRELOAD" in os.environ, "the sanitizer takes all of the address space")
    def test_vramctl_with_little_address_space(self):
        # Counts the refusals that name the address space; the daemon refuses requests above its memory in any case.
        # From 640 MiB on, the threads have room, also on a machine with 64 processors.
        refusals = 0
        for size in (40, 64, 80, 160, 329, 398, 640, 1200, 8192):
            for command in (["status"], ["hold", "1GiB"]):
                result = self.vramctl_bounded(with_address_space(size * MIB), *command)
                if size >= 640 and command == ["status"]:
                    self.assertEqual(0, result.returncode, result)
                elif result.returncode not in (0, 127):  # 127: the program itself does not fit
                    self.refused(result)
                    refusals += "address space (ulimit -v)" in result.stderr
        self.assertGreater(refusals, 0)

    @unittest.skipIf("VRAMBROKER_TEST_PRELOAD" in os.environ, "the sanitizer takes all of the address space")
    def test_the_daemon_with_little_address_space(self):
        result = bounded([os.environ["VRAMBROKERD"], "--socket-dir", os.path.join(self.daemon.dir, "another"),
                          "--device=host", "--capacity=16MiB", "--http-address=off"], with_address_space(128 * MIB))
        self.assertEqual(1, result.returncode, result)
        self.assertIn("threads to start", result.stderr)

    def test_vramctl_without_threads(self):
        if self.vramctl_bounded(with_threads(100), "--version").returncode != 0:
            self.skipTest("another user may not run vramctl where it is")
        for most in (1, 4, 8) if os.getuid() == 0 else (1,):
            for command in (["status"], ["hold", "1GiB"]):
                self.assertIn("ulimit -u", self.refused(self.vramctl_bounded(with_threads(most), *command)))


class ConnectionsTest(support.DaemonTest):
    CONFIG = "max_connections_per_uid: 1"

    def test_who_has_no_connection_left_is_told(self):
        program = self.start_program("import vrambroker")
        program.tell("client = vrambroker.Client()")
        words = "the daemon closed the connection before it answered"
        with self.assertRaisesRegex(support.ToldError, "UNAVAILABLE: " + words + ".*max_connections_per_uid"):
            program.tell("vrambroker.Client()")
        with self.assertRaisesRegex(AssertionError, words):
            self.vramctl("status")


if __name__ == "__main__":
    unittest.main(verbosity=2)
