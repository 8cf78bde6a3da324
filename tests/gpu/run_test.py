#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests the runner of the GPU checks, with steps that hang, die, lie and stay silent. Needs no GPU, and uses none."""
import contextlib
import io
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from unittest import mock

import capabilities
import compare
import machine
import run
import runner
from runner import Check, Outcome, Results, Step


def python(code, **more):
    """Makes a step that runs `code`, with `folder` in it."""
    return Step("step", **{"command": lambda folder, seconds: [
        sys.executable, "-B", "-c", f"import json, os, pathlib, signal, subprocess, sys, time\nfolder = pathlib.Path({str(folder)!r})\n{code}"],
        "read": run.reported_checks, "limit": 600, **more})


def reports(*checks):
    return f"(folder / 'checks.json').write_text({json.dumps({'checks': list(checks)})!r})\n"


OK = {"name": "one", "result": "ok", "detail": "fine", "figures": {"us": 1.5}}


class RunnerTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = pathlib.Path(folder.name) / "out" / "results.json"
        self.results = Results(self.path, {"format": 1})

    def run_steps(self, *steps, budget=1000):
        with contextlib.redirect_stdout(io.StringIO()) as said:
            code = runner.run(list(steps), budget, self.results)
        self.said = said.getvalue()
        self.document = json.loads(self.path.read_text(encoding="utf-8"))
        return code

    def only_failure(self):
        failed = [c for c in self.document["checks"] if c["result"] == "fail"]
        self.assertEqual(len(failed), 1, self.document)
        return failed[0]

    def test_what_a_step_found_is_kept_and_said(self):
        self.assertEqual(self.run_steps(python(reports(OK))), 0)
        check, = self.document["checks"]
        self.assertEqual((check["step"], check["name"], check["result"], check["figures"]), ("step", "one", "ok", {"us": 1.5}))
        self.assertEqual(self.document["summary"], {"ok": 1, "fail": 0, "not_run": 0})
        self.assertTrue(self.document["complete"])
        self.assertRegex(self.said, r"^ok +step/one .*fine\n$")

    def test_a_failed_check_fails_the_run_and_brings_its_output(self):
        step = python("print('the reason')\n" + reports(OK, {"name": "two", "result": "fail", "detail": "wrong"}) + "sys.exit(1)")
        self.assertEqual(self.run_steps(step), 1)
        self.assertEqual(self.only_failure()["name"], "two")
        self.assertIn("the reason", self.only_failure()["output"])

    def test_a_step_that_hangs_is_ended_with_all_that_it_started(self):
        code = reports(OK) + "child = subprocess.Popen(['sleep', '1000'])\nprint(child.pid, flush=True)\ntime.sleep(1000)"
        for limit in (10, 60, 600):  # the step may have started no child yet on a busy machine
            self.results = Results(self.path, {})
            self.assertEqual(self.run_steps(python(code, limit=limit)), 1)
            if self.only_failure().get("output"):
                break
        self.assertIn("did not end within", self.only_failure()["detail"])
        self.assertEqual(self.document["checks"][0]["result"], "ok", "what it had found by then is kept")
        pid = int(self.only_failure()["output"])
        for _ in range(6000):  # the kernel may take a moment
            try:
                if " Z " in pathlib.Path(f"/proc/{pid}/stat").read_text():
                    return
            except (FileNotFoundError, ProcessLookupError):
                return
            time.sleep(0.01)
        self.fail("the step's child lives on")

    def test_what_cannot_be_ended_holds_nothing_up(self):
        # In the state D no signal reaches a process; the test sends no signal.
        hangs = python("time.sleep(1000)", limit=2, least=0.1)
        with mock.patch.object(runner.os, "killpg"), mock.patch.object(runner, "END_PATIENCE", 0.3):
            self.assertEqual(self.run_steps(hangs, python(reports(OK))), 1)
        failed, left, after = self.document["checks"]
        self.assertIn("did not end within 2 s", failed["detail"])
        self.assertEqual((left["name"], left["result"]), ("left_behind", "ok"))
        self.assertRegex(left["detail"], r"process (\d+) cannot be ended: state [A-Z]")
        self.assertEqual(after["result"], "ok", "the run goes on")
        os.kill(int(re.search(r"process (\d+)", left["detail"]).group(1)), signal.SIGKILL)

    def test_what_a_step_left_and_cannot_be_ended_is_said(self):
        code = reports(OK) + "subprocess.Popen(['sleep', '1000'])"
        with mock.patch.object(runner.os, "killpg"), mock.patch.object(runner, "END_PATIENCE", 0.3):
            self.assertEqual(self.run_steps(python(code)), 0)
        one, left = self.document["checks"]
        self.assertEqual((one["name"], left["name"]), ("one", "left_behind"))
        os.kill(int(re.search(r"process (\d+)", left["detail"]).group(1)), signal.SIGKILL)

    def test_a_process_that_is_killed_ends(self):
        with subprocess.Popen(["sleep", "1000"]) as process:
            self.assertEqual(runner.end(process), "")
        with subprocess.Popen(["sleep", "1000"]) as process, mock.patch.object(runner, "END_PATIENCE", 0.2):
            with mock.patch.object(process, "kill"):
                self.assertRegex(runner.end(process), f"process {process.pid} cannot be ended: state [A-Z]")
            process.kill()

    def test_what_a_step_left_running_is_ended_too(self):
        code = reports(OK) + "subprocess.Popen(['sleep', '1000'])"
        self.assertEqual(self.run_steps(python(code)), 0)
        self.assertEqual([c["name"] for c in self.document["checks"]], ["one"], "nothing is left behind")

    def test_a_step_that_dies_is_a_failure(self):
        self.assertEqual(self.run_steps(python("print('so far', flush=True)\nos.kill(os.getpid(), signal.SIGSEGV)")), 1)
        self.assertIn("SIGSEGV", self.only_failure()["detail"])
        self.assertIn("so far", self.only_failure()["output"])

    def test_a_step_that_dies_after_it_reported_is_a_failure(self):
        self.assertEqual(self.run_steps(python(reports(OK) + "os.abort()")), 1)
        self.assertEqual(self.document["summary"], {"ok": 1, "fail": 1, "not_run": 0})

    def test_results_that_cannot_be_read_are_a_failure(self):
        for code in ("", "(folder / 'checks.json').write_text('{\"checks\": [{')", reports({"name": "no result"}),
                     "(folder / 'checks.json').write_text('[]')", reports()):
            with self.subTest(code):
                self.results = Results(self.path, {})
                self.assertEqual(self.run_steps(python(code)), 1)
                self.assertRegex(self.only_failure()["detail"], "cannot be read|said nothing")

    def test_a_result_that_does_not_exist_is_a_failure(self):
        self.assertEqual(self.run_steps(python(reports({"name": "one", "result": "passed"}))), 1)
        self.assertIn("'passed'", self.only_failure()["detail"])

    def test_an_exit_code_that_no_check_explains_is_a_failure(self):
        self.assertEqual(self.run_steps(python(reports(OK) + "sys.exit(7)")), 1)
        self.assertIn("exit code 7", self.only_failure()["detail"])

    def test_a_skipped_check_explains_no_exit_code(self):
        skipped = {"name": "two", "result": "not_run", "detail": "needs more"}
        self.assertEqual(self.run_steps(python(reports(OK, skipped) + "sys.exit(1)")), 1)
        self.assertIn("exit code 1", self.only_failure()["detail"])

    def test_an_experiment_that_gives_no_answer_is_not_run(self):
        self.assertEqual(self.run_steps(python("os.abort()", kind="experiment"), python(reports(OK))), 0)
        self.assertEqual(self.document["summary"], {"ok": 1, "fail": 0, "not_run": 1})

    def test_a_program_that_cannot_be_started_is_a_failure(self):
        self.assertEqual(self.run_steps(Step("step", command=lambda folder, seconds: ["/no/such/program"])), 1)
        self.assertIn("could not be started", self.only_failure()["detail"])

    def test_what_is_missing_is_not_run_and_says_why(self):
        self.assertEqual(self.run_steps(Step("step", missing="no nvcc")), 3)
        self.assertEqual(self.document["checks"][0]["detail"], "no nvcc")
        self.assertEqual(self.document["checks"][0]["result"], "not_run")

    def test_without_time_left_steps_are_not_run(self):
        self.assertEqual(self.run_steps(python("time.sleep(1000)", limit=1000, least=0.1), python(reports(OK)), budget=10), 3)
        for check in self.document["checks"]:
            self.assertEqual(check["result"], "not_run", "the want of time is no fault of the step")
            self.assertIn("no time left", check["detail"])
        self.assertRegex(self.document["checks"][0]["detail"], r"did not end within \d+ s")

    def test_steps_leave_a_later_one_its_share_of_the_budget(self):
        slow = python("time.sleep(1000)", limit=1000, least=0.1)
        self.assertEqual(self.run_steps(slow, python(reports(OK), least=3, share=0.95), budget=240), 0)
        self.assertEqual([c["result"] for c in self.document["checks"]], ["not_run", "ok"])

    def test_a_step_ends_when_the_runner_is_killed(self):
        code = (f"import sys\nsys.path.insert(0, {str(run.HERE)!r})\nimport os, runner\n"
                "step = runner.Step('step', command=lambda folder, seconds: ['sh', '-c', 'echo $$ >&3; exec sleep 1000'])\n"
                "os.dup2(1, 3)\n"
                "real = runner.subprocess.Popen\n"
                "runner.subprocess.Popen = lambda *a, **k: real(*a, pass_fds=[3], **k)\n"
                "runner.run([step], 60, runner.Results(None, {}))\n")
        # The killed orchestrator cannot clean up: its folder is inside a folder of this test.
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        environment = dict(os.environ, TMPDIR=folder.name)
        with subprocess.Popen([sys.executable, "-B", "-c", code], stdout=subprocess.PIPE, env=environment) as orchestrator:
            pid = int(orchestrator.stdout.readline())
            orchestrator.kill()
            # The step holds the pipe open as well; the pipe ends with the step.
            self.assertEqual(orchestrator.stdout.read(), b"", f"process {pid}")

    def test_the_file_is_there_while_the_next_step_runs(self):
        look = f"found = json.load(open({str(self.path)!r}))\nassert not found['complete'] and len(found['checks']) == 1, found\n"
        self.assertEqual(self.run_steps(python(reports(OK)), python(look + reports(OK))), 0)
        self.assertEqual(list(self.path.parent.iterdir()), [self.path])

    def test_a_signal_ends_the_step_and_keeps_the_file(self):
        step = python(f"os.kill({os.getpid()}, signal.SIGTERM)\ntime.sleep(1000)")
        with self.assertRaises(SystemExit):
            self.run_steps(python(reports(OK)), step)
        document = json.loads(self.path.read_text(encoding="utf-8"))
        self.assertFalse(document["complete"])
        self.assertEqual(document["summary"]["ok"], 1)


class ReadersTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def read(self, reader, name, text, exit_code=0, short=False):
        (self.folder / name).write_text(text, encoding="utf-8")
        return {c.name: c for c in reader(Outcome(exit_code, 1, "", self.folder, short))}

    def test_gtest(self):
        found = self.read(run.gtest_checks, "output", """
[==========] Running 4 tests from 1 test suite.
[ RUN      ] Devices/DeviceTest.Good/cuda0
log
[       OK ] Devices/DeviceTest.Good/cuda0 (1500 ms)
[ RUN      ] Devices/DeviceTest.Bad/cuda0
x.cc:7: Failure
Expected: 1
[  FAILED  ] Devices/DeviceTest.Bad/cuda0, where GetParam() = 8-byte object <00-00> (3 ms)
[ RUN      ] Devices/DeviceTest.Not/cuda0
x.cc:9: Skipped
host only
[  SKIPPED ] Devices/DeviceTest.Not/cuda0 (0 ms)
[ RUN      ] Devices/DeviceTest.CutOff/cuda0
half a li""")
        self.assertEqual([c.result for c in found.values()], ["ok", "fail", "not_run", "fail"])
        self.assertEqual(found["Devices/DeviceTest.Good/cuda0"].seconds, 1.5)
        self.assertIn("Expected: 1", found["Devices/DeviceTest.Bad/cuda0"].detail)
        self.assertIn("host only", found["Devices/DeviceTest.Not/cuda0"].detail)
        self.assertIn("did not end", found["Devices/DeviceTest.CutOff/cuda0"].detail)

    def test_gtest_cut_off_for_want_of_time_is_not_run(self):
        text = "[ RUN      ] T.Slow\n"
        for short, result in ((True, "not_run"), (False, "fail")):
            found = self.read(run.gtest_checks, "output", text, exit_code=None, short=short)
            self.assertEqual(found["T.Slow"].result, result)

    def test_gtest_without_tests_finds_nothing(self):
        self.assertEqual(self.read(run.gtest_checks, "output", "[==========] Running 0 tests\n[  PASSED  ] 0 tests.\n"), {})

    def probe(self, *experiments):
        return self.read(run.assumed_checks, "probe.json", json.dumps({"experiments": experiments}))

    def test_probe(self):
        found = self.probe({"name": "ipc_exporter_killed", "outcome": "survives exporter SIGKILL", "seconds": 2,
                            "figures": {"readAfterKill": "data intact", "writeAfterKill": "cudaErrorUnknown"}},
                           {"name": "many_handles", "outcome": "skipped"},
                           {"name": "crash_isolation", "outcome": "timeout after 9 s", "figures": {"owner": "unharmed"}})
        self.assertEqual(found["ipc_exporter_killed"].result, "ok")
        self.assertEqual(found["many_handles"].result, "not_run")
        self.assertEqual(found["crash_isolation"].result, "not_run")
        self.assertEqual(found["assumed_ipc_exporter_killed_readAfterKill"].result, "ok")
        contradicted = found["assumed_ipc_exporter_killed_writeAfterKill"]
        self.assertEqual((contradicted.result, contradicted.kind), ("fail", "check"))
        self.assertIn("cudaErrorUnknown", contradicted.detail)
        for name in ("assumed_many_handles_opened", "assumed_crash_isolation_owner", "assumed_graph_on_imported"):
            self.assertEqual(found[name].result, "not_run", name)

    def test_probe_that_shows_nothing_assures_of_nothing(self):
        for alive, wanted in ((5, "ok"), (0, "not_run"), (None, "not_run")):
            figures = {"writesAfterWaitpid": 0, **({} if alive is None else {"aliveDelta100ms": alive})}
            found = self.probe({"name": "kill_inflight_writes", "outcome": "no writes", "figures": figures})
            self.assertEqual(found["assumed_kill_inflight_writes_writesAfterWaitpid"].result, wanted, alive)

    def test_what_is_assumed_is_what_the_probe_can_tell(self):
        source = (run.HERE / "probe" / "experiments.cc").read_text(encoding="utf-8")
        for experiment, figure, _, _ in run.ASSUMED:
            self.assertIn(f'"{experiment}"', source)
            self.assertIn(f'"{figure}"' if figure else "", source)
        for experiment, figure in run.CONTROLS.items():
            self.assertIn(f'"{experiment}"', source)
            self.assertIn(f'"{figure}"', source)


