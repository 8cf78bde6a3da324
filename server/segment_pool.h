// SPDX-License-Identifier: Apache-2.0
//
// SegmentPool: all segments of one device, and the ledger of who may hold how much.
//
// Every session has an account with the pool: a limit, and what is charged against it. A segment is leased to one
// account, or idle. This is the one place where limits and capacity are enforced.
#ifndef VRAMBROKER_SERVER_SEGMENT_POOL_H_
#define VRAMBROKER_SERVER_SEGMENT_POOL_H_

#include <sys/types.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "allocator/device.h"
#include "allocator/ids.h"
#include "allocator/mutex.h"
#include "server/idle_segments.h"

namespace vrambroker {

// One-time right to fetch the file descriptor of a segment; unguessable.
using Ticket = std::array<char, 16>;
// How the holder of a segment opens it.
using WireHandle = std::variant<CudaIpcHandle, Ticket>;

struct AccountFigures {
  uint64_t limit_bytes = 0;
  uint64_t reserved_bytes = 0;   // charged: leased, being obtained, or returning
  uint64_t returning_bytes = 0;  // of these, asked back from the client and not yet closed by it
};

struct PoolFigures {
  uint64_t capacity_bytes = 0;
  uint64_t charged_bytes = 0;   // sum of the accounts' reserved bytes
  uint64_t idle_bytes = 0;      // held from the driver, leased to nobody
  uint64_t reserved_bytes = 0;  // held from the driver: charged + idle + being freed
  uint64_t segments = 0;        // leased
  uint64_t segment_allocs = 0;  // obtained from the driver, ever
  uint64_t segment_frees = 0;   // given back to the driver, ever
};

// Safe to call from any thread. Calls marked (driver) may take milliseconds; they hold no lock meanwhile.
class SegmentPool {
 public:
  // `next_segment` numbers segments over all devices of a daemon; it outlives the pool.
  SegmentPool(std::unique_ptr<Device> device, uint64_t capacity_bytes, std::atomic<uint64_t>* next_segment);
  // Gives everything back to the driver. REQUIRES: no other call is running.
  ~SegmentPool();

  const DeviceProperties& properties() const { return device_->properties(); }
  uint64_t capacity_bytes() const { return capacity_bytes_; }

  // REQUIRES: `session` has no account here.
  void OpenAccount(SessionId session, pid_t pid, uid_t tenant, uint64_t limit_bytes);
  // NotFound when there is no such account. A limit below what is reserved takes nothing away.
  absl::Status SetLimit(SessionId session, uint64_t limit_bytes);
  // All segments of the account become idle, and its tickets void. Returns their bytes.
  // REQUIRES: the holder cannot touch them any more: it said so, or its process has gone.
  uint64_t CloseAccount(SessionId session);

  // (driver) A segment of exactly `bytes`: an idle one of the same tenant, or a new one, for which idle segments are
  // given up when the device is full. SegmentRefused() when the limit or the capacity forbids it, Aborted when the
  // account is closed.
  absl::StatusOr<SegmentId> Lease(SessionId session, uint64_t bytes);

  // Marks leased segments as asked back; they stay charged. Unknown ids are ignored.
  void MarkReturning(SessionId session, absl::Span<const SegmentId> segments);
  // Makes segments that are marked returning idle. Others are ignored: a client cannot return what it still uses.
  void Return(SessionId session, absl::Span<const SegmentId> segments);

  // How the session opens a segment that it holds. NotFound otherwise.
  absl::StatusOr<WireHandle> HandleFor(SessionId session, SegmentId segment);
  // The descriptor that `ticket` stands for, once, for the process and user of the session that it was issued to.
  // NotFound: no such ticket, or used. PermissionDenied: of another process.
  absl::StatusOr<UniqueFd> RedeemTicket(const Ticket& ticket, pid_t pid, uid_t uid);

  // (driver) Gives segments that have been idle since `time` or longer back to the driver. Returns their bytes.
  uint64_t ReleaseIdleSince(SteadyTime time);

  // nullopt when there is no such account.
  std::optional<AccountFigures> GetAccount(SessionId session) const;
  // What Lease() could still hand to the session; 0 when there is no such account.
  uint64_t AvailableBytes(SessionId session) const;
  PoolFigures GetFigures() const;

 private:
  struct LeasedSegment {
    DeviceSegment segment;
    std::optional<CudaIpcHandle> cuda_ipc;
    SessionId holder{};
    bool returning = false;
    std::optional<Ticket> ticket;  // the one that is out, if any
  };
  struct Account {
    pid_t pid = 0;
    uid_t tenant = 0;
    AccountFigures figures;
    absl::flat_hash_set<SegmentId> segments;
  };

  SegmentId AddLease(SessionId session, Account& account, LeasedSegment segment) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void MakeIdle(SegmentId id, Account& account) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Counts `entries`, which have left idle_, as being freed; FreeToDriver() then frees them (driver).
  std::vector<IdleSegments::Entry> StartFreeing(std::vector<IdleSegments::Entry> entries)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void FreeToDriver(const std::vector<IdleSegments::Entry>& entries) ABSL_LOCKS_EXCLUDED(mu_);
  // (driver) A segment that the caller has made room for; asks twice when frees of others were still under way.
  absl::StatusOr<LeasedSegment> AllocateFromDriver(uint64_t bytes) ABSL_LOCKS_EXCLUDED(mu_);

  // Constant after construction.
  const std::unique_ptr<Device> device_;
  const uint64_t capacity_bytes_;
  std::atomic<uint64_t>& next_segment_;

  // Never held during a driver call.
  mutable Mutex mu_;
  CondVar freed_;  // freeing_bytes_ has become 0
  absl::flat_hash_map<SessionId, Account> accounts_ ABSL_GUARDED_BY(mu_);
  absl::flat_hash_map<SegmentId, LeasedSegment> leased_ ABSL_GUARDED_BY(mu_);
  absl::flat_hash_map<Ticket, SegmentId> tickets_ ABSL_GUARDED_BY(mu_);
  IdleSegments idle_ ABSL_GUARDED_BY(mu_);
  uint64_t charged_bytes_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t freeing_bytes_ ABSL_GUARDED_BY(mu_) = 0;  // on their way back to the driver
  uint64_t segment_allocs_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t segment_frees_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_SEGMENT_POOL_H_
