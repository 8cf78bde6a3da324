# SPDX-License-Identifier: Apache-2.0
"""Checks libvrambroker-preload.so in another distribution's root folder.

run.sh starts this program, and mounts the daemon's sockets. A call without arguments runs all checks.
`in_root.py ROUTE` is a program unaware of vrambroker: the program reaches the driver by ROUTE, and prints the driver's
answers.
"""
import ctypes
import glob
import os
import platform
import subprocess
import sys

TEST = "/test"
PRELOAD = f"{TEST}/libvrambroker-preload.so"
OTHER = f"{TEST}/libdlsym_library.so"
JEMALLOC = next(iter(glob.glob("/usr/lib/*/libjemalloc.so.2")), None)
OLDEST = b"GLIBC_2.2.5" if platform.machine() == "x86_64" else b"GLIBC_2.17"
MIB = 1 << 20
# Errors of the driver.
OK, OUT_OF_MEMORY = 0, 2
# Answers at a limit of 16 MiB: to 10 MiB, 8 MiB and 6 MiB more; then the free memory and the total.
HELD = f"{OK} {OUT_OF_MEMORY} {OK} 0 {16 * MIB}"

# Functions, with the name and the version for cuGetProcAddress.
FUNCTIONS = {
    "cuInit": ("cuInit", 2000),
    "cuDevicePrimaryCtxRetain": ("cuDevicePrimaryCtxRetain", 7000),
    "cuCtxSetCurrent": ("cuCtxSetCurrent", 4000),
    "cuMemAlloc_v2": ("cuMemAlloc", 3020),
    "cuMemGetInfo_v2": ("cuMemGetInfo", 3020),
    "cuMemFree_v2": ("cuMemFree", 3020),
}
ROUTES = ["ctypes", "deepbind", "global", "dlmopen", "dlsym_oldest", "dlsym_2.34", "proc", "proc2", "linked"]
RTLD_NOW = os.RTLD_NOW


def by_name(library):
    return lambda name: getattr(library, name)


def c_library_function(name, result, *arguments):
    function = getattr(ctypes.CDLL(None), name)
    function.restype = result
    function.argtypes = arguments
    return function


def by_dlsym_of(version):
    """Returns a finder by a version of dlsym."""
    dlvsym = c_library_function("dlvsym", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p)
    address = dlvsym(None, b"dlsym", version)
    if not address:
        raise LookupError(f"no dlsym of {version.decode()}")
    dlsym = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(address)
    library = ctypes.CDLL("libcuda.so.1")
    return lambda name: ctypes.CFUNCTYPE(ctypes.c_int)(dlsym(library._handle, name.encode()))


def by_proc_address(is_second):
    library = ctypes.CDLL("libcuda.so.1")

    def find(name):
        base, version = FUNCTIONS[name]
        function = ctypes.c_void_p()
        status = ctypes.c_int()
        get = library.cuGetProcAddress_v2 if is_second else library.cuGetProcAddress
        more = [ctypes.byref(status)] if is_second else []
        error = get(base.encode(), ctypes.byref(function), version, ctypes.c_uint64(0), *more)
        if error != OK or not function:
            raise LookupError(f"{name}: error {error}, status {status.value}")
        return ctypes.CFUNCTYPE(ctypes.c_int)(function.value)

    return find


def finder(route):
    if route == "ctypes":
        return by_name(ctypes.CDLL("libcuda.so.1"))
    if route == "deepbind":
        return by_name(ctypes.CDLL("libcuda.so.1", mode=RTLD_NOW | os.RTLD_DEEPBIND))
    if route == "global":
        ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
        return by_name(ctypes.CDLL(None))
    if route == "dlmopen":
        dlmopen = c_library_function("dlmopen", ctypes.c_void_p, ctypes.c_long, ctypes.c_char_p, ctypes.c_int)
        handle = dlmopen(-1, b"libcuda.so.1", RTLD_NOW)
        if not handle:
            raise LookupError("dlmopen failed")
        return by_name(ctypes.CDLL("libcuda.so.1", handle=handle))
    if route == "dlsym_oldest":
        return by_dlsym_of(OLDEST)
    if route == "dlsym_2.34":
        return by_dlsym_of(b"GLIBC_2.34")
    if route in ("proc", "proc2"):
        return by_proc_address(route == "proc2")
    if route == "linked":
        library = ctypes.CDLL(f"{TEST}/liblinked_library.so")
        return lambda name: getattr(library, "linked_" + name)
    raise ValueError(route)


