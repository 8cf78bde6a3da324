#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks the types of deploy/kubernetes' objects against Kubernetes: no object has an unknown field, or a field of
another type.

Usage: types_test.py WORK_DIR
Needs kubectl, Go and two of its packages, Node.js with npm and its registry, the source of the types and the compiler
(types/). Without these programs the test is skipped; with CI set the test fails instead.
"""
import copy
import json
import pathlib
import re
import shutil
import sys
import unittest

from rendered import EXAMPLES, KUBERNETES, OVERLAYS, Renderer, objects, run, skip, the

# Maps apiVersion and kind to the place of the type.
TYPES = {
    ("v1", "Namespace"): "kubernetes-models/v1/Namespace",
    ("v1", "ConfigMap"): "kubernetes-models/v1/ConfigMap",
    ("v1", "Pod"): "kubernetes-models/v1/Pod",
    ("apps/v1", "DaemonSet"): "kubernetes-models/apps/v1/DaemonSet",
    ("monitoring.coreos.com/v1", "PodMonitor"): "@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1/PodMonitor",
}


def install(folder):
    """Copies types/ to `folder` and installs its packages there."""
    for program in ("node", "npm"):
        if shutil.which(program) is None:
            skip(f"there is no {program}")
    folder.mkdir(parents=True, exist_ok=True)
    lock = (pathlib.Path(__file__).parent / "types/package-lock.json").read_bytes()
    for path in (pathlib.Path(__file__).parent / "types").iterdir():
        shutil.copy(path, folder)
    stamp = folder / "installed"
    if stamp.exists() and stamp.read_bytes() == lock:
        return
    # No installed package needs a script of its own to run.
    done = run("npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error", "--fetch-retries=5", "--fetch-timeout=120000", cwd=folder)
    if done.returncode != 0:
        skip(f"npm ci failed: {done.stderr}")
    stamp.write_bytes(lock)


class TypesTest(unittest.TestCase):
    render: Renderer
    folder: pathlib.Path

    def setUp(self):
        for path in self.folder.glob("*.ts"):
            path.unlink()

    def write(self, name, each, type_of=None):
        key = (each["apiVersion"], each["kind"])
        kind = (type_of or each)["kind"]
        self.assertIn(key if type_of is None else (type_of["apiVersion"], kind), TYPES)
        module = TYPES[key if type_of is None else (type_of["apiVersion"], kind)]
        text = f'import type {{ I{kind} }} from "{module}";\nexport const object: I{kind} = {json.dumps(each, indent=1)};\n'
        (self.folder / f"{name}.ts").write_text(text, encoding="utf-8")

    def faults(self):
        """Returns {file: the compiler's complaint}."""
        done = run("node", "node_modules/typescript/bin/tsc", "--project", ".", "--pretty", "false", cwd=self.folder)
        found = {}
        for line in done.stdout.splitlines():
            if match := re.match(r"(\w+)\.ts\(\d+,\d+\): error (.*)", line):
                found.setdefault(match[1], []).append(match[2])
        self.assertEqual((done.returncode != 0, done.stderr), (bool(found), ""), done.stdout)
        return found

    def test_every_object(self):
        every_value = {"imagePullSecrets": [{"name": "pull"}], "runtimeClassName": "nvidia", "podMonitor": {"enabled": True, "labels": {"a": "b"}},
                       "resources": {"vrambrokerd": {"limits": {"cpu": 1, "memory": "1Gi"}}}}
        sources = {name.replace("-", "_"): self.render.kustomize(name) for name in ("base", *OVERLAYS)}
        sources["chart"] = self.render.chart({})
        sources["chart_with_values"] = self.render.chart(every_value)
        for path in (KUBERNETES / "podmonitor.yaml", *EXAMPLES):
            sources[path.stem.replace("-", "_")] = objects(path.read_text(encoding="utf-8"))
        files = 0
        for source, found in sources.items():
            for each in found:
                self.write(f"{source}_{each['kind']}", each)
                files += 1
        self.assertEqual(files, 3 * len(("base", *OVERLAYS)) + 2 + 3 + 1 + len(EXAMPLES))
        self.assertEqual(self.faults(), {})

    def test_it_would_notice(self):
        daemon_set = the("DaemonSet", self.render.kustomize("base"))
        pod_monitor = the("PodMonitor", objects((KUBERNETES / "podmonitor.yaml").read_text(encoding="utf-8")))
        pod = the("Pod", objects((KUBERNETES / "examples/gpu-pod.yaml").read_text(encoding="utf-8")))

        def renamed(place, old, new):
            place[new] = place.pop(old)

        def put(place, key, value):
            place[key] = value

        spec = lambda each: each["spec"]["template"]["spec"]
        daemon = lambda each: spec(each)["containers"][0]
        broken = {  # name: (object, fault, expected complaint)
            "misspelt_in_spec": (daemon_set, lambda each: renamed(spec(each), "hostPID", "hostPid"), "hostPid"),
            "misspelt_in_mount": (daemon_set, lambda each: renamed(daemon(each)["volumeMounts"][0], "mountPath", "mountpath"), "mountpath"),
            "misspelt_in_probe": (daemon_set, lambda each: renamed(daemon(each)["livenessProbe"], "periodSeconds", "periodSecond"), "periodSecond"),
            "misspelt_in_security": (daemon_set, lambda each: renamed(daemon(each)["securityContext"]["capabilities"], "add", "adds"), "adds"),
            "misspelt_in_volume": (daemon_set, lambda each: renamed(spec(each)["volumes"][1], "hostPath", "hostpath"), "hostpath"),
            "one_level_too_high": (daemon_set, lambda each: put(each["spec"], "nodeSelector", {"a": "b"}), "nodeSelector"),
            "one_level_too_low": (daemon_set, lambda each: put(daemon(each), "tolerations", []), "tolerations"),
            "text_for_a_number": (daemon_set, lambda each: put(daemon(each)["ports"][0], "containerPort", "9477"), "'string' is not assignable to type 'number'"),
            "number_for_a_text": (daemon_set, lambda each: put(each["spec"]["template"]["metadata"]["annotations"], "prometheus.io/port", 9477),
                                  "'number' is not assignable to type 'string'"),
            "no_name": (daemon_set, lambda each: daemon(each).pop("name"), "'\"name\"' is missing"),
            "no_selector": (daemon_set, lambda each: each["spec"].pop("selector"), "'\"selector\"' is missing"),
            "old_version": (daemon_set, lambda each: put(each, "apiVersion", "extensions/v1beta1"), '"apps/v1"'),
            "misspelt_in_pod": (pod, lambda each: renamed(each["spec"]["containers"][0]["resources"], "limits", "limit"), "limit"),
            "misspelt_in_monitor": (pod_monitor, lambda each: renamed(each["spec"]["podMetricsEndpoints"][0], "relabelings", "relabellings"), "relabellings"),
        }
        for name, (original, do, _) in broken.items():
            changed = copy.deepcopy(original)
            do(changed)
            self.assertNotEqual(changed, original)
            self.write(name, changed, type_of=original)
        found = self.faults()
        for name, (_, _, said) in broken.items():
            with self.subTest(name):
                self.assertTrue([fault for fault in found.get(name, []) if said in fault], found.get(name))


if __name__ == "__main__":
    work = pathlib.Path(sys.argv[1])
    TypesTest.render = Renderer(work)
    TypesTest.folder = work / "types"
    install(TypesTest.folder)
    unittest.main(argv=sys.argv[:1], verbosity=2)
