// SPDX-License-Identifier: Apache-2.0
//
// A process that obeys lines on standard input, and answers each with a line:
//   connect [IDLE_DECAY_MS]                ok
//   latency US                             ok      simulated latency of the device
//   take WHAT BYTES TOUCH FIFO             ok      WHAT: buffer, device (the worker's own) or nothing
//   give WHAT BYTES TOUCH FIFO             begin of giving back, ns; afterwards a byte goes into FIFO
//   wait_and_take WHAT BYTES TOUCH FIFO    moment of usable memory, ns, after a byte comes out of FIFO
//   drop                                   ok      gives back the taken memory
//   hold BYTES                             ok      one more segment
//   load MS PERIOD_MS                      time of each lease, us: one lease a period, returned at once
//   trace GOLDEN_DIR NAME PARTS            ok      a trace to replay in PARTS parts
//   part MS                                ok      plays the next part over MS milliseconds
//   calls                                  number of calls to the daemon
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <iostream>
#include <optional>
#include <random>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "allocator/device/host_device.h"
#include "allocator/replay/trace.h"
#include "tests/bench/fast_path.h"

namespace vrambroker::bench {
namespace {

using Words = std::vector<std::string>;

int64_t Number(const std::string& word) {
  int64_t number = 0;
  return absl::SimpleAtoi(word, &number) ? number : 0;
}

class Worker {
 public:
  explicit Worker(std::string socket_dir) : socket_dir_(std::move(socket_dir)) {}

  absl::StatusOr<std::string> Do(const Words& words) {
    const std::string& command = words[0];
    if (command == "connect")
      return Connect(words.size() > 1 ? absl::Milliseconds(Number(words[1])) : absl::InfiniteDuration());
    if (command == "latency") {
      latency_ = absl::Microseconds(Number(words.at(1)));
      return "ok";
    }
    if (command == "take") return Say(Take(words));
    if (command == "give") return Give(words);
    if (command == "wait_and_take") return WaitAndTake(words);
    if (command == "drop") return Say(Drop());
    if (command == "hold") return Say(client_->LeaseSegment(static_cast<uint64_t>(Number(words.at(1)))).status());
    if (command == "load")
      return Load(absl::Milliseconds(Number(words.at(1))), absl::Milliseconds(Number(words.at(2))));
    if (command == "trace") return ReadTrace(words);
    if (command == "part") return Say(PlayPart(absl::Milliseconds(Number(words.at(1)))));
    if (command == "calls") return absl::StrCat(client_->calls());
    return absl::UnimplementedError(command);
  }

 private:
  static absl::StatusOr<std::string> Say(const absl::Status& status) {
    if (!status.ok()) return status;
    return "ok";
  }

  absl::StatusOr<std::string> Connect(absl::Duration idle_decay) {
    absl::StatusOr<Client> client = ConnectTo(socket_dir_, Placement::kLeased, idle_decay);
    if (!client.ok()) return client.status();
    client_ = *std::move(client);
    return "ok";
  }

  // ---- Handing over ----

  absl::Status Take(const Words& words) {
    const auto bytes = static_cast<uint64_t>(Number(words.at(2)));
    void* memory = nullptr;
    if (words[1] == "buffer") {
      absl::StatusOr<Buffer> buffer = client_->Allocate(bytes);
      if (!buffer.ok()) return buffer.status();
      buffer_ = *std::move(buffer);
      memory = buffer_.data();
    } else if (words[1] == "device") {
      if (device_ == nullptr) device_ = MakeHostDevice(0, 2 * bytes, absl::ToChronoNanoseconds(latency_));
      const absl::StatusOr<DeviceSegment> segment = device_->AllocateSegment(bytes);
      if (!segment.ok()) return segment.status();
      segment_ = *segment;
      const absl::StatusOr<SegmentHandle> handle = device_->ExportSegment(*segment);
      if (!handle.ok()) return handle.status();
      const absl::StatusOr<void*> address = device_->OpenHandle(*handle, bytes);
      if (!address.ok()) return address.status();
      address_ = *address;
      memory = address_;
    }
    if (memory != nullptr && words.at(3) == "1") std::memset(memory, 1, bytes);
    return absl::OkStatus();
  }

  absl::Status Drop() {
    if (address_ != nullptr) {
      if (absl::Status status = device_->CloseHandle(std::exchange(address_, nullptr), segment_.bytes); !status.ok()) {
        return status;
      }
      return device_->FreeSegment(segment_);
    }
    if (buffer_.data() == nullptr) return absl::OkStatus();
    if (absl::Status status = buffer_.Reset(); !status.ok()) return status;
    return client_->EmptyCache().status();
  }

  absl::StatusOr<std::string> Give(const Words& words) {
    const UniqueFd fifo(open(words.at(4).c_str(), O_WRONLY | O_CLOEXEC));  // waits for the reader
    const int64_t from = NowNs();
    if (absl::Status status = Drop(); !status.ok()) return status;
    if (write(fifo.get(), "", 1) != 1) return absl::ErrnoToStatus(errno, "write failed");
    return absl::StrCat(from);
  }

