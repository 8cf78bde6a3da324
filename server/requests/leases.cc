// SPDX-License-Identifier: Apache-2.0
#include "server/requests/leases.h"

#include <spdlog/spdlog.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/base/client_log.h"
#include "server/pool/segment_refusal.h"
#include "server/requests/check_device.h"

namespace vrambroker {
namespace {

constexpr size_t kMaxSegmentsInLease = 64;
constexpr size_t kMaxErrorInLog = 512;  // characters of a client's message
constexpr size_t kMaxUsersInLog = 1000;

absl::Status CheckSizes(const std::vector<uint64_t>& sizes) {
  if (sizes.empty() || sizes.size() > kMaxSegmentsInLease) {
    return absl::InvalidArgumentError(
        absl::StrCat("segment_bytes: ", sizes.size(), " sizes; a lease has 1 to ", kMaxSegmentsInLease));
  }
  for (const uint64_t bytes : sizes) {
    if (absl::Status status = CheckSegmentBytes(bytes); !status.ok()) {
      return absl::InvalidArgumentError(absl::StrCat("segment_bytes: ", status.message()));
    }
  }
  return absl::OkStatus();
}

// nullopt above `most`: avoids overflow of the sum.
std::optional<uint64_t> SumUpTo(uint64_t most, const std::vector<uint64_t>& sizes) {
  uint64_t sum = 0;
  for (const uint64_t bytes : sizes) {
    if (bytes > most - sum) return std::nullopt;
    sum += bytes;
  }
  return sum;
}

absl::StatusOr<LeasedSession*> LeasedOf(const SessionPtr& session) {
  if (LeasedSession* leased = session->leased()) return leased;
  return absl::FailedPreconditionError("the session is remote: use Allocate and Free");
}

}  // namespace

// A lease not served at once. Its steps run in sequence as tasks of the session's slow calls.
class Leases::Request : public MemoryRequest {
 public:
  // `sum`: sum of `sizes`.
  Request(Leases* owner, const SessionPtr& session, int device, const RequestOptions& options,
          std::vector<uint64_t> sizes, uint64_t sum, Done done)
      : MemoryRequest(session, device, options),
        owner_(*owner),
        leased_(*session->leased()),
        events_(session->events()),
        sizes_(std::move(sizes)),
        sum_(sum),
        may_await_look_(options.may_reclaim && MayAwaitLook()),
        done_(std::move(done)) {}

  void Start() {
    const bool queued = leased_.slow_calls().Submit([self = Self()] {
      if (!self->HasConnection()) return;
      self->AnswerOrWait(self->leased_.LeaseSlowly(self->device(), self->sizes_));
    });
    if (!queued) done_(Session::TooManyCalls());
  }

  // Waits for other sessions if they may have the memory.
  void AnswerOrWait(absl::StatusOr<std::vector<Lease>> leases) {
    const std::optional<OomCause> refusal = SegmentRefusalCause(leases.status());
    const bool may_wait = refusal == OomCause::kCapacity || (refusal == OomCause::kLimit && may_await_look_);
    if (!options().may_reclaim || !may_wait) return Answer(std::move(leases));
    owner_.waiting_.Wait(shared_from_this(), sum_);
  }

  void Refused(const absl::Status& why) override { Answer(why); }

 private:
  std::shared_ptr<Request> Self() { return std::static_pointer_cast<Request>(shared_from_this()); }

  bool MayAwaitLook() const {
    const SegmentPool& pool = *owner_.pools_[device()];
    if (!pool.IsClosingCarriedOver(leased_.id())) return false;
    const std::optional<AccountState> account = pool.GetAccount(leased_.id());
    return account.has_value() && sum_ <= account->limit_bytes;
  }

  void RunReserved(Reservation reservation) override {
    if (!HasConnection(&reservation)) return;
    absl::StatusOr<std::vector<Lease>> leases = leased_.LeaseSlowly(device(), sizes_, std::move(reservation));
    const bool may_wait = SegmentRefusalCause(leases.status()) == OomCause::kCapacity && HasTimeLeft(owner_.clock_());
    if (!may_wait) return Answer(std::move(leases));
    owner_.waiting_.Wait(shared_from_this(), sum_);
  }

  // False, after answering the request, when the client has resumed the session meanwhile and does not know of the
  // lease.
  bool HasConnection(Reservation* reservation = nullptr) {
    if (leased_.events() == events_) return true;
    if (reservation != nullptr) reservation->Release();  // before the answer
    done_(absl::AbortedError("the connection has broken"));
    return false;
  }

  void Answer(absl::StatusOr<std::vector<Lease>> leases) {
    if (leases.ok()) return done_(std::move(leases));
    const uint64_t largest = *std::max_element(sizes_.begin(), sizes_.end());
    const WaitRecord outcome = this->outcome();
    // Also after a cancellation: the client asks for an explanation if the refusal mattered.
    leased_.refusals().AddLeaseOutcome(device(), largest, owner_.clock_(), outcome);
    const std::optional<OomCause> cause = SegmentRefusalCause(leases.status());
    if (!cause.has_value()) return done_(std::move(leases));
    done_(owner_.refusals_.LeaseError(leased_, device(), largest, *cause, outcome));
  }

