// SPDX-License-Identifier: Apache-2.0
//
// Finds NVIDIA's driver on the machine that tests run on: the kernel module and the library.
#ifndef VRAMBROKER_TESTS_SUPPORT_NVIDIA_DRIVER_H_
#define VRAMBROKER_TESTS_SUPPORT_NVIDIA_DRIVER_H_

#include <cstdlib>
#include <filesystem>
#include <string>

namespace vrambroker::testing_support {

// Tells whether the kernel has the driver, by the files under `root`.
inline bool HasNvidiaDriver(const std::string& root = "") {
  return std::filesystem::exists(root + "/proc/driver/nvidia") || std::filesystem::exists(root + "/sys/module/nvidia");
}

// Returns the path of the real libcuda.so.1: $VRAMBROKER_REAL_LIBCUDA, or the file of Debian's package libcuda1. An
// empty path means that there is no such library.
inline std::string RealCudaLibrary() {
  if (const char* const named = std::getenv("VRAMBROKER_REAL_LIBCUDA"); named != nullptr) return named;
  for (const char* const machine : {"x86_64-linux-gnu", "aarch64-linux-gnu"}) {
    for (const char* const folder : {"/nvidia/current", ""}) {
      std::string file = std::string("/usr/lib/") + machine + folder + "/libcuda.so.1";
      if (std::filesystem::exists(file)) return file;
    }
  }
  return "";
}

}  // namespace vrambroker::testing_support

// Begins a test that asks the real library for functions and uses no GPU.
#define NEEDS_REAL_CUDA_LIBRARY(file)                                                                      \
  const std::string file = vrambroker::testing_support::RealCudaLibrary();                                 \
  if (file.empty()) {                                                                                      \
    GTEST_SKIP() << "NVIDIA's libcuda.so.1 is not here: install Debian's libcuda1, or name its file with " \
                    "VRAMBROKER_REAL_LIBCUDA";                                                             \
  }                                                                                                        \
  static_assert(true, "for the semicolon")

#endif  // VRAMBROKER_TESTS_SUPPORT_NVIDIA_DRIVER_H_
