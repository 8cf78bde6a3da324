// SPDX-License-Identifier: Apache-2.0
//
// Threads: the event loop on the main thread (accepting, signals, ended processes, the descriptor socket); gRPC's own
// (handlers, which never block); the workers (driver calls, waiting for clients); a thread per device giving cached
// memory back to the driver; a thread for the HTTP port, and some for its pages.
#include "server/daemon.h"

#include <fcntl.h>
#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>
#include <signal.h>
#include <spdlog/spdlog.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <string>
#include <utility>

#include "absl/container/btree_map.h"
#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "allocator/base/descriptor_reserve.h"
#include "allocator/base/version.h"
#include "server/base/event_loop.h"
#include "server/base/memory_trim.h"
#include "server/base/random_token.h"
#include "server/base/systemd.h"
#include "server/base/worker_pool.h"
#include "server/core/broker.h"
#include "server/devices.h"
#include "server/http/http_api.h"
#include "server/http/http_server.h"
#include "server/http/timeline.h"
#include "server/identity/claim_dir.h"
#include "server/identity/claim_members.h"
#include "server/identity/process_watch.h"
#include "server/identity/saved_state.h"
#include "server/identity/socket_dir.h"
#include "server/identity/unix_socket.h"
#include "server/identity/user_names.h"
#include "server/monitoring/metrics.h"
#include "server/pool/idle_decay.h"
#include "server/rpc/admin_service.h"
#include "server/rpc/broker_service.h"
#include "server/rpc/connections.h"
#include "server/rpc/count_calls.h"
#include "server/rpc/count_socket.h"
#include "server/rpc/descriptor_socket.h"
#include "server/rpc/library_logs.h"
#include "server/rpc/rpc_meter.h"
#include "server/rpc/segment_calls.h"
#include "server/wire/claim_file.h"

