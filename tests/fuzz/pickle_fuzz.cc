// SPDX-License-Identifier: Apache-2.0
//
// libFuzzer: any bytes as a pickle, as a PyTorch snapshot, and written again.
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <unordered_map>

#include "absl/strings/match.h"
#include "absl/strings/string_view.h"
#include "allocator/replay/pickle.h"
#include "allocator/replay/replay.h"
#include "allocator/replay/torch_segments.h"
#include "allocator/replay/torch_trace.h"

namespace {

using vrambroker::PickleValue;

constexpr uint64_t kMany = 10'000;

void Check(bool condition, const char* what) {
  if (condition) return;
  (void)std::fprintf(stderr, "%s\n", what);
  std::abort();
}

// Counts values, and counts a shared value at each use. Stops counting soon after kMany.
uint64_t CountWrittenOut(const PickleValue& value, std::unordered_map<const void*, uint64_t>& known) {
  const void* node = nullptr;
  switch (value.kind()) {
    case PickleValue::Kind::kList:
    case PickleValue::Kind::kTuple:
      node = &value.AsItems();
      break;
    case PickleValue::Kind::kDict:
      node = &value.AsPairs();
      break;
    default:
      return 1;
  }
  if (const auto found = known.find(node); found != known.end()) return found->second;
  uint64_t count = 1;
  const auto add = [&](const PickleValue& part) {
    if (count <= kMany) count += CountWrittenOut(part, known);
  };
  if (value.kind() == PickleValue::Kind::kDict) {
    for (const auto& [key, content] : value.AsPairs()) {
      add(key);
      add(content);
    }
  } else {
    for (const PickleValue& item : value.AsItems()) add(item);
  }
  known[node] = count;
  return count;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const absl::string_view bytes(reinterpret_cast<const char*>(data), size);
  const absl::StatusOr<PickleValue> value = vrambroker::ReadPickle(bytes);
  if (!value.ok()) {
    Check(absl::StartsWith(value.status().message(), "byte "), "an error that names no byte");
    return 0;
  }
  for (const int device : {0, 1}) {
    const absl::StatusOr<vrambroker::Trace> trace = vrambroker::TraceFromTorchSnapshot(*value, device);
    if (!trace.ok()) continue;
    for (const vrambroker::TraceOp& op : trace->ops) {
      Check(op.id < trace->ids || op.id == 0 || op.kind == vrambroker::TraceOp::Kind::kGiveBack, "an id beyond ids");
    }
    const vrambroker::Replay replay({}, *trace);
    Check(replay.start_status().ok(), "a start that cannot be taken over");
  }

  if (const auto heaps = vrambroker::HeapsOfTorchSnapshot(*value); heaps.ok()) {
    for (const vrambroker::HeapSnapshot& heap : *heaps) {
      for (const vrambroker::SegmentSnapshot& segment : heap.segments) {
        uint64_t end = 0;
        for (const vrambroker::BlockSnapshot& block : segment.blocks) {
          Check(block.offset == end, "blocks that do not tile their segment");
          Check(block.scope == 0 || block.scope < heap.scopes.size(), "a scope that is not listed");
          end += block.bytes;
        }
        Check(end == segment.bytes, "blocks that do not fill their segment");
      }
    }
  }

  const std::string written = vrambroker::WritePickle(*value);
  const absl::StatusOr<PickleValue> again = vrambroker::ReadPickle(written);
  Check(again.ok(), "what was written cannot be read");
  Check(vrambroker::WritePickle(*again) == written, "what was written and read is written differently");
  std::unordered_map<const void*, uint64_t> known;
  // Values that share a lot can be too many for a full comparison.
  if (CountWrittenOut(*value, known) <= kMany) {
    Check(*again == *value, "what was written is read differently");
    Check(!vrambroker::WriteJson(*value).empty(), "no JSON");
  }
  return 0;
}