  Leases& owner_;
  LeasedSession& leased_;  // the session of this request
  const std::shared_ptr<SessionEvents> events_;
  const std::vector<uint64_t> sizes_;
  const uint64_t sum_;
  const bool may_await_look_;
  const Done done_;
};

Leases::Leases(std::vector<SegmentPool*> pools, std::function<SteadyTime()> clock, WaitingRequests* waiting,
               Refusals* refusals, SharedTimer* timer)
    : pools_(std::move(pools)), clock_(std::move(clock)), waiting_(*waiting), refusals_(*refusals), timer_(*timer) {}

void Leases::LeaseSegments(const SessionPtr& session, uint64_t device, const std::vector<uint64_t>& sizes,
                           const Done& done, const RequestOptions& options) {
  if (absl::Status status = CheckDevice(device, pools_.size()); !status.ok()) return done(std::move(status));
  const absl::StatusOr<LeasedSession*> leased = LeasedOf(session);
  if (!leased.ok()) return done(leased.status());
  if (absl::Status status = CheckSizes(sizes); !status.ok()) return done(std::move(status));
  if (absl::Status status = CheckWait(options); !status.ok()) return done(std::move(status));
  const int ordinal = static_cast<int>(device);
  const std::optional<uint64_t> sum = SumUpTo(pools_[device]->capacity_bytes(), sizes);
  if (!sum.has_value()) {
    return done(refusals_.LeaseError(**leased, ordinal, *std::max_element(sizes.begin(), sizes.end()),
                                     OomCause::kLargerThanDevice, {}));
  }
  const auto make_request = [&] {
    return std::make_shared<Request>(this, session, ordinal, options, sizes, *sum, done);
  };
  // Made before the lease is tried, to see events in between: a cancellation, or memory freed by a look at carried-over
  // segments. A request without a wait is made only if the pool lacks the segments.
  std::shared_ptr<Request> request = options.may_reclaim ? make_request() : nullptr;
  const bool goes_first = waiting_.GoesFirst(*session, ordinal, *sum);
  absl::StatusOr<std::vector<Lease>> idle = absl::NotFoundError("not tried");
  if (goes_first) idle = (*leased)->LeaseIdle(ordinal, sizes);
  if (idle.ok()) return done(std::move(idle));
  if (request == nullptr) request = make_request();
  if (!goes_first) return waiting_.AfterPass(ordinal, [request] { request->Start(); });
  if (!absl::IsNotFound(idle.status())) return request->AnswerOrWait(std::move(idle));
  request->Start();
}

absl::Status Leases::ReturnSegments(const SessionPtr& session, uint64_t device, absl::Span<const SegmentId> segments) {
  if (absl::Status status = CheckDevice(device, pools_.size()); !status.ok()) return status;
  LeasedSession* const leased = session->leased();
  if (leased == nullptr) {
    return absl::FailedPreconditionError("the session is remote: the daemon manages its segments");
  }
  return leased->ReturnSegments(static_cast<int>(device), segments);
}

absl::Status Leases::DeclareCarriedOver(const SessionPtr& session, const CarriedByDevice& segments, bool begins,
                                        bool ends) {
  // Buffers of remote sessions outlive the daemon too, even on CUDA: the driver keeps memory opened by a live process.
  // But such a session never reaches the next daemon. The next daemon charges the memory, found or reported by the
  // driver, to no session.
  if (!session->leases()) {
    return absl::FailedPreconditionError("carried_over: the session is remote: the daemon knows what it holds");
  }
  for (const auto& [device, unused] : segments) {
    if (absl::Status status = CheckDevice(device, pools_.size()); !status.ok()) return status;
  }
  for (size_t device = 0; device < pools_.size(); ++device) {
    const auto it = segments.find(device);
    if (it == segments.end() && !begins && !ends) continue;
    const absl::Status status = pools_[device]->DeclareCarriedOver(
        session->id(), it == segments.end() ? absl::Span<const CarriedSegment>() : it->second, begins, ends);
    if (!status.ok()) return status;
  }
  if (ends) timer_.Update();
  return absl::OkStatus();
}

void Leases::FreeCarriedOver(const SessionPtr& session, absl::Span<const uint64_t> ids) {
  for (SegmentPool* pool : pools_) pool->FreeCarriedOver(session->id(), ids);
  timer_.Update();
}

void Leases::CannotOpen(const Session& session, int device, absl::string_view error) {
  const absl::string_view cause = error.substr(0, kMaxErrorInLog);
  const uid_t uid = session.caller().uid;
  if (!pools_[device]->properties().needs_one_user || uid == geteuid()) {
    return LogClientEvent(spdlog::level::warn,
                          SessionLine("client cannot open its memory", session.id(), session.name())
                              .Add("device", device)
                              .Add("why", cause));
  }
  {
    MutexLock lock(mu_);
    if (cannot_open_.size() >= kMaxUsersInLog || !cannot_open_.insert(uid).second) return;
  }
  SessionLine("clients of another user cannot open the daemon's memory", session.id(), session.name())
      .Add("uid", uid)
      .Add("daemon_uid", geteuid())
      .Add("device", device)
      .Add("why", cause)
      .Add("advice", absl::StrCat("CUDA may share memory only between processes of one user: run the daemon as uid ",
                                  uid, ", or a daemon of its own for each user"))
      .Write(spdlog::level::err);
}

}  // namespace vrambroker
