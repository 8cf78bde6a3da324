# SPDX-License-Identifier: Apache-2.0
"""The dashboards of deploy/grafana as their files have them: panels, queries, variables."""
import json
import re

from load import SOURCE

DASHBOARDS = SOURCE / "deploy" / "grafana" / "dashboards"
NAMES = ("overview", "session")
# What Grafana puts in place of its own variables; here for scrapes every two seconds.
INTERVALS = {"__rate_interval": "20s", "__interval": "5s", "__range": "5m"}

# A word for memory that is not deploy/GLOSSARY.md's: people would take it for two different things. Names in code may have it.
OF_NO_GLOSSARY = re.compile(r"(?<![-\w])idle(?![-\w])", re.I)


def load(name):
    return json.loads((DASHBOARDS / f"{name}.json").read_text(encoding="utf-8"))


def panels(board):
    """Without the titles of rows."""
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def fill_in(expr, **chosen):
    """The query with its variables replaced: by what was chosen, or by what stands for all."""
    def value(match):
        name = match[1]
        return INTERVALS[name] if name in INTERVALS else chosen.get(name, ".*")
    return re.sub(r"\$(\w+)", value, expr)


def variables(board):
    """(name, metric and selector, label) of each variable that asks Prometheus."""
    found = []
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            match = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["definition"])
            assert match, f"variable {variable['name']}: {variable['definition']}"
            found.append((variable["name"], match[1], match[2]))
    return found


def queries(board):
    """Every query of the dashboard."""
    return ([target["expr"] for panel in panels(board) for target in panel["targets"]]
            + [annotation["expr"] for annotation in board["annotations"]["list"]]
            + [selector for _, selector, _ in variables(board)])


def metrics_of(text):
    """Names of our metrics in queries or rules."""
    without_strings = re.sub(r'"[^"]*"', "", text)
    return {re.sub(r"_(bucket|count|sum)$", "", name) if "_duration_seconds" in name else name
            for name in re.findall(r"(?<![:\w])(?:vrambroker|process)_\w+", without_strings)}


def legend(target, labels):
    """What Grafana calls the series."""
    return re.sub(r"\{\{(\w+)\}\}", lambda match: labels.get(match[1], ""), target["legendFormat"])
