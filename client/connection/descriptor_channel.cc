// SPDX-License-Identifier: Apache-2.0
#include "client/connection/descriptor_channel.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "allocator/base/segment_call_bounds.h"
#include "client/connection/connection.h"

namespace vrambroker::client_internal {
namespace {

// An error answer carries texts and an OutOfMemory: a few KiB.
constexpr size_t kMaxAnswerBytes = 32 << 10;
// A refusal is the number of a status code, then a text. No CallResult without a call_id begins with such a byte.
constexpr unsigned char kMaxStatusCode = 16;

absl::Status Refusal(const std::string& answer) {
  const absl::string_view reason = absl::string_view(answer).substr(1);
  // The daemon that issued the ticket is gone, or has ended the session: the lease has lost its memory, as when the
  // call for it finds no daemon.
  if (static_cast<absl::StatusCode>(answer[0]) == absl::StatusCode::kNotFound) {
    return absl::UnavailableError(
        absl::StrCat("the daemon has restarted, or has ended the session, since it leased the "
                     "segment (descriptor socket: ",
                     reason, ")"));
  }
  return absl::InternalError(absl::StrCat("descriptor socket: ", reason));
}

absl::Status Closed() {
  return absl::UnavailableError("descriptor socket: the daemon closed the connection");
}

std::vector<UniqueFd> DescriptorsIn(msghdr& message) {
  std::vector<UniqueFd> descriptors;
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr; header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(header) + i * sizeof fd, sizeof fd);
      descriptors.emplace_back(fd);
    }
  }
  return descriptors;
}

// Returns the packet received, or nullopt: nothing so far. Unavailable: nothing will arrive.
absl::StatusOr<std::optional<DescriptorChannel::Packet>> ReceiveNow(int socket) {
  std::array<char, kMaxAnswerBytes> bytes;
  iovec data = {.iov_base = bytes.data(), .iov_len = bytes.size()};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(kMaxSegmentCallDescriptors * sizeof(int))> control;
  msghdr message = {};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  const auto receive = [&] {
    ssize_t size = 0;
    do {
      message.msg_controllen = control.size();  // changed by the kernel
      size = recvmsg(socket, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    } while (size < 0 && errno == EINTR);
    return size;
  };
  ssize_t size = receive();
  // The kernel looks for packets, then for the end of the connection. A packet may arrive between these checks; none
  // arrives after the end, so a second look finds the last packet.
  if (size == 0 || (size < 0 && errno != EAGAIN)) size = receive();
  if (size < 0 && errno == EAGAIN) return std::nullopt;
  if (size <= 0) return Closed();
  std::vector<UniqueFd> descriptors = DescriptorsIn(message);
  if ((message.msg_flags & MSG_TRUNC) != 0) return absl::InternalError("descriptor socket: the answer is too long");
  return DescriptorChannel::Packet{.bytes = std::string(bytes.data(), static_cast<size_t>(size)),
                                   .descriptors = std::move(descriptors)};
}

absl::StatusOr<DescriptorChannel::Packet> SendAndReceive(int socket, absl::string_view packet, Deadline deadline) {
  while (send(socket, packet.data(), packet.size(), MSG_NOSIGNAL) < 0) {
    if (errno != EINTR) return absl::UnavailableError(absl::StrCat("descriptor socket: ", std::strerror(errno)));
  }
  for (bool is_last = false;; is_last = TimeUntil(deadline) <= absl::ZeroDuration()) {
    // From now on the daemon's sends fail, telling the daemon that the client has stopped waiting. Packets sent before
    // can still be read.
    if (is_last) shutdown(socket, SHUT_RD);
    absl::StatusOr<std::optional<DescriptorChannel::Packet>> answer = ReceiveNow(socket);
    if (answer.ok() && answer->has_value()) {
      (*answer)->is_last = is_last;
      return **std::move(answer);
    }
    if (is_last) return absl::DeadlineExceededError("");
    if (!answer.ok()) return answer.status();
    // Not a receive with a timeout: every signal would restart the timeout.
    pollfd readable = {.fd = socket, .events = POLLIN, .revents = 0};
    (void)poll(&readable, 1,
               static_cast<int>(absl::ToInt64Milliseconds(std::min(TimeUntil(deadline), absl::Hours(1)))) + 1);
  }
}

}  // namespace

