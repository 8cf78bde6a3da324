// SPDX-License-Identifier: Apache-2.0
#include "tests/support/test_device.h"

#include <dlfcn.h>
#include <sys/stat.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <system_error>

#include "tests/cuda_substitute/substitute.h"
#include "tests/support/paths.h"
#include "tests/support/util.h"

namespace vrambroker::testing_support {
namespace {

const std::string& TestDevice() {
  static const std::string& device = *[] {
    const char* const variable = std::getenv("VRAMBROKER_TEST_DEVICE");
    auto* const value = new std::string(variable == nullptr ? "host" : variable);
    if (*value != "host" && *value != "cuda" && *value != "substitute") {
      std::fprintf(stderr, "VRAMBROKER_TEST_DEVICE is '%s', not host, cuda or substitute\n", value->c_str());
      std::abort();
    }
    return value;
  }();
  return device;
}

void CopyLibrary(const char* from, const std::string& to) {
  std::error_code error;
  std::filesystem::copy_file(from, to, error);
  if (error) {
    std::fprintf(stderr, "VRAMBROKER_TEST_DEVICE is substitute, but there is none: '%s': %s\n", from,
                 error.message().c_str());
    std::abort();
  }
  chmod(to.c_str(), 0755);
}

// Copies the substitute and the management library into a folder, so that programs of other users can read the files.
std::string CopyOfSubstitute() {
  const std::string folder = MakeTempDir();
  CopyLibrary(paths::kCudaSubstitute, folder + "/libcuda.so.1");
  CopyLibrary(paths::kNvmlSubstitute, folder + "/libnvidia-ml.so.1");
  return folder + "/libcuda.so.1";
}

// glibc knows a loaded library by the library's soname: later loads of libcuda.so.1 in this process get the copy. A
// program that links the substitute has the library already.
void LoadSubstitute() {
  const std::string copy = CopyOfSubstitute();
  if (dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD) == nullptr && dlopen(copy.c_str(), RTLD_NOW) == nullptr) {
    std::fprintf(stderr, "VRAMBROKER_TEST_DEVICE is substitute: %s\n", dlerror());
    std::abort();
  }
  const char* const before = std::getenv("LD_LIBRARY_PATH");
  const std::string folder = copy.substr(0, copy.rfind('/'));
  setenv("LD_LIBRARY_PATH", before == nullptr ? folder.c_str() : (folder + ":" + before).c_str(), 1);
}

}  // namespace

bool OnCuda() {
  return TestDevice() != "host";
}

bool OnSubstitute(std::string* folder) {
  if (TestDevice() != "substitute") return false;
  static const std::string& machine = *[] {
    auto* const made = new std::string(MakeTempDir());
    cuda_substitute::MakeMachine(*made, {.devices = kSubstituteDevices, .device_bytes = uint64_t{256} << 30});
    setenv(cuda_substitute::kMachineVariable, made->c_str(), 1);
    LoadSubstitute();
    return made;
  }();
  if (folder != nullptr) *folder = machine;
  return true;
}

}  // namespace vrambroker::testing_support
