// SPDX-License-Identifier: Apache-2.0
#ifndef VRAMBROKER_CLIENT_VRAMCTL_VIEWS_STATUS_TEXT_H_
#define VRAMBROKER_CLIENT_VRAMCTL_VIEWS_STATUS_TEXT_H_

#include <string>

#include "client/vramctl/views/overview.h"

namespace vrambroker::vramctl {

// Describes the devices for `vramctl status`: their identity, the use of their capacity, and problems. The table is at
// most 100 columns wide: exact sizes if there is room, else short sizes.
std::string StatusText(const Overview& overview);

}  // namespace vrambroker::vramctl

#endif  // VRAMBROKER_CLIENT_VRAMCTL_VIEWS_STATUS_TEXT_H_
