// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/count_socket.h"

#include <spdlog/spdlog.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "allocator/base/descriptor_reserve.h"
#include "server/requests/charges.h"
#include "server/sessions/counted_session.h"

namespace vrambroker {
namespace {

constexpr std::chrono::seconds kTimeForHello(10);  // before HELLO or JOIN

bool SendAnswer(int socket, const CountAnswer& answer) {
  return send(socket, &answer, sizeof answer, MSG_NOSIGNAL | MSG_DONTWAIT) == static_cast<ssize_t>(sizeof answer);
}

// Refuses a connection: the client learns the reason as the answer to its first call. Reads a call sent already, or the
// kernel would first report the unread call (ECONNRESET).
void Refuse(const ClientSocket& socket, const absl::Status& status) {
  shutdown(socket.get(), SHUT_RD);
  CountRequest unread;
  while (socket.Receive(&unread, sizeof unread) > 0) {
  }
  (void)SendAnswer(socket.get(), CountAnswerOf(VRAMBROKER_COUNT_HELLO, status));
}

}  // namespace

// Thread-safe.
class CountSocket::Line {
 public:
  Line(uint64_t key, const std::shared_ptr<const UniqueFd>& socket) : key_(key), socket_(socket) {}

  uint64_t key() const { return key_; }

  // False: the last call has no answer yet.
  bool StartCall() { return !in_call_.exchange(true); }
  bool in_call() const { return in_call_.load(); }

  SessionPtr session() const ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(mu_);
    return session_;
  }
  bool is_main() const ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(mu_);
    return is_main_;
  }
  // False: the connection has gone already.
  bool SetSession(const SessionPtr& session, uint64_t resumes, bool is_main) ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(mu_);
    if (is_gone_) return false;
    session_ = session;
    is_main_ = is_main;
    resumes_ = resumes;
    return true;
  }
  CountOrigin origin() const ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(mu_);
    return {.cancel_key = key_, .resumes = resumes_};
  }
  void SetGone() ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(mu_);
    is_gone_ = true;
  }

  // Charge of the last call, unless the client has continued since. A client that closes its end with the answer unread
  // has given up.
  struct Grant {
    uint64_t device = 0;
    uint64_t bytes = 0;
  };
  // Ends the call. False: the client can no longer get the answer, and the grant has no owner. Otherwise the line owns
  // the grant from the moment the client has the answer.
  bool Answer(const CountAnswer& answer, std::optional<Grant> grant = std::nullopt) ABSL_LOCKS_EXCLUDED(mu_) {
    const std::shared_ptr<const UniqueFd> socket = socket_.lock();
    MutexLock lock(mu_);
    in_call_ = false;  // first: a client with the answer may send the next packet
    if (is_gone_ || socket == nullptr || !SendAnswer(socket->get(), answer)) return false;
    grant_ = grant;
    return true;
  }
  // Notes the end of the connection, as reported by recv(): ECONNRESET means an unread answer.
  void SetEnded(ssize_t received, int error) ABSL_LOCKS_EXCLUDED(mu_) {
    if (received == 0 || error != ECONNRESET) ForgetGrant();
  }
  // Called when the client has read its last answer.
  void ForgetGrant() { (void)TakeGrant(); }
  std::optional<Grant> TakeGrant() ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(mu_);
    return std::exchange(grant_, std::nullopt);
  }

 private:
  const uint64_t key_;
  const std::weak_ptr<const UniqueFd> socket_;
  std::atomic<bool> in_call_{false};
  mutable Mutex mu_;  // held for these members and for sending; no other lock is taken
  SessionPtr session_ ABSL_GUARDED_BY(mu_);
  bool is_main_ ABSL_GUARDED_BY(mu_) = false;  // the session ends with the connection
  uint64_t resumes_ ABSL_GUARDED_BY(mu_) = 0;
  bool is_gone_ ABSL_GUARDED_BY(mu_) = false;
  std::optional<Grant> grant_ ABSL_GUARDED_BY(mu_);
};

// ---- Connections ----

absl::Status CountSocket::Serve(const ClientSocket& listener, const DescriptorBudget& budget) {
  listener_ = listener.get();
  budget_ = budget;
  return Listen(listener, {});
}

absl::Status CountSocket::Listen(const ClientSocket& listener, const ClaimOfListener& claim) {
  return loop_.Watch(listener.fd(), EPOLLIN, [this, fd = listener.fd(), claim] { AcceptAll(fd->get(), claim); });
}

