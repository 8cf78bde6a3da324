// SPDX-License-Identifier: Apache-2.0
//
// The substitute of the CUDA runtime keeps the rules that its README names: tests over it prove nothing otherwise.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <initializer_list>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "allocator/cuda_device.h"
#include "allocator/device.h"
#include "allocator/events.h"
#include "tests/cuda_substitute/substitute.h"
#include "tests/support/util.h"

namespace vrambroker::cuda_substitute {
namespace {

constexpr size_t kBytes = size_t{4} << 20;

// A process of its own with nothing of CUDA yet; ends with what `work` returns.
class Process {
 public:
  explicit Process(const std::function<int()>& work) : pid_(fork()) {
    if (pid_ == 0) _exit(work());
  }
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
    MakeMachine(machine_, {.devices = 2, .device_bytes = uint64_t{64} << 20, .context_bytes = uint64_t{2} << 20});
    setenv(kMachineVariable, machine_.c_str(), 1);
    ASSERT_EQ(pipe(handles_), 0);
    ASSERT_EQ(pipe(orders_), 0);
  }
  void TearDown() override { std::filesystem::remove_all(machine_); }

  // In a process that exports: an allocation filled with 'x', its handle told to the others.
  void* Export() {
    void* memory = nullptr;
    cudaIpcMemHandle_t handle;
    const std::string content(kBytes, 'x');
    if (cudaMalloc(&memory, kBytes) != cudaSuccess || cudaIpcGetMemHandle(&handle, memory) != cudaSuccess ||
        cudaMemcpy(memory, content.data(), kBytes, cudaMemcpyHostToDevice) != cudaSuccess ||
        write(handles_[1], &handle, sizeof handle) != sizeof handle) {
      _exit(100);
    }
    return memory;
  }
  cudaIpcMemHandle_t Handle() {
    cudaIpcMemHandle_t handle;
    if (read(handles_[0], &handle, sizeof handle) != sizeof handle) std::abort();
    return handle;
  }
  void Go() { (void)!write(orders_[1], "x", 1); }
  void AwaitGo() {
    char order = 0;
    (void)!read(orders_[0], &order, 1);
  }
  static bool HoldsX(void* memory) {
    std::string content(kBytes, '?');
    return cudaMemcpy(content.data(), memory, kBytes, cudaMemcpyDeviceToHost) == cudaSuccess &&
           content == std::string(kBytes, 'x');
  }

