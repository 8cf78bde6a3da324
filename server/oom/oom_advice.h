// SPDX-License-Identifier: Apache-2.0
//
// What a refusal for lack of memory tells people beyond its figures: which unused memory could not be had and why, and
// what to do. Pure functions.
#ifndef VRAMBROKER_SERVER_OOM_OOM_ADVICE_H_
#define VRAMBROKER_SERVER_OOM_OOM_ADVICE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "server/oom/out_of_memory.h"

namespace vrambroker {

// What a session other than the refused one has on the device. All sizes are bytes.
struct OtherSession {
  enum class Asked { kNo, kAnswered, kNoAnswer };  // to trim, for this request

  std::string client;
  uint64_t reserved_bytes = 0;
  uint64_t guarantee_bytes = 0;
  uint64_t active_bytes = 0;
  uint64_t unknown_bytes = 0;  // not known to be unused: see SessionDeviceView
  uint64_t inactive_split_bytes = 0;
  bool is_connected = true;
  Asked asked = Asked::kNo;
};

// The most that a report names, so that its message stays far below the 8 KiB that gRPC allows.
inline constexpr size_t kMaxHolders = 3;
inline constexpr size_t kMaxIdleHolders = 5;

// Fills in what the report says of others: unused and detached memory, and those who hold most of the unused. (The
// largest holders are not here: the refused session may be one.)
void AddOthers(absl::Span<const OtherSession> others, OomReport* report);

// Bytes that the refused session has reserved and does not use.
uint64_t OwnIdleBytes(const OomReport& report);

// One sentence that fits the cause and the figures, at most 400 bytes.
std::string Advice(const OomReport& report);

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_OOM_OOM_ADVICE_H_
