// SPDX-License-Identifier: Apache-2.0
#include "server/core/returning.h"

#include <algorithm>

#include "allocator/device/process_files.h"
#include "server/sessions/session.h"

namespace vrambroker {

void Returning::Await(const std::vector<ProcessId>& processes, SteadyTime until) {
  MutexLock lock(mu_);
  until_ = until;
  for (const ProcessId& process : processes) processes_[process];
  has_any_ = !processes_.empty();
}

void Returning::HasSaid(pid_t process, uint64_t device) {
  if (!has_any_) return;
  MutexLock lock(mu_);
  for (auto& [awaited, devices] : processes_) {
    if (awaited.pid == process) devices.insert(device);
  }
}

bool Returning::AreAwaited(uint64_t device, pid_t asking, SteadyTime now) {
  if (!has_any_) return false;
  if (IsTimeToLook(now)) Look();
  MutexLock lock(mu_);
  if (now >= until_) processes_.clear();
  has_any_ = !processes_.empty();
  return std::any_of(processes_.begin(), processes_.end(), [device, asking](const auto& process) {
    return process.first.pid != asking && !process.second.contains(device);
  });
}

bool Returning::IsTimeToLook(SteadyTime now) {
  MutexLock lock(mu_);
  if (now < next_look_) return false;
  next_look_ = now + kBetweenLooks;
  return true;
}

void Returning::Look() {
  absl::flat_hash_set<pid_t> have_said;
  for (const SessionPtr& session : sessions_.GetAll()) {
    if (session->counted() == nullptr) have_said.insert(session->caller().pid);
  }
  MutexLock lock(mu_);
  absl::erase_if(processes_, [&have_said](const auto& process) {
    return have_said.contains(process.first.pid) || StartOf(process.first.pid) != process.first.started;
  });
}

}  // namespace vrambroker
