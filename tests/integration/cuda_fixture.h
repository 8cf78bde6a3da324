// SPDX-License-Identifier: Apache-2.0
//
// A daemon on CUDA: the driver is tests/cuda_substitute, a substitute for NVIDIA's driver.
#ifndef VRAMBROKER_TESTS_INTEGRATION_CUDA_FIXTURE_H_
#define VRAMBROKER_TESTS_INTEGRATION_CUDA_FIXTURE_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <string>

#include "tests/cuda_substitute/driver.h"
#include "tests/cuda_substitute/substitute.h"
#include "tests/support/test_device.h"
#include "tests/support/vramctl_test.h"

namespace vrambroker::testing_support {

// Sets the variable before any code reads the variable.
inline const int kOnCuda = setenv("VRAMBROKER_TEST_DEVICE", "substitute", 1);

// The GPU of a test's daemon with one device; see DaemonProcess.
inline constexpr int kDaemonsGpu = kSubstituteDevices - 1;

inline std::string Machine() {
  std::string folder;
  EXPECT_TRUE(OnSubstitute(&folder));
  return folder;
}

inline uint64_t Used() {
  return cuda_substitute::UsedBytes(Machine(), kDaemonsGpu);
}

class CudaTest : public VramctlDaemonTest {
 protected:
  void TearDown() override {
    cuda_substitute::SetFaults("");
    VramctlDaemonTest::TearDown();
    daemon_.reset();
    EXPECT_EQ(Used(), 0u) << "all came back to the driver";
  }

  // Returns the reserved bytes of the client's own statistics; the largest number if there are none.
  static uint64_t Reserved(Client& client) {
    const absl::StatusOr<MemoryStats> stats = client.GetMemoryStats();
    return stats.ok() ? stats->reserved_bytes.all.current : ~uint64_t{0};
  }

  // Returns the HTTP code of the health page; 0 if there is no answer.
  int HealthCode() {
    const absl::StatusOr<HttpAnswer> page = daemon_->Get("/healthz");
    return page.ok() ? page->code : 0;
  }
  uint64_t Charged() { return CtlJson({"status"})["devices"][0]["reserved_bytes"]; }
};

}  // namespace vrambroker::testing_support

#endif  // VRAMBROKER_TESTS_INTEGRATION_CUDA_FIXTURE_H_
