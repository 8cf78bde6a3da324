#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Prints, as a script for bash, the commands of deploy/kubernetes/README.md for a real cluster, block by block.
Usage: guide.py README NUMBER   NUMBER: the number of the block, from 1, among the blocks with the reason below

A command must succeed, unless its comment says "exit code N"."""
import pathlib
import re
import shlex
import sys

BLOCK = re.compile(r"^```sh not run: the test with a real cluster does this\n(.*?)^```$", re.M | re.S)
# Commands that bring the image to the node; run.sh and machine.sh have done the same work without podman.
DONE = ("sudo podman build ", "sudo podman save ")

block = BLOCK.findall(pathlib.Path(sys.argv[1]).read_text())[int(sys.argv[2]) - 1]
for line in block.splitlines():
    command = re.sub(r"\s+#.*", "", line)
    if command.startswith(DONE):
        command = "# in another way: " + command
    wanted = re.search(r"#.*exit code (\d+)", line)
    print(f"printf '+ %s\\n' {shlex.quote(command)}")
    print(command)
    print(f"[ $? = {wanted.group(1) if wanted else 0} ] || exit 1")
