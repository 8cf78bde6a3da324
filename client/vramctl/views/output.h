// SPDX-License-Identifier: Apache-2.0
#ifndef VRAMBROKER_CLIENT_VRAMCTL_VIEWS_OUTPUT_H_
#define VRAMBROKER_CLIENT_VRAMCTL_VIEWS_OUTPUT_H_

#include <cstdint>
#include <string>
#include <vector>

namespace vrambroker::vramctl {

// Formats rows of cells as aligned columns, the first row being the heading; columns with names starting with '>' are
// right-aligned.
std::string Table(const std::vector<std::vector<std::string>>& rows);

// Returns the length of the longest line.
size_t WidthOf(const std::string& table);

// Returns "1 segment", "3 segments".
std::string Counted(uint64_t count, const char* noun);

// Formats 0.4237 as "42.4%".
std::string Percent(double ratio);

}  // namespace vrambroker::vramctl

#endif  // VRAMBROKER_CLIENT_VRAMCTL_VIEWS_OUTPUT_H_
