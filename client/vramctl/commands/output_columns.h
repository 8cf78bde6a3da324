// SPDX-License-Identifier: Apache-2.0
#ifndef VRAMBROKER_CLIENT_VRAMCTL_COMMANDS_OUTPUT_COLUMNS_H_
#define VRAMBROKER_CLIENT_VRAMCTL_COMMANDS_OUTPUT_COLUMNS_H_

namespace vrambroker::vramctl {

// Cells of a line of standard output: as COLUMNS or the terminal says, else `otherwise`; 60 to 1000.
int OutputColumns(int otherwise);

}  // namespace vrambroker::vramctl

#endif  // VRAMBROKER_CLIENT_VRAMCTL_COMMANDS_OUTPUT_COLUMNS_H_
