# SPDX-License-Identifier: Apache-2.0
"""The dashboards fit the types of Grafana's SDK, and Grafana's component library draws them, from live data.

Needs Node.js with npm, its registry, and Chromium. Without these programs the test is skipped; with CI set the test
fails instead. Pictures and installed packages stay in $VRAMBROKER_DRAWN_DIR.
"""
import hashlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import unittest

import boards
from load import LoadedTest

HERE = pathlib.Path(__file__).parent
FOLDER = pathlib.Path(os.environ.get("VRAMBROKER_DRAWN_DIR", "drawn"))
CAPTION = "drawn with Grafana's component library, not with Grafana"
# Messages of the library outside of Grafana, with the reason why each message is no fault.
EXPECTED = [r"/public/fonts/",  # the library's package lacks Grafana's fonts
            r"t\(\) was called before i18n was initialized"]  # texts are English then
SKIP = 77  # SKIP_RETURN_CODE of CMakeLists.txt


def install():
    """Copies draw/ to FOLDER and installs its packages there; returns a text if the installation is not possible."""
    for program in ("node", "npm"):
        if shutil.which(program) is None:
            return f"there is no {program}"
    if chromium() is None:
        return "there is no chromium"
    FOLDER.mkdir(parents=True, exist_ok=True)
    for path in (HERE / "draw").iterdir():
        shutil.copy(path, FOLDER)
    stamp = FOLDER / "node_modules" / ".installed"
    wanted = hashlib.sha256((FOLDER / "package-lock.json").read_bytes()).hexdigest()
    if stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
        return None
    # npm ci itself tries for minutes before it reports a missing registry.
    patience = ["--fetch-retries=5", "--fetch-timeout=120000"] if os.environ.get("CI") else [
        "--fetch-retries=1", "--fetch-retry-mintimeout=1000", "--fetch-timeout=20000"]
    probe = subprocess.run(["npm", "view", "ajv", "version", *patience],
                           cwd=FOLDER, capture_output=True, text=True, check=False)
    if probe.returncode != 0:
        return f"npm's registry does not answer:\n{probe.stderr}"
    # No installed package needs a script of its own to run.
    result = subprocess.run(["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--prefer-offline", "--loglevel=error",
                             "--fetch-retries=5", "--fetch-timeout=120000"],
                            cwd=FOLDER, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        return f"npm ci failed:\n{result.stdout}{result.stderr}"
    stamp.write_text(wanted, encoding="utf-8")
    return None


def chromium():
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class SchemaTest(unittest.TestCase):
    def test_the_dashboards_fit_the_types_of_grafanas_sdk(self):
        broken = boards.load("session")
        graph = next(panel for panel in broken["panels"] if panel["type"] == "timeseries")
        graph["fieldConfig"]["defaults"]["custom"]["lineWidht"] = 1
        graph["targets"][0]["expression"] = "up"
        del graph["options"]["legend"]["calcs"]
        broken["refreshes"] = "30s"
        (FOLDER / "broken.json").write_text(json.dumps(broken), encoding="utf-8")
        files = [str(boards.DASHBOARDS / f"{name}.json") for name in boards.NAMES]
        result = subprocess.run(["node", "schema.mjs", *files, "broken.json"], cwd=FOLDER, capture_output=True, text=True, check=False)
        self.assertEqual(result.stderr, "")
        faults = result.stdout.splitlines()[:-1]
        self.assertEqual([fault for fault in faults if not fault.startswith("broken.json")], [])
        for what in ("lineWidht", "expression", "calcs", "refreshes"):  # the schema would find the fault
            self.assertTrue([fault for fault in faults if what in fault], what)


class DrawnTest(LoadedTest):
    WORK_SECONDS = 30

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        common = {"from": cls.began, "to": cls.prometheus.at, "step": 1, "caption": CAPTION}
        cls.jobs = [
            {"dashboard": str(boards.DASHBOARDS / "overview.json"), "picture": "overview.png", "chosen": boards.INTERVALS, **common},
            {"dashboard": str(boards.DASHBOARDS / "session.json"), "picture": "session.png",
             "chosen": {**boards.INTERVALS, "gpu": "0", "client": "train-a"}, **common}]
        (FOLDER / "jobs.json").write_text(json.dumps(
            {"prometheus": cls.prometheus.address, "chromium": chromium(), "jobs": cls.jobs}), encoding="utf-8")
        drawn = subprocess.run(["node", "draw.mjs", "jobs.json"], cwd=FOLDER, stdout=subprocess.PIPE, text=True, check=False)
        assert drawn.returncode == 0, "draw.mjs failed: see above"
        cls.reports = json.loads(drawn.stdout.splitlines()[-1])

    def test_nothing_went_wrong(self):
        for job, report in zip(self.jobs, self.reports):
            said = [line for line in report["console"] if not any(re.search(expected, line) for expected in EXPECTED)]
            self.assertEqual(report["errors"] + said, [], job["picture"])
            self.assertGreater((FOLDER / job["picture"]).stat().st_size, 100_000)

    def test_every_panel_drew_something(self):
        for job, report in zip(self.jobs, self.reports):
            titles = [panel["title"] for panel in report["panels"]]
            board = json.loads(pathlib.Path(job["dashboard"]).read_text(encoding="utf-8"))
            self.assertEqual(titles, [panel["title"] for panel in boards.panels(board)])
            for panel in report["panels"]:
                with self.subTest(picture=job["picture"], panel=panel["title"]):
                    self.assertGreater(panel["frames"], 0)
                    self.assertGreater(panel["rows"], 0)
                    self.assertIn(panel["title"], panel["text"])
                    self.assertNotIn("No data", panel["text"])
                    self.assertNotIn("NaN", panel["text"])
                    inside = panel["text"].replace(panel["title"], "", 1)
                    self.assertTrue(re.search(r"\w", inside), "nothing but its title")
                    if panel["type"] == "timeseries":
                        self.assertTrue(panel["color"], "no line, area or bar")

    def test_the_figures_are_the_loads(self):
        for picture, title, text in (
                ("overview.png", "Sessions", "8"), ("overview.png", "Waiting now", "1"), ("overview.png", "Devices lost", "0"),
                ("overview.png", "All sessions", "train-a"),
                ("session.png", "Limit", "80 MiB"), ("session.png", "Fragmented", "50"), ("session.png", "Selected sessions", "train-a")):
            report = self.reports[[job["picture"] for job in self.jobs].index(picture)]
            panel = next(panel for panel in report["panels"] if panel["title"] == title)
            self.assertIn(text, panel["text"].replace("\n", " ").replace("\xa0", " "))


if __name__ == "__main__":
    if problem := install():
        print(f"The dashboards cannot be drawn here: {problem}")
        sys.exit(1 if os.environ.get("CI") else SKIP)
    unittest.main(verbosity=2)
