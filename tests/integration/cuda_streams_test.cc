// SPDX-License-Identifier: Apache-2.0
//
// Streams and graph captures: memory waits for the work on the memory, and the client's calls beside a capture do not
// make the capture invalid.
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <optional>
#include <thread>
#include <vector>

#include "allocator/base/bytes.h"
#include "allocator/device/events.h"
#include "tests/cuda_substitute/driver.h"
#include "tests/cuda_substitute/substitute.h"
#include "tests/integration/cuda_fixture.h"

namespace vrambroker::testing_support {
namespace {

using cuda_substitute::UseGpu;

class CudaStreamTest : public CudaTest {
 protected:
  void SetUp() override {
    ASSERT_OK(StartDaemon());
    ASSERT_OK_AND_ASSIGN(Client client, Connect("client"));
    client_.emplace(std::move(client));
    ASSERT_EQ(UseGpu(kDaemonsGpu), CUDA_SUCCESS);
    ASSERT_EQ(cuStreamCreate(&stream_, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
  }
  void TearDown() override {
    client_.reset();
    EXPECT_EQ(cuStreamDestroy_v2(stream_), CUDA_SUCCESS);
    EXPECT_EQ(UseGpu(0), CUDA_SUCCESS);
    CudaTest::TearDown();
  }
  Stream stream() const { return reinterpret_cast<Stream>(stream_); }

  static void BeginCapture(CUstream stream, CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL) {
    EXPECT_EQ(cuStreamBeginCapture_v2(stream, mode), CUDA_SUCCESS);
  }
  // Returns CUDA_SUCCESS, or the error that made the capture invalid.
  static CUresult EndCapture(CUstream stream) {
    CUgraph graph = nullptr;
    const CUresult result = cuStreamEndCapture(stream, &graph);
    EXPECT_EQ(result == CUDA_SUCCESS, graph != nullptr);
    if (graph != nullptr) {
      EXPECT_EQ(cuGraphDestroy(graph), CUDA_SUCCESS);
    }
    return result;
  }
  static void OnAnotherThread(const std::function<void()>& body) { std::thread(body).join(); }
  // Returns the bytes that the daemon counts for the client.
  uint64_t Held() { return CtlJson({"sessions"})["sessions"][0]["devices"][0]["reserved_bytes"]; }

  std::optional<Client> client_;
  CUstream stream_ = nullptr;
};

constexpr CUstreamCaptureMode kCaptureModes[] = {CU_STREAM_CAPTURE_MODE_GLOBAL, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
                                                 CU_STREAM_CAPTURE_MODE_RELAXED};

TEST_F(CudaStreamTest, ABlockIsNotReusedBeforeItsStreamsAreDone) {
  ASSERT_OK_AND_ASSIGN(Buffer buffer, client_->Allocate(4_MiB));
  void* const memory = buffer.data();
  const auto launched = std::chrono::steady_clock::now();
  cuda_substitute::Launch(stream_, std::chrono::milliseconds(300));
  EXPECT_OK(buffer.RecordStream(stream()));
  EXPECT_OK(buffer.Reset());
  ASSERT_OK_AND_ASSIGN(Buffer other, client_->Allocate(4_MiB));
  if (std::chrono::steady_clock::now() - launched < std::chrono::milliseconds(300)) {
    EXPECT_NE(other.data(), memory);
  }
  ASSERT_EQ(cuStreamSynchronize(stream_), CUDA_SUCCESS);
  ASSERT_OK_AND_ASSIGN(Buffer again, client_->Allocate(4_MiB));
  EXPECT_EQ(again.data(), memory);
}

TEST_F(CudaStreamTest, APointerIsNotReusedBeforeTheStreamItIsFreedOnIsDone) {
  for (const bool records : {false, true}) {
    SCOPED_TRACE(records);
    ASSERT_OK_AND_ASSIGN(void* const memory, client_->Malloc(4_MiB));
    BeginCapture(stream_);  // memory waits for the end of the capture
    if (records) {
      EXPECT_OK(client_->RecordStream(memory, stream()));
    }
    EXPECT_OK(records ? client_->Free(memory) : client_->Free(memory, stream()));
    ASSERT_OK_AND_ASSIGN(void* const other, client_->Malloc(4_MiB));
    EXPECT_NE(other, memory);
    EXPECT_EQ(EndCapture(stream_), CUDA_SUCCESS);
    void* again = nullptr;
    EXPECT_TRUE(WaitFor([&] {
      EXPECT_OK(client_->Free(again));
      again = client_->Malloc(4_MiB).value_or(nullptr);
      return again == memory;
    }));
    EXPECT_OK(client_->Free(again));
    EXPECT_OK(client_->Free(other));
  }
}

TEST_F(CudaStreamTest, ASegmentGoesBackOnlyWhenNoWorkIsUnderWay) {
  ASSERT_OK_AND_ASSIGN(Buffer buffer, client_->Allocate(30_MiB, 0, stream()));
  const auto launched = std::chrono::steady_clock::now();
  cuda_substitute::Launch(stream_, std::chrono::milliseconds(300));
  ASSERT_EQ(UseGpu(0), CUDA_SUCCESS);  // the thread's GPU must not matter
  EXPECT_OK(buffer.Reset());
  EXPECT_OK(client_->EmptyCache());
  EXPECT_GE(std::chrono::steady_clock::now() - launched, std::chrono::milliseconds(300))
      << "the kernel may still have written";
  EXPECT_EQ(Reserved(*client_), 0u);
}

TEST_F(CudaStreamTest, NothingIsLostWhileAGraphIsCaptured) {
  ASSERT_OK_AND_ASSIGN(Buffer held, client_->Allocate(4_MiB));
  ASSERT_OK_AND_ASSIGN(Buffer recorded, client_->Allocate(30_MiB));
  ASSERT_OK_AND_ASSIGN(Buffer captured, client_->Allocate(30_MiB, 0, stream()));
  EXPECT_OK(captured.Reset());
  BeginCapture(stream_);
  EXPECT_OK(recorded.RecordStream(stream()));
  EXPECT_OK(recorded.Reset());
  EXPECT_OK(client_->Allocate(50_MiB)) << "growing goes on";
  EXPECT_OK(client_->EmptyCache());
  EXPECT_EQ(Held(), 80_MiB) << "only what the captured stream may use stays";
  EXPECT_EQ(EndCapture(stream_), CUDA_SUCCESS);
  EXPECT_TRUE(WaitFor([&] {
    (void)client_->EmptyCache();
    return Reserved(*client_) == 20_MiB;
  }));
  EXPECT_TRUE(WaitFor([&] { return Held() == 20_MiB; }));
}

// The thread that frees or trims does not know of the capture.
TEST_F(CudaStreamTest, ACaptureStaysValidWhileMemoryOfOtherStreamsGoesBack) {
  CUstream other = nullptr;
  ASSERT_EQ(cuStreamCreate(&other, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
  const auto other_number = reinterpret_cast<Stream>(other);
  for (const CUstreamCaptureMode mode : kCaptureModes) {
    SCOPED_TRACE(mode);
    ASSERT_OK_AND_ASSIGN(Buffer captured, client_->Allocate(30_MiB, 0, stream()));
    ASSERT_OK_AND_ASSIGN(Buffer trimmed, client_->Allocate(40_MiB, 0, other_number));
    ASSERT_OK_AND_ASSIGN(Buffer flushed, client_->Allocate(50_MiB, 0, other_number));
    ASSERT_OK_AND_ASSIGN(void* const whole, client_->LeaseSegment(60_MiB));
    EXPECT_OK(captured.Reset());
    BeginCapture(stream_, mode);
    OnAnotherThread([&] {
      EXPECT_OK(trimmed.Reset());
      EXPECT_EQ(Ctl({"trim", "client"}).exit_code, 0);
      EXPECT_EQ(Held(), 140_MiB) << "by the client's thread";
      EXPECT_OK(flushed.Reset());
      EXPECT_OK(client_->EmptyCache());
      EXPECT_EQ(Held(), 90_MiB);
      EXPECT_OK(client_->ReturnSegment(whole, other_number));
      EXPECT_EQ(Held(), 30_MiB) << "what the captured stream may use stays";
      EXPECT_OK(client_->Allocate(20_MiB, 0, other_number)) << "growing goes on";
    });
    EXPECT_OK(client_->EmptyCache());
    EXPECT_EQ(Held(), 30_MiB) << "on the thread of the capture, too";
    EXPECT_EQ(EndCapture(stream_), CUDA_SUCCESS);
    EXPECT_OK(client_->EmptyCache());
    EXPECT_TRUE(WaitFor([&] { return Held() == 0; })) << "then all of it goes back";
  }
  EXPECT_EQ(cuStreamDestroy_v2(other), CUDA_SUCCESS);
}

TEST_F(CudaStreamTest, ACaptureStaysValidWhileMemoryOfARemoteClientGoesBack) {
  client_.reset();
  placement_ = Placement::kRemote;
  ASSERT_OK_AND_ASSIGN(Client client, Connect("remote"));
  CUstream other = nullptr;
  ASSERT_EQ(cuStreamCreate(&other, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
  ASSERT_OK_AND_ASSIGN(Buffer captured, client.Allocate(30_MiB, 0, stream()));
  ASSERT_OK_AND_ASSIGN(Buffer free, client.Allocate(40_MiB, 0, reinterpret_cast<Stream>(other)));
  BeginCapture(stream_);
  const auto launched = std::chrono::steady_clock::now();
  cuda_substitute::Launch(other, std::chrono::milliseconds(200));
  EXPECT_OK(captured.Reset());
  EXPECT_OK(free.Reset());
  EXPECT_OK(client.EmptyCache());
  EXPECT_TRUE(WaitFor([&] { return Held() == 30_MiB; }));
  EXPECT_GE(std::chrono::steady_clock::now() - launched, std::chrono::milliseconds(200));
  EXPECT_EQ(EndCapture(stream_), CUDA_SUCCESS);
  // The kept segment goes back with the next segment that the daemon asks back.
  EXPECT_OK(client.Allocate(50_MiB));
  EXPECT_OK(client.EmptyCache());
  EXPECT_TRUE(WaitFor([&] { return Held() == 0; }));
  EXPECT_EQ(cuStreamDestroy_v2(other), CUDA_SUCCESS);
}

TEST_F(CudaStreamTest, MemoryOfARemoteClientGoesBackWhenItsLastStreamIsDone) {
  client_.reset();
  placement_ = Placement::kRemote;
  ASSERT_OK_AND_ASSIGN(Client client, Connect("remote"));
  ASSERT_OK_AND_ASSIGN(void* const memory, client.Malloc(4_MiB));
  cuda_substitute::Launch(stream_, std::chrono::milliseconds(300));
  EXPECT_OK(client.Free(memory, stream()));
  EXPECT_EQ(cuStreamQuery(stream_), CUDA_SUCCESS) << "another may have the memory now";
  ASSERT_OK_AND_ASSIGN(void* const own, client.Malloc(4_MiB, 0, stream()));
  BeginCapture(stream_);
  EXPECT_OK(client.Free(own, stream())) << "what comes after it on its own stream need not wait";
  ASSERT_OK_AND_ASSIGN(void* const kept, client.Malloc(4_MiB));
  const absl::Status captured = client.Free(kept, stream());
  EXPECT_TRUE(absl::IsFailedPrecondition(captured)) << captured;
  EXPECT_EQ(EndCapture(stream_), CUDA_SUCCESS);
  EXPECT_OK(client.Free(kept, stream())) << "nothing had happened";
  EXPECT_TRUE(absl::IsInvalidArgument(client.Free(kept, stream())));
}

TEST_F(CudaStreamTest, AWholeSegmentGoesBackWhenItsStreamIsDone) {
  ASSERT_OK_AND_ASSIGN(void* segment, client_->LeaseSegment(30_MiB));
  const uint64_t waits = cuda_substitute::Calls("cuCtxSynchronize");
  const auto launched = std::chrono::steady_clock::now();
  cuda_substitute::Launch(stream_, std::chrono::milliseconds(200));
  EXPECT_OK(client_->ReturnSegment(segment, stream()));
  EXPECT_EQ(Held(), 0u);
  EXPECT_GE(std::chrono::steady_clock::now() - launched, std::chrono::milliseconds(200));
  EXPECT_EQ(cuda_substitute::Calls("cuCtxSynchronize"), waits) << "other streams are nobody's business";
  // A segment stays leased while its stream is captured.
  ASSERT_OK_AND_ASSIGN(segment, client_->LeaseSegment(30_MiB));
  BeginCapture(stream_);
  EXPECT_OK(client_->ReturnSegment(segment, stream()));
  EXPECT_EQ(Held(), 30_MiB);
  EXPECT_EQ(EndCapture(stream_), CUDA_SUCCESS);
  EXPECT_TRUE(WaitFor([&] { return Held() == 0; })) << "without being asked again";
}

TEST_F(CudaStreamTest, AWholeSegmentOfNoStreamWaitsForTheDevice) {
  ASSERT_OK_AND_ASSIGN(void* segment, client_->LeaseSegment(30_MiB));
  const auto launched = std::chrono::steady_clock::now();
  cuda_substitute::Launch(stream_, std::chrono::milliseconds(200));
  EXPECT_OK(client_->ReturnSegment(segment));
  EXPECT_EQ(Held(), 0u);
  EXPECT_GE(std::chrono::steady_clock::now() - launched, std::chrono::milliseconds(200));
  // The header documents that the capture becomes invalid. All memory comes back.
  ASSERT_OK_AND_ASSIGN(segment, client_->LeaseSegment(30_MiB));
  BeginCapture(stream_, CU_STREAM_CAPTURE_MODE_RELAXED);
  EXPECT_OK(client_->ReturnSegment(segment));
  EXPECT_EQ(EndCapture(stream_), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  EXPECT_TRUE(WaitFor([&] { return Held() == 0; }));
}

// The default stream waits for a stream that is being captured: an event on it would make that capture invalid.
TEST_F(CudaStreamTest, TheDefaultStreamsMemoryStaysWhileABlockingStreamIsCaptured) {
  CUstream blocking = nullptr;
  ASSERT_EQ(cuStreamCreate(&blocking, CU_STREAM_DEFAULT), CUDA_SUCCESS);
  ASSERT_OK_AND_ASSIGN(Buffer buffer, client_->Allocate(30_MiB));
  BeginCapture(blocking);
  EXPECT_OK(buffer.Reset());
  OnAnotherThread([&] { EXPECT_OK(client_->EmptyCache()); });
  EXPECT_EQ(Held(), 30_MiB);
  EXPECT_EQ(EndCapture(blocking), CUDA_SUCCESS);
  EXPECT_TRUE(WaitFor([&] { return Held() == 0; }));
  EXPECT_EQ(cuStreamDestroy_v2(blocking), CUDA_SUCCESS);
}

TEST_F(CudaStreamTest, OneEventIsEnoughForAllSegmentsOfAStream) {
  std::vector<Buffer> buffers;
  for (int i = 0; i < 8; ++i) {
    ASSERT_OK_AND_ASSIGN(Buffer buffer, client_->Allocate(30_MiB, 0, i < 6 ? stream() : 0));
    buffers.push_back(std::move(buffer));
  }
  buffers.clear();
  const uint64_t events = cuda_substitute::Calls("cuEventRecord");
  EXPECT_OK(client_->EmptyCache());
  EXPECT_EQ(Held(), 0u);
  EXPECT_EQ(cuda_substitute::Calls("cuEventRecord") - events, 2u);
}

// The end of a client closes the client's cached segments.
TEST_F(CudaStreamTest, ACaptureStaysValidWhenAClientEnds) {
  CUstream other = nullptr;
  ASSERT_EQ(cuStreamCreate(&other, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
  for (const Stream number : {Stream{0}, reinterpret_cast<Stream>(other)}) {
    ASSERT_OK_AND_ASSIGN(Buffer buffer, client_->Allocate(30_MiB, 0, number));
    EXPECT_OK(buffer.Reset());
  }
  const auto launched = std::chrono::steady_clock::now();
  cuda_substitute::Launch(other, std::chrono::milliseconds(200));
  BeginCapture(stream_);
  OnAnotherThread([&] { client_.reset(); });
  EXPECT_GE(std::chrono::steady_clock::now() - launched, std::chrono::milliseconds(200));
  EXPECT_TRUE(WaitFor([&] { return CtlJson({"sessions"})["sessions"].empty(); }));
  EXPECT_EQ(EndCapture(stream_), CUDA_SUCCESS);
  EXPECT_EQ(cuStreamDestroy_v2(other), CUDA_SUCCESS);
}

// The handle of a destroyed stream tells nothing, but work that was queued on the stream goes on.
TEST_F(CudaStreamTest, AStreamThatIsDestroyedAfterACaptureKeepsNoMemory) {
  for (const bool flushes : {true, false}) {
    SCOPED_TRACE(flushes ? "a flush waits" : "the client's thread waits");
    CUstream brief = nullptr;
    ASSERT_EQ(cuStreamCreate(&brief, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    ASSERT_OK_AND_ASSIGN(Buffer buffer, client_->Allocate(30_MiB));
    EXPECT_OK(buffer.RecordStream(reinterpret_cast<Stream>(brief)));
    const auto launched = std::chrono::steady_clock::now();
    cuda_substitute::Launch(brief, std::chrono::milliseconds(300));
    BeginCapture(brief);
    EXPECT_OK(buffer.Reset());
    EXPECT_EQ(EndCapture(brief), CUDA_SUCCESS);
    ASSERT_EQ(cuStreamDestroy_v2(brief), CUDA_SUCCESS);
    const auto is_free = [&] { return client_->GetMemoryStats().value_or(MemoryStats()).active.all.current == 0; };
    EXPECT_OK(client_->Allocate(4_MiB)) << "which polls, too";
    if (flushes) {
      // Flushes again: a flush does not wait for a stream while the client's thread waits for the stream.
      EXPECT_TRUE(WaitFor([&] {
        EXPECT_OK(client_->EmptyCache());
        return is_free() && Reserved(*client_) == 0;
      }));
    } else {
      EXPECT_TRUE(WaitFor(is_free));
    }
    EXPECT_GE(std::chrono::steady_clock::now() - launched, std::chrono::milliseconds(300)) << "it was still written to";
  }
  EXPECT_OK(client_->status());
}

// A stream of another device used the memory.
TEST_F(CudaStreamTest, AStreamOfAnotherDeviceIsWaitedForToo) {
  ASSERT_EQ(UseGpu(0), CUDA_SUCCESS);
  CUstream other = nullptr;
  ASSERT_EQ(cuStreamCreate(&other, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
  ASSERT_OK_AND_ASSIGN(Buffer buffer, client_->Allocate(30_MiB));
  EXPECT_OK(buffer.RecordStream(reinterpret_cast<Stream>(other)));
  const auto launched = std::chrono::steady_clock::now();
  cuda_substitute::Launch(other, std::chrono::milliseconds(300));
  EXPECT_OK(buffer.Reset());
  EXPECT_OK(client_->EmptyCache());
  EXPECT_EQ(Reserved(*client_), 0u);
  EXPECT_GE(std::chrono::steady_clock::now() - launched, std::chrono::milliseconds(300));
  EXPECT_EQ(cuStreamDestroy_v2(other), CUDA_SUCCESS);
}

}  // namespace
}  // namespace vrambroker::testing_support
