#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Every driver function that vrambroker calls is in version 525 of NVIDIA's driver (CUDA 12.0).

  driver_functions_test.py CUDA_DRIVER_H TYPEDEFS_H

TYPEDEFS_H is the CUDA Toolkit's cudaTypedefs.h. The file has a type for each version of each function, named after the
first CUDA version: PFN_cuMemAlloc_v2000 and PFN_cuMemAlloc_v3020, which libcuda.so.1 exports as cuMemAlloc and
cuMemAlloc_v2.
"""
import pathlib
import re
import sys

PROMISED = 12000


def main():
    ours, typedefs = (pathlib.Path(path).read_text(encoding="utf-8") for path in sys.argv[1:])
    functions = re.findall(r"\bF\((cu\w+),", ours)
    since = {}
    for name, version in re.findall(r"\*PFN_(cu\w+?)_v(\d+)\)", typedefs):
        since.setdefault(name, set()).add(int(version))
    wrong = []
    for function in functions:
        name, which = re.match(r"(\w+?)(?:_v(\d))?$", function).groups()
        versions = sorted(since.get(name, ()))
        number = int(which or 1)
        if len(versions) < number:
            wrong.append(f"{function}: the toolkit knows no such function")
        elif versions[number - 1] > PROMISED:
            wrong.append(f"{function}: only since CUDA {versions[number - 1] / 1000}")
    print(f"{len(functions)} functions", *wrong, sep="\n")
    return 1 if wrong or len(functions) < 30 else 0


if __name__ == "__main__":
    sys.exit(main())
