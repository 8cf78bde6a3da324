// SPDX-License-Identifier: Apache-2.0
#include "client/connection.h"

#include <fcntl.h>
#include <grpcpp/create_channel_posix.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"

namespace vrambroker::client_internal {
namespace {

// `timeout` is for connecting, for each send and for each receive.
absl::StatusOr<UniqueFd> ConnectUnix(const std::string& path, int type, absl::Duration timeout) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof address.sun_path) {
    return absl::InvalidArgumentError(absl::StrCat("socket path ", path, " is too long"));
  }
  std::memcpy(address.sun_path, path.c_str(), path.size());
  UniqueFd fd(socket(AF_UNIX, type | SOCK_CLOEXEC, 0));
  if (!fd.valid()) return absl::ErrnoToStatus(errno, "socket failed");
  const timeval limit = absl::ToTimeval(timeout);
  setsockopt(fd.get(), SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
  setsockopt(fd.get(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  if (connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0) return fd;
  switch (errno) {
    case ENOENT:
    case ENOTDIR:
      return absl::UnavailableError(
          absl::StrCat("no vrambrokerd: there is no socket ", path,
                       "; start the daemon, or name its directory with --socket_dir or VRAMBROKER_SOCKET_DIR"));
    case ECONNREFUSED:
      return absl::UnavailableError(
          absl::StrCat("no vrambrokerd: nobody listens on ", path, "; the daemon has died, start it again"));
    case EACCES:
    case EPERM:
      return absl::PermissionDeniedError(
          absl::StrCat("this user may not connect to ", path, "; see socket_mode in the daemon's configuration"));
    case EAGAIN:
      return absl::DeadlineExceededError(
          absl::StrCat("the daemon does not accept connections on ", path, " within ", absl::FormatDuration(timeout)));
    default:
      return absl::UnavailableError(absl::StrCat("cannot connect to ", path, ": ", std::strerror(errno)));
  }
}

}  // namespace

absl::StatusOr<std::shared_ptr<grpc::Channel>> ConnectChannel(const std::string& socket_dir, absl::Duration timeout) {
  // The first process of a line of forks that connects is the only one that may.
  static std::atomic<pid_t> connected{0};
  pid_t first = 0;
  if (!connected.compare_exchange_strong(first, getpid()) && first != getpid()) {
    return absl::FailedPreconditionError(
        absl::StrCat("this process was made by fork() after process ", first,
                     " had connected, and gRPC does not survive that: fork before the first Connect(), or exec"));
  }
  // Connected here, not by gRPC: the errors of connect(2) tell the user what is wrong.
  absl::StatusOr<UniqueFd> fd = ConnectUnix(absl::StrCat(socket_dir, "/vrambroker.sock"), SOCK_STREAM, timeout);
  if (!fd.ok()) return fd.status();
  if (fcntl(fd->get(), F_SETFL, O_NONBLOCK) != 0) return absl::ErrnoToStatus(errno, "fcntl(O_NONBLOCK) failed");
  return grpc::CreateInsecureChannelFromFd("vrambrokerd", fd->Release());
}

absl::StatusOr<UniqueFd> FetchDescriptor(const std::string& socket_dir, absl::string_view ticket,
                                         absl::Duration timeout) {
  absl::StatusOr<UniqueFd> socket =
      ConnectUnix(absl::StrCat(socket_dir, "/vrambroker-fd.sock"), SOCK_SEQPACKET, timeout);
  if (!socket.ok()) return socket.status();
  if (send(socket->get(), ticket.data(), ticket.size(), MSG_NOSIGNAL) < 0) {
    return absl::UnavailableError(absl::StrCat("descriptor socket: ", std::strerror(errno)));
  }
  std::array<char, 512> text;
  iovec data = {.iov_base = text.data(), .iov_len = text.size()};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control = {};
  msghdr message = {};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  const ssize_t size = recvmsg(socket->get(), &message, MSG_CMSG_CLOEXEC);
  if (size < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
    return absl::DeadlineExceededError("descriptor socket: the daemon did not answer in time");
  }
  if (size <= 0) return absl::UnavailableError("descriptor socket: the daemon closed the connection");
  UniqueFd received;
  if (const cmsghdr* header = CMSG_FIRSTHDR(&message);
      header != nullptr && header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS) {
    int fd = -1;
    std::memcpy(&fd, CMSG_DATA(header), sizeof fd);
    received = UniqueFd(fd);
  }
  if (text[0] == 0 && received.valid()) return received;
  return absl::InternalError(
      absl::StrCat("descriptor socket: ", absl::string_view(text.data() + 1, static_cast<size_t>(size) - 1)));
}

absl::Status FromProto(const v1::StatusDetails& details) {
  absl::Status result(static_cast<absl::StatusCode>(details.code()), details.message());
  for (const v1::StatusDetails::Any& detail : details.details()) {
    result.SetPayload(detail.type_url(), absl::Cord(detail.value()));
  }
  return result;
}

absl::Status FromGrpc(const grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  v1::StatusDetails details;
  if (status.error_details().empty() || !details.ParseFromString(status.error_details())) details.Clear();
  details.set_code(static_cast<int>(status.error_code()));
  details.set_message(status.error_message());
  return FromProto(details);
}

}  // namespace vrambroker::client_internal
