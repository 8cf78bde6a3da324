// SPDX-License-Identifier: Apache-2.0
#include "allocator/replay/pickle.h"

#include <algorithm>
#include <array>
#include <bit>
#include <charconv>
#include <cmath>
#include <deque>
#include <limits>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace vrambroker {
namespace {

// As deep as Python itself writes with its usual recursion limit. Bounds every recursion over a value that was read,
// its destruction among them.
constexpr uint32_t kMaxDepth = 1000;

// What a pickle may build, in units of about 32 bytes: a value on the stack, an entry of the memo and a mark are one, a
// string or a container kUnitsOfNode more. The same as the pickle has bytes is plenty, as almost every value takes more
// of them (a snapshot of PyTorch builds a third of that), but small pickles need not be so dense. kMostUnits is for
// files that were packed, and lets more than ten million entries of a snapshot through, or a million with long stacks.
constexpr uint64_t kFreeUnits = uint64_t{1} << 22;
constexpr uint64_t kMostUnits = uint64_t{1} << 28;
constexpr uint64_t kUnitsOfNode = 2;

// Items that one opcode appends. Python's own number; PyTorch's viewer passes them as arguments of one call.
constexpr size_t kBatch = 1000;

enum Opcode : uint8_t {
  kMark = '(',
  kStop = '.',
  kNone = 'N',
  kNewTrue = 0x88,
  kNewFalse = 0x89,
  kBinInt = 'J',
  kBinInt1 = 'K',
  kBinInt2 = 'M',
  kLong1 = 0x8a,
  kLong4 = 0x8b,
  kBinFloat = 'G',
  kShortBinUnicode = 0x8c,
  kBinUnicode = 'X',
  kBinUnicode8 = 0x8d,
  kShortBinString = 'U',
  kBinString = 'T',
  kShortBinBytes = 'C',
  kBinBytes = 'B',
  kBinBytes8 = 0x8e,
  kByteArray8 = 0x96,
  kEmptyList = ']',
  kAppend = 'a',
  kAppends = 'e',
  kList = 'l',
  kEmptyTuple = ')',
  kTuple = 't',
  kTuple1 = 0x85,
  kTuple2 = 0x86,
  kTuple3 = 0x87,
  kEmptyDict = '}',
  kSetItem = 's',
  kSetItems = 'u',
  kDict = 'd',
  kBinGet = 'h',
  kLongBinGet = 'j',
  kBinPut = 'q',
  kLongBinPut = 'r',
  kMemoize = 0x94,
  kProto = 0x80,
  kFrame = 0x95,
};

constexpr const char* kNoObjects = "only plain data is read, no objects";
constexpr const char* kNoText = "the text form of protocol 0 is not read; write with protocol 2 or higher";
constexpr const char* kNoSets = "sets are not read";
constexpr const char* kNoBuffers = "buffers outside the pickle are not read";
constexpr const char* kNoStack = "only plain data is read, nothing that contains itself";

struct OpcodeInfo {
  const char* name;               // nullptr: there is no such opcode
  const char* refusal = nullptr;  // why it is not read
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