  std::string machine_;
  int handles_[2] = {-1, -1};
  int orders_[2] = {-1, -1};
};

TEST_F(CudaSubstituteTest, AHandleDoesNotOpenInTheProcessThatExportedIt) {
  const Process process([&] {
    Export();
    void* again = nullptr;
    return static_cast<int>(cudaIpcOpenMemHandle(&again, Handle(), cudaIpcMemLazyEnablePeerAccess));
  });
  EXPECT_EQ(process.Wait(), cudaErrorDeviceUninitialized);
}

TEST_F(CudaSubstituteTest, OpeningTwiceGivesTheSameAddressAndNeedsTwoCloses) {
  const Process owner([&] {
    Export();
    AwaitGo();
    return 0;
  });
  const cudaIpcMemHandle_t handle = Handle();
  const Process user([&] {
    void* first = nullptr;
    void* second = nullptr;
    if (cudaIpcOpenMemHandle(&first, handle, cudaIpcMemLazyEnablePeerAccess) != cudaSuccess) return 1;
    if (cudaIpcOpenMemHandle(&second, handle, cudaIpcMemLazyEnablePeerAccess) != cudaSuccess) return 2;
    if (first != second || !HoldsX(first)) return 3;
    if (cudaIpcCloseMemHandle(first) != cudaSuccess || !HoldsX(first)) return 4;
    if (cudaIpcCloseMemHandle(first) != cudaSuccess || HoldsX(first)) return 5;
    return cudaIpcCloseMemHandle(first) == cudaErrorInvalidValue ? 0 : 6;
  });
  EXPECT_EQ(user.Wait(), 0);
  Go();
  EXPECT_EQ(owner.Wait(), 0);
}

TEST_F(CudaSubstituteTest, MemoryLivesWhileItIsOpen) {
  for (const bool killed : {false, true}) {
    SCOPED_TRACE(killed ? "the owner is killed" : "the owner frees it");
    int free[2];
    ASSERT_EQ(pipe(free), 0);
    const Process owner([&] {
      void* memory = Export();
      AwaitGo();
      const int freed = static_cast<int>(cudaFree(memory));
      (void)!write(free[1], "x", 1);
      AwaitGo();
      return freed;
    });
    const cudaIpcMemHandle_t handle = Handle();
    int opened[2];
    ASSERT_EQ(pipe(opened), 0);
    int closing[2];
    ASSERT_EQ(pipe(closing), 0);
    const Process user([&] {
      void* memory = nullptr;
      if (cudaIpcOpenMemHandle(&memory, handle, cudaIpcMemLazyEnablePeerAccess) != cudaSuccess) return 1;
      char byte = 'x';
      (void)!write(opened[1], &byte, 1);
      (void)!read(closing[0], &byte, 1);
      if (!HoldsX(memory)) return 2;
      void* again = nullptr;
      if (cudaIpcCloseMemHandle(memory) != cudaSuccess) return 3;
      if (cudaIpcOpenMemHandle(&again, handle, cudaIpcMemLazyEnablePeerAccess) == cudaSuccess) return 4;
      return 0;
    });
    char byte = 0;
    ASSERT_EQ(read(opened[0], &byte, 1), 1);
    const uint64_t contexts = uint64_t{2} << 20;
    EXPECT_EQ(UsedBytes(machine_, 0), 2 * contexts + kBytes);
    if (killed) {
      owner.Kill();
      EXPECT_EQ(UsedBytes(machine_, 0), contexts + kBytes);
    } else {
      Go();
      ASSERT_EQ(read(free[0], &byte, 1), 1);  // before the user opens it again
    }
    (void)!write(closing[1], &byte, 1);
    EXPECT_EQ(user.Wait(), 0);
    if (!killed) {
      Go();
      EXPECT_EQ(owner.Wait(), 0);
    }
    EXPECT_EQ(UsedBytes(machine_, 0), 0u);
  }
}

TEST_F(CudaSubstituteTest, NewMemoryIsNotClearedAndTheCpuCannotTouchIt) {
  const Process process([&] {
    void* memory = nullptr;
    char byte = 0;
    if (cudaMalloc(&memory, 1) != cudaSuccess) return 1;
    if (cudaMemcpy(&byte, memory, 1, cudaMemcpyDeviceToHost) != cudaSuccess || byte == 0) return 2;
    *static_cast<volatile char*>(memory) = 1;
    return 3;
  });
  const int result = process.Wait();
  if (testing_support::kSanitized) {  // which exits when there is a signal
    EXPECT_NE(result, 2) << "cleared";
    EXPECT_NE(result, 3) << "touched";
  } else {
    EXPECT_EQ(result, -1) << "ended by a signal";
  }
  const Process sized([&] {
    void* memory = nullptr;
    if (cudaMalloc(&memory, 1) != cudaSuccess) return 1;
    return UsedBytes(machine_, 0) == (uint64_t{4} << 20) ? 0 : 2;  // a granule and the context
  });
  EXPECT_EQ(sized.Wait(), 0);
}

TEST_F(CudaSubstituteTest, AStreamsWorkTakesItsTimeAndEventsFollowIt) {
  const Process process([&] {
    using std::chrono::steady_clock;
    cudaStream_t stream = nullptr;
    cudaStream_t other = nullptr;
    cudaEvent_t event = nullptr;
    if (cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) != cudaSuccess ||
        cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking) != cudaSuccess ||
        cudaEventCreateWithFlags(&event, cudaEventDisableTiming) != cudaSuccess) {
      return 1;
    }
    const auto start = steady_clock::now();
    Launch(stream, std::chrono::milliseconds(200));
    if (cudaEventRecord(event, stream) != cudaSuccess || cudaStreamQuery(other) != cudaSuccess) return 2;
    const cudaError_t ready = cudaEventQuery(event);
    if (ready != cudaErrorNotReady && steady_clock::now() - start < std::chrono::milliseconds(200)) return 3;
    if (cudaEventSynchronize(event) != cudaSuccess) return 4;
    return steady_clock::now() - start >= std::chrono::milliseconds(200) ? 0 : 5;
  });
  EXPECT_EQ(process.Wait(), 0);
}

