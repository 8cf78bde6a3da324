// SPDX-License-Identifier: Apache-2.0
//
// Link: a connection to the daemon, and the session on the connection.
#ifndef VRAMBROKER_CLIENT_CONNECTION_LINK_H_
#define VRAMBROKER_CLIENT_CONNECTION_LINK_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "allocator/device/device.h"
#include "client/connection/session_stream.h"
#include "vrambroker/v1/broker.pb.h"

namespace vrambroker::client_internal {

// Constant once in use.
struct Link {
  ~Link();

  // Takes the device's result of opening a segment leased over this link. Explains failures possibly caused by the
  // wrong user, and reports them to the daemon.
  absl::StatusOr<void*> Opened(const SegmentOpener& device, int ordinal, absl::StatusOr<void*> base);

  std::shared_ptr<SessionStream> stream;
  uint64_t session = 0;  // number of this client's session; a resumed session keeps its number
  uint64_t session_id = 0;
  std::string name;
  std::string resume_token;
  bool takes_carried_over = false;
  bool takes_resume_in_parts = false;
  bool takes_segment_calls = false;
  uint32_t record_events = 0;  // the daemon's default number of events to keep; 0: the daemon does not say
  std::optional<v1::Welcome::Users> users;
  // Number of messages sent on carried-over memory, and number surely read by the daemon, since it answered a later
  // message. Until both are equal, calls go over the stream: a SegmentCall could overtake these messages.
  std::atomic<uint64_t> carried_over_sent{0};
  std::atomic<uint64_t> carried_over_read{0};
  std::atomic<bool> has_opened{false};  // opened a segment leased over this link
  std::atomic<bool> told_cannot_open{false};
};

}  // namespace vrambroker::client_internal

#endif  // VRAMBROKER_CLIENT_CONNECTION_LINK_H_
