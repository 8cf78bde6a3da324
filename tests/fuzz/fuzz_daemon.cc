// SPDX-License-Identifier: Apache-2.0
#include "tests/fuzz/fuzz_daemon.h"

#include <google/protobuf/stubs/logging.h>
#include <grpcpp/create_channel_posix.h>
#include <spdlog/spdlog.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <iostream>

#include "absl/strings/str_cat.h"
#include "allocator/base/bytes.h"
#include "allocator/device/host_device.h"
#include "server/identity/unix_socket.h"
#include "server/rpc/descriptor_budget.h"
#include "tests/support/allocate_slowly.h"

namespace vrambroker {
namespace {

constexpr uint64_t kStride = 64_KiB;  // distance between checked bytes

// A client that answers every question at once, without memory.
class ControlEvents : public SessionEvents {
 public:
  void CloseSegments(absl::Span<const SegmentId> /*segments*/) override {}
  void LimitChanged(int /*device*/, uint64_t /*limit_bytes*/) override {}
  void Draining(const std::string&) override {}
  void Ended(const std::string& /*reason*/) override {}
  void Ask(uint64_t question_id, const ClientQuestion& /*question*/) override {
    if (const SessionPtr session = session_.lock()) {
      session->leased()->questions().Receive(question_id, 0, false, [](ClientAnswer&) { return absl::OkStatus(); });
    }
  }
  void set_session(const SessionPtr& session) { session_ = session; }

