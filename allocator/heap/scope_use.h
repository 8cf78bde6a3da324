// SPDX-License-Identifier: Apache-2.0
//
// Memory of a heap by scope, now and at the heap's peak.
#ifndef VRAMBROKER_ALLOCATOR_HEAP_SCOPE_USE_H_
#define VRAMBROKER_ALLOCATOR_HEAP_SCOPE_USE_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "allocator/heap/heap_snapshot.h"
#include "allocator/heap/scopes.h"

namespace vrambroker {

// Counts allocated bytes by scope, once any scope is named. Not thread-safe.
class ScopeCounters {
 public:
  void Up(ScopeId scope, uint64_t bytes) {
    if (scope >= entries_.size()) entries_.resize(static_cast<size_t>(scope) + 1);
    Keep(entries_[scope]).now += bytes;
  }
  // REQUIRES: counted by Up() before.
  void Down(ScopeId scope, uint64_t bytes) { Keep(entries_[scope]).now -= bytes; }
  // Marks a new peak of the heap as a whole, reached after the last call.
  void PeakIsNow() { ++peak_; }
  bool any() const { return !entries_.empty(); }

  // Bytes by id. Scope 0 is not counted and has 0.
  std::vector<uint64_t> AtPeak() const {
    std::vector<uint64_t> bytes;
    bytes.reserve(entries_.size());
    for (const Entry& entry : entries_) bytes.push_back(entry.peak == peak_ ? entry.at_peak : entry.now);
    return bytes;
  }

 private:
  struct Entry {
    uint64_t now = 0;
    uint64_t at_peak = 0;  // `now` at the heap's peak number `peak`
    uint64_t peak = 0;
  };

  // A peak touches no scope: a scope's bytes at the peak are noted at the scope's next change.
  Entry& Keep(Entry& entry) const {
    if (entry.peak != peak_) {
      entry.at_peak = entry.now;
      entry.peak = peak_;
    }
    return entry;
  }

  std::vector<Entry> entries_;
  uint64_t peak_ = 1;
};

// ScopeUse: the memory of a scope, without nested scopes.
struct ScopeUse {
  static constexpr size_t kMaxInReport = 3;

  std::string scope;               // ScopePath(); "": allocated outside of any scope
  uint64_t allocated_bytes = 0;    // of the scope's blocks in use
  uint64_t bytes_at_peak = 0;      // `allocated_bytes` at the peak of the heap's allocated bytes
  uint64_t blocks = 0;             // COUNT, in use
  uint64_t pinned_hole_bytes = 0;  // holes of segments pinned by the scope's blocks
};

// ScopeTally: held and pinned bytes of blocks, by scope id. A heap counts blocks under its lock: counting copies no
// blocks and needs no names. Names are looked up afterwards. Not thread-safe.
class ScopeTally {
 public:
  // Counts a block of the current segment. EndSegment() ends the segment.
  void Add(BlockState state, uint64_t bytes, ScopeId scope) {
    if (state == BlockState::kFree) {
      hole_bytes_ += bytes;
      return;
    }
    if (scope >= held_.size()) held_.resize(static_cast<size_t>(scope) + 1);
    Held& held = held_[scope];
    if (held.last_segment != segment_) {
      held.last_segment = segment_;
      pinning_.push_back(scope);
    }
    if (state != BlockState::kAllocated) return;
    held.bytes += bytes;
    ++held.blocks;
  }
  void EndSegment();

  // Returns a list like ScopeUses(). `bytes_at_peak`: as HeapSnapshot::scope_bytes_at_peak. An id missing in `scopes`
  // counts as no scope.
  std::vector<ScopeUse> Uses(absl::Span<const Scope> scopes, absl::Span<const uint64_t> bytes_at_peak) const;

 private:
  struct Held {
    uint64_t bytes = 0;
    uint64_t blocks = 0;
    uint64_t last_segment = 0;  // last segment with a block of the scope
  };
  struct PinnedSegment {
    uint64_t hole_bytes = 0;
    size_t end = 0;  // end of the segment's scopes in `pinning_`; begin: the previous segment's end
  };

  std::vector<Held> held_;  // by id
  std::vector<PinnedSegment> pinned_;
  std::vector<ScopeId> pinning_;  // scopes of each segment with holes, each scope once
  uint64_t segment_ = 1;
  uint64_t hole_bytes_ = 0;  // of the current segment
};

// Returns all scopes with memory now or at the peak, most bytes first. Empty when no scope was named. Stack frames
// alone make no difference: equal paths are one scope.
std::vector<ScopeUse> ScopeUses(const HeapSnapshot& heap);

// Returns the largest named scope; the end when none has a name.
std::vector<ScopeUse>::const_iterator LargestNamedScope(const std::vector<ScopeUse>& uses);

// Returns the first `most` of `uses` by held or pinned bytes, always with the largest named scope.
std::vector<ScopeUse> LargestScopeUses(std::vector<ScopeUse> uses, size_t most = ScopeUse::kMaxInReport);

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_HEAP_SCOPE_USE_H_