def no(name, detail="ENOSYS (38): not implemented"):
    return {"name": name, "allowed": False, "detail": detail}


def yes(name, **more):
    return {"name": name, "allowed": True, "detail": "", **more}


FAKE_DRIVER = ""  # path from the program's argument


class CapabilitiesTest(unittest.TestCase):
    def test_this_machine_answers_every_question(self):
        told = []
        found = capabilities.ask(cuda=False, told=told.append)
        self.assertEqual(list(found), list(capabilities.KERNEL))
        self.assertEqual(told, list(found.values()))
        for needed in ("kernel", "so_peercred", "scm_rights", "memfd_seals", "pdeathsig"):  # more tests need these
            self.assertTrue(found[needed]["allowed"], found[needed])

    def test_a_missing_call_is_named_with_its_error(self):
        def refused():
            raise OSError(38, "pidfd_open: Function not implemented")

        def nonsense():
            return 1 // 0
        for function, detail in ((refused, "ENOSYS (38): pidfd_open: Function not implemented"),
                                 (nonsense, "ZeroDivisionError: integer division or modulo by zero")):
            with mock.patch.dict(capabilities.KERNEL, {"pidfd_open": function}):
                found = capabilities.answer("pidfd_open")
            self.assertEqual((found["allowed"], found["detail"]), (False, detail))

    def test_an_answer_that_never_comes_costs_only_itself(self):
        asked = []

        def answers(names, told):
            asked.append(list(names))
            if names[0] == "pidfd_poll":  # like a process that hung or died there
                return [no("pidfd_poll", "no answer within 20 s")]
            return [yes(name) for name in names[:names.index("pidfd_poll")] if name] if "pidfd_poll" in names else [
                yes(name) for name in names]
        found = capabilities.ask(cuda=True, answers=answers)
        self.assertEqual({name for name, each in found.items() if not each["allowed"]}, {"pidfd_poll"})
        self.assertEqual(set(found), set(capabilities.KERNEL) | set(capabilities.CUDA))
        self.assertEqual([names[0] for names in asked], ["kernel", "pidfd_poll", "so_peercred", "cuda_context"])

    def test_what_needs_a_missing_call_is_named_with_it(self):
        found = {"cuda_ipc": no("cuda_ipc", "CUDA_ERROR_NOT_SUPPORTED (801)"), "pidfd_open": yes("pidfd_open")}
        self.assertEqual(capabilities.missing(found, ("pidfd_open", "never_asked")), "")
        self.assertEqual(capabilities.missing(found, ("pidfd_open", "cuda_ipc")),
                         "needs cuda_ipc, which this machine does not allow: CUDA_ERROR_NOT_SUPPORTED (801)")

    def with_driver(self, fails=""):
        if not FAKE_DRIVER:
            self.skipTest("needs the fake driver as its argument")
        with tempfile.TemporaryDirectory() as folder:
            os.symlink(FAKE_DRIVER, folder + "/libcuda.so.1")
            environment = {"LD_LIBRARY_PATH": folder, "FAKE_DRIVER": fails}
            with mock.patch.dict(os.environ, environment):
                return {name: (each["allowed"], each["detail"]) for name, each in capabilities.ask(cuda=True).items()}

    def test_a_driver_that_can_everything(self):
        found = self.with_driver()
        for name in ("cuda_context", "cuda_ipc", "cuda_vmm_fd"):
            self.assertTrue(found[name][0], found[name])
        self.assertEqual(found["nvidia_files"], (False, "a process that uses the GPU has no /dev/nvidia* open"))

    def test_a_driver_that_lacks_a_call(self):
        for fails, name, detail in (
                ("cuIpcOpenMemHandle_v2=801", "cuda_ipc",
                 "in the second process: CUDA_ERROR_NOT_SUPPORTED (801): cuIpcOpenMemHandle_v2"),
                ("cuMemCreate=801", "cuda_vmm_fd", "CUDA_ERROR_NOT_SUPPORTED (801): cuMemCreate"),
                ("cuIpcGetMemHandle=0", "cuda_ipc", "the process that asked died by signal 9"),
                ("cuIpcOpenMemHandle_v2=0", "cuda_ipc", "the process that opens it has ended: exit code -9")):
            found = self.with_driver(fails)
            self.assertEqual(found[name], (False, detail))
            for other in {"cuda_ipc", "cuda_vmm_fd", "cuda_context"} - {name}:
                self.assertTrue(found[other][0], f"{fails}: {other}: {found[other]}")

    def test_a_driver_that_never_answers(self):
        with mock.patch.dict(capabilities.PATIENCE, {"cuda_ipc": 2.0}):
            for fails in ("cuIpcGetMemHandle=-1", "cuIpcOpenMemHandle_v2=-1"):
                found = self.with_driver(fails)
                self.assertEqual(found["cuda_ipc"], (False, "no answer within 2 s"), fails)
                self.assertTrue(found["cuda_vmm_fd"][0], found["cuda_vmm_fd"])

    def test_a_driver_without_a_context(self):
        found = self.with_driver("cuDevicePrimaryCtxRetain=999")
        self.assertEqual(found["cuda_context"], (False, "CUDA_ERROR_UNKNOWN (999): cuDevicePrimaryCtxRetain"))


