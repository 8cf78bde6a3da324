// SPDX-License-Identifier: Apache-2.0
#include "allocator/replay/direct_heap.h"

#include <optional>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "allocator/base/bytes.h"

namespace vrambroker {

absl::StatusOr<Block*> DirectHeap::Allocate(uint64_t requested, Stream stream, ScopeId scope) {
  if (Block* block = TryAllocate(requested, stream, scope)) return block;
  BlockRequest request(this, requested, stream, scope);
  const auto release = [this](absl::Span<const ReleasedSegment> segments) { source_.ReleaseSegments(segments); };
  while (request.Advance(release) == BlockRequest::Next::kSegment) {
    if (const std::optional<uint64_t> limit = request.passed_limit()) {
      request.Deny(
          absl::ResourceExhaustedError(absl::StrCat("a segment of ", FormatBytes(request.segment_bytes()),
                                                    " would exceed the limit of ", FormatBytesExactly(*limit))),
          source_.AvailableBytes());
      continue;
    }
    const absl::StatusOr<AcquiredSegment> segment = source_.AcquireSegment(request.segment_bytes());
    if (segment.ok()) {
      request.Supply(*segment);
    } else {
      request.Deny(segment.status(), source_.AvailableBytes());
    }
  }
  return request.result();
}

uint64_t DirectHeap::EmptyCache() {
  WaitForStreams();
  return Release(TakeFreeSegments());
}

uint64_t DirectHeap::Trim(TrimOptions options) {
  uint64_t available = 0;
  while (true) {
    const SegmentsToRelease taken = TakeIdleSegments(&options);
    if (taken.empty()) return available;
    available += Release(taken);
  }
}

uint64_t DirectHeap::Release(const SegmentsToRelease& taken) {
  return taken.empty() ? 0 : source_.ReleaseSegments(taken.segments());
}

}  // namespace vrambroker
