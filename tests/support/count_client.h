// SPDX-License-Identifier: Apache-2.0
//
// A client of the count socket that sends what it is told to, also what no honest client would.
#ifndef VRAMBROKER_TESTS_SUPPORT_COUNT_CLIENT_H_
#define VRAMBROKER_TESTS_SUPPORT_COUNT_CLIENT_H_

#include <sys/types.h>

#include <array>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "allocator/base/unique_fd.h"
#include "proto/vrambroker/v1/count_socket.h"
#include "tests/support/util.h"

namespace vrambroker::testing_support {

using CountRequest = vrambroker_count_request;
using CountAnswer = vrambroker_count_answer;
using CountToken = std::array<uint8_t, sizeof(CountAnswer::token)>;

// Requests of the current version.
CountRequest MakeCountRequest(vrambroker_count_call call, uint32_t device = 0, uint64_t bytes = 0);
CountRequest CountHello(absl::string_view name);
CountRequest CountHello(absl::string_view name, uint64_t limit_bytes);
CountRequest CountHello(absl::string_view name, double limit_fraction);
// Of a process that has lost the session with this token.
CountRequest CountHelloAgain(absl::string_view name, const CountToken& lost);
CountRequest CountJoin(const CountToken& token);
CountRequest CountWait(uint32_t device, uint64_t bytes, uint64_t wait_ms);

CountToken TokenOf(const CountAnswer& answer);
// What an answer says: its code, with its message.
absl::Status StatusOfAnswer(const CountAnswer& answer);

// One connection. Movable. Needs no thread and takes no lock: may be used in a forked child.
class CountClient {
 public:
  // To `socket_dir`, which may be a claim's. Nothing is said yet.
  static absl::StatusOr<CountClient> Connect(const std::string& socket_dir);
  // Connected, and a session of this process opened. The error is the daemon's.
  static absl::StatusOr<CountClient> Open(const std::string& socket_dir, const CountRequest& hello);
  // A further connection of the same session.
  absl::StatusOr<CountClient> Join() const;

  // The answer whatever it says; an error only when there is none.
  absl::StatusOr<CountAnswer> Call(const CountRequest& request);
  // The halves of Call(). A packet may be of any size. False: the connection has ended.
  bool Send(const CountRequest& request) {
    return SendBytes({reinterpret_cast<const char*>(&request), sizeof request});
  }
  bool SendBytes(absl::string_view packet);
  // Unavailable at the end of the connection, DeadlineExceeded when nothing comes.
  absl::StatusOr<CountAnswer> Receive(absl::Duration timeout = kPatience);
  // Whether the daemon has ended the connection. What it has sent before is lost.
  bool HasEnded();

  // What the daemon says to each of them.
  absl::Status Charge(uint64_t bytes, uint32_t device = 0);
  absl::Status Uncharge(uint64_t bytes, uint32_t device = 0);
  absl::Status Hold(uint64_t bytes, uint32_t device = 0);
  absl::Status Wait(uint64_t bytes, uint64_t wait_ms, uint32_t device = 0);
  absl::StatusOr<CountAnswer> Info(uint32_t device = 0);
  // What the session is charged by the daemon's own account; all ones when it does not say.
  uint64_t ChargedBytes(uint32_t device = 0);

  int fd() const { return socket_.get(); }
  void Close() { socket_.Reset(); }
  const std::string& socket_dir() const { return socket_dir_; }
  const CountAnswer& welcome() const { return welcome_; }
  uint64_t session() const { return welcome_.session; }
  const CountToken& token() const { return token_; }

 private:
  CountClient(std::string socket_dir, UniqueFd socket)
      : socket_dir_(std::move(socket_dir)), socket_(std::move(socket)) {}

  absl::Status Begin(const CountRequest& request);
  absl::Status Say(const CountRequest& request);

  std::string socket_dir_;
  UniqueFd socket_;
  CountAnswer welcome_ = {};
  CountToken token_ = {};
};

}  // namespace vrambroker::testing_support

#endif  // VRAMBROKER_TESTS_SUPPORT_COUNT_CLIENT_H_
