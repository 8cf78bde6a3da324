// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <bit>
#include <deque>
#include <limits>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "allocator/replay/pickle.h"
#include "allocator/replay/pickle_opcodes.h"

namespace vrambroker {

using namespace pickle_opcodes;

namespace {

// Deepest nesting written by Python with the usual recursion limit. Bounds every recursion over a value read, even
// destruction.
constexpr uint32_t kMaxDepth = 1000;

// Limits for the values built by a pickle, in units of about 32 bytes: a value on the stack, an entry of the memo and a
// mark are one, a string or a container kUnitsOfNode more. A unit per byte of the pickle is plenty, since almost every
// value takes more bytes (a snapshot of PyTorch builds a third as many). kFreeUnits is for small pickles, possibly
// denser. kMostUnits is for packed files, and admits more than ten million entries of a snapshot, or a million with
// long stacks.
constexpr uint64_t kFreeUnits = uint64_t{1} << 20;
constexpr uint64_t kMostUnits = uint64_t{1} << 28;
constexpr uint64_t kUnitsOfNode = 2;

constexpr const char* kNoObjects = "only plain data is read, no objects";
constexpr const char* kNoText = "the text form of protocol 0 is not read; write with protocol 2 or higher";
constexpr const char* kNoSets = "sets are not read";
constexpr const char* kNoBuffers = "buffers outside the pickle are not read";
constexpr const char* kNoStack = "only plain data is read, nothing that contains itself";

struct OpcodeInfo {
  const char* name;               // nullptr: no such opcode
  const char* refusal = nullptr;  // why the opcode is not read
};

OpcodeInfo Describe(uint8_t opcode) {
  switch (opcode) {
    case kMark:
      return {"MARK"};
    case kStop:
      return {"STOP"};
    case kNone:
      return {"NONE"};
    case kNewTrue:
      return {"NEWTRUE"};
    case kNewFalse:
      return {"NEWFALSE"};
    case kBinInt:
      return {"BININT"};
    case kBinInt1:
      return {"BININT1"};
    case kBinInt2:
      return {"BININT2"};
    case kLong1:
      return {"LONG1"};
    case kLong4:
      return {"LONG4"};
    case kBinFloat:
      return {"BINFLOAT"};
    case kShortBinUnicode:
      return {"SHORT_BINUNICODE"};
    case kBinUnicode:
      return {"BINUNICODE"};
    case kBinUnicode8:
      return {"BINUNICODE8"};
    case kShortBinString:
      return {"SHORT_BINSTRING"};
    case kBinString:
      return {"BINSTRING"};
    case kShortBinBytes:
      return {"SHORT_BINBYTES"};
    case kBinBytes:
      return {"BINBYTES"};
    case kBinBytes8:
      return {"BINBYTES8"};
    case kByteArray8:
      return {"BYTEARRAY8"};
    case kEmptyList:
      return {"EMPTY_LIST"};
    case kAppend:
      return {"APPEND"};
    case kAppends:
      return {"APPENDS"};
    case kList:
      return {"LIST"};
    case kEmptyTuple:
      return {"EMPTY_TUPLE"};
    case kTuple:
      return {"TUPLE"};
    case kTuple1:
      return {"TUPLE1"};
    case kTuple2:
      return {"TUPLE2"};
    case kTuple3:
      return {"TUPLE3"};
    case kEmptyDict:
      return {"EMPTY_DICT"};
    case kSetItem:
      return {"SETITEM"};
    case kSetItems:
      return {"SETITEMS"};
    case kDict:
      return {"DICT"};
    case kBinGet:
      return {"BINGET"};
    case kLongBinGet:
      return {"LONG_BINGET"};
    case kBinPut:
      return {"BINPUT"};
    case kLongBinPut:
      return {"LONG_BINPUT"};
    case kMemoize:
      return {"MEMOIZE"};
    case kProto:
      return {"PROTO"};
    case kFrame:
      return {"FRAME"};

    case 'c':
      return {"GLOBAL", kNoObjects};
    case 0x93:
      return {"STACK_GLOBAL", kNoObjects};
    case 'R':
      return {"REDUCE", kNoObjects};
    case 'b':
      return {"BUILD", kNoObjects};
    case 'i':
      return {"INST", kNoObjects};
    case 'o':
      return {"OBJ", kNoObjects};
    case 0x81:
      return {"NEWOBJ", kNoObjects};
    case 0x92:
      return {"NEWOBJ_EX", kNoObjects};
    case 0x82:
      return {"EXT1", kNoObjects};
    case 0x83:
      return {"EXT2", kNoObjects};
    case 0x84:
      return {"EXT4", kNoObjects};
    case 'P':
      return {"PERSID", kNoObjects};
    case 'Q':
      return {"BINPERSID", kNoObjects};

    case 'I':
      return {"INT", kNoText};
    case 'L':
      return {"LONG", kNoText};
    case 'F':
      return {"FLOAT", kNoText};
    case 'S':
      return {"STRING", kNoText};
    case 'V':
      return {"UNICODE", kNoText};
    case 'g':
      return {"GET", kNoText};
    case 'p':
      return {"PUT", kNoText};

    case 0x8f:
      return {"EMPTY_SET", kNoSets};
    case 0x90:
      return {"ADDITEMS", kNoSets};
    case 0x91:
      return {"FROZENSET", kNoSets};

    case 0x97:
      return {"NEXT_BUFFER", kNoBuffers};
    case 0x98:
      return {"READONLY_BUFFER", kNoBuffers};

    // Python writes these opcodes only for tuples containing themselves.
    case '0':
      return {"POP", kNoStack};
    case '1':
      return {"POP_MARK", kNoStack};
    case '2':
      return {"DUP", kNoStack};
    default:
      return {nullptr};
  }
}

uint64_t LittleEndian(absl::string_view bytes) {
  uint64_t value = 0;
  for (size_t i = bytes.size(); i-- > 0;) value = value << 8 | static_cast<uint8_t>(bytes[i]);
  return value;
}

}  // namespace

// PickleReader: the stack machine of a pickle, with marks in the stack, and a memo of values for reuse.
//
// A list or dict may be filled only until it becomes part of another value ("placed"). Python always finishes a value
// before placing it, except when the value contains itself; so the rule refuses exactly values containing themselves. A
// placed value is therefore final, without cycles and of known depth.
class PickleReader {
 public:
  explicit PickleReader(absl::string_view bytes) : bytes_(bytes) {}
  absl::StatusOr<PickleValue> Read();

