// SPDX-License-Identifier: Apache-2.0
#include "server/core/claims.h"

#include <spdlog/spdlog.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "allocator/base/bytes.h"
#include "allocator/base/utf8.h"
#include "server/base/log_line.h"
#include "server/base/saturating.h"
#include "server/pool/segment_refusal.h"
#include "server/requests/check_device.h"

namespace vrambroker {
namespace {

constexpr size_t kMaxLabelKey = 63;
// Clients of the last daemon look for this one several times a second.
constexpr std::chrono::seconds kComingBack(5);
constexpr std::chrono::seconds kBetweenServings(1);
// After a guarantee of the policy's was refused.
constexpr std::chrono::seconds kBetweenUpdates(5);

LogLine ClaimLine(absl::string_view event, const Claim& claim) {
  return LogLine(event).Add("claim", claim.name);
}

// What is said of a refusal whose cause is for requests for memory.
absl::Status Plain(const absl::Status& status) {
  return SegmentRefusalCause(status).has_value() ? absl::ResourceExhaustedError(status.message()) : status;
}

// What is said of the claim's file or directory: a file that is not there is no claim that is not there.
absl::Status Unusable(const absl::Status& status) {
  if (status.ok() || absl::IsResourceExhausted(status)) return status;
  return absl::FailedPreconditionError(status.message());
}

absl::Status CheckLabels(const absl::btree_map<std::string, std::string>& labels) {
  if (labels.size() > Claims::kMaxLabels) {
    return absl::InvalidArgumentError(
        absl::StrCat("labels: ", labels.size(), "; at most ", Claims::kMaxLabels, " are allowed"));
  }
  for (const auto& [key, value] : labels) {
    const auto is_allowed = [](char c) { return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '_'; };
    if (key.empty() || key.size() > kMaxLabelKey || !std::all_of(key.begin(), key.end(), is_allowed) ||
        absl::ascii_isdigit(static_cast<unsigned char>(key.front()))) {
      return absl::InvalidArgumentError(absl::StrCat("labels: the key '", ToUtf8(key.substr(0, kMaxLabelKey)),
                                                     "' is not 1 to ", kMaxLabelKey,
                                                     " letters, digits and _, the first of which is no digit"));
    }
    if (value.size() > Claims::kMaxLabelValue) {
      return absl::InvalidArgumentError(absl::StrCat("labels: the value of '", key, "' has ", value.size(),
                                                     " bytes; at most ", Claims::kMaxLabelValue, " are allowed"));
    }
  }
  return absl::OkStatus();
}

struct Answered {
  Mutex mu;
  CondVar changed;
  bool is_done ABSL_GUARDED_BY(mu) = false;
};

}  // namespace

const char* ClaimStateName(ClaimState state) {
  switch (state) {
    case ClaimState::kActive:
      return "active";
    case ClaimState::kDraining:
      return "draining";
    case ClaimState::kRevoked:
      return "revoked";
  }
  return "unknown";
}

Claims::Claims(Options options, std::vector<SegmentPool*> pools, Executor* workers, const SessionRegistry* sessions,
               WaitingRequests* waiting, SessionLimits* limits)
    : options_(std::move(options)),
      pools_(std::move(pools)),
      sessions_(*sessions),
      waiting_(*waiting),
      limits_(*limits),
      changes_(std::make_shared<SerialQueue>(workers)) {}

// ---- Operators ----

template <typename Result>
void Claims::Submit(const std::function<void(absl::StatusOr<Result>)>& done,
                    std::function<absl::StatusOr<Result>()> change) {
  if (changes_->Submit([done, change = std::move(change)] { done(change()); })) return;
  done(absl::ResourceExhaustedError("too many claims are being changed at a time; try again"));
}

void Claims::Create(const std::string& name, const ClaimTerms& terms, const Done& done) {
  Submit<Claim>(done, [this, name, terms] { return CreateNow(name, terms); });
}

void Claims::Update(const std::string& name, const ClaimChange& change, const Done& done) {
  Submit<Claim>(done, [this, name, change] { return UpdateNow(name, change); });
}

void Claims::Delete(const std::string& name, bool revoke, const std::function<void(absl::StatusOr<Deleted>)>& done) {
  Submit<Deleted>(done, [this, name, revoke] { return DeleteNow(name, revoke); });
}

std::vector<Claim> Claims::GetAll() const {
  std::vector<Claim> all;
  MutexLock lock(mu_);
  all.reserve(claims_.size());
  for (const auto& [name, claim] : claims_) all.push_back(claim);
  return all;
}

absl::StatusOr<Claim> Claims::Find(absl::string_view name) const {
  MutexLock lock(mu_);
  const auto it = claims_.find(name);
  if (it != claims_.end()) return it->second;
  return absl::NotFoundError(absl::StrCat("no claim is named '", ToUtf8(name.substr(0, 100)), "' (vramctl claim ls)"));
}

// ---- Changes ----

absl::Status Claims::CheckTerms(const ClaimTerms& terms) const {
  if (absl::Status status = CheckLimit("limit", terms.limit); !status.ok()) return status;
  if (absl::Status status = CheckLimit("guarantee", terms.guarantee); !status.ok()) return status;
  if (terms.priority < -kMaxPriority || terms.priority > kMaxPriority) {
    return absl::InvalidArgumentError(
        absl::StrCat("priority: ", terms.priority, " is not within [", -kMaxPriority, ", ", kMaxPriority, "]"));
  }
  if (absl::Status status = CheckName(terms.tenant); !status.ok()) {
    return absl::InvalidArgumentError(absl::StrCat("tenant: ", status.message()));
  }
  if (terms.max_wait.has_value() && *terms.max_wait > kMaxWait) {
    return absl::InvalidArgumentError(absl::StrCat("max_wait_ms: ", terms.max_wait->count(), " is more than ",
                                                   std::chrono::milliseconds(kMaxWait).count(), ", one hour"));
  }
  if (absl::Status status = CheckLabels(terms.labels); !status.ok()) return status;
  for (size_t device = 0; device < pools_.size(); ++device) {
    const uint64_t limit = BytesOn(terms, terms.limit, device);
    const uint64_t guarantee = BytesOn(terms, terms.guarantee, device);
    if (guarantee > limit) {
      return absl::InvalidArgumentError(absl::StrCat("guarantee: ", FormatBytesExactly(guarantee),
                                                     " is above the claim's limit of ", FormatBytesExactly(limit)));
    }
  }
  return absl::OkStatus();
}

absl::Status Claims::CheckHasAnything(const ClaimTerms& terms) const {
  for (size_t device = 0; device < pools_.size(); ++device) {
    if (BytesOn(terms, terms.limit, device) > 0) return absl::OkStatus();
  }
  return absl::InvalidArgumentError("limit: 0 bytes; a claim needs more");
}

absl::Status Claims::CheckDevices(const ClaimTerms& terms) const {
  for (const size_t device : terms.devices) {
    if (absl::Status status = CheckDevice(device, pools_.size()); !status.ok()) {
      return absl::InvalidArgumentError(absl::StrCat("devices: ", status.message()));
    }
  }
  return absl::OkStatus();
}

uint64_t Claims::BytesOn(const ClaimTerms& terms, const Limit& limit, size_t device) const {
  const bool has_device = terms.devices.empty() || absl::c_linear_search(terms.devices, device);
  return has_device ? LimitBytes(limit, pools_[device]->capacity_bytes()) : 0;
}

uint64_t Claims::GuaranteeOn(const ClaimTerms& terms, size_t device) const {
  // A rule may give both in other units.
  return std::min(BytesOn(terms, terms.guarantee, device), BytesOn(terms, terms.limit, device));
}

absl::Status Claims::RaiseGuarantee(ClaimId claim, const ClaimTerms& terms, bool reclaims) {
  std::vector<uint64_t> before;
  for (size_t device = 0; device < pools_.size(); ++device) {
    SegmentPool& pool = *pools_[device];
    before.push_back(pool.GetShare(claim).guarantee_bytes);
    const uint64_t bytes = std::max(before.back(), GuaranteeOn(terms, device));
    absl::Status status = pool.SetClaimGuarantee(claim, bytes);
    if (reclaims && SegmentRefusalCause(status) == OomCause::kCapacity) {
      ReclaimFor(claim, static_cast<int>(device), bytes);
      status = pool.SetClaimGuarantee(claim, bytes);
    }
    if (status.ok()) continue;
    for (size_t i = 0; i < device; ++i) (void)pools_[i]->SetClaimGuarantee(claim, before[i]);  // less: never refused
    return absl::Status(Plain(status).code(), pools_.size() == 1
                                                  ? status.message()
                                                  : absl::StrCat("device ", device, ": ", status.message()));
  }
  return absl::OkStatus();
}

void Claims::LowerGuarantee(ClaimId claim, const ClaimTerms& terms) {
  for (size_t device = 0; device < pools_.size(); ++device) {
    const uint64_t held = pools_[device]->GetShare(claim).guarantee_bytes;
    (void)pools_[device]->SetClaimGuarantee(claim, std::min(held, GuaranteeOn(terms, device)));  // never refused
  }
}

void Claims::ReclaimFor(ClaimId claim, int device, uint64_t guarantee_bytes) {
  const SteadyTime begun = std::chrono::steady_clock::now();
  for (const bool everybody : {false, true}) {
    // One that is silent does not keep the others from being asked.
    const SteadyTime deadline = begun + (everybody ? options_.reclaim_timeout : options_.reclaim_timeout / 8);
    const uint64_t missing = pools_[device]->MissingForClaim(claim, guarantee_bytes);
    if (missing == 0) return;
    // Kept until the last one has answered, however late.
    const auto answered = std::make_shared<Answered>();
    // What its own sessions give back stays the claim's.
    waiting_.Reclaim(device, {.bytes = missing, .share = claim}, everybody, /*except=*/ShareId(claim), [answered] {
      MutexLock lock(answered->mu);
      answered->is_done = true;
      answered->changed.NotifyAll();
    });
    MutexLock lock(answered->mu);
    while (!answered->is_done && answered->changed.WaitUntil(answered->mu, deadline)) {
    }
  }
}

void Claims::SetLimit(const Claim& claim) {
  for (size_t device = 0; device < pools_.size(); ++device) {
    pools_[device]->SetClaimLimit(claim.id, LimitOn(claim, device));
  }
}

absl::StatusOr<Claim> Claims::CreateNow(const std::string& name, const ClaimTerms& terms) {
  if (absl::Status status = CheckClaimName(name); !status.ok()) return status;
  if (absl::Status status = options_.hooks.check_name(name); !status.ok()) return status;
  if (absl::Status status = CheckDevices(terms); !status.ok()) return status;
  if (absl::Status status = CheckTerms(terms); !status.ok()) return status;
  if (absl::Status status = CheckHasAnything(terms); !status.ok()) return status;
  Claim claim{.name = name, .terms = terms, .created = std::chrono::system_clock::now()};
  {
    MutexLock lock(mu_);
    if (const auto it = claims_.find(name); it != claims_.end()) return ThereIs(it->second);
    if (NumberOf(/*by_policy=*/false) >= kMaxClaims) return TooMany();
    claim.id = ClaimId{next_id_++};
  }
  SetLimit(claim);
  absl::Status status = RaiseGuarantee(claim.id, terms, /*reclaims=*/true);
  bool is_saved = false;
  if (status.ok()) {
    status = Save(&claim, nullptr);
    is_saved = status.ok();
  }
  if (status.ok()) {
    // It is there before somebody comes through its sockets. By a rule of the policy nobody enters before it is served.
    MutexLock lock(mu_);
    claim.is_being_made = true;
    if (const auto [it, is_new] = claims_.try_emplace(name, claim); is_new) {
      names_.emplace(claim.id, name);
    } else {
      status = ThereIs(it->second);  // the policy has made one meanwhile
    }
  }
  if (!status.ok()) return GiveUp(claim, is_saved, status);
  options_.added(claim);
  status = Unusable(options_.hooks.serve(claim));
  {
    MutexLock lock(mu_);
    if (status.ok()) {
      claims_.at(name).is_being_made = false;
    } else {
      names_.erase(claim.id);
      claims_.erase(name);
    }
  }
  if (!status.ok()) {
    options_.hooks.stop_serving(claim);
    options_.removed(claim, "");
    return GiveUp(claim, /*is_saved=*/true, status);
  }
  ClaimLine("claim created", claim)
      .Add("limits", LimitsText(claim))
      .Add("owner", terms.owner.uid.has_value() ? absl::StrCat(*terms.owner.uid) : "any")
      .Write(spdlog::level::info);
  return claim;
}

absl::Status Claims::GiveUp(const Claim& claim, bool is_saved, absl::Status why) {
  if (absl::Status status = is_saved ? Save(nullptr, &claim) : absl::OkStatus(); !status.ok()) {
    ClaimLine("claim not created, but in the file: the next start has it", claim)
        .Add("why", status.message())
        .Write(spdlog::level::err);
  }
  for (SegmentPool* pool : pools_) pool->CloseClaim(claim.id);
  return why;
}

absl::Status Claims::ThereIs(const Claim& claim) {
  return absl::AlreadyExistsError(absl::StrCat("name: there is a claim '", claim.name, "' already",
                                               !claim.rule.empty()
                                                   ? absl::StrCat(", made by the policy's rule ", claim.rule)
                                               : claim.state == ClaimState::kActive ? "; vramctl claim set changes it"
                                                                                    : ", which is being removed"));
}

absl::Status Claims::TooMany() {
  return absl::ResourceExhaustedError(absl::StrCat("there are ", kMaxClaims, " claims already, the most there can be"));
}

size_t Claims::NumberOf(bool by_policy) const {
  return static_cast<size_t>(std::count_if(claims_.begin(), claims_.end(), [by_policy](const auto& entry) {
    return entry.second.rule.empty() != by_policy;
  }));
}

std::string Claims::LimitsText(const Claim& claim) const {
  std::vector<uint64_t> limits;
  limits.reserve(pools_.size());
  for (size_t device = 0; device < pools_.size(); ++device) limits.push_back(LimitOn(claim, device));
  return absl::StrJoin(limits, ",");
}

absl::StatusOr<Claim> Claims::UpdateNow(const std::string& name, const ClaimChange& change) {
  absl::StatusOr<Claim> found = Find(name);
  if (!found.ok()) return found.status();
  const Claim before = *found;
  if (absl::Status status = CheckOperators(before); !status.ok()) return status;
  if (before.state != ClaimState::kActive) {
    return absl::FailedPreconditionError(absl::StrCat("the claim '", name, "' is being removed"));
  }
  Claim claim = before;
  ClaimTerms& terms = claim.terms;
  if (change.limit.has_value()) terms.limit = *change.limit;
  if (change.guarantee.has_value()) terms.guarantee = *change.guarantee;
  if (change.priority.has_value()) {
    // In the range of an int, which CheckTerms() looks at.
    terms.priority = static_cast<int>(std::clamp<int64_t>(*change.priority, -kMaxPriority - 1, kMaxPriority + 1));
  }
  if (change.max_wait.has_value()) terms.max_wait = change.max_wait;
  if (change.labels.has_value()) terms.labels = *change.labels;
  if (absl::Status status = CheckTerms(terms); !status.ok()) return status;
  for (size_t device = 0; device < pools_.size(); ++device) {
    const uint64_t promised = pools_[device]->GetShare(claim.id).promised_bytes;
    if (change.limit.has_value() && LimitOn(claim, device) < promised) {
      return absl::InvalidArgumentError(absl::StrCat(
          "limit: ", FormatBytesExactly(LimitOn(claim, device)), " is below the guarantees of the claim's sessions, ",
          FormatBytesExactly(promised), "; lower these first (vramctl guarantee)"));
    }
  }
  if (change.limit.has_value()) {
    if (absl::Status status = CheckHasAnything(terms); !status.ok()) return status;
  }
  // One that could not be given at the start is asked for again only when that is what is wanted.
  if (change.limit.has_value() || change.guarantee.has_value()) {
    if (absl::Status status = RaiseGuarantee(claim.id, terms, /*reclaims=*/true); !status.ok()) return status;
  }
  if (absl::Status status = Save(&claim, nullptr); !status.ok()) {
    LowerGuarantee(claim.id, before.terms);
    return status;
  }
  Apply(claim, before.terms);
  ClaimLine("claim changed", claim)
      .Add("limits", LimitsText(claim))
      .Add("priority", terms.priority)
      .Write(spdlog::level::info);
  return Find(name);
}

void Claims::Apply(const Claim& claim, const ClaimTerms& before) {
  Put(claim);
  LowerGuarantee(claim.id, claim.terms);
  SetLimit(claim);
  for (const SessionPtr& session : SessionsOf(claim.id)) {
    if (claim.terms.priority != before.priority) (void)limits_.SetPriority(session, claim.terms.priority);
    limits_.TellLimit(session);
  }
  ReclaimExcess(claim);
}

void Claims::ReclaimExcess(const Claim& claim) {
  for (size_t device = 0; device < pools_.size(); ++device) {
    const auto excess = [pool = pools_[device], id = claim.id, limit = LimitOn(claim, device)] {
      return SaturatingSub(pool->GetShare(id).used_bytes, limit);
    };
    const auto ask = [this, excess, device, id = claim.id](bool everybody, const std::function<void()>& done) {
      const Missing missing{.share = id, .in_share = excess()};
      if (missing.in_share > 0) {
        waiting_.Reclaim(static_cast<int>(device), missing, everybody, /*except=*/std::nullopt, done);
      }
    };
    // Figures may be a second old: who has more than they say is asked after that.
    ask(/*everybody=*/false, [ask] { ask(/*everybody=*/true, [] {}); });
  }
}

absl::StatusOr<Claims::Deleted> Claims::DeleteNow(const std::string& name, bool revoke) {
  absl::StatusOr<Claim> found = Find(name);
  if (!found.ok()) return found.status();
  Claim claim = *found;
  if (absl::Status status = CheckOperators(claim); !status.ok()) return status;
  if (revoke || claim.state == ClaimState::kActive) {
    claim.state = revoke ? ClaimState::kRevoked : ClaimState::kDraining;
    if (absl::Status status = Save(&claim, nullptr); !status.ok()) {
      // A full disk does not keep anybody in a claim that is revoked.
      if (!revoke) return status;
      ClaimLine("claim revoked, but not in the file", claim).Add("why", status.message()).Write(spdlog::level::err);
    }
    Put(claim);
    ClaimLine("claim is to be removed", claim).Add("state", ClaimStateName(claim.state)).Write(spdlog::level::info);
  }
  any_leaving_ = true;
  RemoveEmptyNow();
  absl::StatusOr<Claim> left = Find(name);
  if (left.ok() && left->id == claim.id) return Deleted{.claim = *std::move(left)};
  return Deleted{.claim = claim, .is_removed = true};
}

void Claims::Tick() {
  RemoveEmpty();
  if (!any_unserved_ || is_stopping_) return;
  const SteadyTime now = std::chrono::steady_clock::now();
  if (now < next_serving_) return;
  next_serving_ = now + kBetweenServings;
  (void)changes_->Submit([this] { ServeAgain(); });
}

void Claims::RemoveEmpty() {
  if (!any_leaving_ || is_stopping_ || is_removing_.exchange(true)) return;
  const bool queued = changes_->Submit([this] {
    RemoveEmptyNow();
    is_removing_ = false;
  });
  if (!queued) is_removing_ = false;
}

bool Claims::HasNothing(ClaimId claim) const {
  return std::all_of(pools_.begin(), pools_.end(),
                     [&](SegmentPool* pool) { return pool->GetShare(claim).used_bytes == 0; });
}

void Claims::RemoveEmptyNow() {
  any_leaving_ = false;  // what leaves from now on is looked at by the next call
  bool any_left = false;
  for (const Claim& claim : GetAll()) {
    if (claim.state == ClaimState::kActive && claim.rule.empty()) continue;
    // Also those that were being opened when it was revoked.
    if (claim.state == ClaimState::kRevoked) EndSessionsOf(claim);
    if (is_stopping_) continue;
    // Sessions of the daemon before this one may come back to a claim that drains.
    const bool is_time = std::chrono::steady_clock::now() >= claim.keep_until;
    if (!is_time || claim.sessions > 0 || !HasNothing(claim.id) || !RemoveIfEmpty(claim)) {
      any_left = any_left || claim.sessions == 0 || claim.rule.empty();
      continue;
    }
    // Nobody can enter any more.
    if (claim.rule.empty()) {
      // When the file cannot be written the claim comes back with the next daemon, empty.
      if (absl::Status status = Save(nullptr, &claim); !status.ok()) {
        ClaimLine("claim removed, but not from the file", claim).Add("why", status.message()).Write(spdlog::level::err);
      }
      options_.hooks.stop_serving(claim);
    }
    ClaimLine("claim removed", claim).Write(spdlog::level::info);
  }
  if (any_left) any_leaving_ = true;
}

void Claims::EndSessionsOf(const Claim& claim) {
  for (const SessionPtr& session : SessionsOf(claim.id)) {
    if (session->state() < SessionState::kEnded) options_.end_session(session, "its claim was revoked");
  }
}

absl::Status Claims::Save(const Claim* changed, const Claim* removed) const {
  std::vector<Claim> all = GetAll();
  const Claim* const replaced = changed != nullptr ? changed : removed;
  std::erase_if(all, [replaced](const Claim& claim) { return claim.id == replaced->id || !claim.rule.empty(); });
  if (changed != nullptr) all.push_back(*changed);
  return Unusable(options_.hooks.save(all));
}

void Claims::Put(const Claim& claim) {
  MutexLock lock(mu_);
  Claim& kept = claims_[claim.name];
  const size_t sessions = kept.id == claim.id ? kept.sessions : 0;
  kept = claim;
  kept.sessions = sessions;
  names_[claim.id] = claim.name;
}

bool Claims::RemoveIfEmpty(const Claim& claim) {
  MutexLock making(making_mu_);
  {
    MutexLock lock(mu_);
    if (claims_.at(claim.name).sessions > 0) return false;
    names_.erase(claim.id);
    claims_.erase(claim.name);
  }
  for (SegmentPool* pool : pools_) pool->CloseClaim(claim.id);
  options_.removed(claim, claim.rule.empty() && claim.terms.tenant.empty() ? TermsOf(claim).tenant : "");
  return true;
}

absl::Status Claims::CheckOperators(const Claim& claim) {
  if (claim.rule.empty()) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("the claim '", claim.name, "' is made by the policy's rule ", claim.rule,
                   ", for as long as it has sessions: change claim_limit and claim_guarantee there, and reload"));
}

