// SPDX-License-Identifier: Apache-2.0
//
// HeapHost: what a heap needs of the session that it belongs to.
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
  // Segments came or went: the daemon learns of it soon, not only at the next report.
  virtual void Grown() = 0;
  // Sends the device's figures if they have changed, or `always`: of a leased heap. False: they had not.
  virtual bool ReportStatsOf(size_t device, bool always = false) = 0;
  // The device of this process that is the daemon's `ordinal`.
  virtual absl::StatusOr<Device*> DeviceFor(int ordinal) = 0;
  // Calls `record`, which notes that something leased over `link` is held. False, and it is not, when the connection
  // has broken: the session may be resumed at this moment, without it, and somebody else may get it.
  virtual bool Adopt(const std::shared_ptr<Link>& link, const std::function<void()>& record) = 0;
  struct LeaseAnswer {
    v1::LeaseSegmentsResponse leased;
    std::vector<UniqueFd> descriptors;  // that came with it
  };
  // Leases segments for the session of `link`. `give_up`: see SessionStream::Lease().
  virtual absl::StatusOr<LeaseAnswer> Lease(Link& link, const v1::LeaseSegmentsRequest& request,
                                            const std::function<bool()>& give_up) = 0;
  // What opens a segment here.
  virtual absl::StatusOr<SegmentHandle> FetchHandle(const v1::SegmentHandle& handle) = 0;
  // Gives segments of session number `session` back, which are closed here. False when the daemon does not have them:
  // it is gone, or will have them when it is reached again.
  virtual bool ReturnSegments(int device, uint64_t session, const std::vector<uint64_t>& segments) = 0;
  // The daemon has bytes of a whole segment back.
  virtual void WholeReturned(int device, uint64_t bytes) = 0;
  // How long a call waits that gives something back.
  virtual absl::Duration Patience() const = 0;
  // What came of such a call.
  virtual void NoteAnswer(const absl::Status& status) = 0;
  // Makes a call over the session's connection, with a deadline. A lost session explains itself.
  virtual absl::Status CallOver(const std::function<grpc::Status(SessionStream&, grpc::ClientContext*)>& call) = 0;
  // The same, of a unary method of v1::Broker.
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
