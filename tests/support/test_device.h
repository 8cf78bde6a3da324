// SPDX-License-Identifier: Apache-2.0
//
// The device that tests with a daemon run on.
#ifndef VRAMBROKER_TESTS_SUPPORT_TEST_DEVICE_H_
#define VRAMBROKER_TESTS_SUPPORT_TEST_DEVICE_H_

#include <string>

namespace vrambroker::testing_support {

// VRAMBROKER_TEST_DEVICE: "host", the default; "cuda", the GPUs of this computer; or "substitute", two GPUs of this
// process's own over tests/cuda_substitute. True for the latter two.
bool OnCuda();
// On GPUs of the substitute, which this process and those that it starts then load in place of NVIDIA's driver. To be
// called before this process's first call of CUDA. `folder` is the machine: see tests/cuda_substitute.
bool OnSubstitute(std::string* folder = nullptr);
inline constexpr int kSubstituteDevices = 2;

}  // namespace vrambroker::testing_support

// At the start of a test that is about memory of the host device: its pages, files and descriptors.
#define HOST_DEVICE_ONLY()                                                      \
  if (vrambroker::testing_support::OnCuda()) {                                  \
    GTEST_SKIP() << "this is about the host device: a GPU's memory is no file"; \
  }                                                                             \
  static_assert(true, "for the semicolon")

#endif  // VRAMBROKER_TESTS_SUPPORT_TEST_DEVICE_H_