// ---- The start ----

void Claims::Restore(std::vector<Claim> claims) {
  for (Claim& claim : claims) {
    {
      MutexLock lock(mu_);
      claim.id = ClaimId{next_id_++};
    }
    if (claim.state != ClaimState::kRevoked) claim.keep_until = std::chrono::steady_clock::now() + kComingBack;
    SetLimit(claim);
    // A device may be gone, or smaller than it was. What the claim is to have stays in the file.
    if (absl::Status status = RaiseGuarantee(claim.id, claim.terms, /*reclaims=*/false); !status.ok()) {
      ClaimLine("the claim has no guarantee until it is set again (vramctl claim set)", claim)
          .Add("why", status.message())
          .Write(spdlog::level::err);
    }
    options_.added(claim);
    Put(claim);
    if (claim.state != ClaimState::kActive) any_leaving_ = true;
  }
}

void Claims::SetEarlierMembers(absl::btree_map<ProcessId, std::string> members) {
  MutexLock lock(mu_);
  earlier_ = std::move(members);
}

void Claims::ServeRestored() {
  for (const Claim& claim : GetAll()) {
    const absl::Status status = options_.hooks.serve(claim);
    if (status.ok()) continue;
    ClaimLine("the claim's sockets could not be made: nobody can connect to it, until the daemon can make them", claim)
        .Add("why", status.message())
        .Write(spdlog::level::err);
    unserved_.insert(claim.id);
  }
  any_unserved_ = !unserved_.empty();
}