DescriptorChannel::DescriptorChannel(absl::string_view socket_dir)
    : path_(absl::StrCat(socket_dir, "/vrambroker-fd.sock")) {}

absl::Status DescriptorChannel::NoDescriptor() {
  return absl::InternalError("descriptor socket: no descriptor arrived; this process may have too many files open");
}

absl::StatusOr<UniqueFd> DescriptorChannel::Fetch(absl::string_view ticket, absl::Duration timeout) {
  absl::StatusOr<Packet> answer = Exchange(ticket, timeout);
  if (!answer.ok()) return answer.status();
  if (answer->bytes[0] != 0) return Refusal(answer->bytes);
  if (answer->descriptors.empty()) return NoDescriptor();
  return std::move(answer->descriptors[0]);
}

absl::StatusOr<DescriptorChannel::Answer> DescriptorChannel::Call(const v1::SegmentCall& call, absl::Duration timeout) {
  absl::StatusOr<Packet> packet = Exchange(call.SerializeAsString(), timeout);
  if (!packet.ok()) return packet.status();
  if (static_cast<unsigned char>(packet->bytes[0]) <= kMaxStatusCode) {
    return absl::UnavailableError(Refusal(packet->bytes).message());  // the daemon does not accept such calls
  }
  Answer answer{.result = {}, .descriptors = std::move(packet->descriptors)};
  if (!answer.result.ParseFromString(packet->bytes)) {
    return absl::InternalError("descriptor socket: the daemon's answer is not readable");
  }
  return answer;
}

absl::StatusOr<DescriptorChannel::Packet> DescriptorChannel::Exchange(absl::string_view packet,
                                                                      absl::Duration timeout) {
  const Deadline deadline = DeadlineAfter(timeout);
  UniqueFd socket;
  {
    MutexLock lock(mu_);
    if (!kept_.empty()) {
      socket = std::move(kept_.back());
      kept_.pop_back();
    }
  }
  absl::StatusOr<Packet> answer = absl::UnavailableError("not connected");
  if (socket.valid()) answer = ExchangeOver(socket, packet, deadline);
  if (absl::IsUnavailable(answer.status())) {
    // The daemon closes idle connections, and may have restarted. Either the daemon has not read the packet, or it has
    // taken back the lease.
    absl::StatusOr<UniqueFd> fresh = ConnectSocket(path_, SOCK_SEQPACKET, TimeUntil(deadline), [this] {
      MutexLock lock(mu_);
      return stopped_;
    });
    if (!fresh.ok()) return fresh.status();
    socket = *std::move(fresh);
    answer = ExchangeOver(socket, packet, deadline);
  }
  if (absl::IsDeadlineExceeded(answer.status())) {
    return absl::DeadlineExceededError(
        absl::StrCat("the daemon did not answer within ", absl::FormatDuration(timeout), " (descriptor socket)"));
  }
  if (!answer.ok()) return answer.status();
  MutexLock lock(mu_);
  if (!answer->is_last && !stopped_ && kept_.size() < kMaxKept) kept_.push_back(std::move(socket));
  return answer;
}

absl::StatusOr<DescriptorChannel::Packet> DescriptorChannel::ExchangeOver(const UniqueFd& socket,
                                                                          absl::string_view packet, Deadline deadline) {
  {
    MutexLock lock(mu_);
    if (stopped_) return absl::UnavailableError("the client is being closed");
    waiting_.insert(socket.get());
  }
  absl::StatusOr<Packet> answer = SendAndReceive(socket.get(), packet, deadline);
  MutexLock lock(mu_);
  waiting_.erase(socket.get());
  return answer;
}

void DescriptorChannel::StopWaiting() {
  MutexLock lock(mu_);
  stopped_ = true;
  for (const int socket : waiting_) shutdown(socket, SHUT_RD);
}

}  // namespace vrambroker::client_internal
