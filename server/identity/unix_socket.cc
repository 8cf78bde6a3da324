// SPDX-License-Identifier: Apache-2.0
#include "server/identity/unix_socket.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "allocator/base/descriptor_reserve.h"
#include "server/base/log_line.h"

#ifndef SO_PEERGROUPS
#define SO_PEERGROUPS 59
#endif

namespace vrambroker {

absl::StatusOr<ClientSocket> ListenUnix(const std::string& path, int type, mode_t mode) {
  sockaddr_un address = {.sun_family = AF_UNIX};
  if (path.size() >= sizeof address.sun_path) {
    return absl::InvalidArgumentError(absl::StrCat("socket path ", path, " is longer than ",
                                                   sizeof address.sun_path - 1,
                                                   " characters; choose a shorter --socket-dir"));
  }
  std::memcpy(address.sun_path, path.c_str(), path.size());
  UniqueFd fd(socket(AF_UNIX, type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.valid()) return absl::ErrnoToStatus(errno, "socket failed");
  RefuseDescriptors(fd.get());
  unlink(path.c_str());
  // The socket must have its permissions from the first moment on.
  const mode_t before = umask(~mode & 0777);
  const int bound = bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address);
  const int bind_errno = errno;
  umask(before);
  if (bound != 0) return absl::ErrnoToStatus(bind_errno, absl::StrCat("cannot bind ", path));
  if (listen(fd.get(), 512) != 0) return absl::ErrnoToStatus(errno, absl::StrCat("cannot listen on ", path));
  return ClientSocket(std::move(fd));
}

Acceptor::Acceptor() : reserve_(open("/dev/null", O_RDONLY | O_CLOEXEC)) {}

ClientSocket Acceptor::Accept(int listener) {
  UniqueFd fd(accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (fd.valid()) return ClientSocket(std::move(fd));
  if (errno != EMFILE && errno != ENFILE) return ClientSocket();
  if (const auto left_out = errors_.Take(std::chrono::steady_clock::now()); left_out.has_value()) {
    LogLine("connection dropped")
        .Add("why", DescriptorError(errno, "accept").message())
        .Add("others_since_last_line", *left_out)
        .Write(spdlog::level::err);
  }
  // Without a reserve no connection can be dropped: a waiting connection would wake the loop in a tight cycle.
  if (!reserve_.valid()) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  reserve_.Reset();
  if (UniqueFd dropped(accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK)); dropped.valid()) {
    ClientSocket(std::move(dropped));
  }
  reserve_ = UniqueFd(open("/dev/null", O_RDONLY | O_CLOEXEC));
  return ClientSocket();
}

namespace {

// The supplementary groups of the process that connected. Empty before Linux 4.13, which cannot report groups.
std::vector<gid_t> PeerGroups(int fd) {
  std::vector<gid_t> groups(64);
  for (;;) {
    socklen_t size = static_cast<socklen_t>(groups.size() * sizeof(gid_t));
    const bool known = getsockopt(fd, SOL_SOCKET, SO_PEERGROUPS, groups.data(), &size) == 0;
    const bool too_small = !known && errno == ERANGE && size > groups.size() * sizeof(gid_t);
    groups.resize(known || too_small ? size / sizeof(gid_t) : 0);
    if (!too_small) return groups;
  }
}

}  // namespace

absl::StatusOr<Caller> GetPeer(int fd, ProcessWatch* processes) {
  ucred credentials = {};
  socklen_t size = sizeof credentials;
  if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &credentials, &size) != 0) {
    return absl::ErrnoToStatus(errno, "getsockopt(SO_PEERCRED) failed");
  }
  if (credentials.pid <= 0) {
    return absl::FailedPreconditionError(
        "the daemon cannot see the caller's process, which is outside of the daemon's pid namespace: start the "
        "daemon's "
        "container with --pid=host (in Kubernetes: hostPID: true)");
  }
  absl::StatusOr<std::shared_ptr<const UniqueFd>> pidfd = processes->OfPeer(fd, credentials.pid);
  if (!pidfd.ok()) return pidfd.status();
  return Caller{.pid = credentials.pid,
                .uid = credentials.uid,
                .gid = credentials.gid,
                .groups = PeerGroups(fd),
                .pidfd = *std::move(pidfd)};
}

}  // namespace vrambroker
