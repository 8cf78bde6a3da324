// SPDX-License-Identifier: Apache-2.0
#ifndef VRAMBROKER_CLIENT_VRAMCTL_VIEWS_TOP_HELP_H_
#define VRAMBROKER_CLIENT_VRAMCTL_VIEWS_TOP_HELP_H_

#include <vector>

#include "client/vramctl/views/bars.h"

namespace vrambroker::vramctl {

// Explains the keys and the bars of vramctl top: fits on 80 columns and 24 rows.
std::vector<Line> HelpLines(bool utf8);

}  // namespace vrambroker::vramctl

#endif  // VRAMBROKER_CLIENT_VRAMCTL_VIEWS_TOP_HELP_H_
