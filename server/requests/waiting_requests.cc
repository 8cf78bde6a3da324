// SPDX-License-Identifier: Apache-2.0
#include "server/requests/waiting_requests.h"

#include <spdlog/spdlog.h>

#include <atomic>
#include <memory>
#include <string>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "server/base/client_log.h"
#include "server/base/saturating.h"
#include "server/sessions/session_view.h"

namespace vrambroker {
namespace {

constexpr size_t kMaxNamedInLog = 10;

}  // namespace

WaitingRequests::WaitingRequests(const WaitingOptions& options, std::vector<SegmentPool*> pools, Executor* workers,
                                 const SessionRegistry* sessions, SharedTimer* timer)
    : clock_(options.clock),
      reclaim_timeout_(options.reclaim_timeout),
      pools_(std::move(pools)),
      sessions_(*sessions),
      slots_({.what = "requests waiting",
              .per_uid = options.max_waiting_per_uid,
              .per_uid_bound = "max_waiting_per_uid"}) {
  for (size_t i = 0; i < pools_.size(); ++i) {
    const int device = static_cast<int>(i);
    const RequestQueueOptions queue_options{
        .reclaim_timeout = options.reclaim_timeout,
        .hold_back_time = options.hold_back_time,
        .hold_back_bytes = LimitBytes(options.hold_back_limit, pools_[i]->capacity_bytes())};
    const RequestQueueHooks hooks{
        .clock = clock_,
        .candidates = [this, device] { return Candidates(device); },
        .ask = [this, device](const ReclaimVictim& victim,
                              const std::function<void()>& answered) { AskFor(device, victim, answered); },
        .wake_changed = [timer] { timer->Update(); },
        .run = [workers](std::function<void()> task) { workers->SubmitFirst(std::move(task)); }};
    queues_.push_back(std::make_unique<RequestQueue>(pools_[i], queue_options, hooks));
  }
  for (size_t i = 0; i < pools_.size(); ++i) {
    pools_[i]->SetOnCapacityFreed([queue = queues_[i].get()] { queue->OnCapacityFreed(); });
  }
}

WaitingRequests::~WaitingRequests() {
  for (SegmentPool* pool : pools_) pool->SetOnCapacityFreed(nullptr);
}

// ---- Waiting ----

void WaitingRequests::Wait(const std::shared_ptr<MemoryRequest>& request, uint64_t bytes) {
  const Session& session = *request->session();
  const int device = request->device();
  absl::StatusOr<UserSlots::Slot> taken = slots_.Take(session.caller().user());
  if (!taken.ok()) return request->Refused(taken.status());
  const int wait = request->StartWaiting(clock_());
  const auto done = [this, request, bytes, wait, slot = std::make_shared<UserSlots::Slot>(*std::move(taken))](
                        const absl::Status& status, const WaitRecord& outcome) {
    const SessionPtr& of = request->session();
    Reservation reserved;
    if (status.ok()) reserved = Reservation(pools_[request->device()], of->id(), bytes);
    Log(*of, request->device(), bytes, status, outcome);
    CountWait(*request, outcome.waited);
    if (!request->EndWait(wait, status.ok() ? WaitRecord() : outcome)) return;
    if (status.ok()) return request->Granted(std::move(reserved));
    request->Refused(status);
  };
  queues_[device]->Add({.session = session.id(),
                        .user = session.caller().user(),
                        .bytes = bytes,
                        .deadline = request->deadline(),
                        .cancel_key = request->options().cancel_key,
                        .retry = [request, wait] { return request->EndWaitOtherwise(wait); },
                        .done = done});
  if (request->is_cancelled()) Cancel(request->session(), request->options().cancel_key);
  CancelIfEnded(session);
}

void WaitingRequests::WaitForGuarantee(const SessionPtr& session, int device, uint64_t bytes,
                                       const std::function<void(const absl::Status&)>& done) {
  queues_[device]->Add({.session = session->id(),
                        .user = session->caller().user(),
                        .bytes = bytes,
                        .guarantee = true,
                        .deadline = clock_(),
                        .done = [done](const absl::Status& status, const WaitRecord&) { done(status); }});
  CancelIfEnded(*session);
}

void WaitingRequests::AddClaim(ClaimId claim) {
  MutexLock lock(claims_mu_);
  claim_waits_.try_emplace(claim, pools_.size());
}

void WaitingRequests::ForgetClaim(ClaimId claim) {
  MutexLock lock(claims_mu_);
  claim_waits_.erase(claim);
}

absl::flat_hash_map<ClaimId, std::vector<ClaimWaits>> WaitingRequests::GetClaimWaits() const {
  MutexLock lock(claims_mu_);
  return claim_waits_;
}

void WaitingRequests::CountWait(const MemoryRequest& request, std::chrono::milliseconds waited) {
  const std::optional<ClaimId> claim = request.session()->terms().claim_id;
  if (!claim.has_value() || request.options().wait.count() == 0) return;
  MutexLock lock(claims_mu_);
  const auto found = claim_waits_.find(*claim);
  if (found == claim_waits_.end()) return;
  ClaimWaits& waits = found->second[request.device()];
  ++waits.waits;
  waits.waited += waited;
}

void WaitingRequests::CancelIfEnded(const Session& session) {
  if (session.state() != SessionState::kActive) CancelAll(session, absl::AbortedError("the session has ended"));
}

bool WaitingRequests::GoesFirst(const Session& session, int device, uint64_t bytes) const {
  if (!queues_[device]->IsPassToCome()) return true;
  const std::optional<AccountState> account = pools_[device]->GetAccount(session.id());
  return account.has_value() && bytes <= account->unused_guarantee_bytes();
}

void WaitingRequests::Retry(const Session& session) {
  for (const auto& queue : queues_) queue->Retry(session.id());
}

void WaitingRequests::Cancel(const SessionPtr& session, uint64_t cancel_key) {
  if (cancel_key == 0) return;
  session->cancel_keys().Cancel(cancel_key);  // for a request not waiting yet
  for (const auto& queue : queues_) {
    queue->Cancel(session->id(), cancel_key, absl::CancelledError("the client has given up waiting"));
  }
}

void WaitingRequests::CancelAll(const Session& session, const absl::Status& why) {
  for (const auto& queue : queues_) queue->Cancel(session.id(), why);
}

void WaitingRequests::UpdatePriority(const Session& session, int priority) {
  for (const auto& queue : queues_) queue->UpdatePriority(session.id(), priority);
}

void WaitingRequests::Log(const Session& session, int device, uint64_t bytes, const absl::Status& status,
                          const WaitRecord& outcome) const {
  if (outcome.asked.empty() && outcome.waited.count() == 0) return;
  std::string asked;  // names of the first kMaxNamedInLog sessions
  size_t named = 0;
  for (const auto& [id, answered] : outcome.asked) {
    if (++named > kMaxNamedInLog) break;
    const absl::StatusOr<SessionPtr> other = sessions_.Find(SessionRef(id));
    absl::StrAppend(&asked, asked.empty() ? "" : ",", other.ok() ? (*other)->name() : "-",
                    answered ? "" : "(no answer)");
  }
  LogClientEvent(spdlog::level::info, SessionLine("memory asked for", session.id(), session.name())
                                          .Add("device", device)
                                          .Add("bytes", bytes)
                                          .Add("granted", status.ok())
                                          .Add("waited_ms", outcome.waited.count())
                                          .Add("asked_sessions", outcome.asked.size())
                                          .Add("asked", asked));
}

// ---- Asking sessions ----

std::vector<ReclaimCandidate> WaitingRequests::Candidates(int device) const {
  std::vector<ReclaimCandidate> candidates;
  absl::flat_hash_map<ShareId, ShareStats> shares;
  const SteadyTime now = clock_();
  for (const SessionPtr& session : sessions_.GetAll()) {
    if (session->placement() == Placement::kCounted) continue;  // has nothing to give back
    // Overdue answers are no longer awaited.
    const ReclaimQuestions& questions = session->reclaims();
    if (session->state() != SessionState::kActive || questions.IsSilent(device, reclaim_timeout_, now)) continue;
    const std::optional<AccountState> account = pools_[device]->GetAccount(session->id());
    if (!account.has_value() || account->reserved_bytes == 0) continue;
    const auto [share, is_new] = shares.try_emplace(account->share);
    if (is_new) share->second = pools_[device]->GetShare(account->share);
    candidates.push_back({.session = session->id(),
                          .priority = account->priority,
                          .reserved_bytes = account->reserved_bytes,
                          .guarantee_bytes = account->guarantee_bytes,
                          .idle_bytes = IdleBytes(*session, *account, session->GetMemoryStats(device)),
                          .is_slow = questions.IsSilent(device, ReclaimQuestions::kSilence, now),
                          .share = account->share,
                          .share_bytes = SaturatingSub(share->second.used_bytes, share->second.guarantee_bytes)});
  }
  return candidates;
}

void WaitingRequests::AskFor(int device, const ReclaimVictim& victim, const std::function<void()>& answered) const {
  const absl::StatusOr<SessionPtr> session = sessions_.Find(SessionRef(victim.session));
  if (!session.ok()) return answered();
  (*session)->reclaims().Ask(device, victim.bytes, reclaim_timeout_, answered);
}

void WaitingRequests::Reclaim(int device, const Missing& missing, bool everybody,
                              const std::function<void()>& done) const {
  const std::vector<ReclaimCandidate> candidates = Candidates(device);
  const std::vector<ReclaimVictim> victims =
      everybody ? EveryVictim(candidates, missing) : ChooseVictims(candidates, missing);
  if (victims.empty()) return done();
  const auto left = std::make_shared<std::atomic<size_t>>(victims.size());
  for (const ReclaimVictim& victim : victims) {
    AskFor(device, victim, [left, done] {
      if (--*left == 0) done();
    });
  }
}

// ---- The timer ----

std::optional<SteadyTime> WaitingRequests::NextWake() const {
  std::optional<SteadyTime> next;
  for (const auto& queue : queues_) {
    next = Earlier(next, queue->NextWake());
  }
  return next;
}

void WaitingRequests::OnTimer() {
  for (const auto& queue : queues_) queue->OnTimer();
}

}  // namespace vrambroker
