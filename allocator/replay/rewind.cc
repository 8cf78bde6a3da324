// SPDX-License-Identifier: Apache-2.0
#include "allocator/replay/rewind.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "allocator/heap/caching_allocator.h"
#include "allocator/heap/size_class.h"

namespace vrambroker {
namespace {

using Action = RecordedEvent::Action;

template <typename... Words>
absl::Status Contradiction(const Words&... words) {
  return absl::InvalidArgumentError(absl::StrCat(words...));
}

class Rewinder {
 public:
  explicit Rewinder(const AllocatorOptions& options) : options_(options) {}

  absl::Status Begin(absl::Span<const SegmentSnapshot> segments);
  absl::Status Undo(RecordedEvent& event);
  bool HasWhollyFreeSegment(uint64_t address) const {
    const auto segment = segments_.find(address);
    return segment != segments_.end() && segment->second.blocks == 0;
  }
  uint64_t SegmentBytes(uint64_t address) const { return segments_.find(address)->second.bytes; }
  absl::StatusOr<RewoundHeap> Finish() const;

 private:
  struct SegmentState {
    uint64_t bytes = 0;
    PoolKind pool = PoolKind::kSmall;
    Stream stream = 0;
    size_t blocks = 0;  // in use
  };
  struct UsedBlock {
    uint64_t bytes = 0;  // 0: not known
    uint64_t requested = 0;
    bool pending = false;
    uint64_t bound = 0;  // end of the block at most: lowest start ever of the next block in use, or the segment's end
  };
  using Segments = std::map<uint64_t, SegmentState>;  // by address
  using Blocks = std::map<uint64_t, UsedBlock>;       // in use, by address

  absl::Status AddSegment(uint64_t address, const SegmentState& segment);
  absl::Status AddBlock(uint64_t address, uint64_t requested, uint64_t block_bytes);
  Segments::iterator SegmentOf(uint64_t address);
  // Fewest bytes possible for the block.
  uint64_t LeastBytes(const UsedBlock& block) const {
    return block.bytes != 0 ? block.bytes : RoundRequest(block.requested, options_);
  }
  uint64_t BytesOf(uint64_t address, const UsedBlock& block, const SegmentState& segment, uint64_t* guessed) const;

