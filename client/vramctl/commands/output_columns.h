// SPDX-License-Identifier: Apache-2.0
#ifndef VRAMBROKER_CLIENT_VRAMCTL_COMMANDS_OUTPUT_COLUMNS_H_
#define VRAMBROKER_CLIENT_VRAMCTL_COMMANDS_OUTPUT_COLUMNS_H_

namespace vrambroker::vramctl {

// Returns the cells per line of standard output: from COLUMNS or the terminal, else `otherwise`; 60 to 1000.
int OutputColumns(int otherwise);

}  // namespace vrambroker::vramctl

#endif  // VRAMBROKER_CLIENT_VRAMCTL_COMMANDS_OUTPUT_COLUMNS_H_
