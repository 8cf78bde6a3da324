// SPDX-License-Identifier: Apache-2.0
#include "server/core/session_limits.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "allocator/base/bytes.h"
#include "server/base/client_log.h"
#include "server/base/saturating.h"
#include "server/pool/segment_refusal.h"

namespace vrambroker {

absl::Status CheckLimit(absl::string_view field, const Limit& limit) {
  const double* const fraction = std::get_if<double>(&limit);
  if (fraction == nullptr || (*fraction >= 0 && *fraction <= 1)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(field, ".fraction: ", *fraction, " is not within [0, 1]"));
}

namespace {

bool IsNothing(const Limit& guarantee) {
  return guarantee == Limit(uint64_t{0}) || guarantee == Limit(0.0);
}

}  // namespace

// A guarantee being set, device by device. Increases come first, since they may be refused. Undoing an increase lowers
// the guarantee again, and is never refused. Keeps itself alive.
class SessionLimits::Guarantee : public std::enable_shared_from_this<Guarantee> {
 public:
  Guarantee(SessionLimits* owner, SessionPtr session, const Limit& guarantee, Attempt attempt, Done done)
      : owner_(*owner),
        session_(std::move(session)),
        guarantee_(guarantee),
        attempt_(attempt),
        done_(std::move(done)) {}

  void Start() {
    const size_t devices = owner_.pools_.size();
    before_.clear();
    order_.clear();
    for (size_t device = 0; device < devices; ++device) {
      before_.push_back(owner_.pools_[device]->GetAccount(session_->id()).value_or(AccountState()).guarantee_bytes);
    }
    for (const bool is_more : {true, false}) {
      for (size_t device = 0; device < devices; ++device) {
        if ((BytesOn(device) > before_[device]) == is_more) order_.push_back(device);
      }
    }
    tried_ = 0;
    Continue();
  }

 private:
  uint64_t BytesOn(size_t device) const { return session_->BytesOn(device, guarantee_); }
  void TakeAll() {
    for (SegmentPool* pool : owner_.pools_) (void)pool->SetGuarantee(session_->id(), 0);
  }

  // Sets the guarantee on the next device.
  void Continue() {
    if (absl::Status status = session_->CheckNotEnded(); !status.ok()) {
      // EndSession() takes all guarantees, but may have run before the last guarantee was set.
      TakeAll();
      return done_(status);
    }
    if (tried_ == order_.size()) {
      LogClientEvent(spdlog::level::info,
                     SessionLine("guarantee changed", session_->id(), session_->name())
                         .Add("guarantee", BytesOn(session_->devices().empty() ? 0 : session_->devices().front())));
      return done_(absl::OkStatus());
    }
    const size_t device = order_[tried_++];
    const absl::Status status = owner_.pools_[device]->SetGuarantee(session_->id(), BytesOn(device));
    if (!attempt_.asks_others || SegmentRefusalCause(status) != OomCause::kCapacity) return Given(status);
    owner_.waiting_.WaitForGuarantee(
        session_, static_cast<int>(device), BytesOn(device),
        [self = shared_from_this()](const absl::Status& granted) { self->Given(granted); });
  }

  // Handles the result on the last device tried.
  void Given(const absl::Status& status) {
    if (status.ok()) return Continue();
    // Changes run in turn, so no concurrent change has modified the guarantees.
    for (size_t i = 0; i + 1 < tried_; ++i) {
      (void)owner_.pools_[order_[i]]->SetGuarantee(session_->id(), before_[order_[i]]);
    }
    if (!session_->CheckNotEnded().ok()) TakeAll();
    if (attempt_.takes_less) {
      // Another session of the share may have taken part of the guarantee.
      const Limit less = owner_.LeftOf(*session_, guarantee_);
      if (std::exchange(guarantee_, less) != less) return Start();
    }
    if (!SegmentRefusalCause(status).has_value()) return done_(status);
    done_(absl::ResourceExhaustedError(status.message()));  // the cause is meaningful only for memory requests
  }

