// SPDX-License-Identifier: Apache-2.0
//
// Against "rapid reset" (CVE-2023-44487): a client opens streams and resets them at once, or closes the connection, so
// that it never waits and the server never catches up. gRPC 1.51 has no defence.
#ifndef VRAMBROKER_SERVER_RPC_STREAM_GUARD_H_
#define VRAMBROKER_SERVER_RPC_STREAM_GUARD_H_

#include <sys/types.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/base/rate_limit.h"
#include "server/rpc/http2_frames.h"

namespace vrambroker {

// What frames do to the streams of a connection.
enum class StreamEvent { kNone, kBegan, kCompleted, kReset };

// The open streams of one connection, by the frames of both directions. For one thread.
class StreamBook {
 public:
  // gRPC bounds a call's metadata only after it has taken all of it.
  static constexpr size_t kMaxHeaderBytes = 64 << 10;

  // InvalidArgument when a call's headers take more than kMaxHeaderBytes.
  absl::StatusOr<StreamEvent> FromClient(const Http2Frame& frame);
  StreamEvent FromServer(const Http2Frame& frame);

  size_t open() const { return open_.size(); }

 private:
  absl::flat_hash_set<uint32_t> open_;
  uint32_t last_ = 0;        // that the client began
  size_t header_bytes_ = 0;  // of the headers that came last, so far
};

// What processes, and users over all their processes, may do with streams. Outlives connections: otherwise an attacker
// closes each one just before it would be. Nothing is saved up either: completed streams make up for earlier resets
// only. For one thread.
class StreamGuard {
 public:
  struct Bounds {
    double resets = 0;    // more than these, beyond what is completed, are an attack
    double forgiven = 0;  // of them, a second
    size_t open = 0;      // streams at a time
  };
  // A client that gives up a call resets one stream. gRPC enforces its bound on open streams (256 of a connection) only
  // for clients that acknowledge its settings.
  static constexpr Bounds kProcess = {.resets = 1000, .forgiven = 50, .open = 4096};
  static constexpr Bounds kUser = {.resets = 16'000, .forgiven = 800, .open = 16'384};
  static constexpr size_t kMaxOpenOfConnection = 1024;
  // When a user is above a bound, the processes are spared that have given up no more calls, or have no more open.
  static constexpr double kSparedResets = 100;
  static constexpr size_t kSparedOpen = 256;
  // New connections of a user that gRPC gets, a second on average, and at once. Each takes it a tenth of a millisecond.
  static constexpr double kConnects = 500;
  static constexpr double kConnectsAtOnce = 1000;
  // An attacker may not connect for so long.
  static constexpr std::chrono::seconds kBanTime{10};

  struct Who {
    pid_t pid = 0;
    UserKey user;
  };

  // `open`: of the connection. ResourceExhausted when the connection is to be closed: from then on CheckConnect()
  // refuses the process, or its user, for a while.
  absl::Status Began(Who who, size_t open, SteadyTime now);
  void Completed(Who who);
  // So many at once. Those still open when a connection ends count as given up, too.
  absl::Status Reset(Who who, size_t streams, SteadyTime now);

  // ResourceExhausted while who asks may not connect.
  absl::Status CheckConnect(Who who, SteadyTime now) const;

  // False when its user has connected too often for gRPC to take another connection now.
  bool MayOpen(const UserKey& user, SteadyTime now) { return OfUser(user, now).connects.Take(now); }

  // Of how many processes and users something is remembered: those of the last seconds, and a few more.
  size_t remembered() const { return processes_.size() + users_.size(); }

 private:
  struct Conduct {
    explicit Conduct(const Bounds& bounds) : resets(bounds.forgiven, bounds.resets) {}
    TokenBucket resets;
    TokenBucket connects{kConnects, kConnectsAtOnce};
    size_t open = 0;
    SteadyTime banned_until = SteadyTime::min();
  };
  // A pid may be another user's process by now.
  using ProcessKey = std::pair<pid_t, UserKey>;

  Conduct& OfProcess(Who who, SteadyTime now);
  Conduct& OfUser(const UserKey& user, SteadyTime now);
  void EvictIdle(SteadyTime now);

  absl::flat_hash_map<ProcessKey, Conduct> processes_;
  absl::flat_hash_map<UserKey, Conduct> users_;
  size_t forget_at_ = 64;  // remembered
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_RPC_STREAM_GUARD_H_
