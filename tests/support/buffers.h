// SPDX-License-Identifier: Apache-2.0
//
// The file offers the patterns of util.h in memory of the broker. On the host device, whose memory is mapped, the
// functions work directly. On cuda, where the CPU cannot touch the memory, the functions copy.
#ifndef VRAMBROKER_TESTS_SUPPORT_BUFFERS_H_
#define VRAMBROKER_TESTS_SUPPORT_BUFFERS_H_

#include <cstdint>

#include "client/vrambroker/client.h"

namespace vrambroker::testing_support {

// The functions fill and check the first `bytes` of a buffer, or the whole buffer. A failing copy ends the program.
void Fill(Buffer& buffer, uint64_t bytes, uint64_t seed);
void Fill(Buffer& buffer, uint64_t seed);
bool Holds(const Buffer& buffer, uint64_t bytes, uint64_t seed);
bool Holds(const Buffer& buffer, uint64_t seed);
bool IsZero(const Buffer& buffer);

// `memory` is a result of Client::Malloc() or LeaseSegment().
void Fill(Client& client, void* memory, uint64_t bytes, uint64_t seed);
bool Holds(Client& client, const void* memory, uint64_t bytes, uint64_t seed);

}  // namespace vrambroker::testing_support

#endif  // VRAMBROKER_TESTS_SUPPORT_BUFFERS_H_
