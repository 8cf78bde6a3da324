// SPDX-License-Identifier: Apache-2.0
//
// DescriptorChannel: the client's end of the daemon's descriptor socket, which proto/README.md describes.
#ifndef VRAMBROKER_CLIENT_CONNECTION_DESCRIPTOR_CHANNEL_H_
#define VRAMBROKER_CLIENT_CONNECTION_DESCRIPTOR_CHANNEL_H_

#include <string>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "allocator/base/mutex.h"
#include "allocator/base/unique_fd.h"
#include "client/connection/deadline.h"
#include "vrambroker/v1/broker.pb.h"

namespace vrambroker::client_internal {

// Keeps a few connections for later calls; calls at the same time have a connection each. Thread-safe.
class DescriptorChannel {
 public:
  explicit DescriptorChannel(absl::string_view socket_dir);

  // The descriptor that a ticket stands for. `timeout` is for all of it. Internal carries the daemon's refusal.
  // Unavailable: it does not know the ticket, or has closed the connection. DeadlineExceeded: it has not answered.
  // Otherwise errors as ConnectSocket().
  absl::StatusOr<UniqueFd> Fetch(absl::string_view ticket, absl::Duration timeout) ABSL_LOCKS_EXCLUDED(mu_);

  struct Answer {
    v1::CallResult result;
    std::vector<UniqueFd> descriptors;  // that came with it
  };
  // Makes a call. DeadlineExceeded: there is no answer; the daemon takes back what it leases, and may still return what
  // it was told to. Internal: the answer is not readable. Any other error: the call may be made again, by another way.
  absl::StatusOr<Answer> Call(const v1::SegmentCall& call, absl::Duration timeout) ABSL_LOCKS_EXCLUDED(mu_);

  // One answer as it arrives.
  struct Packet {
    std::string bytes;
    std::vector<UniqueFd> descriptors;
    bool is_last = false;  // nothing comes over its connection any more
  };

  // The error of an answer without the descriptor that it should have brought.
  static absl::Status NoDescriptor();

  // All calls get Unavailable: those that wait, and those that follow.
  void StopWaiting() ABSL_LOCKS_EXCLUDED(mu_);

 private:
  // One packet for one, over a connection that is kept, or a new one.
  absl::StatusOr<Packet> Exchange(absl::string_view packet, absl::Duration timeout) ABSL_LOCKS_EXCLUDED(mu_);
  absl::StatusOr<Packet> ExchangeOver(const UniqueFd& socket, absl::string_view packet, Deadline deadline)
      ABSL_LOCKS_EXCLUDED(mu_);

  const std::string path_;
  Mutex mu_;
  static constexpr size_t kMaxKept = 4;
  std::vector<UniqueFd> kept_ ABSL_GUARDED_BY(mu_);        // connections on which nothing is under way
  absl::flat_hash_set<int> waiting_ ABSL_GUARDED_BY(mu_);  // connections on which somebody waits
  bool stopped_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace vrambroker::client_internal

#endif  // VRAMBROKER_CLIENT_CONNECTION_DESCRIPTOR_CHANNEL_H_