void CountSocket::AcceptAll(int listener, const ClaimOfListener& claim) {
  for (int i = 0; i < 64; ++i) {
    ClientSocket socket = acceptor_.Accept(listener);
    if (!socket.valid()) return;
    absl::StatusOr<Caller> caller = GetPeer(socket.get(), &processes_);
    absl::Status status = caller.status();
    if (status.ok()) {
      claim.AddTo(*caller);
      status = CheckRoom(*caller);
    }
    if (status.ok()) status = CheckNotReserved(socket.get());
    const int number = socket.get();
    if (status.ok()) {
      status = loop_.Watch(socket.fd(), EPOLLIN | EPOLLRDHUP, [this, number] { OnReadable(number); });
    }
    if (!status.ok()) {
      Refuse(socket, status);
      continue;
    }
    ++of_user_[caller->user()];
    auto line = std::make_shared<Line>(++last_key_, socket.fd());
    const std::optional<ProcessImage> image = ImageOf(caller->pid);
    connections_[number] = {.socket = std::move(socket),
                            .caller = *std::move(caller),
                            .image = image,
                            .opened = std::chrono::steady_clock::now(),
                            .line = std::move(line)};
  }
}

absl::Status CountSocket::CheckRoom(const Caller& caller) const {
  const auto of_user = of_user_.find(caller.user());
  return budget_.AdmitCounted(of_user == of_user_.end() ? 0 : of_user->second, connections_.size(),
                              caller.uid == 0 || caller.uid == geteuid());
}

void CountSocket::OnReadable(int fd) {
  if (!ReadPacket(connections_.at(fd))) Drop(fd);
}

bool CountSocket::ReadPacket(Connection& connection) {
  struct Packet {
    CountRequest request = {};
    char more = 0;  // to notice a longer packet
  } packet;
  const ssize_t size = connection.socket.Receive(&packet, sizeof packet);
  Line& line = *connection.line;
  if (size < 0 && errno == EAGAIN) return true;
  if (size <= 0) {
    line.SetEnded(size, errno);
    return false;
  }
  if (connection.socket.HasUnread() || !line.StartCall()) return false;  // clients must wait for their answers
  line.ForgetGrant();
  const bool is_request = size == sizeof(CountRequest) || size == VRAMBROKER_COUNT_NO_DEVICES_REQUEST_BYTES ||
                          size == VRAMBROKER_COUNT_SHORT_REQUEST_BYTES;
  const auto refuse = [&](const absl::Status& status) {
    return line.Answer(CountAnswerOf(is_request ? packet.request.call : 0, status));
  };
  if (!is_request) {
    return refuse(absl::InvalidArgumentError(
        absl::StrCat("a packet of ", size, " bytes: a request has ", VRAMBROKER_COUNT_SHORT_REQUEST_BYTES, ", ",
                     VRAMBROKER_COUNT_NO_DEVICES_REQUEST_BYTES, " or ", sizeof(CountRequest))));
  }
  const CountRequest& request = packet.request;
  if (request.version != VRAMBROKER_COUNT_VERSION) {
    return refuse(absl::FailedPreconditionError(
        absl::StrCat("version: ", request.version, "; this daemon's is ", VRAMBROKER_COUNT_VERSION,
                     ": libvrambroker-preload.so and vrambrokerd have to be of one release")));
  }
  const SessionPtr session = line.session();
  if (session == nullptr) {
    if (request.call == VRAMBROKER_COUNT_HELLO) {
      Hello(connection, request);
    } else if (request.call == VRAMBROKER_COUNT_JOIN) {
      Join(connection, request);
    } else {
      return refuse(absl::FailedPreconditionError("call: a connection begins with HELLO or JOIN"));
    }
    return true;
  }
  if (request.call == VRAMBROKER_COUNT_WAIT && line.is_main()) {
    return refuse(absl::FailedPreconditionError("call: WAIT needs a connection of its own (JOIN)"));
  }
  calls_.Make(session, request, line.origin(), [of = connection.line, request](const CountAnswer& answer) {
    std::optional<Line::Grant> grant;
    if (answer.code == 0 && (request.call == VRAMBROKER_COUNT_CHARGE || request.call == VRAMBROKER_COUNT_WAIT)) {
      grant = Line::Grant{.device = request.device, .bytes = request.bytes};
    }
    return of->Answer(answer, grant);
  });
  return true;
}

