// SPDX-License-Identifier: Apache-2.0
#ifndef VRAMBROKER_CLIENT_VRAMCTL_RUN_PRELOAD_LIBRARY_H_
#define VRAMBROKER_CLIENT_VRAMCTL_RUN_PRELOAD_LIBRARY_H_

#include <string>

#include "absl/status/statusor.h"

namespace vrambroker::vramctl {

// Returns the path of libvrambroker-preload.so: $VRAMBROKER_PRELOAD, or next to this program, as installed or built.
// NotFound and FailedPrecondition describe the problem and list the places searched.
absl::StatusOr<std::string> FindPreloadLibrary();

// Returns $LD_PRELOAD with the library prepended to `before`.
std::string LdPreloadWith(const std::string& library, const std::string& before);

}  // namespace vrambroker::vramctl

#endif  // VRAMBROKER_CLIENT_VRAMCTL_RUN_PRELOAD_LIBRARY_H_
