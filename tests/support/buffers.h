// SPDX-License-Identifier: Apache-2.0
//
// The patterns of util.h in memory of the broker: directly on the host device, whose memory is mapped; by copies on
// cuda, where the CPU cannot touch it.
#ifndef VRAMBROKER_TESTS_SUPPORT_BUFFERS_H_
#define VRAMBROKER_TESTS_SUPPORT_BUFFERS_H_

#include <cstdint>

#include "client/vrambroker/client.h"

namespace vrambroker::testing_support {

// The first `bytes` of a buffer; all of it. A failing copy ends the program.
void Fill(Buffer& buffer, uint64_t bytes, uint64_t seed);
void Fill(Buffer& buffer, uint64_t seed);
bool Holds(const Buffer& buffer, uint64_t bytes, uint64_t seed);
bool Holds(const Buffer& buffer, uint64_t seed);
bool IsZero(const Buffer& buffer);

// Of what Client::Malloc() or LeaseSegment() gave.
void Fill(Client& client, void* memory, uint64_t bytes, uint64_t seed);
bool Holds(Client& client, const void* memory, uint64_t bytes, uint64_t seed);

}  // namespace vrambroker::testing_support

#endif  // VRAMBROKER_TESTS_SUPPORT_BUFFERS_H_