void CountSocket::Hello(const Connection& connection, const CountRequest& request) {
  FindLost(connection.caller, connection.socket.get());
  greeted_[connection.caller.pid].insert(connection.socket.get());
  calls_.Hello(connection.caller, request, [this, line = connection.line](const absl::StatusOr<SessionPtr>& session) {
    if (!session.ok()) {
      (void)line->Answer(CountAnswerOf(VRAMBROKER_COUNT_HELLO, session.status()));
      return;
    }
    const uint64_t resumes = (*session)->counted()->resumes();
    if (!line->SetSession(*session, resumes, /*is_main=*/true)) {
      if (resumes > 0) return broker_.Disconnect(*session);
      return broker_.Close(*session, "its connection ended before it was open", CloseReason::kNotOpened);
    }
    CountAnswer answer = calls_.Welcome(VRAMBROKER_COUNT_HELLO, **session);
    const RandomToken token = (*session)->counted()->join_token();
    std::memcpy(answer.token, token.data(), sizeof answer.token);
    (void)line->Answer(answer);
  });
}

void CountSocket::Join(const Connection& connection, const CountRequest& request) {
  const absl::StatusOr<CountCalls::Joined> joined = calls_.Join(connection.caller, request);
  Line& line = *connection.line;
  if (joined.ok()) (void)line.SetSession(joined->session, joined->resumes, /*is_main=*/false);
  (void)line.Answer(joined.ok() ? calls_.Welcome(VRAMBROKER_COUNT_JOIN, *joined->session)
                                : CountAnswerOf(VRAMBROKER_COUNT_JOIN, joined.status()));
}

// ---- Ends ----

void CountSocket::Drop(int fd) {
  const auto it = connections_.find(fd);
  const std::shared_ptr<Line> line = it->second.line;
  const std::optional<ProcessImage> image = it->second.image;
  const auto of_user = of_user_.find(it->second.caller.user());
  if (--of_user->second == 0) of_user_.erase(of_user);
  if (const auto greeted = greeted_.find(it->second.caller.pid); greeted != greeted_.end()) {
    greeted->second.erase(fd);
    if (greeted->second.empty()) greeted_.erase(greeted);
  }
  line->SetGone();
  connections_.erase(it);
  loop_.Unwatch(fd);
  const SessionPtr session = line->session();
  if (session == nullptr) return;
  if (line->is_main()) lost_.push_back({.session = session, .image = image});
  broker_.waiting().Cancel(session, line->key());
  if (const std::optional<Line::Grant> unread = line->TakeGrant()) {
    (void)broker_.charges().Uncharge(session, unread->device, unread->bytes);
  }
}

void CountSocket::FindLost(const Caller& caller, int asking) {
  std::vector<int> gone;
  if (const auto greeted = greeted_.find(caller.pid); greeted != greeted_.end()) {
    absl::erase_if(greeted->second, [this](int fd) {  // connections that were refused
      const Line& line = *connections_.at(fd).line;
      return !line.in_call() && line.session() == nullptr;
    });
    for (const int fd : greeted->second) {
      if (fd == asking) continue;
      char byte = 0;
      const ssize_t size = recv(fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
      if (size > 0 || (size < 0 && errno == EAGAIN)) continue;
      connections_.at(fd).line->SetEnded(size, errno);
      gone.push_back(fd);
    }
  }
  for (const int fd : gone) Drop(fd);
  // Loses each session at most once: a session may be resumed.
  std::erase_if(lost_, [&](const Lost& lost) {
    if (lost.session->caller().pid != caller.pid) return false;
    Lose(lost);
    return true;
  });
}

void CountSocket::Lose(const Lost& lost) {
  const Caller& caller = lost.session->caller();
  // The broker notices by itself that a process has ended.
  if (HasEnded(*caller.pidfd)) return;
  // exec() has freed the process's GPU memory: exec() closes the driver's files, and the memory went with the program.
  // A new program does not undo an operator's end of the session.
  const std::optional<ProcessImage> image = ImageOf(caller.pid);
  const bool is_another = image.has_value() && lost.image.has_value() && *image != *lost.image;
  if (is_another && lost.session->state() != SessionState::kEnded) {
    return broker_.Close(lost.session, "its process runs another program", CloseReason::kGoodbye);
  }
  broker_.Disconnect(lost.session);
}

void CountSocket::Tick() {
  for (const Lost& lost : std::exchange(lost_, {})) Lose(lost);
  const SteadyTime oldest = std::chrono::steady_clock::now() - kTimeForHello;
  std::vector<int> unwanted;
  for (const auto& [fd, connection] : connections_) {
    const SessionPtr session = connection.line->session();
    const bool is_silent = session == nullptr && connection.opened < oldest && !connection.line->in_call();
    if (is_silent || (session != nullptr && session->state() == SessionState::kClosed)) unwanted.push_back(fd);
  }
  for (const int fd : unwanted) Drop(fd);
}

}  // namespace vrambroker
