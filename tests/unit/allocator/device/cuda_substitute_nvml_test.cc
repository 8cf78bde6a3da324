// SPDX-License-Identifier: Apache-2.0
//
// The substitute of NVIDIA's management library reports the machine of the driver's substitute.
#include "tests/cuda_substitute/nvml.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "tests/cuda_substitute/driver.h"
#include "tests/cuda_substitute/substitute.h"
#include "tests/support/paths.h"
#include "tests/unit/allocator/device/cuda_substitute_fixture.h"

namespace vrambroker::cuda_substitute {
namespace {

namespace paths = testing_support::paths;

class CudaSubstituteNvmlTest : public CudaSubstituteTest {
 protected:
  void SetUp() override {
    CudaSubstituteTest::SetUp();
    ASSERT_EQ(nvmlInit_v2(), NVML_SUCCESS);
  }
  void TearDown() override {
    EXPECT_EQ(nvmlShutdown(), NVML_SUCCESS);
    CudaSubstituteTest::TearDown();
  }

  static nvmlDevice_t Gpu(unsigned int index) {
    nvmlDevice_t device = nullptr;
    EXPECT_EQ(nvmlDeviceGetHandleByIndex_v2(index, &device), NVML_SUCCESS);
    return device;
  }
  // Bytes by process.
  static std::map<pid_t, uint64_t> Processes(unsigned int gpu) {
    std::vector<nvmlProcessInfo_t> infos(16);
    auto count = static_cast<unsigned int>(infos.size());
    EXPECT_EQ(nvmlDeviceGetComputeRunningProcesses_v3(Gpu(gpu), &count, infos.data()), NVML_SUCCESS);
    std::map<pid_t, uint64_t> processes;
    for (unsigned int i = 0; i < count; ++i) processes[static_cast<pid_t>(infos[i].pid)] = infos[i].usedGpuMemory;
    return processes;
  }
};

TEST_F(CudaSubstituteNvmlTest, ItKnowsAllGpusWhateverAProgramMaySee) {
  setenv("CUDA_VISIBLE_DEVICES", "1", 1);
  unsigned int count = 0;
  EXPECT_EQ(nvmlDeviceGetCount_v2(&count), NVML_SUCCESS);
  EXPECT_EQ(count, 2u);
  char uuid[96] = {};
  ASSERT_EQ(nvmlDeviceGetUUID(Gpu(1), uuid, sizeof uuid), NVML_SUCCESS);
  EXPECT_EQ(nvmlDeviceGetUUID(Gpu(1), uuid, 5), NVML_ERROR_INSUFFICIENT_SIZE);
  nvmlDevice_t found = nullptr;
  EXPECT_EQ(nvmlDeviceGetHandleByUUID(uuid, &found), NVML_SUCCESS);
  EXPECT_EQ(found, Gpu(1));
  EXPECT_EQ(nvmlDeviceGetHandleByUUID("GPU-0", &found), NVML_ERROR_NOT_FOUND);
  EXPECT_EQ(nvmlDeviceGetHandleByIndex_v2(2, &found), NVML_ERROR_INVALID_ARGUMENT);
  const Process process([] {
    CUuuid seen = {};
    return cuDeviceGetUuid_v2(&seen, 0) == CUDA_SUCCESS && seen.bytes[15] == '1' ? 0 : 1;
  });
  EXPECT_EQ(process.Wait(), 0) << "the driver's first is NVML's second";
  unsetenv("CUDA_VISIBLE_DEVICES");
}

TEST_F(CudaSubstituteNvmlTest, ItSaysWhatIsUsedAndByWhom) {
  const auto use = [&](int gpu, uint64_t bytes) {
    CUdeviceptr memory = 0;
    if (UseGpu(gpu) != CUDA_SUCCESS || cuMemAlloc_v2(&memory, bytes) != CUDA_SUCCESS) return 1;
    (void)!write(handles_[1], "x", 1);
    pause();
    return 2;
  };
  const Process first([&] { return use(0, kBytes); }, kNoGpu);
  const Process second([&] { return use(0, 2 * kBytes); }, kNoGpu);
  const Process other([&] { return use(1, kBytes); }, kNoGpu);
  for (int i = 0; i < 3; ++i) {
    char byte = 0;
    ASSERT_EQ(read(handles_[0], &byte, 1), 1);
  }
  EXPECT_EQ(Processes(0),
            (std::map<pid_t, uint64_t>{{first.pid(), kContext + kBytes}, {second.pid(), kContext + 2 * kBytes}}));
  EXPECT_EQ(Processes(1), (std::map<pid_t, uint64_t>{{other.pid(), kContext + kBytes}}));
  unsigned int count = 0;
  EXPECT_EQ(nvmlDeviceGetComputeRunningProcesses_v3(Gpu(0), &count, nullptr), NVML_ERROR_INSUFFICIENT_SIZE);
  EXPECT_EQ(count, 2u);

  nvmlMemory_t memory = {};
  ASSERT_EQ(nvmlDeviceGetMemoryInfo(Gpu(0), &memory), NVML_SUCCESS);
  EXPECT_EQ(memory.total, kAll);
  EXPECT_EQ(memory.used, 2 * kContext + 3 * kBytes);
  EXPECT_EQ(memory.free, kAll - memory.used);
  nvmlMemory_v2_t more = {};
  EXPECT_EQ(nvmlDeviceGetMemoryInfo_v2(Gpu(0), &more), NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
  more.version = nvmlMemory_v2;
  EXPECT_EQ(nvmlDeviceGetMemoryInfo_v2(Gpu(0), &more), NVML_SUCCESS);
  EXPECT_EQ(more.used + more.reserved + more.free, more.total);

  for (const Process* const process : {&first, &second, &other}) process->Kill();
  EXPECT_TRUE(Processes(0).empty());
  ASSERT_EQ(nvmlDeviceGetMemoryInfo(Gpu(0), &memory), NVML_SUCCESS);
  EXPECT_EQ(memory.used, 0u);
}

TEST_F(CudaSubstituteNvmlTest, SharedMemoryIsItsOwnersUntilItHasGone) {
  const Process owner([&] {
    Export();
    pause();
    return 1;
  });
  const CUipcMemHandle handle = Handle();
  const Process user([&] {
    CUdeviceptr memory = 0;
    if (cuIpcOpenMemHandle_v2(&memory, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS) != CUDA_SUCCESS) return 1;
    (void)!write(handles_[1], "x", 1);
    pause();
    return 2;
  });
  char byte = 0;
  ASSERT_EQ(read(handles_[0], &byte, 1), 1);
  EXPECT_EQ(Processes(0), (std::map<pid_t, uint64_t>{{owner.pid(), kContext + kBytes}, {user.pid(), kContext}}));
  owner.Kill();
  EXPECT_EQ(Processes(0), (std::map<pid_t, uint64_t>{{user.pid(), kContext + kBytes}}));
  user.Kill();
}

TEST(CudaSubstituteNvmlAloneTest, ItNeedsAMachineAndANvmlInit) {
  unsigned int count = 0;
  EXPECT_EQ(nvmlDeviceGetCount_v2(&count), NVML_ERROR_UNINITIALIZED);
  EXPECT_EQ(nvmlInit_v2(), NVML_ERROR_DRIVER_NOT_LOADED);
  EXPECT_STREQ(nvmlErrorString(NVML_ERROR_DRIVER_NOT_LOADED), "Driver Not Loaded");
}

TEST_F(CudaSubstituteNvmlTest, AProgramWithoutSanitizersLoadsBoth) {
  const std::string folder = std::filesystem::path(paths::kPlainCudaSubstitute).parent_path();
  const std::string program =
      "import ctypes; cuda, nvml = ctypes.CDLL('libcuda.so.1'), ctypes.CDLL('libnvidia-ml.so.1'); count = "
      "ctypes.c_int(0); assert cuda.cuInit(0) == 0 and nvml.nvmlInit_v2() == 0; assert "
      "nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0; assert count.value == 2";
  const std::string command =
      "LD_LIBRARY_PATH=" + folder + " " + std::string(paths::kPython) + " -c \"" + program + "\"";
  EXPECT_EQ(std::system(command.c_str()), 0);  // NOLINT(cert-env33-c): a program of this build
}

}  // namespace
}  // namespace vrambroker::cuda_substitute
