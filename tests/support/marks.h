// SPDX-License-Identifier: Apache-2.0
//
// What stress tests write into a block, to find out later whether anybody else wrote there.
#ifndef VRAMBROKER_TESTS_SUPPORT_MARKS_H_
#define VRAMBROKER_TESTS_SUPPORT_MARKS_H_

#include <cstdint>
#include <optional>

namespace vrambroker::testing_support {

// Writes a small block as a whole; of a larger one both ends and spots at round addresses, so that two blocks that
// overlap share some. What is written differs between keys. Returns the bytes written.
uint64_t Mark(void* block, uint64_t bytes, uint64_t key);
// Where in the block other bytes are than Mark() wrote; none: it is as it was.
std::optional<uint64_t> FindOtherBytes(const void* block, uint64_t bytes, uint64_t key);

}  // namespace vrambroker::testing_support

#endif  // VRAMBROKER_TESTS_SUPPORT_MARKS_H_
