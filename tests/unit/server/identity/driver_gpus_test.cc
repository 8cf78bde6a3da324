// SPDX-License-Identifier: Apache-2.0
#include "server/identity/driver_gpus.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "tests/support/util.h"

namespace vrambroker {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

const absl::Status kNoCuda = absl::UnavailableError("no usable GPU: cudaGetDeviceCount failed");

class DriverGpusTest : public ::testing::Test {
 protected:
  void AddGpu(const std::string& address) {
    std::filesystem::create_directories(proc_ + "/driver/nvidia/gpus/" + address);
  }
  void SetDevices(const std::string& text) { std::ofstream(proc_ + "/devices") << text; }
  DriverGpus Find() const { return FindDriverGpus(proc_); }

  const std::string proc_ = testing_support::MakeTempDir();
};

TEST_F(DriverGpusTest, WithoutADriverThereAreNone) {
  EXPECT_THAT(Find().addresses, IsEmpty());
  SetDevices("Character devices:\n  1 mem\n");
  std::filesystem::create_directories(proc_ + "/driver");
  EXPECT_THAT(Find().addresses, IsEmpty());
  EXPECT_EQ(AdviceFor(Find()), "");
  EXPECT_TRUE(CheckMayServeHost(Find(), kNoCuda).ok());
}

TEST_F(DriverGpusTest, ADriverWithoutGpusIsNone) {
  std::filesystem::create_directories(proc_ + "/driver/nvidia/gpus");
  SetDevices("195 nvidia\n");
  EXPECT_TRUE(CheckMayServeHost(Find(), kNoCuda).ok());
}

TEST_F(DriverGpusTest, GpusThatCudaCannotUseAreNotReplacedByTheHost) {
  AddGpu("0000:41:00.0");
  AddGpu("0000:01:00.0");
  SetDevices("Character devices:\n195 nvidia\n");
  EXPECT_THAT(Find().addresses, ElementsAre("0000:01:00.0", "0000:41:00.0"));
  EXPECT_FALSE(Find().has_uvm);
  const absl::Status status = CheckMayServeHost(Find(), kNoCuda);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("the GPUs 0000:01:00.0, 0000:41:00.0"), HasSubstr(std::string(kNoCuda.message())),
                    HasSubstr("modprobe nvidia_uvm"), HasSubstr("nvidia-modprobe -u -c0"),
                    HasSubstr("/etc/modules-load.d"), HasSubstr("--device=host")));
}

TEST_F(DriverGpusTest, AModuleThatIsThereIsNotMissing) {
  AddGpu("0000:01:00.0");
  SetDevices("Character devices:\n195 nvidia\n510 nvidia-uvm\n");
  EXPECT_TRUE(Find().has_uvm);
  EXPECT_THAT(std::string(CheckMayServeHost(Find(), kNoCuda).message()),
              AllOf(HasSubstr("the GPU 0000:01:00.0, but CUDA cannot use it"), Not(HasSubstr("modprobe"))));
}

}  // namespace
}  // namespace vrambroker
