// SPDX-License-Identifier: Apache-2.0
//
// Threads: the event loop on the main thread (accepting, signals, ended processes, tickets), gRPC's own (handlers,
// which never block), the workers (driver calls, waiting for clients), CivetWeb's (scrapes).
#include "server/daemon.h"

#include <fcntl.h>
#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>
#include <signal.h>
#include <spdlog/spdlog.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "allocator/bytes.h"
#include "allocator/cuda_device.h"
#include "allocator/host_device.h"
#include "server/admin_service.h"
#include "server/broker.h"
#include "server/broker_service.h"
#include "server/connections.h"
#include "server/descriptor_socket.h"
#include "server/event_loop.h"
#include "server/http_server.h"
#include "server/metrics.h"
#include "server/systemd.h"
#include "server/unix_socket.h"
#include "server/version.h"
#include "server/worker_pool.h"

namespace vrambroker {
namespace {

constexpr size_t kMaxWorkers = 64;
constexpr size_t kMaxConnectionsPerUid = 2048;
constexpr int kMaxMessageBytes = 64 << 10;
constexpr size_t kGrpcMemoryBytes = 1 << 30;  // gRPC slows its connections down before it buffers more
// Reflection, the one synchronous service, takes a thread for each open call.
constexpr int kMaxSyncThreads = 16;
constexpr int kMaxCallsPerConnection = 256;
constexpr std::chrono::milliseconds kTick(200);

// The parts of a running daemon. Members are in the order of their construction.
class Daemon {
 public:
  Daemon(const Config& config, std::vector<ChosenDevice> devices)
      : config_(config),
        pools_(MakePools(std::move(devices), &next_segment_)),
        workers_(std::make_unique<WorkerPool>(kMaxWorkers)),
        broker_(BrokerOptions{.session_limit = config.session_limit,
                              .allocator = config.alloc_conf.options,
                              .record_events = config.record_events,
                              .max_sessions_per_uid = config.max_sessions_per_uid,
                              .max_blocks_per_session = config.max_blocks_per_session,
                              .watch_process = [this](const UniqueFd& pidfd,
                                                      auto gone) { return WatchProcess(pidfd, std::move(gone)); },
                              .unwatch_process = [this](int watch) { loop_.Unwatch(watch); }},
                Pointers(pools_), workers_.get()),
        connections_(&loop_),
        descriptor_socket_(&loop_, Pointers(pools_)),
        broker_service_(&broker_, &connections_),
        admin_service_(&broker_, &connections_),
        metrics_(&broker_) {}

  absl::Status Start();
  void Run();

 private:
  static std::vector<std::unique_ptr<SegmentPool>> MakePools(std::vector<ChosenDevice> devices,
                                                             std::atomic<uint64_t>* next_segment) {
    std::vector<std::unique_ptr<SegmentPool>> pools;
    pools.reserve(devices.size());
    for (ChosenDevice& chosen : devices) {
      pools.push_back(std::make_unique<SegmentPool>(std::move(chosen.device), chosen.capacity_bytes, next_segment));
    }
    return pools;
  }
  static std::vector<SegmentPool*> Pointers(const std::vector<std::unique_ptr<SegmentPool>>& pools) {
    std::vector<SegmentPool*> pointers;
    pointers.reserve(pools.size());
    for (const auto& pool : pools) pointers.push_back(pool.get());
    return pointers;
  }

  absl::StatusOr<int> WatchProcess(const UniqueFd& pidfd, std::function<void()> gone);
  void OnSignal();
  void OnTick();
  void StartDraining();
  void Stop();

  const Config& config_;
  std::atomic<uint64_t> next_segment_{1};
  const std::vector<std::unique_ptr<SegmentPool>> pools_;
  EventLoop loop_;
  std::unique_ptr<WorkerPool> workers_;
  Broker broker_;
  Connections connections_;
  DescriptorSocket descriptor_socket_;
  BrokerService broker_service_;
  AdminService admin_service_;
  const Metrics metrics_;
  UniqueFd lock_;
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<HttpServer> http_;
  int signals_ = -1;

