// SPDX-License-Identifier: Apache-2.0
#include "server/base/user_slots.h"

#include "absl/strings/str_cat.h"

namespace vrambroker {

absl::StatusOr<UserSlots::Slot> UserSlots::Take(const UserKey& user) {
  MutexLock lock(mu_);
  const auto it = of_user_.find(user);
  if (const size_t taken = it == of_user_.end() ? 0 : it->second; taken >= bounds_.per_uid) {
    return absl::ResourceExhaustedError(absl::StrCat(user.Text(), " has ", taken, " ", bounds_.what, ", the most that ",
                                                     bounds_.per_uid_bound, " allows; try again when one is done"));
  }
  if (in_all_ >= bounds_.in_all) {
    return absl::ResourceExhaustedError(absl::StrCat("the daemon has ", in_all_, " ", bounds_.what, ", the most that ",
                                                     bounds_.in_all_bound, " allows; try again when one is done"));
  }
  ++of_user_[user];
  ++in_all_;
  return Slot(this, user);
}

void UserSlots::GiveBack(const UserKey& user) {
  MutexLock lock(mu_);
  --in_all_;
  const auto it = of_user_.find(user);
  if (--it->second == 0) of_user_.erase(it);
}

}  // namespace vrambroker
