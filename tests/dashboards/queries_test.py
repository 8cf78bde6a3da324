# SPDX-License-Identifier: Apache-2.0
"""Runs every query of the dashboards on a real Prometheus with a real daemon: each query finds the right figures."""
import html.parser
import itertools
import json
import math
import os
import re
import shutil
import subprocess
import tempfile
import unittest
import urllib.request

import boards
from load import CAPACITY, KIB, MIB, PATIENCE, Load, LoadedTest, wait_for


CHROMIUM = os.environ.get("CHROMIUM", "chromium")
# Panels whose queries may find no series, with the reason.
MAY_BE_EMPTY = {("overview", "Uncounted programs"): "host devices do not tell"}

# Exported metrics that no dashboard shows, with the reason.
NOT_SHOWN = {"vrambroker_device_processes_known": "for those who alert on it; vramctl status says why it is 0"}

# Known figures on device 0: by dashboard and panel, then by legend.
LIMITS = {"serve-api": 160, "train-a": 80, "notebook": 20, "train-d": 320, "train-b": 320, "guest-big": 320, "guest-late": 320,
          "guest-ended": 320, "steady": 20}
RESERVED = {"serve-api": 54, "train-a": 80, "notebook": 16, "train-d": 24, "train-b": 0, "guest-big": 60, "guest-late": 0,
            "guest-ended": 10, "steady": 2}
OVERVIEW = {
    "Daemons serving": {"": 1},
    "Devices lost": {"": 0},
    "Sessions": {"": 8},
    "Capacity in use": {"": Load.RESERVED / CAPACITY},
    "Fragmented": {"": Load.FRAGMENTED / Load.LEASED},
    "Waiting now": {"": 1},
    "Capacity in use by device": {"gpu 0": Load.RESERVED / CAPACITY},
    "Capacity by state": {"allocated": Load.ALLOCATED, "waiting for a stream": 0, "fragmented": Load.FRAGMENTED,
                          "reclaimable": Load.RECLAIMABLE, "unknown": 0, "cached by the daemon": Load.CACHED, "left behind": Load.LEFT_BEHIND,
                          "unreserved": CAPACITY - Load.RESERVED},
    "By tenant": {"serving": 54 * MIB, "research": 104 * MIB, "guests": 88 * MIB},
    "By session: top ten": {name: held * MIB for name, held in RESERVED.items()},
    "Share of the limit: top ten": {f"{name} gpu 0": RESERVED[name] / limit for name, limit in LIMITS.items()},
    "Fragmented and unused memory": {"gpu 0: fragmented": Load.FRAGMENTED / Load.LEASED,
                                     "gpu 0: unused": 1 - Load.ALLOCATED / Load.LEASED},
    "Guarantees and capacity": {"capacity": CAPACITY, "committed": Load.COMMITTED, "guaranteed": 80 * MIB,
                                        "reserved": Load.RESERVED},
    "By claim": {"lab": 16 * MIB},
    "Sessions by claim": {"lab": 1},
    "Number of claims": {"": 1},
    "Waiting requests": {"gpu 0": 1},
    "Quarantined memory by reason": {"settling": 0, "held_open": 30 * MIB, "ended": 10 * MIB, "disconnected": 0, "refused": 0},
    "Sessions by state": {"active": 8, "ended": 1, "disconnected": 0},
    "Memory as the driver sees it": {"held by the daemon": Load.RESERVED, "used by others": 0},
    "Sessions shown as _other": {"": 0},
    "Failed scrapes, last hour": {"": 0},
    "Rejected configurations": {"": 0},
}
# Figures of train-a alone: four segments of 20 MiB, each with two used blocks of 5 and two holes of 5.
TRAIN_A = {
    "Reserved, % of limit": {"": 1},
    "Allocated, % of limit": {"": 0.5},
    "Fragmented": {"": 0.5},
    "Limit": {"": 80 * MIB},
    "Guarantee": {"": 0},
    "Peak use": {"": 80 * MIB},
    "Waiting now": {"": 0},
    "Composition of the memory": {"asked for": 40 * MIB, "rounding": 0, "waiting for a stream": 0,
                                  "fragmented": 40 * MIB, "reclaimable": 0, "unknown": 0},
    "Between guarantee and limit": {"limit": 80 * MIB, "reserved": 80 * MIB, "allocated": 40 * MIB, "guarantee": 0,
                                    "peak reserved": 80 * MIB},
    "Fragmented and unused memory": {"train-a gpu 0: fragmented": 0.5, "train-a gpu 0: unused": 0.5},
    "Free memory that one large request cannot use": {"train-a gpu 0": 1 - 5 / 40},
    "Fragmented and lost memory": {"fragmented": 0.5, "lost to rounding": 0},
    "Free memory by size of the free blocks": {"2 to 16 MiB": 40 * MIB, "16 to 128 MiB": 0, "below 4 KiB": 0},
    "Largest free block and all free memory": {"train-a gpu 0: largest": 5 * MIB, "train-a gpu 0: all": 40 * MIB},
    "Growth of fragmentation": {"train-a gpu 0": 0},
    "Time until refusals at this rate": {"train-a gpu 0": 86400},
    "Segments and blocks": {"segments": 4, "blocks": 8},
}
SERVE_API = {
    "Reserved, % of limit": {"": 54 / 160},
    "Guarantee": {"": 64 * MIB},
    "Composition of the memory": {"asked for": 40 * MIB + 1000, "rounding": 24, "waiting for a stream": 0,
                                  "fragmented": 2 * MIB - KIB, "reclaimable": 12 * MIB},
    "Free memory by size of the free blocks": {"256 KiB to 2 MiB": 2 * MIB - KIB, "2 to 16 MiB": 12 * MIB, "below 4 KiB": 0},
    "Segments and blocks": {"segments": 3, "blocks": 2},
}