  SessionLimits& owner_;
  const SessionPtr session_;
  Limit guarantee_;
  const Attempt attempt_;
  const Done done_;
  std::vector<uint64_t> before_;  // by device
  std::vector<size_t> order_;     // devices, in the order of changes
  size_t tried_ = 0;              // entries of order_ tried so far
};

SessionLimits::SessionLimits(std::vector<SegmentPool*> pools, std::chrono::milliseconds reclaim_timeout,
                             WaitingRequests* waiting, SavedSettings* settings)
    : pools_(std::move(pools)), reclaim_timeout_(reclaim_timeout), waiting_(*waiting), settings_(*settings) {}

absl::Status SessionLimits::SetLimit(const SessionPtr& session, const Limit& limit) {
  if (absl::Status status = CheckLimit("limit", limit); !status.ok()) return status;
  if (absl::Status status = session->CheckNotEnded(); !status.ok()) return status;
  MutexLock lock(mu_);
  // Applies to all devices or to none: a guarantee above the limit may be set concurrently. Decreases come first: a
  // decrease may be refused, and can always be undone.
  std::vector<std::pair<SegmentPool*, uint64_t>> lowered;
  for (const bool lowers : {true, false}) {
    for (size_t device = 0; device < pools_.size(); ++device) {
      SegmentPool* const pool = pools_[device];
      const uint64_t before = pool->GetAccount(session->id()).value_or(AccountState()).limit_bytes;
      const uint64_t bytes = session->BytesOn(device, limit);
      if ((bytes < before) != lowers) continue;
      if (absl::Status status = pool->SetLimit(session->id(), bytes); !status.ok()) {
        for (const auto& [of, old] : lowered) (void)of->SetLimit(session->id(), old);
        return status;
      }
      if (lowers) lowered.emplace_back(pool, before);
    }
  }
  settings_.Change(session->id(), [&](SessionSettings& set) { set.limit = limit; });
  for (size_t device = 0; device < pools_.size(); ++device) {
    const int ordinal = static_cast<int>(device);
    const uint64_t bytes = session->BytesOn(device, limit);
    TellLimitOf(session, ordinal);
    const std::optional<AccountState> account = pools_[device]->GetAccount(session->id());
    if (account.has_value() && account->reserved_bytes > bytes) {
      session->reclaims().Ask(ordinal, account->reserved_bytes - bytes, reclaim_timeout_, [] {});
    }
    LogClientEvent(
        spdlog::level::info,
        SessionLine("limit changed", session->id(), session->name()).Add("device", device).Add("limit", bytes));
  }
  return absl::OkStatus();
}

void SessionLimits::TellLimitOf(const SessionPtr& session, int device) {
  const std::optional<AccountState> account = pools_[device]->GetAccount(session->id());
  if (!account.has_value()) return;
  session->SetLimit(device, account->effective_limit_bytes());
  session->events()->LimitChanged(device, account->effective_limit_bytes());
}

void SessionLimits::UpdateLimit(const SessionPtr& session) {
  MutexLock lock(mu_);
  for (size_t device = 0; device < pools_.size(); ++device) {
    const std::optional<AccountState> account = pools_[device]->GetAccount(session->id());
    if (account.has_value()) session->SetLimit(static_cast<int>(device), account->effective_limit_bytes());
  }
}

void SessionLimits::TellLimit(const SessionPtr& session) {
  MutexLock lock(mu_);
  for (size_t device = 0; device < pools_.size(); ++device) TellLimitOf(session, static_cast<int>(device));
}

void SessionLimits::InTurn(const SessionPtr& session, std::function<void(const Done& done)> change, const Done& done) {
  {
    MutexLock lock(turns_mu_);
    const auto [turns, is_first] = turns_.try_emplace(session->id());
    turns->second.emplace_back([change = std::move(change), done](const std::function<void()>& answered) {
      change([done, answered](const absl::Status& status) {
        done(status);
        answered();
      });
    });
    if (!is_first) return;
  }
  TakeTurns(session->id());
}

void SessionLimits::TakeTurns(SessionId session) {
  for (;;) {
    Turn turn;
    {
      MutexLock lock(turns_mu_);
      const auto turns = turns_.find(session);
      if (turns->second.empty()) {
        turns_.erase(turns);
        return;
      }
      turn = std::move(turns->second.front());
      turns->second.pop_front();
    }
    // The later of the answer and this loop continues. A loop, since nested answers would need ever more stack.
    const auto is_other_done = std::make_shared<std::atomic<bool>>(false);
    turn([this, session, is_other_done] {
      if (is_other_done->exchange(true)) TakeTurns(session);
    });
    if (!is_other_done->exchange(true)) return;
  }
}

void SessionLimits::KeepGuarantee(const SessionPtr& session, const std::optional<Limit>& wished, bool goes_on,
                                  const Done& done) {
  InTurn(
      session,
      [this, session, wished, goes_on](const Done& kept) {
        if (!goes_on && !settings_.Get(session->id()).guarantee.has_value()) {
          return GiveWanted(session, wished, /*asks_others=*/true, kept);
        }
        GiveWanted(session, wished, /*asks_others=*/false, [this, session, wished, kept](const absl::Status& given) {
          if (!absl::IsResourceExhausted(given)) return kept(given);
          LogClientEvent(spdlog::level::warn, SessionLine("no room for the guarantee of a session that ran before: the "
                                                          "session goes on, and gets its guarantee when there is room",
                                                          session->id(), session->name())
                                                  .Add("why", given.message()));
          {
            MutexLock lock(owed_mu_);
            owed_.insert_or_assign(session->id(), Owed{.session = session, .wished = wished});
          }
          kept(absl::OkStatus());
        });
      },
      done);
}

void SessionLimits::GiveWanted(const SessionPtr& session, const std::optional<Limit>& wished, bool asks_others,
                               const Done& done) {
  const absl::Status allowed = wished.has_value() ? CheckWish(*session, *wished) : absl::OkStatus();
  const Limit own = wished.has_value() && allowed.ok() ? *wished : session->terms().guarantee;
  const std::optional<Limit> set = settings_.Get(session->id()).guarantee;
  if (set.has_value()) {
    return GiveGuarantee(session, *set, {.takes_less = false, .asks_others = asks_others},
                         [this, session, own, asks_others, done](const absl::Status& given) {
                           if (given.ok() || absl::IsAborted(given)) return done(given);
                           // Includes a guarantee above the new limit of the session: an operator may raise the limit.
                           const absl::Status no_room = absl::ResourceExhaustedError(given.message());
                           const Limit less = LeftOf(*session, own);
                           if (Has(*session, less)) return done(no_room);
                           GiveGuarantee(session, less, {.takes_less = true, .asks_others = asks_others},
                                         [done, no_room](const absl::Status& given_less) {
                                           done(absl::IsAborted(given_less) ? given_less : no_room);
                                         });
                         });
  }
  if (!allowed.ok()) return done(allowed);
  const Limit guarantee = wished.has_value() ? own : LeftOf(*session, own);
  if (IsNothing(guarantee)) return done(absl::OkStatus());
  GiveGuarantee(session, guarantee, {.takes_less = !wished.has_value(), .asks_others = asks_others}, done);
}

bool SessionLimits::Has(const Session& session, const Limit& guarantee) const {
  for (size_t device = 0; device < pools_.size(); ++device) {
    const AccountState account = pools_[device]->GetAccount(session.id()).value_or(AccountState());
    if (account.guarantee_bytes < session.BytesOn(device, guarantee)) return false;
  }
  return true;
}

void SessionLimits::GiveOwed() {
  std::vector<Owed> owed;
  {
    MutexLock lock(owed_mu_);
    for (auto& [unused, of] : owed_) {
      if (!std::exchange(of.is_tried, true)) owed.push_back(of);
    }
  }
  for (const Owed& of : owed) {
    InTurn(
        of.session,
        [this, of](const Done& answered) {
          GiveWanted(of.session, of.wished, /*asks_others=*/true, answered);  // an operator's, if set meanwhile
        },
        [this, id = of.session->id()](const absl::Status& given) {
          MutexLock lock(owed_mu_);
          if (!absl::IsResourceExhausted(given)) owed_.erase(id);
          if (const auto tried = owed_.find(id); tried != owed_.end()) tried->second.is_tried = false;
        });
  }
}

absl::Status SessionLimits::CheckWish(const Session& session, const Limit& guarantee) const {
  if (absl::Status status = CheckLimit("guarantee", guarantee); !status.ok()) return status;
  for (size_t device = 0; device < pools_.size(); ++device) {
    const uint64_t wanted = session.BytesOn(device, guarantee);
    const uint64_t most = session.BytesOn(device, session.terms().guarantee);
    if (wanted <= most) continue;
    return absl::PermissionDeniedError(absl::StrCat("guarantee: ", FormatBytesExactly(wanted), " of device ", device,
                                                    "; the policy allows ", FormatBytesExactly(most),
                                                    session.terms().claim_id.has_value()
                                                        ? "; a claim's guarantee is for all of its sessions"
                                                        : " (vramctl policy explain); an operator can give a "
                                                          "running session more (vramctl guarantee)"));
  }
  return absl::OkStatus();
}

Limit SessionLimits::LeftOf(const Session& session, const Limit& allowed) const {
  Limit guarantee = allowed;
  for (size_t device = 0; device < pools_.size(); ++device) {
    const PoolLook look = pools_[device]->LookFor(session.id(), /*with_accounts=*/false);
    const AccountState& account = look.account;
    const uint64_t most =
        std::min({account.limit_bytes, SaturatingSub(account.share_guarantee_bytes, look.share.promised_bytes),
                  SaturatingSub(account.share_limit_bytes, look.share.used_bytes - account.committed_bytes())});
    if (session.BytesOn(device, guarantee) > most) guarantee = most;
  }
  return guarantee;
}

void SessionLimits::SetGuarantee(const SessionPtr& session, const Limit& guarantee, const Done& done) {
  InTurn(
      session, [this, session, guarantee](const Done& set) { SetGuaranteeNow(session, guarantee, set); }, done);
}

void SessionLimits::SetGuaranteeNow(const SessionPtr& session, const Limit& guarantee, const Done& done) {
  const Attempt attempt{.takes_less = false, .asks_others = true};
  GiveGuarantee(session, guarantee, attempt, [this, session, guarantee, done](const absl::Status& given) {
    if (given.ok()) settings_.Change(session->id(), [&](SessionSettings& set) { set.guarantee = guarantee; });
    done(given);
  });
}

void SessionLimits::GiveGuarantee(const SessionPtr& session, const Limit& guarantee, Attempt attempt,
                                  const Done& done) {
  if (absl::Status status = CheckLimit("guarantee", guarantee); !status.ok()) return done(status);
  if (absl::Status status = session->CheckNotEnded(); !status.ok()) return done(status);
  std::make_shared<Guarantee>(this, session, guarantee, attempt, done)->Start();
}

absl::Status SessionLimits::SetPriority(const SessionPtr& session, int64_t priority, bool is_operators) {
  if (priority < -kMaxPriority || priority > kMaxPriority) {
    return absl::InvalidArgumentError(
        absl::StrCat("priority: ", priority, " is not within [", -kMaxPriority, ", ", kMaxPriority, "]"));
  }
  if (absl::Status status = session->CheckNotEnded(); !status.ok()) return status;
  MutexLock lock(mu_);
  for (SegmentPool* pool : pools_) {
    if (absl::Status status = pool->SetPriority(session->id(), static_cast<int>(priority)); !status.ok()) return status;
  }
  waiting_.UpdatePriority(*session, static_cast<int>(priority));
  settings_.Change(session->id(), [&](SessionSettings& set) {
    set.priority = is_operators ? std::optional(static_cast<int>(priority)) : std::nullopt;
  });
  LogClientEvent(spdlog::level::info,
                 SessionLine("priority changed", session->id(), session->name()).Add("priority", priority));
  return absl::OkStatus();
}

}  // namespace vrambroker
