// SPDX-License-Identifier: Apache-2.0
#ifndef VRAMBROKER_CLIENT_VRAMCTL_VIEWS_OUTPUT_H_
#define VRAMBROKER_CLIENT_VRAMCTL_VIEWS_OUTPUT_H_

#include <cstdint>
#include <string>
#include <vector>

namespace vrambroker::vramctl {

// Rows of cells as aligned columns, the first row being the heading; columns whose name starts with '>' are
// right-aligned.
std::string Table(const std::vector<std::vector<std::string>>& rows);

// The length of the longest line.
size_t WidthOf(const std::string& table);

// "1 segment", "3 segments".
std::string Counted(uint64_t count, const char* noun);

// 0.4237 as "42.4%".
std::string Percent(double ratio);

}  // namespace vrambroker::vramctl

#endif  // VRAMBROKER_CLIENT_VRAMCTL_VIEWS_OUTPUT_H_
