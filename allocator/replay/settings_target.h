// SPDX-License-Identifier: Apache-2.0
//
// SettingsTarget: the user of allocator settings. Releases of PyTorch differ in settings.
#ifndef VRAMBROKER_ALLOCATOR_REPLAY_SETTINGS_TARGET_H_
#define VRAMBROKER_ALLOCATOR_REPLAY_SETTINGS_TARGET_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "allocator/heap/allocator_options.h"

namespace vrambroker {

// vrambroker's own clients, or a release of PyTorch. The settings of each were read in the sources of 1.13.1, 2.6.0 and
// 2.14.1; a release in between is taken to have the settings of the earlier of the two around it.
class SettingsTarget {
 public:
  // Targets vrambroker.
  SettingsTarget() = default;

  // Reads "vrambroker" or "torch-2.6" (also for 2.6.1 and 2.6.0+cu124). InvalidArgument lists the accepted texts.
  static absl::StatusOr<SettingsTarget> Parse(absl::string_view text);
  // REQUIRES: at least 1.13.
  static SettingsTarget Torch(int major, int minor);
  // The oldest release known to have all of `options`; the newest release if none has.
  static SettingsTarget OldestTorchWith(const AllocatorOptions& options);
  static SettingsTarget NewestTorch() { return Torch(2, 14); }

  // Returns `options` with a substitute for each setting unknown to the target: the default, or the least value
  // accepted.
  AllocatorOptions Nearest(const AllocatorOptions& options) const;
  // Whether the target takes all of `options` that differ from the default.
  bool Has(const AllocatorOptions& options) const { return Nearest(options) == options; }
  bool is_torch() const { return is_torch_; }
  uint64_t least_max_split_bytes() const { return is_torch_ && !IsAtLeast(2, 14) ? 21_MiB : 20_MiB; }

  // Name of the target: "vrambroker", "torch-2.6".
  std::string name() const;
  std::string release() const;  // "2.6". REQUIRES: is_torch()
  // Returns a line that sets `options`: "PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:64". Every release reads the
  // variable, and prefers it to newer variables: an image may export it. vrambroker's clients read the same variables;
  // with none set, the daemon's settings apply, so vrambroker's defaults are named, too. `ignored`: AllocConf::ignored
  // of the settings to replace.
  std::string Use(const AllocatorOptions& options, absl::string_view ignored = "") const;

 private:
  bool IsAtLeast(int major, int minor) const { return major_ > major || (major_ == major && minor_ >= minor); }

  bool is_torch_ = false;
  int major_ = 0;
  int minor_ = 0;
};

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_REPLAY_SETTINGS_TARGET_H_