namespace vrambroker {
namespace {

constexpr size_t kMaxWorkers = 64;
constexpr size_t kFewConnections = 64;  // per user; fewer are worth a warning
constexpr int kMaxMessageBytes = 64 << 10;
constexpr size_t kGrpcMemoryBytes = 1 << 30;  // gRPC throttles connections before buffering more
// Reflection, the only synchronous service, takes a thread for each open call.
constexpr int kMaxSyncThreads = 16;
constexpr int kMaxCallsPerConnection = 256;
constexpr std::chrono::milliseconds kTick(200);
constexpr std::chrono::seconds kLastCalls(1);  // time for running calls to end when the daemon stops
constexpr std::chrono::seconds kBetweenDescriptorErrors(10);
constexpr std::chrono::seconds kHealthPeriod(2);
constexpr std::chrono::seconds kReconciliationPeriod(5);
constexpr int kLooksUntilLost = 3;                   // failed checks in a row; a driver may fail once
constexpr std::chrono::seconds kHealthPatience(30);  // with an unresponsive driver, before logging
// A dead process is nearly, not strictly, a quiet GPU; see Config::settle_time.
constexpr absl::Duration kSettleTime = absl::Milliseconds(500);

// The parts of a running daemon. Members are in the order of construction.
class Daemon {
 public:
  Daemon(const Config& config, const ConfigReader& read_again, std::vector<ChosenDevice> devices, SavedState state)
      : config_(config),
        read_again_(read_again),
        state_(std::move(state)),
        members_(absl::StrCat(config.socket_dir, "/vrambroker.members")),
        pools_(MakePools(std::move(devices), config, &next_segment_)),
        workers_(std::make_unique<WorkerPool>(kMaxWorkers, config.max_questions_per_uid)),
        broker_(
            BrokerOptions{
                .run_id = RandomName(),
                .policy = MakePolicy(config),
                .allocator = config.alloc_conf.options,
                .record_events = config.record_events,
                .is_record_events_set = config.is_record_events_set,
                .max_recorded_events_per_uid = config.max_recorded_events_per_uid,
                .session_bounds = config.session_bounds,
                .max_waiting_per_uid = config.max_waiting_per_uid,
                .max_tenants = config.max_metrics_clients / std::max<size_t>(pools_.size(), 1),
                .reclaim_timeout = absl::ToChronoMilliseconds(config.reclaim_timeout),
                .hold_back_time = absl::ToChronoMilliseconds(config.hold_back_time),
                .hold_back_limit = config.hold_back_limit,
                .overhead_allowance_bytes = config.overhead_allowance_bytes,
                .fragmentation_window = absl::ToChronoMilliseconds(config.fragmentation_window),
                .claims =
                    {.serve = [this](const Claim& claim) { return ServeClaim(claim); },
                     .stop_serving = [this](const Claim& claim) { StopServingClaim(claim); },
                     .save = [this](const std::vector<Claim>& claims) { return saver_.Save(ClaimsFile(), claims); },
                     .save_state = [this](const Claim& claim) { return SaveClaimState(ClaimsFile(), claim); },
                     .note_member = [this](const ProcessId& process,
                                           const std::string& claim) { members_.Note(process, claim); },
                     .note_holder = [this](const ProcessId& process,
                                           const std::string& claim) { members_.NoteUnlessKnown(process, claim); },
                     .forget_members = [this](const std::string& claim) { members_.Forget(claim); },
                     .check_name = [this](absl::string_view name) { return CheckClaimDir(config_.socket_dir, name); },
                     .most_own = DescriptorBudget::Of(DescriptorLimit(), config.max_connections_per_uid).own_claims},
                .settings_file = absl::StrCat(config.socket_dir, "/vrambroker.sessions"),
                .user_name = [names = std::make_shared<UserNames>()](uid_t uid) { return names->Get(uid); },
                .set_timer = [this](SteadyTime time) { SetTimer(time); },
                .watch_process = [this](const UniqueFd& pidfd,
                                        auto gone) { return WatchProcess(pidfd, std::move(gone)); },
                .unwatch_process = [this](int watch) { loop_.Unwatch(watch); }},
            Pointers(pools_), workers_.get()),
        call_rates_(config.max_calls_per_second_per_uid),
        snapshots_({.what = "snapshots under way",
                    .per_uid = config.max_snapshots_per_uid,
                    .per_uid_bound = "max_snapshots_per_uid",
                    .in_all = config.max_snapshots,
                    .in_all_bound = "max_snapshots"}),
        connections_(&call_rates_, &processes_),
        session_calls_(&broker_, &call_rates_),
        segment_calls_(&broker_, &session_calls_, &rpcs_),
        descriptor_socket_(&loop_, &processes_, Pointers(pools_), &segment_calls_),
        returning_(&broker_.sessions()),
        count_calls_(&broker_, &session_calls_, &rpcs_, &returning_),
        count_socket_(&loop_, &processes_, &broker_, &count_calls_),
        broker_service_(&broker_, &session_calls_, &connections_, &rpcs_, 2 * config.max_sessions_per_uid),
        admin_service_(&broker_, &connections_, &snapshots_, config.socket_dir,
                       [this](const ReloadDone& done) { workers_->Submit([this, done] { done(Reload()); }); }),
        metrics_({.view =
                      [this] {
                        BrokerView view = broker_.operator_view().Look();
                        view.is_serving = phase_ == DaemonState::kServing;
                        return view;
                      },
                  .rpcs = &rpcs_,
                  .reload = &reload_state_,
                  .http = &http_stats_,
                  .max_clients = config.max_metrics_clients,
                  .max_clients_per_uid = config.max_metrics_clients_per_uid}),
        timeline_(pools_.size()),
        http_api_(&broker_, &timeline_,
                  {.metrics = [this] { return metrics_.Text(); },
                   .health = [this] { return Health(); },
                   .state = [this] { return phase_.load(); },
                   .socket_dir = config.socket_dir}) {
    for (const auto& pool : pools_) {
      idle_decay_.push_back(std::make_unique<IdleDecay>(pool.get(), absl::ToChronoMilliseconds(config.idle_decay)));
    }
  }

  absl::Status Start();
  absl::Status Run();  // see RunDaemon()

