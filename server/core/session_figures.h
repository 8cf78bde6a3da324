// SPDX-License-Identifier: Apache-2.0
//
// What a session uses, from its account with a pool and what its allocator counts. A client that leases counts for
// itself, and may be late, or lie: its figures are cut to what can be true.
#ifndef VRAMBROKER_SERVER_CORE_SESSION_FIGURES_H_
#define VRAMBROKER_SERVER_CORE_SESSION_FIGURES_H_

#include <cstdint>

#include "absl/types/span.h"
#include "allocator/heap/memory_stats.h"
#include "server/core/broker_view.h"
#include "server/core/session.h"

namespace vrambroker {

// Of segments that hold no block.
uint64_t IdleBytes(const Session& session, const AccountFigures& account, const MemoryStats& stats);

SessionDeviceInfo FiguresOn(const Session& session, int device, const AccountFigures& account);
// `accounts`: of the session, by device.
SessionInfo FiguresOf(const Session& session, absl::Span<const AccountFigures> accounts);

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_CORE_SESSION_FIGURES_H_
