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

// Passes on what a client and the daemon say to each other, on both sockets, and can break their connections. It hides
// from the daemon that a client no longer waits for an answer. It must run in the client's process, so that the kernel
// names the right one to the daemon. Thread-safe.
class Proxy {
 public:
  // Serves clients that connect to `dir`, an empty directory, for the daemon that serves `daemon_dir`.
  static absl::StatusOr<std::unique_ptr<Proxy>> Start(const std::string& dir, const std::string& daemon_dir);
  ~Proxy();
  Proxy(const Proxy&) = delete;
  Proxy& operator=(const Proxy&) = delete;

  enum class Which { kBoth, kGrpc, kDescriptors };  // on which socket

  // Breaks all connections, as they would if the network did. Nothing of theirs is held back any more. On the
  // descriptor socket the client still gets what the daemon has sent, as it does over a socket of the kernel's.
  void Break(Which which = Which::kBoth) ABSL_LOCKS_EXCLUDED(mu_);
  // What clients send over the connections that there are is lost from now on.
  void Swallow() ABSL_LOCKS_EXCLUDED(mu_) { Set(Fate::kLost, Which::kBoth); }
  // What clients send over the connections that there are is not read from now on, until Break() or PassOn(): they have
  // to wait.
  void Stall(Which which = Which::kBoth) ABSL_LOCKS_EXCLUDED(mu_) { Set(Fate::kUnread, which); }
  // What the daemon sends arrives without descriptors from now on, as where the client can have no more of them.
  void DropDescriptors() { drops_descriptors_ = true; }
  void PassOn() ABSL_LOCKS_EXCLUDED(mu_) { Set(Fate::kPassedOn, Which::kBoth); }
  // How often something was stalled.
  int stalled() const { return stalled_; }
  // How often something of the daemon's was held back.
  int held() const { return held_; }
  // How many calls came over the descriptor socket.
  int segment_calls() const { return segment_calls_; }
  // Holds back all that the daemon sends, until Release(); also over later connections.
  void Hold(Which which = Which::kBoth) ABSL_LOCKS_EXCLUDED(mu_) { SetHeld(true, which); }
  void Release(Which which = Which::kBoth) ABSL_LOCKS_EXCLUDED(mu_) { SetHeld(false, which); }

 private:
  // One of the sockets.
  struct Listener {
    Which which = Which::kGrpc;
    const char* name = nullptr;
    int type = 0;
    UniqueFd fd = {};
    std::thread acceptor = {};
  };
  enum class Fate { kPassedOn, kLost, kUnread, kBroken };  // of what a client sends
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