class StepsTest(unittest.TestCase):
    """Tests the choice of steps, on invented machines."""

    def steps(self, *found, done=None, patience=1.0):
        allowed = {each["name"]: each for each in found}
        with tempfile.TemporaryDirectory() as folder:
            build = pathlib.Path(folder)
            for program in ("server/vrambrokerd", "client/vramctl", "client/c/libvrambroker.so.1",
                            "client/preload/libvrambroker-preload.so", "tests/gpu/gpu_probe",
                            "tests/unit/device_test", "tests/integration/memory_promises_test"):
                (build / program).parent.mkdir(parents=True, exist_ok=True)
                (build / program).write_text("#!/bin/sh\necho 'ipc_exporter_killed (limit 30 s)'\necho 'env (limit 5 s)'\n"
                                             "echo 'vmm_latency (limit 5 s)'\n")
                (build / program).chmod(0o755)
            steps = run.all_steps(run.Programs(build), "cuda", patience, done)
            for step in steps:
                step.missing = step.missing or capabilities.missing(allowed, step.needs)
            self.commands = {step.name: step.command(build, 100) for step in steps}
            return {step.name: step for step in steps}

    def only_of_probe(self, step):
        command = self.commands[step]
        return command[command.index("--only") + 1]

    def test_without_a_call_only_what_needs_it_is_skipped(self):
        steps = self.steps(yes("cuda_context"), yes("cuda_ipc"), no("proc_fd"))
        self.assertEqual([name for name, step in steps.items() if step.missing], ["forked_child"])
        self.assertEqual(self.only_of_probe("probe"), "env,vmm_latency")
        steps = self.steps(yes("cuda_context"), no("cuda_ipc"))
        self.assertEqual([name for name, step in steps.items() if not step.missing], ["probe"])
        steps = self.steps(no("cuda_context"), yes("cuda_ipc"))
        self.assertTrue(all(step.missing for step in steps.values()))

    def test_the_probe_takes_over_what_the_design_assumes_when_that_is_skipped(self):
        with mock.patch.object(run, "Step", side_effect=lambda *a, **k: Step(*a, **{**k, "missing": "no cuda_ipc"})):
            self.steps()
        self.assertEqual(self.only_of_probe("probe"), "ipc_exporter_killed,env,vmm_latency")

    def test_more_patience_means_longer_limits(self):
        fast, slow = self.steps(), self.steps(patience=4)
        for name in ("client_killed", "device_test", "memory_promises_test", "assumed"):
            self.assertEqual(slow[name].limit, 4 * fast[name].limit)
        for seconds, patience in ((0.3, 2), (4.2, 5), (60, 10)):
            self.assertEqual(run.patience_for("cuda", {"cuda_context": yes("cuda_context", seconds=seconds)}), patience)
        self.assertEqual(run.patience_for("host", {}), 1)

    def test_what_was_ok_is_not_run_again(self):
        self.steps(done={"device_test": {"A/T.x/cuda0", "A/T.y/cuda0"}, "torch": {"check_b", "check_a"},
                         "unmodified": {"sizes"}, "probe": {"env"}})
        self.assertEqual(self.commands["device_test"][1], "--gtest_filter=*/cuda*-A/T.x/cuda0:A/T.y/cuda0")
        self.assertEqual(self.commands["torch"][-2:], ["--skip", "check_a,check_b"])
        self.assertEqual(self.commands["unmodified"][-2:], ["--skip", "sizes"])
        self.assertEqual(self.only_of_probe("probe"), "vmm_latency")

    def test_unfinished(self):
        def document(steps, *results):
            return {"steps": steps, "checks": [{"step": s, "name": n, "result": r} for s, n, r in results]}
        first = document(["a", "b", "c", "d", "e"], ("a", "a", "ok"), ("b", "b1", "ok"), ("b", "b2", "fail"),
                         ("c", "c", "not_run"), ("d", "d1", "ok"), ("d", "d", "fail"))
        self.assertEqual(run.unfinished([first]), {"b": {"b1"}, "c": set(), "d": {"d1"}, "e": set()})
        second = document(["b", "d", "c"], ("b", "b2", "ok"), ("d", "d2", "ok"), ("c", "c", "ok"))
        self.assertEqual(run.unfinished([first, second]), {"e": set()})


