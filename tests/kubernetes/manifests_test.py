#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks that deploy/kubernetes fits together: kustomize base, chart, examples, and the programs that they start.

Usage: manifests_test.py BUILD_DIR WORK_DIR
Needs kubectl, Go and two of its packages, and jsonschema. Without these programs the test
is skipped; with CI set the test fails instead.
"""
import copy
import json
import pathlib
import re
import sys
import unittest

import jsonschema
import yaml

from rendered import BASE, CHART, EXAMPLES, KUBERNETES, OVERLAYS, SOURCE, Renderer, objects, run, the

NAME = "app.kubernetes.io/name"
OF_HELM = ("app.kubernetes.io/instance", "app.kubernetes.io/managed-by", "helm.sh/chart")


def without_hash(text):
    """Returns the name of a generated ConfigMap without the hash of its content."""
    return re.sub(r"^(vrambroker)-[a-z0-9]{10}$", r"\1", text)


def compared(all_objects):
    """Returns objects by kind and name, without the additions of only kustomize or only Helm."""
    found = {}
    for each in copy.deepcopy(all_objects):
        if each["kind"] == "Namespace":
            continue
        if each["kind"] == "DaemonSet":
            template = each["spec"]["template"]
            template["metadata"]["annotations"].pop("checksum/config", None)
            for volume in template["spec"]["volumes"]:
                if "configMap" in volume:
                    volume["configMap"]["name"] = without_hash(volume["configMap"]["name"])
        if each["kind"] == "ConfigMap":
            each["metadata"]["name"] = without_hash(each["metadata"]["name"])
            each["metadata"].pop("labels", None)  # only Helm adds labels
        for labels in labels_in(each):
            for label in OF_HELM:
                labels.pop(label, None)
        found[each["kind"], each["metadata"]["name"], each["metadata"]["namespace"]] = each
    return found


def labels_in(each):
    """Returns all maps of labels, and of selected labels."""
    spec = each.get("spec", {})
    maps = [each["metadata"].get("labels"), spec.get("selector", {}).get("matchLabels"), spec.get("template", {}).get("metadata", {}).get("labels")]
    return [labels for labels in maps if labels is not None]


def daemon_set(all_objects):
    return the("DaemonSet", all_objects)


def containers(all_objects):
    return {each["name"]: each for each in daemon_set(all_objects)["spec"]["template"]["spec"]["containers"]}


def options_of(command):
    """Returns {option: value} of a command line whose options are all --OPTION or --OPTION=VALUE."""
    options = {}
    for word in command:
        if word.startswith("-"):
            option, _, value = word.partition("=")
            if option in options:
                raise AssertionError(f"{option} is given twice")
            options[option] = value
    return options


def commands(all_objects):
    """Yields all command lines: (place, words)."""
    for each in all_objects:
        spec = each["spec"]["template"]["spec"] if each["kind"] == "DaemonSet" else each.get("spec", {})
        for container in spec.get("containers", []):
            yield container["name"], container["command"]
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                if probe in container:
                    yield f"{container['name']}, {probe}", container[probe]["exec"]["command"]


class KubernetesTest(unittest.TestCase):
    build: pathlib.Path
    render: Renderer

    def setUp(self):
        self.maxDiff = None
        self.base = self.render.kustomize("base")

    def examples(self):
        return [(path.name, *objects(path.read_text(encoding="utf-8"))) for path in EXAMPLES]

    def pod_monitor(self):
        return the("PodMonitor", objects((KUBERNETES / "podmonitor.yaml").read_text(encoding="utf-8")))


class ManifestsTest(KubernetesTest):
    def fits(self, all_objects):
        """Checks volumes, paths, ports and labels of a rendering."""
        spec = daemon_set(all_objects)["spec"]["template"]["spec"]
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        mounts = {}  # container: {path: mount}
        for container in spec["containers"]:
            mounts[container["name"]] = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
        used = {mount["name"] for each in mounts.values() for mount in each.values()}
        self.assertEqual(used, set(volumes), "volumes, and what is mounted of them")

        # A mounted path of the host has the same path in the container.
        for each in mounts.values():
            for path, mount in each.items():
                if "hostPath" in volumes[mount["name"]]:
                    self.assertEqual(path, volumes[mount["name"]]["hostPath"]["path"])

        def on_host(container, folder, writable):
            self.assertIn(folder, mounts[container], f"{container} does not have {folder}")
            mount = mounts[container][folder]
            self.assertIn("hostPath", volumes[mount["name"]], f"{folder} does not outlive the pod")
            if writable:
                self.assertFalse(mount.get("readOnly", False), f"{folder} is read-only")

        daemon = options_of(containers(all_objects)["vrambrokerd"]["command"])
        plugin = options_of(containers(all_objects)["device-plugin"]["command"])
        self.assertEqual(daemon["--socket-dir"], plugin["--socket-dir"])
        for name, command in commands(all_objects):
            self.assertEqual(options_of(command)["--socket-dir"], daemon["--socket-dir"], name)
        on_host("vrambrokerd", daemon["--socket-dir"], writable=True)
        on_host("device-plugin", plugin["--socket-dir"], writable=True)
        claims = str(pathlib.PurePosixPath(daemon["--claims-file"]).parent)
        on_host("vrambrokerd", claims, writable=True)
        self.assertFalse(claims.startswith("/run"), "the claims are lost at a reboot")
        on_host("device-plugin", plugin["--kubelet-dir"] + "/device-plugins", writable=True)
        on_host("device-plugin", plugin["--kubelet-dir"] + "/pod-resources", writable=False)

        config = pathlib.PurePosixPath(daemon["--config"])
        volume = volumes[mounts["vrambrokerd"][str(config.parent)]["name"]]
        config_map = the("ConfigMap", all_objects)
        self.assertEqual(volume["configMap"]["name"], config_map["metadata"]["name"])
        self.assertIn(config.name, config_map["data"])

        # Prometheus scrapes the metrics from the pod network.
        address, _, port = daemon["--http-address"].rpartition(":")
        self.assertEqual(address, "0.0.0.0")
        self.assertEqual([each["containerPort"] for each in containers(all_objects)["vrambrokerd"]["ports"] if each["name"] == "metrics"], [int(port)])
        template = daemon_set(all_objects)["spec"]["template"]["metadata"]
        self.assertEqual(template["annotations"]["prometheus.io/port"], port)
        self.assertEqual(template["annotations"]["prometheus.io/scrape"], "true")
        self.assertEqual(template["annotations"]["prometheus.io/path"], "/metrics")
        self.assertNotIn("hostNetwork", spec)

        selector = daemon_set(all_objects)["spec"]["selector"]["matchLabels"]
        self.assertLessEqual(selector.items(), template["labels"].items())
        for annotation in template["annotations"]:
            if annotation.startswith("container.apparmor"):
                self.assertIn(annotation.partition("/")[2], mounts)
        for each in all_objects:
            if each["kind"] != "Namespace":
                self.assertEqual(each["metadata"]["namespace"], "vrambroker")

    def test_each_rendering_fits_together(self):
        for name in ("base", *OVERLAYS):
            with self.subTest(name):
                self.fits(self.render.kustomize(name))
        with self.subTest("chart"):
            self.fits(self.render.chart({}))
        with self.subTest("chart with other folders"):
            self.fits(self.render.chart({"socketDir": "/run/other", "kubeletDir": "/data/kubelet"}))

    def test_what_clients_rely_on(self):
        spec = daemon_set(self.base)["spec"]
        pod = spec["template"]["spec"]
        self.assertTrue(pod["hostPID"])
        self.assertFalse(pod["automountServiceAccountToken"])
        self.assertEqual(pod["nodeSelector"], {"vrambroker.dev/gpu": "shared"})
        self.assertEqual(spec["updateStrategy"], {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 1}}, "never two daemons on a node")
        kinds = {each["kind"] for each in self.base}
        self.assertEqual(kinds, {"Namespace", "ConfigMap", "DaemonSet"}, "no rights at the API server, no rules for the network")
        for container in pod["containers"]:
            context = container["securityContext"]
            self.assertEqual(context["runAsUser"], 0)
            self.assertEqual(context["capabilities"]["drop"], ["ALL"])
            self.assertNotIn("limits", container["resources"])
        self.assertEqual(set(containers(self.base)["vrambrokerd"]["securityContext"]["capabilities"]["add"]),
                         {"SYS_PTRACE", "CHECKPOINT_RESTORE", "DAC_READ_SEARCH", "CHOWN"})
        self.assertNotIn("add", containers(self.base)["device-plugin"]["securityContext"]["capabilities"])
        self.assertEqual({variable["name"]: variable["valueFrom"]["fieldRef"]["fieldPath"] for variable in containers(self.base)["device-plugin"]["env"]},
                         {"POD_NAME": "metadata.name", "POD_NAMESPACE": "metadata.namespace"})

    def test_the_last_rule_gives_nothing(self):
        text = re.sub(r"#.*", "", (BASE / "vrambroker.textproto").read_text(encoding="utf-8"))
        self.assertRegex(text, r'rules \{ name: "no-claim" rights: NONE \}\s*$')

    def test_the_pod_monitor_finds_the_daemon(self):
        monitor = self.pod_monitor()
        template = daemon_set(self.base)["spec"]["template"]
        self.assertEqual(monitor["metadata"]["namespace"], daemon_set(self.base)["metadata"]["namespace"])
        self.assertLessEqual(monitor["spec"]["selector"]["matchLabels"].items(), template["metadata"]["labels"].items())
        ports = [port["name"] for container in template["spec"]["containers"] for port in container.get("ports", [])]
        for endpoint in monitor["spec"]["podMetricsEndpoints"]:
            self.assertIn(endpoint["port"], ports)
        scrape = yaml.safe_load((SOURCE / "deploy/prometheus/prometheus.yml").read_text(encoding="utf-8"))["scrape_configs"][0]
        self.assertEqual(template["metadata"]["labels"][monitor["spec"]["jobLabel"]], scrape["job_name"], "the job's name in alerts and dashboards")

    def test_there_is_one_version(self):
        version = re.match(r"vrambroker \(([\d.]+)\) ", (SOURCE / "deploy/debian/changelog").read_text(encoding="utf-8"))[1]
        for name, pattern in (("client/python/METADATA", r"^Version: (\S+)$"),
                              ("client/python/vrambroker/__init__.py", r'^__version__ = "(\S+)"$'),
                              ("deploy/README.md", r"build/vrambroker-([\d.]+)-linux-")):
            named = re.search(pattern, (SOURCE / name).read_text(encoding="utf-8"), re.MULTILINE)[1]
            self.assertEqual(named, version, name)
        chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
        self.assertEqual({chart["version"], chart["appVersion"]}, {version})
        images = {container["image"] for container in containers(self.base).values()}
        for _, pod in self.examples():
            images |= {container["image"] for container in pod["spec"]["containers"]}
        self.assertEqual(images, {f"vrambroker:{version}"})

    def test_examples_ask_for_what_there_is(self):
        unit = options_of(containers(self.base)["device-plugin"]["command"])["--unit"]
        mebibytes = {"MiB": 1, "GiB": 1024}
        size = lambda text: int(re.match(r"\d+", text)[0]) * mebibytes[text[-3:]]
        resource = f"vrambroker.dev/memory-{unit[:-1].lower()}"  # 256MiB: memory-256mi
        self.assertEqual({name for name, _ in self.examples()}, {"pod.yaml", "gpu-pod.yaml"})
        for name, pod in self.examples():
            for container in pod["spec"]["containers"]:
                with self.subTest(name):
                    self.assertEqual(set(container["resources"]), {"limits"})
                    self.assertEqual(set(container["resources"]["limits"]), {resource})
                    wanted = next(word for word in container["command"] if re.fullmatch(r"\d+[MG]iB", word))
                    self.assertGreaterEqual(container["resources"]["limits"][resource] * size(unit), size(wanted))
                    said = re.search(r"(\d+) GiB \((\d+) units of (\d+) MiB\)", (KUBERNETES / "examples" / name).read_text(encoding="utf-8"))
                    self.assertEqual(int(said[2]), container["resources"]["limits"][resource])
                    self.assertEqual(int(said[2]) * int(said[3]), int(said[1]) * 1024)
                    self.assertEqual(int(said[3]), size(unit))
                    self.assertNotIn("hostPath", str(pod))
        pods = dict(self.examples())
        self.assertTrue(pods["gpu-pod.yaml"]["spec"]["hostPID"])
        self.assertNotIn("hostPID", pods["pod.yaml"]["spec"])


class ProgramsTest(KubernetesTest):
    def help_of(self, words):
        programs = {"vrambrokerd": "server/vrambrokerd", "vramctl": "client/vramctl", "vrambroker-device-plugin": "deploy/kubernetes/vrambroker-device-plugin"}
        program = self.build / programs[words[0]]
        done = run(program, *words[1:], "--help")
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout

    def all_objects(self):
        every_value = {"resource": "example.com/memory", "resourcePerDevice": True}
        return [*self.base, *self.render.kustomize("host"), *self.render.chart(every_value), *(pod for _, pod in self.examples())]

    def test_they_know_the_options(self):
        seen = set()
        for name, command in commands(self.all_objects()):
            words = command[:2] if command[0] == "vramctl" else command[:1]
            text = self.help_of(words)
            for word in command[len(words):]:
                if not word.startswith("-"):
                    continue  # a size
                option = word.partition("=")[0]
                seen.add(option)
                self.assertRegex(text, rf"(?<![\w-]){re.escape(option)}(?![\w-])", f"{name}: {words[0]} has no option {option}")
        self.assertLessEqual({"--config", "--kubelet-dir", "--resource-per-device", "--resource", "--name", "--socket-dir"}, seen)

    def test_the_daemon_accepts_its_configuration_and_options(self):
        for name, rendered in (("base", self.base), ("host", self.render.kustomize("host")), ("chart", self.render.chart({"device": "auto"}))):
            with self.subTest(name):
                config = self.render.work / "vrambroker.textproto"
                config.write_text(the("ConfigMap", rendered)["data"]["vrambroker.textproto"], encoding="utf-8")
                command = containers(rendered)["vrambrokerd"]["command"]
                words = [f"--config={config}" if word.startswith("--config=") else word for word in command[1:]]
                done = run(self.build / "server/vrambrokerd", *words, "--check-config")
                self.assertEqual((done.returncode, done.stderr), (0, ""))

    def test_the_image_serves_the_port(self):
        dockerfile = (SOURCE / "deploy/Dockerfile").read_text(encoding="utf-8")
        self.assertIn(f"EXPOSE {containers(self.base)['vrambrokerd']['ports'][0]['containerPort']}\n", dockerfile)


class ChartTest(KubernetesTest):
    # A user's values, and texts that the rendering must then have.
    GOOD = [
        ({"image": {"repository": "registry.example.com:5000/gpu/vrambroker", "tag": "1.2", "pullPolicy": "Always"}},
         ["registry.example.com:5000/gpu/vrambroker:1.2", "'Always'"]),
        ({"imagePullSecrets": [{"name": "pull"}]}, ["'imagePullSecrets': [{'name': 'pull'}]"]),
        ({"unit": "1GiB"}, ["'--unit=1GiB'"]),
        ({"resource": "example.com/gpu-memory"}, ["'--resource=example.com/gpu-memory'"]),
        ({"resourcePerDevice": True}, ["'--resource-per-device'"]),
        ({"gpuAccess": "cdi"}, ["'--gpu-access=cdi'"]),
        ({"gpuAccess": "none"}, ["'--gpu-access=none'"]),
        ({"device": "auto"}, ["'--device=auto'"]),
        ({"runtimeClassName": "nvidia"}, ["'runtimeClassName': 'nvidia'"]),
        ({"config": 'capacity: "8GiB"\n\nrules { rights: NONE }\n'}, ["'capacity: \"8GiB\"\\n\\nrules { rights: NONE }\\n'"]),
        ({"socketDir": "/var/run/vram_broker"}, ["'path': '/var/run/vram_broker'"]),
        ({"kubeletDir": "/var/lib/k0s/kubelet"}, ["'path': '/var/lib/k0s/kubelet/pod-resources'", "'--kubelet-dir=/var/lib/k0s/kubelet'"]),
        ({"nodeSelector": {"pool": "gpu"}}, ["'nodeSelector': {'pool': 'gpu', 'vrambroker.dev/gpu': 'shared'}"]),
        ({"nodeSelector": {"pool": "gpu", "vrambroker.dev/gpu": None}}, ["'nodeSelector': {'pool': 'gpu'}"]),
        ({"tolerations": [{"key": "a", "operator": "Equal", "value": "b", "effect": "NoExecute", "tolerationSeconds": 5}]}, ["'tolerationSeconds': 5"]),
        ({"tolerations": []}, []),
        ({"priorityClassName": "gpu"}, ["'priorityClassName': 'gpu'"]),
        ({"priorityClassName": ""}, []),
        ({"podAnnotations": {"a/b": "c"}}, ["'a/b': 'c'", "'prometheus.io/scrape': 'true'"]),
        ({"resources": {"vrambrokerd": {"limits": {"cpu": "1.5", "memory": "1Gi"}}, "devicePlugin": {"requests": {"cpu": 1}}}},
         ["'limits': {'cpu': '1.5', 'memory': '1Gi'}", "'requests': {'cpu': 1, 'memory': '32Mi'}"]),
        ({"podMonitor": {"enabled": True, "interval": "1m", "labels": {"release": "prometheus"}}}, ["'interval': '1m'", "'release': 'prometheus'"]),
    ]
    # Refused values, and the named part.
    BAD = [
        ({"gpuAcess": "cdi"}, "gpuAcess"),
        ({"image": {"name": "x"}}, "name"),
        ({"image": {"tag": 1.5}}, "1.5"),
        ({"image": "vrambroker"}, "vrambroker"),
        ({"image": {"repository": ""}}, "''"),
        ({"imagePullSecrets": ["pull"]}, "pull"),
        ({"unit": "256Mi"}, "256Mi"),
        ({"unit": 268435456}, "268435456"),
        ({"unit": "0MiB"}, "0MiB"),
        ({"unit": None}, "unit"),
        ({"resource": "memory"}, "memory"),
        ({"resourcePerDevice": "true"}, "true"),
        ({"gpuAccess": "CDI"}, "CDI"),
        ({"device": "gpu"}, "gpu"),
        ({"runtimeClassName": "NVIDIA"}, "NVIDIA"),
        ({"config": {"capacity": "8GiB"}}, "capacity"),
        ({"socketDir": "run/vrambroker"}, "run/vrambroker"),
        ({"kubeletDir": "/var/lib/kubelet/"}, "/var/lib/kubelet/"),
        ({"nodeSelector": {"gpu": True}}, "True"),
        ({"nodeSelector": ["gpu"]}, "gpu"),
        ({"tolerations": [{"key": "a", "operator": "In"}]}, "In"),
        ({"tolerations": [{"kee": "a"}]}, "kee"),
        ({"podAnnotations": {"prometheus.io/port": 9477}}, "9477"),
        ({"resources": {"requests": {"cpu": "1"}}}, "requests"),
        ({"resources": {"vrambrokerd": {"limits": {"memory": "1GB"}}}}, "1GB"),
        ({"podMonitor": {"interval": 15}}, "15"),
        ({"podMonitor": {"enabled": "yes"}}, "yes"),
    ]

    def setUp(self):
        super().setUp()
        self.schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))

    def check(self, over):
        jsonschema.validate(self.render.values(over), self.schema, cls=jsonschema.Draft7Validator)

    def test_it_is_the_base_by_default(self):
        self.assertEqual(compared(self.render.chart({})), compared(self.base))

    def test_its_values_are_the_overlays(self):
        for over, overlay in (({"device": "host"}, "host"), ({"runtimeClassName": "nvidia"}, "runtime-class")):
            with self.subTest(overlay):
                self.assertNotEqual(compared(self.render.kustomize(overlay)), compared(self.base))
                self.assertEqual(compared(self.render.chart(over)), compared(self.render.kustomize(overlay)))

    def test_its_pod_monitor_is_the_one_beside_it(self):
        rendered = [each for each in self.render.chart({"podMonitor": {"enabled": True}}) if each["kind"] == "PodMonitor"]
        self.assertEqual(compared(rendered), compared([self.pod_monitor()]))

    def test_a_release_has_its_own_name_and_namespace(self):
        rendered = self.render.chart({"podMonitor": {"enabled": True}}, release="small-gpus", namespace="gpus")
        self.assertEqual({(each["kind"], each["metadata"]["name"], each["metadata"]["namespace"]) for each in rendered},
                         {(kind, "small-gpus", "gpus") for kind in ("ConfigMap", "DaemonSet", "PodMonitor")})
        for labels in (daemon_set(rendered)["spec"]["selector"]["matchLabels"], the("PodMonitor", rendered)["spec"]["selector"]["matchLabels"]):
            self.assertEqual(labels, {NAME: "vrambroker", "app.kubernetes.io/instance": "small-gpus"}, "not the pods of another release")

    def test_a_changed_configuration_is_rolled_out(self):
        checksum = lambda rendered: daemon_set(rendered)["spec"]["template"]["metadata"]["annotations"]["checksum/config"]
        self.assertNotEqual(checksum(self.render.chart({})), checksum(self.render.chart({"config": ""})))

    def test_the_schema_is_strict(self):
        jsonschema.Draft7Validator.check_schema(self.schema)
        def look(part, path):
            if isinstance(part, dict):
                if part.get("type") == "object" and path != "global":
                    self.assertIn("additionalProperties", part, path)
                for name, inner in part.items():
                    look(inner, name)
            elif isinstance(part, list):
                for inner in part:
                    look(inner, path)
        look(self.schema, "")
        self.assertEqual(set(self.schema["required"]), set(self.render.values({})))

    def test_good_values(self):
        self.check({})
        self.check({"global": {"of": "another chart"}})
        untouched = str(self.render.chart({}))
        given = set()
        for over, wanted in self.GOOD:
            with self.subTest(values=over):
                given |= set(over)
                self.check(over)
                rendered = str(self.render.chart(over))
                self.assertNotEqual(rendered, untouched)
                for text in wanted:
                    self.assertIn(text, rendered)
        self.assertEqual(given, set(self.render.values({})), "each value does something")

    def test_bad_values(self):
        for over, named in self.BAD:
            with self.subTest(values=over), self.assertRaises(jsonschema.ValidationError) as refused:
                self.check(over)
            self.assertIn(named, refused.exception.message)


if __name__ == "__main__":
    KubernetesTest.build = pathlib.Path(sys.argv[1])
    KubernetesTest.render = Renderer(sys.argv[2])
    unittest.main(argv=sys.argv[:1], verbosity=2)
