// SPDX-License-Identifier: Apache-2.0
//
// ClaimMembers: records the claim of each process in a file of the socket directory. After a daemon was killed, the
// next daemon charges the memory of recorded processes to their claims before the processes reconnect. So no other
// member of the claim gets their room.
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

  // Returns the processes recorded by the last daemon and still running. Returns none when the file is unreadable, or
  // writable by other users. The returned processes then count as recorded by this daemon.
  ByProcess TakeOver() ABSL_LOCKS_EXCLUDED(mu_);
  // Records the process as a member of the claim. A failure to write the file is logged, once, and otherwise ignored.
  void Note(const ProcessId& process, absl::string_view claim) ABSL_LOCKS_EXCLUDED(mu_);
  // Like Note(), unless the process is recorded in another claim.
  void NoteUnlessKnown(const ProcessId& process, absl::string_view claim) ABSL_LOCKS_EXCLUDED(mu_);

  // Removes all members of the claim: a later claim of this name is a different claim.
  void Forget(absl::string_view claim) ABSL_LOCKS_EXCLUDED(mu_);

 private:
  void NoteLocked(const ProcessId& process, absl::string_view claim) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Writes `members_` to the file, without ended processes.
  absl::Status Rewrite() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const std::string path_;
  Mutex mu_;  // innermost
  ByProcess members_ ABSL_GUARDED_BY(mu_);
  UniqueFd file_ ABSL_GUARDED_BY(mu_);
  size_t lines_ ABSL_GUARDED_BY(mu_) = 0;
  size_t most_lines_ ABSL_GUARDED_BY(mu_) = 0;  // beyond, the file is rewritten
  bool has_warned_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_IDENTITY_CLAIM_MEMBERS_H_
