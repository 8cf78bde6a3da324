// SPDX-License-Identifier: Apache-2.0
//
// Explains a refusal for lack of memory beyond its figures: unused but unavailable memory, the reasons, and advice.
// Pure functions.
#ifndef VRAMBROKER_SERVER_OOM_OOM_ADVICE_H_
#define VRAMBROKER_SERVER_OOM_OOM_ADVICE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "server/oom/out_of_memory.h"

namespace vrambroker {

// Usage of the device by a session that was not refused. All sizes are bytes.
struct OtherSession {
  enum class Asked { kNo, kAnswered, kNoAnswer };  // to trim, for the refused request

  std::string client;
  uint64_t reserved_bytes = 0;
  uint64_t guarantee_bytes = 0;
  uint64_t active_bytes = 0;
  uint64_t unknown_bytes = 0;  // not known to be unused: see SessionDeviceView
  uint64_t inactive_split_bytes = 0;
  bool is_connected = true;
  Asked asked = Asked::kNo;
};

// Limits on the sessions named in a report, to keep its message far below gRPC's limit of 8 KiB.
inline constexpr size_t kMaxHolders = 3;
inline constexpr size_t kMaxIdleHolders = 5;

// Fills in the report's unused and detached memory of other sessions, and the holders of most unused memory. (Leaves
// out the largest holders, because the refused session may be among them.)
void AddOthers(absl::Span<const OtherSession> others, OomReport* report);

// Bytes reserved and not used by the refused session.
uint64_t OwnIdleBytes(const OomReport& report);

// Returns a sentence of advice matching the cause and the figures, at most 400 bytes.
std::string Advice(const OomReport& report);

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_OOM_OOM_ADVICE_H_
