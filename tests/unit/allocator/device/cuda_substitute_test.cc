// SPDX-License-Identifier: Apache-2.0
//
// The substitute of NVIDIA's driver keeps the rules in its README. A substitute without the rules would make the tests
// worthless.
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "allocator/device/cuda_device.h"
#include "allocator/device/device.h"
#include "allocator/device/events.h"
#include "tests/cuda_substitute/driver.h"
#include "tests/cuda_substitute/substitute.h"
#include "tests/support/util.h"
#include "tests/unit/allocator/device/cuda_substitute_fixture.h"

namespace vrambroker::cuda_substitute {
namespace {

TEST_F(CudaSubstituteTest, AHandleDoesNotOpenInTheProcessThatExportedIt) {
  const Process process([&] {
    Export();
    CUdeviceptr again = 0;
    return static_cast<int>(cuIpcOpenMemHandle_v2(&again, Handle(), CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
  });
  EXPECT_EQ(process.Wait(), CUDA_ERROR_INVALID_CONTEXT);
}

TEST_F(CudaSubstituteTest, OpeningTwiceGivesTheSameAddressAndNeedsTwoCloses) {
  const Process owner([&] {
    Export();
    AwaitGo();
    return 0;
  });
  const CUipcMemHandle handle = Handle();
  const Process user([&] {
    CUdeviceptr first = 0;
    CUdeviceptr second = 0;
    if (cuIpcOpenMemHandle_v2(&first, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS) != CUDA_SUCCESS) return 1;
    if (cuIpcOpenMemHandle_v2(&second, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS) != CUDA_SUCCESS) return 2;
    if (first != second || !HoldsX(first)) return 3;
    if (cuIpcCloseMemHandle(first) != CUDA_SUCCESS || !HoldsX(first)) return 4;
    if (cuIpcCloseMemHandle(first) != CUDA_SUCCESS || HoldsX(first)) return 5;
    return cuIpcCloseMemHandle(first) == CUDA_ERROR_INVALID_VALUE ? 0 : 6;
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
      const CUdeviceptr memory = Export();
      AwaitGo();
      const int freed = static_cast<int>(cuMemFree_v2(memory));
      (void)!write(free[1], "x", 1);
      AwaitGo();
      return freed;
    });
    const CUipcMemHandle handle = Handle();
    int opened[2];
    ASSERT_EQ(pipe(opened), 0);
    int closing[2];
    ASSERT_EQ(pipe(closing), 0);
    const Process user([&] {
      CUdeviceptr memory = 0;
      if (cuIpcOpenMemHandle_v2(&memory, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS) != CUDA_SUCCESS) return 1;
      char byte = 'x';
      (void)!write(opened[1], &byte, 1);
      (void)!read(closing[0], &byte, 1);
      if (!HoldsX(memory)) return 2;
      CUdeviceptr again = 0;
      if (cuIpcCloseMemHandle(memory) != CUDA_SUCCESS) return 3;
      if (cuIpcOpenMemHandle_v2(&again, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS) == CUDA_SUCCESS) return 4;
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
      ASSERT_EQ(read(free[0], &byte, 1), 1);  // the owner frees before the user opens the handle again
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
    CUdeviceptr memory = 0;
    char byte = 0;
    if (cuMemAlloc_v2(&memory, 1) != CUDA_SUCCESS) return 1;
    if (cuMemcpyDtoH_v2(&byte, memory, 1) != CUDA_SUCCESS || byte == 0) return 2;
    *reinterpret_cast<volatile char*>(memory) = 1;
    return 3;
  });
  const int result = process.Wait();
  if (testing_support::kSanitized) {  // a sanitizer exits at a signal
    EXPECT_NE(result, 2) << "cleared";
    EXPECT_NE(result, 3) << "touched";
  } else {
    EXPECT_EQ(result, -1) << "ended by a signal";
  }
  const Process sized([&] {
    CUdeviceptr memory = 0;
    if (cuMemAlloc_v2(&memory, 1) != CUDA_SUCCESS) return 1;
    return UsedBytes(machine_, 0) == (uint64_t{4} << 20) ? 0 : 2;  // a granule and the context
  });
  EXPECT_EQ(sized.Wait(), 0);
}

TEST_F(CudaSubstituteTest, AStreamsWorkTakesItsTimeAndEventsFollowIt) {
  const Process process([&] {
    using std::chrono::steady_clock;
    CUstream stream = nullptr;
    CUstream other = nullptr;
    CUevent event = nullptr;
    if (cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING) != CUDA_SUCCESS ||
        cuStreamCreate(&other, CU_STREAM_NON_BLOCKING) != CUDA_SUCCESS ||
        cuEventCreate(&event, CU_EVENT_DISABLE_TIMING) != CUDA_SUCCESS) {
      return 1;
    }
    const auto start = steady_clock::now();
    Launch(stream, std::chrono::milliseconds(200));
    if (cuEventRecord(event, stream) != CUDA_SUCCESS || cuStreamQuery(other) != CUDA_SUCCESS) return 2;
    const CUresult ready = cuEventQuery(event);
    if (ready != CUDA_ERROR_NOT_READY && steady_clock::now() - start < std::chrono::milliseconds(200)) return 3;
    if (cuEventSynchronize(event) != CUDA_SUCCESS) return 4;
    return steady_clock::now() - start >= std::chrono::milliseconds(200) ? 0 : 5;
  });
  EXPECT_EQ(process.Wait(), 0);
}

TEST_F(CudaSubstituteTest, WorkGoesOnWhenItsStreamIsDestroyed) {
  const Process process([] {
    constexpr std::chrono::milliseconds kWork(200);
    CUstream stream = nullptr;
    if (cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING) != CUDA_SUCCESS) return 1;
    const auto begin = std::chrono::steady_clock::now();
    Launch(stream, kWork);
    if (cuStreamDestroy_v2(stream) != CUDA_SUCCESS) return 2;
    if (cuStreamQuery(stream) != CUDA_ERROR_INVALID_HANDLE) return 3;
    if (cuCtxSynchronize() != CUDA_SUCCESS) return 4;
    return std::chrono::steady_clock::now() - begin >= kWork ? 0 : 5;
  });
  EXPECT_EQ(process.Wait(), 0);
}

TEST_F(CudaSubstituteTest, FaultsHitTheCallThatTheyName) {
  const Process process([&] {
    SetFaults("cuMemAlloc:2=2,cuMemGetInfo:3=700!");
    CUdeviceptr memory = 0;
    size_t bytes = 0;
    if (cuMemAlloc_v2(&memory, 1) != CUDA_SUCCESS || cuMemAlloc_v2(&memory, 1) != CUDA_ERROR_OUT_OF_MEMORY) return 1;
    if (cuMemAlloc_v2(&memory, 1) != CUDA_SUCCESS) return 2;
    for (int i = 0; i < 2; ++i) {
      if (cuMemGetInfo_v2(&bytes, &bytes) != CUDA_SUCCESS) return 3;
    }
    if (cuMemGetInfo_v2(&bytes, &bytes) != CUDA_ERROR_ILLEGAL_ADDRESS) return 4;
    return cuMemFree_v2(memory) == CUDA_ERROR_ILLEGAL_ADDRESS ? 0 : 5;
  });
  EXPECT_EQ(process.Wait(), 0);
}

// ---- Captures ----

constexpr CUstreamCaptureMode kCaptureModes[] = {CU_STREAM_CAPTURE_MODE_GLOBAL, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
                                                 CU_STREAM_CAPTURE_MODE_RELAXED};

// The result of a capture of `stream` while another thread runs `disturb` on the same GPU.
CUresult Capture(CUstream stream, CUstreamCaptureMode mode, const std::function<void()>& disturb) {
  CUgraph graph = nullptr;
  if (cuStreamBeginCapture_v2(stream, mode) != CUDA_SUCCESS) std::abort();
  std::thread([&disturb, gpu = ThreadsGpu()] {
    if (UseGpu(gpu) != CUDA_SUCCESS) std::abort();
    disturb();
  }).join();
  const CUresult result = cuStreamEndCapture(stream, &graph);
  if ((result == CUDA_SUCCESS) != (graph != nullptr)) std::abort();
  if (graph != nullptr) (void)cuGraphDestroy(graph);
  return result;
}

TEST_F(CudaSubstituteTest, WaitingForTheDeviceMakesItsCapturesInvalidInAnyMode) {
  const Process process([&] {
    CUstream stream = nullptr;
    if (cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING) != CUDA_SUCCESS) return 1;
    for (const CUstreamCaptureMode mode : kCaptureModes) {
      if (Capture(stream, mode, [] {}) != CUDA_SUCCESS) return 2;
      for (CUstreamCaptureMode own : kCaptureModes) {
        CUresult refused = CUDA_SUCCESS;
        const CUresult result = Capture(stream, mode, [&] {
          if (cuThreadExchangeStreamCaptureMode(&own) != CUDA_SUCCESS) std::abort();
          refused = cuCtxSynchronize();
        });
        if (refused != CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED) return 3;
        if (result != CUDA_ERROR_STREAM_CAPTURE_INVALIDATED) return 4;
      }
      // A wait for another device leaves the capture valid.
      if (Capture(stream, mode, [] {
            if (UseGpu(1) != CUDA_SUCCESS || cuCtxSynchronize() != CUDA_SUCCESS) std::abort();
          }) != CUDA_SUCCESS) {
        return 5;
      }
    }
    return cuCtxSynchronize() == CUDA_SUCCESS ? 0 : 6;
  });
  EXPECT_EQ(process.Wait(), 0);
}

TEST_F(CudaSubstituteTest, UnsafeCallsMakeCapturesInvalidWhereBothModesSaySo) {
  const Process process([&] {
    CUstream stream = nullptr;
    if (cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING) != CUDA_SUCCESS) return 1;
    for (const CUstreamCaptureMode mode : kCaptureModes) {
      for (CUstreamCaptureMode own : kCaptureModes) {
        const bool disturbs = mode == CU_STREAM_CAPTURE_MODE_GLOBAL && own == CU_STREAM_CAPTURE_MODE_GLOBAL;
        CUresult allocated = CUDA_SUCCESS;
        const CUresult result = Capture(stream, mode, [&] {
          CUdeviceptr memory = 0;
          if (cuThreadExchangeStreamCaptureMode(&own) != CUDA_SUCCESS) std::abort();
          allocated = cuMemAlloc_v2(&memory, 1);
          if (memory != 0 && cuMemFree_v2(memory) != CUDA_SUCCESS) std::abort();
        });
        if (allocated != (disturbs ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : CUDA_SUCCESS)) return 2;
        if (result != (disturbs ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_SUCCESS)) return 3;
      }
    }
    return 0;
  });
  EXPECT_EQ(process.Wait(), 0);
}

