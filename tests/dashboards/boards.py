# SPDX-License-Identifier: Apache-2.0
"""Reads the files of deploy/grafana's dashboards: panels, queries, variables."""
import json
import re

from load import SOURCE

DASHBOARDS = SOURCE / "deploy" / "grafana" / "dashboards"
NAMES = ("overview", "session")
# Replacements for Grafana's own variables, for scrapes every two seconds.
INTERVALS = {"__rate_interval": "20s", "__interval": "5s", "__range": "5m"}

# A word for memory that deploy/GLOSSARY.md lacks: readers would take the word for another thing. Names in code may
# use the word.
OF_NO_GLOSSARY = re.compile(r"(?<![-\w])idle(?![-\w])", re.I)


def load(name):
    return json.loads((DASHBOARDS / f"{name}.json").read_text(encoding="utf-8"))


def panels(board):
    """Returns the panels without the titles of rows."""
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def fill_in(expr, **chosen):
    """Returns the query with its variables replaced by the chosen values, or by the pattern for all."""
    def value(match):
        name = match[1]
        return INTERVALS[name] if name in INTERVALS else chosen.get(name, ".*")
    return re.sub(r"\$(\w+)", value, expr)


def variables(board):
    """Returns (name, metric and selector, label) of each variable that asks Prometheus."""
    found = []
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            match = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["definition"])
            assert match, f"variable {variable['name']}: {variable['definition']}"
            found.append((variable["name"], match[1], match[2]))
    return found


def queries(board):
    """Returns every query of the dashboard."""
    return ([target["expr"] for panel in panels(board) for target in panel["targets"]]
            + [annotation["expr"] for annotation in board["annotations"]["list"]]
            + [selector for _, selector, _ in variables(board)])


def metrics_of(text):
    """Returns the names of vrambroker's metrics in queries or rules."""
    without_strings = re.sub(r'"[^"]*"', "", text)
    return {re.sub(r"_(bucket|count|sum)$", "", name) if "_duration_seconds" in name else name
            for name in re.findall(r"(?<![:\w])(?:vrambroker|process)_\w+", without_strings)}


def legend(target, labels):
    """Returns Grafana's name of the series."""
    return re.sub(r"\{\{(\w+)\}\}", lambda match: labels.get(match[1], ""), target["legendFormat"])
