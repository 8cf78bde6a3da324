#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the dashboards of dashboards/: run it after every change here. The test `dashboards_files` fails when somebody forgot.

Every panel has a title, a description that needs no knowledge of the code, and a unit. Queries use only the variables below,
and are made so that they never give NaN: shares divide by what is above zero, and quantiles end in `>= 0`, which leaves out
the times at which nothing was measured.
"""
import json
import pathlib

FOLDER = pathlib.Path(__file__).parent / "dashboards"
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}

# What queries select: DAEMON for series of the daemon, DEVICE for those of a device, TENANT, SESSION for those of a session.
DAEMON = 'job=~"$job", instance=~"$instance"'
DEVICE = DAEMON + ', gpu=~"$gpu"'
TENANT = DEVICE + ', tenant=~"$tenant"'
SESSION = TENANT + ', client=~"$client"'

# Lower bounds of the classes by size of free blocks, and how people say them.
SIZES = [("512", "below 4 KiB"), ("4096", "4 to 32 KiB"), ("32768", "32 to 256 KiB"), ("262144", "256 KiB to 2 MiB"),
         ("2097152", "2 to 16 MiB"), ("16777216", "16 to 128 MiB"), ("134217728", "128 MiB to 1 GiB"),
         ("1073741824", "1 GiB and more")]

# Colours that say something: green is in use, red is what nobody can use.
STATES = {"allocated": "green", "waiting for a stream": "orange", "fragmented": "yellow", "reclaimable": "light-blue", "unknown": "semi-dark-green",
          "cached by the daemon": "blue", "left behind": "purple", "unreserved": "#555560"}
PARTS = {"asked for": "green", "rounding": "dark-yellow", "waiting for a stream": "purple", "fragmented": "red",
         "reclaimable": "blue", "unknown": "light-green"}
PIECES = dict(zip([name for _, name in SIZES], ["dark-red", "red", "dark-orange", "orange", "yellow", "light-blue", "blue",
                                                "dark-blue"]))
REASONS = {"limit": "yellow", "capacity": "orange", "fragmentation": "red", "larger_than_device": "purple"}

BY_DEVICE = "gpu {{gpu}} on {{instance}}"
BY_SESSION = "{{client}} gpu {{gpu}}"


def thresholds(*steps):
    """steps: (lower bound or None, colour), from low to high."""
    return {"mode": "absolute", "steps": [{"value": value, "color": color} for value, color in steps]}


GREEN = thresholds((None, "green"))
NEUTRAL = thresholds((None, "text"))
ANY_IS_BAD = thresholds((None, "green"), (1, "red"))
ANY_IS_NOTABLE = thresholds((None, "green"), (1, "orange"))
USAGE = thresholds((None, "green"), (0.8, "yellow"), (0.9, "orange"), (0.97, "red"))
FRAGMENTATION = thresholds((None, "green"), (0.2, "yellow"), (0.3, "orange"), (0.5, "red"))
CELLS = {"unit": "none", "thresholds": NEUTRAL,
         "custom": {"align": "auto", "cellOptions": {"type": "auto"}, "inspect": False, "minWidth": 60}}
LINE_AT_30 = thresholds((None, "transparent"), (0.3, "orange"))
LINE_AT_50 = thresholds((None, "transparent"), (0.5, "orange"))


def query(expr, legend="", instant=False):
    return {"expr": expr, "legendFormat": legend or "__auto", "instant": instant, "range": not instant,
            "editorMode": "code", "datasource": DATASOURCE}


def now(expr, legend=""):
    """A query for the end of the time range only."""
    return query(expr, legend, instant=True)


def quantile(q, of, by="", select=DAEMON):
    """The quantile of a histogram over the last moments; nothing where nothing was measured."""
    labels = "le, " + by if by else "le"
    return f"histogram_quantile({q}, sum by ({labels}) (rate({of}_bucket{{{select}}}[$__rate_interval]))) >= 0"


def rate(of, by="", select=DAEMON):
    return f"sum by ({by}) (rate({of}{{{select}}}[$__rate_interval]))"


def increase(of, by="", select=DAEMON):
    return f"sum by ({by}) (increase({of}{{{select}}}[$__rate_interval]))"


class Dashboard:
    """Panels are laid out from left to right in rows of 24 columns."""

    def __init__(self, uid, title, description, variables, links):
        self.json = {
            "uid": uid, "title": title, "description": description, "tags": ["vrambroker"], "schemaVersion": 39,
            "version": 1, "editable": True, "graphTooltip": 1, "refresh": "30s", "timezone": "browser",
            "time": {"from": "now-3h", "to": "now"}, "links": links, "annotations": {"list": []},
            "templating": {"list": variables}, "panels": []}
        self._x = self._y = self._height = 0

    def annotate(self, name, expr, color, title):
        self.json["annotations"]["list"].append(
            {"name": name, "datasource": DATASOURCE, "enable": True, "hide": False, "iconColor": color, "expr": expr,
             "titleFormat": title, "step": "15s"})

    def row(self, title):
        self._end_line()
        self._add({"type": "row", "title": title, "collapsed": False, "panels": []}, 24, 1)

    def stat(self, title, description, expr, unit="none", colors=GREEN, width=3, share=False, decimals=None):
        """One number. share: of 1, drawn as a percentage."""
        options = {"reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False}, "colorMode": "value",
                   "graphMode": "area", "textMode": "auto", "justifyMode": "auto", "orientation": "auto",
                   "wideLayout": True, "showPercentChange": False, "percentChangeColorMode": "standard"}
        defaults = {"unit": unit, "thresholds": colors}
        if share:
            defaults.update(unit="percentunit", min=0, max=1, decimals=1)
        if decimals is not None:
            defaults["decimals"] = decimals
        self._panel("stat", title, description, [query(expr)], defaults, options, width, 4)

    def bars_now(self, title, description, expr, legend, width=6, height=8, colors=USAGE):
        """Shares of 1, one bar for each series, as of now."""
        options = {"reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False}, "valueMode": "color",
                   "namePlacement": "auto", "showUnfilled": True, "sizing": "auto", "minVizWidth": 8, "minVizHeight": 16,
                   "maxVizHeight": 60, "orientation": "horizontal", "displayMode": "basic",
                   "legend": {"showLegend": False, "displayMode": "list", "placement": "bottom", "calcs": []}}
        defaults = {"unit": "percentunit", "min": 0, "max": 1, "decimals": 1, "thresholds": colors}
        self._panel("bargauge", title, description, [now(expr, legend)], defaults, options, width, height)

    def series(self, title, description, targets, unit, width=8, height=8, colors=GREEN, share=False, stacked=False,
               events=False, paint=None):
        """Lines over time. share: of 1. stacked: areas on top of each other. events: bars, for things that happen. paint: the
        colours of series by name, where they say something."""
        style = {"drawStyle": "bars" if events else "line", "lineWidth": 1 if stacked or events else 2,
                 "fillOpacity": 70 if events else 35 if stacked else 0, "showPoints": "never"}
        if stacked or events:
            style["stacking"] = {"mode": "normal", "group": "A"}
        if colors is not GREEN:
            style["thresholdsStyle"] = {"mode": "line"}
        defaults = {"unit": unit, "min": 0, "thresholds": colors, "custom": style}
        if share:
            defaults.update(unit="percentunit", max=1)
        # Figures beside the names take room that only large panels have.
        small = width < 10
        legend = {"displayMode": "list" if small else "table", "showLegend": True,
                  "placement": "right" if width >= 10 and (stacked or len(targets) > 3) else "bottom",
                  "calcs": [] if small else ["lastNotNull", "max"]}
        options = {"legend": legend,
                   "tooltip": {"mode": "multi", "sort": "desc"}}
        overrides = [{"matcher": {"id": "byName", "options": name},
                      "properties": [{"id": "color", "value": {"mode": "fixed", "fixedColor": color}}]}
                     for name, color in (paint or {}).items()]
        self._panel("timeseries", title, description, targets, defaults, options, width, height, overrides=overrides)

    def table(self, title, description, keys, columns, sort_by, height=9, link_session=False):
        """One line for each combination of `keys` (label: what the column is called), with a column for each of `columns`:
        (title, query, unit)."""
        renamed = dict(keys)
        overrides, targets = [], []
        for i, (name, expr, unit) in enumerate(columns):
            targets.append({**now(expr), "format": "table"})
            renamed[f"Value #{chr(ord('A') + i)}"] = name
            properties = [{"id": "unit", "value": unit}]
            if unit == "percentunit":
                properties += [{"id": "custom.cellOptions", "value": {"type": "gauge", "mode": "basic"}},
                               {"id": "min", "value": 0}, {"id": "max", "value": 1},
                               {"id": "thresholds", "value": USAGE if name == "Of limit" else FRAGMENTATION}]
            overrides.append({"matcher": {"id": "byName", "options": name}, "properties": properties})
        overrides.append({"matcher": {"id": "byName", "options": keys["instance"]},
                          "properties": [{"id": "custom.width", "value": 150}]})
        if link_session:
            overrides.append({"matcher": {"id": "byName", "options": keys["client"]}, "properties": [
                {"id": "links", "value": [{
                    "title": "This session in detail",
                    "url": "/d/vrambroker-session?${datasource:queryparam}&${job:queryparam}&${instance:queryparam}"
                           "&${gpu:queryparam}&var-client=${__value.raw}&${__url_time_range}"}]}]})
        order = {name: i for i, name in enumerate(list(keys) + [f"Value #{chr(ord('A') + i)}" for i in range(len(columns))])}
        transformations = [{"id": "merge", "options": {}},
                           {"id": "organize", "options": {"excludeByName": {"Time": True}, "indexByName": order,
                                                          "renameByName": renamed}}]
        options = {"frameIndex": 0, "showHeader": True, "cellHeight": "sm",
                   "sortBy": [{"displayName": sort_by, "desc": True}]}
        self._panel("table", title, description, targets, CELLS, options, 24, height,
                    overrides=overrides, transformations=transformations)

    def identities(self, title, description, expr, labels, width=12, height=6):
        """A table of an _info metric: `labels` (label: what the column is called)."""
        order = {name: i for i, name in enumerate(labels)}
        transformations = [{"id": "filterFieldsByName", "options": {"include": {"names": list(labels)}}},
                           {"id": "organize", "options": {"excludeByName": {}, "indexByName": order, "renameByName": labels}}]
        self._panel("table", title, description, [{**now(expr), "format": "table"}], CELLS,
                    {"frameIndex": 0, "showHeader": True, "cellHeight": "sm"}, width, height, transformations=transformations)

    def _panel(self, kind, title, description, targets, defaults, options, width, height, overrides=None, **more):
        targets = [{"refId": chr(ord("A") + i), **target} for i, target in enumerate(targets)]
        self._add({"type": kind, "title": title, "description": description, "datasource": DATASOURCE, "targets": targets,
                   "fieldConfig": {"defaults": defaults, "overrides": overrides or []}, "options": options, **more},
                  width, height)

    def _add(self, panel, width, height):
        if self._x + width > 24:
            self._end_line()
        panel = {"id": len(self.json["panels"]) + 1, **panel,
                 "gridPos": {"x": self._x, "y": self._y, "w": width, "h": height}}
        self.json["panels"].append(panel)
        self._x += width
        self._height = max(self._height, height)

    def _end_line(self):
        self._y += self._height
        self._x = self._height = 0

    def text(self):
        return json.dumps(self.json, indent=2) + "\n"


# ---- What both have ----


def variable(name, label, values):
    return {"name": name, "type": "query", "label": label, "datasource": DATASOURCE, "definition": values,
            "query": {"qryType": 1, "query": values, "refId": "values"}, "refresh": 2, "sort": 1, "multi": True,
            "includeAll": True, "allValue": ".*", "current": {"text": "All", "value": "$__all"}, "hide": 0, "options": []}


VARIABLES = [
    {"name": "datasource", "type": "datasource", "label": "Data source", "query": "prometheus", "refresh": 1, "hide": 0,
     "current": {"text": "", "value": ""}, "options": [], "multi": False, "includeAll": False},
    variable("job", "Job", "label_values(vrambroker_build_info, job)"),
    variable("instance", "Daemon", 'label_values(vrambroker_build_info{job=~"$job"}, instance)'),
    variable("gpu", "Device", f"label_values(vrambroker_device_capacity_bytes{{{DAEMON}}}, gpu)"),
    variable("tenant", "Tenant", f"label_values(vrambroker_tenant_sessions{{{DEVICE}}}, tenant)"),
]
SESSION_VARIABLE = variable("client", "Session", f"label_values(vrambroker_client_limit_bytes{{{TENANT}}}, client)")


def link(title, uid):
    return {"title": title, "type": "link", "url": "/d/" + uid, "icon": "dashboard", "tooltip": title, "tags": [],
            "keepTime": True, "includeVars": True, "targetBlank": False, "asDropdown": False}


def annotate_daemon(board):
    board.annotate("Daemon started", f"changes(process_start_time_seconds{{{DAEMON}}}[$__rate_interval]) > 0", "blue",
                   "{{instance}} restarted: clients keep their memory, and the new daemon counts that memory")
    board.annotate("Alerts", 'ALERTS{alertname=~"Vrambroker.*", alertstate="firing"}', "orange", "{{alertname}}")


def fragmented_share(prefix, held, select, by=""):
    """FRAG: fragmented / held by sessions, 0 where these hold nothing."""
    return (f"{by} (vrambroker_{prefix}_inactive_split_bytes{{{select}}})"
            f" / clamp_min({by} (vrambroker_{prefix}_{held}_bytes{{{select}}}), 1)").strip()


def fragmented_and_unused(board, prefix, held, select, legend):
    board.series("Fragmented and unused memory",
                 "Shares of the memory held by sessions. Fragmented: free memory beside used blocks, which no trim "
                 "gives back. The line marks 30 %, a rule of thumb. Unused: 1 - allocated / reserved, the "
                 "fragmentation ratio in guides to PyTorch. Reclaimable memory counts as unused, too.",
                 [query(fragmented_share(prefix, held, select), legend + ": fragmented"),
                  query(f"vrambroker_{prefix}_fragmentation_ratio{{{select}}}", legend + ": unused")], "percentunit",
                 colors=LINE_AT_30, share=True)


def sessions_table(board, title, select, sort_by, height):
    by = "sum by (client, tenant, instance, gpu)"
    board.table(
        title,
        "One line for each session and device. Limit: the most memory that the session may hold. Guarantee: memory "
        "kept free for the session. Reserved: memory held by the session. Allocated: the part used by the session's "
        "program. Reclaimable: whole segments that the session could give back at once. Fragmented: the free memory "
        "beside used blocks, which no trim gives back, as a share of the reserved memory. Refused: requests that got "
        "no memory in the last hour.",
        {"client": "Session", "tenant": "Tenant", "instance": "Daemon", "gpu": "Device"},
        [("Reserved", f"{by} (vrambroker_client_reserved_bytes{{{select}}})", "bytes"),
         ("Limit", f"{by} (vrambroker_client_limit_bytes{{{select}}})", "bytes"),
         ("Of limit", f"{by} (gpu_client:vrambroker_limit_usage:ratio{{{select}}})", "percentunit"),
         ("Guarantee", f"{by} (vrambroker_client_guarantee_bytes{{{select}}})", "bytes"),
         ("Allocated", f"{by} (vrambroker_client_allocated_bytes{{{select}}})", "bytes"),
         ("Reclaimable", f"{by} (vrambroker_client_idle_bytes{{{select}}})", "bytes"),
         ("Fragmented", fragmented_share("client", "reserved", select, by), "percentunit"),
         ("Waiting", f"{by} (vrambroker_client_waiting_requests{{{select}}})", "none"),
         # Without the last part, sessions that have ended would stay for an hour.
         ("Refused", f"round({by} (increase(vrambroker_client_ooms_total{{{select}}}[1h])))"
                     f" and {by} (vrambroker_client_limit_bytes{{{select}}})", "none")],
        sort_by, height, link_session=True)


def free_blocks(title, whose, metric, select, width):
    return (title,
            f"Free memory inside the segments {whose}, by the size of the free blocks. Memory in the large classes is cache "
            "for the next large request. Memory in the small classes is fragmentation: no large request fits into "
            "these blocks.",
            [query(f'sum({metric}{{{select}, size="{size}"}})', name) for size, name in SIZES], "bytes", width)


ANATOMY = ("All memory held by the sessions, by use. Asked for: memory requested by programs. Rounding: memory lost to "
           "block sizes. Waiting for a stream: freed blocks that the GPU may still use. Fragmented: free blocks beside "
           "used blocks, which cannot be given back. Reclaimable: whole free segments, available to other sessions. "
           "Unknown: memory of remote sessions from an earlier run of the daemon; the daemon does not know the "
           "allocated part.")


def unknown(leased, active, fragmented, reclaimable):
    """Of what sessions hold."""
    return query(f"clamp_min({leased} - {active} - {fragmented} - {reclaimable}, 0)", "unknown")


def anatomy(total, reclaimable, held="reserved_bytes"):
    """The queries of ANATOMY; total: the query for the sum of a figure; held: the figure that they add up to."""
    return [query(total("requested_bytes"), "asked for"),
            query(f"clamp_min({total('allocated_bytes')} - {total('requested_bytes')}, 0)", "rounding"),
            query(f"clamp_min({total('active_bytes')} - {total('allocated_bytes')}, 0)", "waiting for a stream"),
            query(total("inactive_split_bytes"), "fragmented"),
            query(reclaimable, "reclaimable"),
            unknown(total(held), total("active_bytes"), total("inactive_split_bytes"), reclaimable)]


def claims(board):
    """What several processes share: a row of the overview."""
    by = "sum by (claim, instance, gpu)"

    def of(name):
        return f"{by} (vrambroker_claim_{name}{{{DEVICE}}})"

    board.row("Claims")
    board.table("Claims",
                "One line for each claim and device. Limit: the most memory that the claim's sessions may hold "
                "together. Guarantee: memory kept free for these sessions. Reserved: memory charged to the claim. "
                "Peak: the most memory charged to the claim since the daemon started. Left behind: the part held by "
                "ended processes, not available to anybody yet. Allocated: the part used by the claim's programs. "
                "Reclaimable: whole segments that the claim's sessions could give back at once. Refused: requests that "
                "got no memory in the last hour.",
                {"claim": "Claim", "instance": "Daemon", "gpu": "Device"},
                [("Reserved", of("reserved_bytes"), "bytes"),
                 ("Peak", of("peak_bytes"), "bytes"),
                 ("Limit", f"{of('limit_bytes')} > 0", "bytes"),
                 ("Of limit", f"{of('reserved_bytes')} / ({of('limit_bytes')} > 0)", "percentunit"),
                 ("Guarantee", of("guarantee_bytes"), "bytes"),
                 ("Left behind", of("left_behind_bytes"), "bytes"),
                 ("Allocated", of("allocated_bytes"), "bytes"),
                 ("Reclaimable", of("idle_bytes"), "bytes"),
                 ("Waiting", of("waiting_requests"), "none"),
                 # Without the last part, claims that are removed would stay for an hour.
                 ("Refused", f"round({by} (increase(vrambroker_claim_ooms_total{{{DEVICE}}}[1h]))) and {of('limit_bytes')}", "none")],
                "Reserved", 8)
    board.series("By claim", "Memory charged to each claim.",
                 [query(f"sum by (claim) (vrambroker_claim_reserved_bytes{{{DEVICE}}})", "{{claim}}")], "bytes", 8, stacked=True)
    board.series("Refused by claim", "Requests that got no memory, including requests from ended sessions.",
                 [query(increase("vrambroker_claim_ooms_total", "claim", DEVICE), "{{claim}}")], "none", events=True)
    board.series("Waits by claim", "Finished requests that waited for memory.",
                 [query(increase("vrambroker_claim_waits_total", "claim", DEVICE), "{{claim}}")], "none", events=True)
    board.series("Time waited by claim", "Time that requests have waited for memory, in all.",
                 [query(increase("vrambroker_claim_waited_seconds_total", "claim", DEVICE), "{{claim}}")], "s", events=True)
    board.series("Sessions by claim", "Open sessions of each claim.",
                 [query(f"sum by (claim) (vrambroker_claim_sessions{{{DAEMON}}})", "{{claim}}")], "none", 5)
    board.stat("Number of claims", "Claims on all daemons.", f"sum(vrambroker_claims{{{DAEMON}}})")
    board.identities("Claim details",
                     "Owner and state of each claim. The state tells whether the daemon is removing the claim.",
                     f"vrambroker_claim_info{{{DAEMON}}}", {"claim": "Claim", "owner": "Owner", "state": "State"}, width=24, height=5)


# ---- GPU memory overview ----


def overview():
    board = Dashboard(
        "vrambroker-overview", "vrambroker: GPU memory overview",
        "Holders of the GPUs' memory; reclaimable and fragmented memory; waiting sessions; refused requests and their "
        "causes.",
        VARIABLES, [link("Session and fragmentation", "vrambroker-session")])
    annotate_daemon(board)
    board.annotate("Out of memory", increase("vrambroker_device_ooms_total", "instance, gpu, reason", DEVICE) + " > 0", "red",
                   "Refused on gpu {{gpu}} of {{instance}}: {{reason}}")
    board.annotate("Session ended after a refusal",
                   increase("vrambroker_tenant_sessions_ended_after_oom_total", "instance, gpu, tenant", TENANT) + " > 0", "purple",
                   "A session of {{tenant}} ended within a minute of a refusal on gpu {{gpu}} of {{instance}}")

    def device(name):
        return f"sum(vrambroker_device_{name}_bytes{{{DEVICE}}})"

    reclaimable = f"(sum(vrambroker_tenant_idle_bytes{{{DEVICE}}}) or vector(0))"  # without sessions there are no tenants

    board.row("At a glance")
    board.stat("Daemons serving",
               "Daemons that take new sessions. A daemon that is down or draining does not count.",
               f"sum(vrambroker_ready{{{DAEMON}}})", colors=thresholds((None, "red"), (1, "green")))
    board.stat("Devices lost",
               "GPUs that the daemon can no longer use after a driver error. Only a new daemon can use such GPUs "
               "again.",
               f"sum(1 - vrambroker_device_healthy{{{DEVICE}}})", colors=ANY_IS_BAD)
    board.stat("Sessions", "Sessions whose clients are connected now.",
               f'sum(vrambroker_sessions{{{DAEMON}, state="active"}})')
    board.stat("Capacity in use", "Memory that the daemons hold from the driver, as a share of the capacity.",
               f"sum(vrambroker_device_reserved_bytes{{{DEVICE}}}) / sum(vrambroker_device_capacity_bytes{{{DEVICE}}})",
               colors=USAGE, share=True)
    board.stat("Fragmented",
               "Free memory beside used blocks, which no trim gives back, as a share of the memory held by sessions, "
               "on the device with the highest share. Take a look above 30 % (a rule of thumb).",
               f"max({fragmented_share('device', 'leased', DEVICE)})", colors=FRAGMENTATION, share=True)
    board.stat("Refused, last hour", "Requests that got no memory in the last hour, for any reason. vramctl ooms lists "
                                     "these requests.",
               f"round(sum(increase(vrambroker_device_ooms_total{{{DEVICE}}}[1h])))", colors=ANY_IS_NOTABLE, decimals=0)
    board.stat("Waiting now", "Requests that wait until other sessions give memory back.",
               f"sum(vrambroker_device_waiting_requests{{{DEVICE}}})", colors=ANY_IS_NOTABLE)
    board.stat("Alerts firing", "Alerts in deploy/prometheus that fire now, for all daemons of this data source.",
               'count(ALERTS{alertname=~"Vrambroker.*", alertstate="firing"}) or vector(0)', colors=ANY_IS_BAD)

    board.row("Who holds the memory")
    board.bars_now("Capacity in use by device",
                   "Memory held from the driver, as a share of the capacity.",
                   f"vrambroker_device_reserved_bytes{{{DEVICE}}} / vrambroker_device_capacity_bytes{{{DEVICE}}}", BY_DEVICE)
    board.series(
        "Capacity by state",
        "The whole capacity, by current state. Allocated: blocks in use by programs. Waiting for a stream: freed "
        "blocks that the GPU may still use. Fragmented: free blocks beside used blocks. Reclaimable: whole free "
        "segments of sessions. Unknown: memory of remote sessions from an earlier run of the daemon; the daemon does "
        "not know the allocated part. Cached by the daemon: segments kept for the next request. Left behind: memory of "
        "ended processes, not yet safe to hand on. Unreserved: memory still with the driver.",
        [query(device("allocated"), "allocated"),
         query(f"clamp_min({device('active')} - {device('allocated')}, 0)", "waiting for a stream"),
         query(device("inactive_split"), "fragmented"),
         query(reclaimable, "reclaimable"),
         unknown(device("leased"), device("active"), device("inactive_split"), reclaimable),
         query(device("idle"), "cached by the daemon"),
         # By subtraction: it includes what is carried over without a session.
         query(f"clamp_min({device('reserved')} - {device('leased')} - {device('idle')}, 0)", "left behind"),
         query(f"clamp_min({device('capacity')} - {device('reserved')}, 0)", "unreserved")],
        "bytes", 10, stacked=True, paint=STATES)
    board.series("By tenant",
                 "Memory held by the sessions of each tenant. Tenants are trust domains: the daemon zeroes memory that "
                 "passes from one tenant to another tenant.",
                 [query(f"sum by (tenant) (vrambroker_tenant_reserved_bytes{{{TENANT}}})", "{{tenant}}")], "bytes", 8, stacked=True)
    board.series("By session: top ten", "Memory held by each session, used or not.",
                 [query(f"topk(10, sum by (client) (vrambroker_client_reserved_bytes{{{TENANT}}}))", "{{client}}")], "bytes", 16,
                 stacked=True)
    board.bars_now("Share of the limit: top ten",
                   "Memory held by a session, as a share of the session's limit. At 100 %, the session's requests "
                   "begin to fail.",
                   f"topk(10, gpu_client:vrambroker_limit_usage:ratio{{{TENANT}}})", BY_SESSION, 8)
    sessions_table(board, "All sessions", TENANT, "Reserved", 10)

    board.row("Fragmentation")
    fragmented_and_unused(board, "device", "leased", DEVICE, BY_DEVICE)
    board.series("Free memory that one large request cannot use",
                 "External fragmentation: 1 - largest free block / all free memory in the sessions' segments. "
                 "Near 0 %: one large piece. Near 100 %: many small pieces. The figure says little when little memory "
                 "is free.",
                 [query(f"vrambroker_device_external_fragmentation_ratio{{{DEVICE}}}", BY_DEVICE)], "percentunit",
                 colors=LINE_AT_50, share=True)
    board.series("Free memory inside the segments",
                 "All: free memory in the sessions' segments and in the daemon's cache. Fragmented: the part that "
                 "cannot go back to the driver because the same segment contains a used block. Largest free block: the "
                 "largest single piece.",
                 [query(f"sum(vrambroker_device_cached_free_bytes{{{DEVICE}}})", "all"),
                  query(f"sum(vrambroker_device_inactive_split_bytes{{{DEVICE}}})", "fragmented"),
                  query(f"max(vrambroker_device_largest_free_block_bytes{{{DEVICE}}})", "largest free block")], "bytes")
    title, description, targets, unit, width = free_blocks(
        "Free memory by size of the free blocks", "of all sessions, and in segments cached by the daemon",
"vrambroker_device_free_block_bytes", DEVICE, 12)
    board.series(title, description, targets, unit, width, 9, stacked=True, paint=PIECES)
    board.series("Free blocks by size",
                 "Number of free blocks of each size in the segments of all sessions. Segments cached by the daemon "
                 "count as blocks.",
                 [query(f'sum(vrambroker_device_free_blocks{{{DEVICE}, size="{size}"}})', name) for size, name in SIZES], "none",
                 12, 9, stacked=True, paint=PIECES)
    board.series(
        "Composition of the sessions' memory", ANATOMY,
        anatomy(lambda name: f"sum(vrambroker_device_{name}{{{DEVICE}}})", reclaimable, held="leased_bytes"), "bytes", 12, 9, stacked=True, paint=PARTS)
    board.series("Segments and blocks",
                 "Segments held by sessions, and blocks in use in these segments. A single block in use keeps its "
                 "whole segment.",
                 [query(f"sum(vrambroker_device_segments{{{DEVICE}}})", "segments"),
                  query(f"sum(vrambroker_device_blocks{{{DEVICE}}})", "blocks")], "none", 12, 9)

    board.row("Guarantees, waiting, reclaim")
    board.series("Guarantees and capacity",
                 "Committed: memory held, or kept free for guarantees. When the committed memory reaches "
                 "the capacity, the daemon refuses new guarantees, and sessions without a guarantee cannot grow.",
                 [query(f"sum(vrambroker_device_{name}_bytes{{{DEVICE}}})", name)
                  for name in ("capacity", "committed", "guaranteed", "reserved")], "bytes")
    board.series("Waiting requests", "Requests that currently wait until other sessions give memory back.",
                 [query(f"vrambroker_device_waiting_requests{{{DEVICE}}}", BY_DEVICE)], "none")
    board.series("Longest current wait", "Time that the oldest waiting request has waited. 0: no request waits.",
                 [query(f"(vrambroker_device_oldest_waiting_timestamp_seconds{{{DEVICE}}} > bool 0)"
                        f" * clamp_min(time() - vrambroker_device_oldest_waiting_timestamp_seconds{{{DEVICE}}}, 0)", BY_DEVICE)], "s")
    board.series("Finished waits, and reclaims",
                 "Requests that waited, by outcome: granted, refused after the longest allowed wait, or cancelled by "
                 "the client. reclaims: how often the daemon asked sessions for reclaimable memory.",
                 [query(increase("vrambroker_device_wait_duration_seconds_count", "outcome", DEVICE), "{{outcome}}"),
                  query(increase("vrambroker_device_reclaims_total", "", DEVICE), "reclaims")], "none", 6, events=True)
    board.series("Wait time", "Median and 95th percentile of the finished waits.",
                 [query(quantile(q, "vrambroker_device_wait_duration_seconds", "", DEVICE), name)
                  for q, name in ((0.5, "median"), (0.95, "95 %"))], "s", 6)
    board.series("Reclaim",
                 "Reclaimable memory needed by other sessions: how much memory the daemon asked for, and how much "
                 "memory came back.",
                 [query(rate("vrambroker_device_reclaim_asked_bytes_total", "", DEVICE), "asked for"),
                  query(rate("vrambroker_device_reclaimed_bytes_total", "", DEVICE), "given back")], "Bps", 6)
    board.series("Reclaim time",
                 "Time from asking a session for reclaimable memory to the session's answer: median and 95th "
                 "percentile.",
                 [query(quantile(q, "vrambroker_device_reclaim_duration_seconds", "", DEVICE), name)
                  for q, name in ((0.5, "median"), (0.95, "95 %"))], "s", 6)

    claims(board)

    board.row("Refusals")
    board.series("Refused by reason",
                 "Requests that got no memory. limit: the session's own limit. capacity: the device is full. "
                 "fragmentation: the free memory suffices, but lies in holes between used blocks. larger_than_device: "
                 "the request can never fit.",
                 [query(increase("vrambroker_device_ooms_total", "reason", DEVICE), "{{reason}}")], "none", events=True, paint=REASONS)
    board.series("Refused by tenant",
                 "Requests that got no memory, including requests from ended sessions.",
                 [query(increase("vrambroker_tenant_ooms_total", "tenant", TENANT), "{{tenant}}")], "none", events=True)
    board.series("Sessions ended after a refusal",
                 "Sessions that ended within a minute of a refused request. A program that gets no memory often ends. "
                 "vramctl ooms lists the refused requests and their causes.",
                 [query(increase("vrambroker_tenant_sessions_ended_after_oom_total", "tenant", TENANT), "{{tenant}}")], "none", events=True)
    board.series("Refused by session: top ten",
                 "Sessions whose requests got no memory, and the causes. The panel is empty when the daemon has "
                 "refused no request.",
                 [query(f"topk(10, {increase('vrambroker_client_ooms_total', 'client, reason', TENANT)}) > 0",
                        "{{client}}: {{reason}}")], "none", 12, events=True)
    board.series("Requests that flushed the cache first",
                 "A session at its limit gives its whole cache back to get a single block, and then fills the cache "
                 "again. Flushing is slow, and a refusal comes next.",
                 [query(increase("vrambroker_device_alloc_retries_total",
                                 "instance, gpu", DEVICE), BY_DEVICE)], "none", 12, events=True)

    board.row("Driver and requests")
    board.series("Segment traffic",
                 "Segments obtained from the driver and given back to the driver; both are slow. Handed over: cached "
                 "segments that went to the next session without a driver call. Zeroed: new segments cleared before a "
                 "session got the segments.",
                 [query(rate("vrambroker_device_segment_allocs_total", "", DEVICE), "from the driver"),
                  query(rate("vrambroker_device_segment_frees_total", "", DEVICE), "to the driver"),
                  query(rate("vrambroker_device_handovers_total", "", DEVICE), "handed over"),
                  query(rate("vrambroker_device_scrubs_total", "", DEVICE), "zeroed")], "ops", 6)
    board.series("Memory handed over and zeroed",
                 "Handed over: cached memory that went from one session to another session. Zeroed: new memory cleared "
                 "before a session got the memory.",
                 [query(rate("vrambroker_device_handover_bytes_total", "", DEVICE), "handed over"),
                  query(rate("vrambroker_device_scrubbed_bytes_total", "", DEVICE), "zeroed")], "Bps", 6)
    board.series("Driver call time: 99th percentile", "Time that calls to the GPU's driver take, by call.",
                 [query(quantile(0.99, "vrambroker_device_call_duration_seconds", "call", DEVICE), "{{call}}")], "s", 6)
    board.series("Failed driver calls",
                 "Calls to the GPU's driver that failed. When allocate fails, the driver usually has no memory left, "
                 "because other processes use the GPU.",
                 [query(increase("vrambroker_device_call_errors_total",
                                 "call", DEVICE), "{{call}}")], "none", 6, events=True)
    board.series("Requests by method", "Requests answered by the daemon per second.",
                 [query(rate("vrambroker_rpc_requests_total", "method") + " > 0", "{{method}}")], "reqps", 6)
    board.series("Request time: 95th percentile",
                 "Time in the daemon, by method, including waits for memory. Requests without a driver call take less "
                 "than a millisecond.",
                 [query(quantile(0.95, "vrambroker_rpc_duration_seconds", "method"), "{{method}}")], "s", 6)
    board.series("Failed requests",
                 "Failed requests as a share of all requests of the method, for any reason, including refusals for "
                 "lack of memory.",
                 [query('sum by (method) (rate(vrambroker_rpc_requests_total{%s, code!="OK"}[$__rate_interval]))'
                        " / (sum by (method) (rate(vrambroker_rpc_requests_total{%s}[$__rate_interval])) > 0)" % (DAEMON, DAEMON),
                        "{{method}}")], "percentunit", 6, share=True)
    board.series("Requests in progress",
                 "Requests that the daemon has not answered yet, by method. Session: a request of each connected "
                 "client, open while the client lives.",
                 [query(f"sum by (method) (vrambroker_rpc_in_flight{{{DAEMON}}}) > 0", "{{method}}")], "none", 6)

    board.row("Devices and daemons")
    board.series("Memory as the driver sees it",
                 "Memory held by the daemons, memory used by others, and free memory. Used by others: memory of "
                 "processes that bypass the daemon, and of all CUDA contexts; not counted on host devices.",
                 [query(f"sum(vrambroker_device_reserved_bytes{{{DEVICE}}})", "held by the daemon"),
                  query(f"sum(gpu:vrambroker_foreign:bytes{{{DEVICE}}}) or vector(0)", "used by others"),
                  query(f"sum(vrambroker_device_memory_free_bytes{{{DEVICE}}})", "free")], "bytes", 6, stacked=True)
    board.series("Capacity that the driver does not have",
                 "Part of the capacity that the daemon does not hand out: CUDA contexts of clients and other programs "
                 "use more than the headroom, or the next client's context needs memory. Raise headroom, or run fewer "
                 "processes.",
                 [query(f"vrambroker_device_outside_bytes{{{DEVICE}}}", BY_DEVICE)], "bytes", 6)
    board.series("Memory of processes beyond the charge",
                 "Figures from NVML, on GPUs. overhead: CUDA contexts and libraries of the daemon and its clients. "
                 "uncharged: overhead beyond overhead_allowance, obtained by clients past the broker. unused: charged "
                 "to counted clients, and not on the GPU. All figures are 0 where the driver gives none: vramctl "
                 "status says why.",
                 [query(f"sum(vrambroker_device_overhead_bytes{{{DEVICE}}})", "overhead"),
                  query(f"sum by (kind) (vrambroker_device_drift_bytes{{{DEVICE}}})", "{{kind}}")], "bytes", 6)
    board.series("Uncounted programs",
                 "Memory used by processes that are not clients, in all and by command, by NVML, on GPUs. vramctl "
                 "status names the pids and users of these processes.",
                 [query(f"sum(vrambroker_device_uncounted_bytes{{{DEVICE}}})", "all"),
                  query(f"sum by (process) (vrambroker_device_uncounted_process_bytes{{{DEVICE}}})", "{{process}}")], "bytes", 6)
    board.series("Memory of clients' processes",
                 "Memory used by the sessions' processes, by NVML, on GPUs. overhead: the part used by CUDA contexts "
                 "and libraries.",
                 [query(f"sum(vrambroker_client_used_bytes{{{DEVICE}}})", "used"),
                  query(f"sum(vrambroker_client_overhead_bytes{{{DEVICE}}})", "overhead")], "bytes", 6)
    board.series("Quarantined memory by reason",
                 "Memory not available to other sessions yet. disconnected: the session's stream broke, but its "
                 "process lives. ended: an operator ended the session, but its process still holds the memory. "
                 "settling: the session's process has ended. held_open: another process still has the memory open. "
                 "refused: the driver does not take the memory back; the daemon tries again.",
                 [query(f"sum by (reason) (vrambroker_device_quarantined_bytes{{{DEVICE}}})", "{{reason}}"),
                  query(f"sum(vrambroker_device_unfreed_bytes{{{DEVICE}}})", "refused")], "bytes", 6, stacked=True)
    board.series("Oldest quarantine",
                 "Longest time that memory of an ended process has been in quarantine. About a second is normal.",
                 [query(f"vrambroker_device_quarantine_age_seconds{{{DEVICE}}}", BY_DEVICE)], "s", 6)
    board.series("Carried over",
                 "Memory that processes still hold from an earlier run of the daemon. sessions: the part charged to "
                 "sessions. The rest belongs to processes without a session (vramctl quarantine).",
                 [query(f"sum(vrambroker_device_carried_over_bytes{{{DEVICE}}})", "all"),
                  query(f"sum(vrambroker_client_carried_over_bytes{{{DEVICE}}})", "sessions")], "bytes", 6)
    board.series("Held back",
                 "Free memory kept for a moment for a request that has waited (hold_back_time).",
                 [query(f"vrambroker_device_held_back_bytes{{{DEVICE}}}", BY_DEVICE)], "bytes", 6)
    board.series("HTTP connections",
                 "Open connections to the daemons' HTTP ports. Dropped: connections that the daemon closed because "
                 "they were too slow, or to admit other connections. Port taken: failed attempts to listen, because "
                 "another program uses the port.",
                 [query(f"sum(vrambroker_http_connections{{{DAEMON}}})", "open"),
                  query(increase("vrambroker_http_connections_dropped_total", "reason"), "dropped: {{reason}}"),
                  query(increase("vrambroker_http_listen_failures_total"), "port taken")], "none", 6)
    board.series("Sessions by state",
                 "active: connected. disconnected: the stream broke; the daemon keeps the memory until the process "
                 "reconnects or ends. ended: an operator ended the session, but its process still holds the memory.",
                 [query(f"sum by (state) (vrambroker_sessions{{{DAEMON}}})", "{{state}}")], "none", 6, stacked=True)
    board.series("Sessions opened and closed",
                 "Sessions opened, refused, and closed, by reason. goodbye is the normal reason; process_ended means "
                 "that the process died or was killed.",
                 [query(increase("vrambroker_sessions_opened_total"), "opened"),
                  query(increase("vrambroker_sessions_refused_total"), "refused"),
                  query(increase("vrambroker_sessions_closed_total",
                                 "reason"), "closed: {{reason}}")], "none", 6, events=True)
    board.series("Daemon: CPU", "CPU cores that the daemon keeps busy.",
                 [query(f"rate(process_cpu_seconds_total{{{DAEMON}}}[$__rate_interval])", "{{instance}}")], "none", 6)
    board.series("Daemon: memory",
                 "The daemon's own memory on the host. With host devices, the figure includes memory written by "
                 "clients.",
                 [query(f"process_resident_memory_bytes{{{DAEMON}}}", "{{instance}} resident"),
                  query(f"process_virtual_memory_bytes{{{DAEMON}}}", "{{instance}} virtual")], "bytes", 6)
    board.series("Daemon: open files",
                 "Open file descriptors, as a share of the maximum. Sessions and segments of host devices need "
                 "descriptors.",
                 [query(f"process_open_fds{{{DAEMON}}} / process_max_fds{{{DAEMON}}}", "{{instance}}")], "percentunit", 6, share=True,
                 colors=thresholds((None, "transparent"), (0.8, "orange")))
    board.series("Daemon: scrape time", "Time that the daemon took to collect its metrics.",
                 [query(f"vrambroker_collect_duration_seconds{{{DAEMON}}}", "{{instance}}")], "s", 6)
    board.identities("Devices",
                     "Devices that the daemons serve. The number is the daemon's own; the UUID is the driver's.",
                     f"vrambroker_device_info{{{DEVICE}}}",
                     {"instance": "Daemon", "gpu": "Device", "name": "Name", "kind": "Kind", "uuid": "UUID"},
                     width=10, height=8)
    board.identities("Daemons", "Versions of the daemons, and of the CUDA Toolkit used to build them. All daemons use "
                                "the installed driver, whatever the Toolkit's version.",
                     f"vrambroker_build_info{{{DAEMON}}}",
                     {"instance": "Daemon", "version": "Version", "revision": "Revision", "cuda_version": "CUDA Toolkit"},
                     width=8, height=8)
    board.stat("Sessions shown as _other",
               "Sessions beyond metrics.max_clients or max_clients_per_uid. The name _other stands for the sum of "
               "these sessions' figures.",
               f"sum(vrambroker_clients_folded{{{DAEMON}}})", width=6, colors=ANY_IS_NOTABLE)
    board.stat("Failed scrapes, last hour",
               "Scrapes that failed in the daemon. Most likely the daemon ran out of memory; if not, please report a "
               "bug.",
               f"round(sum(increase(vrambroker_collect_errors_total{{{DAEMON}}}[1h])))", width=6, colors=ANY_IS_BAD, decimals=0)
    board.stat("Rejected configurations",
               "Daemons whose last reload failed: the old configuration is still in force.",
               f"sum(1 - vrambroker_config_last_reload_successful{{{DAEMON}}})", width=6, colors=ANY_IS_BAD)
    board.stat("Configuration in force since",
               "Latest time at which a daemon accepted a configuration, over all daemons.",
               f"1000 * max(vrambroker_config_last_reload_success_timestamp_seconds{{{DAEMON}}})", unit="dateTimeAsIso",
               width=6, colors=NEUTRAL)
    return board


# ---- Session and fragmentation ----


def session():
    board = Dashboard(
        "vrambroker-session", "vrambroker: Session and fragmentation",
        "One or more sessions in detail: held memory, its composition, and causes of refusals. Select the sessions "
        "above.",
        VARIABLES + [SESSION_VARIABLE], [link("GPU memory overview", "vrambroker-overview")])
    annotate_daemon(board)
    board.annotate("Out of memory", increase("vrambroker_client_ooms_total", "client, gpu, reason", SESSION) + " > 0", "red",
                   "{{client}} refused on gpu {{gpu}}: {{reason}}")

    def total(name):
        return f"sum(vrambroker_client_{name}{{{SESSION}}})"

    limited = f"(vrambroker_client_limit_bytes{{{SESSION}}} > 0)"

    board.row("Share")
    board.stat("Reserved, % of limit",
               "Memory held by the selected sessions, as a share of their limits. At 100 %, the sessions give back "
               "reclaimable memory, and then requests fail.",
               f"sum(vrambroker_client_reserved_bytes{{{SESSION}}}) / sum({limited})", colors=USAGE, share=True)
    board.stat("Allocated, % of limit", "Memory used by the sessions' programs, as a share of the limits.",
               f"sum(vrambroker_client_allocated_bytes{{{SESSION}}}) / sum({limited})", colors=USAGE, share=True)
    board.stat("Fragmented",
               "Free memory beside used blocks, which no trim gives back, as a share of the held memory. Take a look "
               "above 30 % (a rule of thumb).",
               f"{total('inactive_split_bytes')} / ({total('reserved_bytes')} > 0) or vector(0)", colors=FRAGMENTATION, share=True)
    board.stat("Limit", "The most memory that the sessions may hold together.", total("limit_bytes"), "bytes", NEUTRAL)
    board.stat("Guarantee", "Memory kept free for the sessions, including the part that the sessions hold.",
                            total("guarantee_bytes"), "bytes", NEUTRAL)
    board.stat("Peak use", "The most bytes in use at one time, since the session began or since the last reset of its "
                           "peaks.",
               total("peak_allocated_bytes"), "bytes", NEUTRAL)
    board.stat("Waiting now", "Requests of the sessions that wait until other sessions give memory back.",
                              total("waiting_requests"),
               colors=ANY_IS_NOTABLE)
    board.stat("Refused", "Requests of the sessions that got no memory, in the time range shown.",
               f"round(sum(increase(vrambroker_client_ooms_total{{{SESSION}}}[$__range])))", colors=ANY_IS_NOTABLE, decimals=0)

    board.row("Anatomy")
    board.series("Composition of the memory", ANATOMY, anatomy(total, total("idle_bytes")), "bytes", 14, 9,
                 stacked=True, paint=PARTS)
    board.series("Between guarantee and limit",
                 "Memory held and used by the sessions, compared with their guarantees and limits.",
                 [query(total(name + "_bytes"), legend) for name, legend in
                  (("limit", "limit"), ("reserved", "reserved"), ("allocated", "allocated"), ("guarantee", "guarantee"),
                   ("peak_reserved", "peak reserved"))], "bytes", 10, 9)

    board.row("Fragmentation")
    fragmented_and_unused(board, "client", "reserved", SESSION, BY_SESSION)
    board.series("Free memory that one large request cannot use",
                 "External fragmentation by session: 1 - largest free block / all free memory. Near 0 %: one large "
                 "piece. Near 100 %: many small pieces.",
                 [query(f"vrambroker_client_external_fragmentation_ratio{{{SESSION}}}", BY_SESSION)], "percentunit", colors=LINE_AT_50,
                 share=True)
    board.series("Fragmented and lost memory",
                 "Shares of the sessions' memory. Fragmented: free memory beside used blocks, which cannot be given "
                 "back. Lost: bytes lost to rounding up to block sizes.",
                 [query(f"{total('inactive_split_bytes')} / ({total('reserved_bytes')} > 0) or vector(0)", "fragmented"),
                  query(f"clamp_min({total('allocated_bytes')} - {total('requested_bytes')}, 0) / ({total('reserved_bytes')} > 0)"
                        " or vector(0)", "lost to rounding")], "percentunit", share=True)
    title, description, targets, unit, width = free_blocks(
        "Free memory by size of the free blocks", "of the sessions", "vrambroker_client_free_block_bytes", SESSION, 12)
    board.series(title, description, targets, unit, width, 9, stacked=True, paint=PIECES)
    board.series("Largest free block and all free memory",
                 "A request larger than the largest free block needs new memory, no matter how much memory is free.",
                 [query(f"vrambroker_client_largest_free_block_bytes{{{SESSION}}}", BY_SESSION + ": largest"),
                  query(f"vrambroker_client_cached_free_bytes{{{SESSION}}}", BY_SESSION + ": all")], "bytes", 12, 9)
    growth = f"vrambroker_client_fragmentation_growth_bytes_per_second{{{SESSION}}}"
    board.series("Growth of fragmentation",
                 "Growth of a session's fragmented memory, while the session uses no more memory than before. 0: no "
                 "trend. The daemon sees a trend after about eight minutes (fragmentation_window).",
                 [query(growth, BY_SESSION)], "Bps", 12)
    board.series("Time until refusals at this rate",
                 "Time until the growth of fragmentation has used up the session's limit, its user's limit or the GPU. "
                 "The panel shows one day at most, and one day without a trend.",
                 [query(f"clamp_max(vrambroker_client_refusal_expected_seconds{{{SESSION}}}, 86400) or {growth} * 0 + 86400",
                        BY_SESSION)], "s", 12, colors=thresholds((None, "orange"), (3600, "transparent")))

    board.row("Activity")
    board.series("Segments and blocks", "Segments held by the sessions, and blocks in use in these segments.",
                 [query(total("segments"), "segments"), query(total("blocks"), "blocks")], "none", 6)
    board.series("Allocations and frees", "Blocks allocated and freed by programs per second.",
                 [query(rate("vrambroker_client_allocs_total", "", SESSION), "allocations"),
                  query(rate("vrambroker_client_frees_total", "", SESSION), "frees")], "ops", 6)
    board.series("Refused by reason",
                 "Causes of refusals. limit: the session's own limit. capacity: the device is full. fragmentation: the "
                 "free memory suffices, but lies in holes between used blocks. larger_than_device: the request can "
                 "never fit.",
                 [query(increase("vrambroker_client_ooms_total", "reason", SESSION), "{{reason}}")], "none", 6, events=True, paint=REASONS)
    board.series("Requests that flushed the cache first",
                 "A session at its limit gives its whole cache back to get a single block. A refusal comes next.",
                 [query(increase("vrambroker_client_alloc_retries_total",
                                 "client, gpu", SESSION), BY_SESSION)], "none", 6, events=True)

    board.row("Sessions")
    sessions_table(board, "Selected sessions", SESSION, "Fragmented", 8)
    board.series("Tenant: reserved, allocated, reclaimable, guaranteed", "All sessions of the selected tenants together.",
                 [query(f"sum(vrambroker_tenant_{name}_bytes{{{TENANT}}})", legend) for name, legend in
                  (("reserved", "reserved"), ("allocated", "allocated"), ("idle", "reclaimable"), ("guarantee", "guaranteed"))], "bytes", 8)
    board.series("Tenant: sessions", "Sessions of each selected tenant, on the device with the most sessions of the "
                                     "tenant.",
                 [query(f"max by (tenant) (vrambroker_tenant_sessions{{{TENANT}}})", "{{tenant}}")], "none", 4)
    board.identities("Session details",
                     "Number: the session's id in logs, vramctl and the web page. Rule: the rule of the configuration "
                     "that gave the session its limit. Placement: whether the allocator runs in the client (leased) or "
                     "in the daemon (remote).",
                     f'vrambroker_client_info{{{DAEMON}, tenant=~"$tenant", client=~"$client"}}',
                     {"client": "Session", "session": "Number", "tenant": "Tenant", "uid": "User", "rule": "Rule", "placement": "Placement"},
                     width=12, height=8)
    return board


def files():
    """name: contents of every file of dashboards/."""
    return {"overview.json": overview().text(), "session.json": session().text()}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, text in files().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
