#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks who includes whom. Usage: layering_test.py ROOT

Which folder may include which is written in one place each: the tables "| folder |" in the README.md of allocator/, server/ and
client/. The reverse is checked, too: what a table allows and no file does is reported, and so is a path that any documentation
names and that is not there. The diagram of server/README.md has the same layers: each arrow is an include, and each include
follows the arrows.

Before it looks at ROOT it looks at files made to break each rule, so that a check that sees nothing cannot pass.
"""
import graphlib
import pathlib
import re
import sys
import tempfile

FOLDERS = ("allocator", "server", "client", "proto", "deploy")
SOURCE = re.compile(r"\.(h|hpp|inc|c|cc|cu|proto)(\.in)?$")
QUOTED = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.M)
INCLUDE = re.compile(r'^\s*(?:#\s*include\s*[<"]([^>"]+)[>"]|import\s+(?:public\s+)?"([^"]+)"\s*;)', re.M)

# (files, what they must not include, except in, why). Files and exceptions are matched against the path in ROOT. Folders of the
# project are the tables' to say.
BANS = [
    (r"allocator/(?!wire/)", r"google/protobuf/", None, "allocator/ knows no wire format but in wire/"),
    (r"allocator/", r"grpc", None, "allocator/ makes no calls"),
    (r"allocator/", r"prometheus/|spdlog/|boost/", None,
     "allocator/ neither logs nor exports metrics: it returns statuses and figures"),
    (r"client/", r"prometheus/|spdlog/|boost/", None, "the client library is linked into other people's programs"),
    (r"server/", r"grpc", r"server/((rpc|wire)/|[^/]*$)", "only rpc/ knows gRPC, and wire/ its statuses"),
    (r"server/", r"boost/", r"server/http/", "Boost is for HTTP"),
    (r"client/", r"n?curses", r"client/vramctl/top/", "curses draws `vramctl top`"),
    (r"deploy/", r"server/", None, "demos and examples are clients"),
    (r"proto/", r"(server|client|allocator)/", None, "proto/ holds messages, which depend on messages alone"),
    (r"", r"(allocator/device/)?cuda|nvml", r"allocator/device/cuda_(device\.cc|(driver|status)\.(cc|h))$",
     "CUDA is behind the Device interface, in one place"),
]
# Declares the device without CUDA's own headers.
ALLOWED = {"allocator/device/cuda_device.h"}

NOT_FROM_ROOT = "files of the project are included by their path from its root"

TABLED = ("allocator", "server", "client")
ROW = re.compile(r"^\| `([^`|]*)` \|[^|]*\|([^|]*)\|$", re.M)
MESSAGES = "proto"


def folder_of(name):
    """The folder, as tables name it, of a file, or of what an #include names."""
    if re.search(r"\.pb\.h$", name):
        return MESSAGES
    if re.match(r"vrambroker/\w+\.h$", name):  # as programs of others include it
        return "client/vrambroker"
    parts = name.split("/")[:-1]
    return "/".join(parts[:3 if parts[:2] == ["client", "vramctl"] else 2])


def tables(root):
    """{folder: what it may include}, and what is wrong with the tables."""
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
    order = graphlib.TopologicalSorter({folder: [other for other in others if other in allowed] for folder, others in allowed.items()})
    try:
        order.prepare()
    except graphlib.CycleError as error:
        faults.append("the tables let folders include each other: " + ", ".join(reversed(error.args[1])))
    for folder, others in allowed.items():
        for other in others:
            if other != MESSAGES and other not in allowed:
                faults.append(f"the tables let {folder} include {other}, which is in none of them")
            if {folder.split("/")[0], other.split("/")[0]} == {"server", "client"} or folder.startswith("allocator") and not other.startswith(("allocator", MESSAGES)):
                faults.append(f"the tables let {folder} include {other}: server/ and client/ meet only in allocator/ and proto/")
    return allowed, faults


def includes(path):
    for match in INCLUDE.finditer(path.read_text(encoding="utf-8")):
        yield match.group(1) or match.group(2)