TEST_F(CudaSubstituteTest, TheDefaultStreamIncludesBlockingStreamsThatAreCaptured) {
  const Process process([&] {
    CUstream blocking = nullptr;
    if (cuStreamCreate(&blocking, CU_STREAM_DEFAULT) != CUDA_SUCCESS) return 1;
    CUevent event = nullptr;
    if (cuEventCreate(&event, CU_EVENT_DISABLE_TIMING) != CUDA_SUCCESS) return 2;
    CUresult said = CUDA_SUCCESS;
    // A query of the capture state is harmless.
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    if (Capture(blocking, CU_STREAM_CAPTURE_MODE_RELAXED, [&] { said = cuStreamIsCapturing(nullptr, &status); }) !=
        CUDA_SUCCESS) {
      return 3;
    }
    if (said != CUDA_ERROR_STREAM_CAPTURE_IMPLICIT) return 4;
    for (const std::function<CUresult()>& call : std::initializer_list<std::function<CUresult()>>{
             [&] { return cuEventRecord(event, nullptr); }, [&] { return cuStreamQuery(nullptr); },
             [&] { return cuStreamSynchronize(nullptr); }}) {
      if (Capture(blocking, CU_STREAM_CAPTURE_MODE_RELAXED, [&] { said = call(); }) !=
          CUDA_ERROR_STREAM_CAPTURE_INVALIDATED) {
        return 5;
      }
      if (said != CUDA_ERROR_STREAM_CAPTURE_IMPLICIT) return 6;
    }
    return 0;
  });
  EXPECT_EQ(process.Wait(), 0);
}

