// SPDX-License-Identifier: Apache-2.0
#ifndef VRAMBROKER_CLIENT_STATS_CONVERT_H_
#define VRAMBROKER_CLIENT_STATS_CONVERT_H_

#include "allocator/memory_stats.h"
#include "vrambroker/v1/types.pb.h"

namespace vrambroker::client_internal {

MemoryStats FromProto(const v1::MemoryStats& proto);

}  // namespace vrambroker::client_internal

#endif  // VRAMBROKER_CLIENT_STATS_CONVERT_H_
