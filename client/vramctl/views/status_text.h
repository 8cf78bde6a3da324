// SPDX-License-Identifier: Apache-2.0
#ifndef VRAMBROKER_CLIENT_VRAMCTL_VIEWS_STATUS_TEXT_H_
#define VRAMBROKER_CLIENT_VRAMCTL_VIEWS_STATUS_TEXT_H_

#include <string>

#include "client/vramctl/views/overview.h"

namespace vrambroker::vramctl {

// The devices as `vramctl status` shows them to people: which they are, what their capacity is used for, and what is
// wrong. The table is at most 100 columns wide: exact sizes where they fit, short ones otherwise.
std::string StatusText(const Overview& overview);

}  // namespace vrambroker::vramctl

#endif  // VRAMBROKER_CLIENT_VRAMCTL_VIEWS_STATUS_TEXT_H_