def fragmented_share(device):
    """Computes FRAG from vramctl's JSON for a session or a claim on a device."""
    return device["inactive_split_bytes"] / device["reserved_bytes"] if device["reserved_bytes"] > 0 else 0


def as_text(count):
    """Writes a size like vramctl; for less than a GiB."""
    return f"{count / MIB:.2f} MiB"


def long_bytes(count):
    """Writes a size like the page; for less than a GiB."""
    unit, divisor = ("MiB", MIB) if count >= MIB else ("KiB", KIB) if count >= KIB else ("B", 1)
    return f"{count} B" if divisor == 1 else f"{count / divisor:.2f} {unit}"


def short_bytes(count):
    """Writes a size like vramctl in a narrow column; for less than 1000 MiB."""
    if count < 1000:
        return f"{count}B" if count else "0"
    value, unit = (count / KIB, "K") if count / KIB < 1000 else (count / MIB, "M")
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}{unit}"


def top_rows(screen):
    """Returns {session, or "claim " and its name: {word: text}} of device 0."""
    lines = screen.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("NAME "))
    heading = lines[first].split()
    rows = {}
    for line in itertools.takewhile(str.strip, lines[first + 1:]):
        claim = "claim " if line.startswith("- ") else ""
        cells = dict(zip(heading, line.removeprefix("- ").split()))
        if cells["DEV"] == "0":
            rows[claim + cells["NAME"]] = {word.lower(): cells[word] for word in (
                "LIMIT", "GUARANTEE", "RESERVED", "ALLOCATED", "RECLAIMABLE", "FRAG")}
    return rows


