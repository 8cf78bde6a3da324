// SPDX-License-Identifier: Apache-2.0
//
// UserSlots: bounds on costly work under way, per user and in all.
#ifndef VRAMBROKER_SERVER_BASE_USER_SLOTS_H_
#define VRAMBROKER_SERVER_BASE_USER_SLOTS_H_

#include <sys/types.h>

#include <cstddef>
#include <limits>
#include <string>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "allocator/base/mutex.h"
#include "server/base/user_key.h"

namespace vrambroker {

// Thread-safe.
class UserSlots {
 public:
  // Words for refusals: "uid 5 has 4 SNAPSHOTS UNDER WAY, the most that MAX_SNAPSHOTS_PER_UID allows".
  struct Bounds {
    std::string what;
    size_t per_uid = std::numeric_limits<size_t>::max();
    std::string per_uid_bound;  // usually a field of the configuration
    size_t in_all = std::numeric_limits<size_t>::max();
    std::string in_all_bound;
  };

  // A taken slot; given back by its destructor. Outlived by the UserSlots. Move-only.
  class Slot {
   public:
    Slot() = default;
    Slot(Slot&& other) noexcept : slots_(std::exchange(other.slots_, nullptr)), user_(other.user_) {}
    Slot& operator=(Slot&& other) noexcept {
      std::swap(slots_, other.slots_);
      std::swap(user_, other.user_);
      return *this;
    }
    ~Slot() {
      if (slots_ != nullptr) slots_->GiveBack(user_);
    }

   private:
    friend class UserSlots;
    Slot(UserSlots* slots, const UserKey& user) : slots_(slots), user_(user) {}

    UserSlots* slots_ = nullptr;
    UserKey user_;
  };

  explicit UserSlots(Bounds bounds) : bounds_(std::move(bounds)) {}
  UserSlots(const UserSlots&) = delete;
  UserSlots& operator=(const UserSlots&) = delete;
  ~UserSlots() { MutexLock lock(mu_); }  // the thread giving the last slot back has left

  // ResourceExhausted when the user, or all users together, have the maximum.
  absl::StatusOr<Slot> Take(const UserKey& user) ABSL_LOCKS_EXCLUDED(mu_);

 private:
  void GiveBack(const UserKey& user) ABSL_LOCKS_EXCLUDED(mu_);

  const Bounds bounds_;
  Mutex mu_;
  absl::flat_hash_map<UserKey, size_t> of_user_ ABSL_GUARDED_BY(mu_);  // never 0
  size_t in_all_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_BASE_USER_SLOTS_H_
