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

// A piece of a line: those of the highest rank are left out first where the line is too short for all of them.
struct RankedSpan {
  Span span;
  int rank = 0;
};
// The pieces that fit into `width` cells, in their order. The first one loses its leading separator (", ", "; ").
Line LineOf(std::vector<RankedSpan> pieces, int width);

// "  █ allocated 10.00 MiB", for the parts that are there, in at most `width` cells: with short sizes where there is
// little room, and then without the last parts.
Line Figures(const PartBytes& parts, int width, bool utf8);

// The bar of a device with what matters most beside it, in `width` cells: what is free, reserved and fragmented, what
// its sensors say, its name.
Line DeviceLine(const v1::Device& device, const PartBytes& parts, int width, bool utf8);

}  // namespace vrambroker::vramctl

#endif  // VRAMBROKER_CLIENT_VRAMCTL_VIEWS_TOP_HEAD_H_
