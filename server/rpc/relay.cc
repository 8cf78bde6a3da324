// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/relay.h"

#include <poll.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"

namespace vrambroker {
namespace {

bool IsClosed(int fd) {
  pollfd peer = {.fd = fd, .events = POLLRDHUP, .revents = 0};
  return poll(&peer, 1, 0) > 0;
}

}  // namespace

Relay::Relay(EventLoop* loop, ClientSocket client, std::string header, Owner* owner)
    : loop_(*loop),
      owner_(*owner),
      client_socket_(std::move(client)),
      client_(Http2Frames::From::kClient, std::move(header)) {
  client_.fd = client_socket_.fd();
}

Relay::~Relay() {
  Unwatch(client_);
  Unwatch(server_);
}

absl::Status Relay::Start() {
  return Watch(client_);
}

void Relay::HangUp() {
  shutdown(client_.fd->get(), SHUT_RDWR);  // noticed by the loop
}

void Relay::Run(Side& side, Step step) {
  absl::Status status = (this->*step)(side);
  for (Side* each : {&client_, &server_}) {
    while (status.ok() && each->hung_up && MayRead(*each)) status = Carry(*each);
  }
  for (Side* each : {&client_, &server_}) {
    if (status.ok()) status = Watch(*each);
  }
  // Calls OnEnd() last: the owner may destroy this object.
  if (!status.ok() || IsDone()) owner_.OnEnd(status);
}

absl::Status Relay::OnReady(Side& side) {
  const bool may_read = MayRead(side);
  const bool may_write = !side.pending.empty();
  if (!may_read && !may_write) {  // watched for no events, the side can only have hung up
    side.hung_up = true;
    side.ended = server_.fd == nullptr;
  }
  if (may_write) {
    if (absl::Status status = Write(side, std::exchange(side.pending, {})); !status.ok()) return status;
  }
  return may_read ? Carry(side) : absl::OkStatus();
}

absl::Status Relay::Carry(Side& from) {
  std::array<char, kPieceBytes> piece;
  const ssize_t count = &from == &client_ ? client_socket_.Receive(piece.data(), piece.size())
                                          : recv(from.fd->get(), piece.data(), piece.size(), MSG_DONTWAIT);
  if (count < 0 && errno == EPROTO) return absl::PermissionDeniedError("the client sends descriptors, or urgent data");
  if (count <= 0) {
    if (count == 0 || errno != EAGAIN || from.hung_up) from.ended = true;
    return absl::OkStatus();
  }
  std::string passed;
  absl::Status status =
      from.frames.Read({piece.data(), static_cast<size_t>(count)}, passed, [&](const Http2Frame& frame) {
        return &from == &client_ ? owner_.OnClientFrame(frame) : owner_.OnServerFrame(frame);
      });
  if (!status.ok()) return status;
  if (status = Write(Other(from), passed); !status.ok()) return status;
  return &from == &client_ && server_.fd == nullptr && from.frames.greeted() ? TryOpen(from) : absl::OkStatus();
}

absl::Status Relay::TryOpen(Side& client) {
  // Hides from gRPC a client that does not wait for an answer.
  if (IsClosed(client.fd->get())) client.ended = true;
  if (client.ended) return absl::OkStatus();
  absl::StatusOr<UniqueFd> server = owner_.OpenServer();
  if (absl::IsUnavailable(server.status())) return absl::OkStatus();
  if (!server.ok()) return server.status();
  server_.fd = std::make_shared<const UniqueFd>(*std::move(server));
  return Write(server_, std::exchange(server_.pending, {}));
}

bool Relay::MayRead(const Side& from) const {
  if (from.fd == nullptr || from.ended) return false;
  // Collects a client's first bytes until they are enough.
  return server_.fd == nullptr ? !client_.frames.greeted() : Other(from).pending.empty();
}

absl::Status Relay::Write(Side& to, absl::string_view bytes) {
  while (!bytes.empty() && !to.ended && to.fd != nullptr) {
    const ssize_t count = send(to.fd->get(), bytes.data(), bytes.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    if (count < 0 && errno == EAGAIN) break;
    // The side has closed the connection: bytes it sent before are still read, then its end.
    if (count < 0 && (errno == EPIPE || errno == ECONNRESET)) return absl::OkStatus();
    if (count < 0) return absl::ErrnoToStatus(errno, "cannot pass on what came");
    bytes.remove_prefix(count);
  }
  if (!to.ended) absl::StrAppend(&to.pending, bytes);
  return absl::OkStatus();
}

bool Relay::IsDone() const {
  return (client_.ended && (server_.fd == nullptr || server_.pending.empty() || server_.ended)) ||
         (server_.ended && client_.pending.empty());
}

absl::Status Relay::Watch(Side& side) {
  if (side.fd == nullptr) return absl::OkStatus();
  if (side.ended || side.hung_up) {
    Unwatch(side);
    return absl::OkStatus();
  }
  const uint32_t events = (MayRead(side) ? EPOLLIN : 0U) | (side.pending.empty() ? 0U : EPOLLOUT);
  if (!side.watched) {
    absl::Status status = loop_.Watch(side.fd, events, [this, &side] { Run(side, &Relay::OnReady); });
    side.watched = status.ok();
    side.events = events;
    return status;
  }
  if (events != side.events) loop_.Change(side.fd->get(), events);
  side.events = events;
  return absl::OkStatus();
}

void Relay::Unwatch(Side& side) {
  if (side.watched) loop_.Unwatch(side.fd->get());
  side.watched = false;
}

}  // namespace vrambroker