 private:
  std::weak_ptr<Session> session_;
};

unsigned char Pattern(uint64_t segment, uint64_t offset) {
  return static_cast<unsigned char>(1 + (segment * 31 + offset / kStride * 7) % 255);
}

}  // namespace

void Require(bool holds, absl::string_view rule) {
  if (holds) return;
  std::cerr << "violated: " << rule << '\n';
  std::abort();
}

FuzzDaemon& FuzzDaemon::Get() {
  static auto* const daemon = new FuzzDaemon;
  return *daemon;
}

FuzzDaemon::FuzzDaemon()
    : workers_(8, /*max_waiting_per_uid=*/3),
      rates_(1'000'000'000),  // never reached: a bound by the clock would not repeat
      snapshots_({.what = "snapshots under way", .per_uid = 2, .per_uid_bound = "max_snapshots_per_uid"}),
      connections_(&rates_, &processes_) {
  spdlog::set_level(spdlog::level::off);
  google::protobuf::SetLogHandler(nullptr);
  for (int i = 0; i < 2; ++i) {
    pools_.push_back(std::make_unique<SegmentPool>(MakeHostDevice(i, kCapacity), kCapacity, &next_segment_));
  }
  broker_ = std::make_unique<Broker>(
      BrokerOptions{.policy = std::make_shared<const Policy>(
                        PolicyOptions{.max_wait = std::chrono::milliseconds(50),  // inputs must end soon
                                      .max_sessions_per_uid = 6}),
                    .session_bounds = {.max_blocks = 100, .max_segments = 8},
                    .reclaim_timeout = std::chrono::milliseconds(50),
                    .watch_process = [](const UniqueFd&, const std::function<void()>&) { return 0; },
                    .unwatch_process = [](int) {}},
      std::vector<SegmentPool*>{pools_[0].get(), pools_[1].get()}, &workers_);
  returning_ = std::make_unique<Returning>(&broker_->sessions());
  session_calls_ = std::make_unique<SessionCalls>(broker_.get(), &rates_);
  segment_calls_ = std::make_unique<SegmentCalls>(broker_.get(), session_calls_.get(), &rpcs_);
  count_calls_ = std::make_unique<CountCalls>(broker_.get(), session_calls_.get(), &rpcs_, returning_.get());
  count_socket_ = std::make_unique<CountSocket>(&loop_, &processes_, broker_.get(), count_calls_.get());
  broker_service_ = std::make_unique<BrokerService>(broker_.get(), session_calls_.get(), &connections_, &rpcs_,
                                                    /*max_streams_per_uid=*/8);
  admin_service_ = std::make_unique<AdminService>(
      broker_.get(), &connections_, &snapshots_, /*socket_dir=*/"/run/vrambroker",
      [](const ReloadDone& done) { done(absl::FailedPreconditionError("there is no file")); });
  Connect();
  OpenControl();
}

void FuzzDaemon::Connect() {
  grpc::ServerBuilder builder;
  builder.RegisterService(broker_service_.get());
  builder.RegisterService(admin_service_.get());
  builder.SetMaxReceiveMessageSize(64 << 10);
  server_ = builder.BuildAndStart();
  Require(server_ != nullptr, "there is a server");

  char dir[] = "/tmp/vrambroker-fuzz-XXXXXX";
  Require(mkdtemp(dir) != nullptr, "there is a directory");
  const std::string path = absl::StrCat(dir, "/sock");
  const absl::StatusOr<ClientSocket> listener = ListenUnix(path, SOCK_STREAM, 0600);
  Require(listener.ok() && connections_.Serve(*listener, server_.get(), DescriptorBudget::Of(1024, 16)).ok(),
          "the daemon listens");
  static std::string count_path = absl::StrCat(dir, "/count");  // clients connect to the path until the end
  count_path_ = count_path;
  const absl::StatusOr<ClientSocket> counts = ListenUnix(count_path_, SOCK_SEQPACKET, 0600);
  Require(counts.ok() && count_socket_->Serve(*counts, DescriptorBudget::Of(65536, 16)).ok(), "the daemon counts");
  std::atexit([] {
    unlink(count_path.c_str());
    rmdir(count_path.substr(0, count_path.rfind('/')).c_str());
  });
  loop_thread_ = std::thread([this] {
    loop_.Run(std::chrono::milliseconds(5), [this] {
      broker_->OnTimer();
      count_socket_->Tick();
    });
  });

  UniqueFd fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un address = {.sun_family = AF_UNIX};
  std::memcpy(address.sun_path, path.c_str(), path.size());
  Require(connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0, "the daemon accepts");
  unlink(path.c_str());
  channel_ = grpc::CreateInsecureChannelFromFd("fuzz", fd.Release());
}

void FuzzDaemon::OpenControl() {
  // The control has the same user, which is the harder case: only the process distinguishes the control from the input.
  control_caller_ = {.pid = 1, .uid = geteuid(), .gid = getegid(), .pidfd = std::make_shared<UniqueFd>()};
  const auto open = [this](const std::string& name, Placement placement) {
    const auto events = std::make_shared<ControlEvents>();
    const absl::StatusOr<SessionPtr> session =
        broker_->OpenSession(control_caller_, {.name = name, .placement = placement}, events);
    Require(session.ok(), "the control opens a session");
    events->set_session(*session);
    return *session;
  };
  leasing_ = open("control", Placement::kLeased);
  remote_ = open("control-remote", Placement::kRemote);
  counted_ = open("control-counted", Placement::kCounted);

  absl::StatusOr<std::vector<Lease>> leases = leasing_->leased()->LeaseSlowly(0, {2_MiB, 4_MiB});
  Require(leases.ok(), "the control gets its segments");
  leases_ = *std::move(leases);
  for (const Lease& lease : leases_) {
    absl::StatusOr<UniqueFd> file =
        pools_[0]->RedeemTicket(std::get<FdTicket>(lease.handle), control_caller_.pid, control_caller_.uid);
    Require(file.ok(), "the control gets its descriptors");
    void* map = mmap(nullptr, lease.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file->get(), 0);
    Require(map != MAP_FAILED, "the control maps its segments");
    files_.push_back(*std::move(file));
    maps_.push_back(static_cast<unsigned char*>(map));
    for (uint64_t i = 0; i < lease.bytes; i += kStride) maps_.back()[i] = Pattern(Raw(lease.segment), i);
  }
  absl::StatusOr<Allocation> block = AllocateSlowly(*remote_->remote(), 1, 5_MiB);
  Require(block.ok(), "the control gets its block");
  block_ = *std::move(block);
  for (int i = 0; i < 2; ++i) {
    Require(counted_->counted()->ChargeSlowly(i, kCounted, /*resumes=*/0).ok(), "the control is charged");
  }
}

uint64_t FuzzDaemon::ChargedBytes(uint64_t session, int device) const {
  return pools_[device]->GetAccount(SessionId{session}).value_or(AccountState()).reserved_bytes;
}

void FuzzDaemon::OperateOnCounted(uint64_t which, uint64_t what) {
  const std::vector<SessionPtr> others = Others();
  for (size_t i = 0; i < others.size(); ++i) {
    const SessionPtr& session = others[(which + i) % others.size()];
    if (session->counted() == nullptr) continue;
    if (what < 8) {
      (void)broker_->EndSession(session, "an operator");
    } else if (what < 160) {
      (void)broker_->limits().SetLimit(session, Limit(what * 1_MiB / 2));
    } else {
      (void)broker_->limits().SetPriority(session, static_cast<int>(what % 5) - 2);
    }
    return;
  }
}

std::vector<uint64_t> FuzzDaemon::control_ids() const {
  std::vector<uint64_t> ids = {Raw(leasing_->id()), Raw(remote_->id()), Raw(counted_->id()), Raw(block_.block),
                               Raw(block_.segment)};
  for (const Lease& lease : leases_) ids.push_back(Raw(lease.segment));
  return ids;
}

std::vector<SessionPtr> FuzzDaemon::Others() const {
  std::vector<SessionPtr> others;
  for (const SessionView& info : broker_->operator_view().Look().sessions) {
    const absl::StatusOr<SessionPtr> session = broker_->sessions().Find(SessionRef(info.id));
    if (session.ok() && *session != leasing_ && *session != remote_ && *session != counted_) others.push_back(*session);
  }
  return others;
}

void FuzzDaemon::NameSession(uint64_t which, v1::SegmentCall* call) const {
  const std::vector<SessionPtr> others = Others();
  for (size_t i = 0; i < others.size(); ++i) {
    const SessionPtr& session = others[(which + i) % others.size()];
    if (!session->leases()) continue;
    const ResumeToken& token = session->leased()->resume_token();
    call->set_session_id(Raw(session->id()));
    call->set_resume_token(token.data(), token.size());
    return;
  }
}

void FuzzDaemon::CheckAndReset() {
  const uint64_t held[] = {6_MiB + kCounted, block_.segment_bytes + kCounted};
  const uint64_t segments[] = {leases_.size(), 1};
  const bool back = WaitFor(std::chrono::seconds(10), [&] {
    for (const SessionPtr& session : Others()) broker_->Close(session, "its process has gone");
    if (broker_->sessions().size() != 3) return false;
    for (int i = 0; i < 2; ++i) {
      // Idle memory, and calls that are just ending, are no loss.
      pools_[i]->ReleaseIdleSince(std::chrono::steady_clock::now() + std::chrono::hours(1));
      const PoolStats stats = pools_[i]->GetStats();
      if (stats.charged_bytes != held[i] || stats.reserved_bytes != held[i] || stats.idle_bytes != 0 ||
          stats.segments != segments[i] || stats.segment_allocs - stats.segment_frees != segments[i]) {
        return false;
      }
    }
    return true;
  });
  Require(back, "all memory of sessions that are closed is back");
  CheckControl();
}

void FuzzDaemon::CheckControl() {
  for (const SessionPtr& control : {leasing_, remote_, counted_}) {
    // The input may act as an operator, and may change guarantee and priority.
    broker_->limits().SetGuarantee(control, Limit(uint64_t{0}), [](const absl::Status&) {});
    (void)broker_->limits().SetPriority(control, 0);
  }
  for (const SessionPtr& control : {leasing_, remote_, counted_}) {
    Require(control->state() != SessionState::kClosed, "nobody closes another process's session");
  }
  for (int i = 0; i < 2; ++i) {
    Require(ChargedBytes(Raw(counted_->id()), i) == kCounted, "the control is charged what it was");
  }
  const AccountState leased = pools_[0]->GetAccount(leasing_->id()).value_or(AccountState());
  Require(leased.reserved_bytes == 6_MiB && leased.segments == leases_.size() && leased.returning_bytes == 0,
          "the control holds the segments that it had");
  const AccountState remote = pools_[1]->GetAccount(remote_->id()).value_or(AccountState());
  Require(remote.reserved_bytes == block_.segment_bytes && remote.segments == 1, "the control holds what it had");
  Require(remote_->GetMemoryStats(1).allocated_bytes.all.current == block_.block_bytes,
          "the control's block is its own");
  for (size_t k = 0; k < leases_.size(); ++k) {
    Require(pools_[0]->HandleFor(leasing_->id(), leases_[k].segment).ok(), "the control's segments are its own");
    for (uint64_t i = 0; i < leases_[k].bytes; i += kStride) {
      Require(maps_[k][i] == Pattern(Raw(leases_[k].segment), i), "the control's bytes are what it wrote");
    }
  }
  if (leasing_->state() == SessionState::kActive && remote_->state() == SessionState::kActive &&
      counted_->state() == SessionState::kActive) {
    return;
  }
  // The input may act as an operator, and has ended a control session.
  for (const SessionPtr& session : {leasing_, remote_, counted_}) broker_->Close(session, "a new one");
  for (size_t k = 0; k < leases_.size(); ++k) munmap(maps_[k], leases_[k].bytes);
  maps_.clear();
  files_.clear();
  OpenControl();
}

}  // namespace vrambroker
