// SPDX-License-Identifier: Apache-2.0
#include "tests/support/test_device.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "tests/support/util.h"
#ifdef VRAMBROKER_CUDA_SUBSTITUTE
#include "tests/cuda_substitute/substitute.h"
#endif

namespace vrambroker::testing_support {

bool OnCuda() {
  static const bool on_cuda = [] {
    const char* const variable = std::getenv("VRAMBROKER_TEST_DEVICE");
    if (variable == nullptr || std::strcmp(variable, "host") == 0) return false;
    if (std::strcmp(variable, "cuda") != 0) {
      std::fprintf(stderr, "VRAMBROKER_TEST_DEVICE is '%s', not host or cuda\n", variable);
      std::abort();
    }
    return true;
  }();
  return on_cuda;
}

bool OnSubstitute(std::string* folder) {
#ifdef VRAMBROKER_CUDA_SUBSTITUTE
  if (!OnCuda()) return false;
  static const std::string& machine = *[] {
    auto* const made = new std::string(MakeTempDir());
    cuda_substitute::MakeMachine(*made, {.devices = kSubstituteDevices, .device_bytes = uint64_t{256} << 30});
    // Before the first CUDA call of this process; those that it starts inherit it.
    setenv(cuda_substitute::kMachineVariable, made->c_str(), 1);
    return made;
  }();
  if (folder != nullptr) *folder = machine;
  return true;
#else
  (void)folder;
  return false;
#endif
}

}  // namespace vrambroker::testing_support
