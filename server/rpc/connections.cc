// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/connections.h"

#include <fcntl.h>
#include <grpcpp/server_posix.h>
#include <poll.h>
#include <spdlog/spdlog.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <chrono>
#include <functional>
#include <iterator>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "allocator/base/descriptor_reserve.h"
#include "server/base/client_log.h"
#include "server/base/random_token.h"
#include "server/identity/process_info.h"
#include "server/rpc/http2_frames.h"

namespace vrambroker {
namespace {

constexpr std::chrono::milliseconds kRetry(10);       // for connections waiting to be handed over
constexpr std::chrono::milliseconds kLastBytes(500);  // time for clients to read the last bytes
constexpr std::chrono::hours kNoTicks(24);
constexpr absl::string_view kTokenHeader = "vrambroker-connection";

}  // namespace

// A connection. Used on the loop's thread.
class Connections::Connection : public Relay::Owner {
 public:
  Connection(Connections* all, uint64_t id, ClientSocket client, Caller caller, std::string token)
      : all_(*all),
        id_(id),
        caller_(std::move(caller)),
        token_(std::move(token)),
        client_(client.get()),
        relay_(&all->loop_, std::move(client), Http2Header(kTokenHeader, token_), this) {}
  ~Connection() override { all_.loop_.Unwatch(caller_.pidfd->get()); }

  absl::Status Start() {
    absl::Status status = all_.loop_.Watch(caller_.pidfd, EPOLLIN, [this] { OnProcessEnd(); });
    return status.ok() ? relay_.Start() : status;
  }

  absl::Status OnClientFrame(const Http2Frame& frame) override {
    const absl::StatusOr<StreamEvent> event = streams_.FromClient(frame);
    return event.ok() ? Count(*event) : event.status();
  }
  absl::Status OnServerFrame(const Http2Frame& frame) override { return Count(streams_.FromServer(frame)); }
  absl::StatusOr<UniqueFd> OpenServer() override { return all_.OpenServer(*this); }
  void OnEnd(const absl::Status& why) override { all_.Forget(*this, why); }

  uint64_t id() const { return id_; }
  const Caller& caller() const { return caller_; }
  StreamGuard::Who who() const { return {.pid = caller_.pid, .user = caller_.user()}; }
  size_t open_streams() const { return streams_.open(); }
  Relay& relay() { return relay_; }
  const std::string& token() const { return token_; }

 private:
  absl::Status Count(StreamEvent event) {
    switch (event) {
      case StreamEvent::kNone:
        break;
      case StreamEvent::kBegan:
        return all_.guard_.Began(who(), streams_.open(), std::chrono::steady_clock::now());
      case StreamEvent::kCompleted:
        all_.guard_.Completed(who());
        break;
      case StreamEvent::kReset:
        return all_.guard_.Reset(who(), 1, std::chrono::steady_clock::now());
    }
    return absl::OkStatus();
  }

  void OnProcessEnd() {
    all_.loop_.Unwatch(caller_.pidfd->get());
    pollfd peer = {.fd = client_, .events = POLLRDHUP, .revents = 0};
    if (poll(&peer, 1, 0) == 0) {  // not closed with the process
      LogClientEvent(spdlog::level::info, "connection closed: process {} has ended, but another one has its socket",
                     caller_.pid);
    }
    relay_.HangUp();
  }

  Connections& all_;
  const uint64_t id_;
  const Caller caller_;
  const std::string token_;  // no client can guess another one's
  const int client_;
  StreamBook streams_;
  Relay relay_;
};

Connections::Connections(CallRates* rates, ProcessWatch* processes) : rates_(*rates), processes_(*processes) {}

Connections::~Connections() {
  Stop();
}

absl::Status Connections::Serve(const ClientSocket& listener, grpc::Server* server, const DescriptorBudget& budget) {
  budget_ = budget;
  const auto watch_timer = [this](int& timer, std::function<void()> due) -> absl::Status {
    UniqueFd made(timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK));
    if (!made.valid()) return DescriptorError(errno, "timerfd_create");
    timer = made.get();
    return loop_.Watch(std::move(made), EPOLLIN, [timer = timer, due = std::move(due)] {
      uint64_t expirations = 0;
      (void)!read(timer, &expirations, sizeof expirations);
      due();
    });
  };
  absl::Status status = watch_timer(retry_, [this] { OpenWaiting(); });
  if (status.ok()) status = watch_timer(cut_off_, [this] { CutOff(); });
  if (!status.ok()) return status;
  {
    MutexLock lock(server_mu_);
    server_ = server;
  }
  if (status = Listen(listener, {}); !status.ok()) return status;
  thread_ = std::thread([this] { loop_.Run(kNoTicks, [] {}); });
  return absl::OkStatus();
}

void Connections::StopAccepting() {
  MutexLock lock(server_mu_);
  server_ = nullptr;
}

void Connections::CutOffAfter(std::chrono::seconds time) const {
  const itimerspec spec = {.it_interval = {}, .it_value = {.tv_sec = time.count(), .tv_nsec = 0}};
  timerfd_settime(cut_off_, 0, &spec, nullptr);
}

void Connections::CutOff() {
  while (!connections_.empty()) Forget(*connections_.begin()->second, absl::CancelledError("the daemon stops"));
}

void Connections::Stop() {
  if (!thread_.joinable()) return;
  {
    MutexLock lock(mu_);
    const SteadyTime deadline = std::chrono::steady_clock::now() + kLastBytes;
    while (!handed_over_.empty() && closed_.WaitUntil(mu_, deadline)) {
    }
  }
  loop_.Stop();
  thread_.join();
  connections_.clear();
}