 private:
  using Kind = PickleValue::Kind;

  static constexpr size_t kNoContainer = std::numeric_limits<size_t>::max();

  struct Container {
    uint32_t depth = 1;  // 1: contains no container
    bool placed = false;
  };
  struct Slot {
    PickleValue value;
    size_t container = kNoContainer;  // index in containers_, of lists, tuples and dicts
  };

  absl::Status Step();
  absl::Status Error(absl::string_view what) const;
  absl::Status TooFew() const { return Error("there are not enough values before it"); }

  // Takes the next `size` bytes.
  absl::Status Take(uint64_t size, absl::string_view* taken);
  absl::Status TakeNumber(uint64_t size, uint64_t* number);
  absl::Status PushText(uint64_t length_size);
  absl::Status PushLong(uint64_t length_size);

  // Counts the values above the last mark.
  size_t Available() const { return stack_.size() - (marks_.empty() ? 0 : marks_.back()); }
  void PushSlot(Slot slot) {
    stack_.push_back(std::move(slot));
    ++units_;
  }
  void Push(PickleValue value) { PushSlot({std::move(value), kNoContainer}); }
  void PushContainer(PickleValue value, uint32_t depth) {
    PushSlot({std::move(value), containers_.size()});
    containers_.push_back({depth, false});
    units_ += kUnitsOfNode;
  }
  // Removes the last mark. `first`: index of the first value above the mark.
  absl::Status TakeMark(size_t* first);

  // Replaces stack_[first...] by a new list, tuple or dict of the values there.
  absl::Status Build(Kind kind, size_t first);
  // Adds stack_[first...] to the list or dict below.
  absl::Status Fill(Kind kind, size_t first);
  // Moves stack_[first...] into `items` or `pairs` of `container`.
  absl::Status Place(size_t first, size_t container, uint32_t* depth, PickleValue::Items* items,
                     PickleValue::Pairs* pairs);

  absl::Status Put(uint64_t index);
  absl::Status Get(uint64_t index);

