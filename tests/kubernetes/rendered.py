# SPDX-License-Identifier: Apache-2.0
"""Renders the objects of deploy/kubernetes for Kubernetes: the kustomize folders, the chart, the examples."""
import json
import os
import pathlib
import shutil
import subprocess
import sys

import yaml

SOURCE = pathlib.Path(__file__).resolve().parents[2]
KUBERNETES = SOURCE / "deploy/kubernetes"
BASE = KUBERNETES / "base"
CHART = KUBERNETES / "chart"
OVERLAYS = ("host", "runtime-class")
EXAMPLES = sorted((KUBERNETES / "examples").glob("*.yaml"))
GOPATH = pathlib.Path("/usr/share/gocode")  # folder of Debian's packages
SKIP = 77  # SKIP_RETURN_CODE of CMakeLists.txt


def skip(problem):
    """Ends the test: a needed program or package is missing."""
    print(f"deploy/kubernetes cannot be checked here: {problem}; on Debian 12 tests/run.sh --all installs what is missing")
    sys.exit(1 if os.environ.get("CI") else SKIP)


def run(*command, **options):
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False, **options)


def objects(text):
    """Returns the objects of a stream of YAML documents."""
    return [each for each in yaml.safe_load_all(text) if each is not None]


def the(kind, all_objects):
    """Returns the only object of a kind."""
    found = [each for each in all_objects if each["kind"] == kind]
    if len(found) != 1:
        raise AssertionError(f"{len(found)} objects are a {kind}")
    return found[0]


class Renderer:
    """Renders the objects by kubectl, and by helm_template.go, which the renderer builds in `work`."""

    def __init__(self, work):
        for program in ("kubectl", "go"):
            if shutil.which(program) is None:
                skip(f"there is no {program}")
        for package in ("github.com/Masterminds/sprig", "sigs.k8s.io/yaml"):
            if not (GOPATH / "src" / package).is_dir():
                skip(f"there is no Go package {package}")
        self.work = pathlib.Path(work)
        self.work.mkdir(parents=True, exist_ok=True)
        self.helm_template = self.work / "helm_template"
        built = run("go", "build", "-o", self.helm_template, pathlib.Path(__file__).parent / "helm_template.go",
                    env={**os.environ, "GO111MODULE": "off", "GOPATH": str(GOPATH), "GOCACHE": str(self.work / "gocache"), "GOFLAGS": ""})
        if built.returncode != 0:
            raise AssertionError(f"helm_template.go: {built.stderr}")

    def kustomize(self, name):
        done = run("kubectl", "kustomize", KUBERNETES / name)
        if done.returncode != 0:
            raise AssertionError(f"kubectl kustomize deploy/kubernetes/{name}: {done.stderr}")
        return objects(done.stdout)

    def _files(self, over):
        path = self.work / "values.yaml"
        path.write_text(yaml.safe_dump(over), encoding="utf-8")
        return [path]

    def values(self, over):
        """Returns the templates' values for a user's values `over`."""
        done = run(self.helm_template, "values", CHART, *self._files(over))
        if done.returncode != 0:
            raise AssertionError(done.stderr)
        return json.loads(done.stdout)

    def chart(self, over, release="vrambroker", namespace="vrambroker"):
        done = run(self.helm_template, "template", release, namespace, CHART, *self._files(over))
        if done.returncode != 0:
            raise AssertionError(done.stderr)
        return objects(done.stdout)