void Claims::ServeAgain() {
  for (const Claim& claim : GetAll()) {
    if (!unserved_.contains(claim.id) || !options_.hooks.serve(claim).ok()) continue;
    unserved_.erase(claim.id);
    ClaimLine("the claim is served now", claim).Write(spdlog::level::info);
  }
  any_unserved_ = !unserved_.empty();
}

// ---- Sessions ----

std::vector<SessionPtr> Claims::SessionsOf(ClaimId claim) const {
  std::vector<SessionPtr> sessions = sessions_.GetAll();
  std::erase_if(sessions, [claim](const SessionPtr& session) { return session->terms().claim_id != claim; });
  return sessions;
}

SessionTerms Claims::TermsOf(const Claim& claim) const {
  return {.rule = "",
          .limit = 1.0,  // the claim's bounds it
          .priority = claim.terms.priority,
          .tenant = claim.terms.tenant.empty() ? absl::StrCat("claim:", claim.name) : claim.terms.tenant,
          .rights = {.client = true, .observer = false, .admin = false},
          .max_wait = claim.terms.max_wait.has_value() ? *claim.terms.max_wait : options_.max_wait(),
          .claim = claim.name,
          .has_claims_tenant = claim.terms.tenant.empty(),
          .claim_id = claim.id};
}

