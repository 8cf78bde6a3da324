# SPDX-License-Identifier: Apache-2.0
"""Checks deploy/grafana, deploy/prometheus and deploy/compose.yaml without running them."""
import importlib.util
import os
import pathlib
import re
import subprocess
import tempfile
import unittest

import yaml

import boards
from load import SOURCE

DEPLOY = SOURCE / "deploy"
PROMETHEUS = DEPLOY / "prometheus"


def read_yaml(path):
    return yaml.safe_load(path.read_text(encoding="utf-8"))


class DashboardFilesTest(unittest.TestCase):
    def test_they_are_what_the_script_writes(self):
        spec = importlib.util.spec_from_file_location("dashboards", DEPLOY / "grafana" / "dashboards.py")
        script = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(script)
        written = {path.name: path.read_text(encoding="utf-8") for path in boards.DASHBOARDS.iterdir()}
        self.assertEqual(set(written), set(script.files()))
        for name, text in script.files().items():
            self.assertTrue(written[name] == text, f"{name} is not what deploy/grafana/dashboards.py writes: run it")

    def test_panels(self):
        for name in boards.NAMES:
            board = boards.load(name)
            taken = {}
            ids = [panel["id"] for panel in board["panels"]]
            titles = [panel["title"] for panel in boards.panels(board)]
            self.assertEqual(len(ids), len(set(ids)), "two panels with one id")
            self.assertEqual(len(titles), len(set(titles)), f"two panels with one title: {sorted(titles)}")
            for panel in board["panels"]:
                where = panel["gridPos"]
                self.assertLessEqual(where["x"] + where["w"], 24, panel["title"])
                for x in range(where["x"], where["x"] + where["w"]):
                    for y in range(where["y"], where["y"] + where["h"]):
                        self.assertNotIn((x, y), taken, f"{panel['title']} lies over {taken.get((x, y))}")
                        taken[x, y] = panel["title"]
            for panel in boards.panels(board):
                with self.subTest(dashboard=name, panel=panel["title"]):
                    self.assertGreater(len(panel["description"]), 20)
                    self.assertTrue(panel["description"].endswith("."))
                    self.assertTrue(panel["fieldConfig"]["defaults"]["unit"])
                    self.assertTrue(panel["fieldConfig"]["defaults"]["thresholds"]["steps"])
                    references = [target["refId"] for target in panel["targets"]]
                    self.assertEqual(len(references), len(set(references)))

    def test_words_are_the_glossarys(self):
        texts = [text for rule in read_yaml(PROMETHEUS / "vrambroker.rules.yml")["groups"] for alert in rule["rules"]
                 for text in alert.get("annotations", {}).values()]
        for name in boards.NAMES:
            for panel in boards.panels(boards.load(name)):
                texts += [panel["title"], panel["description"], *(target["legendFormat"] for target in panel["targets"])]
        self.assertGreater(len(texts), 100)
        for text in texts:
            self.assertNotRegex(text, boards.OF_NO_GLOSSARY)

    def test_nothing_is_fixed_to_one_prometheus_or_daemon(self):
        for name in boards.NAMES:
            board = boards.load(name)
            known = {variable["name"] for variable in board["templating"]["list"]}
            self.assertLessEqual({"datasource", "job", "instance", "gpu", "tenant"}, known)
            for part in board["annotations"]["list"] + [
                    each for panel in boards.panels(board) for each in [panel, *panel["targets"]]] + [
                    variable for variable in board["templating"]["list"] if variable["type"] == "query"]:
                self.assertEqual(part["datasource"], {"type": "prometheus", "uid": "${datasource}"})
            for query in boards.queries(board):
                with self.subTest(dashboard=name, query=query):
                    used = set(re.findall(r"\$(\w+)", query))
                    self.assertLessEqual(used - set(boards.INTERVALS), known)
                    for selector in re.findall(r"(?<![:\w])(?:vrambroker|process)_\w+(?:\{([^}]*)\})?", query):
                        if query != "vrambroker_build_info":  # the variable job comes from vrambroker_build_info
                            self.assertIn('job=~"$job"', selector)

    def test_links_lead_to_each_other(self):
        uids = {boards.load(name)["uid"] for name in boards.NAMES}
        for name in boards.NAMES:
            text = (boards.DASHBOARDS / f"{name}.json").read_text(encoding="utf-8")
            linked = set(re.findall(r'"/d/([\w-]+)', text))
            self.assertLessEqual(linked, uids)
            self.assertTrue(uids - {boards.load(name)["uid"]} <= linked)


