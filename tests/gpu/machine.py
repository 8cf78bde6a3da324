# SPDX-License-Identifier: Apache-2.0
"""Describes this machine. As a program: prints a JSON object about the machine's GPU, or {"error": ...}.

Runs in a process of its own: a process that has once initialised CUDA differs from a fresh process.
"""
import ctypes
import json
import os
import pathlib
import platform
import subprocess
import sys


def _ask_driver():
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return {"error": f"no driver: {error}"}

    def check(call, *arguments):
        code = getattr(cuda, call)(*arguments)
        if code != 0:
            text = ctypes.c_char_p()
            cuda.cuGetErrorName(code, ctypes.byref(text))
            raise RuntimeError(f"{call}: {(text.value or b'error').decode()} ({code})")

    try:
        check("cuInit", 0)
        count, version = ctypes.c_int(), ctypes.c_int()
        check("cuDeviceGetCount", ctypes.byref(count))
        check("cuDriverGetVersion", ctypes.byref(version))
        if count.value == 0:
            return {"error": "CUDA sees no device"}
        name, uuid, size = ctypes.create_string_buffer(128), (ctypes.c_ubyte * 16)(), ctypes.c_size_t()
        major, minor = ctypes.c_int(), ctypes.c_int()
        check("cuDeviceGetName", name, 128, 0)
        # The first function also names a part of a GPU; future drivers may lack the second function.
        check("cuDeviceGetUuid_v2" if hasattr(cuda, "cuDeviceGetUuid_v2") else "cuDeviceGetUuid", ctypes.byref(uuid), 0)
        check("cuDeviceTotalMem_v2", ctypes.byref(size), 0)
        check("cuDeviceGetAttribute", ctypes.byref(major), 75, 0)
        check("cuDeviceGetAttribute", ctypes.byref(minor), 76, 0)
    except (RuntimeError, AttributeError) as error:  # AttributeError: the driver has no such function
        return {"error": str(error)}
    digits = bytes(uuid).hex()
    gpu = {"name": name.value.decode(), "count": count.value, "total_bytes": size.value,
           "uuid": "GPU-" + "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:])),
           "compute_capability": f"{major.value}.{minor.value}",
           "cuda_of_driver": f"{version.value // 1000}.{version.value % 1000 // 10}"}
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        driver = ctypes.create_string_buffer(96)
        if nvml.nvmlInit_v2() == 0 and nvml.nvmlSystemGetDriverVersion(driver, 96) == 0:
            gpu["driver"] = driver.value.decode()
    except OSError:
        pass
    return gpu


def gpu():
    """Returns the first GPU, or {"error": why the machine has none}."""
    try:
        asked = subprocess.run([sys.executable, "-B", __file__], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                               timeout=120, check=False)
        return json.loads(asked.stdout.decode().strip().splitlines()[-1])
    except subprocess.TimeoutExpired:
        return {"error": "the driver did not answer within 120 s"}
    except (ValueError, IndexError):
        last = "".join(asked.stdout.decode(errors="replace").strip().splitlines()[-1:]) or "it said nothing"
        return {"error": f"asking the driver ended with exit code {asked.returncode}: {last}"}


def description():
    """Describes the machine without its GPU."""
    def first(path, key):
        try:
            for line in pathlib.Path(path).read_text(encoding="utf-8", errors="replace").splitlines():
                if line.startswith(key):
                    return line.split(":", 1)[-1].split("=", 1)[-1].strip().strip('"')
        except OSError:
            pass
        return "unknown"

    return {"kernel": f"{platform.system()} {platform.release()}", "processor": first("/proc/cpuinfo", "model name"),
            "processors": os.cpu_count(), "system": first("/etc/os-release", "PRETTY_NAME"), "uid": os.getuid(),
            "python": platform.python_version()}


if __name__ == "__main__":
    print(json.dumps(_ask_driver()))
