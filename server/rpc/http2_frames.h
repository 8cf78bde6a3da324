// SPDX-License-Identifier: Apache-2.0
//
// Http2Frames: finds the frames in a direction of an HTTP/2 connection (RFC 9113, section 4.1), from bytes in pieces of
// any size, and adds a header to each call's headers. Reads frame headers only.
#ifndef VRAMBROKER_SERVER_RPC_HTTP2_FRAMES_H_
#define VRAMBROKER_SERVER_RPC_HTTP2_FRAMES_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace vrambroker {

// Frame types used here, from RFC 9113, section 6.
enum class Http2FrameType : uint8_t { kData = 0, kHeaders = 1, kRstStream = 3, kContinuation = 9 };

struct Http2Frame {
  static constexpr uint8_t kEndStream = 1;   // a flag of kData and kHeaders
  static constexpr uint8_t kEndHeaders = 4;  // a flag of kHeaders and kContinuation

  uint32_t bytes = 0;  // of the frame's payload
  Http2FrameType type{};
  uint8_t flags = 0;
  uint32_t stream = 0;
};

// Returns a header as bytes of a frame (RFC 7541, section 6.2.3), never stored in either side's table. REQUIRES: `name`
// is in lower case; name and value are shorter than 127 bytes.
std::string Http2Header(absl::string_view name, absl::string_view value);

// For use on a single thread.
class Http2Frames {
 public:
  enum class From { kClient, kServer };

  // `added`: an Http2Header() appended to the headers that begin each stream; empty: none.
  explicit Http2Frames(From from, std::string added = "")
      : added_(std::move(added)), preface_left_(from == From::kClient ? kPreface.size() : 0) {}

  // Calls `on_frame` for each frame whose header `bytes` completes, until `on_frame` returns an error. Appends to
  // `passed` the bytes to pass on: a frame's header once complete, and the rest on arrival. InvalidArgument: a client
  // does not begin with HTTP/2's preface. After an error the object is unusable.
  absl::Status Read(absl::string_view bytes, std::string& passed,
                    absl::FunctionRef<absl::Status(const Http2Frame&)> on_frame);
  // The preface, if expected, and a frame's header have arrived.
  bool greeted() const { return greeted_; }

 private:
  static constexpr absl::string_view kPreface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
  static constexpr size_t kHeaderBytes = 9;
  static constexpr size_t kFlagsAt = 4;

  // Makes the frame whose header is in header_ the last but one of its headers, if `added_` is to follow.
  void MakeRoom(const Http2Frame& frame);

  const std::string added_;
  size_t preface_left_;
  bool greeted_ = false;
  std::array<uint8_t, kHeaderBytes> header_{};
  size_t header_bytes_ = 0;   // of the next frame's header, so far
  size_t payload_bytes_ = 0;  // of the last frame, still to come
  uint32_t last_stream_ = 0;  // last stream begun
  bool begins_ = false;       // the last stream's headers are incomplete
  std::string after_;         // bytes to send after the last frame
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_RPC_HTTP2_FRAMES_H_
