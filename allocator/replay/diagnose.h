// SPDX-License-Identifier: Apache-2.0
//
// Diagnose: would other settings have served a refused request? Every answer was tried: by a replay of the recording up
// to the request, and then of the request.
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

// RefusalToDiagnose: the request, and the session's memory then.
struct RefusalToDiagnose {
  size_t op = 0;                 // index in the trace of the refused allocation
  uint64_t requested_bytes = 0;  // before rounding; below kMaxRequestBytes
  uint64_t bound_bytes = 0;      // most bytes possible for the session then, with the bytes held
  // Bytes reserved in the session's account. Bytes outside the heap (segments on their way back, memory carried over)
  // take their part of the bound under any settings.
  uint64_t reserved_bytes = 0;
  uint64_t capacity_bytes = 0;  // of the device; at least `bound_bytes`
  // True if the bound is the session's limit, by which garbage is collected, too. Else nothing was collected, or by
  // another limit, and collecting is not tried.
  bool is_limit = false;

  // No setting serves the request: it is larger than everything the session could have.
  bool never_fits() const { return requested_bytes > bound_bytes; }
};

struct Trial {
  AllocatorOptions options;
  bool is_served = false;
  uint64_t refused_before = 0;        // earlier allocations refused in the replay, but not in the recording
  uint64_t missing_bytes = 0;         // bytes of the request's segment beyond the bound; 0 if served
  uint64_t peak_allocated_bytes = 0;  // up to the request, with the request if served
  uint64_t peak_reserved_bytes = 0;
  uint64_t device_calls = 0;  // segments obtained and given back
  // Bytes by which the bound could be lower with helping settings, as far as tried. 0 for all others.
  uint64_t spare_bytes = 0;

  // Served, and nothing was refused on the way.
  bool Helps() const { return is_served && refused_before == 0; }
};

// Emptying the cache once, before an allocation or free of the trace.
struct EmptiedCache {
  size_t op = 0;
  // Calls of the program from there to the request, without the request. The trace has more operations, by the heap
  // itself.
  uint64_t calls_before = 0;     // allocations (also refused) and frees
  uint64_t allocated_bytes = 0;  // when emptying
  Trial trial;
};

struct Diagnosis {
  Trial recorded;           // with the settings of the recording; if served, the replay does not show the refusal
  size_t tried = 0;         // other settings; 0 if the request never_fits()
  bool is_complete = true;  // false: time ran out before all was tried, or even before the recording was replayed
  // Sorted: enough to spare (EnoughToSpare()) first, then the least reserved, then the simplest; at most kBest.
  std::vector<Trial> helping;
  static constexpr size_t kBest = 4;
  std::optional<Trial> nearest;  // if none helps: the trial lacking least, if less than `recorded` lacks

  // Next best, with the settings of the recording, as far as time allowed.
  std::optional<EmptiedCache> emptied;  // last of the moments tried with success
  // Only if nothing helps:
  uint64_t largest_served_bytes = 0;  // of a request instead; 0: none
  // Bound sufficient for the request; nullopt: beyond the capacity, or an earlier allocation would be refused.
  std::optional<uint64_t> needed_bound_bytes;
};

// A job is never quite the same twice: settings with less to spare of `bound_bytes` may fail in use.
constexpr uint64_t EnoughToSpare(uint64_t bound_bytes) {
  return bound_bytes / 20;
}

// Settings to try, and how.
struct DiagnoseOptions {
  SettingsTarget target;
  int threads = 1;
  // Asked again and again, from any thread: false ends the search with the results so far.
  std::function<bool()> may_go_on = [] { return true; };
  // Called from any thread, by one at a time.
  std::function<void(size_t done, size_t total)> progress = [](size_t, size_t) {};
};

// Replays `trace` with the settings of `config` and with the settings of TuneGrid() known to the target. Uses nothing
// else of `config`. The recorded heap may have emptied its cache for lack of memory: other settings might not need the
// flush, unless the program asked for it. Both cases are tried, and helping settings help in both. REQUIRES: refusal.op
// is an allocation of `trace`, and the capacity suffices for the start of the trace.
Diagnosis Diagnose(const Trace& trace, const ReplayConfig& config, const RefusalToDiagnose& refusal,
                   const DiagnoseOptions& options = {});

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_REPLAY_DIAGNOSE_H_
