#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks that old generators can read the messages and services. Usage: old_protoc_test.py ROOT

protoc before 3.15 refuses proto3's `optional`, and Debian 12's python3-grpc-tools has protoc 3.6. Where that is
installed, it also generates code, which then has to work.
"""
import pathlib
import re
import subprocess
import sys
import tempfile

# Debian's packages are for Debian's own interpreter.
PYTHONS = dict.fromkeys([sys.executable, "/usr/bin/python3"])
PROGRAM = """
from vrambroker.v1 import admin_pb2, admin_pb2_grpc, broker_pb2, broker_pb2_grpc, types_pb2
for message, field in ((types_pb2.MemoryStats(), "max_split_bytes"), (broker_pb2.Question.Trim(), "device")):
    assert not message.HasField(field), message
    setattr(message, field, 0)
    assert message.HasField(field), message
"""


def main():
    root = pathlib.Path(sys.argv[1]) / "proto"
    protos = sorted(path.relative_to(root).as_posix() for path in (root / "vrambroker" / "v1").glob("*.proto"))
    assert len(protos) >= 3, protos
    for proto in protos:
        for number, line in enumerate((root / proto).read_text(encoding="utf-8").splitlines(), 1):
            assert not re.match(r"\s*optional\s", line), f"{proto}:{number}: use a oneof with one field: {line.strip()}"
    for python in PYTHONS:
        if subprocess.run([python, "-c", "import grpc_tools"], stderr=subprocess.DEVNULL, check=False).returncode != 0:
            print(f"{python}: no grpc_tools")
            continue
        with tempfile.TemporaryDirectory() as out:
            subprocess.run([python, "-m", "grpc_tools.protoc", f"-I{root}", f"--python_out={out}",
                            f"--grpc_python_out={out}", *protos], check=True)
            subprocess.run([python, "-c", PROGRAM], cwd=out, check=True)
            print(f"{python}: grpc_tools reads {', '.join(protos)}")


if __name__ == "__main__":
    main()
