// SPDX-License-Identifier: Apache-2.0
//
// Which scopes hold a heap's memory, now and when the heap held most.
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

// Counts what is allocated in each scope, as long as somebody names any. Not thread-safe.
class ScopeCounters {
 public:
  void Up(ScopeId scope, uint64_t bytes) {
    if (scope >= entries_.size()) entries_.resize(static_cast<size_t>(scope) + 1);
    Keep(entries_[scope]).now += bytes;
  }
  // REQUIRES: Up() counted them.
  void Down(ScopeId scope, uint64_t bytes) { Keep(entries_[scope]).now -= bytes; }
  // The heap as a whole has never held as much as it does now, after the last call.
  void PeakIsNow() { ++peak_; }
  bool any() const { return !entries_.empty(); }

  // By id. Of 0, which is not counted, 0.
  std::vector<uint64_t> AtPeak() const {
    std::vector<uint64_t> bytes;
    bytes.reserve(entries_.size());
    for (const Entry& entry : entries_) bytes.push_back(entry.peak == peak_ ? entry.at_peak : entry.now);
    return bytes;
  }

 private:
  struct Entry {
    uint64_t now = 0;
    uint64_t at_peak = 0;  // what it was at the heap's peak number `peak`
    uint64_t peak = 0;
  };

  // A peak touches no scope: what a scope held then is noted when that changes.
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

// What one scope has. A scope's memory is its own, without that of the scopes within it.
struct ScopeUse {
  static constexpr size_t kMaxInReport = 3;

  std::string scope;               // ScopePath(); "": what was allocated outside of any
  uint64_t allocated_bytes = 0;    // of its blocks in use
  uint64_t bytes_at_peak = 0;      // the same when the heap's allocated bytes were at their peak
  uint64_t blocks = 0;             // COUNT, in use
  uint64_t pinned_hole_bytes = 0;  // holes of the segments that its blocks keep from being given back
};

// What blocks hold and pin, by the id of their scope. A heap counts its blocks with its lock held: that copies none of
// them and needs no names. These are looked up afterwards. Not thread-safe.
class ScopeTally {
 public:
  // Counts a block of the segment that EndSegment() ends.
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

  // As ScopeUses() returns them. `bytes_at_peak`: as HeapSnapshot::scope_bytes_at_peak. An id that is not in `scopes`
  // counts as none.
  std::vector<ScopeUse> Uses(absl::Span<const Scope> scopes, absl::Span<const uint64_t> bytes_at_peak) const;

 private:
  struct Held {
    uint64_t bytes = 0;
    uint64_t blocks = 0;
    uint64_t last_segment = 0;  // that has a block of it
  };
  struct PinnedSegment {
    uint64_t hole_bytes = 0;
    size_t end = 0;  // its scopes are in `pinning_`, from where those of the one before end
  };

  std::vector<Held> held_;  // by id
  std::vector<PinnedSegment> pinned_;
  std::vector<ScopeId> pinning_;  // of each segment with holes, each of its scopes once
  uint64_t segment_ = 1;
  uint64_t hole_bytes_ = 0;  // of the segment that Add() is at
};

// Of all that hold something, or did at the peak: the one with most bytes first. Empty when no scope was named.
// Frames of a stack alone make no difference: one path is one scope.
std::vector<ScopeUse> ScopeUses(const HeapSnapshot& heap);

// The one with a name that holds most; the end when none has a name.
std::vector<ScopeUse>::const_iterator LargestNamedScope(const std::vector<ScopeUse>& uses);

// The first `most` of them by what they hold or pin, the named one that holds most among them.
std::vector<ScopeUse> LargestScopeUses(std::vector<ScopeUse> uses, size_t most = ScopeUse::kMaxInReport);

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_HEAP_SCOPE_USE_H_
