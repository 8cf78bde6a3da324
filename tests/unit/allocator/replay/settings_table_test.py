#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The table of settings in server/TUNING.md agrees with vramctl about PyTorch's releases.

  settings_table_test.py VRAMCTL SOURCE_DIR

VRAMBROKER_TORCH=RELEASE:FILE, for example 2.6:/path/to/libc10_cuda.so, adds a check against a real release. FILE is the
library that reads the settings, or the library's source.
"""
import json
import os
import pathlib
import pickle
import re
import subprocess
import sys
import tempfile

VALUES = {"max_split_size_mb": "21", "garbage_collection_threshold": "0.5", "roundup_power2_divisions": "4",
          "max_non_split_rounding_mb": "64", "large_segment_size_mb": "40", "per_process_memory_fraction": "0.5",
          "throw_on_cudamalloc_oom": "True"}
OLDEST_WITH_SETTINGS = (2, 3)  # earlier snapshots have no settings


def number(release):
    return tuple(map(int, release.split(".")))


def writer(vramctl, folder, settings):
    """Returns the release for which vramctl tunes the snapshot of a job with `settings`."""
    entries = [{"action": "alloc", "addr": 4096, "size": 512, "stream": 0}]
    blocks = [{"size": 512, "requested_size": 512, "state": "active_allocated"}, {"size": (2 << 20) - 512, "state": "inactive"}]
    segment = {"device": 0, "address": 4096, "total_size": 2 << 20, "stream": 0, "segment_type": "small", "blocks": blocks}
    file = folder / "snapshot.pickle"
    file.write_bytes(pickle.dumps({"segments": [segment], "device_traces": [entries],
                                   "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": settings}}, protocol=4))
    done = subprocess.run([vramctl, "tune", file, "--format=json"], capture_output=True, text=True, check=False)
    return json.loads(done.stdout)["for"] if done.returncode == 0 else done.stderr


def faults(vramctl, source, folder):
    text = (source / "server" / "TUNING.md").read_text(encoding="utf-8")
    rows = {name: number(release) for name, release in re.findall(r"^\| `(\w+)` \| (\d+\.\d+)", text, re.M)}
    if rows.keys() != VALUES.keys():
        yield f"the table has {sorted(rows)}, the test knows {sorted(VALUES)}"
        return
    tried = [(f"{name}:{value}", rows[name]) for name, value in VALUES.items()]
    lists = re.search(r"^\| `roundup_power2_divisions` \|[^|]*lists, and 0 in them: (\d+\.\d+)", text, re.M)
    tried.append(("roundup_power2_divisions:[1:0,>:4]", number(lists.group(1))))
    for settings, release in tried:
        major, minor = max(release, OLDEST_WITH_SETTINGS)
        if (found := writer(vramctl, folder, settings)) != f"torch-{major}.{minor}":
            yield f"{settings}: the table says {major}.{minor}, tune {found}"
    if given := os.environ.get("VRAMBROKER_TORCH"):
        release, path = given.split(":", 1)
        contents = pathlib.Path(path).read_bytes()
        for name, since in rows.items():
            if (name.encode() in contents) != (number(release) >= since):
                yield f"{name}: the table says since {since}, and {path} of {release} says otherwise"


def main():
    with tempfile.TemporaryDirectory() as folder:
        found = list(faults(sys.argv[1], pathlib.Path(sys.argv[2]), pathlib.Path(folder)))
    for fault in found:
        print(fault)
    print(f"{len(found)} faults")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
