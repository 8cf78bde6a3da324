#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks the includes between folders. Usage: layering_test.py ROOT

The tables "| folder |" in the README.md of allocator/, server/ and client/ list the includes that each folder may have.
The check also reports an allowed include that no file has. The diagram of server/README.md has the same layers: each
arrow is an include, and each include follows the arrows.

Before ROOT, the check reads files that break each rule, so a blind check cannot pass.
"""
import graphlib
import pathlib
import re
import sys
import tempfile

FOLDERS = ("allocator", "server", "client", "proto", "deploy")
SOURCE = re.compile(r"\.(h|hpp|inc|c|cc|cu|proto)(\.in)?$")
INCLUDE = re.compile(r'^\s*(?:#\s*include\s*([<"])([^>"]+)[>"]|import\s+(?:public\s+)?"([^"]+)"\s*;)', re.M)

# (files, banned includes, exception, reason). Files and exceptions match the path in ROOT. The tables rule the folders
# of the project.
MESSAGES_IN_WIRE = "allocator/ knows no wire format but in wire/"
NO_CALLS = "allocator/ makes no calls"
NO_LOGS = "allocator/ neither logs nor exports metrics: it returns statuses and figures"
IN_OTHERS_PROGRAMS = "the client library is linked into other people's programs"
GRPC_IN_RPC = "only rpc/ knows gRPC, and wire/ its statuses"
BOOST_IN_HTTP = "Boost is for HTTP"
CURSES_IN_TOP = "curses draws `vramctl top`"
ONLY_CLIENTS = "demos and examples are clients"
MESSAGES_ALONE = "proto/ holds messages, which depend on messages alone"
CUDA_IN_DEVICE = "CUDA is behind the Device interface, in one place"
BANS = [
    (r"allocator/(?!wire/)", r"google/protobuf/", None, MESSAGES_IN_WIRE),
    (r"allocator/", r"grpc", None, NO_CALLS),
    (r"allocator/", r"prometheus/|spdlog/|boost/", None, NO_LOGS),
    (r"client/", r"prometheus/|spdlog/|boost/", None, IN_OTHERS_PROGRAMS),
    (r"server/", r"grpc", r"server/((rpc|wire)/|[^/]*$)", GRPC_IN_RPC),
    (r"server/", r"boost/", r"server/http/", BOOST_IN_HTTP),
    (r"client/", r"n?curses", r"client/vramctl/top/", CURSES_IN_TOP),
    (r"deploy/", r"server/", r"deploy/kubernetes/", ONLY_CLIENTS),
    (r"deploy/kubernetes/", r"server/(?!base/)", None, ONLY_CLIENTS),
    (r"proto/", r"(server|client|allocator)/", None, MESSAGES_ALONE),
    (r"", r"(allocator/device/)?cuda|nvml", r"allocator/device/cuda_(device\.cc|(driver|status)\.(cc|h))$", CUDA_IN_DEVICE),
]
# Declares the device without CUDA's own headers.
ALLOWED = {"allocator/device/cuda_device.h"}

NOT_FROM_ROOT = "files of the project are included by their path from its root"

TABLED = ("allocator", "server", "client")
ROW = re.compile(r"^\| `([^`|]*)` \|[^|]*\|([^|]*)\|$", re.M)
MESSAGES = "proto"


def folder_of(name):
    """Returns the folder, as the tables name folders, of a file or of an included name."""
    if re.search(r"\.pb\.h$", name) or name.startswith("proto/"):
        return MESSAGES
    if re.match(r"vrambroker/\w+\.h$", name):  # the form that foreign programs include
        return "client/vrambroker"
    parts = name.split("/")[:-1]
    return "/".join(parts[:3 if parts[:2] == ["client", "vramctl"] else 2])


def tables(root):
    """Returns {folder: allowed includes}, and the faults of the tables."""
    allowed, faults = {}, []
    for top in TABLED:
        readme = root / top / "README.md"
        text = readme.read_text(encoding="utf-8") if readme.is_file() else ""
        begin = text.find("| folder |")
        table = text[begin:text.find("\n\n", begin)] if begin >= 0 else ""
        for row in re.findall(r"^\| *`.*", table, re.M):
            if not ROW.match(row):
                faults.append(f"{top}/README.md: not a row of three columns that begins with one folder: {row}")
        for folder, others in ROW.findall(table):
            names = re.findall(r"`([^`]+)`", others)
            known = [name if name == MESSAGES or name.split("/")[0] in TABLED else f"{top}/{name}" for name in names]
            name = top if folder == "." else f"{top}/{folder}"
            if name in allowed:
                faults.append(f"the tables have two rows for {name}")
            allowed[name] = known
    known = {folder: [other for other in others if other in allowed] for folder, others in allowed.items()}
    order = graphlib.TopologicalSorter(known)
    try:
        order.prepare()
    except graphlib.CycleError as error:
        faults.append("the tables let folders include each other: " + ", ".join(reversed(error.args[1])))
    for folder, others in allowed.items():
        for other in others:
            if other != MESSAGES and other not in allowed:
                faults.append(f"the tables let {folder} include {other}, which is in none of them")
            tops = {folder.split("/")[0], other.split("/")[0]}
            if tops == {"server", "client"} or folder.startswith("allocator") and not tops <= {"allocator", MESSAGES}:
                faults.append(f"the tables let {folder} include {other}: server/ and client/ meet only in allocator/ and proto/")
    return allowed, faults


def includes(path):
    """Yields each include of a file, and True for an include in quotes."""
    for quote, included, imported in INCLUDE.findall(path.read_text(encoding="utf-8")):
        yield included or imported, quote == '"'


def is_plain_messages(path):
    """Returns True for a header of plain C, made for programs that speak a protocol without any library."""
    return path.suffix == ".h" and {include for include, _ in includes(path)} == {"stdint.h"}


def violations(root):
    """Returns lines "FILE includes X: reason", and the number of checked files."""
    allowed, found = tables(root)
    files, used, folders = 0, set(), set()
    for top in FOLDERS:
        for path in sorted((root / top).rglob("*")):
            if not SOURCE.search(path.name) or not path.is_file():
                continue
            files += 1
            name = path.relative_to(root).as_posix()
            folder = folder_of(name)
            folders.add(folder)
            if top == "proto" and path.suffix != ".proto" and not is_plain_messages(path):
                found.append(f"{name}: proto/ holds messages alone")
            is_foreign = name.startswith("allocator/device/cuda_headers/")  # stands in for NVIDIA's own headers
            for include, is_quoted in includes(path):
                if is_quoted and not is_foreign and include.split("/")[0] not in (*FOLDERS, "absl", "vrambroker"):
                    found.append(f"{name} includes {include}: {NOT_FROM_ROOT}")
                for where, banned, exception, reason in BANS:
                    if include in ALLOWED or not re.match(where, name) or not re.match(banned, include):
                        continue
                    if exception is None or not re.match(exception, name):
                        found.append(f"{name} includes {include}: {reason}")
                other = folder_of(include)
                if top not in TABLED or is_foreign or other == folder or other.split("/")[0] not in (MESSAGES, *TABLED):
                    continue
                used.add((folder, other))
                if folder in allowed and other not in allowed[folder]:
                    found.append(f"{name} includes {include}: by the table in {top}/README.md {folder} may not")
    found += [f"{folder} is in no table" for folder in sorted(folders) if folder.split("/")[0] in TABLED and folder not in allowed]
    found += [f"{folder} is in a table, and has no file" for folder in allowed if folder not in folders]
    found += [f"by the tables {folder} includes {other}: no file does"
              for folder, others in allowed.items() for other in others if (folder, other) not in used]
    return found, files


def arrows(text):
    """Returns {folder: targets of its arrows} of the first diagram in `text`. The daemon is server/ itself."""
    found = {}
    diagram = re.search(r"^```mermaid\n(.*?)^```", text, re.M | re.S)
    for left, right in re.findall(r"^ *([\w& ]+?) --> ([\w& ]+)$", diagram.group(1) if diagram else "", re.M):
        for one in left.split(" & "):
            found.setdefault(one, set()).update(right.split(" & "))
    return found


def wrong_arrows(root):
    """Returns lines "the diagram ...", by the tables. violations() compares the tables with the files."""
    allowed, _ = tables(root)
    includes_of = {}
    for folder, others in allowed.items():
        if folder.split("/")[0] == "server":
            inside = {other.split("/")[1] for other in others if other.startswith("server/")}
            includes_of["daemon" if folder == "server" else folder.split("/")[1]] = inside
    drawn = arrows((root / "server/README.md").read_text(encoding="utf-8"))
    found = [f"the diagram has {one} --> {other}, which is no include" for one, others in drawn.items()
             for other in sorted(others - includes_of.get(one, set()))]
    for one, others in includes_of.items():
        reached, ahead = set(), [one]
        while ahead:
            for other in drawn.get(ahead.pop(), set()) - reached:
                reached.add(other)
                ahead.append(other)
        found += [f"the diagram has no way from {one} to {other}, which it includes" for other in sorted(others - reached)]
    return found


HEADING = "| folder | what | may include |\n|---|---|---|\n"
SELF_TEST = {
    "allocator/README.md": HEADING + "| `wire` | | `base`, `proto` |\n| `device` | | `base` |\n| `base` | | |\n",
    "server/README.md": HEADING + "| `.` | | `core`, `allocator/device` |\n| `core` | | |\n",
    "client/README.md": HEADING + "| `session` | | `vrambroker` |\n| `vrambroker` | | |\n\n| `session` | | `gone` |\n",
}


def self_test():
    """Returns the faults of the check itself."""
    in_table = "may not"
    bad = {
        "allocator/base/a.cc": ('#include "server/core/broker.h"', in_table),
        "allocator/base/b.h": ('  #  include "allocator/device/device.h"', in_table),
        "allocator/base/c.cc": ('#include "vrambroker/v1/types.pb.h"', in_table),
        "allocator/base/d.cc": ("#include <google/protobuf/message.h>", MESSAGES_IN_WIRE),
        "allocator/base/e.cc": ("#include <prometheus/registry.h>", NO_LOGS),
        "allocator/wire/b.cc": ("#include <grpcpp/grpcpp.h>", NO_CALLS),
        "allocator/base/f.c": ('#include "bytes.h"', NOT_FROM_ROOT),
        "server/core/up.cc": ('#include "../daemon.h"', NOT_FROM_ROOT),
        "server/core/grpc.cc": ("#include <grpcpp/grpcpp.h>", GRPC_IN_RPC),
        "server/core/boost.cc": ("#include <boost/beast.hpp>", BOOST_IN_HTTP),
        "client/session/curses.cc": ("#include <curses.h>", CURSES_IN_TOP),
        "deploy/server.cc": ('#include "server/core/broker.h"', ONLY_CLIENTS),
        "deploy/kubernetes/core.cc": ('#include "server/core/broker.h"', ONLY_CLIENTS),
        "server/core/a.cc": ('#include "client/connection/connection.h"', in_table),
        "server/core/b.cc": ('#include "vrambroker/client.h"', in_table),
        "server/core/c.cc": ('#include "server/daemon.h"', in_table),
        "client/session/a.cc": ('#include "server/sessions/session.h"', in_table),
        "client/session/c.cc": ("#include <spdlog/spdlog.h>", IN_OTHERS_PROGRAMS),
        "proto/vrambroker/v1/a.proto": ('import "allocator/block.proto";', MESSAGES_ALONE),
        "server/cuda.cc": ("#include <cuda_runtime_api.h>", CUDA_IN_DEVICE),
        "client/session/cuda.cc": ("#include <cuda.h>", CUDA_IN_DEVICE),
        "allocator/device/host_device.cc": ("#include <cuda_runtime.h>", CUDA_IN_DEVICE),
        "deploy/probe.cc": ("#include <nvml.h>", CUDA_IN_DEVICE),
        "server/driver.cc": ('#include "allocator/device/cuda_driver.h"', CUDA_IN_DEVICE),
    }
    good = {
        "allocator/device/cuda_device.cc": '#include "allocator/device/cuda_driver.h"\n#include <cuda.h>\n',
        "allocator/device/device.cc": '#include "allocator/base/bytes.h"\n// not #include "server/core/broker.h"\n',
        "allocator/wire/a.cc": '#include "allocator/base/bytes.h"\n#include "vrambroker/v1/types.pb.h"\n#include <google/protobuf/message.h>\n',
        "allocator/base/good.cc": "",
        "client/vrambroker/good.h": "",
        "server/core/good.cc": "",
        "server/good.cc": '#include "allocator/device/cuda_device.h"\n#include "server/core/broker.h"\n',
        "deploy/kubernetes/good.cc": '#include "server/base/log_line.h"\n',
        "client/session/good.cc": '#include <vrambroker/client.h>\n',
        "proto/vrambroker/v1/good.proto": 'import "google/protobuf/timestamp.proto";\n',
    }
    faults = []
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        for name, text in [*SELF_TEST.items(), *good.items(), *((name, text + "\n") for name, (text, _) in bad.items())]:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text, encoding="utf-8")
        found, files = violations(root)
        if files != len(good) + len(bad):
            faults.append(f"looked at {files} files instead of {len(good) + len(bad)}")
        for name, (_, reason) in bad.items():
            hits = [line for line in found if line.startswith(f"{name} includes ") and line.endswith(reason)]
            if len(hits) != 1:
                faults.append(f"{name} was reported {len(hits)} times")
        if len(found) != len(bad):
            faults.append("reported besides: " + "; ".join(line for line in found if line.split()[0] not in bad))
        (root / "proto/a.cc").write_text("", encoding="utf-8")
        (root / "allocator/lost").mkdir()
        (root / "allocator/lost/a.cc").write_text("", encoding="utf-8")
        table = SELF_TEST["allocator/README.md"].replace("`base`, `proto`", "`base`, `proto`, `device`, `server/core`, `gone`")
        table = table.replace("`base` | | |", "`base` | | `device` |\n| `void` | | |\n| `void` | | |\n| `base`, `void` | | |")
        (root / "allocator/README.md").write_text(table, encoding="utf-8")
        more = [line for line in violations(root)[0] if line not in found]
        for part in ("proto/a.cc: ", "allocator/lost is in no table", "allocator/void is in a table, and has no file",
                     "two rows for allocator/void", "not a row of three", "includes allocator/device: no file does",
                     "includes server/core: no file does", "include each other: ", "include allocator/gone, which is in none",
                     "include server/core: server/ and client/ meet only"):
            if len([line for line in more if part in line]) != 1:
                faults.append(f"{part!r} is not reported once, but: {more}")
        table = HEADING + "| `.` | | `a`, `b`, `c` |\n| `a` | | `c` |\n| `b` | | `c` |\n| `c` | | |\n\n"
        for drawn, wrong in (("daemon --> a & b\n  a & b --> c", []),
                             ("daemon --> a & b\n  a --> c", ["the diagram has no way from b to c, which it includes"]),
                             ("daemon --> a\n  a --> b\n  a & b --> c", ["the diagram has a --> b, which is no include"])):
            (root / "server/README.md").write_text(f"{table}```mermaid\ngraph TD\n  {drawn}\n```\n", encoding="utf-8")
            if wrong_arrows(root) != wrong:
                faults.append(f"of the diagram {drawn!r} it says: {wrong_arrows(root)}")
    return faults


def main():
    faults = self_test()
    for fault in faults:
        print(f"self-test: {fault}")
    if faults:
        return 2
    root = pathlib.Path(sys.argv[1])
    found, files = violations(root)
    found += wrong_arrows(root)
    for line in found:
        print(line)
    print(f"{files} files, {len(found)} violations")
    return 1 if found or files < 50 else 0


if __name__ == "__main__":
    sys.exit(main())