 private:
  static std::vector<std::unique_ptr<SegmentPool>> MakePools(std::vector<ChosenDevice> devices, const Config& config,
                                                             std::atomic<uint64_t>* next_segment) {
    std::vector<std::unique_ptr<SegmentPool>> pools;
    pools.reserve(devices.size());
    for (ChosenDevice& chosen : devices) {
      const bool tells_holders = chosen.device->properties().tells_holders;
      const absl::Duration settle = config.settle_time.value_or(tells_holders ? absl::ZeroDuration() : kSettleTime);
      const SegmentPoolOptions options{.idle_limit_bytes = config.idle_limit_bytes,
                                       .settle_time = absl::ToChronoMilliseconds(settle),
                                       .churn_window = absl::ToChronoMilliseconds(config.hold_back_time),
                                       .headroom_bytes = chosen.headroom_bytes,
                                       .most_free_bytes = chosen.most_free_bytes};
      pools.push_back(
          std::make_unique<SegmentPool>(std::move(chosen.device), chosen.capacity_bytes, next_segment, options));
    }
    return pools;
  }
  // Finds memory left by an earlier run.
  absl::Status FindCarriedOver();
  // Restores the claims of an earlier run. Call before charging memory, and before serving clients.
  absl::Status RestoreClaims();
  absl::Status ServeClaim(const Claim& claim) ABSL_LOCKS_EXCLUDED(claim_sockets_mu_);
  void Unlisten(const ClaimSockets& sockets) {
    connections_.Unlisten(sockets.connections);
    descriptor_socket_.Unlisten(sockets.descriptors);
    count_socket_.Unlisten(sockets.counts);
  }
  void StopServingClaim(const Claim& claim) ABSL_LOCKS_EXCLUDED(claim_sockets_mu_);
  // Forgets the recorded free bytes if clients hold no memory: at the next start all memory is free.
  void ForgetFreeBytes();
  static std::vector<SegmentPool*> Pointers(const std::vector<std::unique_ptr<SegmentPool>>& pools) {
    std::vector<SegmentPool*> pointers;
    pointers.reserve(pools.size());
    for (const auto& pool : pools) pointers.push_back(pool.get());
    return pointers;
  }

  absl::StatusOr<int> WatchProcess(const UniqueFd& pidfd, std::function<void()> gone);
  void SetTimer(SteadyTime time);
  std::string ClaimsFile() const {
    return config_.claims_file.empty() ? absl::StrCat(config_.socket_dir, "/vrambroker.claims") : config_.claims_file;
  }
  std::string SocketPath() const { return absl::StrCat(config_.socket_dir, "/vrambroker.sock"); }
  void OnTimer();
  void OnSignal();
  void OnTick();
  bool IsEnding() const { return phase_ >= DaemonState::kDraining; }
  // OK, or the reason for not serving normally: a device is lost, or the daemon starts or stops.
  absl::Status Health() const;
  // (driver) Checks the devices' health, and retries frees refused by the devices.
  void UpdateHealth() ABSL_LOCKS_EXCLUDED(lost_mu_);
  // The reason why all devices are unusable; OK while any device is usable, or may be again.
  absl::Status AllLost() const ABSL_LOCKS_EXCLUDED(lost_mu_);
  // Adds the devices' current use to the timeline, and the sessions' use to their trends.
  void TakeSample();
  // May block: reads a file, and asks the machine's name services.
  absl::StatusOr<ReloadReport> Reload() ABSL_LOCKS_EXCLUDED(reload_mu_);
  // `lost`: all devices are lost, and the daemon ends; OK: the daemon was told to end.
  void StartDraining(const absl::Status& lost);
  void Stop();

  const Config& config_;  // configuration at the start
  const ConfigReader& read_again_;
  SavedState state_;
  ClaimMembers members_;
  ClaimSaver saver_;
  // Held while reading the configuration again, so that the last read sets the policy.
  Mutex reload_mu_ ABSL_ACQUIRED_AFTER(lock_level::kReload)
      ABSL_ACQUIRED_BEFORE(lock_level::kServer){lock_level::kReload};
  // The broker's timer. The loop owns a duplicate, closed with the loop, while the broker may still set the timer.
  const UniqueFd timer_{timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK)};
  std::atomic<uint64_t> next_segment_{1};
  const std::vector<std::unique_ptr<SegmentPool>> pools_;
  std::vector<std::unique_ptr<IdleDecay>> idle_decay_;  // by device
  ProcessWatch processes_;
  EventLoop loop_;
  std::unique_ptr<WorkerPool> workers_;
  RpcMeter rpcs_;
  Broker broker_;
  CallRates call_rates_;
  ReloadState reload_state_;
  HttpStats http_stats_;
  UserSlots snapshots_;
  Connections connections_;
  SessionCalls session_calls_;
  SegmentCalls segment_calls_;
  DescriptorSocket descriptor_socket_;
  Returning returning_;
  CountCalls count_calls_;
  CountSocket count_socket_;
  BrokerService broker_service_;
  AdminService admin_service_;
  const Metrics metrics_;
  Timeline timeline_;
  HttpApi http_api_;
  Mutex claim_sockets_mu_;
  absl::flat_hash_map<ClaimId, ClaimSockets> claim_sockets_ ABSL_GUARDED_BY(claim_sockets_mu_);
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<HttpServer> http_;
  int signals_ = -1;