  const AllocatorOptions& options_;
  Segments segments_;
  Blocks blocks_;
  size_t free_segments_ = 0;  // wholly free
  uint64_t reserved_ = 0;
  uint64_t peak_reserved_ = 0;
  bool after_is_segment_free_ = false;  // of the event undone last
};

absl::Status Rewinder::AddSegment(uint64_t address, const SegmentState& segment) {
  if (segment.bytes == 0 || segment.bytes >= kMaxRequestBytes - reserved_ ||
      address > std::numeric_limits<uint64_t>::max() - segment.bytes) {
    return Contradiction("a segment of ", segment.bytes, " bytes at address ", address);
  }
  const auto next = segments_.lower_bound(address);
  const bool overlaps_next = next != segments_.end() && next->first - address < segment.bytes;
  const bool overlaps_last =
      next != segments_.begin() && address - std::prev(next)->first < std::prev(next)->second.bytes;
  if (overlaps_next || overlaps_last) {
    return Contradiction("the segment of ", segment.bytes, " bytes at address ", address,
                         " overlaps one that is there after it");
  }
  segments_.emplace_hint(next, address, segment);
  ++free_segments_;
  reserved_ += segment.bytes;
  peak_reserved_ = std::max(peak_reserved_, reserved_);
  return absl::OkStatus();
}

Rewinder::Segments::iterator Rewinder::SegmentOf(uint64_t address) {
  auto segment = segments_.upper_bound(address);
  if (segment == segments_.begin()) return segments_.end();
  --segment;
  return address - segment->first < segment->second.bytes ? segment : segments_.end();
}

absl::Status Rewinder::AddBlock(uint64_t address, uint64_t requested, uint64_t block_bytes) {
  const auto segment = SegmentOf(address);
  if (segment == segments_.end()) {
    return Contradiction("a block at address ", address, ", where no segment is after it");
  }
  const auto next = blocks_.lower_bound(address);
  const uint64_t segment_end = segment->first + segment->second.bytes;
  UsedBlock block = {.bytes = block_bytes, .requested = requested, .bound = segment_end};
  if (next != blocks_.end()) block.bound = std::min(block.bound, next->first);
  if (next != blocks_.begin()) {
    auto& [last_address, last] = *std::prev(next);
    if (last_address >= segment->first) {
      if (address - last_address < LeastBytes(last)) {
        return Contradiction("the block at address ", address, " overlaps the one at ", last_address,
                             ", which is in use after it");
      }
      last.bound = std::min(last.bound, address);
    }
  }
  if (LeastBytes(block) > block.bound - address) {
    return Contradiction("a block of ", LeastBytes(block), " bytes at address ", address, ", where only ",
                         block.bound - address, " are free after it");
  }
  blocks_.emplace_hint(next, address, block);
  if (segment->second.blocks++ == 0) --free_segments_;
  return absl::OkStatus();
}

absl::Status Rewinder::Begin(absl::Span<const SegmentSnapshot> segments) {
  if (absl::Status status = CachingAllocator::CheckSegments(segments); !status.ok()) return status;
  for (const SegmentSnapshot& segment : segments) {
    absl::Status status =
        AddSegment(segment.address, {.bytes = segment.bytes, .pool = segment.pool, .stream = segment.stream});
    if (!status.ok()) return status;
    for (const BlockSnapshot& block : segment.blocks) {
      if (block.state == BlockState::kFree) continue;
      status = AddBlock(segment.address + block.offset, block.requested_bytes, block.bytes);
      if (!status.ok()) return status;
      blocks_[segment.address + block.offset].pending = block.state == BlockState::kPendingFree;
    }
  }
  peak_reserved_ = reserved_;
  return absl::OkStatus();
}

absl::Status Rewinder::Undo(RecordedEvent& event) {
  const uint64_t address = event.address;
  switch (event.action) {
    case Action::kAllocate: {
      const auto block = blocks_.find(address);
      if (block == blocks_.end()) {
        return Contradiction("allocates the block at address ", address, ", which is not in use after it");
      }
      if (block->second.pending) {
        return Contradiction("allocates the block at address ", address, ", which is freed already after it");
      }
      // Rounded, because some releases of PyTorch recorded a free with other bytes than the allocation. 0: not in the
      // snapshot.
      const uint64_t requested = block->second.requested;
      if (requested != 0 && RoundRequest(requested, options_) != RoundRequest(event.bytes, options_)) {
        return Contradiction("allocates ", event.bytes, " bytes at address ", address, ", where ", requested,
                             " are in use after it");
      }
      blocks_.erase(block);
      if (--SegmentOf(address)->second.blocks == 0) ++free_segments_;
      break;
    }
    case Action::kFreeRequested: {
      const auto block = blocks_.find(address);
      if (block == blocks_.end() || !block->second.pending) {
        return Contradiction("frees the block at address ", address, ", which does not wait to be free after it");
      }
      block->second.pending = false;
      break;
    }
    case Action::kFreeCompleted: {
      absl::Status status = AddBlock(address, event.bytes, event.block_bytes);
      if (!status.ok()) return Contradiction("frees ", status.message());
      blocks_[address].pending = true;
      break;
    }
    case Action::kSegmentAllocate: {
      const auto segment = segments_.find(address);
      if (segment == segments_.end() || segment->second.bytes != event.bytes) {
        return Contradiction("obtains the segment of ", event.bytes, " bytes at address ", address,
                             ", which is not there after it");
      }
      if (segment->second.blocks != 0) {
        return Contradiction("obtains the segment at address ", address,
                             ", in which a block is in use that no later event allocates");
      }
      reserved_ -= event.bytes;
      --free_segments_;
      segments_.erase(segment);
      break;
    }
    case Action::kSegmentFree: {
      event.leaves_none_free = free_segments_ == 0 && !after_is_segment_free_;
      absl::Status status =
          AddSegment(address, {.bytes = event.bytes,
                               .pool = event.bytes == kSmallSegmentBytes ? PoolKind::kSmall : PoolKind::kLarge,
                               .stream = event.stream});
      if (!status.ok()) return Contradiction("gives back ", status.message());
      break;
    }
    case Action::kMap:
      return Contradiction("is of an expandable segment");
    case Action::kOutOfMemory:
    case Action::kOther:
      return absl::OkStatus();
  }
  after_is_segment_free_ = event.action == Action::kSegmentFree;
  return absl::OkStatus();
}

// Derives an unrecorded size from the allocator's rules.
uint64_t Rewinder::BytesOf(uint64_t address, const UsedBlock& block, const SegmentState& segment,
                           uint64_t* guessed) const {
  if (block.bytes != 0) return block.bytes;
  const uint64_t least = RoundRequest(block.requested, options_);
  if (segment.pool == PoolKind::kSmall) return least;  // any rest is split off
  const uint64_t most = block.bound - address;
  // No rest is split off an oversize block, and no free part of a large segment has up to 1 MiB: the rest stayed at the
  // block.
  if (options_.IsOversize(least) || most - least <= kSmallMaxBytes) return most;
  ++*guessed;
  return least;
}

absl::StatusOr<RewoundHeap> Rewinder::Finish() const {
  RewoundHeap heap{.peak_reserved_bytes = peak_reserved_};
  for (const auto& [address, state] : segments_) {
    SegmentSnapshot segment = {.address = address, .bytes = state.bytes, .pool = state.pool, .stream = state.stream};
    uint64_t end = 0;
    const auto add_free = [&](uint64_t offset) {
      if (offset > end) segment.blocks.push_back({.offset = end, .bytes = offset - end});
    };
    const uint64_t segment_end = address + state.bytes;
    for (auto it = blocks_.lower_bound(address); it != blocks_.end() && it->first < segment_end; ++it) {
      const uint64_t offset = it->first - address;
      const uint64_t bytes = BytesOf(it->first, it->second, state, &heap.guessed_blocks);
      add_free(offset);
      segment.blocks.push_back({.offset = offset,
                                .bytes = bytes,
                                .requested_bytes = it->second.requested,
                                .state = it->second.pending ? BlockState::kPendingFree : BlockState::kAllocated});
      heap.in_use.push_back({.address = it->first, .pending = it->second.pending});
      end = offset + bytes;
    }
    add_free(state.bytes);
    heap.segments.push_back(std::move(segment));
  }
  if (absl::Status status = CachingAllocator::CheckSegments(heap.segments); !status.ok()) {
    return Contradiction("the heap at the beginning contradicts itself: ", status.message());
  }
  return heap;
}

}  // namespace

absl::StatusOr<RewoundHeap> RewindHeap(absl::Span<const SegmentSnapshot> segments, absl::Span<RecordedEvent> events,
                                       const AllocatorOptions& options, size_t* failed_event) {
  Rewinder rewinder(options);
  *failed_event = events.size();
  if (absl::Status status = rewinder.Begin(segments); !status.ok()) return status;
  for (size_t i = events.size(); i > 0; --i) {
    if (absl::Status status = rewinder.Undo(events[i - 1]); !status.ok()) {
      *failed_event = i - 1;
      return status;
    }
  }
  // Obtaining a segment and handing out its first block is one step. A ring may begin between the two events of the
  // step. The cut shows where the rules let no free segment serve the request.
  const auto first = std::find_if(events.begin(), events.end(), [](const RecordedEvent& event) {
    return event.action != Action::kOther && event.action != Action::kOutOfMemory;
  });
  bool segment_of_first = false;
  if (first != events.end() && first->action == Action::kAllocate && rewinder.HasWhollyFreeSegment(first->address)) {
    RecordedEvent obtained = {
        .action = Action::kSegmentAllocate, .address = first->address, .bytes = rewinder.SegmentBytes(first->address)};
    segment_of_first = !MayServe(RoundRequest(first->bytes, options), obtained.bytes, options);
    if (segment_of_first) {
      if (absl::Status status = rewinder.Undo(obtained); !status.ok()) return status;
    }
  }
  absl::StatusOr<RewoundHeap> heap = rewinder.Finish();
  if (heap.ok()) heap->obtains_segment_of_first = segment_of_first;
  return heap;
}

}  // namespace vrambroker
