// SPDX-License-Identifier: Apache-2.0
#ifndef VRAMBROKER_TESTS_SUPPORT_HTTP2_FRAME_H_
#define VRAMBROKER_TESTS_SUPPORT_HTTP2_FRAME_H_

#include <cstdint>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace vrambroker::testing_support {

// A client sends this text first (RFC 9113, section 3.4).
inline constexpr absl::string_view kHttp2Preface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

inline std::string BigEndian(uint32_t number, int bytes) {
  std::string text;
  for (int i = bytes - 1; i >= 0; --i) text.push_back(static_cast<char>(number >> (8 * i)));
  return text;
}

inline std::string Http2FrameText(uint8_t type, uint8_t flags, uint32_t stream, absl::string_view payload = "") {
  return absl::StrCat(BigEndian(static_cast<uint32_t>(payload.size()), 3), BigEndian(type, 1), BigEndian(flags, 1),
                      BigEndian(stream, 4), payload);
}

}  // namespace vrambroker::testing_support

#endif  // VRAMBROKER_TESTS_SUPPORT_HTTP2_FRAME_H_
