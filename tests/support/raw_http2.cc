// SPDX-License-Identifier: Apache-2.0
#include "tests/support/raw_http2.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <zlib.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/support/http2_frame.h"

namespace vrambroker::testing_support {
namespace {

enum FrameType : uint8_t { kData = 0, kHeaders = 1, kRstStream = 3, kSettings = 4, kPing = 6 };
constexpr uint8_t kAck = 1;
constexpr absl::string_view kPingPayload = "12345678";
constexpr uint8_t kEndStream = 1;
constexpr uint8_t kEndHeaders = 4;

// Encodes a string of HPACK, shorter than 127 bytes.
std::string Text(absl::string_view text) {
  return absl::StrCat(BigEndian(static_cast<uint32_t>(text.size()), 1), text);
}

// Encodes a header that the static table does not have.
std::string Header(absl::string_view name, absl::string_view value) {
  return absl::StrCat(BigEndian(0, 1), Text(name), Text(value));
}

}  // namespace

absl::StatusOr<RawHttp2> RawHttp2::Connect(const std::string& socket_dir) {
  sockaddr_un address = {.sun_family = AF_UNIX};
  const std::string path = socket_dir + "/vrambroker.sock";
  std::memcpy(address.sun_path, path.data(), std::min(path.size(), sizeof address.sun_path - 1));
  UniqueFd fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!fd.valid() || connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
    return absl::ErrnoToStatus(errno, "cannot connect");
  }
  return RawHttp2(std::move(fd));
}

bool RawHttp2::Greet(bool acknowledge) {
  return Send(absl::StrCat(kHttp2Preface, Http2FrameText(kSettings, 0, 0),
                           acknowledge ? Http2FrameText(kSettings, kAck, 0) : ""));
}

bool RawHttp2::Begin(absl::string_view method, absl::string_view encoding) {
  stream_ = stream_ == 0 ? 1 : stream_ + 2;
  // :method POST and :scheme http are entries of the static table.
  std::string headers = absl::StrCat("\x83\x86", Header(":path", method), Header(":authority", "localhost"),
                                     Header("te", "trailers"), Header("content-type", "application/grpc"));
  if (!encoding.empty()) absl::StrAppend(&headers, Header("grpc-encoding", encoding));
  return Send(Http2FrameText(kHeaders, kEndHeaders, stream_, headers));
}

bool RawHttp2::Reset() {
  return Send(Http2FrameText(kRstStream, 0, stream_, BigEndian(8, 4)));
}

bool RawHttp2::Ping() {
  return Send(Http2FrameText(kPing, 0, 0, kPingPayload));
}

bool RawHttp2::Ponged() {
  (void)Closed();  // reads the available data
  return absl::StrContains(received_, Http2FrameText(kPing, kAck, 0, kPingPayload));
}

bool RawHttp2::SendLast(absl::string_view message, bool compressed) {
  const std::string data =
      absl::StrCat(BigEndian(compressed ? 1 : 0, 1), BigEndian(static_cast<uint32_t>(message.size()), 4), message);
  constexpr size_t kMost = 16 << 10;  // is the limit of a frame
  for (size_t sent = 0; sent < data.size(); sent += kMost) {
    const bool last = sent + kMost >= data.size();
    if (!Send(Http2FrameText(kData, last ? kEndStream : 0, stream_, absl::string_view(data).substr(sent, kMost))))
      return false;
  }
  return true;
}

bool RawHttp2::Closed() {
  while (true) {
    std::array<char, 4096> bytes;
    const ssize_t size = recv(fd_.get(), bytes.data(), bytes.size(), MSG_DONTWAIT);
    if (size < 0 && errno == EINTR) continue;
    if (size <= 0) return size == 0 || errno != EAGAIN;
    received_.append(bytes.data(), static_cast<size_t>(size));
  }
}

bool RawHttp2::Send(absl::string_view bytes) {
  while (!bytes.empty()) {
    // The daemon must never wait for the test to read.
    if (Closed()) return false;
    const ssize_t size = send(fd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (size > 0) {
      bytes.remove_prefix(static_cast<size_t>(size));
    } else if (errno == EAGAIN) {
      pollfd ready = {.fd = fd_.get(), .events = POLLIN | POLLOUT, .revents = 0};
      poll(&ready, 1, -1);
    } else if (errno != EINTR) {
      return false;
    }
  }
  return true;
}

std::string GzipOfZeros(uint64_t size) {
  z_stream stream = {};
  constexpr int kGzip = 15 + 16;
  deflateInit2(&stream, Z_BEST_COMPRESSION, Z_DEFLATED, kGzip, 9, Z_DEFAULT_STRATEGY);
  std::vector<unsigned char> zeros(1 << 20);
  std::string compressed;
  while (size > 0 || stream.avail_in > 0) {
    if (stream.avail_in == 0) {
      stream.next_in = zeros.data();
      stream.avail_in = static_cast<uInt>(std::min<uint64_t>(size, zeros.size()));
      size -= stream.avail_in;
    }
    std::array<unsigned char, 4096> out;
    int result = Z_OK;
    do {
      stream.next_out = out.data();
      stream.avail_out = out.size();
      result = deflate(&stream, size == 0 ? Z_FINISH : Z_NO_FLUSH);
      compressed.append(reinterpret_cast<const char*>(out.data()), out.size() - stream.avail_out);
    } while (stream.avail_out == 0 && result != Z_STREAM_END);
  }
  deflateEnd(&stream);
  return compressed;
}

}  // namespace vrambroker::testing_support