// ---- CudaDevice, in cases that need a machine whose contexts take memory ----

// The devices of the process. Exits without two devices.
std::vector<std::unique_ptr<Device>> TwoDevices() {
  absl::StatusOr<std::vector<std::unique_ptr<Device>>> devices = MakeCudaDevices();
  if (!devices.ok() || devices->size() != 2) _exit(101);
  return *std::move(devices);
}

TEST_F(CudaSubstituteTest, AThreadThatNeverChoseADeviceGetsNoContextOnTheFirst) {
  const Process process(
      [&] {
        const auto devices = TwoDevices();
        const auto segment = devices[1]->AllocateSegment(kBytes);
        if (!segment.ok()) return 2;
        if (UsedBytes(machine_, 0) != 0 || UsedBytes(machine_, 1) != kBytes + (uint64_t{2} << 20)) return 3;
        if (ThreadsGpu() != kNoGpu) return 4;
        if (UseGpu(0) != CUDA_SUCCESS || !devices[1]->FreeSegment(*segment).ok()) return 5;
        return ThreadsGpu() == 0 ? 0 : 6;
      },
      kNoGpu);
  EXPECT_EQ(process.Wait(), 0);
}

TEST_F(CudaSubstituteTest, EventsAreOfTheirDeviceOnAllThreads) {
  const Process process(
      [&] {
        const auto devices = TwoDevices();
        CUstream stream = nullptr;
        if (cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING) != CUDA_SUCCESS) return 3;
        absl::StatusOr<std::unique_ptr<Event>> event = devices[1]->RecordEvent(reinterpret_cast<Stream>(stream));
        if (!event.ok()) return 4;
        bool done = false;
        int before = -1;
        int after = -1;
        std::thread([&] {
          before = ThreadsGpu();
          done = (*event)->Wait().ok() && (*event)->Query().value_or(false) && devices[1]->WaitForAllStreams().ok();
          event->reset();
          after = ThreadsGpu();
        }).join();
        if (!done) return 5;
        if (before != kNoGpu || after != kNoGpu) return 6;
        if (ThreadsGpu() != 1) return 7;
        return UsedBytes(machine_, 0) == 0 ? 0 : 8;
      },
      1);
  EXPECT_EQ(process.Wait(), 0);
}