    // Python writes these only for tuples that contain themselves.
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

PickleValue PickleValue::Bool(bool value) {
  PickleValue result;
  result.data_ = value;
  return result;
}

PickleValue PickleValue::Int(int64_t value) {
  PickleValue result;
  result.data_ = value;
  return result;
}

PickleValue PickleValue::Uint(uint64_t value) {
  PickleValue result;
  if (value <= static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
    result.data_ = static_cast<int64_t>(value);
  } else {
    result.data_ = value;
  }
  return result;
}

PickleValue PickleValue::Double(double value) {
  PickleValue result;
  result.data_ = value;
  return result;
}

PickleValue PickleValue::String(absl::string_view value) {
  PickleValue result;
  result.data_ = std::make_shared<const std::string>(value);
  return result;
}

PickleValue PickleValue::List(Items items) {
  PickleValue result;
  result.data_.emplace<static_cast<size_t>(Kind::kList)>(std::make_shared<Items>(std::move(items)));
  return result;
}

PickleValue PickleValue::Tuple(Items items) {
  PickleValue result;
  result.data_.emplace<static_cast<size_t>(Kind::kTuple)>(std::make_shared<Items>(std::move(items)));
  return result;
}

PickleValue PickleValue::Dict(Pairs pairs) {
  PickleValue result;
  result.data_ = std::make_shared<Pairs>(std::move(pairs));
  return result;
}

const PickleValue::Items& PickleValue::AsItems() const {
  return kind() == Kind::kTuple ? *Get<Kind::kTuple>() : *Get<Kind::kList>();
}

const PickleValue* PickleValue::Find(absl::string_view key) const {
  if (kind() != Kind::kDict) return nullptr;
  const Pairs& pairs = AsPairs();
  for (auto pair = pairs.rbegin(); pair != pairs.rend(); ++pair) {
    if (pair->first.kind() == Kind::kString && pair->first.AsString() == key) return &pair->second;
  }
  return nullptr;
}

bool PickleValue::operator==(const PickleValue& other) const {
  if (kind() != other.kind()) return false;
  switch (kind()) {
    case Kind::kNone:
      return true;
    case Kind::kBool:
      return AsBool() == other.AsBool();
    case Kind::kInt:
      return AsInt() == other.AsInt();
    case Kind::kUint:
      return AsUint() == other.AsUint();
    case Kind::kDouble:
      // By their bits: NaN is itself, and 0.0 is not -0.0.
      return std::bit_cast<uint64_t>(AsDouble()) == std::bit_cast<uint64_t>(other.AsDouble());
    case Kind::kString:
      return AsString() == other.AsString();
    case Kind::kList:
    case Kind::kTuple:
      return &AsItems() == &other.AsItems() || AsItems() == other.AsItems();
    case Kind::kDict:
      return &AsPairs() == &other.AsPairs() || AsPairs() == other.AsPairs();
  }
  return false;
}

absl::string_view PickleKindName(PickleValue::Kind kind) {
  switch (kind) {
    case PickleValue::Kind::kNone:
      return "None";
    case PickleValue::Kind::kBool:
      return "a bool";
    case PickleValue::Kind::kInt:
    case PickleValue::Kind::kUint:
      return "an integer";
    case PickleValue::Kind::kDouble:
      return "a float";
    case PickleValue::Kind::kString:
      return "a string";
    case PickleValue::Kind::kList:
      return "a list";
    case PickleValue::Kind::kTuple:
      return "a tuple";
    case PickleValue::Kind::kDict:
      return "a dict";
  }
  return "?";
}

// The pickle's own machine: a stack, marks in it, and a memo of values to be used again.
//
// A list or dict may be filled only until it becomes part of another value ("placed"). Python always finishes a value
// before it places it, except when the value contains itself; so this rule refuses exactly those. It also means that
// whatever is placed is final: no cycles, and its depth is known.
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

  // The next `size` bytes.
  absl::Status Take(uint64_t size, absl::string_view* taken);
  absl::Status TakeNumber(uint64_t size, uint64_t* number);
  absl::Status PushText(uint64_t length_size);
  absl::Status PushLong(uint64_t length_size);

  // Values above the last mark.
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
  // Where the values above the last mark begin; removes the mark.
  absl::Status TakeMark(size_t* first);

  // Makes stack_[first...] a new list, tuple or dict in their place.
  absl::Status Build(Kind kind, size_t first);
  // Adds stack_[first...] to the list or dict before them.
  absl::Status Fill(Kind kind, size_t first);
  // Moves stack_[first...] into `items` or `pairs`, which belong to `container`.
  absl::Status Place(size_t first, size_t container, uint32_t* depth, PickleValue::Items* items,
                     PickleValue::Pairs* pairs);

  absl::Status Put(uint64_t index);
  absl::Status Get(uint64_t index);

