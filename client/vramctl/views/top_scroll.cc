// SPDX-License-Identifier: Apache-2.0
#include "client/vramctl/views/top_scroll.h"

#include <iterator>

#include "absl/strings/str_cat.h"
#include "client/vramctl/views/top_view.h"

namespace vrambroker::vramctl {

bool Scroll::HandleKey(int key) {
  if (lines_ <= page_) return false;
  switch (key) {
    case kKeyUp:
    case 'k':
      first_ -= std::min<size_t>(first_, 1);
      break;
    case kKeyDown:
    case 'j':
      ++first_;
      break;
    case kKeyPageUp:
      first_ -= std::min(first_, page_);
      break;
    case kKeyPageDown:
      first_ += page_;
      break;
    case kKeyHome:
      first_ = 0;
      break;
    case kKeyEnd:
      first_ = lines_;
      break;
    default:
      return false;
  }
  first_ = std::min(first_, Last());
  return true;
}

std::vector<Line> Scroll::Window(std::vector<Line> lines, int rows) {
  page_ = static_cast<size_t>(std::max(rows, 0));
  lines_ = lines.size();
  first_ = std::min(first_, Last());
  const size_t end = std::min(lines_, first_ + page_);
  return {std::make_move_iterator(lines.begin() + static_cast<std::ptrdiff_t>(first_)),
          std::make_move_iterator(lines.begin() + static_cast<std::ptrdiff_t>(end))};
}

std::string Scroll::Place() const {
  if (lines_ <= page_) return "";
  return absl::StrCat("lines ", first_ + 1, "-", std::min(lines_, first_ + page_), " of ", lines_);
}

}  // namespace vrambroker::vramctl
