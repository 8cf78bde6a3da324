// SPDX-License-Identifier: Apache-2.0
//
// Http2Frames: finds the frames in one direction of an HTTP/2 connection (RFC 9113, section 4.1), in whatever pieces
// its bytes come. It reads frame headers only.
#ifndef VRAMBROKER_SERVER_RPC_HTTP2_FRAMES_H_
#define VRAMBROKER_SERVER_RPC_HTTP2_FRAMES_H_

#include <array>
#include <cstddef>
#include <cstdint>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace vrambroker {

// RFC 9113, section 6. There are others.
enum class Http2FrameType : uint8_t { kData = 0, kHeaders = 1, kRstStream = 3, kContinuation = 9 };

struct Http2Frame {
  static constexpr uint8_t kEndStream = 1;  // a flag of kData and kHeaders

  uint32_t bytes = 0;  // of its payload
  Http2FrameType type{};
  uint8_t flags = 0;
  uint32_t stream = 0;
};

// For one thread.
class Http2Frames {
 public:
  enum class From { kClient, kServer };

  explicit Http2Frames(From from) : preface_left_(from == From::kClient ? kPreface.size() : 0) {}

  // Calls `on_frame` for each frame whose header is complete with `bytes`, until it returns an error. InvalidArgument:
  // a client does not begin with HTTP/2's preface. After an error this object is of no use.
  absl::Status Read(absl::string_view bytes, absl::FunctionRef<absl::Status(const Http2Frame&)> on_frame);
  // The preface, if there is one, and a frame's header have come.
  bool greeted() const { return greeted_; }

 private:
  static constexpr absl::string_view kPreface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
  static constexpr size_t kHeaderBytes = 9;

  size_t preface_left_;
  bool greeted_ = false;
  std::array<uint8_t, kHeaderBytes> header_{};
  size_t header_bytes_ = 0;   // of the next frame's header, so far
  size_t payload_bytes_ = 0;  // of the last frame, still to come
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_RPC_HTTP2_FRAMES_H_
