// SPDX-License-Identifier: Apache-2.0
//
// Diagnose: would other settings have served a request that was refused? What is said of them was tried: each answer is
// that of a replay of what was recorded before the request, and then of the request.
#ifndef VRAMBROKER_ALLOCATOR_REPLAY_DIAGNOSE_H_
#define VRAMBROKER_ALLOCATOR_REPLAY_DIAGNOSE_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "absl/types/span.h"
#include "allocator/heap/allocator_options.h"
#include "allocator/replay/replay.h"
#include "allocator/replay/settings_target.h"
#include "allocator/replay/trace.h"

namespace vrambroker {

// The request, and what it met.
struct RefusalToDiagnose {
  size_t op = 0;                 // of the trace: the allocation that was refused
  uint64_t requested_bytes = 0;  // as it was asked for; below kMaxRequestBytes
  uint64_t bound_bytes = 0;      // that the session could have reserved then, with what it had
  // Of the session's account. What the heap did not hold of it (segments on their way back, memory carried over) takes
  // its part of the bound, whatever the settings.
  uint64_t reserved_bytes = 0;
  uint64_t capacity_bytes = 0;  // of the device; at least `bound_bytes`
  // The bound is the session's limit, by which garbage is collected, too. Else nothing was collected, or by another
  // limit, and collecting is not tried.
  bool is_limit = false;

  // No setting serves it: it is larger than all that the session could have.
  bool never_fits() const { return requested_bytes > bound_bytes; }
};

struct Trial {
  AllocatorOptions options;
  bool is_served = false;
  uint64_t refused_before = 0;        // allocations before it that were refused in this replay, and not when recorded
  uint64_t missing_bytes = 0;         // beyond the bound, for its segment; 0 where it is served
  uint64_t peak_allocated_bytes = 0;  // up to the request, and with it where it is served
  uint64_t peak_reserved_bytes = 0;
  uint64_t device_calls = 0;  // segments obtained and given back
  // Of settings that help: so much less than the bound would have done as well, as far as that was tried. 0 for others.
  uint64_t spare_bytes = 0;

  // Served, and nothing was refused on the way.
  bool Helps() const { return is_served && refused_before == 0; }
};

// Emptying the cache once, before an allocation or free of the trace.
struct EmptiedCache {
  size_t op = 0;
  // From there to the request, without it: what a program can count. The trace has more operations, of the heap itself.
  uint64_t calls_before = 0;     // allocations, also refused ones, and frees
  uint64_t allocated_bytes = 0;  // at that moment
  Trial trial;
};

struct Diagnosis {
  Trial recorded;    // with the settings of the recording; where it is served, the replay does not show the refusal
  size_t tried = 0;  // other settings; none where the request never_fits()
  bool is_complete = true;  // false: the time was over before all was tried, or even the recording replayed
  // Those with enough to spare first (EnoughToSpare()), then the least reserved, then the simplest; at most kBest.
  std::vector<Trial> helping;
  static constexpr size_t kBest = 4;
  std::optional<Trial> nearest;  // where none helps: the one that lacks least, if that is less than `recorded` does

  // The next best, with the settings of the recording, as far as the time allowed.
  std::optional<EmptiedCache> emptied;  // the last of the moments tried that helps
  // Only where none helps:
  uint64_t largest_served_bytes = 0;  // of a request in its place; 0: none
  // The bound with which it is served; none: it is beyond the capacity, or something before it would be refused.
  std::optional<uint64_t> needed_bound_bytes;
};

// A job is never quite the same twice: what has less to spare of `bound_bytes` may fail when it is used.
constexpr uint64_t EnoughToSpare(uint64_t bound_bytes) {
  return bound_bytes / 20;
}

// Which are tried, and how.
struct DiagnoseOptions {
  SettingsTarget target;
  int threads = 1;
  // Asked again and again, from any thread: false ends it with what was tried so far.
  std::function<bool()> may_go_on = [] { return true; };
  // From any thread, one at a time.
  std::function<void(size_t done, size_t total)> progress = [](size_t, size_t) {};
};

// Replays `trace` with the settings of `config` and with those of TuneGrid() that the target has. Of `config` only the
// settings are used. Where the recorded heap emptied its cache because it was short of memory, another one might not
// have to, and one that the program called for it would: both are tried, and what helps helps in both.
// REQUIRES: refusal.op is an allocation of `trace`, and the capacity holds what the trace starts with.
Diagnosis Diagnose(const Trace& trace, const ReplayConfig& config, const RefusalToDiagnose& refusal,
                   const DiagnoseOptions& options = {});

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_REPLAY_DIAGNOSE_H_
