// SPDX-License-Identifier: Apache-2.0
#ifndef VRAMBROKER_CLIENT_SESSION_ALLOC_CONF_TEXT_H_
#define VRAMBROKER_CLIENT_SESSION_ALLOC_CONF_TEXT_H_

#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace vrambroker::client_internal {

// The allocator settings for opening a session. The client only finds the text; the daemon parses it.
struct AllocConfText {
  std::string text;    // empty: the daemon's settings
  std::string source;  // for messages: "alloc_conf", or the name of an environment variable
  std::vector<std::string> warnings;

  // Returns the daemon's status; when the daemon refuses the settings, the message names their source.
  absl::Status NameSource(const absl::Status& status) const;
};

// Takes the settings from the option, or else from the environment, as PyTorch 2.14.1 does
// (AcceleratorAllocatorConfig::instance()): the first of PYTORCH_CUDA_ALLOC_CONF, PYTORCH_HIP_ALLOC_CONF and
// PYTORCH_ALLOC_CONF that is set, even when empty. InvalidArgument: a message cannot carry the text.
absl::StatusOr<AllocConfText> FindAllocConf(const std::optional<std::string>& option);

}  // namespace vrambroker::client_internal

#endif  // VRAMBROKER_CLIENT_SESSION_ALLOC_CONF_TEXT_H_
