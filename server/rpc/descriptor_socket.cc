// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/descriptor_socket.h"

#include <spdlog/spdlog.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"

namespace vrambroker {
namespace {

constexpr std::chrono::seconds kSilenceAllowed(10);

// One packet: `code`, `text`, and the descriptor if it is valid.
void Send(int socket, const absl::Status& status, int descriptor) {
  const char code = static_cast<char>(status.code());
  std::string payload = absl::StrCat(absl::string_view(&code, 1), status.message());
  iovec data = {.iov_base = payload.data(), .iov_len = payload.size()};
  msghdr message = {.msg_iov = &data, .msg_iovlen = 1};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control = {};
  if (descriptor >= 0) {
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof descriptor);
    std::memcpy(CMSG_DATA(header), &descriptor, sizeof descriptor);
  }
  // A client that does not read its answers loses them: the socket never blocks the loop.
  if (sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT) < 0) {
    spdlog::debug("descriptor socket: answer lost: {}", std::strerror(errno));
  }
}

}  // namespace

absl::Status DescriptorSocket::Serve(const ClientSocket& listener) {
  listener_ = listener.get();
  return loop_.Watch(listener.fd(), EPOLLIN, [this] { AcceptAll(); });
}

void DescriptorSocket::AcceptAll() {
  for (int i = 0; i < 64; ++i) {
    ClientSocket socket = acceptor_.Accept(listener_);
    if (!socket.valid()) return;
    absl::StatusOr<Caller> caller = GetPeer(socket.get(), &processes_);
    if (!caller.ok()) continue;
    const int number = socket.get();
    if (loop_.Watch(socket.fd(), EPOLLIN | EPOLLRDHUP, [this, number] { Answer(number); }).ok()) {
      Connection& connection = connections_[number];
      connection.socket = std::move(socket);
      connection.caller = *std::move(caller);
      Use(number, connection);
    }
  }
}

void DescriptorSocket::Use(int fd, Connection& connection) {
  connection.last_used = std::chrono::steady_clock::now();
  places_->Remove(connection.place);
  // A connection that is dropped to make room for another one still gets the answer to its last packet.
  connection.place = places_->Add(absl::StrCat("uid ", connection.caller.uid), [this, fd] {
    (void)AnswerOne(connections_.at(fd));
    Drop(fd);
  });
}

void DescriptorSocket::Answer(int fd) {
  Connection& connection = connections_.at(fd);
  if (AnswerOne(connection)) {
    Use(fd, connection);
  } else {
    Drop(fd);
  }
}

bool DescriptorSocket::AnswerOne(const Connection& connection) {
  const int fd = connection.socket.get();
  std::array<char, sizeof(FdTicket) + 1> packet;  // one more than a ticket, to notice a longer packet
  const ssize_t size = connection.socket.Receive(packet.data(), packet.size());
  if (size <= 0) return size < 0 && errno == EAGAIN;
  if (size != sizeof(FdTicket)) {
    Send(fd, absl::InvalidArgumentError(absl::StrCat("expected a ticket of ", sizeof(FdTicket), " bytes")), -1);
    return true;
  }
  FdTicket ticket;
  std::memcpy(ticket.data(), packet.data(), ticket.size());
  absl::StatusOr<UniqueFd> descriptor = absl::NotFoundError("no such ticket");
  for (SegmentPool* pool : pools_) {
    descriptor = pool->RedeemTicket(ticket, connection.caller.pid, connection.caller.uid);
    if (!absl::IsNotFound(descriptor.status())) break;
  }
  Send(fd, descriptor.status(), descriptor.ok() ? descriptor->get() : -1);
  return true;
}

void DescriptorSocket::Drop(int fd) {
  places_->Remove(connections_.at(fd).place);
  connections_.erase(fd);
  loop_.Unwatch(fd);
}

void DescriptorSocket::Tick() {
  const SteadyTime oldest = std::chrono::steady_clock::now() - kSilenceAllowed;
  std::vector<int> silent;
  for (const auto& [fd, connection] : connections_) {
    if (connection.last_used < oldest) silent.push_back(fd);
  }
  for (const int fd : silent) Drop(fd);
}

}  // namespace vrambroker
