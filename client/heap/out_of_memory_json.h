// SPDX-License-Identifier: Apache-2.0
#ifndef VRAMBROKER_CLIENT_HEAP_OUT_OF_MEMORY_JSON_H_
#define VRAMBROKER_CLIENT_HEAP_OUT_OF_MEMORY_JSON_H_

#include <string>

#include "absl/status/status.h"

namespace vrambroker::client_internal {

// The whole report of a refusal, as shown by `vramctl ooms`: client/JSON.md, "out of memory". "" for every other
// status. Including this file requires no protobuf.
std::string OutOfMemoryJsonOf(const absl::Status& status);

}  // namespace vrambroker::client_internal

#endif  // VRAMBROKER_CLIENT_HEAP_OUT_OF_MEMORY_JSON_H_