  const absl::string_view bytes_;
  const uint64_t most_units_ = std::min(kFreeUnits + bytes_.size(), kMostUnits);
  uint64_t units_ = 0;  // built so far, even if gone again
  size_t next_ = 0;     // next byte to read
  size_t at_ = 0;       // place of the current opcode
  uint8_t opcode_ = 0;  // current opcode
  // Deques do not hold twice their contents while growing.
  std::deque<Slot> stack_;
  std::vector<size_t> marks_;
  std::deque<Container> containers_;
  std::deque<Slot> memo_;                         // entries 0, 1, ... numbered as in Python
  absl::flat_hash_map<uint64_t, Slot> far_memo_;  // entries after a gap: an index may be anything
};

absl::Status PickleReader::Error(absl::string_view what) const {
  return absl::InvalidArgumentError(
      absl::StrFormat("byte %d: %s (0x%02x): %s", at_, Describe(opcode_).name, opcode_, what));
}

absl::Status PickleReader::Take(uint64_t size, absl::string_view* taken) {
  const size_t left = bytes_.size() - next_;
  if (size > left) {
    return Error(absl::StrCat("needs ", size, " more bytes, ", left, " are left"));
  }
  *taken = bytes_.substr(next_, size);
  next_ += size;
  return absl::OkStatus();
}

absl::Status PickleReader::TakeNumber(uint64_t size, uint64_t* number) {
  absl::string_view taken;
  if (absl::Status status = Take(size, &taken); !status.ok()) return status;
  *number = LittleEndian(taken);
  return absl::OkStatus();
}

absl::Status PickleReader::PushText(uint64_t length_size) {
  uint64_t length = 0;
  absl::string_view text;
  if (absl::Status status = TakeNumber(length_size, &length); !status.ok()) return status;
  if (absl::Status status = Take(length, &text); !status.ok()) return status;
  Push(PickleValue::String(text));
  units_ += kUnitsOfNode;
  return absl::OkStatus();
}

absl::Status PickleReader::PushLong(uint64_t length_size) {
  uint64_t length = 0;
  absl::string_view digits;
  if (absl::Status status = TakeNumber(length_size, &length); !status.ok()) return status;
  if (absl::Status status = Take(length, &digits); !status.ok()) return status;
  // Two's complement, least byte first, of any length: bytes above the lowest 8 may only repeat the sign.
  const bool negative = !digits.empty() && static_cast<uint8_t>(digits.back()) >= 0x80;
  const absl::string_view low = digits.substr(0, std::min<size_t>(digits.size(), 8));
  uint64_t value = LittleEndian(low);
  if (negative && low.size() < 8) value |= ~uint64_t{0} << (8 * low.size());
  const absl::string_view high = digits.substr(low.size());
  const bool fits = std::all_of(high.begin(), high.end(), [&](char c) { return c == (negative ? '\xff' : '\0'); }) &&
                    (!negative || value >> 63 != 0);
  if (!fits) return Error("the integer does not fit in 64 bits");
  Push(negative ? PickleValue::Int(static_cast<int64_t>(value)) : PickleValue::Uint(value));
  return absl::OkStatus();
}

absl::Status PickleReader::TakeMark(size_t* first) {
  if (marks_.empty()) return Error("there is no mark before it");
  *first = marks_.back();
  marks_.pop_back();
  return absl::OkStatus();
}

absl::Status PickleReader::Place(size_t first, size_t container, uint32_t* depth, PickleValue::Items* items,
                                 PickleValue::Pairs* pairs) {
  for (size_t i = first; i < stack_.size(); ++i) {
    if (stack_[i].container == kNoContainer) continue;
    if (stack_[i].container == container) return Error("the value would contain itself");
    Container& inner = containers_[stack_[i].container];
    inner.placed = true;
    *depth = std::max(*depth, inner.depth + 1);
  }
  if (*depth > kMaxDepth) return Error(absl::StrCat("nested more than ", kMaxDepth, " deep"));
  if (items != nullptr) {
    if (items->empty()) items->reserve(stack_.size() - first);  // most lists are filled once
    for (size_t i = first; i < stack_.size(); ++i) items->push_back(std::move(stack_[i].value));
  } else {
    if ((stack_.size() - first) % 2 != 0) return Error("a key has no value");
    if (pairs->empty()) pairs->reserve((stack_.size() - first) / 2);
    for (size_t i = first; i < stack_.size(); i += 2) {
      const Kind key = stack_[i].value.kind();
      if (key == Kind::kList || key == Kind::kDict) {
        return Error(absl::StrCat(PickleKindName(key), " cannot be a key"));
      }
      pairs->emplace_back(std::move(stack_[i].value), std::move(stack_[i + 1].value));
    }
  }
  stack_.resize(first);
  return absl::OkStatus();
}

absl::Status PickleReader::Build(Kind kind, size_t first) {
  uint32_t depth = 1;
  if (kind == Kind::kDict) {
    PickleValue::Pairs pairs;
    if (absl::Status status = Place(first, kNoContainer, &depth, nullptr, &pairs); !status.ok()) return status;
    PushContainer(PickleValue::Dict(std::move(pairs)), depth);
    return absl::OkStatus();
  }
  PickleValue::Items items;
  if (absl::Status status = Place(first, kNoContainer, &depth, &items, nullptr); !status.ok()) return status;
  PushContainer(kind == Kind::kList ? PickleValue::List(std::move(items)) : PickleValue::Tuple(std::move(items)),
                depth);
  return absl::OkStatus();
}

absl::Status PickleReader::Fill(Kind kind, size_t first) {
  const size_t below = marks_.empty() ? 0 : marks_.back();
  if (first <= below) return TooFew();
  const Slot& slot = stack_[first - 1];
  if (slot.value.kind() != kind) {
    return Error(absl::StrCat("adds to ", PickleKindName(slot.value.kind()), ", not to ", PickleKindName(kind)));
  }
  const size_t container = slot.container;
  if (containers_[container].placed) {
    return Error("changes a value that is part of another one already; values that contain themselves are not read");
  }
  uint32_t depth = containers_[container].depth;
  PickleValue::Items* items = kind == Kind::kList ? slot.value.Get<Kind::kList>().get() : nullptr;
  PickleValue::Pairs* pairs = kind == Kind::kDict ? slot.value.Get<Kind::kDict>().get() : nullptr;
  if (absl::Status status = Place(first, container, &depth, items, pairs); !status.ok()) return status;
  containers_[container].depth = depth;
  return absl::OkStatus();
}

absl::Status PickleReader::Put(uint64_t index) {
  if (Available() < 1) return TooFew();
  ++units_;
  if (index < memo_.size()) {
    memo_[index] = stack_.back();
  } else if (index == memo_.size()) {
    memo_.push_back(stack_.back());
    if (!far_memo_.empty()) far_memo_.erase(index);
  } else {
    far_memo_[index] = stack_.back();
  }
  return absl::OkStatus();
}

absl::Status PickleReader::Get(uint64_t index) {
  if (index < memo_.size()) {
    PushSlot(memo_[index]);
    return absl::OkStatus();
  }
  const auto found = far_memo_.find(index);
  if (found == far_memo_.end()) return Error(absl::StrCat("memo entry ", index, " was never set"));
  PushSlot(found->second);
  return absl::OkStatus();
}

absl::Status PickleReader::Step() {
  uint64_t number = 0;
  absl::string_view taken;
  size_t first = 0;
  switch (opcode_) {
    case kProto:
      if (absl::Status status = TakeNumber(1, &number); !status.ok()) return status;
      if (number > 5) return Error(absl::StrCat("protocol ", number, "; 0 to 5 are read"));
      return absl::OkStatus();
    case kFrame:
      // A hint for readers fetching in pieces. The length is still checked.
      if (absl::Status status = TakeNumber(8, &number); !status.ok()) return status;
      if (number > bytes_.size() - next_) {
        return Error(absl::StrCat("says ", number, " bytes follow, ", bytes_.size() - next_, " are left"));
      }
      return absl::OkStatus();

    case kNone:
      Push(PickleValue());
      return absl::OkStatus();
    case kNewTrue:
      Push(PickleValue::Bool(true));
      return absl::OkStatus();
    case kNewFalse:
      Push(PickleValue::Bool(false));
      return absl::OkStatus();
    case kBinInt:
      if (absl::Status status = TakeNumber(4, &number); !status.ok()) return status;
      Push(PickleValue::Int(static_cast<int32_t>(static_cast<uint32_t>(number))));
      return absl::OkStatus();
    case kBinInt1:
    case kBinInt2:
      if (absl::Status status = TakeNumber(opcode_ == kBinInt1 ? 1 : 2, &number); !status.ok()) return status;
      Push(PickleValue::Uint(number));
      return absl::OkStatus();
    case kLong1:
      return PushLong(1);
    case kLong4:
      return PushLong(4);
    case kBinFloat: {
      if (absl::Status status = Take(8, &taken); !status.ok()) return status;
      const std::string reversed(taken.rbegin(), taken.rend());
      const uint64_t bits = LittleEndian(reversed);
      Push(PickleValue::Double(std::bit_cast<double>(bits)));
      return absl::OkStatus();
    }

    case kShortBinUnicode:
    case kShortBinString:
    case kShortBinBytes:
      return PushText(1);
    case kBinUnicode:
    case kBinString:
    case kBinBytes:
      return PushText(4);
    case kBinUnicode8:
    case kBinBytes8:
    case kByteArray8:
      return PushText(8);

    case kMark:
      marks_.push_back(stack_.size());
      ++units_;
      return absl::OkStatus();
    case kEmptyList:
      return Build(Kind::kList, stack_.size());
    case kEmptyTuple:
      return Build(Kind::kTuple, stack_.size());
    case kEmptyDict:
      return Build(Kind::kDict, stack_.size());
    case kList:
    case kTuple:
    case kDict:
      if (absl::Status status = TakeMark(&first); !status.ok()) return status;
      return Build(opcode_ == kList ? Kind::kList : opcode_ == kTuple ? Kind::kTuple : Kind::kDict, first);
    case kTuple1:
    case kTuple2:
    case kTuple3: {
      const size_t size = opcode_ == kTuple1 ? 1 : opcode_ == kTuple2 ? 2 : 3;
      if (Available() < size) return TooFew();
      return Build(Kind::kTuple, stack_.size() - size);
    }
    case kAppend:
      if (Available() < 2) return TooFew();
      return Fill(Kind::kList, stack_.size() - 1);
    case kSetItem:
      if (Available() < 3) return TooFew();
      return Fill(Kind::kDict, stack_.size() - 2);
    case kAppends:
    case kSetItems:
      if (absl::Status status = TakeMark(&first); !status.ok()) return status;
      return Fill(opcode_ == kAppends ? Kind::kList : Kind::kDict, first);

    case kMemoize:
      return Put(memo_.size() + far_memo_.size());
    case kBinPut:
    case kLongBinPut:
      if (absl::Status status = TakeNumber(opcode_ == kBinPut ? 1 : 4, &number); !status.ok()) return status;
      return Put(number);
    case kBinGet:
    case kLongBinGet:
      if (absl::Status status = TakeNumber(opcode_ == kBinGet ? 1 : 4, &number); !status.ok()) return status;
      return Get(number);

    default: {
      const OpcodeInfo info = Describe(opcode_);
      if (info.name == nullptr) {
        return absl::InvalidArgumentError(absl::StrFormat("byte %d: 0x%02x is not a pickle opcode", at_, opcode_));
      }
      return Error(info.refusal);
    }
  }
}

absl::StatusOr<PickleValue> PickleReader::Read() {
  while (true) {
    at_ = next_;
    if (next_ == bytes_.size()) {
      return absl::InvalidArgumentError(absl::StrCat("byte ", at_, ": the pickle ends before its STOP"));
    }
    opcode_ = static_cast<uint8_t>(bytes_[next_++]);
    if (opcode_ == kStop) {
      if (stack_.size() != 1 || !marks_.empty()) {
        return Error(
            absl::StrCat(stack_.size(), " values and ", marks_.size(), " marks are left instead of one value"));
      }
      return std::move(stack_.front().value);
    }
    if (absl::Status status = Step(); !status.ok()) return status;
    if (units_ > most_units_) {
      return Error(absl::StrCat("builds more values than are read from ", bytes_.size(), " bytes"));
    }
  }
}

absl::StatusOr<PickleValue> ReadPickle(absl::string_view bytes) {
  return PickleReader(bytes).Read();
}

}  // namespace vrambroker
