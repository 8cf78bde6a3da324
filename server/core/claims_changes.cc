// SPDX-License-Identifier: Apache-2.0
//
// Claims: changes by operators and users, run on a worker in sequence. A daemon killed in between keeps either the old
// claim or the new claim: the guarantee comes first, since it may be refused, then the file, then immediate changes.
#include <algorithm>
#include <atomic>
#include <random>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "allocator/base/bytes.h"
#include "allocator/base/names.h"
#include "allocator/base/utf8.h"
#include "allocator/device/process_files.h"
#include "server/base/saturating.h"
#include "server/core/claims.h"
#include "server/pool/segment_refusal.h"
#include "server/requests/check_device.h"

namespace vrambroker {
namespace {

constexpr size_t kMaxLabelKey = 63;

// Drops a refusal cause meant only for memory requests.
absl::Status Plain(const absl::Status& status) {
  return SegmentRefusalCause(status).has_value() ? absl::ResourceExhaustedError(status.message()) : status;
}

// Status for errors of the claim's file or directory: a missing file must not be reported as a missing claim.
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
                                                     " letters, digits and _ that begin with a letter or _"));
    }
    if (value.size() > Claims::kMaxLabelValue) {
      return absl::InvalidArgumentError(absl::StrCat("labels: the value of '", key, "' has ", value.size(),
                                                     " bytes; at most ", Claims::kMaxLabelValue, " are allowed"));
    }
  }
  return absl::OkStatus();
}

// For example "u1000.run-4711-3fa2", from the uid and the pid.
std::string NameFor(const Caller& maker) {
  static std::atomic<uint64_t> last{std::random_device()()};
  return absl::StrCat("u", maker.uid, ".run-", maker.pid, "-", absl::Hex(last++ & 0xffff, absl::kZeroPad4));
}

struct Answered {
  Mutex mu;
  CondVar changed;
  bool is_done ABSL_GUARDED_BY(mu) = false;
};

}  // namespace

// ---- Validity of claims ----

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

absl::Status Claims::CheckGuaranteeFits(const ClaimTerms& terms) const {
  const uint64_t* const bytes = std::get_if<uint64_t>(&terms.guarantee);
  if (bytes == nullptr) return absl::OkStatus();
  if (const uint64_t* limit = std::get_if<uint64_t>(&terms.limit); limit != nullptr && *bytes > *limit) {
    return absl::InvalidArgumentError(absl::StrCat("guarantee: ", FormatBytesExactly(*bytes),
                                                   " is above the claim's limit of ", FormatBytesExactly(*limit)));
  }
  for (size_t device = 0; device < pools_.size(); ++device) {
    const uint64_t capacity = pools_[device]->capacity_bytes();
    if (*bytes <= capacity || BytesOn(terms, terms.limit, device) == 0) continue;
    return absl::InvalidArgumentError(absl::StrCat("guarantee: ", FormatBytesExactly(*bytes),
                                                   " is above the capacity of device ", device, ", ",
                                                   FormatBytesExactly(capacity)));
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
      return absl::InvalidArgumentError(absl::StrCat("there is ", absl::StripPrefix(status.message(), "device: ")));
    }
  }
  return absl::OkStatus();
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

absl::Status Claims::CheckOperators(const Claim& claim) {
  if (claim.rule.empty()) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("the claim '", claim.name, "' is made by the policy's rule ", claim.rule,
                   ", for as long as it has sessions: change claim_limit and claim_guarantee there and reload (vramctl "
                   "reload), or end its sessions (vramctl end)"));
}

// ---- Memory of the pools ----

uint64_t Claims::BytesOn(const ClaimTerms& terms, const Limit& limit, size_t device) const {
  const bool has_device = terms.devices.empty() || absl::c_linear_search(terms.devices, device);
  return has_device ? LimitBytes(limit, pools_[device]->capacity_bytes()) : 0;
}

