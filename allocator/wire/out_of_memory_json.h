// SPDX-License-Identifier: Apache-2.0
//
// The report of a refusal as JSON, for operators and for programs: client/JSON.md, "out of memory".
#ifndef VRAMBROKER_ALLOCATOR_WIRE_OUT_OF_MEMORY_JSON_H_
#define VRAMBROKER_ALLOCATOR_WIRE_OUT_OF_MEMORY_JSON_H_

#include <string>

#include "vrambroker/v1/types.pb.h"

namespace vrambroker {

// Returns an object, on one line. Never throws for a text: bytes other than UTF-8 are replaced.
std::string OutOfMemoryJson(const v1::OutOfMemory& oom);

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_WIRE_OUT_OF_MEMORY_JSON_H_
