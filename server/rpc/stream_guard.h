// SPDX-License-Identifier: Apache-2.0
//
// StreamGuard: defends against "rapid reset" (CVE-2023-44487), where a client opens streams and resets them at once, or
// closes the connection. The client never waits and the server never catches up. gRPC 1.51 has no defence.
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

// Effect of a frame on the streams of a connection.
enum class StreamEvent { kNone, kBegan, kCompleted, kReset };

// The open streams of a connection, tracked by the frames of both directions. For use on a single thread.
class StreamBook {
 public:
  // gRPC bounds a call's metadata only after reading all of it.
  static constexpr size_t kMaxHeaderBytes = 64 << 10;

  // InvalidArgument when a call's headers take more than kMaxHeaderBytes.
  absl::StatusOr<StreamEvent> FromClient(const Http2Frame& frame);
  StreamEvent FromServer(const Http2Frame& frame);

  size_t open() const { return open_.size(); }

 private:
  absl::flat_hash_set<uint32_t> open_;
  uint32_t last_ = 0;        // last stream begun by the client
  size_t header_bytes_ = 0;  // size of the latest headers, so far
};

// Bounds the use of streams by a process, and by a user over all processes. Outlives connections: otherwise an attacker
// would close each connection just before being caught. Credit cannot be saved up: completed streams make up for
// earlier resets only. For use on a single thread.
class StreamGuard {
 public:
  struct Bounds {
    double resets = 0;    // more resets than this, less the completed streams, are an attack
    double forgiven = 0;  // resets per second
    size_t open = 0;      // streams at a time
  };
  // A client that gives up a call resets a single stream. gRPC enforces its bound on open streams (256 per connection)
  // only for clients that acknowledge its settings.
  static constexpr Bounds kProcess = {.resets = 1000, .forgiven = 50, .open = 4096};
  static constexpr Bounds kUser = {.resets = 16'000, .forgiven = 800, .open = 16'384};
  static constexpr size_t kMaxOpenOfConnection = 1024;
  // When a user exceeds a bound, spares processes with no more resets, or no more open streams, than this.
  static constexpr double kSparedResets = 100;
  static constexpr size_t kSparedOpen = 256;
  // New connections of a user handed to gRPC, per second on average, and at once. Each connection takes gRPC a tenth of
  // a millisecond.
  static constexpr double kConnects = 500;
  static constexpr double kConnectsAtOnce = 1000;
  // Duration of an attacker's ban from connecting.
  static constexpr std::chrono::seconds kBanTime{10};

  struct Who {
    pid_t pid = 0;
    UserKey user;
  };

  // `open`: open streams of the connection. ResourceExhausted: close the connection; CheckConnect() then refuses the
  // process, or its user, for a while.
  absl::Status Began(Who who, size_t open, SteadyTime now);
  void Completed(Who who);
  // Counts `streams` resets at once. Streams still open when a connection ends count as reset, too.
  absl::Status Reset(Who who, size_t streams, SteadyTime now);

  // ResourceExhausted while `who` is banned from connecting.
  absl::Status CheckConnect(Who who, SteadyTime now) const;

  // False when the user has connected too often for gRPC to accept another connection now.
  bool MayOpen(const UserKey& user, SteadyTime now) { return OfUser(user, now).connects.Take(now); }

  // Number of remembered processes and users: those of the last seconds, and a few more.
  size_t remembered() const { return processes_.size() + users_.size(); }

 private:
  struct Conduct {
    explicit Conduct(const Bounds& bounds) : resets(bounds.forgiven, bounds.resets) {}
    TokenBucket resets;
    TokenBucket connects{kConnects, kConnectsAtOnce};
    size_t open = 0;
    SteadyTime banned_until = SteadyTime::min();
  };
  // A reused pid may belong to another user's process.
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