absl::Status Claims::CheckOwner(const Claim& claim, const Caller& caller) {
  const ClaimOwner& owner = claim.terms.owner;
  if (!owner.uid.has_value() || caller.uid == *owner.uid || caller.uid == 0 || caller.uid == geteuid()) {
    return absl::OkStatus();
  }
  if (owner.gid.has_value() && (caller.gid == *owner.gid || absl::c_linear_search(caller.groups, *owner.gid))) {
    return absl::OkStatus();
  }
  return absl::PermissionDeniedError(
      absl::StrCat("uid ", caller.uid, " may not use the claim '", claim.name, "', which is uid ", *owner.uid, "'s"));
}

bool Claims::CountsInClaim(ClaimId claim, const Caller& caller) const {
  MutexLock lock(mu_);
  const auto name = names_.find(claim);
  if (name == names_.end()) return false;
  const Claim& of = claims_.at(name->second);
  const bool is_named = of.terms.owner.uid.has_value() || caller.uid == 0 || caller.uid == geteuid();
  return is_named && CheckOwner(of, caller).ok();
}

absl::StatusOr<Claim> Claims::FindFor(const Caller& caller) const {
  MutexLock lock(mu_);
  const auto name = caller.claim.has_value() ? names_.find(*caller.claim) : names_.end();
  if (name == names_.end()) return absl::FailedPreconditionError("the claim of this socket was removed");
  const Claim& claim = claims_.at(name->second);
  if (absl::Status status = CheckOwner(claim, caller); !status.ok()) return status;
  return claim;
}

