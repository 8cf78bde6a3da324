// SPDX-License-Identifier: Apache-2.0
#ifndef VRAMBROKER_ALLOCATOR_BASE_VERSION_H_
#define VRAMBROKER_ALLOCATOR_BASE_VERSION_H_

namespace vrambroker {

extern const char kVersion[];      // of the release, "0.1.0"
extern const char kRevision[];     // of the source, "unknown" outside of a git checkout
extern const char kCudaVersion[];  // of the toolkit in the build, "no toolkit", or "none": without CUDA

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_BASE_VERSION_H_
