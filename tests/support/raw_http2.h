// SPDX-License-Identifier: Apache-2.0
#ifndef VRAMBROKER_TESTS_SUPPORT_RAW_HTTP2_H_
#define VRAMBROKER_TESTS_SUPPORT_RAW_HTTP2_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "allocator/base/unique_fd.h"

namespace vrambroker::testing_support {

// An HTTP/2 connection to the daemon that may break every rule that gRPC's library keeps. The class is for one thread.
class RawHttp2 {
 public:
  // Connects, and sends no data yet.
  static absl::StatusOr<RawHttp2> Connect(const std::string& socket_dir);

  // Sends HTTP/2's first bytes and empty settings. The acknowledgement of the daemon's settings goes out before the
  // settings come, or never.
  bool Greet(bool acknowledge);
  // Begins a call of `method`, with messages in `encoding` if the text is not empty. Begin() and the other functions
  // that send return false when the daemon has closed the connection.
  bool Begin(absl::string_view method, absl::string_view encoding = "");
  // Ends the call that was begun last, like a client that gives up.
  bool Reset();
  // Asks for an answer, which comes when the daemon has read all earlier data.
  bool Ping();
  bool Ponged();
  // Sends the last message of the call. `message` follows gRPC's prefix.
  bool SendLast(absl::string_view message, bool compressed);

  // Reads the available data. Returns true when the daemon has closed the connection.
  bool Closed();
  // Returns the data received so far, frames included.
  const std::string& received() const { return received_; }

 private:
  explicit RawHttp2(UniqueFd fd) : fd_(std::move(fd)) {}
  bool Send(absl::string_view bytes);

  UniqueFd fd_;
  uint32_t stream_ = 0;  // the last stream
  std::string received_;
};

// Compresses `size` zero bytes with gzip.
std::string GzipOfZeros(uint64_t size);

}  // namespace vrambroker::testing_support

#endif  // VRAMBROKER_TESTS_SUPPORT_RAW_HTTP2_H_
