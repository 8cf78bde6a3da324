// SPDX-License-Identifier: Apache-2.0
#include "client/connection/link.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace vrambroker::client_internal {

Link::~Link() {
  if (stream != nullptr) stream->Abort();
}

absl::StatusOr<void*> Link::Opened(const SegmentOpener& device, int ordinal, absl::StatusOr<void*> base) {
  if (!device.properties().needs_one_user) return base;
  // After one successful open, the user id cannot be the cause of later failures.
  if (base.ok()) has_opened = true;
  if (base.ok() || has_opened || !users.has_value()) return base;
  if (!told_cannot_open.exchange(true)) {
    v1::SessionRequest message;
    message.mutable_cannot_open()->set_device(static_cast<uint32_t>(ordinal));
    message.mutable_cannot_open()->set_error(std::string(base.status().message()));
    stream->Send(std::move(message));
  }
  const uint32_t own = users->client_uid();
  const uint32_t daemons = users->daemon_uid();
  if (own == daemons) return base;
  return absl::Status(
      base.status().code(),
      absl::StrCat("this process of uid ", own, " cannot open memory of the daemon, which runs as uid ", daemons,
                   ": CUDA may share memory only between processes of one user; run vrambrokerd as uid ", own,
                   ", or a vrambrokerd of its own for each user; CUDA said: ", base.status().message()));
}

}  // namespace vrambroker::client_internal
