// SPDX-License-Identifier: Apache-2.0
#ifndef VRAMBROKER_CLIENT_VRAMCTL_TOP_TOP_SCREEN_H_
#define VRAMBROKER_CLIENT_VRAMCTL_TOP_TOP_SCREEN_H_

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "client/vramctl/views/bars.h"

namespace vrambroker::vramctl {

// The terminal as known to ncurses: paints lines, reads keys. Open() takes the terminal over, the destructor restores
// it. Allows a single instance at a time, used by a single thread.
class TopScreen {
 public:
  // FailedPrecondition: ncurses does not know the terminal named by $TERM.
  static absl::StatusOr<std::unique_ptr<TopScreen>> Open();
  ~TopScreen();
  TopScreen(const TopScreen&) = delete;
  TopScreen& operator=(const TopScreen&) = delete;

  int rows() const;
  int columns() const;

  // Paints a line for each row of the screen.
  void Paint(const std::vector<Line>& lines);
  // Call after the terminal has changed its size.
  void Resize();
  // Returns a key of top_view.h, without waiting; -1: none.
  int ReadKey();

 private:
  struct Terminal;
  explicit TopScreen(std::unique_ptr<Terminal> terminal);

  const std::unique_ptr<Terminal> terminal_;
};

}  // namespace vrambroker::vramctl

#endif  // VRAMBROKER_CLIENT_VRAMCTL_TOP_TOP_SCREEN_H_
