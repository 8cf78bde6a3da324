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

#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "allocator/base/segment_call_bounds.h"
#include "server/sessions/leased_session.h"
#include "server/wire/convert.h"

namespace vrambroker {
namespace {

constexpr std::chrono::seconds kSilenceAllowed(10);

// Sends a packet with descriptors. False: the client does not get the packet. A client that does not read loses its
// answers: the socket never blocks.
bool SendPacket(int socket, absl::string_view packet, absl::Span<const int> descriptors) {
  iovec data = {.iov_base = const_cast<char*>(packet.data()), .iov_len = packet.size()};
  msghdr message = {.msg_iov = &data, .msg_iovlen = 1};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(kMaxSegmentCallDescriptors * sizeof(int))> control = {};
  if (!descriptors.empty()) {
    const size_t bytes = descriptors.size() * sizeof(int);
    message.msg_control = control.data();
    message.msg_controllen = CMSG_SPACE(bytes);
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(bytes);
    std::memcpy(CMSG_DATA(header), descriptors.data(), bytes);
  }
  if (sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT) >= 0) return true;
  spdlog::debug("descriptor socket: answer lost: {}", std::strerror(errno));
  return false;
}

// Answers a ticket, or a packet that is neither a ticket nor a call.
void SendText(int socket, const absl::Status& status, int descriptor = -1) {
  const char code = static_cast<char>(status.code());
  const std::string packet = absl::StrCat(absl::string_view(&code, 1), status.message());
  (void)SendPacket(socket, packet, {&descriptor, descriptor >= 0 ? 1U : 0U});
}

bool SendResult(int socket, const v1::CallResult& result, const std::vector<UniqueFd>& descriptors) {
  absl::InlinedVector<int, kMaxSegmentCallDescriptors> numbers;
  for (const UniqueFd& descriptor : descriptors) numbers.push_back(descriptor.get());
  if (SendPacket(socket, result.SerializeAsString(), numbers)) return true;
  shutdown(socket, SHUT_RDWR);  // a client that still waits asks again
  return false;
}

}  // namespace

absl::Status DescriptorSocket::Serve(const ClientSocket& listener) {
  listener_ = listener.get();
  return Listen(listener, {});
}

absl::Status DescriptorSocket::Listen(const ClientSocket& listener, const ClaimOfListener& claim) {
  return loop_.Watch(listener.fd(), EPOLLIN, [this, fd = listener.fd(), claim] { AcceptAll(fd->get(), claim); });
}

void DescriptorSocket::AcceptAll(int listener, const ClaimOfListener& claim) {
  for (int i = 0; i < 64; ++i) {
    ClientSocket socket = acceptor_.Accept(listener);
    if (!socket.valid()) return;
    absl::StatusOr<Caller> caller = GetPeer(socket.get(), &processes_);
    if (!caller.ok()) continue;
    claim.AddTo(*caller);
    const int number = socket.get();
    if (loop_.Watch(socket.fd(), EPOLLIN | EPOLLRDHUP, [this, number] { OnReadable(number); }).ok()) {
      Connection& connection = connections_[number];
      connection.socket = std::move(socket);
      connection.caller = *std::move(caller);
      Use(number, connection);
    }
  }
}

void DescriptorSocket::Use(int fd, Connection& connection) {
  connection.last_used = std::chrono::steady_clock::now();
  connection.place = places_->Renew(connection.place);
  if (connection.place != 0) return;
  // A connection dropped to make room still gets the answer to its last packet.
  connection.place =
      places_->Add(absl::StrCat("uid ", connection.caller.uid, " claim ", connection.caller.user().claim), [this, fd] {
        (void)AnswerPacket(connections_.at(fd));
        Drop(fd);
      });
}

void DescriptorSocket::OnReadable(int fd) {
  Connection& connection = connections_.at(fd);
  if (AnswerPacket(connection)) {
    Use(fd, connection);
  } else {
    Drop(fd);
  }
}

bool DescriptorSocket::AnswerPacket(const Connection& connection) {
  const int fd = connection.socket.get();
  std::array<char, kMaxSegmentCallBytes + 1> packet;  // an extra byte, to notice a longer packet
  const ssize_t size = connection.socket.Receive(packet.data(), packet.size());
  if (size <= 0) return size < 0 && errno == EAGAIN;
  // Unread descriptors count against the kernel's limit on descriptors sent by the daemon's user.
  if (connection.socket.HasUnread()) return false;
  if (size == sizeof(FdTicket)) {
    FdTicket ticket;
    std::memcpy(ticket.data(), packet.data(), ticket.size());
    AnswerTicket(connection, ticket);
    return true;
  }
  v1::SegmentCall call;
  if (static_cast<size_t>(size) <= kMaxSegmentCallBytes && call.ParseFromArray(packet.data(), static_cast<int>(size)) &&
      call.call_case() != v1::SegmentCall::CALL_NOT_SET && call.resume_token().size() == sizeof(ResumeToken)) {
    AnswerCall(connection, call);
    return true;
  }
  SendText(fd, absl::InvalidArgumentError(absl::StrCat("expected a ticket of ", sizeof(FdTicket),
                                                       " bytes, or a SegmentCall of at most ", kMaxSegmentCallBytes)));
  return true;
}

void DescriptorSocket::AnswerCall(const Connection& connection, const v1::SegmentCall& call) {
  if (connection.in_call->exchange(true)) {
    const absl::Status refusal =
        absl::FailedPreconditionError("the last call of this connection has no answer yet: wait for it");
    (void)SendResult(connection.socket.get(), ErrorResult(refusal), {});
    return;
  }
  calls_.Make(connection.caller, call,
              [connected = std::weak_ptr<const UniqueFd>(connection.socket.fd()), in_call = connection.in_call](
                  const v1::CallResult& result, const std::vector<UniqueFd>& descriptors) {
                in_call->store(false);  // first: a client with the answer may send the next packet
                const std::shared_ptr<const UniqueFd> socket = connected.lock();
                return socket != nullptr && SendResult(socket->get(), result, descriptors);
              });
}

void DescriptorSocket::AnswerTicket(const Connection& connection, const FdTicket& ticket) {
  absl::StatusOr<UniqueFd> descriptor = absl::NotFoundError("no such ticket");
  for (SegmentPool* pool : pools_) {
    descriptor = pool->RedeemTicket(ticket, connection.caller.pid, connection.caller.uid);
    if (!absl::IsNotFound(descriptor.status())) break;
  }
  SendText(connection.socket.get(), descriptor.status(), descriptor.ok() ? descriptor->get() : -1);
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
    if (connection.last_used < oldest && !connection.in_call->load()) silent.push_back(fd);
  }
  for (const int fd : silent) Drop(fd);
}

}  // namespace vrambroker
