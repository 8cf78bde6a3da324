// SPDX-License-Identifier: Apache-2.0
#include "server/requests/allocations.h"

#include <memory>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "allocator/heap/block_request.h"
#include "allocator/heap/size_class.h"
#include "server/pool/segment_refusal.h"
#include "server/requests/check_device.h"

namespace vrambroker {
namespace {

// `instead`: the call to use for a leasing session.
absl::StatusOr<RemoteSession*> RemoteOf(const SessionPtr& session, absl::string_view instead) {
  if (RemoteSession* remote = session->remote()) return remote;
  return absl::FailedPreconditionError(absl::StrCat("the session leases segments: use ", instead));
}

}  // namespace

// An allocation not served by the session's cache. Its steps run in sequence as tasks of the session's slow calls.
class Allocations::Request : public MemoryRequest {
 public:
  Request(Allocations* owner, const SessionPtr& session, int device, const RequestOptions& options, uint64_t requested,
          Stream stream, Done done)
      : MemoryRequest(session, device, options),
        owner_(*owner),
        remote_(*session->remote()),
        requested_(requested),
        stream_(stream),
        done_(std::move(done)) {}

  void Start() {
    const bool queued = remote_.slow_calls().Submit([self = Self()] { self->Run(); });
    if (!queued) done_(Session::TooManyCalls());
  }

  void Refused(const absl::Status& why) override {
    if (!SegmentRefusalCause(why).has_value()) return done_(why);
    Answer(why);
  }

 private:
  std::shared_ptr<Request> Self() { return std::static_pointer_cast<Request>(shared_from_this()); }

  void Run() {
    if (absl::Status status = remote_.CheckMayAllocate(); !status.ok()) return done_(std::move(status));
    block_ = std::make_unique<BlockRequest>(&remote_.allocator(device()), requested_, stream_, options().scope);
    const absl::Status refusal = remote_.RunUntilRefused(device(), *block_);
    if (!refusal.ok() && options().may_reclaim) return Wait();
    Answer(refusal);
  }

  void RunReserved(Reservation reservation) override {
    // Since the grant the session may have ended, or freed memory that serves the request.
    const absl::Status may_allocate = remote_.CheckMayAllocate();
    if (!may_allocate.ok() || block_->SearchAgain()) {
      reservation.Release();
      return may_allocate.ok() ? Answer() : done_(may_allocate);
    }
    absl::Status refusal = remote_.SupplyReserved(device(), *block_, std::move(reservation));
    if (!refusal.ok()) {  // refused by the driver
      block_->FlushAgain();
      refusal = remote_.RunUntilRefused(device(), *block_);
    }
    if (!refusal.ok() && HasTimeLeft(owner_.clock_())) return Wait();
    Answer(refusal);
  }

  void Wait() {
    block_->Park();
    owner_.waiting_.Wait(shared_from_this(), block_->segment_bytes());
    owner_.waiting_.Retry(remote_, device());  // for memory freed before the wait
  }

  bool TryServeOtherwise() override { return remote_.CheckMayAllocate().ok() && block_->SearchAgain(); }
  void ServedOtherwise() override { Answer(); }

  // Answers with the result, after a last search of the cache if refused.
  void Answer(const absl::Status& refusal = absl::OkStatus()) {
    if (!refusal.ok()) {
      if (absl::Status status = remote_.CheckMayAllocate(); !status.ok()) return done_(std::move(status));
      block_->Deny(refusal, owner_.pools_[device()]->AvailableBytes(remote_.id()));
    }
    absl::StatusOr<Allocation> allocation = remote_.FinishAllocation(device(), *block_);
    const std::optional<OomCause> cause = SegmentRefusalCause(allocation.status());
    if (!cause.has_value()) return done_(std::move(allocation));
    owner_.refusals_.Refuse(
        remote_, device(),
        {.bytes = requested_, .stream = stream_, .scope = options().scope, .cause = *cause, .outcome = outcome()},
        done_);
  }

  Allocations& owner_;
  RemoteSession& remote_;  // the session of this request
  const uint64_t requested_;
  const Stream stream_;
  const Done done_;
  std::unique_ptr<BlockRequest> block_;  // in the session's heap; null before the first slow call
};

Allocations::Allocations(std::vector<SegmentPool*> pools, std::function<SteadyTime()> clock, WaitingRequests* waiting,
                         Refusals* refusals)
    : pools_(std::move(pools)), clock_(std::move(clock)), waiting_(*waiting), refusals_(*refusals) {}

void Allocations::Allocate(const SessionPtr& session, uint64_t device, uint64_t requested, Stream stream,
                           const Done& done, const RequestOptions& options) {
  if (absl::Status status = CheckDevice(device, pools_.size()); !status.ok()) return done(std::move(status));
  if (absl::Status status = CheckWait(options); !status.ok()) return done(std::move(status));
  const absl::StatusOr<RemoteSession*> remote = RemoteOf(session, "LeaseSegments");
  if (!remote.ok()) return done(remote.status());
  if (requested == 0) return done(absl::InvalidArgumentError("requested_bytes: must be 1 or more"));
  const int ordinal = static_cast<int>(device);
  if (requested >= kMaxRequestBytes) {
    if (absl::Status status = (*remote)->CheckMayAllocate(); !status.ok()) return done(std::move(status));
    (*remote)->allocator(ordinal).CountOutOfMemory();
    return refusals_.Refuse(
        **remote, ordinal,
        {.bytes = requested, .stream = stream, .scope = options.scope, .cause = OomCause::kLargerThanDevice}, done);
  }
  absl::StatusOr<Allocation> cached = (*remote)->AllocateFromCache(ordinal, requested, stream, options.scope);
  if (!absl::IsNotFound(cached.status())) return done(std::move(cached));
  const auto request = std::make_shared<Request>(this, session, ordinal, options, requested, stream, done);
  // The needed bytes are not known yet. A session with unused guarantee is not kept waiting.
  if (waiting_.GoesFirst(*session, ordinal, /*bytes=*/1)) return request->Start();
  waiting_.AfterPass(ordinal, [request] { request->Start(); });
}

absl::Status Allocations::Free(const SessionPtr& session, absl::Span<const BlockId> blocks) {
  const absl::StatusOr<RemoteSession*> remote = RemoteOf(session, "ReturnSegments");
  if (!remote.ok()) return remote.status();
  if (absl::Status status = (*remote)->Free(blocks); !status.ok()) return status;
  waiting_.Retry(*session);
  return absl::OkStatus();
}

}  // namespace vrambroker
