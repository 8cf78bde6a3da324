// SPDX-License-Identifier: Apache-2.0
//
// File descriptors kept free by segments and sessions: without descriptors a daemon cannot accept a client, not even to
// refuse.
#ifndef VRAMBROKER_ALLOCATOR_BASE_DESCRIPTOR_RESERVE_H_
#define VRAMBROKER_ALLOCATOR_BASE_DESCRIPTOR_RESERVE_H_

#include <cstddef>

#include "absl/status/status.h"

namespace vrambroker {

// Most descriptors open in the process: RLIMIT_NOFILE. Thread-safe, like all functions here.
size_t DescriptorLimit();

// FailedPrecondition when `fd`, opened just now, is in the last eighth: the kernel hands out the lowest free number, so
// all lower numbers are in use.
absl::Status CheckNotReserved(int fd);

// Explains a failed call with the errno `error`. Advises on EMFILE and ENFILE, with FailedPrecondition: to callers of a
// device, ResourceExhausted means full memory.
absl::Status DescriptorError(int error, const char* what);

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_BASE_DESCRIPTOR_RESERVE_H_
