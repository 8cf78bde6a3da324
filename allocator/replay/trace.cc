// SPDX-License-Identifier: Apache-2.0
#include "allocator/replay/trace.h"

#include <zlib.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "allocator/replay/pickle.h"
#include "allocator/replay/torch_trace.h"
#include "allocator/size_class.h"

namespace vrambroker {
namespace {

constexpr size_t kMaxFileBytes = size_t{1} << 30;  // a small gzip file may unpack to anything

// Reads one line at a time, and remembers which ids name what.
class TextParser {
 public:
  absl::Status Parse(absl::string_view line) {
    ++line_;
    line = line.substr(0, line.find('#'));
    words_ = absl::StrSplit(line, absl::ByAnyChar(" \t\r"), absl::SkipEmpty());
    if (words_.empty()) return absl::OkStatus();
    TraceOp op;
    absl::Status status = Fill(op);
    if (status.ok()) trace_.ops.push_back(op);
    return status;
  }

  Trace Take() { return std::move(trace_); }

 private:
  absl::Status Fill(TraceOp& op) {
    const absl::string_view name = words_[0];
    if (name == "a") {
      op.kind = TraceOp::Kind::kAllocate;
      if (absl::Status status = Expect("a ID BYTES STREAM", 4, 4); !status.ok()) return status;
      if (absl::Status status = Number("BYTES", words_[2], kMaxRequestBytes - 1, &op.bytes); !status.ok())
        return status;
      if (absl::Status status = StreamNumber(words_[3], op); !status.ok()) return status;
      return Allocate(op);
    }
    if (name == "f") {
      op.kind = TraceOp::Kind::kFree;
      if (absl::Status status = Expect("f ID", 2, 2); !status.ok()) return status;
      return Use(op);
    }
    if (name == "r") {
      op.kind = TraceOp::Kind::kRecordStream;
      if (absl::Status status = Expect("r ID STREAM", 3, 3); !status.ok()) return status;
      if (absl::Status status = StreamNumber(words_[2], op); !status.ok()) return status;
      return Use(op);
    }
    if (name == "s") {
      if (absl::Status status = Expect("s [STREAM]", 1, 2); !status.ok()) return status;
      op.kind = words_.size() == 1 ? TraceOp::Kind::kSyncAll : TraceOp::Kind::kSyncStream;
      return words_.size() == 1 ? absl::OkStatus() : StreamNumber(words_[1], op);
    }
    if (name == "e" || name == "p") {
      op.kind = name == "e" ? TraceOp::Kind::kEmptyCache : TraceOp::Kind::kResetPeaks;
      return Expect(name, 1, 1);
    }
    if (name == "frac") {
      op.kind = TraceOp::Kind::kSetFraction;
      if (absl::Status status = Expect("frac X", 2, 2); !status.ok()) return status;
      if (absl::SimpleAtod(words_[1], &op.fraction) && op.fraction >= 0 && op.fraction <= 1) return absl::OkStatus();
      return Error(absl::StrCat("X is \"", Shown(words_[1]), "\"; accepted: 0 to 1"));
    }
    return Error(absl::StrCat("unknown operation \"", Shown(name), "\"; known: a, f, r, s, e, p, frac"));
  }

  absl::Status Allocate(TraceOp& op) {
    const auto [it, is_new] = ids_.try_emplace(std::string(words_[1]), trace_.ids);
    if (is_new) ++trace_.ids;
    op.id = it->second;
    return absl::OkStatus();
  }

  absl::Status Use(TraceOp& op) {
    const auto it = ids_.find(words_[1]);
    if (it == ids_.end()) return Error(absl::StrCat("id \"", Shown(words_[1]), "\" was never allocated"));
    op.id = it->second;
    return absl::OkStatus();
  }

  // For messages: short, and nothing that a terminal would obey.
  static std::string Shown(absl::string_view word) { return absl::Utf8SafeCHexEscape(word.substr(0, 40)); }

  absl::Status StreamNumber(absl::string_view word, TraceOp& op) {
    return Number("STREAM", word, ~uint64_t{0}, &op.stream);
  }

  absl::Status Number(absl::string_view what, absl::string_view word, uint64_t highest, uint64_t* value) {
    if (absl::SimpleAtoi(word, value) && *value <= highest) return absl::OkStatus();
    return Error(absl::StrCat(what, " is \"", Shown(word), "\"; accepted: whole numbers from 0 to ", highest));
  }

  absl::Status Expect(absl::string_view form, size_t least, size_t most) {
    if (words_.size() >= least && words_.size() <= most) return absl::OkStatus();
    return Error(absl::StrCat("has ", words_.size(), " words; expected: ", form));
  }

  absl::Status Error(absl::string_view what) const {
    return absl::InvalidArgumentError(absl::StrCat("line ", line_, ": ", what));
  }

  Trace trace_;
  size_t line_ = 0;
  std::vector<absl::string_view> words_;
  absl::flat_hash_map<std::string, uint32_t> ids_;
};

}  // namespace

uint64_t TraceStart::ReservedBytes() const {
  uint64_t bytes = 0;
  for (const SegmentSnapshot& segment : segments) bytes += segment.bytes;
  return bytes;
}

absl::StatusOr<Trace> ParseTraceText(absl::string_view text) {
  TextParser parser;
  for (const absl::string_view line : absl::StrSplit(text, '\n')) {
    if (absl::Status status = parser.Parse(line); !status.ok()) return status;
  }
  return parser.Take();
}

absl::StatusOr<std::string> ReadMaybeGzipped(const std::string& path) {
  const auto close = [](gzFile file) { gzclose(file); };
  errno = 0;
  // zlib reads plain files as they are.
  const std::unique_ptr<gzFile_s, decltype(close)> file(gzopen(path.c_str(), "rb"), close);
  if (file == nullptr) {
    return absl::NotFoundError(absl::StrCat(path, ": cannot be opened: ", std::strerror(errno)));
  }
  std::string bytes;
  std::vector<char> buffer(size_t{1} << 18);
  for (;;) {
    const int got = gzread(file.get(), buffer.data(), static_cast<unsigned>(buffer.size()));
    if (got > 0) bytes.append(buffer.data(), static_cast<size_t>(got));
    if (bytes.size() > kMaxFileBytes)
      return absl::InvalidArgumentError(absl::StrCat(path, ": more than 1 GiB unpacked"));
    if (got > 0) continue;
    int code = Z_OK;
    const char* message = gzerror(file.get(), &code);
    if (code == Z_OK || code == Z_STREAM_END) return bytes;
    if (code == Z_ERRNO) message = std::strerror(errno);
    return absl::InvalidArgumentError(absl::StrCat(path, ": byte ", bytes.size(), " unpacked: ", message));
  }
}

absl::StatusOr<Trace> ReadTraceFile(const std::string& path, int device) {
  const absl::StatusOr<std::string> bytes = ReadMaybeGzipped(path);
  if (!bytes.ok()) return bytes.status();
  absl::StatusOr<Trace> trace;
  // Every pickle since protocol 2 begins with this opcode, and no text does.
  if (!bytes->empty() && (*bytes)[0] == '\x80') {
    const absl::StatusOr<PickleValue> snapshot = ReadPickle(*bytes);
    trace = snapshot.ok() ? TraceFromTorchSnapshot(*snapshot, device) : snapshot.status();
  } else {
    trace = ParseTraceText(*bytes);
  }
  if (trace.ok()) return trace;
  return absl::Status(trace.status().code(), absl::StrCat(path, ": ", trace.status().message()));
}

}  // namespace vrambroker
