// SPDX-License-Identifier: Apache-2.0
#ifndef VRAMBROKER_CLIENT_VRAMCTL_TOP_DETAILS_READER_H_
#define VRAMBROKER_CLIENT_VRAMCTL_TOP_DETAILS_READER_H_

#include <optional>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "allocator/base/mutex.h"
#include "allocator/base/unique_fd.h"
#include "client/vramctl/daemon/daemon_calls.h"
#include "client/vramctl/views/top_details.h"

namespace vrambroker::vramctl {

// Polls the segments and the refusals of the session with open details, on a separate thread: an unresponsive client
// delays neither the screen nor the reading of all sessions.
class DetailsReader {
 public:
  DetailsReader(const Context& context, absl::Duration interval);
  ~DetailsReader();  // cancels the call in progress
  DetailsReader(const DetailsReader&) = delete;
  DetailsReader& operator=(const DetailsReader&) = delete;

  // Sets the details to read from now on, at once if changed; nullopt: none.
  void Want(const std::optional<DetailsRequest>& request) ABSL_LOCKS_EXCLUDED(mu_);

  // Readable when Take() has data.
  int fd() const { return ready_.get(); }
  std::optional<DetailsData> Take() ABSL_LOCKS_EXCLUDED(mu_);

 private:
  void Run() ABSL_LOCKS_EXCLUDED(mu_);
  std::optional<DetailsRequest> Next() ABSL_LOCKS_EXCLUDED(mu_);  // waits for a request; nullopt: stop
  DetailsData Read(const DetailsRequest& request);
  // Stores the run id of the answering daemon in `asked`.
  absl::StatusOr<std::vector<v1::OutOfMemoryEvent>> ReadRefusals(Daemon& daemon, DetailsRequest& asked);

  const Context context_;
  const absl::Duration interval_;
  const UniqueFd ready_;  // an eventfd
  CallCanceller canceller_;
  Mutex mu_;
  CondVar changed_;
  bool stops_ ABSL_GUARDED_BY(mu_) = false;
  bool is_new_ ABSL_GUARDED_BY(mu_) = false;  // the wanted details have not been read yet
  std::optional<DetailsRequest> wanted_ ABSL_GUARDED_BY(mu_);
  std::optional<DetailsData> unread_ ABSL_GUARDED_BY(mu_);
  std::thread thread_;
};

}  // namespace vrambroker::vramctl

#endif  // VRAMBROKER_CLIENT_VRAMCTL_TOP_DETAILS_READER_H_
