// SPDX-License-Identifier: Apache-2.0
//
// Sensors of a GPU, over the substitute of NVIDIA's management library.
#include "allocator/device/gpu_sensors.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <optional>

#include "tests/cuda_substitute/devices.h"
#include "tests/unit/allocator/device/cuda_substitute_fixture.h"

namespace vrambroker::cuda_substitute {
namespace {

constexpr double kWatts = kSensorMilliwatts / 1000.0;

class GpuSensorsTest : public CudaSubstituteTest {
 protected:
  // Reads the sensors of the second GPU in a new process, because a loaded library stays loaded.
  static void Expect(const char* gpus, const GpuSensors& expected) {
    const Process process(
        [&] {
          if (gpus != nullptr) setenv(kNvmlGpusVariable, gpus, 1);
          const GpuSensors shown = ReadGpuSensors(FormatUuid(UuidOf(1)));
          return (shown.use_percent == expected.use_percent ? 0 : 1) +
                 (shown.temperature_celsius == expected.temperature_celsius ? 0 : 2) +
                 (shown.power_watts == expected.power_watts ? 0 : 4);
        },
        kNoGpu);
    EXPECT_EQ(process.Wait(), 0) << "1: use, 2: temperature, 4: power";
  }
};

TEST_F(GpuSensorsTest, AGpuShowsAllOfThem) {
  Expect(nullptr, {.use_percent = kSensorUsePercent, .temperature_celsius = kSensorCelsius, .power_watts = kWatts});
}

TEST_F(GpuSensorsTest, WhatIsNotSupportedIsNotKnown) {
  Expect("none", {});
}

TEST_F(GpuSensorsTest, AnInstanceHasTheTemperatureAndThePowerOfItsGpu) {
  Expect("mig", {.use_percent = std::nullopt, .temperature_celsius = kSensorCelsius, .power_watts = kWatts});
}

TEST_F(GpuSensorsTest, NothingIsKnownWithoutTheLibraryOrTheGpu) {
  const Process unknown(
      [] { return ReadGpuSensors("GPU-00000000-0000-0000-0000-000000000000").power_watts.has_value() ? 1 : 0; },
      kNoGpu);
  EXPECT_EQ(unknown.Wait(), 0);
  const Process broken(
      [] {
        setenv(kNvmlErrorVariable, "9", 1);
        return ReadGpuSensors(FormatUuid(UuidOf(1))).power_watts.has_value() ? 1 : 0;
      },
      kNoGpu);
  EXPECT_EQ(broken.Wait(), 0);
}

}  // namespace
}  // namespace vrambroker::cuda_substitute
