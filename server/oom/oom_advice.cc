// SPDX-License-Identifier: Apache-2.0
#include "server/oom/oom_advice.h"

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "allocator/base/bytes.h"
#include "allocator/heap/size_class.h"
#include "server/base/saturating.h"

namespace vrambroker {
namespace {

std::string AdviceOnSize(const OomReport& report) {
  if (report.requested_bytes >= kMaxRequestBytes) {
    return "Check how the size was computed: no device has that much memory, so it may be a negative number or an "
           "overflow.";
  }
  return absl::StrCat("Ask for less at a time: the device's capacity of ", FormatBytes(report.capacity_bytes),
                      " could never hold this request, however long it waits.");
}

// Rounds up to whole MiB, in the format of `vramctl limit`.
std::string WholeMib(uint64_t bytes) {
  return absl::StrCat(RoundUpTo(bytes, 1_MiB) / 1_MiB, "MiB");
}

// Advises how to free `missing` bytes more of the device for the session; empty: no useful advice.
std::string MoreOfTheDevice(const OomReport& report, uint64_t missing) {
  if (report.kept_free_bytes >= missing) {
    return absl::StrCat("lower other sessions' guarantees, for which ", FormatBytes(report.kept_free_bytes),
                        " is kept free");
  }
  const uint64_t left = report.left_behind_bytes;
  if (left >= missing) {
    return absl::StrCat("wait until ", FormatBytes(left),
                        " of ended processes are free (vramctl quarantine names who has them open)");
  }
  if (report.detached_bytes >= missing) {
    return absl::StrCat("end the processes of sessions that disconnected or were ended, which still hold ",
                        FormatBytes(report.detached_bytes));
  }
  constexpr char kAndWait[] = " and wait for what ended processes left (vramctl quarantine)";
  if (QuarantinedBytes(report) >= missing) {
    return absl::StrCat("end processes of disconnected and ended sessions", kAndWait);
  }
  const uint64_t others = SaturatingSub(report.capacity_bytes,
                                        report.available_bytes + report.reserved_bytes + report.outside_bytes + left);
  if (others >= missing) {
    return absl::StrCat("have other sessions give ", FormatBytes(missing), " back (vramctl sessions)");
  }
  if (others + left >= missing) {
    return absl::StrCat("have other sessions give ", FormatBytes(missing - left), " back", kAndWait);
  }
  if (report.outside_bytes >= missing) return "end programs outside vrambroker that use the device (nvidia-smi)";
  return "";
}

// Text to follow "have the limit raised".
const char* HowToRaiseIt(const OomReport& report) {
  if (report.claim.empty()) return "";
  return report.is_in_by_socket ? " (vramctl claim set)"
                                : " (claim_limit in the daemon's configuration, or vramctl claim set)";
}

// Advises how to obtain the segment; every bound in the way has to give. Empty: the device is too small.
std::string MoreRoom(const OomReport& report) {
  if (report.reserved_bytes + report.segment_bytes > report.capacity_bytes) return "";
  const Rooms rooms = RoomsOf(report);
  std::vector<std::string> needed;
  if (rooms.limit < report.segment_bytes) {
    needed.push_back(absl::StrCat("raise the session's limit to ",
                                  WholeMib(report.reserved_bytes + report.segment_bytes), " (vramctl limit)"));
  }
  if (rooms.share < report.segment_bytes) {
    const uint64_t growth = SaturatingSub(report.segment_bytes, UnusedGuaranteeBytes(report));
    needed.push_back(absl::StrCat("have ", ShareLimitName(report), " raised to ",
                                  WholeMib(report.share_used_bytes + growth), HowToRaiseIt(report)));
  }
  if (rooms.device < report.segment_bytes) {
    const std::string more = MoreOfTheDevice(report, report.segment_bytes - rooms.device);
    if (more.empty()) return "";
    needed.push_back(more);
  }
  return absl::StrJoin(needed, " and ");
}

// Whether the application uses an allocator of its own, such as PyTorch's: the daemon cannot see its blocks.
bool IsApplications(const OomReport& report) {
  return report.holes.count == 0;
}

const char* FreePinned(const OomReport& report) {
  return IsApplications(report) ? "Free memory that keeps partly used segments"
                                : "Free the blocks that pin partly used segments (vramctl map shows these)";
}

// Names no setting: only a trial shows which setting would have helped.
std::string AdviceOnFragmentation(const OomReport& report) {
  const std::string more = MoreRoom(report);
  const std::string tries =
      IsApplications(report) ? "vramctl tune tries them on a snapshot of PyTorch's (torch.cuda.memory._dump_snapshot)."
      : report.is_recorded   ? absl::StrCat("vramctl ooms --diagnose ", report.refusal, " tries them.")
                             : "vramctl tune tries them on a recording of this session (vramctl trace).";
  return absl::StrCat(FreePinned(report), more.empty() ? "" : absl::StrCat(", or ", more),
                      ", or look for settings that make fewer holes: ", tries);
}

// Names the bound in the way beside the session's own limit: "user_limit leaves it only 5.00 MiB".
std::string OnlySpare(const OomReport& report) {
  const Rooms rooms = RoomsOf(report);
  return rooms.share < rooms.device ? absl::StrCat(ShareLimitName(report), " leaves it only ", FormatBytes(rooms.share))
                                    : absl::StrCat("the device has only ", FormatBytes(rooms.device), " to spare");
}

// Names the sessions of the share that could give up enough memory: this session, other sessions, or both.
std::string GiveUpForShare(const OomReport& report) {
  const std::string others_of =
      report.claim.empty()
          ? " or trim other sessions of this user (vramctl sessions)"
          : absl::StrCat(" or trim other sessions of this claim (vramctl claim show ", report.claim, ")");
  const Rooms rooms = RoomsOf(report);
  const uint64_t own = std::max(report.reserved_bytes, report.guarantee_bytes);
  const uint64_t others = SaturatingSub(report.share_used_bytes, own);
  if (std::min({rooms.limit, rooms.share + others, rooms.device + others}) >= report.segment_bytes) {
    return absl::StrCat("End", others_of);
  }
  const bool is_own_enough = SaturatingSub(report.share_limit_bytes, others) >= report.segment_bytes;
  return absl::StrCat("Free some of this session's memory", is_own_enough ? "" : " and end",
                      is_own_enough ? "" : others_of);
}

std::string AdviceOnShareLimit(const OomReport& report) {
  if (HasNothingOfDevice(report)) {
    return absl::StrCat("Use a device that it has (vramctl claim show ", report.claim,
                        "): CUDA_VISIBLE_DEVICES says which ones a program sees.");
  }
  const Rooms rooms = RoomsOf(report);
  const std::string limit = ShareLimitName(report);
  const std::string raised = report.claim.empty() ? "user_limit raised in the daemon's configuration"
                                                  : absl::StrCat(limit, " raised", HowToRaiseIt(report));
  if (report.segment_bytes > report.share_limit_bytes) {
    constexpr char kHopeless[] = "it could never hold this request";
    if (rooms.device >= report.segment_bytes) {
      return absl::StrCat("Have ", raised, " or ask for less: ", kHopeless, ".");
    }
    return absl::StrCat("Ask for less, since ", limit, " is so low that ", kHopeless,
                        ", and a higher one alone would not help: the device has only ", FormatBytes(rooms.device),
                        " to spare.");
  }
  const std::string give = GiveUpForShare(report);
  if (rooms.device < report.segment_bytes) {
    return absl::StrCat(give, ": raising ", limit, " alone would not help, since the device has only ",
                        FormatBytes(rooms.device), " to spare.");
  }
  return absl::StrCat(give, ", or have ", raised,
                      rooms.limit < report.segment_bytes ? " and the session's limit, too (vramctl limit)." : ".");
}

std::string AdviceOnLimit(const OomReport& report) {
  if (!report.named_devices.empty()) {
    return "Use one of those, or have the program name this one, too, when it connects (VRAMBROKER_DEVICES).";
  }
  if (IsShareLimit(report)) return AdviceOnShareLimit(report);
  const Rooms rooms = RoomsOf(report);
  if (rooms.limit >= report.segment_bytes) {
    return "Try again, since it would fit by now; where throw_on_cudamalloc_oom is set, it refuses before the cache is "
           "emptied.";
  }
  const bool is_never_enough = report.segment_bytes > report.limit_bytes;
  if (std::min(rooms.share, rooms.device) < report.segment_bytes) {
    return absl::StrCat(is_never_enough ? "Ask for less, since the limit could never hold this request"
                                        : "Free some of this session's memory or use smaller batches",
                        ": a higher limit alone would not help, since ", OnlySpare(report), ".");
  }
  return is_never_enough
             ? "Raise the session's limit (vramctl limit), start it with a higher one, or ask for less: the limit "
               "could "
               "never hold this request."
             : absl::StrCat(
                   "Raise the session's limit (vramctl limit) or free some of this session's memory: the device "
                   "has ",
                   FormatBytes(rooms.device), " to spare.");
}

// Returns the reason shared by most of the named unused bytes.
IdleWhy MainReason(const std::vector<OomReport::IdleHolder>& holders) {
  std::array<uint64_t, kIdleWhys.size()> bytes{};
  for (const OomReport::IdleHolder& holder : holders) bytes[static_cast<size_t>(holder.why)] += holder.idle_bytes;
  return static_cast<IdleWhy>(std::max_element(bytes.begin(), bytes.end()) - bytes.begin());
}

// REQUIRES: idle_holders is not empty.
std::string AdviceOnIdle(const OomReport& report) {
  const IdleWhy why = MainReason(report.idle_holders);
  const auto holder = std::find_if(report.idle_holders.begin(), report.idle_holders.end(),
                                   [&](const OomReport::IdleHolder& candidate) { return candidate.why == why; });
  std::string what = absl::StrCat(holder->client, " holds ", FormatBytes(holder->idle_bytes), " unused");
  switch (why) {
    case IdleWhy::kWithinGuarantee:
      return absl::StrCat(what, " within its guarantee: lower that guarantee, or wait until the session ends.");
    case IdleWhy::kInPartUsed:
      return absl::StrCat(
          what,
          " in partly used segments, which cannot be taken back before it frees the blocks in them: end "
          "or restart it.");
    case IdleWhy::kDidNotAnswer:
      return absl::StrCat(what,
                          " and did not answer when asked to return it: check whether its process hangs or is stopped "
                          "(vramctl sessions).");
    case IdleWhy::kDisconnected:
      return absl::StrCat(what, " and has lost its connection: end its process if it hangs (vramctl sessions).");
    case IdleWhy::kNotAsked:
      return absl::StrCat(what, ": trim it (vramctl trim), or call empty_cache in its framework.");
    case IdleWhy::kKept:
      return absl::StrCat(
          what, " and returned less than it was asked for: try again, since its GPU work may still use the memory.");
  }
  return what;
}

// The device is too small for the allocated memory plus the request, and the session's holes block the remaining room:
// with holes, the session reaches its limit before the device's. Waiting would be in vain.
std::string AdviceOnCapacityAndHoles(const OomReport& report) {
  const uint64_t missing = SaturatingSub(report.block_bytes, RoomsWithoutHoles(report).device);
  const std::string more = MoreOfTheDevice(report, missing);
  if (more.empty()) return "Free some of this session's memory or use smaller batches: the device has too little.";
  return absl::StrCat(FreePinned(report), ", and ", more, ".");
}

// REQUIRES: `missing` bytes are quarantined. Bytes of a detached session return when its process ends. Bytes of an
// ended process offer no process to end, unless another process has the memory open.
std::string AdviceOnQuarantine(const OomReport& report, uint64_t missing) {
  if (report.left_behind_bytes < missing && report.detached_bytes >= missing) {
    return absl::StrCat(
        "End the processes of sessions that disconnected or were ended (vramctl sessions): they still hold ",
        FormatBytes(report.detached_bytes), ".");
  }
  const std::string first =
      report.left_behind_bytes >= missing
          ? "Wait"
          : absl::StrCat(
                "End the processes of sessions that disconnected or were ended (vramctl sessions), which still hold ",
                FormatBytes(report.detached_bytes), ", and wait");
  return absl::StrCat(first, " for the ", FormatBytes(report.left_behind_bytes),
                      " that ended processes left behind: free after settle_time, once no other process has them "
                      "open (vramctl quarantine).");
}

std::string AdviceOnCapacity(const OomReport& report) {
  if (report.held_back) {
    return "Try again in a moment, give the request a wait time, or the session a higher priority (vramctl priority): "
           "free memory is kept for hold_back_time for a request that has waited longer (vramctl sessions).";
  }
  const Rooms rooms = RoomsOf(report);
  if (std::min(rooms.limit, rooms.share) < report.segment_bytes) return AdviceOnCapacityAndHoles(report);
  const uint64_t room = rooms.device;
  if (room >= report.segment_bytes) {
    return absl::StrCat("Try again, or look for programs outside vrambroker that use the device (nvidia-smi): ",
                        FormatBytes(room), " should be free, but the driver did not have that much.");
  }
  if (report.available_bytes >= report.segment_bytes) {
    return absl::StrCat(
        "Try again once other sessions have ended, or lower other sessions' guarantees (vramctl guarantee): ",
        FormatBytes(report.kept_free_bytes), " of the free memory is kept for them.");
  }
  if (!report.names_others)
    return "Return free segments and try again; if the request is refused, the error names the largest holders.";
  const uint64_t missing = report.segment_bytes - room;
  if (QuarantinedBytes(report) >= missing) return AdviceOnQuarantine(report, missing);
  if (report.idle_elsewhere_bytes >= missing && !report.idle_holders.empty()) return AdviceOnIdle(report);
  if (report.outside_bytes >= missing) {
    return absl::StrCat(
        "End programs outside vrambroker that use the device (nvidia-smi), or run fewer processes: CUDA "
        "contexts and such programs leave ",
        FormatBytes(report.outside_bytes), " less of the device than its capacity.");
  }
  // The cause is really capacity.
  const std::string largest =
      report.largest_holders.empty()
          ? "the device is full"
          : absl::StrCat("the device is full of memory in use, and ", report.largest_holders.front().client,
                         " uses the most (", FormatBytes(report.largest_holders.front().allocated_bytes), ")");
  if (report.waited_ms > 0) {
    return absl::StrCat("Run fewer programs on the device, or use smaller batches: ", largest, "; waiting for ",
                        report.waited_ms, " ms did not change that.");
  }
  return absl::StrCat(
      "Give the request a wait time, run fewer programs on the device, or use smaller batches: ", largest, ".");
}

}  // namespace

void AddOthers(absl::Span<const OtherSession> others, OomReport* report) {
  report->names_others = true;
  std::vector<OomReport::IdleHolder>& holders = report->idle_holders;
  for (const OtherSession& other : others) {
    const uint64_t idle = SaturatingSub(other.reserved_bytes, other.active_bytes + other.unknown_bytes);
    report->idle_elsewhere_bytes += idle;
    const auto add = [&](IdleWhy why, uint64_t bytes) {
      if (bytes > 0) holders.push_back({.client = other.client, .idle_bytes = bytes, .why = why});
    };
    if (!other.is_connected) {
      report->detached_bytes += other.reserved_bytes;
      add(IdleWhy::kDisconnected, idle);
      continue;
    }
    const uint64_t in_part_used = std::min(idle, other.inactive_split_bytes);
    const uint64_t whole = idle - in_part_used;
    const uint64_t above_guarantee = std::min(whole, SaturatingSub(other.reserved_bytes, other.guarantee_bytes));
    add(IdleWhy::kInPartUsed, in_part_used);
    add(IdleWhy::kWithinGuarantee, whole - above_guarantee);
    switch (other.asked) {
      case OtherSession::Asked::kNo:
        add(IdleWhy::kNotAsked, above_guarantee);
        break;
      case OtherSession::Asked::kAnswered:
        add(IdleWhy::kKept, above_guarantee);
        break;
      case OtherSession::Asked::kNoAnswer:
        add(IdleWhy::kDidNotAnswer, above_guarantee);
        break;
    }
  }
  std::stable_sort(holders.begin(), holders.end(),
                   [](const auto& a, const auto& b) { return a.idle_bytes > b.idle_bytes; });
  if (holders.size() > kMaxIdleHolders) holders.resize(kMaxIdleHolders);
}

uint64_t OwnIdleBytes(const OomReport& report) {
  return SaturatingSub(report.reserved_bytes, report.allocated_bytes + report.unknown_bytes);
}

std::string Advice(const OomReport& report) {
  switch (report.cause) {
    case OomCause::kLimit:
      return AdviceOnLimit(report);
    case OomCause::kCapacity:
      return AdviceOnCapacity(report);
    case OomCause::kFragmentation:
      return AdviceOnFragmentation(report);
    case OomCause::kLargerThanDevice:
      return AdviceOnSize(report);
  }
  return "";
}

}  // namespace vrambroker