TEST_F(CudaSubstituteTest, WorkGoesOnWhenItsStreamIsDestroyed) {
  const Process process([] {
    constexpr std::chrono::milliseconds kWork(200);
    cudaStream_t stream = nullptr;
    if (cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) != cudaSuccess) return 1;
    const auto begin = std::chrono::steady_clock::now();
    Launch(stream, kWork);
    if (cudaStreamDestroy(stream) != cudaSuccess) return 2;
    if (cudaStreamQuery(stream) != cudaErrorInvalidResourceHandle) return 3;
    if (cudaDeviceSynchronize() != cudaSuccess) return 4;
    return std::chrono::steady_clock::now() - begin >= kWork ? 0 : 5;
  });
  EXPECT_EQ(process.Wait(), 0);
}

TEST_F(CudaSubstituteTest, FaultsHitTheCallThatTheyName) {
  const Process process([&] {
    SetFaults("cudaMalloc:2=2,cudaMemGetInfo:3=700!");
    void* memory = nullptr;
    size_t bytes = 0;
    if (cudaMalloc(&memory, 1) != cudaSuccess || cudaMalloc(&memory, 1) != cudaErrorMemoryAllocation) return 1;
    if (cudaGetLastError() != cudaErrorMemoryAllocation || cudaGetLastError() != cudaSuccess) return 2;
    if (cudaMalloc(&memory, 1) != cudaSuccess) return 3;
    for (int i = 0; i < 2; ++i) {
      if (cudaMemGetInfo(&bytes, &bytes) != cudaSuccess) return 4;
    }
    if (cudaMemGetInfo(&bytes, &bytes) != cudaErrorIllegalAddress) return 5;
    if (cudaFree(memory) != cudaErrorIllegalAddress) return 6;
    return cudaGetLastError() == cudaErrorIllegalAddress && cudaGetLastError() == cudaErrorIllegalAddress ? 0 : 7;
  });
  EXPECT_EQ(process.Wait(), 0);
}

// ---- Captures ----

constexpr cudaStreamCaptureMode kCaptureModes[] = {cudaStreamCaptureModeGlobal, cudaStreamCaptureModeThreadLocal,
                                                   cudaStreamCaptureModeRelaxed};

// What comes of a capture of `stream` during which another thread does `disturb`.
cudaError_t Capture(cudaStream_t stream, cudaStreamCaptureMode mode, const std::function<void()>& disturb) {
  cudaGraph_t graph = nullptr;
  if (cudaStreamBeginCapture(stream, mode) != cudaSuccess) std::abort();
  std::thread(disturb).join();
  const cudaError_t result = cudaStreamEndCapture(stream, &graph);
  if ((result == cudaSuccess) != (graph != nullptr)) std::abort();
  if (graph != nullptr) (void)cudaGraphDestroy(graph);
  return result;
}