def run_route(route):
    find = finder(route)
    call = {name: find(name) for name in FUNCTIONS}
    context = ctypes.c_void_p()
    for error in (call["cuInit"](0), call["cuDevicePrimaryCtxRetain"](ctypes.byref(context), 0), call["cuCtxSetCurrent"](context)):
        if error != OK:
            raise RuntimeError(f"error {error}")
    addresses = []

    def allocate(bytes_wanted):
        address = ctypes.c_uint64()
        error = call["cuMemAlloc_v2"](ctypes.byref(address), ctypes.c_size_t(bytes_wanted))
        if error == OK:
            addresses.append(address)
        return error

    answers = [allocate(10 * MIB), allocate(8 * MIB), allocate(6 * MIB)]
    left, total = ctypes.c_size_t(), ctypes.c_size_t()
    call["cuMemGetInfo_v2"](ctypes.byref(left), ctypes.byref(total))
    answers += [left.value, total.value]
    for address in addresses:
        if call["cuMemFree_v2"](address) != OK:
            raise RuntimeError("cuMemFree failed")
    if allocate(16 * MIB) != OK:
        raise RuntimeError("what was freed is not there again")
    print(*answers)


failures = []


def run(what, arguments, preload, expected, **environment):
    environment = {"PATH": "/usr/bin:/bin", "LD_LIBRARY_PATH": TEST, "VRAMBROKER_LIMIT": "16MiB", **environment}
    if preload:
        environment["LD_PRELOAD"] = " ".join(preload)
    done = subprocess.run(arguments, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=120)
    out, err = done.stdout.decode().strip(), done.stderr.decode().strip()
    names = " + ".join(os.path.basename(each) for each in preload) or "nothing"
    # A program may print only the line of a refusal.
    said = [line for line in err.splitlines() if not (line.startswith("vrambroker: ") and "refused" in line)]
    if done.returncode != 0 or out != expected or said:
        failures.append(what)
        print(f"FAILED: {what}, with {names}: exit code {done.returncode}, '{out}' instead of '{expected}'\n{err}")


def main():
    libc_version = tuple(int(part) for part in os.confstr("CS_GNU_LIBC_VERSION").split()[1].split(".")[:2])
    print(f"glibc {libc_version[0]}.{libc_version[1]}, Python {platform.python_version()}")
    routes = [route for route in ROUTES if route != "dlsym_2.34" or libc_version >= (2, 34)]
    together = [[PRELOAD], [JEMALLOC, PRELOAD], [PRELOAD, JEMALLOC], [OTHER, PRELOAD], [PRELOAD, OTHER]]
    for preload in together:
        run("/bin/true", ["/bin/true"], preload, "")
        run("/bin/sh", ["/bin/sh", "-c", "echo it; ls / | grep -c '^test$'"], preload, "it\n1")
        run("python3 -c", ["python3", "-c", "import ctypes, threading; print(1 + 1)"], preload, "2")
        for route in routes:
            run(f"route {route}", [sys.executable, "-B", __file__, route], preload, HELD)
    # A run without the library shows that the driver refuses nothing.
    for route in routes:
        run(f"route {route}, without it", [sys.executable, "-B", __file__, route], [], f"{OK} {OK} {OK} {256 << 30} {256 << 30}")
    print(f"{len(together) * (3 + len(routes)) + len(routes)} programs, {len(failures)} failed")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main() if len(sys.argv) == 1 else run_route(sys.argv[1])
