// SPDX-License-Identifier: Apache-2.0
#include "server/core/session_limits.h"

#include <spdlog/spdlog.h>

#include <algorithm>
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

// A guarantee that is being given on one device after the other. Keeps itself alive.
class SessionLimits::Guarantee : public std::enable_shared_from_this<Guarantee> {
 public:
  Guarantee(SessionLimits* owner, SessionPtr session, const Limit& guarantee, Done done)
      : owner_(*owner), session_(std::move(session)), guarantee_(guarantee), done_(std::move(done)) {}

  // On the next device.
  void Continue() {
    if (absl::Status status = session_->CheckNotEnded(); !status.ok()) {
      // EndSession() takes all guarantees. It may have run before the last of these was given.
      TakeAll();
      return done_(status);
    }
    const size_t device = before_.size();
    if (device == owner_.pools_.size()) {
      LogClientEvent(spdlog::level::info, SessionLine("guarantee changed", session_->id(), session_->name())
                                              .Add("guarantee", device == 0 ? 0 : BytesOn(0)));
      return done_(absl::OkStatus());
    }
    SegmentPool& pool = *owner_.pools_[device];
    const std::optional<AccountState> account = pool.GetAccount(session_->id());
    before_.push_back(account.has_value() ? account->guarantee_bytes : 0);
    const absl::Status status = pool.SetGuarantee(session_->id(), BytesOn(device));
    if (SegmentRefusalCause(status) != OomCause::kCapacity) return Given(status);
    owner_.waiting_.WaitForGuarantee(
        session_, static_cast<int>(device), BytesOn(device),
        [self = shared_from_this()](const absl::Status& granted) { self->Given(granted); });
  }

 private:
  uint64_t BytesOn(size_t device) const { return LimitBytes(guarantee_, owner_.pools_[device]->capacity_bytes()); }
  void TakeAll() {
    for (SegmentPool* pool : owner_.pools_) (void)pool->SetGuarantee(session_->id(), 0);
  }

  // What came of it on the last device that was tried.
  void Given(const absl::Status& status) {
    if (status.ok()) return Continue();
    for (size_t i = 0; i + 1 < before_.size(); ++i) (void)owner_.pools_[i]->SetGuarantee(session_->id(), before_[i]);
    if (!session_->CheckNotEnded().ok()) TakeAll();
    if (!SegmentRefusalCause(status).has_value()) return done_(status);
    done_(absl::ResourceExhaustedError(status.message()));  // its cause is for requests for memory
  }

  SessionLimits& owner_;
  const SessionPtr session_;
  const Limit guarantee_;
  const Done done_;
  std::vector<uint64_t> before_;  // of the devices that have been tried
};

SessionLimits::SessionLimits(std::vector<SegmentPool*> pools, std::chrono::milliseconds reclaim_timeout,
                             WaitingRequests* waiting, SavedSettings* settings)
    : pools_(std::move(pools)), reclaim_timeout_(reclaim_timeout), waiting_(*waiting), settings_(*settings) {}