absl::StatusOr<SessionTerms> Claims::TermsOf(const Caller& caller) const {
  const absl::StatusOr<Claim> claim = FindFor(caller);
  if (!claim.ok()) return claim.status();
  return TermsOf(*claim);
}

absl::StatusOr<SessionTerms> Claims::Enter(const Caller& caller, const ProcessId& process) {
  absl::StatusOr<Claim> claim = FindFor(caller);
  if (!claim.ok()) return claim.status();
  {
    MutexLock lock(mu_);
    const auto it = claims_.find(claim->name);
    if (it == claims_.end() || it->second.id != claim->id || !TakesSessions(it->second, process)) {
      return absl::FailedPreconditionError(
          absl::StrCat("the claim '", claim->name, "' is being removed, and takes no more sessions"));
    }
    ++it->second.sessions;
    *claim = it->second;
  }
  return TermsOf(*claim);
}

bool Claims::TakesSessions(const Claim& claim, const ProcessId& process) const {
  if (claim.state == ClaimState::kActive) return true;
  const auto earlier = earlier_.find(process);
  return claim.state == ClaimState::kDraining && earlier != earlier_.end() && earlier->second == claim.name;
}

absl::StatusOr<ClaimId> Claims::EnterByPolicy(const SessionTerms& terms, const ProcessId& process) {
  MutexLock making(making_mu_);  // of several sessions that come at once, one makes the claim
  Claim claim{.name = terms.claim,
              .terms = {.limit = terms.claim_limit, .guarantee = terms.claim_guarantee},
              .created = std::chrono::system_clock::now(),
              .rule = terms.rule,
              .sessions = 1};
  bool has_come_back = false;
  {
    MutexLock lock(mu_);
    if (const auto it = claims_.find(claim.name); it != claims_.end()) {
      if (it->second.is_being_made) return absl::UnavailableError("the claim is just being made; try again");
      if (!TakesSessions(it->second, process)) {
        return absl::FailedPreconditionError(absl::StrCat("the claim '", claim.name, "', which the policy's rule ",
                                                          terms.rule, " asks for, is being removed"));
      }
      ++it->second.sessions;
      return it->second.id;
    }
    if (NumberOf(/*by_policy=*/true) >= kMaxClaims) return TooMany();
    claim.id = ClaimId{next_id_++};
    const auto earlier = earlier_.find(process);
    has_come_back = earlier != earlier_.end() && earlier->second == claim.name;
  }
  SetLimit(claim);
  if (absl::Status status = RaiseGuarantee(claim.id, claim.terms, /*reclaims=*/false); !status.ok()) {
    // What such a process holds of the run before is not the claim's yet, and in the way of its guarantee. Published()
    // sees to that.
    if (!has_come_back) {
      for (SegmentPool* pool : pools_) pool->CloseClaim(claim.id);
      return status;
    }
    claim.terms.guarantee = uint64_t{0};
  }
  options_.added(claim);
  ClaimLine("claim created", claim).Add("limits", LimitsText(claim)).Add("rule", claim.rule).Write(spdlog::level::info);
  MutexLock lock(mu_);
  names_.emplace(claim.id, claim.name);
  claims_.emplace(claim.name, claim);
  return claim.id;
}