TEST_F(CudaSubstituteTest, AThreadsContextsStayAsTheyWereWhenCallsFail) {
  for (const int gpu : {kNoGpu, 0, 1}) {
    SCOPED_TRACE(gpu);
    const Process process(
        [&] {
          const auto devices = TwoDevices();
          for (const char* const fault :
               {"cuDevicePrimaryCtxRetain:1=2", "cuCtxPushCurrent:1=201", "cuMemAlloc:1=2", "cuMemAlloc:1=700!"}) {
            SetFaults(fault);
            bool has_failed = false;
            for (const auto& device : devices) has_failed = !device->AllocateSegment(kBytes).ok() || has_failed;
            if (!has_failed) return 3;
            if (ThreadsGpu() != gpu) return 1;
            SetFaults("");
            if (CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
                cuThreadExchangeStreamCaptureMode(&mode) != CUDA_SUCCESS || mode != CU_STREAM_CAPTURE_MODE_GLOBAL) {
              return 2;
            }
          }
          return 0;
        },
        gpu);
    EXPECT_EQ(process.Wait(), 0);
  }
}

TEST_F(CudaSubstituteTest, WithoutAContextOrADriverThatWasStartedCallsAreRefused) {
  const Process process(
      [] {
        CUdevice device = 0;
        CUdeviceptr memory = 0;
        CUcontext context = nullptr;
        if (cuDeviceGet(&device, 0) != CUDA_ERROR_NOT_INITIALIZED || cuInit(0) != CUDA_SUCCESS) return 1;
        if (cuDeviceGet(&device, 0) != CUDA_SUCCESS || cuDeviceGet(&device, 2) != CUDA_ERROR_INVALID_DEVICE) return 2;
        if (cuMemAlloc_v2(&memory, 1) != CUDA_ERROR_INVALID_CONTEXT) return 3;
        if (cuDevicePrimaryCtxRetain(&context, 1) != CUDA_SUCCESS || ThreadsGpu() != kNoGpu) return 4;
        if (cuCtxPushCurrent_v2(context) != CUDA_SUCCESS || ThreadsGpu() != 1) return 5;
        if (cuMemAlloc_v2(&memory, 1) != CUDA_SUCCESS || UsedBytes(std::getenv(kMachineVariable), 0) != 0) return 6;
        if (cuCtxPopCurrent_v2(&context) != CUDA_SUCCESS || ThreadsGpu() != kNoGpu) return 7;
        if (const Process child([] { return static_cast<int>(cuInit(0)); }, kNoGpu);
            child.Wait() != CUDA_ERROR_NOT_INITIALIZED) {
          return 8;
        }
        return cuCtxPopCurrent_v2(&context) == CUDA_ERROR_INVALID_CONTEXT ? 0 : 9;
      },
      kNoGpu);
  EXPECT_EQ(process.Wait(), 0);
}

// Resets the device like cudaDeviceReset(). The thread's stack of contexts keeps the destroyed context.
TEST_F(CudaSubstituteTest, AfterTheApplicationHasResetADeviceItIsUsedAnew) {
  const Process process([&] {
    const auto devices = TwoDevices();
    if (!devices[0]->AllocateSegment(kBytes).ok() || cuDevicePrimaryCtxReset_v2(0) != CUDA_SUCCESS) return 1;
    if (UsedBytes(machine_, 0) != 0) return 2;
    CUdeviceptr memory = 0;
    if (cuMemAlloc_v2(&memory, 1) != CUDA_ERROR_CONTEXT_IS_DESTROYED) return 3;
    const auto segment = devices[0]->AllocateSegment(kBytes);
    if (!segment.ok() || UsedBytes(machine_, 0) != kBytes + (uint64_t{2} << 20)) return 4;
    if (ThreadsGpu() != 0 || !devices[0]->FreeSegment(*segment).ok()) return 5;
    return devices[0]->FreeBytes().ok() ? 0 : 6;
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
    std::thread([&] {
      if (UseGpu(0) == CUDA_SUCCESS) Launch(CU_STREAM_PER_THREAD, kWork);
    }).join();
    const auto event = devices[0]->RecordEvent(reinterpret_cast<Stream>(CU_STREAM_PER_THREAD));
    if (!event.ok() || !(*event)->Wait().ok()) return 1;
    return std::chrono::steady_clock::now() - begin >= kWork ? 0 : 2;
  });
  EXPECT_EQ(process.Wait(), 0);
}

}  // namespace
}  // namespace vrambroker::cuda_substitute