TEST_F(CudaSubstituteTest, WaitingForTheDeviceMakesItsCapturesInvalidInAnyMode) {
  const Process process([&] {
    cudaStream_t stream = nullptr;
    if (cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) != cudaSuccess) return 1;
    for (const cudaStreamCaptureMode mode : kCaptureModes) {
      if (Capture(stream, mode, [] {}) != cudaSuccess) return 2;
      for (cudaStreamCaptureMode own : kCaptureModes) {
        cudaError_t refused = cudaSuccess;
        const cudaError_t result = Capture(stream, mode, [&] {
          if (cudaThreadExchangeStreamCaptureMode(&own) != cudaSuccess) std::abort();
          refused = cudaDeviceSynchronize();
        });
        if (refused != cudaErrorStreamCaptureUnsupported) return 3;
        if (result != cudaErrorStreamCaptureInvalidated) return 4;
      }
      // Of another device it is none of their business.
      if (Capture(stream, mode, [] {
            if (cudaSetDevice(1) != cudaSuccess || cudaDeviceSynchronize() != cudaSuccess) std::abort();
          }) != cudaSuccess) {
        return 5;
      }
    }
    return cudaDeviceSynchronize() == cudaSuccess ? 0 : 6;
  });
  EXPECT_EQ(process.Wait(), 0);
}

TEST_F(CudaSubstituteTest, UnsafeCallsMakeCapturesInvalidWhereBothModesSaySo) {
  const Process process([&] {
    cudaStream_t stream = nullptr;
    if (cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) != cudaSuccess) return 1;
    for (const cudaStreamCaptureMode mode : kCaptureModes) {
      for (cudaStreamCaptureMode own : kCaptureModes) {
        const bool disturbs = mode == cudaStreamCaptureModeGlobal && own == cudaStreamCaptureModeGlobal;
        cudaError_t allocated = cudaSuccess;
        const cudaError_t result = Capture(stream, mode, [&] {
          void* memory = nullptr;
          if (cudaThreadExchangeStreamCaptureMode(&own) != cudaSuccess) std::abort();
          allocated = cudaMalloc(&memory, 1);
          if (memory != nullptr && cudaFree(memory) != cudaSuccess) std::abort();
        });
        if (allocated != (disturbs ? cudaErrorStreamCaptureUnsupported : cudaSuccess)) return 2;
        if (result != (disturbs ? cudaErrorStreamCaptureInvalidated : cudaSuccess)) return 3;
      }
    }
    return 0;
  });
  EXPECT_EQ(process.Wait(), 0);
}

TEST_F(CudaSubstituteTest, TheDefaultStreamIncludesBlockingStreamsThatAreCaptured) {
  const Process process([&] {
    cudaStream_t blocking = nullptr;
    if (cudaStreamCreateWithFlags(&blocking, 0) != cudaSuccess) return 1;
    cudaEvent_t event = nullptr;
    if (cudaEventCreateWithFlags(&event, cudaEventDisableTiming) != cudaSuccess) return 2;
    cudaError_t said = cudaSuccess;
    // Only asking whether it is captured is harmless.
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    if (Capture(blocking, cudaStreamCaptureModeRelaxed, [&] { said = cudaStreamIsCapturing(nullptr, &status); }) !=
        cudaSuccess) {
      return 3;
    }
    if (said != cudaErrorStreamCaptureImplicit) return 4;
    for (const std::function<cudaError_t()>& call : std::initializer_list<std::function<cudaError_t()>>{
             [&] { return cudaEventRecord(event, nullptr); }, [&] { return cudaStreamQuery(nullptr); },
             [&] { return cudaStreamSynchronize(nullptr); }}) {
      if (Capture(blocking, cudaStreamCaptureModeRelaxed, [&] { said = call(); }) !=
          cudaErrorStreamCaptureInvalidated) {
        return 5;
      }
      if (said != cudaErrorStreamCaptureImplicit) return 6;
    }
    return 0;
  });
  EXPECT_EQ(process.Wait(), 0);
}

// ---- Not of the substitute: of CudaDevice, which only a machine whose contexts take memory can show ----

// The devices of this process, or an end of it.
std::vector<std::unique_ptr<Device>> TwoDevices() {
  absl::StatusOr<std::vector<std::unique_ptr<Device>>> devices = MakeCudaDevices();
  if (!devices.ok() || devices->size() != 2) _exit(101);
  return *std::move(devices);
}

int ThreadsDevice() {
  int current = -1;
  return cudaGetDevice(&current) == cudaSuccess ? current : -1;
}