  std::atomic<bool> draining_{false};
  std::atomic<bool> releasing_idle_{false};
  SteadyTime drain_deadline_;
};

absl::Status Daemon::Start() {
  absl::StatusOr<UniqueFd> lock = LockSocketDir(config_.socket_dir);
  if (!lock.ok()) return lock.status();
  lock_ = *std::move(lock);

  sigset_t mask;
  sigemptyset(&mask);
  for (const int signal : {SIGTERM, SIGINT}) sigaddset(&mask, signal);
  UniqueFd signals(signalfd(-1, &mask, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!signals.valid()) return absl::ErrnoToStatus(errno, "signalfd failed");
  signals_ = signals.get();
  if (absl::Status status = loop_.Watch(std::move(signals), EPOLLIN, [this] { OnSignal(); }); !status.ok()) {
    return status;
  }

  grpc::EnableDefaultHealthCheckService(true);
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  grpc::ServerBuilder builder;
  builder.RegisterService(&broker_service_);
  builder.RegisterService(&admin_service_);
  builder.SetMaxReceiveMessageSize(kMaxMessageBytes);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, kMaxCallsPerConnection);
  grpc::ResourceQuota quota("vrambrokerd");
  quota.SetMaxThreads(kMaxSyncThreads).Resize(kGrpcMemoryBytes);
  builder.SetResourceQuota(quota);
  server_ = builder.BuildAndStart();
  if (server_ == nullptr) return absl::InternalError("gRPC could not start its server");
  for (const char* service : {"vrambroker.v1.Broker", "vrambroker.v1.Admin"}) {
    server_->GetHealthCheckService()->SetServingStatus(service, true);
  }

  if (!config_.http_address.empty()) {
    absl::StatusOr<std::unique_ptr<HttpServer>> http =
        HttpServer::Start(config_.http_address,
                          {.metrics = [this] { return metrics_.Text(); }, .healthy = [this] { return !draining_; }});
    if (!http.ok()) return http.status();
    http_ = *std::move(http);
    spdlog::info("http=http://{}/metrics", http_->address());
  }

  // Last, so that whoever can connect is served.
  absl::StatusOr<UniqueFd> descriptors =
      ListenUnix(absl::StrCat(config_.socket_dir, "/vrambroker-fd.sock"), SOCK_SEQPACKET, config_.socket_mode);
  if (!descriptors.ok()) return descriptors.status();
  if (absl::Status status = descriptor_socket_.Serve(*std::move(descriptors)); !status.ok()) return status;
  const std::string path = absl::StrCat(config_.socket_dir, "/vrambroker.sock");
  absl::StatusOr<UniqueFd> listener = ListenUnix(path, SOCK_STREAM, config_.socket_mode);
  if (!listener.ok()) return listener.status();
  if (absl::Status status = connections_.Serve(*std::move(listener), server_.get(), kMaxConnectionsPerUid);
      !status.ok()) {
    return status;
  }
  spdlog::info("vrambrokerd {} ({}) ready socket={}", kVersion, kRevision, path);
  NotifySystemd(absl::StrCat("READY=1\nSTATUS=Serving on ", path));
  return absl::OkStatus();
}

void Daemon::Run() {
  loop_.Run(kTick, [this] { OnTick(); });
  Stop();
}

absl::StatusOr<int> Daemon::WatchProcess(const UniqueFd& pidfd, std::function<void()> gone) {
  // A descriptor of its own for every watch: epoll takes each only once.
  UniqueFd own(fcntl(pidfd.get(), F_DUPFD_CLOEXEC, 0));
  if (!own.valid()) return absl::ErrnoToStatus(errno, "cannot watch the client's process");
  const int number = own.get();
  if (absl::Status status = loop_.Watch(std::move(own), EPOLLIN, std::move(gone)); !status.ok()) return status;
  return number;
}

void Daemon::OnSignal() {
  signalfd_siginfo info;
  while (read(signals_, &info, sizeof info) == sizeof info) {
    spdlog::info("signal={} received", strsignal(static_cast<int>(info.ssi_signo)));
    if (draining_) {
      loop_.Stop();  // the second one means: now
    } else {
      StartDraining();
    }
  }
}

void Daemon::StartDraining() {
  draining_ = true;
  drain_deadline_ = std::chrono::steady_clock::now() + absl::ToChronoMilliseconds(config_.drain_timeout);
  NotifySystemd("STOPPING=1");
  server_->GetHealthCheckService()->SetServingStatus(false);
  broker_.Drain();
  spdlog::info("draining sessions={} timeout={}", broker_.session_count(), absl::FormatDuration(config_.drain_timeout));
  OnTick();
}

void Daemon::OnTick() {
  NotifySystemd("WATCHDOG=1");
  descriptor_socket_.Tick();
  if (draining_ && (broker_.session_count() == 0 || std::chrono::steady_clock::now() >= drain_deadline_)) {
    loop_.Stop();
    return;
  }
  const bool any_idle =
      std::any_of(pools_.begin(), pools_.end(), [](const auto& pool) { return pool->GetFigures().idle_bytes > 0; });
  // Giving memory back to the driver may be slow: not on this thread, and not twice at a time.
  if (!any_idle || releasing_idle_.exchange(true)) return;
  workers_->Submit([this] {
    const SteadyTime since = std::chrono::steady_clock::now() - absl::ToChronoMilliseconds(config_.idle_decay);
    for (const auto& pool : pools_) pool->ReleaseIdleSince(since);
    releasing_idle_ = false;
  });
}

void Daemon::Stop() {
  connections_.StopAccepting();
  descriptor_socket_.StopAccepting();
  for (const char* name : {"vrambroker.sock", "vrambroker-fd.sock"}) {
    unlink(absl::StrCat(config_.socket_dir, "/", name).c_str());
  }
  broker_.CloseAll("the daemon stops");
  server_->Shutdown(std::chrono::system_clock::now() + std::chrono::milliseconds(500));
  workers_.reset();  // their last answers still need the server
  server_->Wait();
  http_.reset();
  spdlog::info("vrambrokerd stopped");
}

uint64_t DefaultCapacity(Device& device, const Config& config) {
  if (device.properties().kind == DeviceKind::kHost) return device.properties().total_bytes;
  const uint64_t free = device.FreeBytes().value_or(device.properties().total_bytes);
  const uint64_t usable = free - std::min(free, config.headroom_bytes);
  return usable / kSegmentGranuleBytes * kSegmentGranuleBytes;
}

}  // namespace

absl::StatusOr<std::vector<ChosenDevice>> ChooseDevices(const Config& config) {
  std::vector<std::unique_ptr<Device>> devices;
  std::string why = "as configured";
  if (config.device != DeviceChoice::kHost) {
    absl::StatusOr<std::vector<std::unique_ptr<Device>>> cuda = MakeCudaDevices();
    if (cuda.ok()) {
      devices = *std::move(cuda);
      if (config.device == DeviceChoice::kAuto) why = "auto: a GPU is usable";
    } else if (config.device == DeviceChoice::kCuda) {
      return absl::Status(cuda.status().code(),
                          absl::StrCat("device cuda: ", cuda.status().message(), "; --device=host needs no GPU"));
    } else {
      why = absl::StrCat("auto: ", cuda.status().message());
    }
  }
  if (devices.empty()) {
    for (int ordinal = 0; ordinal < config.host_devices; ++ordinal) {
      devices.push_back(MakeHostDevice(ordinal, config.capacity_bytes.value_or(DefaultHostBytes())));
    }
  }
  std::vector<ChosenDevice> chosen;
  for (std::unique_ptr<Device>& device : devices) {
    const DeviceProperties& properties = device->properties();
    const uint64_t capacity = config.capacity_bytes.value_or(DefaultCapacity(*device, config));
    if (capacity > properties.total_bytes || capacity < kSegmentGranuleBytes) {
      return absl::InvalidArgumentError(absl::StrCat("capacity: ", FormatBytes(capacity), " of device ",
                                                     properties.ordinal, ", which has ",
                                                     FormatBytes(properties.total_bytes)));
    }
    spdlog::info("device={} kind={} name=\"{}\" uuid={} total={} capacity={} ({})", properties.ordinal,
                 DeviceKindName(properties.kind), properties.name, properties.uuid, FormatBytes(properties.total_bytes),
                 FormatBytes(capacity), why);
    chosen.push_back({.device = std::move(device), .capacity_bytes = capacity});
  }
  return chosen;
}

absl::Status RunDaemon(const Config& config) {
  // Every segment of host memory, every connection and every watched process is a descriptor.
  rlimit files = {};
  if (getrlimit(RLIMIT_NOFILE, &files) == 0) {
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
  }
  absl::StatusOr<std::vector<ChosenDevice>> devices = ChooseDevices(config);
  if (!devices.ok()) return devices.status();
  Daemon daemon(config, *std::move(devices));
  if (absl::Status status = daemon.Start(); !status.ok()) return status;
  daemon.Run();
  return absl::OkStatus();
}

}  // namespace vrambroker
