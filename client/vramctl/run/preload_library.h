// SPDX-License-Identifier: Apache-2.0
#ifndef VRAMBROKER_CLIENT_VRAMCTL_RUN_PRELOAD_LIBRARY_H_
#define VRAMBROKER_CLIENT_VRAMCTL_RUN_PRELOAD_LIBRARY_H_

#include <string>

#include "absl/status/statusor.h"

namespace vrambroker::vramctl {

// The path of libvrambroker-preload.so: $VRAMBROKER_PRELOAD, or beside this program, as it is installed or built.
// NotFound and FailedPrecondition say what is missing, and where it was looked for.
absl::StatusOr<std::string> FindPreloadLibrary();

// $LD_PRELOAD with the library before what is there.
std::string LdPreloadWith(const std::string& library, const std::string& before);

}  // namespace vrambroker::vramctl

#endif  // VRAMBROKER_CLIENT_VRAMCTL_RUN_PRELOAD_LIBRARY_H_
