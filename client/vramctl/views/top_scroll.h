// SPDX-License-Identifier: Apache-2.0
#ifndef VRAMBROKER_CLIENT_VRAMCTL_VIEWS_TOP_SCROLL_H_
#define VRAMBROKER_CLIENT_VRAMCTL_VIEWS_TOP_SCROLL_H_

#include <algorithm>
#include <cstddef>
#include <string>
#include <vector>

#include "client/vramctl/views/bars.h"

namespace vrambroker::vramctl {

// Chooses the visible lines of a text, if the screen of vramctl top has room for fewer.
class Scroll {
 public:
  // Handles a key of top_view.h. False: the key scrolls nothing, or all lines are visible.
  bool HandleKey(int key);
  // Returns the currently visible lines, at most `rows`.
  std::vector<Line> Window(std::vector<Line> lines, int rows);
  // Returns "lines 5-20 of 44"; empty: all are visible.
  std::string Place() const;

 private:
  size_t Last() const { return lines_ - std::min(lines_, page_); }

  size_t first_ = 0;
  size_t page_ = 1;
  size_t lines_ = 0;
};

}  // namespace vrambroker::vramctl

#endif  // VRAMBROKER_CLIENT_VRAMCTL_VIEWS_TOP_SCROLL_H_
