// SPDX-License-Identifier: Apache-2.0
#include "allocator/replay/pickle.h"

#include <bit>
#include <limits>

namespace vrambroker {

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
      // Compares bits: NaN equals itself, and 0.0 is not -0.0.
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

}  // namespace vrambroker
