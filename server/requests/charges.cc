// SPDX-License-Identifier: Apache-2.0
#include "server/requests/charges.h"

#include <memory>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/pool/segment_refusal.h"
#include "server/requests/check_device.h"

namespace vrambroker {
namespace {

absl::Status CheckBytes(uint64_t bytes) {
  if (absl::Status status = CheckSegmentBytes(bytes); !status.ok()) {
    return absl::InvalidArgumentError(absl::StrCat("bytes: ", status.message()));
  }
  return absl::OkStatus();
}

}  // namespace

// A charge not answered at once. Its steps run in sequence as tasks of the session's slow calls.
class Charges::Request : public MemoryRequest {
 public:
  Request(Charges* owner, const SessionPtr& session, int device, const RequestOptions& options, uint64_t bytes,
          Done done)
      : MemoryRequest(session, device, options),
        owner_(*owner),
        counted_(*session->counted()),
        bytes_(bytes),
        done_(std::move(done)) {}

  void Start() {
    const bool queued = counted_.slow_calls().Submit([self = Self()] { self->AnswerOrWait(self->Try({})); });
    if (!queued) done_(Session::TooManyCalls());
  }

  // Waits for other sessions if they may have the memory.
  void AnswerOrWait(const absl::Status& status) {
    if (!options().may_reclaim || SegmentRefusalCause(status) != OomCause::kCapacity) return Answer(status);
    owner_.waiting_.Wait(shared_from_this(), bytes_);
  }

  void Refused(const absl::Status& why) override { Answer(why); }

 private:
  absl::Status Try(Reservation reservation) {
    return counted_.ChargeSlowly(device(), bytes_, options().resumes, std::move(reservation));
  }
  std::shared_ptr<Request> Self() { return std::static_pointer_cast<Request>(shared_from_this()); }

  void RunReserved(Reservation reservation) override {
    const absl::Status status = Try(std::move(reservation));
    const bool may_wait = SegmentRefusalCause(status) == OomCause::kCapacity && HasTimeLeft(owner_.clock_());
    if (!may_wait) return Answer(status);
    owner_.waiting_.Wait(shared_from_this(), bytes_);
  }

  void Answer(const absl::Status& status) {
    const std::optional<OomCause> cause = SegmentRefusalCause(status);
    if (!cause.has_value()) return done_(status);
    const Refusals::ChargeRefusal refusal{.bytes = bytes_, .cause = *cause, .outcome = outcome()};
    if (options().may_reclaim) return owner_.refusals_.RefuseCharge(counted_, device(), refusal, done_);
    done_(owner_.refusals_.ChargeError(counted_, device(), refusal));
  }

  Charges& owner_;
  CountedSession& counted_;  // the session of this request
  const uint64_t bytes_;
  const Done done_;
};

Charges::Charges(std::vector<SegmentPool*> pools, std::function<SteadyTime()> clock, WaitingRequests* waiting,
                 Refusals* refusals)
    : pools_(std::move(pools)), clock_(std::move(clock)), waiting_(*waiting), refusals_(*refusals) {}

absl::StatusOr<CountedSession*> Charges::Check(const SessionPtr& session, uint64_t device) const {
  if (absl::Status status = CheckDevice(device, pools_.size()); !status.ok()) return status;
  if (CountedSession* const counted = session->counted()) return counted;
  return absl::FailedPreconditionError("the session has its memory of the daemon: only a counted one is charged");
}

void Charges::Charge(const SessionPtr& session, uint64_t device, uint64_t bytes, const Done& done,
                     const RequestOptions& options) {
  const absl::StatusOr<CountedSession*> counted = Check(session, device);
  if (!counted.ok()) return done(counted.status());
  if (absl::Status status = CheckBytes(bytes); !status.ok()) return done(std::move(status));
  if (absl::Status status = CheckWait(options); !status.ok()) return done(std::move(status));
  const int ordinal = static_cast<int>(device);
  // Made before the charge is tried, to see a cancellation in between.
  const auto request = std::make_shared<Request>(this, session, ordinal, options, bytes, done);
  if (!waiting_.GoesFirst(*session, ordinal, bytes)) {
    return waiting_.AfterPass(ordinal, [request] { request->Start(); });
  }
  absl::Status status = (*counted)->TryCharge(ordinal, bytes, options.resumes);
  if (status.ok()) return done(std::move(status));
  if (!absl::IsNotFound(status)) return request->AnswerOrWait(status);
  request->Start();
}

absl::Status Charges::Uncharge(const SessionPtr& session, uint64_t device, uint64_t bytes) {
  const absl::StatusOr<CountedSession*> counted = Check(session, device);
  if (!counted.ok()) return counted.status();
  if (absl::Status status = CheckBytes(bytes); !status.ok()) return status;
  return (*counted)->Uncharge(static_cast<int>(device), bytes);
}

absl::Status Charges::Declare(const SessionPtr& session, uint64_t device, uint64_t bytes, uint64_t resumes) {
  const absl::StatusOr<CountedSession*> counted = Check(session, device);
  if (!counted.ok()) return counted.status();
  if (bytes != 0) {
    if (absl::Status status = CheckBytes(bytes); !status.ok()) return status;
  }
  return (*counted)->Declare(static_cast<int>(device), bytes, resumes);
}

absl::StatusOr<Charges::Room> Charges::GetRoom(const SessionPtr& session, uint64_t device) const {
  if (absl::Status status = CheckDevice(device, pools_.size()); !status.ok()) return status;
  const std::optional<SegmentPool::AccountRoom> room = pools_[device]->GetRoom(session->id());
  if (!room.has_value()) return absl::AbortedError("the session has ended");
  return Room{.limit = room->account.effective_limit_bytes(),
              .free = room->free_bytes,
              .charged = room->account.reserved_bytes};
}

}  // namespace vrambroker
