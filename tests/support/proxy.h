// SPDX-License-Identifier: Apache-2.0
#ifndef VRAMBROKER_TESTS_SUPPORT_PROXY_H_
#define VRAMBROKER_TESTS_SUPPORT_PROXY_H_

#include <sys/socket.h>

#include <array>
#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "allocator/base/mutex.h"
#include "allocator/base/unique_fd.h"

namespace vrambroker::testing_support {

// Passes on data between a client and the daemon, on both sockets, and can break the connections. The proxy hides from
// the daemon that a client no longer waits for an answer. The proxy must run in the client's process, so that the
// kernel names the client's process to the daemon. The class is thread-safe.
class Proxy {
 public:
  // Serves clients that connect to `dir`, an empty directory, for the daemon that serves `daemon_dir`.
  static absl::StatusOr<std::unique_ptr<Proxy>> Start(const std::string& dir, const std::string& daemon_dir);
  ~Proxy();
  Proxy(const Proxy&) = delete;
  Proxy& operator=(const Proxy&) = delete;

  enum class Which { kBoth, kGrpc, kDescriptors };  // names the socket

  // Breaks all connections, like a failing network, and releases data that was held back. On the descriptor socket the
  // client still gets data that the daemon has sent, like over a socket of the kernel.
  void Break(Which which = Which::kBoth) ABSL_LOCKS_EXCLUDED(mu_);
  // Loses data that clients send over existing connections from now on.
  void Swallow() ABSL_LOCKS_EXCLUDED(mu_) { Set(Fate::kLost, Which::kBoth); }
  // Stops reading from existing connections until Break() or PassOn(): clients have to wait.
  void Stall(Which which = Which::kBoth) ABSL_LOCKS_EXCLUDED(mu_) { Set(Fate::kUnread, which); }
  // Drops the descriptors of the daemon's messages from now on, like a client that can have no more descriptors.
  void DropDescriptors() { drops_descriptors_ = true; }
  void PassOn() ABSL_LOCKS_EXCLUDED(mu_) { Set(Fate::kPassedOn, Which::kBoth); }
  // Returns how often data was stalled.
  int stalled() const { return stalled_; }
  // Returns how often data from the daemon was held back.
  int held() const { return held_; }
  // Returns the number of calls over the descriptor socket.
  int segment_calls() const { return segment_calls_; }
  // Holds back all data from the daemon until Release(), also on later connections.
  void Hold(Which which = Which::kBoth) ABSL_LOCKS_EXCLUDED(mu_) { SetHeld(true, which); }
  void Release(Which which = Which::kBoth) ABSL_LOCKS_EXCLUDED(mu_) { SetHeld(false, which); }

 private:
  // A Listener serves either socket.
  struct Listener {
    Which which = Which::kGrpc;
    const char* name = nullptr;
    int type = 0;
    UniqueFd fd = {};
    std::thread acceptor = {};
  };
  enum class Fate { kPassedOn, kLost, kUnread, kBroken };  // describes the fate of a client's data
  struct Connection {
    Which which = Which::kGrpc;
    UniqueFd client;
    UniqueFd daemon;
    std::unique_ptr<std::atomic<Fate>> fate;
    std::thread up;
    std::thread down;
  };

  explicit Proxy(std::string daemon_dir) : daemon_dir_(std::move(daemon_dir)) {}
  void Set(Fate fate, Which which) ABSL_LOCKS_EXCLUDED(mu_);
  void Accept(const Listener& listener);
  void SetHeld(bool held, Which which) ABSL_LOCKS_EXCLUDED(mu_);
  void AwaitRelease(Which which, const std::atomic<Fate>& fate) ABSL_LOCKS_EXCLUDED(mu_);

  const std::string daemon_dir_;
  std::array<Listener, 2> listeners_{
      {{.which = Which::kGrpc, .name = "/vrambroker.sock", .type = SOCK_STREAM},
       {.which = Which::kDescriptors, .name = "/vrambroker-fd.sock", .type = SOCK_SEQPACKET}}};
  Mutex mu_;
  bool grpc_held_ ABSL_GUARDED_BY(mu_) = false;
  bool descriptors_held_ ABSL_GUARDED_BY(mu_) = false;
  CondVar released_;
  std::atomic<bool> drops_descriptors_{false};
  std::atomic<int> stalled_{0};
  std::atomic<int> held_{0};
  std::atomic<int> segment_calls_{0};
  std::vector<Connection> connections_ ABSL_GUARDED_BY(mu_);
};

}  // namespace vrambroker::testing_support

#endif  // VRAMBROKER_TESTS_SUPPORT_PROXY_H_
