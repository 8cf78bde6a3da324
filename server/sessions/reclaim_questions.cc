// SPDX-License-Identifier: Apache-2.0
#include "server/sessions/reclaim_questions.h"

#include <spdlog/spdlog.h>

#include <optional>
#include <utility>

#include "server/base/client_log.h"
#include "server/base/saturating.h"

namespace vrambroker {

ReclaimQuestions::ReclaimQuestions(SessionId session, std::string name, std::vector<SegmentPool*> pools,
                                   std::function<SteadyTime()> clock, Send send)
    : session_(session),
      name_(std::move(name)),
      pools_(std::move(pools)),
      clock_(std::move(clock)),
      send_(std::move(send)),
      devices_(pools_.size()) {}

void ReclaimQuestions::Ask(int device, uint64_t bytes, std::chrono::milliseconds time, std::function<void()> answered) {
  {
    MutexLock lock(mu_);
    OfDevice& of_device = devices_[device];
    of_device.time = time;
    of_device.next_bytes += bytes;
    of_device.next.push_back(std::move(answered));
    if (std::exchange(of_device.asked, true)) return;
    of_device.asked_since = clock_();
  }
  SendNext(device);
}

bool ReclaimQuestions::IsSilent(int device, std::chrono::milliseconds time, SteadyTime now) const {
  MutexLock lock(mu_);
  const OfDevice& of_device = devices_[device];
  return of_device.asked && now > of_device.asked_since + time;
}

void ReclaimQuestions::SendNext(int device) {
  uint64_t bytes = 0;
  std::chrono::milliseconds time{0};
  const std::optional<AccountState> account = pools_[device]->GetAccount(session_);
  {
    MutexLock lock(mu_);
    OfDevice& of_device = devices_[device];
    of_device.now = std::exchange(of_device.next, {});
    bytes = std::exchange(of_device.next_bytes, 0);
    time = of_device.time;
    of_device.now_bytes = bytes;
    of_device.reserved_before = account.has_value() ? account->reserved_bytes : 0;
  }
  send_(device, bytes, time, [this, device] { Answered(device); });
}

void ReclaimQuestions::Answered(int device) {
  std::vector<std::function<void()>> answered;
  bool again = false;
  SegmentPool& pool = *pools_[device];
  const std::optional<AccountState> account = pool.GetAccount(session_);
  uint64_t asked_bytes = 0;
  uint64_t returned_bytes = 0;
  std::chrono::nanoseconds duration{0};
  {
    MutexLock lock(mu_);
    OfDevice& of_device = devices_[device];
    asked_bytes = of_device.now_bytes;
    const SteadyTime now = clock_();
    duration = now - of_device.asked_since;
    // Uses the pool's books rather than the client's answer. Memory left by an ended session is no answer.
    if (account.has_value()) {
      returned_bytes = SaturatingSub(of_device.reserved_before, account->reserved_bytes);
    }
    answered = std::exchange(of_device.now, {});
    again = !of_device.next.empty();
    of_device.asked = again;
    of_device.asked_since = now;  // a client answering question after question is not silent
  }
  pool.CountReclaim(asked_bytes, returned_bytes, duration);
  LogClientEvent(spdlog::level::info,
                 SessionLine("reclaimed", session_, name_)
                     .Add("device", device)
                     .Add("asked", asked_bytes)
                     .Add("returned", returned_bytes)
                     .Add("duration_ms", std::chrono::duration_cast<std::chrono::milliseconds>(duration).count()));
  for (const auto& call : answered) call();
  if (again) SendNext(device);
}

}  // namespace vrambroker