  const absl::string_view bytes_;
  const uint64_t most_units_ = std::min(kFreeUnits + bytes_.size(), kMostUnits);
  uint64_t units_ = 0;  // built so far, what is gone again included
  size_t next_ = 0;     // not read yet
  size_t at_ = 0;       // where the current opcode is
  uint8_t opcode_ = 0;  // the current one
  // Deques do not hold twice what is in them while they grow.
  std::deque<Slot> stack_;
  std::vector<size_t> marks_;
  std::deque<Container> containers_;
  std::deque<Slot> memo_;                         // entries 0, 1, ... as Python numbers them
  absl::flat_hash_map<uint64_t, Slot> far_memo_;  // entries with a gap before them: an index may be anything
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
  // Two's complement, least byte first, of any length: what is above 8 bytes may only repeat the sign.
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
    if (items->empty()) items->reserve(stack_.size() - first);  // most are filled once
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
      // Only a hint for readers that fetch in pieces. Its length is checked all the same.
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
        return absl::InvalidArgumentError(absl::StrFormat("byte %d: 0x%02x is no pickle opcode", at_, opcode_));
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

class PickleWriter {
 public:
  std::string Write(const PickleValue& value) {
    Op(kProto);
    out_.push_back(4);
    Add(value);
    Op(kStop);
    return std::move(out_);
  }

 private:
  using Kind = PickleValue::Kind;

  void Op(Opcode opcode) { out_.push_back(static_cast<char>(opcode)); }
  void Number(uint64_t number, int size) {
    for (int i = 0; i < size; ++i) out_.push_back(static_cast<char>(number >> (8 * i)));
  }
  void Add(const PickleValue& value);
  void AddInt(int64_t value);
  void AddString(const std::string& text);
  void AddItems(const PickleValue::Items& items);
  void AddTuple(const PickleValue::Items& items);
  void AddPairs(const PickleValue::Pairs& pairs);

  // Writes the container, or a reference when it was written before.
  template <typename Pointer, typename AddContent>
  void AddOnce(const Pointer& node, const AddContent& add_content);
  // The value just written can be referred to from here on.
  uint32_t Memoize() {
    Op(kMemoize);
    return memo_size_++;
  }
  // The memo's numbers have 32 bits.
  bool MemoIsFull() const { return memo_size_ == std::numeric_limits<uint32_t>::max(); }
  void Refer(uint32_t index) {
    Op(index <= 0xff ? kBinGet : kLongBinGet);
    Number(index, index <= 0xff ? 1 : 4);
  }

