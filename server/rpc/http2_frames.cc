// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/http2_frames.h"

#include <algorithm>
#include <cstring>

namespace vrambroker {

absl::Status Http2Frames::Read(absl::string_view bytes, absl::FunctionRef<absl::Status(const Http2Frame&)> on_frame) {
  if (preface_left_ > 0) {
    const absl::string_view begin = bytes.substr(0, preface_left_);
    if (kPreface.substr(kPreface.size() - preface_left_, begin.size()) != begin) {
      return absl::InvalidArgumentError("it does not speak HTTP/2");
    }
    preface_left_ -= begin.size();
    bytes.remove_prefix(begin.size());
  }
  while (!bytes.empty()) {
    const size_t skipped = std::min(payload_bytes_, bytes.size());
    payload_bytes_ -= skipped;
    bytes.remove_prefix(skipped);
    const size_t taken = std::min(kHeaderBytes - header_bytes_, bytes.size());
    std::memcpy(header_.data() + header_bytes_, bytes.data(), taken);
    header_bytes_ += taken;
    bytes.remove_prefix(taken);
    if (header_bytes_ < kHeaderBytes) break;
    header_bytes_ = 0;
    greeted_ = true;
    const Http2Frame frame = {.bytes = uint32_t{header_[0]} << 16 | uint32_t{header_[1]} << 8 | header_[2],
                              .type = static_cast<Http2FrameType>(header_[3]),
                              .flags = header_[4],
                              // The first bit is reserved.
                              .stream = uint32_t{header_[5] & 0x7fU} << 24 | uint32_t{header_[6]} << 16 |
                                        uint32_t{header_[7]} << 8 | header_[8]};
    payload_bytes_ = frame.bytes;
    if (absl::Status status = on_frame(frame); !status.ok()) return status;
  }
  return absl::OkStatus();
}

}  // namespace vrambroker
