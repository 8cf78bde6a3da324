// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/http2_frames.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace vrambroker {

std::string Http2Header(absl::string_view name, absl::string_view value) {
  constexpr char kNeverIndexed = 0x10;
  std::string header(1, kNeverIndexed);
  for (const absl::string_view text : {name, value}) {
    header.push_back(static_cast<char>(text.size()));
    absl::StrAppend(&header, text);
  }
  return header;
}

// Appends a separate frame, so that the form and length of the client's headers do not matter.
void Http2Frames::MakeRoom(const Http2Frame& frame) {
  if (added_.empty()) return;
  if (frame.type == Http2FrameType::kHeaders && frame.stream > last_stream_) {  // clients number streams upwards
    last_stream_ = frame.stream;
    begins_ = true;
  }
  const bool is_of_headers = frame.type == Http2FrameType::kHeaders || frame.type == Http2FrameType::kContinuation;
  if (!begins_ || !is_of_headers || (frame.flags & Http2Frame::kEndHeaders) == 0) return;
  begins_ = false;
  header_[kFlagsAt] = static_cast<uint8_t>(frame.flags & ~Http2Frame::kEndHeaders);
  const uint32_t size = static_cast<uint32_t>(added_.size());
  after_ = {static_cast<char>(size >> 16), static_cast<char>(size >> 8), static_cast<char>(size),
            static_cast<char>(Http2FrameType::kContinuation), static_cast<char>(Http2Frame::kEndHeaders)};
  for (size_t i = kFlagsAt + 1; i < kHeaderBytes; ++i) after_.push_back(static_cast<char>(header_[i]));
  absl::StrAppend(&after_, added_);
}

absl::Status Http2Frames::Read(absl::string_view bytes, std::string& passed,
                               absl::FunctionRef<absl::Status(const Http2Frame&)> on_frame) {
  if (preface_left_ > 0) {
    const absl::string_view begin = bytes.substr(0, preface_left_);
    if (kPreface.substr(kPreface.size() - preface_left_, begin.size()) != begin) {
      return absl::InvalidArgumentError("it does not speak HTTP/2");
    }
    preface_left_ -= begin.size();
    absl::StrAppend(&passed, begin);
    bytes.remove_prefix(begin.size());
  }
  while (true) {
    const absl::string_view payload = bytes.substr(0, payload_bytes_);
    payload_bytes_ -= payload.size();
    absl::StrAppend(&passed, payload);
    bytes.remove_prefix(payload.size());
    if (payload_bytes_ == 0) {
      absl::StrAppend(&passed, after_);
      after_.clear();
    }
    if (bytes.empty()) break;
    const size_t taken = std::min(kHeaderBytes - header_bytes_, bytes.size());
    std::memcpy(header_.data() + header_bytes_, bytes.data(), taken);
    header_bytes_ += taken;
    bytes.remove_prefix(taken);
    if (header_bytes_ < kHeaderBytes) break;
    header_bytes_ = 0;
    greeted_ = true;
    const Http2Frame frame = {.bytes = uint32_t{header_[0]} << 16 | uint32_t{header_[1]} << 8 | header_[2],
                              .type = static_cast<Http2FrameType>(header_[3]),
                              .flags = header_[kFlagsAt],
                              // The first bit is reserved.
                              .stream = uint32_t{header_[5] & 0x7fU} << 24 | uint32_t{header_[6]} << 16 |
                                        uint32_t{header_[7]} << 8 | header_[8]};
    payload_bytes_ = frame.bytes;
    if (absl::Status status = on_frame(frame); !status.ok()) return status;
    MakeRoom(frame);
    passed.append(header_.begin(), header_.end());
  }
  return absl::OkStatus();
}

}  // namespace vrambroker
