// SPDX-License-Identifier: Apache-2.0
//
// SettingsTarget: who is to use allocator settings. Releases of PyTorch do not all have the same.
#ifndef VRAMBROKER_ALLOCATOR_REPLAY_SETTINGS_TARGET_H_
#define VRAMBROKER_ALLOCATOR_REPLAY_SETTINGS_TARGET_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "allocator/heap/allocator_options.h"

namespace vrambroker {

// vrambroker's own clients, or a release of PyTorch. What each has was read in the sources of 1.13.1, 2.6.0 and 2.14.1;
// a release between two of them is taken to have what the earlier one has.
class SettingsTarget {
 public:
  // vrambroker.
  SettingsTarget() = default;

  // "vrambroker", "torch-2.6" (2.6.1 and 2.6.0+cu124 are the same). InvalidArgument says what is accepted.
  static absl::StatusOr<SettingsTarget> Parse(absl::string_view text);
  // REQUIRES: at least 1.13.
  static SettingsTarget Torch(int major, int minor);
  // The oldest release that is known to have all of `options`; the newest one where none has.
  static SettingsTarget OldestTorchWith(const AllocatorOptions& options);
  static SettingsTarget NewestTorch() { return Torch(2, 14); }

  // `options` with what it has in the place of each setting that it does not have: the default, or the least that it
  // takes.
  AllocatorOptions Nearest(const AllocatorOptions& options) const;
  // Whether it takes all of `options` that are not the default.
  bool Has(const AllocatorOptions& options) const { return Nearest(options) == options; }
  bool is_torch() const { return is_torch_; }
  uint64_t least_max_split_bytes() const { return is_torch_ && !IsAtLeast(2, 14) ? 21_MiB : 20_MiB; }

  // What it is called: "vrambroker", "torch-2.6".
  std::string name() const;
  std::string release() const;  // "2.6". REQUIRES: is_torch()
  // How to give it `options`: "PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:64". Every release reads this name, and takes
  // it before any newer one: an image may export it. vrambroker's clients read the same variables; where they find
  // none, the daemon's settings apply, so that its defaults are named, too. `ignored`: AllocConf::ignored of what the
  // line replaces.
  std::string Use(const AllocatorOptions& options, absl::string_view ignored = "") const;

 private:
  bool IsAtLeast(int major, int minor) const { return major_ > major || (major_ == major && minor_ >= minor); }

  bool is_torch_ = false;
  int major_ = 0;
  int minor_ = 0;
};

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_REPLAY_SETTINGS_TARGET_H_