class CompareTest(unittest.TestCase):
    def document(self, *checks, **head):
        return {"device": "cuda", "steps": ["s"], "checks": [{"step": "s", **c} for c in checks], **head}

    def test_results_and_figures_that_changed(self):
        older = self.document({"name": "a", "result": "ok"}, {"name": "b", "result": "fail"},
                              {"name": "c", "result": "ok", "figures": {"us": 10, "deep": {"x": 1.0, "y": 0, "text": "t"},
                                                                        "small": 100, "seconds": 1, "flag": True}},
                              {"name": "gone", "result": "ok"})
        newer = self.document({"name": "a", "result": "fail", "detail": "it\nbroke"}, {"name": "b", "result": "ok"},
                              {"name": "c", "result": "ok", "figures": {"us": 13, "deep": {"x": 0.5, "y": 2, "text": "u"},
                                                                        "small": 119, "seconds": 9, "flag": False, "more": 1}},
                              {"name": "new", "result": "fail"})
        self.assertEqual(compare.changes(older, newer), [
            "s/a: ok -> fail: it broke", "s/b: fail -> ok: ", "s/c deep.y: 0 -> 2 (from nothing)",
            "s/c deep.x: 1 -> 0.5 (-50 %)", "s/c us: 10 -> 13 (+30 %)"])
        self.assertEqual(compare.changes(older, older), [])

    def test_the_newest_older_result_with_a_step_in_common(self):
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            for file, content in (("2026-01-01.json", self.document()),
                                  ("2026-01-02.json", self.document(gpu={"name": "H100"})),
                                  ("2026-01-03.json", self.document(steps=["other"])),
                                  ("2026-01-04.json", self.document(device="host")), ("2026-01-05.json", []),
                                  ("2026-02-01.json", self.document()), ("2026-03-01.json", self.document())):
                (folder / file).write_text(json.dumps(content), encoding="utf-8")
            (folder / "2026-01-06.json").write_text("{", encoding="utf-8")
            found, older = compare.newest([folder, folder / "none"], folder / "2026-02-01.json", self.document())
            self.assertEqual(found.name, "2026-01-02.json")
            self.assertEqual(older["gpu"]["name"], "H100")
            with contextlib.redirect_stdout(io.StringIO()) as said:
                compare.say_against_newest([folder], folder / "2026-02-01.json", self.document())
            self.assertRegex(said.getvalue(), "against .*2026-01-02.json .H100, .*no changes")
        self.assertIsNone(compare.newest([], None, self.document()))


class MainTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def main(self, *arguments):
        with mock.patch.object(machine, "gpu", lambda: {"error": "no driver: told so by the test"}), \
                mock.patch.object(sys, "argv", ["run.sh", *arguments]), \
                contextlib.redirect_stdout(io.StringIO()) as self.printed, \
                contextlib.redirect_stderr(io.StringIO()) as said:
            code = run.main()
        return code, said.getvalue()

    def test_without_a_gpu_everything_is_listed_as_not_run(self):
        code, said = self.main("--out", str(self.folder))
        self.assertEqual(code, 3)
        self.assertIn("told so by the test", said)
        path, = self.folder.iterdir()
        document = json.loads(path.read_text(encoding="utf-8"))
        self.assertEqual({c["result"] for c in document["checks"]}, {"not_run"})
        self.assertEqual([c["name"] for c in document["checks"]], document["steps"])
        for name in ("assumed", "probe", "device_test", "memory_promises_test", "client_killed", "torch", "trim_during_capture"):
            self.assertIn(name, document["steps"])

    def test_first_it_says_what_the_machine_allows(self):
        self.main("--out", str(self.folder))
        self.assertRegex(self.printed.getvalue(), r"^allows +kernel +.*Linux")
        path, = self.folder.iterdir()
        allowed = json.loads(path.read_text(encoding="utf-8"))["allowed"]
        self.assertEqual([each["name"] for each in allowed], list(capabilities.KERNEL), "the driver is not asked")

    def rehearse(self, found, *arguments):
        """Returns the steps that ran, and the messages about the remaining steps."""
        ran = []

        def find_out(step, seconds):
            ran.append(step.name)
            return [Check(step.name, "fail" if step.name == "bandwidth" else "ok", step=step.name)]
        with mock.patch.object(capabilities, "ask", lambda *_: {each["name"]: each for each in found}), \
                mock.patch.object(runner, "find_out", find_out), mock.patch.object(run.Programs, "version", lambda _: {}):
            self.main("--rehearse", "--build-dir", str(self.folder), "--out", str(self.folder / "out"), *arguments)
        path = max((self.folder / "out").iterdir(), key=lambda p: p.stat().st_mtime_ns)
        document = json.loads(path.read_text(encoding="utf-8"))
        return ran, {c["name"]: c["detail"] for c in document["checks"] if c["result"] == "not_run"}, path

    def test_what_the_machine_does_not_allow_fails_nothing(self):
        ran, skipped, _ = self.rehearse([no("proc_fd", "EACCES (13): no")])
        self.assertEqual(skipped.pop("torch"), "needs PyTorch and a GPU; torch_training.py --self-test needs neither")
        self.assertEqual(skipped, {"forked_child": "needs proc_fd, which this machine does not allow: EACCES (13): no"})
        self.assertIn("client_killed", ran)
        ran, skipped, _ = self.rehearse([no("proc_fd")], "--anyway")
        self.assertIn("forked_child", ran)
        self.assertEqual(list(skipped), ["torch"])

    def test_again_runs_what_was_not_ok(self):
        _, _, path = self.rehearse([no("proc_fd")], "--skip", "experiments")
        first = self.folder / "first.json"
        path.rename(first)
        ran, _, second = self.rehearse([], "--again", str(first))
        self.assertEqual(ran, ["forked_child", "bandwidth"])
        ran, _, _ = self.rehearse([], "--again", str(first), str(second))
        self.assertEqual(ran, ["bandwidth"])

    def test_again_needs_results_of_the_same_device(self):
        bad = self.folder / "bad.json"
        for content in ("{", "[]", json.dumps({"device": "cuda", "steps": [], "checks": []})):
            bad.write_text(content, encoding="utf-8")
            with self.assertRaises(SystemExit) as refused:
                self.rehearse([], "--again", str(bad))
            self.assertEqual(refused.exception.code, 2)

    def test_experiments_are_a_group(self):
        ran, _, _ = self.rehearse([], "--only", "experiments")
        self.assertEqual(ran, list(run.checks.EXPERIMENTS))

    def test_it_says_what_changed(self):
        _, _, path = self.rehearse([])
        older = json.loads(path.read_text(encoding="utf-8"))
        for check in older["checks"]:
            check["result"] = "ok"
        other = self.folder / "other.json"
        other.write_text(json.dumps(older), encoding="utf-8")
        self.rehearse([], "--compare", str(other))
        self.assertRegex(self.printed.getvalue(), r"(?m)^changed  bandwidth: ok -> fail: $")

    def test_what_compute_sanitizer_says(self):
        good = "========= ERROR SUMMARY: 0 errors\n"
        self.assertEqual(run.checks.judge_memcheck(good, "")[0], "memcheck found nothing")
        for said, problem, error in ((good, "the client has ended", run.checks.Failed),
                                     ("=== Invalid __global__ read\n=== ERROR SUMMARY: 2 errors\n", "", run.checks.Failed),
                                     ("=== Error: Device not supported\n" + good, "cudaMalloc: 999", run.checks.NotRun),
                                     ("", "no answer", run.checks.NotRun)):
            with self.assertRaises(error):
                run.checks.judge_memcheck(said, problem)

    def test_without_a_gpu_no_result_is_left_among_the_results(self):
        before = sorted((run.HERE / "results").glob("*"))
        self.assertEqual(self.main()[0], 3)
        self.assertEqual(sorted((run.HERE / "results").glob("*")), before)

    def test_steps_are_chosen_by_name(self):
        self.main("--out", str(self.folder), "--only", "*_killed,probe", "--skip", "client_*")
        path, = self.folder.iterdir()
        self.assertEqual(json.loads(path.read_text(encoding="utf-8"))["steps"], ["daemon_killed", "probe"])

    def test_a_step_that_does_not_exist_is_refused(self):
        with self.assertRaises(SystemExit) as refused:
            self.main("--only", "no_such_step")
        self.assertIn("no_such_step", str(refused.exception))

    def test_a_rehearsal_is_no_result(self):
        with self.assertRaises(SystemExit) as refused:
            self.main("--rehearse")
        self.assertEqual(refused.exception.code, 2)

    def test_a_build_that_says_nothing_of_a_gpu_is_unfit(self):
        self.assertIn("no build folder", run.unfit(self.folder))
        good = "VRAMBROKER_SANITIZER:STRING=\n"
        for cache, why in ((good.replace("=\n", "=thread\n"), "sanitizers"), (good, "lacks device_test")):
            (self.folder / "CMakeCache.txt").write_text(cache, encoding="utf-8")
            self.assertIn(why, run.unfit(self.folder))

    def test_run_sh(self):
        listed = subprocess.run([str(run.HERE / "run.sh"), "--list"], stdout=subprocess.PIPE, check=True, cwd="/")
        self.assertIn("probe", listed.stdout.decode().split())

    def test_asking_for_a_gpu_always_answers(self):
        answer = machine.gpu()
        self.assertTrue("error" in answer or answer["uuid"].startswith("GPU-"), answer)
        with mock.patch.object(machine, "__file__", "/no/such/file.py"):
            self.assertIn("No such file", machine.gpu()["error"])


if __name__ == "__main__":
    FAKE_DRIVER = os.path.abspath(sys.argv.pop(1)) if sys.argv[1:] and sys.argv[1].endswith(".so") else ""
    unittest.main()
