// SPDX-License-Identifier: Apache-2.0
//
// A client of the count socket. Tests send any request, also requests that no honest client sends.
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

// The functions make requests of the current version.
CountRequest MakeCountRequest(vrambroker_count_call call, uint32_t device = 0, uint64_t bytes = 0);
CountRequest CountHello(absl::string_view name);
CountRequest CountHello(absl::string_view name, uint64_t limit_bytes);
CountRequest CountHello(absl::string_view name, double limit_fraction);
// Makes the request of a process that has lost the session with this token.
CountRequest CountHelloAgain(absl::string_view name, const CountToken& lost);
CountRequest CountJoin(const CountToken& token);
CountRequest CountWait(uint32_t device, uint64_t bytes, uint64_t wait_ms);

CountToken TokenOf(const CountAnswer& answer);
// Returns the answer's code and message.
absl::Status StatusOfAnswer(const CountAnswer& answer);

// A CountClient is a connection, and movable. The class needs no thread and takes no lock: a forked child may use the
// class.
class CountClient {
 public:
  // Connects to `socket_dir`, which may be the directory of a claim, and sends nothing yet.
  static absl::StatusOr<CountClient> Connect(const std::string& socket_dir);
  // Connects, and opens a session of this process. Errors come from the daemon.
  static absl::StatusOr<CountClient> Open(const std::string& socket_dir, const CountRequest& hello);
  // Opens a further connection of the same session.
  absl::StatusOr<CountClient> Join() const;

  // Returns any answer, also a refusal. An error means that no answer has come.
  absl::StatusOr<CountAnswer> Call(const CountRequest& request);
  // Send() and Receive() are the halves of Call(). A packet may have any size. Send() returns false when the connection
  // has ended.
  bool Send(const CountRequest& request) {
    return SendBytes({reinterpret_cast<const char*>(&request), sizeof request});
  }
  bool SendBytes(absl::string_view packet);
  // Returns Unavailable at the end of the connection, DeadlineExceeded when no answer comes.
  absl::StatusOr<CountAnswer> Receive(absl::Duration timeout = kPatience);
  // Tells whether the daemon has ended the connection.
  bool HasEnded();

  // Each call returns the daemon's answer.
  absl::Status Charge(uint64_t bytes, uint32_t device = 0);
  absl::Status Uncharge(uint64_t bytes, uint32_t device = 0);
  absl::Status Hold(uint64_t bytes, uint32_t device = 0);
  absl::Status Wait(uint64_t bytes, uint64_t wait_ms, uint32_t device = 0);
  absl::StatusOr<CountAnswer> Info(uint32_t device = 0);
  // Returns the session's charge by the daemon's account; all ones when the daemon does not answer.
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