absl::Status SessionLimits::SetLimit(const SessionPtr& session, const Limit& limit) {
  if (absl::Status status = CheckLimit("limit", limit); !status.ok()) return status;
  if (absl::Status status = session->CheckNotEnded(); !status.ok()) return status;
  MutexLock lock(mu_);
  // On all devices or on none: a guarantee above it may be given at the same time.
  std::vector<uint64_t> before;
  for (SegmentPool* pool : pools_) {
    const std::optional<AccountState> account = pool->GetAccount(session->id());
    const absl::Status status = pool->SetLimit(session->id(), LimitBytes(limit, pool->capacity_bytes()));
    if (!status.ok()) {
      for (size_t i = 0; i < before.size(); ++i) (void)pools_[i]->SetLimit(session->id(), before[i]);
      return status;
    }
    before.push_back(account.has_value() ? account->limit_bytes : 0);
  }
  settings_.Change(session->id(), [&](SessionSettings& set) { set.limit = limit; });
  for (size_t device = 0; device < pools_.size(); ++device) {
    const int ordinal = static_cast<int>(device);
    const uint64_t bytes = LimitBytes(limit, pools_[device]->capacity_bytes());
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

void SessionLimits::KeepGuarantee(const SessionPtr& session, const std::optional<Limit>& wished, const Done& done) {
  if (const std::optional<Limit> set = settings_.Get(session->id()).guarantee; set.has_value()) {
    return GiveGuarantee(session, *set, [this, session, done](const absl::Status& given) {
      if (given.ok() || absl::IsAborted(given)) return done(given);
      settings_.Change(session->id(), [](SessionSettings& of) { of.guarantee = std::nullopt; });
      LogClientEvent(spdlog::level::warn,
                     SessionLine("guarantee left out: an operator had set it before the daemon was "
                                 "started, and it cannot be given any more",
                                 session->id(), session->name())
                         .Add("why", given.message()));
      done(absl::OkStatus());
    });
  }
  const Limit& allowed = session->terms().guarantee;
  if (wished.has_value()) {
    if (absl::Status status = CheckLimit("guarantee", *wished); !status.ok()) return done(status);
    for (const SegmentPool* pool : pools_) {
      const uint64_t wanted = LimitBytes(*wished, pool->capacity_bytes());
      const uint64_t most = LimitBytes(allowed, pool->capacity_bytes());
      if (wanted > most) {
        return done(absl::PermissionDeniedError(
            absl::StrCat("guarantee: ", FormatBytesExactly(wanted), " of device ", pool->properties().ordinal,
                         "; the policy allows ", FormatBytesExactly(most),
                         session->terms().claim_id.has_value() ? "; a claim's guarantee is for all of its sessions"
                                                               : " (vramctl policy explain); an operator can give a "
                                                                 "running session more (vramctl guarantee)")));
      }
    }
  }
  const Limit guarantee = wished.has_value() ? *wished : LeftOf(*session, allowed);
  if (guarantee == Limit(uint64_t{0}) || guarantee == Limit(0.0)) return done(absl::OkStatus());
  GiveGuarantee(session, guarantee, done);
}

Limit SessionLimits::LeftOf(const Session& session, const Limit& allowed) const {
  Limit guarantee = allowed;
  for (const SegmentPool* pool : pools_) {
    const PoolLook look = pool->LookFor(session.id(), /*with_accounts=*/false);
    const AccountState& account = look.account;
    const uint64_t most =
        std::min({account.limit_bytes, SaturatingSub(account.share_guarantee_bytes, look.share.promised_bytes),
                  SaturatingSub(account.share_limit_bytes, look.share.used_bytes - account.committed_bytes())});
    if (LimitBytes(guarantee, pool->capacity_bytes()) > most) guarantee = most;
  }
  return guarantee;
}

void SessionLimits::SetGuarantee(const SessionPtr& session, const Limit& guarantee, const Done& done) {
  GiveGuarantee(session, guarantee, [this, session, guarantee, done](const absl::Status& given) {
    if (given.ok()) settings_.Change(session->id(), [&](SessionSettings& set) { set.guarantee = guarantee; });
    done(given);
  });
}

void SessionLimits::GiveGuarantee(const SessionPtr& session, const Limit& guarantee, const Done& done) {
  if (absl::Status status = CheckLimit("guarantee", guarantee); !status.ok()) return done(status);
  if (absl::Status status = session->CheckNotEnded(); !status.ok()) return done(status);
  std::make_shared<Guarantee>(this, session, guarantee, done)->Continue();
}

absl::Status SessionLimits::SetPriority(const SessionPtr& session, int64_t priority, bool is_operators) {
  if (priority < -kMaxPriority || priority > kMaxPriority) {
    return absl::InvalidArgumentError(
        absl::StrCat("priority: ", priority, " is not within [", -kMaxPriority, ", ", kMaxPriority, "]"));
  }
  if (absl::Status status = session->CheckNotEnded(); !status.ok()) return status;
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