  std::atomic<DaemonState> phase_{DaemonState::kStarting};
  SteadyTime drain_deadline_;
  SteadyTime next_descriptor_check_ = std::chrono::steady_clock::now();
  MemoryTrim memory_trim_;
  std::atomic<bool> trimming_{false};
  SteadyTime next_health_update_ = std::chrono::steady_clock::now() + kHealthPeriod;
  std::atomic<bool> asking_health_{false};
  SteadyTime asked_health_;
  std::vector<int> bad_looks_;  // failed checks per device, in a row; used by the worker checking health
  mutable Mutex lost_mu_;
  absl::Status all_lost_ ABSL_GUARDED_BY(lost_mu_);
  absl::Status ends_because_;  // OK: the daemon was told to end
  SteadyTime next_reconciliation_ = std::chrono::steady_clock::now();
  SteadyTime next_sample_ = std::chrono::steady_clock::now();
  std::atomic<bool> sampling_{false};
};

absl::Status Daemon::Start() {
  sigset_t mask;
  sigemptyset(&mask);
  for (const int signal : {SIGTERM, SIGINT, SIGHUP}) sigaddset(&mask, signal);
  UniqueFd signals(signalfd(-1, &mask, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!signals.valid()) return absl::ErrnoToStatus(errno, "signalfd failed");
  signals_ = signals.get();
  if (absl::Status status = loop_.Watch(std::move(signals), EPOLLIN, [this] { OnSignal(); }); !status.ok()) {
    return status;
  }

  UniqueFd timer(fcntl(timer_.get(), F_DUPFD_CLOEXEC, 0));
  if (!timer.valid()) return absl::ErrnoToStatus(errno, "timerfd_create failed");
  if (absl::Status status = loop_.Watch(std::move(timer), EPOLLIN, [this] { OnTimer(); }); !status.ok()) return status;

  grpc::EnableDefaultHealthCheckService(true);
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  grpc::ServerBuilder builder;
  builder.RegisterService(&broker_service_);
  builder.RegisterService(&admin_service_);
  builder.SetMaxReceiveMessageSize(kMaxMessageBytes);
  // gRPC inflates a message before checking its size, and 60 KB can become 60 MB: refuses compressed messages.
  builder.SetCompressionAlgorithmSupportStatus(GRPC_COMPRESS_DEFLATE, false);
  builder.SetCompressionAlgorithmSupportStatus(GRPC_COMPRESS_GZIP, false);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, kMaxCallsPerConnection);
  grpc::ResourceQuota quota("vrambrokerd");
  quota.SetMaxThreads(kMaxSyncThreads).Resize(kGrpcMemoryBytes);
  builder.SetResourceQuota(quota);
  std::vector<std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface>> interceptors;
  interceptors.push_back(rpcs_.MakeInterceptors());
  builder.experimental().SetInterceptorCreators(std::move(interceptors));
  server_ = builder.BuildAndStart();
  if (server_ == nullptr) return absl::InternalError("gRPC could not start its server");
  for (const char* service : {"vrambroker.v1.Broker", "vrambroker.v1.Admin"}) {
    server_->GetHealthCheckService()->SetServingStatus(service, true);
  }

  if (!config_.http_address.empty()) {
    absl::StatusOr<std::unique_ptr<HttpServer>> http = HttpServer::Start(
        config_.http_address, http_api_.Pages(), {.stats = &http_stats_, .listens = [this] {
                                                    if (Health().ok())
                                                      NotifySystemd(absl::StrCat("STATUS=Serving on ", SocketPath()));
                                                  }});
    if (!http.ok()) return http.status();
    http_ = *std::move(http);
  }

  // Runs before any memory is granted.
  if (absl::Status status = RestoreClaims(); !status.ok()) return status;
  if (absl::Status status = FindCarriedOver(); !status.ok()) return status;

  const DescriptorBudget budget = DescriptorBudget::Of(DescriptorLimit(), config_.max_connections_per_uid);
  if (const size_t wanted = config_.max_connections_per_uid;
      budget.connections_per_uid < (wanted == 0 ? kFewConnections : wanted)) {
    LogLine("few file descriptors: raise LimitNOFILE of the unit, or ulimit -n")
        .Add("limit", budget.limit)
        .Add("connections", budget.connections)
        .Add("connections_per_uid", budget.connections_per_uid)
        .Write(spdlog::level::warn);
  }
  if (!processes_.has_pidfds()) {
    spdlog::warn(
        "this kernel has no pidfd_open (Linux 5.3): the daemon looks every {} ms in /proc whether its clients live, "
        "and sees a little later that one has ended",
        ProcessWatch::kPeriod.count());
  }
  descriptor_socket_.SetBudget(budget);
  // Listens last, so that every client that can connect is served.
  const absl::StatusOr<ClientSocket> descriptors =
      ListenUnix(absl::StrCat(config_.socket_dir, "/vrambroker-fd.sock"), SOCK_SEQPACKET, config_.socket_mode);
  if (!descriptors.ok()) return descriptors.status();
  if (absl::Status status = descriptor_socket_.Serve(*descriptors); !status.ok()) return status;
  const absl::StatusOr<ClientSocket> counts =
      ListenUnix(absl::StrCat(config_.socket_dir, "/vram-count.sock"), SOCK_SEQPACKET, config_.socket_mode);
  if (!counts.ok()) return counts.status();
  if (absl::Status status = count_socket_.Serve(*counts, budget); !status.ok()) return status;
  broker_.claims().ServeRestored();
  const std::string path = SocketPath();
  const absl::StatusOr<ClientSocket> listener = ListenUnix(path, SOCK_STREAM, config_.socket_mode);
  if (!listener.ok()) return listener.status();
  if (absl::Status status = connections_.Serve(*listener, server_.get(), budget); !status.ok()) return status;
  phase_ = DaemonState::kServing;
  LogLine("daemon ready")
      .Add("socket", path)
      .Add("version", kVersion)
      .Add("revision", kRevision)
      .Write(spdlog::level::info);
  const bool has_port = http_ == nullptr || http_->listening();
  NotifySystemd(absl::StrCat("READY=1\nSTATUS=Serving on ", path,
                             has_port ? "" : absl::StrCat("; another program has ", config_.http_address)));
  return absl::OkStatus();
}

absl::Status Daemon::FindCarriedOver() {
  absl::btree_map<ProcessId, ClaimId> claims;
  ClaimMembers::ByProcess earlier = members_.TakeOver();
  std::vector<ProcessId> processes;
  for (const auto& [process, name] : earlier) {
    processes.push_back(process);
    // A claim made by the policy does not exist yet.
    if (const absl::StatusOr<Claim> claim = broker_.claims().Find(name); claim.ok()) claims.emplace(process, claim->id);
  }
  broker_.claims().SetEarlierMembers(std::move(earlier));
  returning_.Await(processes, std::chrono::steady_clock::now() + Returning::kMost);
  for (const auto& pool : pools_) {
    const int device = pool->properties().ordinal;
    if (absl::Status status = pool->FindCarriedOver(claims); !status.ok()) {
      return absl::Status(status.code(),
                          absl::StrCat("device ", device,
                                       ": cannot tell what processes hold of an earlier daemon: ", status.message()));
    }
    const PoolView view = pool->GetView();
    if (view.stats.carried_over_bytes == 0) continue;
    LogLine("carried over: processes hold memory from before this start")
        .Add("device", device)
        .Add("bytes", view.stats.carried_over_bytes)
        .Add("processes", view.carried_over.size())
        .Write(spdlog::level::info);
  }
  broker_.OnTimer();
  return absl::OkStatus();
}

absl::Status Daemon::RestoreClaims() {
  absl::StatusOr<std::vector<Claim>> claims = LoadClaims(ClaimsFile());
  if (!claims.ok()) return claims.status();
  absl::flat_hash_set<std::string> names;
  for (const Claim& claim : *claims) names.insert(claim.name);
  LogLine("claims read").Add("file", ClaimsFile()).Add("claims", claims->size()).Write(spdlog::level::info);
  RemoveOtherClaimDirs(config_.socket_dir, names);
  broker_.claims().Restore(*std::move(claims));
  return absl::OkStatus();
}

absl::Status Daemon::ServeClaim(const Claim& claim) {
  absl::StatusOr<ClaimSockets> sockets = ListenClaim(config_.socket_dir, claim.name, claim.terms.owner,
                                                     claim.is_being_made ? ClaimDirUse::kNew : ClaimDirUse::kKept);
  if (!sockets.ok()) return sockets.status();
  const ClaimOfListener of_claim{.id = claim.id, .counts_in_claim = [this](ClaimId id, const Caller& caller) {
                                   return broker_.claims().CountsInClaim(id, caller);
                                 }};
  absl::Status status =
      CheckNotReserved(std::max({sockets->connections.get(), sockets->descriptors.get(), sockets->counts.get()}));
  if (status.ok()) status = descriptor_socket_.Listen(sockets->descriptors, of_claim);
  if (status.ok()) status = count_socket_.Listen(sockets->counts, of_claim);
  if (status.ok()) status = connections_.Listen(sockets->connections, of_claim);
  if (!status.ok()) {
    Unlisten(*sockets);  // keeps the directory, which a container may have
    return status;
  }
  MutexLock lock(claim_sockets_mu_);
  claim_sockets_.emplace(claim.id, *std::move(sockets));
  return absl::OkStatus();
}

void Daemon::StopServingClaim(const Claim& claim) {
  absl::flat_hash_map<ClaimId, ClaimSockets>::node_type served;
  {
    MutexLock lock(claim_sockets_mu_);
    served = claim_sockets_.extract(claim.id);
  }
  if (!served.empty()) Unlisten(served.mapped());
  if (absl::Status status = RemoveClaimDir(config_.socket_dir, claim.name, claim.terms.owner); !status.ok()) {
    spdlog::warn("the directory of the removed claim '{}': {}", claim.name, std::string(status.message()));
  }
}

absl::Status Daemon::Run() {
  loop_.Run(kTick, [this] { OnTick(); });
  Stop();
  return ends_because_;
}

absl::StatusOr<int> Daemon::WatchProcess(const UniqueFd& pidfd, std::function<void()> gone) {
  // Duplicates the descriptor for every watch: epoll takes each descriptor only once.
  UniqueFd own(fcntl(pidfd.get(), F_DUPFD_CLOEXEC, 0));
  if (!own.valid()) return DescriptorError(errno, "fcntl(F_DUPFD_CLOEXEC)");
  if (absl::Status status = CheckNotReserved(own.get()); !status.ok()) return status;
  const int number = own.get();
  if (absl::Status status = loop_.Watch(std::move(own), EPOLLIN, std::move(gone)); !status.ok()) return status;
  return number;
}

void Daemon::SetTimer(SteadyTime time) {
  // The steady clock is CLOCK_MONOTONIC. A past time fires at once; 0 would stop the timer.
  const auto since = std::max(std::chrono::nanoseconds(1), std::chrono::nanoseconds(time.time_since_epoch()));
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(since);
  const itimerspec spec = {.it_interval = {},
                           .it_value = {.tv_sec = seconds.count(), .tv_nsec = (since - seconds).count()}};
  timerfd_settime(timer_.get(), TFD_TIMER_ABSTIME, &spec, nullptr);
}

void Daemon::OnTimer() {
  uint64_t expirations = 0;
  (void)!read(timer_.get(), &expirations, sizeof expirations);
  broker_.OnTimer();
}

void Daemon::OnSignal() {
  signalfd_siginfo info;
  while (read(signals_, &info, sizeof info) == sizeof info) {
    LogLine("signal received").Add("signal", strsignal(static_cast<int>(info.ssi_signo))).Write(spdlog::level::info);
    if (info.ssi_signo == SIGHUP) {
      workers_->Submit([this] { (void)Reload(); });  // Reload() logs its result
    } else if (IsEnding()) {
      loop_.Stop();  // a second signal means: stop now
    } else {
      StartDraining(absl::OkStatus());
    }
  }
}

absl::StatusOr<ReloadReport> Daemon::Reload() {
  MutexLock lock(reload_mu_);
  if (!read_again_) {
    absl::Status status =
        absl::FailedPreconditionError("the daemon was started without --config: there is no file to read again");
    LogLine("configuration not reloaded").Add("why", status.message()).Write(spdlog::level::warn);
    return status;  // not a failed reload: no change is waiting to be applied
  }
  const absl::StatusOr<Config> config = read_again_();
  reload_state_.last_was_successful = config.ok();
  if (!config.ok()) {
    LogLine("configuration not reloaded").Add("why", config.status().message()).Write(spdlog::level::warn);
    return config.status();
  }
  for (const std::string& warning : config->warnings) spdlog::warn("{}", warning);
  broker_.SetPolicy(MakePolicy(*config));
  reload_state_.last_success = std::time(nullptr);
  ReloadReport report{.rules = config->rules.size(), .needs_restart = FieldsThatNeedARestart(config_, *config)};
  LogLine("configuration reloaded")
      .Add("rules", report.rules)
      .Add("needs_restart", absl::StrJoin(report.needs_restart, ","))
      .Write(report.needs_restart.empty() ? spdlog::level::info : spdlog::level::warn);
  return report;
}

void Daemon::StartDraining(const absl::Status& lost) {
  phase_ = DaemonState::kDraining;
  ends_because_ = lost;
  drain_deadline_ = std::chrono::steady_clock::now() + absl::ToChronoMilliseconds(config_.drain_timeout);
  // Not when the daemon ends by itself: systemd must see a failure, and restart the daemon.
  NotifySystemd(lost.ok() ? "STOPPING=1" : absl::StrCat("STATUS=Ending: ", lost.message()));
  server_->GetHealthCheckService()->SetServingStatus(false);
  broker_.Drain(std::string(lost.message()));
  LogLine line("draining");
  line.Add("sessions", broker_.sessions().size()).Add("timeout", absl::FormatDuration(config_.drain_timeout));
  if (!lost.ok()) line.Add("why", lost.message());
  line.Write(lost.ok() ? spdlog::level::info : spdlog::level::err);
  OnTick();
}

void Daemon::OnTick() {
  NotifySystemd("WATCHDOG=1");
  descriptor_socket_.Tick();
  count_socket_.Tick();
  broker_.claims().Tick();
  const SteadyTime now = std::chrono::steady_clock::now();
  if (now >= next_health_update_) {
    next_health_update_ = now + kHealthPeriod;
    broker_.limits().GiveOwed();
    if (!trimming_.exchange(true)) {
      workers_->Submit([this] {
        memory_trim_.Look();
        trimming_ = false;
      });
    }
    // A lost GPU can keep its driver from answering: asks a single question at a time, and not on this thread.
    if (!asking_health_.exchange(true)) {
      asked_health_ = now;
      workers_->Submit([this] {
        UpdateHealth();
        asking_health_ = false;
      });
    } else if (now - asked_health_ > kHealthPatience) {
      asked_health_ = now;
      spdlog::error("a device's driver has not answered for {} s; the kernel log may say why", kHealthPatience.count());
    }
  }
  // Runs on a worker: sampling a thousand sessions takes some milliseconds.
  if (http_ != nullptr && now >= next_sample_ && !sampling_.exchange(true)) {
    next_sample_ = now + Timeline::kPeriod;
    workers_->Submit([this] {
      TakeSample();
      sampling_ = false;
    });
  }
  if (now >= next_reconciliation_) {
    next_reconciliation_ = now + kReconciliationPeriod;
    broker_.reconciliation().Start();
  }
  if (now >= next_descriptor_check_) {
    const UniqueFd probe(fcntl(timer_.get(), F_DUPFD_CLOEXEC, 0));
    const absl::Status left =
        probe.valid() ? CheckNotReserved(probe.get()) : DescriptorError(errno, "fcntl(F_DUPFD_CLOEXEC)");
    if (!left.ok()) {
      next_descriptor_check_ = now + kBetweenDescriptorErrors;
      LogLine("segments and sessions are refused").Add("why", left.message()).Write(spdlog::level::err);
    }
  }
  if (!IsEnding() && config_.exits_when_devices_are_lost) {
    if (const absl::Status lost = AllLost(); !lost.ok()) return StartDraining(lost);
  }
  if (IsEnding() && (broker_.sessions().size() == 0 || std::chrono::steady_clock::now() >= drain_deadline_)) {
    loop_.Stop();
  }
}

absl::Status Daemon::Health() const {
  for (const auto& pool : pools_) {
    if (absl::Status health = pool->health(); !health.ok()) {
      return absl::Status(health.code(), absl::StrCat("device ", pool->properties().ordinal, ": ", health.message()));
    }
  }
  if (phase_ == DaemonState::kServing) return absl::OkStatus();
  return absl::UnavailableError(phase_ == DaemonState::kStarting ? "starting" : "stopping");
}

absl::Status Daemon::AllLost() const {
  MutexLock lock(lost_mu_);
  return all_lost_;
}

void Daemon::TakeSample() {
  const BrokerView view = broker_.operator_view().Look();
  broker_.fragmentation().Follow(view);
  timeline_.Add(view, std::chrono::system_clock::now());
}

void Daemon::UpdateHealth() {
  bad_looks_.resize(pools_.size());
  for (size_t device = 0; device < pools_.size(); ++device) {
    const auto& pool = pools_[device];
    const absl::Status before = pool->health();
    const absl::Status health = pool->UpdateHealth();
    bad_looks_[device] = health.ok() ? 0 : bad_looks_[device] + 1;
    if (health.ok()) {
      if (!before.ok())
        LogLine("device can be used again").Add("device", pool->properties().ordinal).Write(spdlog::level::warn);
      pool->RetryFrees();
    } else if (before.ok()) {
      LogLine("device cannot be used: clients keep what they hold, nobody gets more of it")
          .Add("device", pool->properties().ordinal)
          .Add("why", health.message())
          .Write(spdlog::level::err);
      NotifySystemd(absl::StrCat("STATUS=Device ", pool->properties().ordinal, " cannot be used: ", health.message()));
    }
    if (health.ok() != before.ok() && !IsEnding()) server_->GetHealthCheckService()->SetServingStatus(Health().ok());
  }
  // While any device works, its sessions continue.
  const bool lost =
      std::all_of(bad_looks_.begin(), bad_looks_.end(), [](int looks) { return looks >= kLooksUntilLost; });
  const absl::Status why =
      lost ? absl::DataLossError(absl::StrCat("no device can be used any more: ", Health().message()))
           : absl::OkStatus();
  MutexLock lock(lost_mu_);
  if (!lost || all_lost_.ok()) all_lost_ = why;
}

void Daemon::Stop() {
  phase_ = DaemonState::kStopping;
  connections_.StopAccepting();
  descriptor_socket_.StopAccepting();
  count_socket_.StopAccepting();
  for (const char* name : {"vrambroker.sock", "vrambroker-fd.sock", "vram-count.sock"}) {
    unlink(absl::StrCat(config_.socket_dir, "/", name).c_str());
  }
  ForgetFreeBytes();
  broker_.claims().StopRemoving();  // sessions ending now return to the next daemon
  broker_.CloseAll("the daemon stops");
  // Sets no deadline for gRPC: gRPC's deadline uses the wall clock, which can be set.
  connections_.CutOffAfter(kLastCalls);
  server_->Shutdown();
  http_.reset();  // HTTP pages still ask clients, on the workers
  connections_.Stop();
  workers_.reset();  // the workers' last answers still need the server
  server_->Wait();
  LogLine("daemon stopped").Write(spdlog::level::info);
}

void Daemon::ForgetFreeBytes() {
  const auto is_held = [](const auto& pool) {
    const PoolStats stats = pool->GetStats();
    return stats.charged_bytes > stats.outside_bytes;
  };
  if (state_.free_bytes.empty() || std::any_of(pools_.begin(), pools_.end(), is_held)) return;
  state_.free_bytes.clear();
  if (absl::Status status = SaveState(config_.socket_dir, state_); !status.ok()) spdlog::error("{}", status.ToString());
}

}  // namespace

absl::Status RunDaemon(const Config& config, const ConfigReader& read_again) {
  LimitLibraryLogs();
  // Held until the end, so that no other daemon writes to the directory.
  const absl::StatusOr<UniqueFd> lock = LockSocketDir(config.socket_dir);
  if (!lock.ok()) return lock.status();
  absl::StatusOr<SavedState> state = LoadState(config.socket_dir);
  if (!state.ok()) return state.status();
  absl::StatusOr<std::vector<ChosenDevice>> devices = ChooseDevices(config, &*state);
  if (!devices.ok()) return devices.status();
  // Covers a run that is killed, too. The next run finds held memory in any case, because the file names the owner.
  if (absl::Status status = SaveState(config.socket_dir, *state); !status.ok()) {
    spdlog::error("the default capacity of the next start may be too small: {}", status.ToString());
  }
  Daemon daemon(config, read_again, *std::move(devices), *std::move(state));
  if (absl::Status status = daemon.Start(); !status.ok()) return status;
  return daemon.Run();
}

}  // namespace vrambroker