class PrometheusFilesTest(unittest.TestCase):
    def promtool(self, *words):
        return subprocess.run(["promtool", *words], capture_output=True, text=True, check=False, cwd=PROMETHEUS)

    def test_promtool_accepts_them(self):
        for words in (["check", "config", "prometheus.yml"], ["check", "rules", "vrambroker.rules.yml"],
                      ["test", "rules", "vrambroker.rules.test.yml"]):
            result = self.promtool(*words)
            self.assertEqual(result.returncode, 0, f"promtool {' '.join(words)}:\n{result.stdout}{result.stderr}")

    def test_a_changed_threshold_is_noticed(self):
        rules = PROMETHEUS.joinpath("vrambroker.rules.yml").read_text(encoding="utf-8")
        tests = read_yaml(PROMETHEUS / "vrambroker.rules.test.yml")
        alerts = re.findall(r"- alert: (\w+)\n(        expr: .*[<>=]=? [\d.]+.*)$", rules, re.M)
        self.assertGreater(len(alerts), 20)
        for alert, expression in alerts:
            changed = re.sub(r"(.*[<>=]=? )([\d.]+)", lambda match: f"{match[1]}{float(match[2]) * 1.5 or 2}", expression, count=1)
            with self.subTest(alert=alert, changed=changed), tempfile.TemporaryDirectory() as folder:
                write = pathlib.Path(folder).joinpath
                write("vrambroker.rules.yml").write_text(rules.replace(expression, changed), encoding="utf-8")
                about = [test for test in tests["tests"] if alert in str(test)]
                write("test.yml").write_text(yaml.safe_dump({**tests, "tests": about}), encoding="utf-8")
                result = subprocess.run(["promtool", "test", "rules", "test.yml"], cwd=folder, capture_output=True, check=False)
                self.assertNotEqual(result.returncode, 0, "no test notices")

    def test_every_alert_is_explained_and_shown_firing_and_silent(self):
        rules = read_yaml(PROMETHEUS / "vrambroker.rules.yml")
        alerts = {rule["alert"]: rule for group in rules["groups"] for rule in group["rules"] if "alert" in rule}
        for name, alert in alerts.items():
            with self.subTest(alert=name):
                self.assertIn(alert["labels"]["severity"], ("critical", "warning", "info"))
                for part in ("summary", "description", "runbook"):
                    self.assertGreater(len(alert["annotations"][part]), 20, part)
        firing = set()
        for test in read_yaml(PROMETHEUS / "vrambroker.rules.test.yml")["tests"]:
            fires = {name for each in test.get("promql_expr_test", []) for sample in each["exp_samples"]
                     for name in re.findall(r'alertname="(\w+)"', sample["labels"])}
            fires |= {each["alertname"] for each in test.get("alert_rule_test", []) if each["exp_alerts"]}
            if fires:
                self.assertTrue([each for each in test["promql_expr_test"]
                                 if each["expr"].startswith("ALERTS") and not each["exp_samples"]],
                                f"'{test['name']}' does not show when nothing fires")
            firing |= fires
        self.assertEqual(firing, set(alerts))

    def test_runbooks_name_commands_that_exist(self):
        commands = set(re.findall(r'"(\w+)",\s+"[A-Z]', (SOURCE / "client/vramctl/arguments.cc").read_text(encoding="utf-8")))
        self.assertIn("sessions", commands)
        text = (PROMETHEUS / "vrambroker.rules.yml").read_text(encoding="utf-8")
        self.assertLessEqual(set(re.findall(r"vramctl (\w+)", text)), commands)


