// SPDX-License-Identifier: Apache-2.0
//
// Looks: the memory of clients seen from outside. Reads the kernel's lists of mappings, not the daemon's books.
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
    uint64_t limit_bytes = 0;  // limit for each device
  };

  explicit Looks(uint64_t capacity_bytes) : capacity_bytes_(capacity_bytes) {}

  // Returns Internal when a client has mapped more of a device than its limit, or when all clients together have mapped
  // more than the capacity, no matter which daemon gave the memory. A client killed meanwhile has no memory. REQUIRES:
  // all clients are stopped, so that the look is a single moment.
  absl::Status Look(const std::vector<Client>& clients);

  // Returns the bytes still mapped by any process, of the daemon whose files an earlier look has seen.
  uint64_t BytesLeft() const;

  uint64_t count() const { return count_; }
  uint64_t most_held() const { return most_held_; }      // most bytes of a device held by all clients in a look
  uint64_t most_of_one() const { return most_of_one_; }  // most bytes of a device held by a single client in a look
  uint64_t most_with_children() const {
    return most_with_children_;
  }  // most bytes in a look, with memory mapped only by children

 private:
  const uint64_t capacity_bytes_;
  std::string name_;  // beginning of the names of the daemon's files; empty: no file was seen yet
  uint64_t count_ = 0;
  uint64_t most_held_ = 0;
  uint64_t most_of_one_ = 0;
  uint64_t most_with_children_ = 0;
};

}  // namespace vrambroker::fault

#endif  // VRAMBROKER_TESTS_FAULT_CHAOS_LOOK_H_
