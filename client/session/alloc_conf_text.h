// SPDX-License-Identifier: Apache-2.0
#ifndef VRAMBROKER_CLIENT_SESSION_ALLOC_CONF_TEXT_H_
#define VRAMBROKER_CLIENT_SESSION_ALLOC_CONF_TEXT_H_

#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace vrambroker::client_internal {

// The allocator settings that a session is opened with. The daemon reads them; here they are only found.
struct AllocConfText {
  std::string text;    // empty: the daemon's settings
  std::string source;  // for messages: "alloc_conf", or the name of an environment variable
  std::vector<std::string> warnings;

  // The daemon's status; where it refuses the settings, the message names their source.
  absl::Status NameSource(const absl::Status& status) const;
};

// From the option, or else from the environment, as PyTorch 2.14.1 does (AcceleratorAllocatorConfig::instance()): the
// first of PYTORCH_CUDA_ALLOC_CONF, PYTORCH_HIP_ALLOC_CONF and PYTORCH_ALLOC_CONF that is set, even when it is empty.
// InvalidArgument for text that a message cannot carry.
absl::StatusOr<AllocConfText> FindAllocConf(const std::optional<std::string>& option);

}  // namespace vrambroker::client_internal

#endif  // VRAMBROKER_CLIENT_SESSION_ALLOC_CONF_TEXT_H_
