// SPDX-License-Identifier: Apache-2.0
#include "server/core/reconciliation.h"

#include <spdlog/spdlog.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/base/log_line.h"
#include "server/base/saturating.h"
#include "server/identity/process_info.h"

namespace vrambroker {

Reconciliation::Reconciliation(uint64_t allowance_bytes, std::vector<SegmentPool*> pools, Executor* workers,
                               const SessionRegistry* sessions)
    : allowance_bytes_(allowance_bytes),
      pools_(std::move(pools)),
      workers_(*workers),
      sessions_(*sessions),
      is_looking_(pools_.size()),
      found_(pools_.size(), std::make_shared<const DeviceProcesses>()),
      sensors_(pools_.size()) {}

void Reconciliation::Start() {
  for (size_t device = 0; device < pools_.size(); ++device) {
    if (!pools_[device]->properties().has_contexts || is_looking_[device].exchange(true)) continue;
    workers_.Submit([this, device] {
      Look(device);
      is_looking_[device] = false;
    });
  }
}

void Reconciliation::Look(size_t device) {
  SegmentPool& pool = *pools_[device];
  const ByProcess before = GetCharged(device);
  const absl::StatusOr<std::vector<GpuProcess>> uses = pool.FindProcesses();
  const ByProcess after = GetCharged(device);
  const GpuSensors sensors = pool.ReadSensors();

  auto found = std::make_shared<DeviceProcesses>();
  found->status = uses.status();
  uint64_t contexts = 0;
  uint64_t clients = 0;
  for (const GpuProcess& process : uses.ok() ? *uses : std::vector<GpuProcess>()) {
    const ProcessView view = Compare(process, before, after);
    found->overhead_bytes += view.overhead_bytes;
    found->drift_bytes += view.drift_bytes;
    found->unused_bytes += view.unused_bytes;
    if (view.kind == ProcessView::Kind::kUncounted) found->uncounted_bytes += view.used_bytes;
    if (view.kind == ProcessView::Kind::kClient) {
      contexts += view.overhead_bytes - view.drift_bytes;
      ++clients;
    }
    found->processes.push_back(view);
  }
  // Without clients, the next client's context is expected to be like the last known contexts.
  if (clients > 0) pool.SetContexts(contexts, clients);

  std::shared_ptr<const DeviceProcesses> last = found;
  {
    MutexLock lock(mu_);
    std::swap(found_[device], last);
    sensors_[device] = sensors;
  }
  Log(device, last->status, found->status);
}

std::shared_ptr<const DeviceProcesses> Reconciliation::Get(size_t device) const {
  MutexLock lock(mu_);
  return found_[device];
}

GpuSensors Reconciliation::GetSensors(size_t device) const {
  MutexLock lock(mu_);
  return sensors_[device];
}

Reconciliation::ByProcess Reconciliation::GetCharged(size_t device) const {
  ByProcess charged;
  const auto accounts = pools_[device]->LookFor(kNoSession, /*with_accounts=*/true).accounts;
  for (const SessionPtr& session : sessions_.GetAll()) {
    const auto account = accounts.find(session->id());
    if (account == accounts.end()) continue;
    Charged& of_process = charged[session->caller().pid];
    if (!of_process.session.has_value()) of_process.session = session->id();
    of_process.at_least += account->second.counted_bytes;
    of_process.at_most += account->second.counted_bytes;
    // Segments left by an ended daemon: the driver counts each to one of the processes with the segment open.
    if (session->placement() != Placement::kCounted) of_process.at_most += account->second.carried_over_bytes;
  }
  charged[getpid()].at_most = pools_[device]->GetOwnBytes();
  return charged;
}

ProcessView Reconciliation::Compare(const GpuProcess& process, const ByProcess& before, const ByProcess& after) const {
  ProcessView view{.pid = process.pid, .name = "unknown", .used_bytes = process.bytes};
  if (const absl::StatusOr<ProcessUser> user = UserOf(process.pid); user.ok()) {
    view.uid = user->uid;
    view.name = CommandName(process.pid);
  }
  const auto of = [pid = process.pid](const ByProcess& all) {
    const auto it = all.find(pid);
    return it == all.end() ? Charged() : it->second;
  };
  if (!before.contains(process.pid) && !after.contains(process.pid)) return view;
  const Charged first = of(before);
  const Charged second = of(after);
  view.session = first.session.has_value() ? first.session : second.session;
  view.kind = view.session.has_value() ? ProcessView::Kind::kClient : ProcessView::Kind::kDaemon;
  // If the charge has changed meanwhile, the driver may have looked at any time in between.
  view.charged_bytes = std::max(first.at_most, second.at_most);
  view.overhead_bytes = SaturatingSub(view.used_bytes, view.charged_bytes);
  view.drift_bytes = SaturatingSub(view.overhead_bytes, allowance_bytes_);
  view.unused_bytes = SaturatingSub(std::min(first.at_least, second.at_least), view.used_bytes);
  return view;
}

void Reconciliation::Log(size_t device, const absl::Status& before, const absl::Status& now) const {
  if (before.code() == now.code() && before.message() == now.message()) return;
  LogLine line(now.ok() ? "the driver tells which processes use the device"
                        : "nobody tells which processes use the device: overhead and drift are not known");
  line.Add("device", device);
  if (!now.ok()) line.Add("why", now.message());
  line.Write(now.ok() || absl::IsUnimplemented(now) ? spdlog::level::info : spdlog::level::warn);
}

}  // namespace vrambroker
