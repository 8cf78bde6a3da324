// SPDX-License-Identifier: Apache-2.0
#include "server/descriptor_socket.h"

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

absl::Status DescriptorSocket::Serve(UniqueFd listener) {
  listener_ = listener.get();
  return loop_.Watch(std::move(listener), EPOLLIN, [this] { AcceptAll(); });
}

void DescriptorSocket::AcceptAll() {
  for (int i = 0; i < 64; ++i) {
    UniqueFd fd = acceptor_.Accept(listener_);
    if (!fd.valid()) return;
    absl::StatusOr<Caller> caller = GetPeer(fd.get());
    if (!caller.ok()) continue;
    const int number = fd.get();
    if (loop_.Watch(std::move(fd), EPOLLIN | EPOLLRDHUP, [this, number] { Answer(number); }).ok()) {
      Connection& connection = connections_[number];
      connection.caller = *std::move(caller);
      Use(number, connection);
    }
  }
}

void DescriptorSocket::Use(int fd, Connection& connection) {
  connection.last_used = std::chrono::steady_clock::now();
  places_->Remove(connection.place);
  // Whoever has to make room gets an answer to what he has sent meanwhile.
  connection.place = places_->Add(absl::StrCat("uid ", connection.caller.uid), [this, fd] {
    (void)AnswerOne(fd, connections_.at(fd).caller);
    Drop(fd);
  });
}

void DescriptorSocket::Answer(int fd) {
  Connection& connection = connections_.at(fd);
  if (AnswerOne(fd, connection.caller)) {
    Use(fd, connection);
  } else {
    Drop(fd);
  }
}

bool DescriptorSocket::AnswerOne(int fd, const Caller& caller) {
  std::array<char, sizeof(Ticket) + 1> packet;  // one more than a ticket, to notice a longer packet
  const ssize_t size = recv(fd, packet.data(), packet.size(), MSG_DONTWAIT);
  if (size <= 0) return size < 0 && errno == EAGAIN;
  if (size != sizeof(Ticket)) {
    Send(fd, absl::InvalidArgumentError(absl::StrCat("expected a ticket of ", sizeof(Ticket), " bytes")), -1);
    return true;
  }
  Ticket ticket;
  std::memcpy(ticket.data(), packet.data(), ticket.size());
  absl::StatusOr<UniqueFd> descriptor = absl::NotFoundError("no such ticket");
  for (SegmentPool* pool : pools_) {
    descriptor = pool->RedeemTicket(ticket, caller.pid, caller.uid);
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