uint64_t Claims::GuaranteeOn(const ClaimTerms& terms, size_t device) const {
  // A rule may give limit and guarantee in different units.
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
    for (size_t i = 0; i < device; ++i) (void)pools_[i]->SetClaimGuarantee(claim, before[i]);  // lower: never refused
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

absl::Status Claims::BoundSessionGuarantees(ClaimId claim, const ClaimTerms& a, const ClaimTerms& b) {
  for (size_t device = 0; device < pools_.size(); ++device) {
    const uint64_t limit = BytesOn(a, a.limit, device);
    absl::Status status = pools_[device]->BoundClaimGuarantees(claim, std::min(limit, BytesOn(b, b.limit, device)));
    if (status.ok()) continue;
    // `a` is the previous bound: a higher bound is never refused.
    for (size_t i = 0; i < device; ++i) (void)pools_[i]->BoundClaimGuarantees(claim, BytesOn(a, a.limit, i));
    return status;
  }
  return absl::OkStatus();
}

void Claims::WarnOfCutGuarantees(const Claim& claim) const {
  for (size_t device = 0; device < pools_.size(); ++device) {
    const uint64_t promised = pools_[device]->GetShare(claim.id).promised_bytes;
    if (promised <= LimitOn(claim, device)) continue;
    ClaimLine("the claim's limit is below the guarantees of its sessions, which get no more than it allows", claim)
        .Add("device", device)
        .Add("limit", LimitOn(claim, device))
        .Add("guarantees", promised)
        .Write(spdlog::level::warn);
  }
}

void Claims::ReclaimFor(ClaimId claim, int device, uint64_t guarantee_bytes) {
  const SteadyTime begun = std::chrono::steady_clock::now();
  for (const bool everybody : {false, true}) {
    // A silent session does not keep the others from being asked.
    const SteadyTime deadline = begun + (everybody ? options_.reclaim_timeout : options_.reclaim_timeout / 8);
    const uint64_t missing = pools_[device]->MissingForClaim(claim, guarantee_bytes);
    if (missing == 0) return;
    // Kept until the last session has answered, however late.
    const auto answered = std::make_shared<Answered>();
    // Memory given back by the claim's own sessions within the guarantee stays the claim's.
    const uint64_t own = SaturatingSub(pools_[device]->GetShare(claim).used_bytes, guarantee_bytes);
    waiting_.Reclaim(device, {.bytes = missing, .share = claim, .from_share = own}, everybody, [answered] {
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

void Claims::ReclaimExcess(const Claim& claim) {
  for (size_t device = 0; device < pools_.size(); ++device) {
    const auto excess = [pool = pools_[device], id = claim.id, limit = LimitOn(claim, device)] {
      return SaturatingSub(pool->GetShare(id).used_bytes, limit);
    };
    const auto ask = [this, excess, device, id = claim.id](bool everybody, const std::function<void()>& done) {
      const Missing missing{.share = id, .in_share = excess()};
      if (missing.in_share > 0) waiting_.Reclaim(static_cast<int>(device), missing, everybody, done);
    };
    // Reports may be a second old: sessions holding more than reported are asked afterwards.
    ask(/*everybody=*/false, [ask] { ask(/*everybody=*/true, [] {}); });
  }
}

// ---- Changes ----

absl::Status Claims::Save(const Claim* changed, const Claim* removed) const {
  std::vector<Claim> all = GetAll();
  const Claim* const replaced = changed != nullptr ? changed : removed;
  std::erase_if(all, [replaced](const Claim& claim) {
    return (replaced != nullptr && claim.id == replaced->id) || !claim.rule.empty();
  });
  if (changed != nullptr) all.push_back(*changed);
  return Unusable(options_.hooks.save(all));
}

absl::Status Claims::SaveState(const Claim& claim) const {
  if (options_.hooks.save_state(claim).ok()) return absl::OkStatus();
  return Save(&claim, nullptr);
}

void Claims::SaveAgain() {
  if (!Save(nullptr, nullptr).ok()) return;
  any_unsaved_ = false;
  LogLine("the file of claims could be written again").Write(spdlog::level::info);
}

absl::StatusOr<Claim> Claims::CreateNow(const std::string& asked_name, ClaimTerms terms, const ClaimAsker& asker,
                                        bool is_ephemeral) {
  const std::string name = asked_name.empty() && is_ephemeral ? NameFor(asker.caller) : asked_name;
  if (absl::Status status = CheckClaimName(name); !status.ok()) return status;
  if (absl::Status status = options_.hooks.check_name(name); !status.ok()) return status;
  if (absl::Status status = CheckDevices(terms); !status.ok()) return status;
  if (absl::Status status = CheckTerms(terms); !status.ok()) return status;
  if (absl::Status status = CheckGuaranteeFits(terms); !status.ok()) return status;
  if (absl::Status status = CheckHasAnything(terms); !status.ok()) return status;
  const bool is_own = asker.rule.has_value();
  if (is_own) {
    absl::Status status = CheckOwnName(name, asker.caller.uid);
    if (status.ok()) status = BoundOwn(asker, terms);
    if (!status.ok()) return status;
  }
  Claim claim{.name = name, .terms = terms, .created = std::chrono::system_clock::now(), .is_own = is_own};
  if (is_ephemeral) claim.maker = ProcessId{.pid = asker.caller.pid, .started = StartOf(asker.caller.pid)};
  {
    MutexLock lock(mu_);
    if (const auto it = claims_.find(name); it != claims_.end()) return ThereIs(it->second);
    if (NumberOf(/*by_policy=*/false) >= kMaxClaims) return TooMany();
    if (absl::Status status = is_own ? CheckOwnNumber(asker) : absl::OkStatus(); !status.ok()) return status;
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
    // The claim exists before a client can connect to its sockets. Sessions of a policy's rule cannot enter before it
    // is served.
    MutexLock making(making_mu_);
    MutexLock lock(mu_);
    claim.is_being_made = true;
    if (const auto [it, is_new] = claims_.try_emplace(name, claim); is_new) {
      names_.emplace(claim.id, name);
    } else {
      status = ThereIs(it->second);  // the policy has made a claim meanwhile
    }
  }
  if (!status.ok()) return GiveUp(claim, is_saved, status);
  options_.added(claim);
  status = Unusable(options_.hooks.serve(claim));
  {
    MutexLock lock(mu_);
    if (status.ok()) {
      claims_.at(name).is_being_made = false;
      if (is_ephemeral) makers_.emplace(claim.id, asker.caller.pidfd);
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
    Claim revoked = claim;
    revoked.state = ClaimState::kRevoked;
    (void)options_.hooks.save_state(revoked);
    any_unsaved_ = true;
    ClaimLine("claim not created, but in the file still", claim).Add("why", status.message()).Write(spdlog::level::err);
  }
  for (SegmentPool* pool : pools_) pool->CloseClaim(claim.id);
  return why;
}

absl::StatusOr<Claim> Claims::UpdateNow(const std::string& name, const ClaimChange& change, const ClaimAsker& asker) {
  const absl::StatusOr<Claim> found = FindToChange(name, asker);
  if (!found.ok()) return found.status();
  const Claim& before = *found;
  if (absl::Status status = CheckOperators(before); !status.ok()) return status;
  if (before.state != ClaimState::kActive) {
    return absl::FailedPreconditionError(absl::StrCat("the claim '", name, "' is being removed"));
  }
  Claim claim = before;
  ClaimTerms& terms = claim.terms;
  if (change.limit.has_value()) terms.limit = *change.limit;
  if (change.guarantee.has_value()) terms.guarantee = *change.guarantee;
  if (change.priority.has_value()) {
    // Clamped to the range of an int; CheckTerms() reports values out of range.
    terms.priority = static_cast<int>(std::clamp<int64_t>(*change.priority, -kMaxPriority - 1, kMaxPriority + 1));
  }
  if (change.max_wait.has_value()) terms.max_wait = change.max_wait;
  if (change.labels.has_value()) terms.labels = *change.labels;
  if (asker.rule.has_value()) terms.tenant = asker.rule->tenant;  // may differ from the claim's first tenant
  if (absl::Status status = BoundOwn(asker, terms); !status.ok()) return status;
  if (absl::Status status = CheckTerms(terms); !status.ok()) return status;
  if (change.guarantee.has_value()) {
    if (absl::Status status = CheckGuaranteeFits(terms); !status.ok()) return status;
  }
  if (change.limit.has_value()) {
    if (absl::Status status = CheckHasAnything(terms); !status.ok()) return status;
  }
  // Meanwhile no session gets a higher guarantee: giving back memory for the claim's guarantee may take long.
  absl::Status status = BoundSessionGuarantees(claim.id, before.terms, terms);
  if (!status.ok()) return status;
  // A guarantee refused at the start is retried only on request.
  if (change.guarantee.has_value()) status = RaiseGuarantee(claim.id, terms, /*reclaims=*/true);
  if (status.ok()) {
    status = Save(&claim, nullptr);
    if (!status.ok()) LowerGuarantee(claim.id, before.terms);
  }
  if (!status.ok()) {
    (void)BoundSessionGuarantees(claim.id, before.terms, before.terms);  // higher: never refused
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
    const SessionTerms& bounds = session->terms();
    if (claim.terms.priority != before.priority) {
      (void)limits_.SetPriority(session, std::min(claim.terms.priority, bounds.most_priority));
    }
    if (claim.terms.max_wait.has_value()) session->SetMaxWait(std::min(*claim.terms.max_wait, bounds.most_wait));
    limits_.TellLimit(session);
  }
  ReclaimExcess(claim);
}

absl::StatusOr<Claims::Deleted> Claims::DeleteNow(const std::string& name, bool revoke, const ClaimAsker& asker) {
  absl::StatusOr<Claim> found = FindToChange(name, asker);
  if (!found.ok()) return found.status();
  Claim claim = *found;
  if (absl::Status status = CheckOperators(claim); !status.ok()) return status;
  if (revoke || claim.state == ClaimState::kActive) {
    claim.state = revoke ? ClaimState::kRevoked : ClaimState::kDraining;
    if (absl::Status status = SaveState(claim); !status.ok()) {
      // A failing file must not keep sessions in a revoked claim.
      if (!revoke) return status;
      any_unsaved_ = true;
      ClaimLine("claim revoked, but not in the file yet", claim).Add("why", status.message()).Write(spdlog::level::err);
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

}  // namespace vrambroker
