// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <bit>
#include <limits>

#include "absl/container/flat_hash_map.h"
#include "allocator/replay/pickle.h"
#include "allocator/replay/pickle_opcodes.h"

namespace vrambroker {

using namespace pickle_opcodes;

namespace {

// Items appended by one opcode, as in Python; PyTorch's viewer passes the items as arguments of a call.
constexpr size_t kBatch = 1000;

}  // namespace

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

  // Writes the container, or a reference if written before.
  template <typename Pointer, typename AddContent>
  void AddOnce(const Pointer& node, const AddContent& add_content);
  // Makes the value just written available for references.
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
  // An empty container is shorter than a reference. A container with a single owner will not be met again.
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
    // Uses the fewest bytes with the right sign.
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
  // Length up to which a text is no longer than a reference.
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

std::string WritePickle(const PickleValue& value) {
  return PickleWriter().Write(value);
}

}  // namespace vrambroker
