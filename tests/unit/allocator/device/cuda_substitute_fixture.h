// SPDX-License-Identifier: Apache-2.0
//
// A machine of the substitute of NVIDIA's driver, and processes on the machine.
#ifndef VRAMBROKER_TESTS_UNIT_ALLOCATOR_DEVICE_CUDA_SUBSTITUTE_FIXTURE_H_
#define VRAMBROKER_TESTS_UNIT_ALLOCATOR_DEVICE_CUDA_SUBSTITUTE_FIXTURE_H_

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <string>

#include "tests/cuda_substitute/driver.h"
#include "tests/cuda_substitute/substitute.h"

namespace vrambroker::cuda_substitute {

inline constexpr size_t kBytes = size_t{4} << 20;

inline constexpr uint64_t kAll = uint64_t{64} << 20;     // memory of a GPU
inline constexpr uint64_t kContext = uint64_t{2} << 20;  // memory of a context

inline constexpr int kNoGpu = -1;

// A new process that uses `gpu`, or no CUDA yet. The process ends with the result of `work`.
class Process {
 public:
  explicit Process(const std::function<int()>& work, int gpu = 0) : pid_(fork()) {
    if (pid_ == 0) _exit(gpu != kNoGpu && UseGpu(gpu) != CUDA_SUCCESS ? 99 : work());
  }
  pid_t pid() const { return pid_; }
  int Wait() const {
    int status = 0;
    waitpid(pid_, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }
  void Kill() const {
    kill(pid_, SIGKILL);
    (void)Wait();
  }

 private:
  const pid_t pid_;
};

class CudaSubstituteTest : public ::testing::Test {
 protected:
  void SetUp() override {
    machine_ = std::filesystem::temp_directory_path() / "vrambroker-machine-XXXXXX";
    ASSERT_NE(mkdtemp(machine_.data()), nullptr);
    MakeMachine(machine_, {.devices = 2, .device_bytes = kAll, .context_bytes = kContext});
    setenv(kMachineVariable, machine_.c_str(), 1);
    ASSERT_EQ(pipe(handles_), 0);
    ASSERT_EQ(pipe(orders_), 0);
  }
  void TearDown() override {
    unsetenv(kMachineVariable);
    std::filesystem::remove_all(machine_);
  }

  // Exports an allocation filled with 'x', and sends the handle to the other processes.
  CUdeviceptr Export() {
    CUdeviceptr memory = 0;
    CUipcMemHandle handle;
    const std::string content(kBytes, 'x');
    if (cuMemAlloc_v2(&memory, kBytes) != CUDA_SUCCESS || cuIpcGetMemHandle(&handle, memory) != CUDA_SUCCESS ||
        cuMemcpyHtoD_v2(memory, content.data(), kBytes) != CUDA_SUCCESS ||
        write(handles_[1], &handle, sizeof handle) != sizeof handle) {
      _exit(100);
    }
    return memory;
  }
  CUipcMemHandle Handle() {
    CUipcMemHandle handle;
    if (read(handles_[0], &handle, sizeof handle) != sizeof handle) std::abort();
    return handle;
  }
  void Go() { (void)!write(orders_[1], "x", 1); }
  void AwaitGo() {
    char order = 0;
    (void)!read(orders_[0], &order, 1);
  }
  static bool HoldsX(CUdeviceptr memory) {
    std::string content(kBytes, '?');
    return cuMemcpyDtoH_v2(content.data(), memory, kBytes) == CUDA_SUCCESS && content == std::string(kBytes, 'x');
  }

  std::string machine_;
  int handles_[2] = {-1, -1};
  int orders_[2] = {-1, -1};
};

}  // namespace vrambroker::cuda_substitute

#endif  // VRAMBROKER_TESTS_UNIT_ALLOCATOR_DEVICE_CUDA_SUBSTITUTE_FIXTURE_H_
