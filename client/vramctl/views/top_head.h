// SPDX-License-Identifier: Apache-2.0
//
// Lines of vramctl top above its table, and about the selected row. Pure: no terminal, no daemon.
#ifndef VRAMBROKER_CLIENT_VRAMCTL_VIEWS_TOP_HEAD_H_
#define VRAMBROKER_CLIENT_VRAMCTL_VIEWS_TOP_HEAD_H_

#include <string>
#include <vector>

#include "client/vramctl/views/bars.h"
#include "vrambroker/v1/types.pb.h"

namespace vrambroker::vramctl {

// A piece of a line. Pieces of the highest rank are dropped first if the line is too short.
struct RankedSpan {
  Span span;
  int rank = 0;
};
// Returns the pieces fitting into `width` cells, in order. The first piece loses its leading separator (", ", "; ").
Line LineOf(std::vector<RankedSpan> pieces, int width);

// Returns "  █ allocated 10.00 MiB" for each non-empty part, in at most `width` cells. With little room, uses short
// sizes, then drops the last parts.
Line Figures(const PartBytes& parts, int width, bool utf8);

// Returns the bar of a device with the most important figures, in `width` cells: free, reserved and fragmented memory,
// sensors, name.
Line DeviceLine(const v1::Device& device, const PartBytes& parts, int width, bool utf8);

}  // namespace vrambroker::vramctl

#endif  // VRAMBROKER_CLIENT_VRAMCTL_VIEWS_TOP_HEAD_H_
