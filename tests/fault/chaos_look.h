// SPDX-License-Identifier: Apache-2.0
//
// What clients really have, seen from outside: the kernel's lists of their mappings, not the daemon's books.
#ifndef VRAMBROKER_TESTS_FAULT_CHAOS_LOOK_H_
#define VRAMBROKER_TESTS_FAULT_CHAOS_LOOK_H_

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"

namespace vrambroker::fault {

class Looks {
 public:
  struct Client {
    pid_t pid = 0;
    std::string role;
    uint64_t limit_bytes = 0;  // of each device
  };

  explicit Looks(uint64_t capacity_bytes) : capacity_bytes_(capacity_bytes) {}

  // Internal when one of these clients has more of a device mapped than its limit, or all together more than the
  // capacity, whichever daemon gave it. REQUIRES: all of them are stopped, so that this is one moment. A client that
  // has been killed meanwhile has nothing.
  absl::Status Look(const std::vector<Client>& clients);

  // Mapped by anybody now, of what any look saw the files of.
  uint64_t BytesLeft() const;

  uint64_t count() const { return count_; }
  uint64_t most_held() const { return most_held_; }                    // bytes of a device, of all clients at one look
  uint64_t most_of_one() const { return most_of_one_; }                // likewise of one client
  uint64_t most_with_children() const { return most_with_children_; }  // with what only their children still map

 private:
  const uint64_t capacity_bytes_;
  std::string name_;  // what the names of the daemon's files begin with; empty: none was seen yet
  uint64_t count_ = 0;
  uint64_t most_held_ = 0;
  uint64_t most_of_one_ = 0;
  uint64_t most_with_children_ = 0;
};

}  // namespace vrambroker::fault

#endif  // VRAMBROKER_TESTS_FAULT_CHAOS_LOOK_H_