class Drawn(html.parser.HTMLParser):
    """Reads the page's view of device 0: `figures` by name, the words of its `bar`, and `rows` of sessions and claims
    by column; and all its `text`, with the texts shown under the pointer."""

    COLUMNS = (None, None, "allocated", "reclaimable", "fragmented", "frag")  # the columns of sessions.js

    def __init__(self, document):
        super().__init__()
        self.figures, self.bar, self.rows, self.text = {}, None, {}, ""
        self._device = self._row = self._table = self._into = None
        self._cell, self._kind = -1, ""
        self.feed(document)

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.text += attributes.get("title", "") + "\n"
        self._into = None
        if tag == "article":
            self._device = attributes.get("aria-label")
        elif tag == "table":
            self._table = attributes.get("id")
        elif self._device == "Device 0" and tag == "div" and attributes.get("class") == "bar":
            self.bar = attributes["aria-label"]
        elif self._device == "Device 0" and tag == "dd":
            self._into = (self.figures, attributes["data-figure"])
        elif self._table == "sessions" and tag == "tr" and ("data-session" in attributes or "data-claim" in attributes):
            self._row, self._cell, self._kind = {}, -1, "claim " if "data-claim" in attributes else ""
        elif self._row is not None and tag in ("th", "td"):
            self._cell += 1
            if 0 < self._cell < len(self.COLUMNS) and self.COLUMNS[self._cell]:
                self._into = (self._row, self.COLUMNS[self._cell])
        elif self._row is not None and self._cell == 0 and tag == "span":
            self._into = (self._row, "name")
        elif self._row is not None and self._cell == 1 and tag in ("b", "span"):
            self._into = (self._row, "reserved" if tag == "b" else "limit")

    def handle_data(self, data):
        self.text += data + "\n"
        if self._into is not None:
            place, name = self._into
            place[name] = data.removeprefix("of ") if name == "limit" else data

    def handle_endtag(self, tag):
        self._into = None
        if tag == "article":
            self._device = None
        elif tag == "tr" and self._row is not None:
            self.rows[self._kind + self._row.pop("name")] = self._row
            self._row = None


