// SPDX-License-Identifier: Apache-2.0
#include "allocator/replay/torch_fields.h"

#include <bit>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "allocator/heap/size_class.h"

namespace vrambroker {
namespace {

using Kind = PickleValue::Kind;

// Keys in a dict, at most: a search takes as long as there are keys, and a few bytes of the pickle can refer to a dict
// once more. PyTorch writes about ten.
constexpr size_t kMaxKeys = 256;

}  // namespace

absl::Status WrongType(absl::string_view path, const PickleValue& value, absl::string_view expected) {
  return absl::InvalidArgumentError(absl::StrCat(path, ": is ", PickleKindName(value.kind()), ", not ", expected));
}

absl::StatusOr<const PickleValue*> Field(const PickleValue& dict, absl::string_view path, absl::string_view key) {
  if (dict.kind() != Kind::kDict) return WrongType(path, dict, "a dict");
  if (const size_t keys = dict.AsPairs().size(); keys > kMaxKeys) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": has ", keys, " keys, more than ", kMaxKeys));
  }
  const PickleValue* value = dict.Find(key);
  if (value == nullptr) return absl::InvalidArgumentError(absl::StrCat(path, ".", key, ": missing"));
  return value;
}

absl::StatusOr<absl::string_view> TextField(const PickleValue& dict, absl::string_view path, absl::string_view key) {
  const absl::StatusOr<const PickleValue*> value = Field(dict, path, key);
  if (!value.ok()) return value.status();
  if ((*value)->kind() != Kind::kString) return WrongType(absl::StrCat(path, ".", key), **value, "a string");
  return absl::string_view((*value)->AsString());
}

// Reads a handle or an address. PyTorch writes signed integers, so values from 2^63 on are negative there.
absl::StatusOr<uint64_t> HandleField(const PickleValue& dict, absl::string_view path, absl::string_view key) {
  const absl::StatusOr<const PickleValue*> value = Field(dict, path, key);
  if (!value.ok()) return value.status();
  if ((*value)->kind() == Kind::kInt) return static_cast<uint64_t>((*value)->AsInt());
  if ((*value)->kind() == Kind::kUint) return (*value)->AsUint();
  return WrongType(absl::StrCat(path, ".", key), **value, "an integer");
}

absl::StatusOr<uint64_t> SizeField(const PickleValue& dict, absl::string_view path, absl::string_view key) {
  const absl::StatusOr<const PickleValue*> value = Field(dict, path, key);
  if (!value.ok()) return value.status();
  uint64_t size = 0;
  if ((*value)->kind() == Kind::kInt) {
    if ((*value)->AsInt() < 0) return absl::InvalidArgumentError(absl::StrCat(path, ".", key, ": is negative"));
    size = static_cast<uint64_t>((*value)->AsInt());
  } else if ((*value)->kind() == Kind::kUint) {
    size = (*value)->AsUint();
  } else {
    return WrongType(absl::StrCat(path, ".", key), **value, "an integer");
  }
  // The allocator REQUIRES the limit, and a sum of sizes does not overflow before there are many.
  if (size >= kMaxRequestBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ".", key, ": ", size, " is not below 2^", std::countr_zero(kMaxRequestBytes)));
  }
  return size;
}

absl::StatusOr<const PickleValue::Items*> ItemsField(const PickleValue& dict, absl::string_view path,
                                                     absl::string_view key) {
  const absl::StatusOr<const PickleValue*> value = Field(dict, path, key);
  if (!value.ok()) return value.status();
  if ((*value)->kind() != Kind::kList && (*value)->kind() != Kind::kTuple) {
    return WrongType(absl::StrCat(path, ".", key), **value, "a list");
  }
  return &(*value)->AsItems();
}

}  // namespace vrambroker
