// SPDX-License-Identifier: Apache-2.0
#ifndef VRAMBROKER_CLIENT_VRAMCTL_TOP_TOP_SCREEN_H_
#define VRAMBROKER_CLIENT_VRAMCTL_TOP_TOP_SCREEN_H_

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "client/vramctl/views/bars.h"

namespace vrambroker::vramctl {

// The terminal as ncurses knows it: paints lines, reads keys. Taken over by Open(), given back as it was by the
// destructor. One at a time, for one thread.
class TopScreen {
 public:
  // FailedPrecondition: ncurses does not know the terminal that $TERM names.
  static absl::StatusOr<std::unique_ptr<TopScreen>> Open();
  ~TopScreen();
  TopScreen(const TopScreen&) = delete;
  TopScreen& operator=(const TopScreen&) = delete;

  int rows() const;
  int columns() const;

  // One line for each row of the screen.
  void Paint(const std::vector<Line>& lines);
  // The terminal has another size now.
  void Resize();
  // A key of top_view.h, without waiting; -1: none.
  int ReadKey();

 private:
  struct Terminal;
  explicit TopScreen(std::unique_ptr<Terminal> terminal);

  const std::unique_ptr<Terminal> terminal_;
};

}  // namespace vrambroker::vramctl

#endif  // VRAMBROKER_CLIENT_VRAMCTL_TOP_TOP_SCREEN_H_
