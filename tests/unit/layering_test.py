#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks who includes whom. Usage: layering_test.py ROOT

Before it looks at ROOT it looks at files made to break each ban, so that a check that sees nothing cannot pass.
"""
import pathlib
import re
import sys
import tempfile

FOLDERS = ("allocator", "server", "client", "proto", "deploy")
SOURCES = {".h", ".cc", ".proto", ".in"}
INCLUDE = re.compile(r'^\s*(?:#\s*include\s*[<"]([^>"]+)[>"]|import\s+(?:public\s+)?"([^"]+)"\s*;)', re.M)

# (files, what they must not include, except in, why). Files and exceptions are matched against the path in ROOT.
BANS = [
    (r"allocator/", r"(server|client)/", None, "allocator/ is the bottom layer: it can be used and tested alone"),
    (r"allocator/", r"vrambroker/|.*\.pb\.h$|google/protobuf/|grpc|proto/", None,
     "allocator/ knows no wire format: messages are translated in server/ and client/"),
    (r"allocator/", r"prometheus/|spdlog/|boost/", None,
     "allocator/ neither logs nor exports metrics: it returns statuses and figures"),
    (r"server/", r"client/|vrambroker/client\.h$", None, "server/ and client/ meet only in proto/: either can change alone"),
    (r"client/", r"server/", None, "client/ and server/ meet only in proto/: either can change alone"),
    (r"client/", r"prometheus/|spdlog/|boost/", None, "the client library is linked into other people's programs"),
    (r"proto/", r"(server|client)/", None, "proto/ is a contract between server/ and client/: it knows neither"),
    (r"proto/vrambroker/", r"allocator/", None, "messages depend on messages alone"),
    (r"", r"(allocator/)?cuda|nvml", r"allocator/cuda_(device\.cc|(driver|status)\.(cc|h))$",
     "CUDA is behind the Device interface, in one place"),
]
# Declares the device without CUDA's own headers.
ALLOWED = {"allocator/device/cuda_device.h"}


def includes(path):
    for match in INCLUDE.finditer(path.read_text(encoding="utf-8")):
        yield match.group(1) or match.group(2)


def violations(root):
    """Lines "FILE includes X: reason", and the number of files looked at."""
    found, files = [], 0
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix not in SOURCES or not path.is_file():
                continue
            files += 1
            name = path.relative_to(root).as_posix()
            for include in includes(path):
                if include in ALLOWED:
                    continue
                for where, banned, exception, reason in BANS:
                    if not name.startswith(where) or not re.match(banned, include):
                        continue
                    if exception is None or not re.match(exception, name):
                        found.append(f"{name} includes {include}: {reason}")
    return found, files


def self_test():
    """Returns what is wrong with the check itself."""
    bad = {
        "allocator/a.cc": ('#include "server/core/broker.h"', BANS[0][3]),
        "allocator/b.h": ('  #  include "client/heap/mappings.h"', BANS[0][3]),
        "allocator/c.cc": ('#include "vrambroker/v1/types.pb.h"', BANS[1][3]),
        "allocator/d.cc": ("#include <grpcpp/grpcpp.h>", BANS[1][3]),
        "allocator/e.cc": ("#include <prometheus/registry.h>", BANS[2][3]),
        "server/a.cc": ('#include "client/session/connection.h"', BANS[3][3]),
        "server/b.cc": ('#include "vrambroker/client.h"', BANS[3][3]),
        "client/a.cc": ('#include "server/core/session.h"', BANS[4][3]),
        "client/vramctl/b.cc": ('#include "server/config/config.h"', BANS[4][3]),
        "client/c.cc": ("#include <spdlog/spdlog.h>", BANS[5][3]),
        "proto/a.cc": ('#include "server/core/session.h"', BANS[6][3]),
        "proto/vrambroker/v1/a.proto": ('import "allocator/block.proto";', BANS[7][3]),
        "server/cuda.cc": ("#include <cuda_runtime_api.h>", BANS[8][3]),
        "client/cuda.cc": ("#include <cuda.h>", BANS[8][3]),
        "allocator/device/host_device.cc": ("#include <cuda_runtime.h>", BANS[8][3]),
        "deploy/probe.cc": ("#include <nvml.h>", BANS[8][3]),
        "server/driver.cc": ('#include "allocator/device/cuda_driver.h"', BANS[8][3]),
    }
    good = {
        "allocator/device/cuda_device.cc": '#include "allocator/device/cuda_driver.h"\n#include <cuda.h>\n',
        "allocator/base/bytes.cc": '#include "allocator/base/bytes.h"\n// not #include "server/core/broker.h"\n',
        "server/good.cc": '#include "allocator/device/device.h"\n#include "vrambroker/v1/types.pb.h"\n',
        "client/good.cc": '#include "allocator/device/device.h"\n#include "client/vrambroker/client.h"\n',
        "proto/good.cc": '#include "allocator/heap/memory_stats.h"\n',
        "proto/vrambroker/v1/good.proto": 'import "google/protobuf/timestamp.proto";\n',
    }
    faults = []
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        for name, text in [*good.items(), *((name, text + "\n") for name, (text, _) in bad.items())]:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text, encoding="utf-8")
        found, files = violations(root)
        if files != len(good) + len(bad):
            faults.append(f"looked at {files} files instead of {len(good) + len(bad)}")
        for name, (text, reason) in bad.items():
            hits = [line for line in found if line.startswith(f"{name} includes ") and line.endswith(reason)]
            if len(hits) != 1:
                faults.append(f"{name} with {text!r} was reported {len(hits)} times")
        if len(found) != len(bad):
            faults.append("reported besides: " + "; ".join(line for line in found if line.split()[0] not in bad))
    return faults


def main():
    faults = self_test()
    for fault in faults:
        print(f"self-test: {fault}")
    if faults:
        return 2
    found, files = violations(pathlib.Path(sys.argv[1]))
    for line in found:
        print(line)
    print(f"{files} files, {len(found)} violations")
    return 1 if found or files < 50 else 0


if __name__ == "__main__":
    sys.exit(main())
