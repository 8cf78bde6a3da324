// SPDX-License-Identifier: Apache-2.0
#include "server/connections.h"

#include <fcntl.h>
#include <grpcpp/server_posix.h>
#include <poll.h>
#include <spdlog/spdlog.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <chrono>
#include <memory>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "allocator/descriptor_reserve.h"
#include "server/client_log.h"
#include "server/process_info.h"

namespace vrambroker {
namespace {

constexpr uint64_t kMaxOpenStreams = 1024;              // four times what gRPC's settings allow
constexpr std::chrono::milliseconds kBetweenLooks(20);  // of the process's processor time

}  // namespace

absl::Status Connections::Serve(UniqueFd listener, grpc::Server* server, const DescriptorBudget& budget) {
  server_ = server;
  budget_ = budget;
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

absl::Status Connections::CheckRoom(uid_t uid) const {
  const auto it = of_uid_.find(uid);
  if (const size_t open = it == of_uid_.end() ? 0 : it->second; open >= budget_.connections_per_uid) {
    return absl::ResourceExhaustedError(
        absl::StrCat("the user has ", open, " open, the most that max_connections_per_uid or the limit of ",
                     budget_.limit, " file descriptors allows; to allow more, raise LimitNOFILE"));
  }
  const bool may_use_reserve = uid == 0 || uid == geteuid();
  if (by_fd_.size() < budget_.connections - (may_use_reserve ? 0 : budget_.for_root)) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat("all users have ", by_fd_.size(), " open, the most that ",
                                                   budget_.limit, " file descriptors allow; raise LimitNOFILE"));
}

void Connections::Accept(UniqueFd owned) {
  const int fd = owned.get();
  absl::StatusOr<Caller> caller = GetPeer(fd);
  if (!caller.ok()) {
    LogClientEvent(spdlog::level::warn, "connection refused: {}", caller.status().ToString());
    return;
  }
  if (absl::Status status = banned_.Check(caller->pid, caller->uid, std::chrono::steady_clock::now()); !status.ok()) {
    return LogRefusal(spdlog::level::warn, *caller, status.message());
  }
  UniqueFd watched(fcntl(fd, F_DUPFD_CLOEXEC, 0));
  if (!watched.valid()) {
    return LogRefusal(spdlog::level::err, *caller, DescriptorError(errno, "fcntl(F_DUPFD_CLOEXEC)").message());
  }
  const std::shared_ptr<const UniqueFd> pidfd = caller->pidfd;
  const pid_t pid = caller->pid;
  const Watches watches{.connection = watched.get(), .process = pidfd->get()};
  absl::Status room;
  {
    MutexLock lock(mu_);
    room = CheckRoom(caller->uid);
  }
  if (!room.ok()) return LogRefusal(spdlog::level::err, *caller, room.message());
  Watched& connection = watched_[watches.connection];
  connection = {.caller = *caller, .fd = fd, .conduct = std::make_unique<StreamConduct>(kMaxOpenStreams)};
  {
    MutexLock lock(mu_);
    // gRPC may have closed an earlier connection of this number before the loop saw its end.
    if (const auto it = by_fd_.find(fd); it != by_fd_.end()) --of_uid_[it->second.caller.uid];
    ++of_uid_[caller->uid];
    by_fd_[fd] = Connection{.caller = *std::move(caller), .watched = watches.connection};
  }
  absl::Status status = loop_.Watch(std::move(watched), EPOLLRDHUP, [this, fd, watches] { Forget(fd, watches); });
  if (status.ok()) status = loop_.Watch(pidfd, EPOLLIN, [this, fd, watches, pid] { HangUp(fd, watches, pid); });
  if (!status.ok()) {
    spdlog::error("connection refused: {}", status.ToString());
    Forget(fd, watches);
    return;
  }
  ++handed_over_;
  handing_over_->Submit(
      [server = server_, number = owned.Release()] { grpc::AddInsecureChannelFromFd(server, number); });
}

void Connections::LogRefusal(spdlog::level::level_enum level, const Caller& caller, absl::string_view why) {
  const std::optional<uint64_t> left_out = refusals_.Take(std::chrono::steady_clock::now());
  if (!left_out.has_value()) return;
  LogLine("connection refused")
      .Add("pid", caller.pid)
      .Add("uid", caller.uid)
      .Add("why", why)
      .Add("others_since_last_line", *left_out)
      .Write(level);
}

bool Connections::FindBooks() {
  if (found_ == handed_over_) return true;
  const std::optional<intptr_t> begun = handing_over_->Pause(std::chrono::steady_clock::now());
  if (!begun.has_value()) return false;
  found_ = *begun;  // the others wait for a thread
  while (const std::optional<StreamBooks::Found> found = books_.Next(handed_over_)) {
    int watched = -1;
    {
      MutexLock lock(mu_);
      if (const auto it = by_fd_.find(found->fd); it != by_fd_.end()) watched = it->second.watched;
    }
    const auto it = watched_.find(watched);
    if (it == watched_.end()) continue;
    // Of a number that gRPC has used again, the later books are the connection's.
    it->second.books = found->books;
    it->second.conduct = std::make_unique<StreamConduct>(kMaxOpenStreams);
  }
  handing_over_->Resume();
  return true;
}

bool Connections::BanAttacker(Watched& connection) {
  const std::optional<StreamCounts> counts = StreamBooks::CountsOf(connection.books);
  if (!counts.has_value()) return false;
  const absl::Status status = connection.conduct->Judge(*counts, std::chrono::steady_clock::now());
  if (status.ok()) return false;
  LogClientEvent(spdlog::level::err, LogLine("connection closed")
                                         .Add("pid", connection.caller.pid)
                                         .Add("uid", connection.caller.uid)
                                         .Add("why", status.message()));
  banned_.Add(connection.caller.pid, connection.caller.uid, std::chrono::steady_clock::now());
  return true;
}

bool Connections::CloseAttackers() {
  // Idle connections cost nothing: an attack takes processor time, and it is found as soon as it has taken a little.
  timespec used = {};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used);
  const auto now = std::chrono::seconds(used.tv_sec) + std::chrono::nanoseconds(used.tv_nsec);
  // Those that wait to be handed over wait for this.
  if (!FindBooks() || now - judged_at_ < kBetweenLooks) return std::exchange(attacked_, false);
  judged_at_ = now;
  for (auto& [fd, connection] : watched_) {
    if (!BanAttacker(connection)) continue;
    shutdown(fd, SHUT_RDWR);  // gRPC closes it, and the loop sees its end
    connection.books = 0;
    attacked_ = true;
  }
  return std::exchange(attacked_, false);
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
  // An attacker may have been faster than the last look, or gRPC itself closed the connection.
  (void)FindBooks();
  if (const auto it = watched_.find(watches.connection); it != watched_.end()) {
    if (BanAttacker(it->second)) attacked_ = true;
    watched_.erase(it);
  }
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