def violations(root):
    """Lines "FILE includes X: reason", and the number of files looked at."""
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
            for include in QUOTED.findall(path.read_text(encoding="utf-8")):
                if include.split("/")[0] not in (*FOLDERS, "absl", "vrambroker") and not name.startswith("allocator/device/cuda_headers/"):
                    found.append(f"{name} includes {include}: {NOT_FROM_ROOT}")
            if top == "proto" and path.suffix != ".proto":
                found.append(f"{name}: proto/ holds messages alone")
            for include in includes(path):
                for where, banned, exception, reason in BANS:
                    if include in ALLOWED or not re.match(where, name) or not re.match(banned, include):
                        continue
                    if exception is None or not re.match(exception, name):
                        found.append(f"{name} includes {include}: {reason}")
                other = folder_of(include)
                if top not in TABLED or name.startswith("allocator/device/cuda_headers/") or other == folder or not (other == MESSAGES or other.split("/")[0] in TABLED):
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
    """{folder: those that its arrows lead to}, of the first diagram in `text`. The folder itself, with main, is called daemon."""
    found = {}
    diagram = re.search(r"^```mermaid\n(.*?)^```", text, re.M | re.S)
    for left, right in re.findall(r"^ *([\w& ]+?) --> ([\w& ]+)$", diagram.group(1) if diagram else "", re.M):
        for one in left.split(" & "):
            found.setdefault(one, set()).update(right.split(" & "))
    return found


def wrong_arrows(root):
    """Lines "the diagram ...". By the table, which is compared with the files."""
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


NAMED = re.compile(r"`((?:allocator|client|deploy|proto|server|tests)/[\w./-]*\w)`")
LINKED = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)")


def dead_paths(root):
    """Lines "FILE names X: ...". A path may leave its ending out."""
    found = []
    for top in (".", *FOLDERS, "tests"):
        for path in sorted((root / top).glob("*.md" if top == "." else "**/*.md")):
            for name in NAMED.findall(path.read_text(encoding="utf-8")):
                named = root / name
                if not named.exists() and not any(named.parent.glob(named.name + ".*")):
                    found.append(f"{path.relative_to(root).as_posix()} names {name}: there is no such file or folder")
            for name in LINKED.findall(path.read_text(encoding="utf-8")):
                # Some are read elsewhere, as the one at the root of a bundle.
                if not (path.parent / name).exists() and not (root / name).exists():
                    found.append(f"{path.relative_to(root).as_posix()} links to {name}: there is no such file or folder")
    return found


SELF_TEST = {
    "allocator/README.md": "| folder | what | may include |\n|---|---|---|\n| `wire` | | `base`, `proto` |\n| `device` | | `base` |\n| `base` | | |\n",
    "server/README.md": "| folder | what | may include |\n|---|---|---|\n| `.` | | `core`, `allocator/device` |\n| `core` | | |\n",
    "client/README.md": "| folder | what | may include |\n|---|---|---|\n| `session` | | `vrambroker` |\n| `vrambroker` | | |\n\n| `session` | | `gone` |\n",
}


