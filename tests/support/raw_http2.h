// SPDX-License-Identifier: Apache-2.0
#ifndef VRAMBROKER_TESTS_SUPPORT_RAW_HTTP2_H_
#define VRAMBROKER_TESTS_SUPPORT_RAW_HTTP2_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "allocator/base/unique_fd.h"

namespace vrambroker::testing_support {

// An HTTP/2 connection to the daemon that keeps no rule which gRPC's library would keep. For one thread.
class RawHttp2 {
 public:
  // Connected; says nothing yet.
  static absl::StatusOr<RawHttp2> Connect(const std::string& socket_dir);

  // HTTP/2's first bytes and empty settings. Acknowledges the daemon's settings before they come, or never.
  bool Greet(bool acknowledge);
  // Begins a call of `method`, in the messages' `encoding` if there is one. Each answer is false when the daemon has
  // closed the connection.
  bool Begin(absl::string_view method, absl::string_view encoding = "");
  // Ends the call that was begun last, as a client that gives up.
  bool Reset();
  // Asks for an answer, which comes when all that was sent before has been read.
  bool Ping();
  bool Ponged();
  // Sends a message of that call and no more: what follows gRPC's prefix.
  bool SendLast(absl::string_view message, bool compressed);

  // True when the daemon has closed the connection. Reads what there is.
  bool Closed();
  // What came so far, frames and all.
  const std::string& received() const { return received_; }

 private:
  explicit RawHttp2(UniqueFd fd) : fd_(std::move(fd)) {}
  bool Send(absl::string_view bytes);

  UniqueFd fd_;
  uint32_t stream_ = 0;  // the last one
  std::string received_;
};

// `size` bytes of nothing, as gzip.
std::string GzipOfZeros(uint64_t size);

}  // namespace vrambroker::testing_support

#endif  // VRAMBROKER_TESTS_SUPPORT_RAW_HTTP2_H_
