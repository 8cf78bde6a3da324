// SPDX-License-Identifier: Apache-2.0
//
// Link: a connection to the daemon, and the session that it keeps.
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

// Constant once it is in use.
struct Link {
  ~Link();

  // What a device said that was to open a segment, which was leased over this link. Explains a refusal that may be for
  // want of the right user, and tells the daemon.
  absl::StatusOr<void*> Opened(const Device& device, int ordinal, absl::StatusOr<void*> base);

  std::shared_ptr<SessionStream> stream;
  uint64_t session = 0;  // counts the sessions of this client; one that is resumed keeps its number
  uint64_t session_id = 0;
  std::string name;
  std::string resume_token;
  bool takes_carried_over = false;
  bool takes_resume_in_parts = false;
  bool takes_segment_calls = false;
  uint32_t record_events = 0;  // what the daemon has its heaps keep unless somebody asks for others, if it says
  std::optional<v1::Welcome::Users> users;
  // How often something was said about what is carried over, and how much of that the daemon has read for sure, since
  // it has answered what was sent later. Until the two are equal, calls go over the stream: a SegmentCall could
  // overtake it.
  std::atomic<uint64_t> carried_over_sent{0};
  std::atomic<uint64_t> carried_over_read{0};
  std::atomic<bool> has_opened{false};  // a segment that the daemon has leased over it
  std::atomic<bool> told_cannot_open{false};
};

}  // namespace vrambroker::client_internal

#endif  // VRAMBROKER_CLIENT_CONNECTION_LINK_H_
