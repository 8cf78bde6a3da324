// SPDX-License-Identifier: Apache-2.0
//
// libFuzzer: any bytes as settings and a sequence of operations on a heap. The heap never breaks a rule of
// tests/support/heap_model.h.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <iterator>
#include <string>

#include "tests/support/heap_model.h"

namespace {

using vrambroker::operator""_MiB;
using vrambroker::AllocatorOptions;
using vrambroker::HeapModel;
using vrambroker::HeapOp;

constexpr int kMostOperations = 150;

class Bytes {
 public:
  Bytes(const uint8_t* data, size_t size) : at_(data), end_(data + size) {}

  bool empty() const { return at_ == end_; }
  // The next byte; 0 at the end.
  uint64_t Next() { return empty() ? 0 : *at_++; }
  uint64_t NextTwo() {
    const uint64_t high = Next();
    return high << 8 | Next();
  }
  template <typename Choices>
  auto Pick(const Choices& choices) {
    return choices[Next() % std::size(choices)];
  }

 private:
  const uint8_t* at_;
  const uint8_t* const end_;
};

// Sizes are near the edges between size classes, or random.
uint64_t Size(Bytes& bytes) {
  static constexpr uint64_t kEdges[] = {0, 512, 1_MiB, 2_MiB, 10_MiB, 12_MiB, 20_MiB, 32_MiB};
  const uint64_t kind = bytes.Next();
  if (kind < 128) return kEdges[kind % 8] + 512 * (kind / 8);
  if (kind < 192) return kEdges[kind % 8] + bytes.NextTwo();
  return bytes.NextTwo() << (kind % 16);
}

AllocatorOptions Options(Bytes& bytes) {
  static constexpr uint64_t kLarge[] = {20_MiB, 20_MiB, 12_MiB, 64_MiB};
  static constexpr uint64_t kAbove[] = {0, 1_MiB, 12_MiB, 100_MiB};
  static constexpr uint32_t kDivisions[] = {0, 1, 2, 4, 16};
  const uint64_t which = bytes.Next();
  AllocatorOptions options;
  options.large_segment_bytes = bytes.Pick(kLarge);
  options.max_non_split_rounding_bytes = options.large_segment_bytes;
  if ((which & 1) != 0) options.max_split_bytes = options.large_segment_bytes + bytes.Pick(kAbove);
  if ((which & 2) != 0) options.max_non_split_rounding_bytes += bytes.Pick(kAbove);
  if ((which & 4) != 0) {
    for (uint32_t& divisions : options.roundup_power2_divisions) divisions = bytes.Pick(kDivisions);
  }
  if ((which & 8) != 0) options.garbage_collection_threshold = static_cast<double>(bytes.Next()) / 256;
  if ((which & 16) != 0) options.per_process_memory_fraction = static_cast<double>(bytes.Next()) / 255;
  options.reject_without_retry = (which & 32) != 0;
  return options;
}

HeapOp Operation(Bytes& bytes) {
  using Kind = HeapOp::Kind;
  static constexpr Kind kKinds[16] = {Kind::kAllocate,    Kind::kAllocate,     Kind::kFree,         Kind::kFree,
                                      Kind::kTryAllocate, Kind::kRecordStream, Kind::kRecordStream, Kind::kFinish,
                                      Kind::kPoll,        Kind::kEmptyCache,   Kind::kSetLimit,     Kind::kSetFraction,
                                      Kind::kDeviceLimit, Kind::kFail,         Kind::kResetPeaks,   Kind::kResetTotals};
  const uint64_t which = bytes.Next();
  HeapOp op{.kind = kKinds[which % 16], .b = which / 16};
  switch (op.kind) {
    case Kind::kAllocate:
    case Kind::kTryAllocate:
      op.a = Size(bytes);
      break;
    case Kind::kSetLimit:
    case Kind::kDeviceLimit:
      op.a = 8 * Size(bytes);  // rarely far below the held memory
      break;
    case Kind::kSetFraction:
      op.a = 4 * bytes.Next();
      break;
    case Kind::kFree:
    case Kind::kRecordStream:
    case Kind::kFinish:
    case Kind::kFail:
      op.a = bytes.Next();
      break;
    case Kind::kPoll:  // three values in four mean another operation
      if (op.b >= 8) {
        op = {.kind = Kind::kTrim, .a = Size(bytes), .b = op.b % 4};
      } else if (op.b >= 4) {
        op.kind = Kind::kTick;
      }
      break;
    default:
      break;
  }
  return op;
}

void Require(const std::string& wrong) {
  if (wrong.empty()) return;
  std::cerr << "violated: " << wrong << '\n';
  std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const bool shows = std::getenv("SHOW_OPERATIONS") != nullptr;  // for a look into a crash
  Bytes bytes(data, size);
  const AllocatorOptions options = Options(bytes);
  static constexpr uint64_t kDevices[] = {64_MiB, 256_MiB, 1024_MiB};
  HeapModel model({.options = options, .device_bytes = bytes.Pick(kDevices)});
  if (shows) std::cerr << vrambroker::FormatAllocConf(options) << '\n';
  for (int i = 0; i < kMostOperations && !bytes.empty(); ++i) {
    const HeapOp op = Operation(bytes);
    if (shows) std::cerr << vrambroker::ToString(op) << '\n';
    Require(model.Do(op));
  }
  Require(model.End());
  return 0;
}
