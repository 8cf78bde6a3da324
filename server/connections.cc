// SPDX-License-Identifier: Apache-2.0
#include "server/connections.h"

#include <fcntl.h>
#include <grpcpp/server_posix.h>
#include <poll.h>
#include <spdlog/spdlog.h>
#include <sys/socket.h>

#include <chrono>
#include <memory>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/strip.h"
#include "server/client_log.h"
#include "server/process_info.h"

namespace vrambroker {

absl::Status Connections::Serve(UniqueFd listener, grpc::Server* server, size_t max_per_uid) {
  server_ = server;
  max_per_uid_ = max_per_uid;
  listener_ = listener.get();
  return loop_.Watch(std::move(listener), EPOLLIN, [this] { AcceptAll(); });
}

void Connections::StopAccepting() {
  loop_.Unwatch(listener_);
}

void Connections::AcceptAll() {
  // A bounded number at a time: signals and ended processes must not wait for a flood of connections.
  for (int i = 0; i < 64; ++i) {
    UniqueFd fd = acceptor_.Accept(listener_);
    if (!fd.valid()) return;
    Accept(std::move(fd));
  }
}

void Connections::Accept(UniqueFd owned) {
  const int fd = owned.get();
  absl::StatusOr<Caller> caller = GetPeer(fd);
  if (!caller.ok()) {
    LogClientEvent(spdlog::level::warn, "connection refused: {}", caller.status().ToString());
    return;
  }
  UniqueFd watched(fcntl(fd, F_DUPFD_CLOEXEC, 0));
  if (!watched.valid()) return;
  const std::shared_ptr<const UniqueFd> pidfd = caller->pidfd;
  const pid_t pid = caller->pid;
  const Watches watches{.connection = watched.get(), .process = pidfd->get()};
  {
    MutexLock lock(mu_);
    size_t& open = of_uid_[caller->uid];
    if (open >= max_per_uid_) {
      LogClientEvent(spdlog::level::warn, "connection refused: uid {} has {} open", caller->uid, open);
      return;
    }
    // gRPC may have closed an earlier connection of this number before the loop saw its end.
    if (const auto it = by_fd_.find(fd); it != by_fd_.end()) --of_uid_[it->second.caller.uid];
    ++open;
    by_fd_[fd] = Connection{.caller = *std::move(caller), .watched = watches.connection};
  }
  absl::Status status = loop_.Watch(std::move(watched), EPOLLRDHUP, [this, fd, watches] { Forget(fd, watches); });
  if (status.ok()) status = loop_.Watch(pidfd, EPOLLIN, [this, fd, watches, pid] { HangUp(fd, watches, pid); });
  if (!status.ok()) {
    spdlog::error("connection refused: {}", status.ToString());
    Forget(fd, watches);
    return;
  }
  grpc::AddInsecureChannelFromFd(server_, owned.Release());
}

void Connections::HangUp(int fd, const Watches& watches, pid_t pid) {
  pollfd peer = {.fd = watches.connection, .events = POLLRDHUP, .revents = 0};
  if (poll(&peer, 1, 0) == 0) {  // not closed with the process
    LogClientEvent(spdlog::level::info, "connection closed: process {} has ended, but another one has its socket", pid);
  }
  shutdown(watches.connection, SHUT_RDWR);  // gRPC sees the end, and ends the calls
  Forget(fd, watches);
}

void Connections::Forget(int fd, const Watches& watches) {
  {
    MutexLock lock(mu_);
    const auto it = by_fd_.find(fd);
    if (it != by_fd_.end() && it->second.watched == watches.connection) {
      if (--of_uid_[it->second.caller.uid] == 0) of_uid_.erase(it->second.caller.uid);
      by_fd_.erase(it);
    }
  }
  loop_.Unwatch(watches.connection);
  loop_.Unwatch(watches.process);
}

absl::StatusOr<Caller> Connections::Identify(const grpc::CallbackServerContext& context, size_t calls) const {
  absl::StatusOr<Caller> caller = Peer(context);
  if (!caller.ok()) return caller;
  if (absl::Status status = rates_.Take(caller->uid, std::chrono::steady_clock::now(), calls); !status.ok()) {
    return status;
  }
  return caller;
}

absl::StatusOr<Caller> Connections::Peer(const grpc::CallbackServerContext& context) const {
  // For a connection that was handed over, gRPC's name of the peer is "fd:" and the descriptor number.
  const std::string peer = context.peer();
  absl::string_view number = peer;
  int fd = -1;
  if (absl::ConsumePrefix(&number, "fd:") && absl::SimpleAtoi(number, &fd)) {
    MutexLock lock(mu_);
    const auto it = by_fd_.find(fd);
    if (it != by_fd_.end()) {
      if (!HasEnded(*it->second.caller.pidfd)) return it->second.caller;
    }
  }
  return absl::UnauthenticatedError("the process that made the connection is gone");
}

}  // namespace vrambroker