  std::string out_;
  uint32_t memo_size_ = 0;
  absl::flat_hash_map<absl::string_view, uint32_t> strings_;
  absl::flat_hash_map<const void*, uint32_t> containers_;
};

template <typename Pointer, typename AddContent>
void PickleWriter::AddOnce(const Pointer& node, const AddContent& add_content) {
  // An empty container is shorter than a reference. One with a single owner will not be met again.
  const bool shared = node.use_count() > 1 && !node->empty();
  if (shared) {
    if (const auto found = containers_.find(node.get()); found != containers_.end()) {
      Refer(found->second);
      return;
    }
  }
  add_content();
  if (shared && !MemoIsFull()) containers_[node.get()] = Memoize();
}

void PickleWriter::Add(const PickleValue& value) {
  switch (value.kind()) {
    case Kind::kNone:
      Op(kNone);
      return;
    case Kind::kBool:
      Op(value.AsBool() ? kNewTrue : kNewFalse);
      return;
    case Kind::kInt:
      AddInt(value.AsInt());
      return;
    case Kind::kUint:
      Op(kLong1);
      Number(9, 1);
      Number(value.AsUint(), 8);
      Number(0, 1);  // the sign
      return;
    case Kind::kDouble: {
      const auto bits = std::bit_cast<uint64_t>(value.AsDouble());
      Op(kBinFloat);
      for (int shift = 56; shift >= 0; shift -= 8) out_.push_back(static_cast<char>(bits >> shift));
      return;
    }
    case Kind::kString:
      AddString(value.AsString());
      return;
    case Kind::kList:
      AddOnce(value.Get<Kind::kList>(), [&] { AddItems(value.AsItems()); });
      return;
    case Kind::kTuple:
      AddOnce(value.Get<Kind::kTuple>(), [&] { AddTuple(value.AsItems()); });
      return;
    case Kind::kDict:
      AddOnce(value.Get<Kind::kDict>(), [&] { AddPairs(value.AsPairs()); });
      return;
  }
}

void PickleWriter::AddInt(int64_t value) {
  const auto bits = static_cast<uint64_t>(value);
  if (value >= 0 && value <= 0xff) {
    Op(kBinInt1);
    Number(bits, 1);
  } else if (value >= 0 && value <= 0xffff) {
    Op(kBinInt2);
    Number(bits, 2);
  } else if (value >= std::numeric_limits<int32_t>::min() && value <= std::numeric_limits<int32_t>::max()) {
    Op(kBinInt);
    Number(bits, 4);
  } else {
    // As few bytes as leave the sign right.
    int size = 8;
    while (size > 1) {
      const int unused = 64 - 8 * (size - 1);
      if (static_cast<int64_t>(bits << unused) >> unused != value) break;
      --size;
    }
    Op(kLong1);
    Number(static_cast<uint64_t>(size), 1);
    Number(bits, size);
  }
}

void PickleWriter::AddString(const std::string& text) {
  // Up to here the text is no longer than a reference to it.
  constexpr size_t kNotWorthIt = 3;
  if (text.size() > kNotWorthIt) {
    if (const auto found = strings_.find(text); found != strings_.end()) {
      Refer(found->second);
      return;
    }
  }
  if (text.size() <= 0xff) {
    Op(kShortBinUnicode);
    Number(text.size(), 1);
  } else if (text.size() <= 0xffffffff) {
    Op(kBinUnicode);
    Number(text.size(), 4);
  } else {
    Op(kBinUnicode8);
    Number(text.size(), 8);
  }
  out_.append(text);
  if (text.size() > kNotWorthIt && !MemoIsFull()) strings_[text] = Memoize();
}

void PickleWriter::AddItems(const PickleValue::Items& items) {
  Op(kEmptyList);
  for (size_t begin = 0; begin < items.size(); begin += kBatch) {
    const size_t end = std::min(items.size(), begin + kBatch);
    const bool several = end - begin > 1;
    if (several) Op(kMark);
    for (size_t i = begin; i < end; ++i) Add(items[i]);
    Op(several ? kAppends : kAppend);
  }
}

void PickleWriter::AddTuple(const PickleValue::Items& items) {
  constexpr std::array<Opcode, 4> kBySize = {kEmptyTuple, kTuple1, kTuple2, kTuple3};
  const bool small = items.size() < kBySize.size();
  if (!small) Op(kMark);
  for (const PickleValue& item : items) Add(item);
  Op(small ? kBySize[items.size()] : kTuple);
}

void PickleWriter::AddPairs(const PickleValue::Pairs& pairs) {
  Op(kEmptyDict);
  for (size_t begin = 0; begin < pairs.size(); begin += kBatch) {
    const size_t end = std::min(pairs.size(), begin + kBatch);
    const bool several = end - begin > 1;
    if (several) Op(kMark);
    for (size_t i = begin; i < end; ++i) {
      Add(pairs[i].first);
      Add(pairs[i].second);
    }
    Op(several ? kSetItems : kSetItem);
  }
}

namespace {

// Length of the UTF-8 sequence at the start of `text`, 0 when there is none.
size_t Utf8Length(absl::string_view text) {
  const auto byte = [&](size_t i) { return i < text.size() ? static_cast<uint8_t>(text[i]) : uint8_t{0}; };
  const auto continues = [&](size_t from, size_t to) {
    for (size_t i = from; i <= to; ++i) {
      if ((byte(i) & 0xc0) != 0x80) return false;
    }
    return true;
  };
  const uint8_t first = byte(0);
  if (first < 0x80) return 1;
  if (first >= 0xc2 && first <= 0xdf) return continues(1, 1) ? 2 : 0;
  if (first >= 0xe0 && first <= 0xef) {
    // No second way to write shorter ones, no halves of UTF-16 pairs.
    if ((first == 0xe0 && byte(1) < 0xa0) || (first == 0xed && byte(1) > 0x9f)) return 0;
    return continues(1, 2) ? 3 : 0;
  }
  if (first >= 0xf0 && first <= 0xf4) {
    if ((first == 0xf0 && byte(1) < 0x90) || (first == 0xf4 && byte(1) > 0x8f)) return 0;
    return continues(1, 3) ? 4 : 0;
  }
  return 0;
}

void AddJsonString(absl::string_view text, std::string* out) {
  out->push_back('"');
  while (!text.empty()) {
    const char c = text.front();
    const size_t length = Utf8Length(text);
    if (length == 0) {
      out->append("\xef\xbf\xbd");  // U+FFFD
    } else if (c == '"' || c == '\\') {
      out->push_back('\\');
      out->push_back(c);
    } else if (static_cast<uint8_t>(c) < 0x20) {
      absl::StrAppendFormat(out, "\\u%04x", static_cast<unsigned>(c));
    } else {
      out->append(text.data(), length);
    }
    text.remove_prefix(std::max<size_t>(length, 1));
  }
  out->push_back('"');
}

void AddJsonDouble(double value, std::string* out) {
  if (!std::isfinite(value)) {
    out->append("null");
    return;
  }
  std::array<char, 32> digits;
  const std::to_chars_result end = std::to_chars(digits.data(), digits.data() + digits.size(), value);
  const absl::string_view text(digits.data(), static_cast<size_t>(end.ptr - digits.data()));
  absl::StrAppend(out, text, text.find_first_of(".e") == absl::string_view::npos ? ".0" : "");
}

void AddJson(const PickleValue& value, std::string* out) {
  switch (value.kind()) {
    case PickleValue::Kind::kNone:
      out->append("null");
      return;
    case PickleValue::Kind::kBool:
      out->append(value.AsBool() ? "true" : "false");
      return;
    case PickleValue::Kind::kInt:
      absl::StrAppend(out, value.AsInt());
      return;
    case PickleValue::Kind::kUint:
      absl::StrAppend(out, value.AsUint());
      return;
    case PickleValue::Kind::kDouble:
      AddJsonDouble(value.AsDouble(), out);
      return;
    case PickleValue::Kind::kString:
      AddJsonString(value.AsString(), out);
      return;
    case PickleValue::Kind::kList:
    case PickleValue::Kind::kTuple: {
      const char* separator = "[";
      for (const PickleValue& item : value.AsItems()) {
        out->append(separator);
        AddJson(item, out);
        separator = ",";
      }
      out->append(value.AsItems().empty() ? "[]" : "]");
      return;
    }
    case PickleValue::Kind::kDict: {
      const char* separator = "{";
      for (const auto& [key, content] : value.AsPairs()) {
        out->append(separator);
        if (key.kind() == PickleValue::Kind::kString) {
          AddJsonString(key.AsString(), out);
        } else {
          std::string text;
          AddJson(key, &text);
          AddJsonString(text, out);
        }
        out->push_back(':');
        AddJson(content, out);
        separator = ",";
      }
      out->append(value.AsPairs().empty() ? "{}" : "}");
      return;
    }
  }
}

}  // namespace

absl::StatusOr<PickleValue> ReadPickle(absl::string_view bytes) {
  return PickleReader(bytes).Read();
}

std::string WritePickle(const PickleValue& value) {
  return PickleWriter().Write(value);
}

std::string WriteJson(const PickleValue& value) {
  std::string out;
  AddJson(value, &out);
  return out;
}

}  // namespace vrambroker
