// SPDX-License-Identifier: Apache-2.0
//
// Against "rapid reset" (CVE-2023-44487): a client opens streams and resets them at once, so that it never waits and
// the server never catches up. gRPC 1.51 has no defence. Most of these calls never reach a handler, so gRPC's own books
// (channelz) are what counts them.
#ifndef VRAMBROKER_SERVER_RESET_GUARD_H_
#define VRAMBROKER_SERVER_RESET_GUARD_H_

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <optional>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "server/rate_limit.h"

namespace vrambroker {

// The streams of one HTTP/2 connection so far. Those that are neither completed nor reset are open.
struct StreamCounts {
  uint64_t started = 0;
  uint64_t completed = 0;
  uint64_t reset = 0;
};

// Finds gRPC's books on the connections that were handed to it. gRPC shows books while it is still writing them, and
// looking into those ends the process: see HandOver::Pause(). For one thread.
class StreamBooks {
 public:
  struct Found {
    intptr_t books = 0;
    int fd = -1;  // the connection's descriptor in gRPC
  };

  // The next books that gRPC opened, in their order, when `handed_over` connections were given to it so far; nullopt
  // when there are no more. Those of connections that have ended are left out.
  std::optional<Found> Next(intptr_t handed_over);
  // nullopt: the connection has ended.
  static std::optional<StreamCounts> CountsOf(intptr_t books);

 private:
  intptr_t last_ = 0;  // gRPC numbers its books from 1
};

// What one connection may do.
class StreamConduct {
 public:
  // More than these at once, beyond what it completes, is an attack: a client that gives up a call resets one stream.
  static constexpr uint64_t kMaxResets = 1000;
  // So many are forgiven a second.
  static constexpr uint64_t kForgiven = 50;

  // `max_open`: streams at a time. gRPC enforces this only for clients that acknowledge its settings.
  explicit StreamConduct(uint64_t max_open) : max_open_(max_open) {}

  // ResourceExhausted when the connection is to be closed. Completed streams do not count in advance: nobody can save
  // them up for an attack.
  absl::Status Judge(const StreamCounts& counts, SteadyTime now);

 private:
  const uint64_t max_open_;
  StreamCounts last_;
  uint64_t owed_ = 0;  // resets beyond what it completed
  SteadyTime forgave_ = SteadyTime::min();
};

// Who may not connect for a while, because connections of theirs were closed. For one thread.
class Banned {
 public:
  static constexpr std::chrono::seconds kTime{10};
  // Processes of one user that are banned at a time before all new connections of the user are refused.
  static constexpr size_t kMaxProcesses = 16;

  void Add(pid_t pid, uid_t uid, SteadyTime now);
  absl::Status Check(pid_t pid, uid_t uid, SteadyTime now) const;

 private:
  struct Entry {
    uid_t uid = 0;
    SteadyTime until;
  };
  absl::flat_hash_map<pid_t, Entry> processes_;
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_RESET_GUARD_H_