def self_test():
    """Returns what is wrong with the check itself."""
    in_table = "may not"
    bad = {
        "allocator/base/a.cc": ('#include "server/core/broker.h"', in_table),
        "allocator/base/b.h": ('  #  include "allocator/device/device.h"', in_table),
        "allocator/base/c.cc": ('#include "vrambroker/v1/types.pb.h"', in_table),
        "allocator/base/d.cc": ("#include <google/protobuf/message.h>", BANS[0][3]),
        "allocator/base/e.cc": ("#include <prometheus/registry.h>", BANS[2][3]),
        "allocator/wire/b.cc": ("#include <grpcpp/grpcpp.h>", BANS[1][3]),
        "allocator/base/f.c": ('#include "bytes.h"', NOT_FROM_ROOT),
        "server/core/up.cc": ('#include "../daemon.h"', NOT_FROM_ROOT),
        "server/core/grpc.cc": ("#include <grpcpp/grpcpp.h>", "only rpc/ knows gRPC, and wire/ its statuses"),
        "server/core/boost.cc": ("#include <boost/beast.hpp>", "Boost is for HTTP"),
        "client/session/curses.cc": ("#include <curses.h>", "curses draws `vramctl top`"),
        "deploy/server.cc": ('#include "server/core/broker.h"', "demos and examples are clients"),
        "server/core/a.cc": ('#include "client/connection/connection.h"', in_table),
        "server/core/b.cc": ('#include "vrambroker/client.h"', in_table),
        "server/core/c.cc": ('#include "server/daemon.h"', in_table),
        "client/session/a.cc": ('#include "server/core/session.h"', in_table),
        "client/session/c.cc": ("#include <spdlog/spdlog.h>", "the client library is linked into other people's programs"),
        "proto/vrambroker/v1/a.proto": ('import "allocator/block.proto";', "proto/ holds messages, which depend on messages alone"),
        "server/cuda.cc": ("#include <cuda_runtime_api.h>", "CUDA is behind the Device interface, in one place"),
        "client/session/cuda.cc": ("#include <cuda.h>", "CUDA is behind the Device interface, in one place"),
        "allocator/device/host_device.cc": ("#include <cuda_runtime.h>", "CUDA is behind the Device interface, in one place"),
        "deploy/probe.cc": ("#include <nvml.h>", "CUDA is behind the Device interface, in one place"),
        "server/driver.cc": ('#include "allocator/device/cuda_driver.h"', "CUDA is behind the Device interface, in one place"),
    }
    good = {
        "allocator/device/cuda_device.cc": '#include "allocator/device/cuda_driver.h"\n#include <cuda.h>\n',
        "allocator/device/device.cc": '#include "allocator/base/bytes.h"\n// not #include "server/core/broker.h"\n',
        "allocator/wire/a.cc": '#include "allocator/base/bytes.h"\n#include "vrambroker/v1/types.pb.h"\n#include <google/protobuf/message.h>\n',
        "allocator/base/good.cc": "",
        "client/vrambroker/good.h": "",
        "server/core/good.cc": "",
        "server/good.cc": '#include "allocator/device/cuda_device.h"\n#include "server/core/broker.h"\n',
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
        (root / "allocator/README.md").write_text(SELF_TEST["allocator/README.md"].replace("`base`, `proto`", "`base`, `proto`, `device`, `server/core`, `gone`").replace("`base` | | |", "`base` | | `device` |\n| `void` | | |\n| `void` | | |\n| `base`, `void` | | |"))
        more = [line for line in violations(root)[0] if line not in found]
        for part in ("proto/a.cc: ", "allocator/lost is in no table", "allocator/void is in a table, and has no file", "two rows for allocator/void", "not a row of three", "includes allocator/device: no file does", "includes server/core: no file does",
                     "include each other: ", "include allocator/gone, which is in none", "include server/core: server/ and client/ meet only"):
            if len([line for line in more if part in line]) != 1:
                faults.append(f"{part!r} is not reported once, but: {more}")
        (root / "server/README.md").write_text("`server/good.cc`, `server/good`, `server/core`, `elsewhere/a`, `server/gone.cc`, [a](good.cc), [b](../client#c), [d](https://e), [f](gone.md)", encoding="utf-8")
        if dead_paths(root) != [f"server/README.md {what}: there is no such file or folder" for what in ("names server/gone.cc", "links to gone.md")]:
            faults.append(f"of the paths that a README names it says: {dead_paths(root)}")
        table = "| folder | what | may include |\n|---|---|---|\n| `.` | | `a`, `b`, `c` |\n| `a` | | `c` |\n| `b` | | `c` |\n| `c` | | |\n\n"
        for drawn, wrong in [("daemon --> a & b\n  a & b --> c", []), ("daemon --> a & b\n  a --> c", ["the diagram has no way from b to c, which it includes"]),
                             ("daemon --> a\n  a --> b\n  a & b --> c", ["the diagram has a --> b, which is no include"])]:
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
    found += dead_paths(root) + wrong_arrows(root)
    for line in found:
        print(line)
    print(f"{files} files, {len(found)} violations")
    return 1 if found or files < 50 else 0


if __name__ == "__main__":
    sys.exit(main())
