// SPDX-License-Identifier: Apache-2.0
//
// ClaimMembers: which processes are in which claim, in a file of the socket directory. The next daemon, after one that
// was killed, charges what these processes hold to their claims before they have connected to it: nobody else in the
// claim gets the room that they take.
#ifndef VRAMBROKER_SERVER_IDENTITY_CLAIM_MEMBERS_H_
#define VRAMBROKER_SERVER_IDENTITY_CLAIM_MEMBERS_H_

#include <cstddef>
#include <string>
#include <utility>

#include "absl/container/btree_map.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "allocator/base/mutex.h"
#include "allocator/base/unique_fd.h"
#include "allocator/device/device.h"

namespace vrambroker {

// Thread-safe.
class ClaimMembers {
 public:
  using ByProcess = absl::btree_map<ProcessId, std::string>;  // names of claims

  explicit ClaimMembers(std::string path) : path_(std::move(path)) {}

  // Those that the last daemon has noted, and that run still. None where the file cannot be read, or others could have
  // written it. From then on they are noted as those of this daemon.
  ByProcess TakeOver() ABSL_LOCKS_EXCLUDED(mu_);
  // The process is in the claim. When the file cannot be written that is logged, once, and has no other effect.
  void Note(const ProcessId& process, absl::string_view claim) ABSL_LOCKS_EXCLUDED(mu_);
  // The same, unless it is noted to be in another one.
  void NoteUnlessKnown(const ProcessId& process, absl::string_view claim) ABSL_LOCKS_EXCLUDED(mu_);

  // Nobody is in a claim of this name any more: the next one is another.
  void Forget(absl::string_view claim) ABSL_LOCKS_EXCLUDED(mu_);

 private:
  void NoteLocked(const ProcessId& process, absl::string_view claim) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // The file has `members_`, without those that have ended.
  absl::Status Rewrite() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const std::string path_;
  Mutex mu_;  // innermost
  ByProcess members_ ABSL_GUARDED_BY(mu_);
  UniqueFd file_ ABSL_GUARDED_BY(mu_);
  size_t lines_ ABSL_GUARDED_BY(mu_) = 0;
  size_t most_lines_ ABSL_GUARDED_BY(mu_) = 0;  // then the file is written anew
  bool has_warned_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_IDENTITY_CLAIM_MEMBERS_H_