class ComposeTest(unittest.TestCase):
    def setUp(self):
        self.services = read_yaml(DEPLOY / "compose.yaml")["services"]

    def test_every_file_that_is_mounted_or_built_from_exists(self):
        self.assertLessEqual({"vrambroker", "prometheus", "grafana"}, set(self.services))
        self.assertLessEqual(set(read_yaml(DEPLOY / "compose.gpu.yaml")["services"]), set(self.services))
        for name, service in self.services.items():
            for volume in service.get("volumes", []):
                source = volume.split(":")[0]
                if source.startswith("."):
                    self.assertTrue((DEPLOY / source).exists(), f"{name}: {source}")
        build = self.services["vrambroker"]["build"]
        context = (DEPLOY / build["context"]).resolve()
        self.assertEqual(context, SOURCE.resolve())
        dockerfile = (context / build["dockerfile"]).read_text(encoding="utf-8")
        for copied in re.findall(r"^COPY (?!--from)(.+)$", dockerfile, re.M):
            for source in copied.split()[:-1]:
                self.assertTrue((context / source).exists(), f"Dockerfile copies {source}")
        for script in re.findall(r"RUN (deploy/\S+)", dockerfile):
            self.assertTrue((context / script).exists(), f"Dockerfile runs {script}")

    def test_programs_know_their_flags(self):
        programs = {"vrambrokerd": os.environ["VRAMBROKERD"], "vrambroker-demo": os.environ["VRAMBROKER_DEMO"], "--config.file": "prometheus"}
        for name, service in self.services.items():
            if "command" not in service:
                continue
            first = service["command"][0].split("=")[0]
            result = subprocess.run([programs[first], "--help"], capture_output=True, text=True, check=False)
            for word in service["command"]:
                if word.startswith("--"):
                    flag = word[2:].split("=")[0]
                    self.assertRegex(result.stdout + result.stderr, rf"--(\[no-\])?{re.escape(flag)}\b", f"{name}: no flag {word}")

    def test_the_pieces_fit(self):
        scrape = read_yaml(PROMETHEUS / "prometheus.yml")
        self.assertEqual(scrape["scrape_configs"][0]["job_name"], "vrambroker")  # the alerts' selectors
        self.assertEqual(scrape["scrape_configs"][0]["static_configs"][0]["targets"], ["localhost:9477"])
        self.assertEqual(self.services["prometheus"]["network_mode"], "service:vrambroker")
        self.assertIn("--http-address=0.0.0.0:9477", self.services["vrambroker"]["command"])
        self.assertTrue(all(port.startswith("127.0.0.1:") for service in self.services.values() for port in service.get("ports", [])))
        mounted = [volume.split(":")[1] for volume in self.services["prometheus"]["volumes"]]
        for rules in scrape["rule_files"]:
            self.assertIn(f"/etc/prometheus/{rules}", mounted)
        mounted = [volume.split(":")[1] for volume in self.services["grafana"]["volumes"]]
        provider = read_yaml(DEPLOY / "grafana/provisioning/dashboards/vrambroker.yml")["providers"][0]
        self.assertIn(provider["options"]["path"], mounted)
        self.assertIn("/etc/grafana/provisioning", mounted)
        datasource = read_yaml(DEPLOY / "grafana/provisioning/datasources/prometheus.yml")["datasources"][0]
        self.assertEqual(datasource["uid"], "vrambroker-prometheus")
        variable = re.fullmatch(r"\$\{(\w+)\}", datasource["url"])[1]
        self.assertEqual(self.services["grafana"]["environment"][variable], "http://vrambroker:9090")
        self.assertEqual(datasource["jsonData"]["timeInterval"], scrape["global"]["scrape_interval"])


if __name__ == "__main__":
    unittest.main(verbosity=2)
