// SPDX-License-Identifier: Apache-2.0
#ifndef VRAMBROKER_CLIENT_VRAMCTL_VIEWS_TOP_SCROLL_H_
#define VRAMBROKER_CLIENT_VRAMCTL_VIEWS_TOP_SCROLL_H_

#include <algorithm>
#include <cstddef>
#include <string>
#include <vector>

#include "client/vramctl/views/bars.h"

namespace vrambroker::vramctl {

// Chooses the lines of a text that are seen, where the screen of vramctl top has room for fewer.
class Scroll {
 public:
  // Of top_view.h. False: the key scrolls nothing, or all lines are seen.
  bool HandleKey(int key);
  // At most `rows` of the lines: those that are seen now.
  std::vector<Line> Window(std::vector<Line> lines, int rows);
  // "lines 5-20 of 44"; empty: all are seen.
  std::string Place() const;

 private:
  size_t Last() const { return lines_ - std::min(lines_, page_); }

  size_t first_ = 0;
  size_t page_ = 1;
  size_t lines_ = 0;
};

}  // namespace vrambroker::vramctl

#endif  // VRAMBROKER_CLIENT_VRAMCTL_VIEWS_TOP_SCROLL_H_
