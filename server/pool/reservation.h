// SPDX-License-Identifier: Apache-2.0
//
// Reservation: bytes charged by a pool to a session ahead of the lease of its segments.
#ifndef VRAMBROKER_SERVER_POOL_RESERVATION_H_
#define VRAMBROKER_SERVER_POOL_RESERVATION_H_

#include <cstdint>
#include <utility>

#include "allocator/base/ids.h"
#include "server/pool/segment_pool.h"

namespace vrambroker {

// Gives the bytes back when destroyed, unless a lease has consumed them. Move-only. Not thread-safe.
class Reservation {
 public:
  Reservation() = default;  // empty
  // Takes over `bytes` charged to the session by SegmentPool::Grant(). `pool` outlives the reservation.
  Reservation(SegmentPool* pool, SessionId session, uint64_t bytes) : pool_(pool), session_(session), bytes_(bytes) {}
  Reservation(Reservation&& other) noexcept
      : pool_(other.pool_), session_(other.session_), bytes_(std::exchange(other.bytes_, 0)) {}
  Reservation& operator=(Reservation&& other) noexcept {
    std::swap(pool_, other.pool_);
    std::swap(session_, other.session_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Reservation() { Release(); }

  uint64_t bytes() const { return bytes_; }

  // Gives the bytes back now: waiting requests may get them.
  void Release() {
    if (const uint64_t bytes = std::exchange(bytes_, 0); bytes > 0) pool_->ReleaseGrant(session_, bytes);
  }
  // Returns whether there were bytes: the caller leases segments of exactly so many bytes with `granted`, at once.
  bool Consume() { return std::exchange(bytes_, 0) > 0; }

 private:
  SegmentPool* pool_ = nullptr;
  SessionId session_{};
  uint64_t bytes_ = 0;
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_POOL_RESERVATION_H_
