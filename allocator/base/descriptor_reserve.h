// SPDX-License-Identifier: Apache-2.0
//
// File descriptors that segments and sessions leave to others: without them a daemon can accept nobody, and not even
// say so.
#ifndef VRAMBROKER_ALLOCATOR_BASE_DESCRIPTOR_RESERVE_H_
#define VRAMBROKER_ALLOCATOR_BASE_DESCRIPTOR_RESERVE_H_

#include <cstddef>

#include "absl/status/status.h"

namespace vrambroker {

// How many this process may have open: RLIMIT_NOFILE. Thread-safe, as all of these.
size_t DescriptorLimit();

// FailedPrecondition when `fd`, which was opened just now, is one of the last eighth: the kernel hands out the lowest
// number that is free, so all others are in use.
absl::Status CheckNotReserved(int fd);

// Why a call failed, with `error` its errno. Of EMFILE and ENFILE, says what to do: FailedPrecondition, since to the
// callers of a device ResourceExhausted means that its memory is full.
absl::Status DescriptorError(int error, const char* what);

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_BASE_DESCRIPTOR_RESERVE_H_
