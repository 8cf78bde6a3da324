// SPDX-License-Identifier: Apache-2.0
#include "allocator/replay/settings_target.h"

#include <algorithm>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace vrambroker {
namespace {

// Reads at most four digits at the beginning of `text`, and removes them there.
bool TakeNumber(absl::string_view* text, int* number) {
  size_t digits = 0;
  while (digits < text->size() && absl::ascii_isdigit(static_cast<unsigned char>((*text)[digits]))) ++digits;
  if (digits == 0 || digits > 4 || !absl::SimpleAtoi(text->substr(0, digits), number)) return false;
  text->remove_prefix(digits);
  return true;
}

}  // namespace

absl::StatusOr<SettingsTarget> SettingsTarget::Parse(absl::string_view text) {
  const auto wrong = [&](absl::string_view why) {
    return absl::InvalidArgumentError(absl::StrCat("\"", absl::Utf8SafeCHexEscape(text.substr(0, 40)), "\": ", why,
                                                   "; accepted: vrambroker, torch-MAJOR.MINOR as torch-2.6"));
  };
  SettingsTarget target;
  if (text == "vrambroker") return target;
  absl::string_view rest = text;
  if (!absl::ConsumePrefix(&rest, "torch-")) return wrong("neither vrambroker nor a release of PyTorch");
  target.is_torch_ = true;
  if (!TakeNumber(&rest, &target.major_) || !absl::ConsumePrefix(&rest, ".") || !TakeNumber(&rest, &target.minor_) ||
      !(rest.empty() || rest[0] == '.' || rest[0] == '+')) {
    return wrong("no release of PyTorch");
  }
  if (!target.IsAtLeast(1, 13)) return wrong("the settings of releases before 1.13 are not known here");
  return target;
}

SettingsTarget SettingsTarget::Torch(int major, int minor) {
  SettingsTarget target;
  target.is_torch_ = true;
  target.major_ = major;
  target.minor_ = minor;
  return target;
}

SettingsTarget SettingsTarget::OldestTorchWith(const AllocatorOptions& options) {
  for (const SettingsTarget& target : {Torch(1, 13), Torch(2, 6)}) {
    if (target.Has(options)) return target;
  }
  return NewestTorch();
}

AllocatorOptions SettingsTarget::Nearest(const AllocatorOptions& options) const {
  AllocatorOptions nearest = options;
  if (!is_torch_) return nearest;
  const AllocatorOptions defaults;
  nearest.max_split_bytes = std::max(options.max_split_bytes, least_max_split_bytes());
  if (!IsAtLeast(2, 14)) {
    // A rounding equal to the size of large segments changes with the size.
    if (options.max_non_split_rounding_bytes == options.large_segment_bytes) {
      nearest.max_non_split_rounding_bytes = defaults.max_non_split_rounding_bytes;
    }
    nearest.large_segment_bytes = defaults.large_segment_bytes;
    nearest.reject_without_retry = defaults.reject_without_retry;
    nearest.per_process_memory_fraction = defaults.per_process_memory_fraction;
  }
  if (IsAtLeast(2, 6)) return nearest;
  nearest.max_non_split_rounding_bytes = defaults.max_non_split_rounding_bytes;
  // Older releases have no lists, and 1 does not round at all.
  const auto& divisions = options.roundup_power2_divisions;
  const bool has_divisions =
      std::all_of(divisions.begin(), divisions.end(), [&](uint32_t each) { return each == divisions[0] && each != 1; });
  if (!has_divisions) nearest.roundup_power2_divisions = defaults.roundup_power2_divisions;
  return nearest;
}

std::string SettingsTarget::name() const {
  return is_torch_ ? absl::StrCat("torch-", release()) : "vrambroker";
}

std::string SettingsTarget::release() const {
  return absl::StrCat(major_, ".", minor_);
}

std::string SettingsTarget::Use(const AllocatorOptions& options, absl::string_view ignored) const {
  if (options == AllocatorOptions() && ignored.empty()) {
    return is_torch_ ? "unset PYTORCH_CUDA_ALLOC_CONF PYTORCH_HIP_ALLOC_CONF PYTORCH_ALLOC_CONF"
                     : "PYTORCH_CUDA_ALLOC_CONF=large_segment_size_mb:20";
  }
  const std::string heeded = FormatAllocConf(options);
  return absl::StrCat("PYTORCH_CUDA_ALLOC_CONF=", heeded, heeded.empty() || ignored.empty() ? "" : ",", ignored);
}

}  // namespace vrambroker
