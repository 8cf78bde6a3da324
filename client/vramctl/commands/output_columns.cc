// SPDX-License-Identifier: Apache-2.0
#include "client/vramctl/commands/output_columns.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>

#include "absl/strings/numbers.h"

namespace vrambroker::vramctl {

int OutputColumns(int otherwise) {
  constexpr int kLeast = 60;
  constexpr int kMost = 1000;
  const char* const columns = std::getenv("COLUMNS");
  winsize size = {};
  int wanted = 0;
  if (columns == nullptr || !absl::SimpleAtoi(columns, &wanted) || wanted <= 0) {
    const bool is_terminal = ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
    wanted = is_terminal ? size.ws_col : otherwise;
  }
  return std::clamp(wanted, kLeast, kMost);
}

}  // namespace vrambroker::vramctl