absl::Status Connections::Listen(const ClientSocket& listener, const ClaimOfListener& claim) {
  return loop_.Watch(listener.fd(), EPOLLIN, [this, fd = listener.fd(), claim] { AcceptAll(fd->get(), claim); });
}

void Connections::AcceptAll(int listener, const ClaimOfListener& claim) {
  // A bounded number at a time: served clients must not wait for a flood of connections.
  for (int i = 0; i < 16; ++i) {
    ClientSocket socket = acceptor_.Accept(listener);
    if (!socket.valid()) return;
    Accept(std::move(socket), claim);
  }
}

absl::Status Connections::CheckRoom(const Caller& caller) const {
  const auto it = of_user_.find(caller.user());
  return budget_.Admit(it == of_user_.end() ? 0 : it->second, connections_.size(),
                       /*privileged=*/!caller.claim.has_value() && (caller.uid == 0 || caller.uid == geteuid()));
}

void Connections::Accept(ClientSocket socket, const ClaimOfListener& claim) {
  absl::StatusOr<Caller> caller = GetPeer(socket.get(), &processes_);
  if (!caller.ok()) {
    LogClientEvent(spdlog::level::warn, "connection refused: {}", caller.status().ToString());
    return;
  }
  claim.AddTo(*caller);
  const UserKey user = caller->user();
  const StreamGuard::Who who = {.pid = caller->pid, .user = user};
  if (absl::Status status = guard_.CheckConnect(who, std::chrono::steady_clock::now()); !status.ok()) {
    return LogRefusal(spdlog::level::warn, *caller, status.message());
  }
  if (absl::Status status = CheckRoom(*caller); !status.ok()) {
    return LogRefusal(spdlog::level::err, *caller, status.message());
  }
  const absl::StatusOr<RandomToken> token = NewRandomToken();
  if (!token.ok()) return LogRefusal(spdlog::level::err, *caller, token.status().message());
  const uint64_t id = next_id_++;
  auto connection = std::make_unique<Connection>(this, id, std::move(socket), *std::move(caller),
                                                 absl::BytesToHexString({token->data(), token->size()}));
  if (absl::Status status = connection->Start(); !status.ok()) {
    return LogRefusal(spdlog::level::err, connection->caller(), status.message());
  }
  connections_.emplace(id, std::move(connection));
  ++of_user_[user];
}

absl::StatusOr<UniqueFd> Connections::OpenServer(Connection& connection) {
  if (!guard_.MayOpen(connection.caller().user(), std::chrono::steady_clock::now())) {
    if (waiting_.empty()) {
      const itimerspec spec = {.it_interval = {}, .it_value = {.tv_nsec = std::chrono::nanoseconds(kRetry).count()}};
      timerfd_settime(retry_, 0, &spec, nullptr);
    }
    waiting_.push_back(connection.id());
    return absl::UnavailableError("its user connects too often");
  }
  std::array<int, 2> ends = {-1, -1};
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends.data()) != 0) {
    return DescriptorError(errno, "socketpair");
  }
  UniqueFd ours(ends[0]);
  UniqueFd grpcs(ends[1]);
  MutexLock server_lock(server_mu_);
  if (server_ == nullptr) return absl::CancelledError("the daemon stops");
  {
    MutexLock lock(mu_);
    handed_over_.emplace(connection.token(), connection.caller());
  }
  // Returns soon because no bytes wait to be read. With bytes waiting, gRPC would serve the client on this thread.
  grpc::AddInsecureChannelFromFd(server_, grpcs.Release());
  return ours;
}

void Connections::OpenWaiting() {
  for (const uint64_t id : std::exchange(waiting_, {})) {
    if (const auto it = connections_.find(id); it != connections_.end()) it->second->relay().Open();
  }
}

void Connections::Forget(Connection& connection, const absl::Status& why) {
  absl::Status status = guard_.Reset(connection.who(), connection.open_streams(), std::chrono::steady_clock::now());
  if (!why.ok()) status = why;
  if (!status.ok() && !absl::IsCancelled(status)) {
    LogClientEvent(spdlog::level::err, LogLine("connection closed")
                                           .Add("pid", connection.caller().pid)
                                           .Add("uid", connection.caller().uid)
                                           .Add("why", status.message()));
  }
  if (--of_user_[connection.caller().user()] == 0) of_user_.erase(connection.caller().user());
  {
    MutexLock lock(mu_);
    handed_over_.erase(connection.token());
    if (handed_over_.empty()) closed_.NotifyAll();
  }
  connections_.erase(connection.id());
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

absl::StatusOr<Caller> Connections::Identify(const grpc::CallbackServerContext& context, size_t calls) const {
  absl::StatusOr<Caller> caller = Peer(context);
  if (!caller.ok()) return caller;
  if (absl::Status status = rates_.Take(caller->user(), std::chrono::steady_clock::now(), calls); !status.ok()) {
    return status;
  }
  return caller;
}

absl::StatusOr<Caller> Connections::Peer(const grpc::CallbackServerContext& context) const {
  const auto [token, end] = context.client_metadata().equal_range({kTokenHeader.data(), kTokenHeader.size()});
  if (token != end) {  // a header of this name sent by a client names no connection
    MutexLock lock(mu_);
    const auto it = handed_over_.find(absl::string_view(token->second.data(), token->second.size()));
    if (it != handed_over_.end() && std::next(token) == end && !HasEnded(*it->second.pidfd)) return it->second;
  }
  return absl::UnauthenticatedError("the process that made the connection is gone");
}

}  // namespace vrambroker
