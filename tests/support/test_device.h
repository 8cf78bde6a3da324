// SPDX-License-Identifier: Apache-2.0
//
// The device that tests with a daemon run on.
#ifndef VRAMBROKER_TESTS_SUPPORT_TEST_DEVICE_H_
#define VRAMBROKER_TESTS_SUPPORT_TEST_DEVICE_H_

#include <string>

namespace vrambroker::testing_support {

// Returns true unless VRAMBROKER_TEST_DEVICE is "host", the default. "cuda" names the GPUs of this computer.
// "substitute" names two GPUs of this process over tests/cuda_substitute.
bool OnCuda();
// Tells whether tests run on the substitute. This process and its children then load the substitute in place of
// NVIDIA's driver. Call the function before this process's first call of CUDA. `folder` receives the machine's folder:
// see tests/cuda_substitute.
bool OnSubstitute(std::string* folder = nullptr);
inline constexpr int kSubstituteDevices = 2;

}  // namespace vrambroker::testing_support

// Begins a test about memory of the host device: pages, files and descriptors.
#define HOST_DEVICE_ONLY()                                                      \
  if (vrambroker::testing_support::OnCuda()) {                                  \
    GTEST_SKIP() << "this is about the host device: a GPU's memory is no file"; \
  }                                                                             \
  static_assert(true, "for the semicolon")

#endif  // VRAMBROKER_TESTS_SUPPORT_TEST_DEVICE_H_
