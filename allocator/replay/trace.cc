// SPDX-License-Identifier: Apache-2.0
#include "allocator/replay/trace.h"

#include <unistd.h>
#include <zlib.h>

#include <cerrno>
#include <cstring>
#include <limits>
#include <memory>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "allocator/heap/caching_allocator.h"
#include "allocator/heap/size_class.h"
#include "allocator/replay/pickle.h"
#include "allocator/replay/torch_trace.h"

namespace vrambroker {
namespace {

constexpr size_t kMaxFileBytes = size_t{1} << 30;  // a small gzip file may unpack to any size

// Reads one line at a time, and remembers the meaning of ids.
class TextParser {
 public:
  absl::Status Parse(absl::string_view line) {
    ++line_;
    line = line.substr(0, line.find('#'));
    words_ = absl::StrSplit(line, absl::ByAnyChar(" \t\r"), absl::SkipEmpty());
    if (words_.empty()) return absl::OkStatus();
    if (words_[0] == "seg" || words_[0] == "b") {
      if (!trace_.ops.empty()) return Error("the start of the heap comes before all operations");
      return words_[0] == "seg" ? StartSegment() : StartBlock();
    }
    TraceOp op;
    absl::Status status = Fill(op);
    if (status.ok() && trace_.ops.empty()) status = CheckStart();
    if (status.ok()) trace_.ops.push_back(op);
    return status;
  }

  absl::StatusOr<Trace> Take() {
    if (absl::Status status = trace_.ops.empty() ? CheckStart() : absl::OkStatus(); !status.ok()) return status;
    return std::move(trace_);
  }

 private:
  absl::Status StartSegment() {
    if (absl::Status status = Expect("seg BYTES STREAM small|large", 4, 4); !status.ok()) return status;
    SegmentSnapshot segment;
    absl::Status status = Number("BYTES", words_[1], kMaxRequestBytes - 1, &segment.bytes);
    if (status.ok()) status = Number("STREAM", words_[2], ~uint64_t{0}, &segment.stream);
    if (!status.ok()) return status;
    if (words_[3] != "small" && words_[3] != "large") {
      return Error(absl::StrCat("the pool is \"", Shown(words_[3]), "\"; accepted: small, large"));
    }
    segment.pool = words_[3] == "small" ? PoolKind::kSmall : PoolKind::kLarge;
    trace_.start.segments.push_back(std::move(segment));
    return absl::OkStatus();
  }

  absl::Status StartBlock() {
    if (absl::Status status = Expect("b BYTES [ID REQUESTED [STREAM]]", 2, 5); !status.ok()) return status;
    if (words_.size() == 3) return Expect("b BYTES ID REQUESTED", 4, 4);
    if (trace_.start.segments.empty()) return Error("a block before the first segment");
    SegmentSnapshot& segment = trace_.start.segments.back();
    BlockSnapshot block;
    if (!segment.blocks.empty()) block.offset = segment.blocks.back().offset + segment.blocks.back().bytes;
    absl::Status status = Number("BYTES", words_[1], segment.bytes - block.offset, &block.bytes);
    if (!status.ok()) return status;
    if (words_.size() > 2) {
      status = Number("REQUESTED", words_[3], block.bytes, &block.requested_bytes);
      if (!status.ok()) return status;
      TraceOp op;
      const uint32_t next = trace_.ids;
      status = Allocate(op, words_[2]);
      if (!status.ok()) return status;
      if (op.id != next) return Error(absl::StrCat("id \"", Shown(words_[2]), "\" names another block"));
      block.state = BlockState::kAllocated;
      if (words_.size() == 5) {
        status = Number("STREAM", words_[4], ~uint64_t{0}, &trace_.start.waits[op.id]);
        if (!status.ok()) return status;
        block.state = BlockState::kPendingFree;
      }
    }
    segment.blocks.push_back(block);
    return absl::OkStatus();
  }

  absl::Status CheckStart() const {
    const absl::Status status = CachingAllocator::CheckSegments(trace_.start.segments);
    return status.ok() ? status : Error(absl::StrCat("the start before it: ", status.message()));
  }

