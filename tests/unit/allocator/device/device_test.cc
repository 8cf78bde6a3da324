// SPDX-License-Identifier: Apache-2.0
//
// Promises of every Device (allocator/device/device.h), tested on each device of the machine: always on the host
// device, and on CUDA devices if present. A second process checks the view from outside: the test starts itself again
// as `device_test --peer ...`.
#include "allocator/device/device.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <iostream>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "allocator/base/bytes.h"
#include "allocator/device/cuda_device.h"
#include "allocator/device/host_device.h"
#include "tests/support/hex.h"
#include "tests/support/test_device.h"
#include "tests/unit/allocator/device/third_device.h"

namespace vrambroker {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr uint64_t kHostBytes = 64_MiB;

struct Maker {
  std::string name;
  std::function<std::unique_ptr<Device>()> make;
};

std::unique_ptr<Device> MakeCudaDevice(size_t ordinal) {
  absl::StatusOr<std::vector<std::unique_ptr<Device>>> devices = MakeCudaDevices();
  return devices.ok() && ordinal < devices->size() ? std::move((*devices)[ordinal]) : nullptr;
}

std::vector<Maker> Makers() {
  std::vector<Maker> makers = {{"host", [] { return MakeHostDevice(0, kHostBytes); }},
                               {"third", [] { return std::make_unique<ThirdDevice>(kHostBytes); }}};
  const absl::StatusOr<std::vector<std::unique_ptr<Device>>> cuda = MakeCudaDevices();
  if (testing_support::OnSubstitute() && !cuda.ok()) {
    std::cerr << "the substitute is no driver: " << cuda.status() << "\n";
    std::abort();
  }
  for (size_t i = 0; cuda.ok() && i < cuda->size(); ++i) {
    makers.push_back({absl::StrCat("cuda", i), [i] { return MakeCudaDevice(i); }});
  }
  return makers;
}

// ---- The other process ----

// Opens a segment, expects `expected` in every byte, fills the segment with `fill`, and closes the segment.
absl::Status BePeer(Device& device, const SegmentHandle& handle, uint64_t bytes, char expected, char fill) {
  absl::StatusOr<void*> address = device.OpenHandle(handle, bytes);
  if (!address.ok()) return address.status();
  std::string content(bytes, '\0');
  if (absl::Status status = device.CopyOut(content.data(), *address, bytes); !status.ok()) return status;
  if (content != std::string(bytes, expected)) return absl::DataLossError("the segment holds something else");
  content.assign(bytes, fill);
  if (absl::Status status = device.CopyIn(*address, content.data(), bytes); !status.ok()) return status;
  return device.CloseHandle(*address, bytes);
}

// device_test --peer KIND ORDINAL BYTES HANDLE EXPECTED FILL; HANDLE is an inherited descriptor or hex.
int PeerMain(char** args) {
  uint64_t ordinal = 0;
  uint64_t bytes = 0;
  if (!absl::SimpleAtoi(args[3], &ordinal) || !absl::SimpleAtoi(args[4], &bytes)) return 2;
  const std::string kind = args[2];
  std::unique_ptr<Device> device = kind == "cuda"    ? MakeCudaDevice(ordinal)
                                   : kind == "third" ? std::make_unique<ThirdDevice>(0)
                                                     : MakeHostDevice(0, 0);
  if (device == nullptr) return 2;
  SegmentHandle handle;
  if (device->properties().handles == HandleKind::kCudaIpc) {
    const std::string raw = testing_support::HexToBytes(args[5]);
    CudaIpcHandle ipc = {};
    std::memcpy(ipc.data(), raw.data(), std::min(raw.size(), ipc.size()));
    handle = ipc;
  } else {
    handle = UniqueFd(std::atoi(args[5]));
  }
  const absl::Status status = BePeer(*device, handle, bytes, args[6][0], args[7][0]);
  if (!status.ok()) std::cerr << "peer: " << status << "\n";
  return status.ok() ? 0 : 1;
}

// Runs the test program as the peer. Returns true if the peer finds the expected bytes.
bool RunPeer(const DeviceProperties& properties, const SegmentHandle& handle, uint64_t bytes, char expected,
             char fill) {
  const auto* fd = std::get_if<UniqueFd>(&handle);
  const std::string handle_text =
      fd != nullptr ? absl::StrCat(fd->get())
                    : absl::BytesToHexString(absl::string_view(std::get<CudaIpcHandle>(handle).data(), 64));
  const std::vector<std::string> args = {
      "device_test",       "--peer",    properties.kind,          absl::StrCat(properties.ordinal),
      absl::StrCat(bytes), handle_text, std::string(1, expected), std::string(1, fill)};
  std::vector<char*> argv;
  for (const std::string& arg : args) argv.push_back(const_cast<char*>(arg.c_str()));
  argv.push_back(nullptr);
  const pid_t pid = fork();
  if (pid == 0) {
    if (fd != nullptr) (void)fcntl(fd->get(), F_SETFD, 0);
    execv("/proc/self/exe", argv.data());
    _exit(127);
  }
  int status = 0;
  if (waitpid(pid, &status, 0) != pid) return false;
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

// ---- The contract ----

class DeviceTest : public ::testing::TestWithParam<Maker> {
 protected:
  void SetUp() override {
    device_ = GetParam().make();
    ASSERT_NE(device_, nullptr);
  }

  DeviceSegment Allocate(uint64_t bytes) {
    absl::StatusOr<DeviceSegment> segment = device_->AllocateSegment(bytes);
    EXPECT_TRUE(segment.ok()) << segment.status();
    return segment.ok() ? *segment : DeviceSegment();
  }
  SegmentHandle Export(const DeviceSegment& segment) {
    absl::StatusOr<SegmentHandle> handle = device_->ExportSegment(segment);
    EXPECT_TRUE(handle.ok()) << handle.status();
    return handle.ok() ? *std::move(handle) : SegmentHandle();
  }

  // The owner's own address of a segment. CUDA opens no handle in the exporting process.
  void* View(const DeviceSegment& segment) {
    if (segment.address != 0) return reinterpret_cast<void*>(segment.address);
    absl::StatusOr<void*> address = device_->OpenHandle(Export(segment), segment.bytes);
    EXPECT_TRUE(address.ok()) << address.status();
    return address.ok() ? *address : nullptr;
  }
  void CloseView(const DeviceSegment& segment, void* view) {
    if (segment.address == 0) {
      EXPECT_EQ(device_->CloseHandle(view, segment.bytes), absl::OkStatus());
    }
  }
  std::string Content(const DeviceSegment& segment) {
    void* view = View(segment);
    std::string content(segment.bytes, '?');
    EXPECT_EQ(device_->CopyOut(content.data(), view, segment.bytes), absl::OkStatus());
    CloseView(segment, view);
    return content;
  }
  void Fill(const DeviceSegment& segment, char byte) {
    void* view = View(segment);
    const std::string content(segment.bytes, byte);
    EXPECT_EQ(device_->CopyIn(view, content.data(), segment.bytes), absl::OkStatus());
    CloseView(segment, view);
  }

  std::unique_ptr<Device> device_;
};

TEST_P(DeviceTest, HasProperties) {
  const DeviceProperties& properties = device_->properties();
  EXPECT_EQ(GetParam().name.rfind(properties.kind, 0), 0u);
  EXPECT_NE(properties.uuid, "");
  EXPECT_NE(properties.name, "");
  EXPECT_GE(properties.total_bytes, kHostBytes);
  EXPECT_LE(device_->FreeBytes().value_or(properties.total_bytes + 1), properties.total_bytes);
}

TEST_P(DeviceTest, GivesSegmentsOfTheSizeAskedFor) {
  for (const uint64_t bytes : {2_MiB, 20_MiB, 34_MiB}) {
    const DeviceSegment segment = Allocate(bytes);
    EXPECT_EQ(segment.bytes, bytes);
    EXPECT_EQ(Content(segment).size(), bytes) << "readable to the last byte";
    EXPECT_EQ(device_->FreeSegment(segment), absl::OkStatus());
  }
}

TEST_P(DeviceTest, RefusesOddSizes) {
  for (const uint64_t bytes : {uint64_t{0}, uint64_t{1}, 2_MiB - 1, 2_MiB + 1, 3_MiB, 2_MiB + 512}) {
    EXPECT_TRUE(absl::IsInvalidArgument(device_->AllocateSegment(bytes).status())) << bytes;
  }
}

TEST_P(DeviceTest, RefusesWhatItHasNoRoomForAndGoesOn) {
  const uint64_t too_much = RoundUpTo(device_->properties().total_bytes, 2_MiB) + 2_MiB;
  const absl::Status status = device_->AllocateSegment(too_much).status();
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  const DeviceSegment segment = Allocate(2_MiB);
  EXPECT_EQ(device_->FreeSegment(segment), absl::OkStatus());
}

TEST_P(DeviceTest, RoomComesBackWithASegment) {
  // The loop allocates four times the device's memory, one segment at a time.
  const uint64_t bytes = device_->properties().total_bytes / 3 / 2_MiB * 2_MiB;
  for (int i = 0; i < 12; ++i) {
    const DeviceSegment segment = Allocate(bytes);
    ASSERT_EQ(segment.bytes, bytes) << i;
    ASSERT_EQ(device_->FreeSegment(segment), absl::OkStatus());
  }
}

TEST_P(DeviceTest, SegmentsAreApart) {
  const DeviceSegment a = Allocate(2_MiB);
  const DeviceSegment b = Allocate(2_MiB);
  Fill(a, 'a');
  Fill(b, 'b');
  EXPECT_TRUE(Content(a) == std::string(2_MiB, 'a'));
  EXPECT_TRUE(Content(b) == std::string(2_MiB, 'b'));
  EXPECT_EQ(device_->FreeSegment(a), absl::OkStatus());
  EXPECT_TRUE(Content(b) == std::string(2_MiB, 'b')) << "freeing one leaves the other";
  EXPECT_EQ(device_->FreeSegment(b), absl::OkStatus());
}

TEST_P(DeviceTest, AnotherProcessReadsAndWrites) {
  const DeviceSegment segment = Allocate(4_MiB);
  Fill(segment, 'p');
  ASSERT_TRUE(RunPeer(device_->properties(), Export(segment), segment.bytes, 'p', 'q'));
  EXPECT_TRUE(Content(segment) == std::string(4_MiB, 'q')) << "what the other process wrote";
  EXPECT_FALSE(RunPeer(device_->properties(), Export(segment), segment.bytes, 'p', 'r')) << "the peer does look";
  EXPECT_TRUE(RunPeer(device_->properties(), Export(segment), segment.bytes, 'q', 'r')) << "exported again";
  EXPECT_EQ(device_->FreeSegment(segment), absl::OkStatus());
}

TEST_P(DeviceTest, RefusesAHandleOfAnotherKind) {
  SegmentHandle handle;
  if (device_->properties().handles == HandleKind::kDescriptor) {
    handle = CudaIpcHandle{};
  } else {
    handle = UniqueFd(open("/dev/null", O_RDWR | O_CLOEXEC));
  }
  const absl::Status status = device_->OpenHandle(handle, 2_MiB).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
}

TEST_P(DeviceTest, RefusesAHandleOfNothing) {
  const SegmentHandle nothing =
      device_->properties().handles == HandleKind::kDescriptor ? SegmentHandle(UniqueFd()) : CudaIpcHandle{};
  EXPECT_FALSE(device_->OpenHandle(nothing, 2_MiB).ok());
}

TEST_P(DeviceTest, ZeroClearsExactlyTheRange) {
  const DeviceSegment segment = Allocate(2_MiB);
  for (const auto& [offset, bytes] : std::vector<std::pair<uint64_t, uint64_t>>{
           {0, 512}, {512, 1024}, {4096, 8192}, {5000, 10000}, {2_MiB - 512, 512}, {1_MiB, 0}, {2_MiB, 0}}) {
    SCOPED_TRACE(absl::StrCat(offset, "+", bytes));
    Fill(segment, 'x');
    EXPECT_EQ(device_->Zero(segment, offset, bytes), absl::OkStatus());
    std::string expected(2_MiB, 'x');
    expected.replace(offset, bytes, bytes, '\0');
    EXPECT_TRUE(Content(segment) == expected);
  }
  EXPECT_EQ(device_->Zero(segment, 0, 2_MiB), absl::OkStatus());
  EXPECT_TRUE(Content(segment) == std::string(2_MiB, '\0'));
  EXPECT_EQ(device_->FreeSegment(segment), absl::OkStatus());
}

TEST_P(DeviceTest, ZeroStaysWithinTheSegment) {
  const DeviceSegment segment = Allocate(2_MiB);
  Fill(segment, 'x');
  constexpr uint64_t kMax = std::numeric_limits<uint64_t>::max();
  for (const auto& [offset, bytes] : std::vector<std::pair<uint64_t, uint64_t>>{
           {0, 2_MiB + 1}, {1, 2_MiB}, {2_MiB, 1}, {2_MiB + 1, 0}, {512, kMax}, {kMax, 1}, {kMax, kMax}}) {
    EXPECT_TRUE(absl::IsOutOfRange(device_->Zero(segment, offset, bytes))) << offset << "+" << bytes;
  }
  EXPECT_TRUE(Content(segment) == std::string(2_MiB, 'x')) << "a refused call changes nothing";
  EXPECT_EQ(device_->FreeSegment(segment), absl::OkStatus());
}

TEST_P(DeviceTest, NamesHoldersOrSaysThatItCannot) {
  const DeviceSegment segment = Allocate(2_MiB);
  const absl::StatusOr<SegmentHolders> holders = device_->FindHolders({segment});
  if (device_->properties().tells_holders) {
    ASSERT_TRUE(holders.ok()) << holders.status();
    EXPECT_THAT(holders->holders, IsEmpty()) << "this process does not count";
  } else {
    EXPECT_TRUE(absl::IsUnimplemented(holders.status())) << holders.status();
  }
  EXPECT_EQ(device_->FreeSegment(segment), absl::OkStatus());
}

TEST_P(DeviceTest, EventsComplete) {
  absl::StatusOr<std::unique_ptr<Event>> event = device_->RecordEvent(0);
  ASSERT_TRUE(event.ok()) << event.status();
  EXPECT_EQ((*event)->Wait(), absl::OkStatus());
  EXPECT_TRUE((*event)->Query().value_or(false));
  EXPECT_TRUE((*event)->Query().value_or(false)) << "and stay so";
  ASSERT_TRUE(device_->RecordEvent(0).ok()) << "destroyed unasked";
}

TEST_P(DeviceTest, WorksFromEveryThread) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([this, t] {
      for (int i = 0; i < 20; ++i) {
        const DeviceSegment segment = Allocate(2_MiB);
        const char byte = static_cast<char>('a' + t);
        Fill(segment, byte);
        EXPECT_TRUE(Content(segment) == std::string(2_MiB, byte));
        EXPECT_EQ(device_->FreeSegment(segment), absl::OkStatus());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

INSTANTIATE_TEST_SUITE_P(Devices, DeviceTest, ::testing::ValuesIn(Makers()),
                         [](const auto& param) { return param.param.name; });

// ---- The host device in particular ----

class HostDeviceTest : public ::testing::Test {
 protected:
  std::unique_ptr<Device> device_ = MakeHostDevice(3, 8_MiB);
};

TEST_F(HostDeviceTest, NamesItself) {
  EXPECT_EQ(device_->properties().kind, "host");
  EXPECT_EQ(device_->properties().ordinal, 3);
  EXPECT_EQ(device_->properties().uuid, "HOST-3");
  EXPECT_EQ(device_->properties().total_bytes, 8_MiB);
}

TEST_F(HostDeviceTest, CapacityIsExact) {
  EXPECT_EQ(device_->FreeBytes().value(), 8_MiB);
  EXPECT_TRUE(absl::IsResourceExhausted(device_->AllocateSegment(10_MiB).status()));
  EXPECT_EQ(device_->FreeBytes().value(), 8_MiB) << "a refusal takes nothing";
  const DeviceSegment a = device_->AllocateSegment(6_MiB).value();
  const DeviceSegment b = device_->AllocateSegment(2_MiB).value();
  EXPECT_EQ(device_->FreeBytes().value(), 0u);
  EXPECT_TRUE(absl::IsResourceExhausted(device_->AllocateSegment(2_MiB).status()));
  EXPECT_EQ(device_->FreeSegment(b), absl::OkStatus());
  EXPECT_EQ(device_->FreeBytes().value(), 2_MiB);
  EXPECT_EQ(device_->FreeSegment(device_->AllocateSegment(2_MiB).value()), absl::OkStatus());
  EXPECT_EQ(device_->FreeSegment(a), absl::OkStatus());
  EXPECT_EQ(device_->FreeBytes().value(), 8_MiB);
}

TEST_F(HostDeviceTest, NewSegmentsAreZero) {
  for (int i = 0; i < 3; ++i) {
    const DeviceSegment segment = device_->AllocateSegment(8_MiB).value();
    const SegmentHandle handle = device_->ExportSegment(segment).value();
    void* address = device_->OpenHandle(handle, 8_MiB).value();
    std::string content(8_MiB, '?');
    EXPECT_EQ(device_->CopyOut(content.data(), address, 8_MiB), absl::OkStatus());
    EXPECT_TRUE(content == std::string(8_MiB, '\0'));
    std::memset(address, 'x', 8_MiB);
    EXPECT_EQ(device_->CloseHandle(address, 8_MiB), absl::OkStatus());
    EXPECT_EQ(device_->FreeSegment(segment), absl::OkStatus());
  }
}

TEST_F(HostDeviceTest, TwoMappingsShowOneSegment) {
  const DeviceSegment segment = device_->AllocateSegment(2_MiB).value();
  const SegmentHandle first = device_->ExportSegment(segment).value();
  const SegmentHandle second = device_->ExportSegment(segment).value();
  EXPECT_NE(std::get<UniqueFd>(first).get(), std::get<UniqueFd>(second).get());
  auto* a = static_cast<char*>(device_->OpenHandle(first, 2_MiB).value());
  // A client process, too, opens handles with a new Device.
  const std::unique_ptr<Device> opener = MakeHostDevice(0, 0);
  auto* b = static_cast<char*>(opener->OpenHandle(second, 2_MiB).value());
  ASSERT_NE(a, b);
  std::strcpy(a + 100, "written here");
  EXPECT_STREQ(b + 100, "written here");
  b[2_MiB - 1] = 'z';
  EXPECT_EQ(a[2_MiB - 1], 'z');
  EXPECT_EQ(device_->CloseHandle(a, 2_MiB), absl::OkStatus());
  EXPECT_EQ(device_->FreeSegment(segment), absl::OkStatus());
  EXPECT_EQ(b[100], 'w') << "an open mapping outlives the segment";
  EXPECT_EQ(opener->CloseHandle(b, 2_MiB), absl::OkStatus());
}

TEST_F(HostDeviceTest, NobodyCanResizeASegment) {
  const DeviceSegment segment = device_->AllocateSegment(4_MiB).value();
  const SegmentHandle handle = device_->ExportSegment(segment).value();
  const int fd = std::get<UniqueFd>(handle).get();
  for (const off_t size : {off_t{0}, off_t{2} << 20, off_t{8} << 20}) {
    EXPECT_EQ(ftruncate(fd, size), -1) << size;
    EXPECT_EQ(errno, EPERM);
  }
  EXPECT_EQ(fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE), -1) << "nor take the right to write from others";
  EXPECT_EQ(lseek(fd, 0, SEEK_END), static_cast<off_t>(4_MiB));
  EXPECT_EQ(device_->FreeSegment(segment), absl::OkStatus());
}

TEST_F(HostDeviceTest, RefusesAHandleOfAnotherSize) {
  const DeviceSegment segment = device_->AllocateSegment(4_MiB).value();
  const SegmentHandle handle = device_->ExportSegment(segment).value();
  for (const uint64_t bytes : {uint64_t{0}, 2_MiB, 4_MiB - 1, 4_MiB + 1, 6_MiB}) {
    const absl::Status status = device_->OpenHandle(handle, bytes).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << bytes << ": " << status;
  }
  EXPECT_EQ(device_->FreeSegment(segment), absl::OkStatus());
}

TEST_F(HostDeviceTest, DescriptorsDoNotLeakIntoOtherPrograms) {
  const DeviceSegment segment = device_->AllocateSegment(2_MiB).value();
  const SegmentHandle handle = device_->ExportSegment(segment).value();
  EXPECT_NE(fcntl(segment.fd, F_GETFD) & FD_CLOEXEC, 0);
  EXPECT_NE(fcntl(std::get<UniqueFd>(handle).get(), F_GETFD) & FD_CLOEXEC, 0);
  EXPECT_EQ(device_->FreeSegment(segment), absl::OkStatus());
}

// A child made by fork() inherits every descriptor and mapping, runs `prepare`, and stays until Stop().
class ForkedChild {
 public:
  explicit ForkedChild(const std::function<bool()>& prepare) {
    int ready[2] = {-1, -1};
    int stop[2] = {-1, -1};
    EXPECT_EQ(pipe2(ready, O_CLOEXEC), 0);
    EXPECT_EQ(pipe2(stop, O_CLOEXEC), 0);
    const UniqueFd ready_in(ready[0]);
    UniqueFd ready_out(ready[1]);
    UniqueFd stop_in(stop[0]);
    stop_ = UniqueFd(stop[1]);
    pid_ = fork();
    if (pid_ == 0) {
      stop_.Reset();
      char byte = prepare() ? 'y' : 'n';
      if (write(ready_out.get(), &byte, 1) == 1) (void)!read(stop_in.get(), &byte, 1);
      _exit(0);
    }
    ready_out.Reset();
    char answer = 'n';
    EXPECT_EQ(read(ready_in.get(), &answer, 1), 1);
    EXPECT_EQ(answer, 'y');
  }
  ~ForkedChild() { Stop(); }

  pid_t pid() const { return pid_; }
  void Stop() {
    if (!stop_.valid()) return;
    // Closing the pipe would not end the child, because children forked later hold the pipe, too.
    EXPECT_EQ(write(stop_.get(), "s", 1), 1);
    stop_.Reset();
    int status = 0;
    EXPECT_EQ(waitpid(pid_, &status, 0), pid_);
    EXPECT_EQ(status, 0);
  }

 private:
  UniqueFd stop_;  // the child ends at a write
  pid_t pid_ = -1;
};

// SEGMENT:PID of each holder, in order.
std::vector<std::string> HoldersOf(Device& device, const std::vector<DeviceSegment>& segments) {
  std::vector<std::string> found;
  const absl::StatusOr<SegmentHolders> holders = device.FindHolders(segments);
  EXPECT_TRUE(holders.ok()) << holders.status();
  if (!holders.ok()) return found;
  for (const SegmentHolders::Holder& holder : holders->holders) {
    found.push_back(absl::StrCat(holder.segment, ":", holder.pid));
  }
  return found;
}

TEST_F(HostDeviceTest, AForkedChildThatHasADescriptorIsNamed) {
  const DeviceSegment a = device_->AllocateSegment(2_MiB).value();
  const DeviceSegment b = device_->AllocateSegment(2_MiB).value();
  const DeviceSegment c = device_->AllocateSegment(2_MiB).value();
  ForkedChild of_two([&] { return close(a.fd) == 0; });
  ForkedChild of_one([&] { return close(a.fd) == 0 && close(c.fd) == 0; });
  std::vector<std::string> of_b = {absl::StrCat("1:", of_two.pid()), absl::StrCat("1:", of_one.pid())};
  std::sort(of_b.begin(), of_b.end(), [](const auto& x, const auto& y) {
    return std::pair(x.size(), x) < std::pair(y.size(), y);  // order of numbers
  });
  EXPECT_THAT(HoldersOf(*device_, {a, b, c}), ElementsAre(of_b[0], of_b[1], absl::StrCat("2:", of_two.pid())));
  EXPECT_THAT(HoldersOf(*device_, {a}), IsEmpty());
  EXPECT_THAT(HoldersOf(*device_, {c}), ElementsAre(absl::StrCat("0:", of_two.pid())));
  of_two.Stop();
  EXPECT_THAT(HoldersOf(*device_, {a, b, c}), ElementsAre(absl::StrCat("1:", of_one.pid())));
  of_one.Stop();
  EXPECT_THAT(HoldersOf(*device_, {a, b, c}), IsEmpty());
  for (const DeviceSegment& segment : {a, b, c}) EXPECT_EQ(device_->FreeSegment(segment), absl::OkStatus());
}

TEST_F(HostDeviceTest, AForkedChildThatHasOnlyAMappingIsNamed) {
  const DeviceSegment segment = device_->AllocateSegment(2_MiB).value();
  const DeviceSegment other = device_->AllocateSegment(2_MiB).value();
  void* address = nullptr;
  {
    const SegmentHandle handle = device_->ExportSegment(segment).value();
    address = device_->OpenHandle(handle, 2_MiB).value();
  }
  ForkedChild child([&] { return close(segment.fd) == 0 && close(other.fd) == 0; });
  EXPECT_EQ(device_->CloseHandle(address, 2_MiB), absl::OkStatus());
  EXPECT_THAT(HoldersOf(*device_, {other, segment}), ElementsAre(absl::StrCat("1:", child.pid())));
  child.Stop();
  EXPECT_THAT(HoldersOf(*device_, {other, segment}), IsEmpty());
  EXPECT_EQ(device_->FreeSegment(segment), absl::OkStatus());
  EXPECT_EQ(device_->FreeSegment(other), absl::OkStatus());
}

TEST_F(HostDeviceTest, NoSegmentsHaveNoHolders) {
  EXPECT_THAT(HoldersOf(*device_, {}), IsEmpty());
  EXPECT_THAT(HoldersOf(*device_, {DeviceSegment{.bytes = 2_MiB, .fd = -1}}), IsEmpty());
}

TEST_F(HostDeviceTest, ErrorsNameTheCall) {
  const DeviceSegment gone{.bytes = 2_MiB, .fd = -1};
  EXPECT_THAT(std::string(device_->FreeSegment(gone).message()), HasSubstr("close"));
  EXPECT_THAT(std::string(device_->ExportSegment(gone).status().message()), HasSubstr("F_DUPFD_CLOEXEC"));
  EXPECT_THAT(std::string(device_->Zero(gone, 0, 512).message()), HasSubstr("fallocate"));
  EXPECT_THAT(std::string(device_->OpenHandle(UniqueFd(), 2_MiB).status().message()), HasSubstr("fstat"));
}

TEST(HostDeviceLatencyTest, IsOnWhatTheDriverDoes) {
  constexpr std::chrono::milliseconds kLatency(50);
  const std::unique_ptr<Device> device = MakeHostDevice(0, 8_MiB, kLatency);
  const auto time = [](auto&& call) {
    const auto start = std::chrono::steady_clock::now();
    call();
    return std::chrono::steady_clock::now() - start;
  };
  DeviceSegment segment;
  EXPECT_GE(time([&] { segment = device->AllocateSegment(2_MiB).value(); }), kLatency);
  EXPECT_GE(time([&] { EXPECT_EQ(device->Zero(segment, 0, 2_MiB), absl::OkStatus()); }), kLatency);
  EXPECT_GE(time([&] { EXPECT_EQ(device->FreeSegment(segment), absl::OkStatus()); }), kLatency);
  EXPECT_EQ(device->FreeBytes().value(), 8_MiB);
}

TEST(HostDeviceDefaultTest, IsWholeGranules) {
  EXPECT_GT(DefaultHostBytes(), 0u);
  EXPECT_EQ(DefaultHostBytes() % 2_MiB, 0u);
}

// ---- UniqueFd ----

bool IsOpen(int fd) {
  return fcntl(fd, F_GETFD) != -1;
}

TEST(UniqueFdTest, ClosesOnce) {
  const int raw = open("/dev/null", O_RDONLY | O_CLOEXEC);
  {
    UniqueFd a(raw);
    UniqueFd b(std::move(a));
    EXPECT_FALSE(a.valid());  // NOLINT(bugprone-use-after-move): tests the moved-from object
    EXPECT_EQ(b.get(), raw);
    UniqueFd c;
    EXPECT_FALSE(c.valid());
    c = std::move(b);
    EXPECT_EQ(c.get(), raw);
    EXPECT_TRUE(IsOpen(raw));
  }
  EXPECT_FALSE(IsOpen(raw));
}

TEST(UniqueFdTest, AssignmentClosesTheOldOne) {
  const int old = open("/dev/null", O_RDONLY | O_CLOEXEC);
  UniqueFd fd(old);
  fd = UniqueFd(open("/dev/null", O_RDONLY | O_CLOEXEC));
  EXPECT_FALSE(IsOpen(old));
  EXPECT_TRUE(IsOpen(fd.get()));
}

TEST(UniqueFdTest, ReleaseLeavesItOpen) {
  UniqueFd fd(open("/dev/null", O_RDONLY | O_CLOEXEC));
  const int raw = fd.Release();
  EXPECT_FALSE(fd.valid());
  EXPECT_TRUE(IsOpen(raw));
  close(raw);
}

}  // namespace
}  // namespace vrambroker

int main(int argc, char** argv) {
  if (argc == 8 && std::string(argv[1]) == "--peer") return vrambroker::PeerMain(argv);
  (void)vrambroker::testing_support::OnSubstitute();
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
