// SPDX-License-Identifier: Apache-2.0
#include "tests/support/count_client.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "tests/support/unix_client.h"

namespace vrambroker::testing_support {

// ---- Requests and answers ----

CountRequest MakeCountRequest(vrambroker_count_call call, uint32_t device, uint64_t bytes) {
  CountRequest request = {};
  request.version = VRAMBROKER_COUNT_VERSION;
  request.call = call;
  request.device = device;
  request.bytes = bytes;
  return request;
}

CountRequest CountHello(absl::string_view name) {
  CountRequest request = MakeCountRequest(VRAMBROKER_COUNT_HELLO);
  std::memcpy(request.name, name.data(), std::min(name.size(), sizeof request.name));  // a NUL follows if room is left
  return request;
}

CountRequest CountHello(absl::string_view name, uint64_t limit_bytes) {
  CountRequest request = CountHello(name);
  request.limit_kind = VRAMBROKER_COUNT_LIMIT_BYTES;
  request.limit_bytes = limit_bytes;
  return request;
}

CountRequest CountHello(absl::string_view name, double limit_fraction) {
  CountRequest request = CountHello(name);
  request.limit_kind = VRAMBROKER_COUNT_LIMIT_FRACTION;
  request.limit_fraction = limit_fraction;
  return request;
}

CountRequest CountHelloAgain(absl::string_view name, const CountToken& lost) {
  CountRequest request = CountHello(name);
  std::memcpy(request.token, lost.data(), lost.size());
  return request;
}

CountRequest CountJoin(const CountToken& token) {
  CountRequest request = MakeCountRequest(VRAMBROKER_COUNT_JOIN);
  std::memcpy(request.token, token.data(), token.size());
  return request;
}

CountRequest CountWait(uint32_t device, uint64_t bytes, uint64_t wait_ms) {
  CountRequest request = MakeCountRequest(VRAMBROKER_COUNT_WAIT, device, bytes);
  request.wait_ms = wait_ms;
  return request;
}

CountToken TokenOf(const CountAnswer& answer) {
  CountToken token;
  std::memcpy(token.data(), answer.token, token.size());
  return token;
}

absl::Status StatusOfAnswer(const CountAnswer& answer) {
  const absl::string_view message(answer.message, strnlen(answer.message, sizeof answer.message));
  return {static_cast<absl::StatusCode>(answer.code), message};
}

// ---- Connections ----

absl::StatusOr<CountClient> CountClient::Connect(const std::string& socket_dir) {
  UniqueFd socket = ConnectUnix(absl::StrCat(socket_dir, "/" VRAMBROKER_COUNT_SOCKET), SOCK_SEQPACKET);
  if (!socket.valid()) return absl::UnavailableError(absl::StrCat("not connected: ", std::strerror(errno)));
  return CountClient(socket_dir, std::move(socket));
}

absl::StatusOr<CountClient> CountClient::Open(const std::string& socket_dir, const CountRequest& hello) {
  absl::StatusOr<CountClient> client = Connect(socket_dir);
  if (!client.ok()) return client;
  if (absl::Status status = client->Begin(hello); !status.ok()) return status;
  client->token_ = TokenOf(client->welcome_);
  return client;
}

absl::StatusOr<CountClient> CountClient::Join() const {
  absl::StatusOr<CountClient> client = Connect(socket_dir_);
  if (!client.ok()) return client;
  if (absl::Status status = client->Begin(CountJoin(token_)); !status.ok()) return status;
  client->token_ = token_;
  return client;
}

absl::Status CountClient::Begin(const CountRequest& request) {
  const absl::StatusOr<CountAnswer> answer = Call(request);
  if (!answer.ok()) return answer.status();
  welcome_ = *answer;
  return StatusOfAnswer(*answer);
}

bool CountClient::SendBytes(absl::string_view packet) {
  return send(socket_.get(), packet.data(), packet.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(packet.size());
}

absl::StatusOr<CountAnswer> CountClient::Receive(absl::Duration timeout) {
  pollfd readable = {.fd = socket_.get(), .events = POLLIN, .revents = 0};
  if (poll(&readable, 1, static_cast<int>(absl::ToInt64Milliseconds(timeout))) != 1) {
    return absl::DeadlineExceededError("no answer");
  }
  CountAnswer answer = {};
  const ssize_t size = recv(socket_.get(), &answer, sizeof answer, MSG_TRUNC);
  if (size <= 0) {
    return absl::UnavailableError(absl::StrCat("the connection has ended: ", size == 0 ? "" : std::strerror(errno)));
  }
  if (size != sizeof answer || answer.version != VRAMBROKER_COUNT_VERSION) {
    return absl::InternalError(absl::StrCat("an answer of ", size, " bytes, version ", answer.version));
  }
  return answer;
}

absl::StatusOr<CountAnswer> CountClient::Call(const CountRequest& request) {
  (void)Send(request);  // may fail: a daemon without room has already answered
  return Receive();
}

bool CountClient::HasEnded() {
  pollfd ended = {.fd = socket_.get(), .events = POLLRDHUP, .revents = 0};
  return poll(&ended, 1, 0) == 1 && (ended.revents & (POLLRDHUP | POLLHUP)) != 0;
}

// ---- Calls ----

absl::Status CountClient::Say(const CountRequest& request) {
  const absl::StatusOr<CountAnswer> answer = Call(request);
  return answer.ok() ? StatusOfAnswer(*answer) : answer.status();
}

absl::Status CountClient::Charge(uint64_t bytes, uint32_t device) {
  return Say(MakeCountRequest(VRAMBROKER_COUNT_CHARGE, device, bytes));
}

absl::Status CountClient::Uncharge(uint64_t bytes, uint32_t device) {
  return Say(MakeCountRequest(VRAMBROKER_COUNT_UNCHARGE, device, bytes));
}

absl::Status CountClient::Hold(uint64_t bytes, uint32_t device) {
  return Say(MakeCountRequest(VRAMBROKER_COUNT_HOLD, device, bytes));
}

absl::Status CountClient::Wait(uint64_t bytes, uint64_t wait_ms, uint32_t device) {
  return Say(CountWait(device, bytes, wait_ms));
}

absl::StatusOr<CountAnswer> CountClient::Info(uint32_t device) {
  absl::StatusOr<CountAnswer> answer = Call(MakeCountRequest(VRAMBROKER_COUNT_INFO, device));
  if (answer.ok() && answer->code != 0) return StatusOfAnswer(*answer);
  return answer;
}

uint64_t CountClient::ChargedBytes(uint32_t device) {
  const absl::StatusOr<CountAnswer> answer = Info(device);
  return answer.ok() ? answer->charged_bytes : ~uint64_t{0};
}

}  // namespace vrambroker::testing_support