  absl::StatusOr<std::string> WaitAndTake(const Words& words) {
    const UniqueFd fifo(open(words.at(4).c_str(), O_RDONLY | O_CLOEXEC));
    char byte = 0;
    if (read(fifo.get(), &byte, 1) != 1) return absl::ErrnoToStatus(errno, "read failed");
    if (absl::Status status = Take(words); !status.ok()) return status;
    return absl::StrCat(NowNs());
  }

  // ---- Load ----

  absl::StatusOr<std::string> Load(absl::Duration length, absl::Duration period) {
    constexpr uint64_t kBytes = 2 << 20;
    std::mt19937_64 random(static_cast<uint64_t>(getpid()));
    std::vector<int64_t> us;
    const absl::Time begin = absl::Now();
    absl::Time next = begin + absl::Milliseconds(random() % static_cast<uint64_t>(absl::ToInt64Milliseconds(period)));
    for (; next < begin + length; next += period) {
      absl::SleepFor(next - absl::Now());
      const int64_t from = NowNs();
      const absl::StatusOr<void*> segment = client_->LeaseSegment(kBytes);
      if (!segment.ok()) return segment.status();
      us.push_back((NowNs() - from) / 1000);
      if (absl::Status status = client_->ReturnSegment(*segment); !status.ok()) return status;
    }
    return absl::StrJoin(us, " ");
  }

  // ---- A trace in parts ----

  absl::StatusOr<std::string> ReadTrace(const Words& words) {
    const std::string path = absl::StrCat(words.at(1), "/", words.at(2), ".trace");
    absl::StatusOr<Trace> trace = ReadTraceFile(std::filesystem::exists(path) ? path : path + ".gz");
    if (!trace.ok()) return trace.status();
    trace_ = *std::move(trace);
    buffers_.resize(trace_.ids);
    FindEnds(static_cast<size_t>(Number(words.at(3))));
    return "ok";
  }

  // Splits the operations into nearly equal parts, at points where the least memory is in use.
  void FindEnds(size_t parts) {
    const std::vector<TraceOp>& ops = trace_.ops;
    std::vector<uint64_t> used;
    std::vector<uint64_t> bytes(trace_.ids);
    uint64_t sum = 0;
    for (const TraceOp& op : ops) {
      if (op.kind == TraceOp::Kind::kAllocate) sum += bytes[op.id] = op.bytes;
      if (op.kind == TraceOp::Kind::kFree) sum -= std::exchange(bytes[op.id], 0);
      used.push_back(sum);
    }
    for (size_t part = 1; part < parts; ++part) {
      const auto middle = used.begin() + static_cast<std::ptrdiff_t>(ops.size() * part / parts);
      const auto reach = static_cast<std::ptrdiff_t>(ops.size() / parts / 2);
      ends_.push_back(static_cast<size_t>(std::min_element(middle - reach, middle + reach) - used.begin()) + 1);
    }
    ends_.push_back(ops.size());
  }

  absl::Status PlayPart(absl::Duration length) {
    const size_t begin = at_;
    const size_t end = ends_.at(part_++);
    const absl::Time started = absl::Now();
    for (; at_ < end; ++at_) {
      const TraceOp& op = trace_.ops[at_];
      if (op.kind == TraceOp::Kind::kAllocate) {
        absl::StatusOr<Buffer> buffer = client_->Allocate(op.bytes, 0, op.stream);
        if (!buffer.ok()) return buffer.status();
        buffers_[op.id] = *std::move(buffer);
      } else if (op.kind == TraceOp::Kind::kFree) {
        (void)buffers_[op.id].Reset();
      }
      if (at_ % 32 != 0) continue;
      absl::SleepFor(started + length * (static_cast<double>(at_ - begin) / static_cast<double>(end - begin)) -
                     absl::Now());
    }
    return absl::OkStatus();
  }

  const std::string socket_dir_;
  std::optional<Client> client_;
  Buffer buffer_;
  absl::Duration latency_;
  std::unique_ptr<Device> device_;
  DeviceSegment segment_;
  void* address_ = nullptr;
  Trace trace_;
  std::vector<size_t> ends_;
  size_t at_ = 0;
  size_t part_ = 0;
  std::vector<Buffer> buffers_;
};

}  // namespace

absl::Status Work(const std::string& socket_dir) {
  Worker worker(socket_dir);
  std::string line;
  while (std::getline(std::cin, line)) {
    const absl::StatusOr<std::string> answer = worker.Do(absl::StrSplit(line, ' ', absl::SkipEmpty()));
    std::cout << answer.value_or(answer.status().ToString()) << std::endl;
  }
  return absl::OkStatus();
}

}  // namespace vrambroker::bench
