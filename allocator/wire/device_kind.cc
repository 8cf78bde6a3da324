// SPDX-License-Identifier: Apache-2.0
#include "allocator/wire/device_kind.h"

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace vrambroker {
namespace {

constexpr absl::string_view kPrefix = "DEVICE_KIND_";

}  // namespace

v1::DeviceKind KindNamed(absl::string_view name) {
  v1::DeviceKind kind = v1::DEVICE_KIND_UNSPECIFIED;
  (void)v1::DeviceKind_Parse(absl::StrCat(kPrefix, absl::AsciiStrToUpper(name)), &kind);
  return kind;
}

std::string KindName(v1::DeviceKind kind) {
  const v1::DeviceKind known = v1::DeviceKind_IsValid(kind) ? kind : v1::DEVICE_KIND_UNSPECIFIED;
  return absl::AsciiStrToLower(absl::StripPrefix(v1::DeviceKind_Name(known), kPrefix));
}

}  // namespace vrambroker