  absl::Status Fill(TraceOp& op) {
    const absl::string_view name = words_[0];
    if (name == "a") {
      op.kind = TraceOp::Kind::kAllocate;
      if (absl::Status status = Expect("a ID BYTES STREAM", 4, 4); !status.ok()) return status;
      if (absl::Status status = Number("BYTES", words_[2], kMaxRequestBytes - 1, &op.bytes); !status.ok())
        return status;
      if (absl::Status status = StreamNumber(words_[3], op); !status.ok()) return status;
      return Allocate(op, words_[1]);
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
    if (name == "e" || name == "p" || name == "t") {
      op.kind = name == "e"   ? TraceOp::Kind::kEmptyCache
                : name == "p" ? TraceOp::Kind::kResetPeaks
                              : TraceOp::Kind::kTrim;
      return Expect(name, 1, 1);
    }
    if (name == "g") {
      op.kind = TraceOp::Kind::kGiveBack;
      if (absl::Status status = Expect("g N BYTES", 3, 3); !status.ok()) return status;
      uint64_t number = 0;
      absl::Status status = Number("N", words_[1], std::numeric_limits<uint32_t>::max(), &number);
      if (status.ok()) status = Number("BYTES", words_[2], kMaxRequestBytes - 1, &op.bytes);
      op.id = static_cast<uint32_t>(number);
      return status;
    }
    if (name == "frac") {
      op.kind = TraceOp::Kind::kSetFraction;
      if (absl::Status status = Expect("frac X", 2, 2); !status.ok()) return status;
      if (absl::SimpleAtod(words_[1], &op.fraction) && op.fraction >= 0 && op.fraction <= 1) return absl::OkStatus();
      return Error(absl::StrCat("X is \"", Shown(words_[1]), "\"; accepted: 0 to 1"));
    }
    return Error(absl::StrCat("unknown operation \"", Shown(name),
                              "\"; known: a, f, r, s, e, p, t, g, frac, and seg, b for the start"));
  }

  absl::Status Allocate(TraceOp& op, absl::string_view id) {
    const auto [it, is_new] = ids_.try_emplace(std::string(id), trace_.ids);
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

  // For messages: short, and harmless to a terminal.
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

gzFile OpenStandardInput() {
  const int descriptor = dup(STDIN_FILENO);
  if (descriptor < 0) return nullptr;
  const gzFile file = gzdopen(descriptor, "rb");
  if (file == nullptr) close(descriptor);
  return file;
}

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

std::string FormatTrace(const Trace& trace) {
  std::string text;
  uint32_t id = 0;
  for (const SegmentSnapshot& segment : trace.start.segments) {
    absl::StrAppend(&text, "seg ", segment.bytes, " ", segment.stream,
                    segment.pool == PoolKind::kSmall ? " small\n" : " large\n");
    for (const BlockSnapshot& block : segment.blocks) {
      absl::StrAppend(&text, "b ", block.bytes);
      if (block.state != BlockState::kFree) absl::StrAppend(&text, " ", id, " ", block.requested_bytes);
      if (block.state == BlockState::kPendingFree) absl::StrAppend(&text, " ", trace.start.waits.at(id));
      id += block.state == BlockState::kFree ? 0 : 1;
      text += "\n";
    }
  }
  for (const TraceOp& op : trace.ops) {
    switch (op.kind) {
      case TraceOp::Kind::kAllocate:
        absl::StrAppend(&text, "a ", op.id, " ", op.bytes, " ", op.stream);
        break;
      case TraceOp::Kind::kFree:
        absl::StrAppend(&text, "f ", op.id);
        break;
      case TraceOp::Kind::kRecordStream:
        absl::StrAppend(&text, "r ", op.id, " ", op.stream);
        break;
      case TraceOp::Kind::kSyncAll:
        text += "s";
        break;
      case TraceOp::Kind::kSyncStream:
        absl::StrAppend(&text, "s ", op.stream);
        break;
      case TraceOp::Kind::kEmptyCache:
        text += "e";
        break;
      case TraceOp::Kind::kSetFraction:
        absl::StrAppendFormat(&text, "frac %.17g", op.fraction);
        break;
      case TraceOp::Kind::kResetPeaks:
        text += "p";
        break;
      case TraceOp::Kind::kTrim:
        text += "t";
        break;
      case TraceOp::Kind::kGiveBack:
        absl::StrAppend(&text, "g ", op.id, " ", op.bytes);
        break;
    }
    text += "\n";
  }
  return text;
}

std::string InputName(const std::string& path) {
  return path == "-" ? "standard input" : path;
}

absl::StatusOr<std::string> ReadMaybeGzipped(const std::string& path) {
  const auto close = [](gzFile file) { gzclose(file); };
  const std::string name = InputName(path);
  errno = 0;
  // zlib reads plain files as they are.
  const std::unique_ptr<gzFile_s, decltype(close)> file(path == "-" ? OpenStandardInput() : gzopen(path.c_str(), "rb"),
                                                        close);
  if (file == nullptr) {
    return absl::NotFoundError(absl::StrCat(name, ": cannot be opened: ", std::strerror(errno)));
  }
  std::string bytes;
  std::vector<char> buffer(size_t{1} << 18);
  for (;;) {
    const int got = gzread(file.get(), buffer.data(), static_cast<unsigned>(buffer.size()));
    if (got > 0) bytes.append(buffer.data(), static_cast<size_t>(got));
    if (bytes.size() > kMaxFileBytes)
      return absl::InvalidArgumentError(absl::StrCat(name, ": more than 1 GiB unpacked"));
    if (got > 0) continue;
    int code = Z_OK;
    const char* message = gzerror(file.get(), &code);
    if (code == Z_OK || code == Z_STREAM_END) return bytes;
    if (code == Z_ERRNO) message = std::strerror(errno);
    return absl::InvalidArgumentError(absl::StrCat(name, ": byte ", bytes.size(), " unpacked: ", message));
  }
}

absl::StatusOr<Trace> ReadTraceFile(const std::string& path, int device) {
  const absl::StatusOr<std::string> bytes = ReadMaybeGzipped(path);
  if (!bytes.ok()) return bytes.status();
  absl::StatusOr<Trace> trace;
  // Opcode at the beginning of every pickle since protocol 2, and of no text.
  if (!bytes->empty() && (*bytes)[0] == '\x80') {
    const absl::StatusOr<PickleValue> snapshot = ReadPickle(*bytes);
    trace = snapshot.ok() ? TraceFromTorchSnapshot(*snapshot, device) : snapshot.status();
  } else if (!bytes->empty() && ((*bytes)[0] == '{' || (*bytes)[0] == '[')) {
    trace = absl::InvalidArgumentError(
        "is JSON; a snapshot to replay is a pickle: vramctl writes one to names that do not end in .json");
  } else {
    trace = ParseTraceText(*bytes);
  }
  if (trace.ok()) return trace;
  return absl::Status(trace.status().code(), absl::StrCat(InputName(path), ": ", trace.status().message()));
}

}  // namespace vrambroker
