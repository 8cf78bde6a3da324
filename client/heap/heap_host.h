// SPDX-License-Identifier: Apache-2.0
//
// HeapHost: everything a heap needs from its session.
#ifndef VRAMBROKER_CLIENT_HEAP_HEAP_HOST_H_
#define VRAMBROKER_CLIENT_HEAP_HEAP_HOST_H_

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "allocator/base/unique_fd.h"
#include "allocator/device/device.h"
#include "client/connection/fork_check.h"
#include "client/connection/link.h"
#include "client/connection/session_stream.h"
#include "client/vrambroker/client.h"
#include "vrambroker/v1/broker.grpc.pb.h"

namespace vrambroker::client_internal {

// Thread-safe.
class HeapHost {
 public:
  virtual ~HeapHost() = default;
  HeapHost(const HeapHost&) = delete;
  HeapHost& operator=(const HeapHost&) = delete;

  const ClientOptions& options() const { return options_; }
  uint32_t wait_ms() const { return static_cast<uint32_t>(absl::ToInt64Milliseconds(options_.wait)); }
  bool IsForked() const { return fork_check_.IsForked(); }
  int forks() const { return fork_check_.forks(); }
  void CountCall() { calls_.fetch_add(1, std::memory_order_relaxed); }
  uint64_t calls() const { return calls_.load(std::memory_order_relaxed); }

  virtual uint64_t session_id() const = 0;
  virtual uint64_t limit_bytes(int device) const = 0;
  virtual std::shared_ptr<Link> link() const = 0;
  // OK when calls can be made.
  virtual absl::Status CheckUsable() const = 0;
  // Called when segments come or go: tells the daemon soon, rather than at the next report.
  virtual void Grown() = 0;
  // Sends a leased heap's figures if changed, or `always`. False: nothing had changed.
  virtual bool ReportStatsOf(size_t device, bool always = false) = 0;
  // Device of this process for the daemon's `ordinal`.
  virtual absl::StatusOr<SegmentOpener*> DeviceFor(int ordinal) = 0;
  // Calls `record` to note memory leased over `link` as held. False, without the call, when the connection has broken:
  // the session may be resumed at this moment without the memory, and another session may get the memory.
  virtual bool Adopt(const std::shared_ptr<Link>& link, const std::function<void()>& record) = 0;
  struct LeaseAnswer {
    v1::LeaseSegmentsResponse leased;
    std::vector<UniqueFd> descriptors;  // received with the lease
  };
  // Leases segments for the session of `link`. `give_up`: see SessionStream::Lease().
  virtual absl::StatusOr<LeaseAnswer> Lease(Link& link, const v1::LeaseSegmentsRequest& request,
                                            const std::function<bool()>& give_up) = 0;
  // Fetches the handle for opening a segment here.
  virtual absl::StatusOr<SegmentHandle> FetchHandle(const v1::SegmentHandle& handle) = 0;
  // Returns segments, closed here already, of session number `session`. False when the daemon does not have them back:
  // the daemon is gone, or gets them after a reconnect.
  virtual bool ReturnSegments(int device, uint64_t session, const std::vector<uint64_t>& segments) = 0;
  // Notes that the daemon has bytes of a whole segment back.
  virtual void WholeReturned(int device, uint64_t bytes) = 0;
  // Timeout for calls returning memory.
  virtual absl::Duration Patience() const = 0;
  // Notes the result of a call returning memory.
  virtual void NoteAnswer(const absl::Status& status) = 0;
  // Makes a call over the session's connection, with a deadline. A lost session's error tells the reason.
  virtual absl::Status CallOver(const std::function<grpc::Status(SessionStream&, grpc::ClientContext*)>& call) = 0;
  // CallOver() for a unary method of v1::Broker.
  template <typename Method, typename Request, typename Response>
  absl::Status Call(Method method, const Request& request, Response* response) {
    return CallOver([&](SessionStream& stream, grpc::ClientContext* context) {
      return (stream.stub().*method)(context, request, response);
    });
  }

 protected:
  explicit HeapHost(ClientOptions options) : options_(std::move(options)) {}

 private:
  const ClientOptions options_;
  const ForkCheck fork_check_;
  std::atomic<uint64_t> calls_{0};
};

}  // namespace vrambroker::client_internal

#endif  // VRAMBROKER_CLIENT_HEAP_HEAP_HOST_H_
