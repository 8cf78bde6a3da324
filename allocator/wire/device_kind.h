// SPDX-License-Identifier: Apache-2.0
//
// Kinds of devices in messages, and their names: DEVICE_KIND_CUDA is "cuda".
#ifndef VRAMBROKER_ALLOCATOR_WIRE_DEVICE_KIND_H_
#define VRAMBROKER_ALLOCATOR_WIRE_DEVICE_KIND_H_

#include <string>

#include "absl/strings/string_view.h"
#include "vrambroker/v1/types.pb.h"

namespace vrambroker {

// Returns the kind named `name`, as DeviceProperties::kind has it; UNSPECIFIED for an unknown name.
v1::DeviceKind KindNamed(absl::string_view name);
// Returns the name of a kind; "unspecified" for a kind of a later version.
std::string KindName(v1::DeviceKind kind);

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_WIRE_DEVICE_KIND_H_
