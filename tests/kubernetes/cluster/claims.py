#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Prints a container's claims, from `vramctl claim ls --format json` on standard input: for each claim, by its labels,
a line NAMESPACE/POD/CONTAINER NAME LIMIT-MIB RESERVED-MIB SESSIONS. Usage: claims.py [NAMESPACE/POD[/CONTAINER]]"""
import json
import sys

for claim in json.load(sys.stdin)["claims"]:
    owner = "/".join(claim["labels"].get(key, "?") for key in ("namespace", "pod", "container"))
    if len(sys.argv) > 1 and not (owner + "/").startswith(sys.argv[1] + "/"):
        continue
    limit = sum(device["limit_bytes"] for device in claim["devices"]) >> 20
    reserved = sum(device["reserved_bytes"] for device in claim["devices"]) >> 20
    print(owner, claim["name"], limit, reserved, claim["sessions"])
