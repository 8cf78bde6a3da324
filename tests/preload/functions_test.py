#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks client/preload/FUNCTIONS.md against CUDA's functions: functions_test.py SOURCE_DIR [TYPEDEFS_H]

TYPEDEFS_H is the CUDA Toolkit's cudaTypedefs.h, with a type for each version of each function. cuda.h is beside
TYPEDEFS_H. A call without TYPEDEFS_H compares the table with the hooks alone.
"""
import pathlib
import re
import sys

ANSWERS = ("hooked", "not needed", "not possible")
# Names of functions with a possible effect on the amount of memory.
SAYS_MEMORY = re.compile(
    r"Alloc|Free|Create|Destroy|Map|Pool|Import|Export|Open|Close|Release|Retain|Reset|Load|Register|Attach|Detach|Trim|Launch"
    r"|Instantiate|Upload|SetLimit|AddNode|AddMem|Advise|Prefetch|Link|Peer|Reserve|Clone|Restore")
NO_TYPE = {"cuGetExportTable"}  # functions without a type in the header


def without_version(function):
    return re.sub(r"(_v\d+)?(_ptsz|_ptds)?$", "", function)


def formats_without_size(source, header):
    """Returns faults of array formats without a size in formats.c."""
    sizes = (source / "client/preload/formats.c").read_text(encoding="utf-8")
    known = {number for first, last in re.findall(r"\{0x(\w\w), 0x(\w\w),", sizes) for number in range(int(first, 16), int(last, 16) + 1)}
    formats = re.findall(r"(CU_AD_FORMAT_\w+)\s*=\s*0x(\w+)", header.read_text(encoding="utf-8"))
    wrong = [f"{name}: formats.c has no size" for name, number in formats if int(number, 16) not in known | {0x7FFFFFFF}]
    return wrong if len(formats) > 30 else [f"{len(formats)} formats in {header}: too few"]


def main():
    source = pathlib.Path(sys.argv[1])
    text = (source / "client/preload/FUNCTIONS.md").read_text(encoding="utf-8")
    interface = (source / "client/preload/driver_api.h").read_text(encoding="utf-8")
    hooks = re.search(r"#define CUDA_HOOKS(.*?)#define CUDA_CALLS", interface, re.S).group(1)
    hooked = {without_version(name) for name in re.findall(r"X\((cu\w+),", hooks)}
    wrong = []
    rows = {}
    for functions, answer in re.findall(r"^\| (cu[^|]*?) \| ([^|]*?) \|", text, re.M):
        if answer not in ANSWERS:
            wrong.append(f"{answer}: is none of {', '.join(ANSWERS)}")
        for function in functions.split():
            if function in rows:
                wrong.append(f"{function}: has two rows")
            rows[function] = answer
    below = set(re.findall(r"`(cu\w+)`", text))
    said = {function for function, answer in rows.items() if answer == "hooked"} | below
    wrong += [f"{function}: is hooked, and the table does not say so" for function in sorted(hooked - said)]
    wrong += [f"{function}: is not hooked, and the table says so" for function in sorted(said - hooked)]
    count = 0
    if len(sys.argv) > 2:
        typedefs = pathlib.Path(sys.argv[2]).read_text(encoding="utf-8")
        checks = (source / "tests/preload/driver_api_check.cc").read_text(encoding="utf-8")
        types = set(re.findall(r"\*(PFN_cu\w+?_v\d+(?:_ptsz|_ptds)?)\)", typedefs))
        names = {kind: re.match(r"PFN_(cu\w+?)_v\d+", kind).group(1) for kind in types}
        count = len(set(names.values()))
        needed = {name for name in names.values() if SAYS_MEMORY.search(name)}
        wrong += [f"{name}: has no row" for name in sorted(needed - set(rows) - below)]
        wrong += [f"{name}: the toolkit knows no such function" for name in sorted(set(rows) - set(names.values()) - NO_TYPE)]
        wrong += [f"{kind}: is hooked by name, and driver_api_check.cc does not compare it"
                  for kind, name in sorted(names.items()) if name in hooked and kind not in checks]
        wrong += formats_without_size(source, pathlib.Path(sys.argv[2]).with_name("cuda.h"))
        if count < 400:
            wrong.append(f"{count} functions in {sys.argv[2]}: too few")
    print(f"{len(rows)} functions in the table, {count} in the header", *wrong, sep="\n")
    return 1 if wrong or len(rows) < 100 else 0


if __name__ == "__main__":
    sys.exit(main())
