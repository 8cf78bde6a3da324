// SPDX-License-Identifier: Apache-2.0
//
// Stress tests write marks into a block, to find out later whether another user of memory wrote there.
#ifndef VRAMBROKER_TESTS_SUPPORT_MARKS_H_
#define VRAMBROKER_TESTS_SUPPORT_MARKS_H_

#include <cstdint>
#include <optional>

namespace vrambroker::testing_support {

// Writes a small block as a whole. In a larger block, marks both ends and spots at round addresses, so that two
// overlapping blocks share some spots. The written bytes differ between keys. Returns the number of written bytes.
uint64_t Mark(void* block, uint64_t bytes, uint64_t key);
// Finds a place in the block that no longer has the bytes of Mark(); returns no place for an unchanged block.
std::optional<uint64_t> FindOtherBytes(const void* block, uint64_t bytes, uint64_t key);

}  // namespace vrambroker::testing_support

#endif  // VRAMBROKER_TESTS_SUPPORT_MARKS_H_
