// SPDX-License-Identifier: Apache-2.0
//
// DescriptorChannel: the client's end of the daemon's descriptor socket, described in proto/README.md.
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

// Keeps a few connections for later calls; concurrent calls use separate connections. Thread-safe.
class DescriptorChannel {
 public:
  explicit DescriptorChannel(absl::string_view socket_dir);

  // Fetches the descriptor for a ticket. `timeout` covers the whole fetch. Internal carries the daemon's refusal.
  // Unavailable: the daemon does not know the ticket, or has closed the connection. DeadlineExceeded: no answer.
  // Otherwise errors as ConnectSocket().
  absl::StatusOr<UniqueFd> Fetch(absl::string_view ticket, absl::Duration timeout) ABSL_LOCKS_EXCLUDED(mu_);

  struct Answer {
    v1::CallResult result;
    std::vector<UniqueFd> descriptors;  // received with the result
  };
  // Makes a call. DeadlineExceeded: no answer; the daemon takes back leases, and may still return the requested
  // segments. Internal: unreadable answer. After any other error the call may be repeated in another way.
  absl::StatusOr<Answer> Call(const v1::SegmentCall& call, absl::Duration timeout) ABSL_LOCKS_EXCLUDED(mu_);

  // A single answer as received.
  struct Packet {
    std::string bytes;
    std::vector<UniqueFd> descriptors;
    bool is_last = false;  // nothing more comes over the packet's connection
  };

  // The error for an answer without the expected descriptor.
  static absl::Status NoDescriptor();

  // Makes all waiting and later calls fail with Unavailable.
  void StopWaiting() ABSL_LOCKS_EXCLUDED(mu_);

 private:
  // Exchanges a packet for an answer, over a kept or a new connection.
  absl::StatusOr<Packet> Exchange(absl::string_view packet, absl::Duration timeout) ABSL_LOCKS_EXCLUDED(mu_);
  absl::StatusOr<Packet> ExchangeOver(const UniqueFd& socket, absl::string_view packet, Deadline deadline)
      ABSL_LOCKS_EXCLUDED(mu_);

  const std::string path_;
  Mutex mu_;
  static constexpr size_t kMaxKept = 4;
  std::vector<UniqueFd> kept_ ABSL_GUARDED_BY(mu_);        // idle connections
  absl::flat_hash_set<int> waiting_ ABSL_GUARDED_BY(mu_);  // connections with a waiting call
  bool stopped_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace vrambroker::client_internal

#endif  // VRAMBROKER_CLIENT_CONNECTION_DESCRIPTOR_CHANNEL_H_