void Claims::UpdateByPolicy(const SessionTerms& terms) {
  {
    MutexLock lock(mu_);
    const auto it = claims_.find(terms.claim);
    if (it == claims_.end() || it->second.rule.empty()) return;  // an operator's has the operator's terms
    Claim& claim = it->second;
    const bool is_same = claim.terms.limit == terms.claim_limit && claim.terms.guarantee == terms.claim_guarantee;
    const SteadyTime now = std::chrono::steady_clock::now();
    if (is_same || now < claim.next_update) return;
    claim.next_update = now + kBetweenUpdates;
  }
  // Dropped when too many changes wait: a session that is opened later asks for it again.
  (void)changes_->Submit([this, terms] {
    absl::StatusOr<Claim> claim = Find(terms.claim);
    if (!claim.ok() || claim->rule.empty()) return;
    const ClaimTerms before = claim->terms;
    claim->rule = terms.rule;
    claim->terms.limit = terms.claim_limit;
    claim->terms.guarantee = terms.claim_guarantee;
    if (absl::Status status = RaiseGuarantee(claim->id, claim->terms, /*reclaims=*/false); !status.ok()) {
      claim->terms.guarantee = before.guarantee;
      ClaimLine("the claim keeps its old guarantee", *claim).Add("why", status.message()).Write(spdlog::level::warn);
    } else {
      claim->next_update = SteadyTime::min();
    }
    Apply(*claim, before);
    ClaimLine("claim changed", *claim)
        .Add("limits", LimitsText(*claim))
        .Add("rule", claim->rule)
        .Write(spdlog::level::info);
  });
}

void Claims::Published(const SessionPtr& session) {
  const std::optional<ClaimId> id = session->terms().claim_id;
  for (int priority = session->terms().priority; id.has_value();) {
    Claim claim;
    {
      MutexLock lock(mu_);
      const auto name = names_.find(*id);
      if (name == names_.end()) return;
      claim = claims_.at(name->second);
    }
    if (!session->caller().claim.has_value()) return UpdateByPolicy(session->terms());
    if (claim.terms.priority == priority) break;
    priority = claim.terms.priority;  // it may change once more meanwhile
    (void)limits_.SetPriority(session, priority);
  }
  limits_.UpdateLimit(session);
}

void Claims::Leave(ClaimId claim) {
  {
    MutexLock lock(mu_);
    const auto name = names_.find(claim);
    if (name == names_.end()) return;
    Claim& of = claims_.at(name->second);
    if (--of.sessions == 0 && !of.rule.empty()) any_leaving_ = true;
  }
  RemoveEmpty();
}

}  // namespace vrambroker
