#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes an image of layers in the format of `docker save`. Usage: image.py FILE NAME COMMAND LAYER.tar..."""
import hashlib
import io
import json
import sys
import tarfile

file, name, command, *layers = sys.argv[1:]


def digest(path):
    with open(path, "rb") as layer:
        return hashlib.file_digest(layer, "sha256").hexdigest()


config = json.dumps({
    "architecture": "amd64",
    "os": "linux",
    "config": {"Cmd": [command], "Env": ["PATH=/opt/vrambroker/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"]},
    "rootfs": {"type": "layers", "diff_ids": ["sha256:" + digest(layer) for layer in layers]},
}).encode()
with tarfile.open(file, "w") as image:
    def add(path, text):
        entry = tarfile.TarInfo(path)
        entry.size = len(text)
        image.addfile(entry, io.BytesIO(text))

    add("config.json", config)
    for number, layer in enumerate(layers):
        image.add(layer, f"{number}.tar")
    add("manifest.json", json.dumps([
        {"Config": "config.json", "RepoTags": [name], "Layers": [f"{number}.tar" for number in range(len(layers))]}]).encode())