TEST_F(CudaSubstituteTest, AThreadThatNeverChoseADeviceGetsNoContextOnTheFirst) {
  const Process process([&] {
    const auto devices = TwoDevices();
    const auto segment = devices[1]->AllocateSegment(kBytes);
    if (!segment.ok()) return 2;
    if (UsedBytes(machine_, 0) != 0 || UsedBytes(machine_, 1) != kBytes + (uint64_t{2} << 20)) return 3;
    if (ThreadsDevice() != 0) return 4;
    if (cudaSetDevice(0) != cudaSuccess || !devices[1]->FreeSegment(*segment).ok()) return 5;
    return ThreadsDevice() == 0 ? 0 : 6;
  });
  EXPECT_EQ(process.Wait(), 0);
}

TEST_F(CudaSubstituteTest, EventsAreOfTheirDeviceOnAllThreads) {
  const Process process([&] {
    const auto devices = TwoDevices();
    cudaStream_t stream = nullptr;
    if (cudaSetDevice(1) != cudaSuccess) return 2;
    if (cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) != cudaSuccess) return 3;
    absl::StatusOr<std::unique_ptr<Event>> event = devices[1]->RecordEvent(reinterpret_cast<Stream>(stream));
    if (!event.ok()) return 4;
    bool done = false;
    int before = -1;
    int after = -1;
    std::thread([&] {
      before = ThreadsDevice();
      done = (*event)->Wait().ok() && (*event)->Query().value_or(false) && devices[1]->WaitForAllStreams().ok();
      event->reset();
      after = ThreadsDevice();
    }).join();
    if (!done) return 5;
    if (before != 0 || after != 0) return 6;
    if (ThreadsDevice() != 1) return 7;
    return UsedBytes(machine_, 0) == 0 ? 0 : 8;
  });
  EXPECT_EQ(process.Wait(), 0);
}

TEST_F(CudaSubstituteTest, ADeviceIsChosenAndChosenBackWhereTheDriverTellsNothing) {
  const Process process([&] {
    SetFaults("cudaGetDriverEntryPointByVersion:1+=999");
    const auto devices = TwoDevices();
    if (cudaSetDevice(0) != cudaSuccess) return 1;
    const auto segment = devices[1]->AllocateSegment(kBytes);
    if (!segment.ok() || ThreadsDevice() != 0) return 2;
    if (!devices[1]->ExportSegment(*segment).ok() || !devices[1]->FreeSegment(*segment).ok()) return 3;
    return ThreadsDevice() == 0 ? 0 : 4;
  });
  EXPECT_EQ(process.Wait(), 0);
}

TEST_F(CudaSubstituteTest, AHandleIsOnlyOfAWholeAllocation) {
  const Process process([&] {
    const auto devices = TwoDevices();
    const auto segment = devices[0]->AllocateSegment(kBytes);
    if (!segment.ok() || !devices[0]->ExportSegment(*segment).ok()) return 1;
    DeviceSegment part = *segment;
    part.bytes /= 2;
    if (!absl::IsInternal(devices[0]->ExportSegment(part).status())) return 2;
    part.address += part.bytes;
    return absl::IsInternal(devices[0]->ExportSegment(part).status()) ? 0 : 3;
  });
  EXPECT_EQ(process.Wait(), 0);
}

TEST_F(CudaSubstituteTest, AThreadsOwnDefaultStreamIsWaitedForOnOtherThreads) {
  const Process process([&] {
    constexpr std::chrono::milliseconds kWork(200);
    const auto devices = TwoDevices();
    const auto begin = std::chrono::steady_clock::now();
    std::thread([&] { Launch(cudaStreamPerThread, kWork); }).join();
    const auto event = devices[0]->RecordEvent(reinterpret_cast<Stream>(cudaStreamPerThread));
    if (!event.ok() || !(*event)->Wait().ok()) return 1;
    return std::chrono::steady_clock::now() - begin >= kWork ? 0 : 2;
  });
  EXPECT_EQ(process.Wait(), 0);
}

}  // namespace
}  // namespace vrambroker::cuda_substitute