class DashboardsTest(LoadedTest):
    WORK_SECONDS = 22  # rates over 20 s need this time

    def run_target(self, target, **chosen):
        """Returns {labels: [values]}."""
        expr = boards.fill_in(target["expr"], **chosen)
        if target["instant"]:
            return [(series["metric"], [float(series["value"][1])])
                    for series in self.prometheus.get("query", query=expr, time=self.prometheus.at)["result"]]
        return [(series["metric"], [float(value) for _, value in series["values"]])
                for series in self.prometheus.get_range(expr, self.began)]

    def test_every_panel_finds_finite_figures(self):
        for name in boards.NAMES:
            for panel in boards.panels(boards.load(name)):
                for target in panel["targets"]:
                    with self.subTest(dashboard=name, panel=panel["title"], query=target["expr"]):
                        self.check_target(name, panel, target)

    def check_target(self, name, panel, target):
        result = self.run_target(target)
        if (name, panel["title"]) in MAY_BE_EMPTY:
            return
        self.assertTrue(result, "finds nothing")
        for labels, values in result:
            self.assertTrue(all(math.isfinite(value) for value in values), f"{labels}: {values}")
            self.assertTrue(all(value >= 0 for value in values), f"{labels}: negative: {values}")
            if panel["fieldConfig"]["defaults"]["unit"] == "percentunit":
                self.assertLessEqual(max(values), 1 + 1e-9, f"{labels}: a share above 1")
            for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
                self.assertIn(label, labels, "the legend names a label that the result lacks")
        if target["legendFormat"] != "__auto":
            legends = [boards.legend(target, labels) for labels, _ in result]
            self.assertEqual(len(legends), len(set(legends)), f"two lines of one name: {legends}")

    def test_annotations_and_variables(self):
        for name in boards.NAMES:
            board = boards.load(name)
            for annotation in board["annotations"]["list"]:
                with self.subTest(dashboard=name, annotation=annotation["name"]):
                    found = self.prometheus.get_range(boards.fill_in(annotation["expr"]), self.began)
                    if annotation["name"] == "Out of memory":
                        reasons = {series["metric"]["reason"] for series in found}
                        if name == "overview":
                            self.assertEqual(reasons, set(self.load.ooms))
                        else:  # the remaining reasons belong to a session that was gone at once
                            self.assertLessEqual({"limit", "fragmentation"}, reasons)
                    for label in re.findall(r"\{\{(\w+)\}\}", annotation["titleFormat"]):
                        self.assertTrue(all(label in series["metric"] for series in found), f"no label {label}")
            for variable, selector, label in boards.variables(board):
                with self.subTest(dashboard=name, variable=variable):
                    values = self.prometheus.get(f"label/{label}/values", **{"match[]": boards.fill_in(selector)})
                    self.assertTrue(values)
                    if variable == "client":
                        self.assertLessEqual(set(LIMITS), set(values))
                    if variable == "gpu":
                        self.assertEqual(values, ["0", "1"])
                    if variable == "tenant":
                        self.assertEqual(values, ["guests", "research", "serving"])

    def expect(self, dashboard, expected, **chosen):
        panels = {panel["title"]: panel for panel in boards.panels(boards.load(dashboard))}
        for title, figures in expected.items():
            with self.subTest(dashboard=dashboard, panel=title, **chosen):
                found = {}
                for target in panels[title]["targets"]:
                    for labels, values in self.run_target(target, **chosen):
                        legend = boards.legend(target, labels).replace("__auto", "")
                        found[legend.replace(" on " + labels.get("instance", "-"), "")] = values[-1]
                for legend, value in figures.items():
                    self.assertIn(legend, found)
                    self.assertAlmostEqual(found[legend], value, delta=1e-6 * max(1, abs(value)), msg=legend)

    def test_overview_shows_what_the_load_holds(self):
        self.expect("overview", OVERVIEW, gpu="0")

    def test_session_shows_what_the_session_holds(self):
        self.expect("session", TRAIN_A, gpu="0", client="train-a")
        self.expect("session", SERVE_API, gpu="0", client="serve-api")

    def test_a_scrape_that_fails_later_changes_nothing(self):
        is_up = lambda: self.prometheus.value('up{job="vrambroker"}')  # noqa: E731
        try:
            with self.daemon.stopped():
                wait_for("a scrape to fail", lambda: is_up() == 0)
                self.expect("session", TRAIN_A, gpu="0", client="train-a")
        finally:
            wait_for("a scrape", lambda: is_up() == 1)

    def test_the_other_device_is_empty(self):
        self.expect("overview", {"Capacity in use": {"": 0}, "Fragmented": {"": 0}, "Waiting now": {"": 0},
                                 "Capacity by state": {"allocated": 0, "cached by the daemon": 0, "left behind": 0, "unreserved": CAPACITY}}, gpu="1")

    def test_a_tenant_is_shown_alone(self):
        self.expect("session", {"Limit": {"": LIMITS["serve-api"] * MIB}}, gpu="0", tenant="serving")

    def test_refusals_are_counted_by_reason(self):
        for reason, count in self.load.ooms.items():
            self.assertEqual(self.prometheus.value(f'vrambroker_device_ooms_total{{gpu="0", reason="{reason}"}}', time=self.prometheus.at), count)
        self.assertEqual(
            self.prometheus.value('vrambroker_client_ooms_total{gpu="0", client="notebook", reason="limit"}', time=self.prometheus.at),
            self.load.ooms["limit"])

    def test_what_was_refused_to_a_session_that_has_ended_stays_with_its_tenant(self):
        value = lambda query: self.prometheus.value(query, time=self.prometheus.at)  # noqa: E731
        self.assertEqual(value('sum(vrambroker_tenant_ooms_total{gpu="0", tenant="guests"})'),
                         self.load.ooms["capacity"] + self.load.ooms["larger_than_device"] + self.load.ooms["limit"])
        self.assertEqual(value('vrambroker_tenant_sessions_ended_after_oom_total{gpu="0", tenant="guests"}'), 1)
        self.assertEqual(value('sum(vrambroker_tenant_sessions_ended_after_oom_total{gpu="0", tenant!="guests"})'), 0)

    def test_parts_add_up(self):
        for what, whole in (
                ('sum(vrambroker_tenant_ooms_total{gpu="0"})', 'sum(vrambroker_device_ooms_total{gpu="0"})'),
                ('sum(vrambroker_client_reserved_bytes{gpu="0"})', 'vrambroker_device_leased_bytes{gpu="0"}'),
                ('sum(vrambroker_tenant_reserved_bytes{gpu="0"})', 'vrambroker_device_leased_bytes{gpu="0"}'),
                ('sum(vrambroker_client_allocated_bytes{gpu="0"})', 'vrambroker_device_allocated_bytes{gpu="0"}'),
                ('sum(vrambroker_client_free_block_bytes{gpu="0"}) + sum(vrambroker_device_idle_bytes{gpu="0"})',
                 'sum(vrambroker_device_free_block_bytes{gpu="0"})'),
                ('sum(vrambroker_client_free_block_bytes{gpu="0"})', 'sum(vrambroker_client_cached_free_bytes{gpu="0"})'),
                ('sum(vrambroker_client_segments{gpu="0"})', 'vrambroker_device_segments{gpu="0"}'),
                ('sum(vrambroker_client_blocks{gpu="0"})', 'vrambroker_device_blocks{gpu="0"}'),
                ('count(vrambroker_client_reserved_bytes{gpu="0"})', "sum(vrambroker_sessions)"),
                ('sum(vrambroker_tenant_sessions{gpu="0"})', "sum(vrambroker_sessions)")):
            with self.subTest(part=what, whole=whole):
                self.assertEqual(self.prometheus.value(what, time=self.prometheus.at), self.prometheus.value(whole, time=self.prometheus.at))

    def test_the_table_says_what_vramctl_says(self):
        panels = {panel["title"]: panel for panel in boards.panels(boards.load("overview"))}
        columns = {override["matcher"]["options"]: target
                   for override, target in zip(panels["All sessions"]["fieldConfig"]["overrides"], panels["All sessions"]["targets"])}
        table = {name: {(labels["client"], int(labels["gpu"])): values[0] for labels, values in self.run_target(target)}
                 for name, target in columns.items()}
        sessions = self.daemon.ctl("sessions")["sessions"]
        self.assertEqual({session["name"] for session in sessions}, set(LIMITS))
        for session in sessions:
            for device in session["devices"]:
                key = (session["name"], device["device"])
                for column, field in (("Reserved", "reserved_bytes"), ("Limit", "limit_bytes"), ("Allocated", "allocated_bytes"),
                                      ("Guarantee", "guarantee_bytes"), ("Reclaimable", "idle_bytes")):
                    self.assertAlmostEqual(table[column][key], device[field], places=6, msg=f"{key} {column}")
                self.assertAlmostEqual(table["Fragmented"][key], fragmented_share(device), places=6, msg=key)
                self.assertEqual(table["Waiting"][key], len(device["waiting"]), key)

    def test_one_word_one_number_everywhere(self):
        """Checks the words of deploy/GLOSSARY.md: each place that shows a word for device 0 shows the same number."""
        numbers = {"capacity": CAPACITY, "free": CAPACITY - Load.COMMITTED, "reserved": Load.RESERVED,
                   "allocated": Load.ALLOCATED, "fragmented": Load.FRAGMENTED, "reclaimable": Load.RECLAIMABLE, "cached": Load.CACHED, "left behind": Load.LEFT_BEHIND,
                   "quarantined": Load.LEFT_BEHIND + 10 * MIB, "unknown": 0, "unreserved": CAPACITY - Load.RESERVED}
        ratios = {"frag": Load.FRAGMENTED / Load.LEASED, "fragmentation ratio": 1 - Load.ALLOCATED / Load.LEASED}
        shown = {place: dict(figures) for place, figures in self.places_as_json().items()}
        shown["metrics"] = self.from_metrics()
        shown["dashboard"] = self.from_the_dashboard()
        for place, figures in shown.items():
            self.assertLessEqual({"allocated", "fragmented", "reclaimable", "cached", "left behind", "fragmentation ratio"}, set(figures))
            for word, number in figures.items():
                with self.subTest(place=place, word=word):
                    self.assertAlmostEqual(number, {**numbers, **ratios}[word], delta=1e-6)
        texts = {**{word: as_text(number) for word, number in numbers.items()}, "frag": f"{100 * ratios['frag']:.1f}%"}
        heading, row = self.status_table()
        self.assertEqual(len(heading), len(row), "each column says something")
        said = {word.lower(): cell for word, cell in zip(heading, row)}
        for word in ("capacity", "reserved", "allocated", "fragmented", "reclaimable", "cached", "left behind", "frag"):
            with self.subTest(place="status", word=word):
                self.assertEqual(said.get(word), texts[word])
        self.assertNotIn("idle", said)
        self.assertIn(f"host memory, {texts['free']} free\n", self.ctl_text("status"))
        for line in re.findall(r"^# HELP \S+ (.*)", self.daemon.metrics(), re.M):
            self.assertNotRegex(line, boards.OF_NO_GLOSSARY)
        top = self.top_screen()
        for place, text, heading in (
                ("map", self.ctl_text("map", "--device=0"), f"{texts['reserved']} of {texts['capacity']} reserved"),
                ("top", top, f"{texts['free']} free of {texts['capacity']}, {texts['reserved']} reserved")):
            for word in ("allocated", "fragmented", "reclaimable", "cached", "left behind", "unreserved"):
                with self.subTest(place=place, word=word):
                    self.assertIn(f"{word} {texts[word]}", text)
            self.assertIn(heading, text)
            self.assertNotRegex(text, boards.OF_NO_GLOSSARY)
        self.assertIn(f"FRAG {texts['frag']}", top)
        self.expect_sessions(top_rows(top), "top", short_bytes)
        (held,) = self.daemon.ctl("quarantine")["quarantine"]
        self.assertEqual((held["client"], held["bytes"], len(held["holders"])), ("guest-dead", Load.LEFT_BEHIND, 1))
        if shutil.which(CHROMIUM) is None and not os.environ.get("CI"):
            self.skipTest("all but the page is checked: there is no chromium")
        page = Drawn(self.page_as_drawn())
        self.assertNotRegex(page.text, boards.OF_NO_GLOSSARY)
        for word, name in {**{word: word.replace(" ", "_") for word in [*said, "free"] if word in numbers}, "frag": "fragmented_share"}.items():
            with self.subTest(place="the page as it is drawn", word=word):
                self.assertEqual(page.figures[name], texts[word])
        parts = ("allocated", "fragmented", "reclaimable", "unknown", "cached", "left behind")
        self.assertEqual(page.bar, f"Of {texts['capacity']}: " + ", ".join(
            f"{word} {as_text(numbers[word])}" for word in parts if numbers[word] > 0))
        self.expect_sessions(page.rows, "the page as it is drawn", long_bytes)

    def expect_sessions(self, rows, place, as_size):
        """`rows` is {name: {word: text}}."""
        sessions = {session["name"]: session["devices"][0] for session in self.daemon.ctl("sessions")["sessions"]}
        claims = {f"claim {claim['name']}": claim["devices"][0] for claim in self.daemon.ctl("claim", "ls")["claims"]}
        for claim in claims.values():
            claim["inactive_split_bytes"] = claim["reserved_bytes"] - claim["allocated_bytes"] - claim["idle_bytes"]
        self.assertEqual(set(rows), set(sessions) | set(claims), place)
        for name, device in (sessions | claims).items():
            with self.subTest(place=place, session=name):
                self.assertLessEqual({"reserved", "limit", "allocated", "reclaimable", "frag"}, set(rows[name]))
                if name in sessions:
                    self.assertEqual(device["reserved_bytes"], RESERVED[name] * MIB)
                for word, text in rows[name].items():
                    wanted = f"{100 * fragmented_share(device):.1f}%" if word == "frag" else as_size(
                        device[{"reclaimable": "idle_bytes", "fragmented": "inactive_split_bytes"}.get(word, f"{word}_bytes")])
                    self.assertEqual(text, wanted, word)

    def places_as_json(self):
        with urllib.request.urlopen(f"http://{self.daemon.http}/api/v1/state", timeout=PATIENCE) as answer:
            page = json.load(answer)
        with urllib.request.urlopen(f"http://{self.daemon.http}/api/v1/map?device=0", timeout=PATIENCE) as answer:
            segments = json.load(answer)["segments"]
        for state, bytes_held in (("idle", Load.CACHED), ("quarantined", Load.LEFT_BEHIND)):  # states of the page
            self.assertEqual(sum(segment["bytes"] for segment in segments if segment["state"] == state), bytes_held, state)
        fields = {"capacity": "capacity_bytes", "free": "free_bytes", "reserved": "reserved_bytes", "allocated": "allocated_bytes",
                  "fragmented": "inactive_split_bytes", "reclaimable": "reclaimable_bytes", "unknown": "unknown_bytes", "cached": "idle_bytes",
                  "left behind": "left_behind_bytes", "quarantined": "quarantined_bytes", "fragmentation ratio": "fragmentation_ratio"}
        devices = {"status --format=json": self.daemon.ctl("status"), "map --format=json": self.daemon.ctl("map"), "page": page}
        found = {place: {word: answer["devices"][0].get(field, math.nan) for word, field in fields.items()}
                 for place, answer in devices.items()}
        for place, sessions in (("sessions", self.daemon.ctl("sessions")["sessions"]), ("page's sessions", page["sessions"])):
            held = [session["devices"][0] for session in sessions]
            for word in ("allocated", "fragmented", "reclaimable"):
                field = {"reclaimable": "idle_bytes"}.get(word, fields[word])  # a session's reclaimable bytes
                self.assertEqual(sum(device[field] for device in held), found["page"][word], f"{place}: {word}")
        return found

    def from_metrics(self):
        value = lambda name, more="": self.prometheus.value(  # noqa: E731
            f'sum(vrambroker_{name}{{gpu="0"{more}}})', time=self.prometheus.at)
        return {"capacity": value("device_capacity_bytes"), "reserved": value("device_reserved_bytes"),
                "allocated": value("device_allocated_bytes"), "fragmented": value("device_inactive_split_bytes"),
                "reclaimable": value("client_idle_bytes"), "cached": value("device_idle_bytes"),
                "left behind": value("device_quarantined_bytes", ', reason=~"settling|held_open|carried_over|others"'),
                "quarantined": value("device_quarantined_bytes"), "fragmentation ratio": value("device_fragmentation_ratio")}

    def from_the_dashboard(self):
        panels = {panel["title"]: panel for panel in boards.panels(boards.load("overview"))}
        states = {boards.legend(target, labels): values[-1] for target in panels["Capacity by state"]["targets"]
                  for labels, values in self.run_target(target, gpu="0")}
        self.assertEqual(states.pop("waiting for a stream"), 0)
        self.assertEqual(states["unknown"], 0)
        self.assertEqual(sum(states.values()), CAPACITY, "they are all of it")
        shares = [self.run_target(target, gpu="0")[0][1][-1] for target in panels["Fragmented and unused memory"]["targets"]]
        return {**{{"cached by the daemon": "cached"}.get(word, word): number for word, number in states.items()},
                "frag": shares[0], "fragmentation ratio": shares[1]}

    def ctl_text(self, *words):
        return subprocess.run([os.environ["VRAMCTL"], *words, f"--socket_dir={self.daemon.dir}"], check=True, text=True,
                              stdout=subprocess.PIPE, timeout=PATIENCE, env={**os.environ, "COLUMNS": "400", "LC_ALL": "C"}).stdout

    def status_table(self):
        """Returns the words of the heading, and of the line of device 0."""
        lines = self.ctl_text("status").splitlines()
        first = next(i for i, line in enumerate(lines) if line.startswith("DEVICE"))
        return [re.split(r"\s{2,}", line.strip()) for line in (lines[first], lines[first + 1])]

    def top_screen(self):
        """Returns the output of `top`, on the screen of tmux."""
        socket = self.daemon.dir / "tmux"
        tmux = ["tmux", "-N", "-u", "-S", str(socket)]  # -N: a server started by this command would outlive the test
        environment = {**os.environ, "LC_ALL": "C.UTF-8", "NO_COLOR": "1"}
        with subprocess.Popen(["tmux", "-D", "-u", "-S", str(socket), "-f", "/dev/null"], env=environment) as server:
            try:
                start = [*tmux, "new-session", "-d", "-x", "200", "-y", "40", os.environ["VRAMCTL"], "top",
                         f"--socket_dir={self.daemon.dir}"]
                wait_for("tmux", lambda: subprocess.run(start, env=environment, stderr=subprocess.DEVNULL, check=False).returncode == 0)

                def screen():
                    drawn = subprocess.run([*tmux, "capture-pane", "-p"], stdout=subprocess.PIPE, text=True, check=True).stdout
                    return drawn if "h help" in drawn and "guest-late" in drawn else None
                return wait_for("the screen of top", screen)
            finally:
                server.kill()

    def page_as_drawn(self):
        """Returns Chromium's document after the page's own program has shown the daemon's figures."""
        with tempfile.TemporaryDirectory(prefix="vrambroker-chromium-") as profile:
            def drawn():
                # The page's time is virtual: time goes on while no fetch runs.
                document = subprocess.run(
                    [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
                     f"--user-data-dir={profile}", "--virtual-time-budget=3000", "--window-size=1600,1200", "--dump-dom",
                     f"http://{self.daemon.http}/"],
                    stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True, timeout=PATIENCE,
                    env={**os.environ, "HOME": profile}).stdout
                return document if "guest-late" in document else None
            return wait_for("the page", drawn)

    def test_only_the_alerts_that_the_load_makes(self):
        fired = lambda: {series["metric"]["alertname"] for series in self.prometheus.get(  # noqa: E731
            "query", query='max_over_time(ALERTS{alertstate="firing"}[1h])')["result"]}
        wait_for("the critical alert", lambda: "VrambrokerFragmentationOom" in fired())
        later = {"VrambrokerSessionOoms", "VrambrokerWaitingLong",  # alerts that wait fire on a slow machine
                 "VrambrokerQuarantineStays", "VrambrokerSessionNearLimit", "VrambrokerOomRate"}
        wait_for("the other one", lambda: "VrambrokerSessionEndedAfterOom" in fired())  # guest-hasty
        self.assertEqual(fired() - later, {"VrambrokerFragmentationOom", "VrambrokerSessionEndedAfterOom"})
        for alert in self.prometheus.get("alerts")["alerts"]:
            self.assertIn("runbook", alert["annotations"])
            self.assertNotIn("<no value>", str(alert["annotations"]))

    def test_metrics_are_as_promtool_likes_them(self):
        linted = subprocess.run(["promtool", "check", "metrics"], input=self.daemon.metrics(), capture_output=True, text=True,
                                check=False)
        self.assertEqual((linted.returncode, linted.stdout + linted.stderr), (0, ""))

    def test_every_metric_is_shown_and_every_shown_one_exists(self):
        exported = set(re.findall(r"^# TYPE (\w+) ", self.daemon.metrics(), re.M))
        self.assertTrue(exported)
        shown = set()
        for name in boards.NAMES:
            for query in boards.queries(boards.load(name)):
                shown |= boards.metrics_of(query)
        rules = (boards.SOURCE / "deploy" / "prometheus" / "vrambroker.rules.yml").read_text(encoding="utf-8")
        in_rules = boards.metrics_of("\n".join(re.findall(r"expr: (?:\|\n(?:        +.*\n)+|.*)", rules)))
        self.assertEqual((shown | in_rules) - exported, set(), "used, but not exported")
        self.assertEqual(exported - shown - in_rules, set(NOT_SHOWN),
                         "exported, but on no dashboard: show it, or say in NOT_SHOWN why not")


if __name__ == "__main__":
    unittest.main(verbosity=2)
