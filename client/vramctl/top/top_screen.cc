// SPDX-License-Identifier: Apache-2.0
#include "client/vramctl/top/top_screen.h"

#define NCURSES_NOMACROS 1  // ncurses macros are named clear, erase, move, ...
#include <curses.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/vramctl/views/top_view.h"

namespace vrambroker::vramctl {
namespace {

struct Look {
  attr_t attributes;
  short colour;  // -1: the terminal's default
};

constexpr std::array<Look, kStyles> kLooks = {{{A_NORMAL, -1},
                                               {A_BOLD, -1},
                                               {A_DIM, -1},
                                               {A_REVERSE, -1},
                                               {A_BOLD | A_REVERSE, -1},
                                               {A_BOLD, COLOR_RED},
                                               {A_NORMAL, COLOR_GREEN},
                                               {A_NORMAL, COLOR_MAGENTA},
                                               {A_NORMAL, COLOR_YELLOW},
                                               {A_NORMAL, COLOR_CYAN},
                                               {A_NORMAL, COLOR_WHITE},
                                               {A_NORMAL, COLOR_BLUE},
                                               {A_NORMAL, COLOR_RED},
                                               {A_DIM, -1},
                                               {A_NORMAL, COLOR_GREEN},
                                               {A_NORMAL, COLOR_BLUE},
                                               {A_NORMAL, COLOR_MAGENTA},
                                               {A_NORMAL, COLOR_CYAN},
                                               {A_NORMAL, COLOR_YELLOW},
                                               {A_NORMAL, COLOR_RED}}};

constexpr std::array<std::pair<int, int>, 14> kKeys = {{{KEY_UP, kKeyUp},
                                                        {KEY_DOWN, kKeyDown},
                                                        {KEY_PPAGE, kKeyPageUp},
                                                        {KEY_NPAGE, kKeyPageDown},
                                                        {KEY_HOME, kKeyHome},
                                                        {KEY_END, kKeyEnd},
                                                        {KEY_ENTER, kKeyEnter},
                                                        {'\r', kKeyEnter},
                                                        {'\n', kKeyEnter},
                                                        {'\x1b', kKeyEscape},
                                                        {KEY_BACKSPACE, kKeyBackspace},
                                                        {'\x7f', kKeyBackspace},
                                                        {'\b', kKeyBackspace},
                                                        {KEY_F(1), kKeyHelp}}};

}  // namespace

struct TopScreen::Terminal {
  SCREEN* screen = nullptr;
  bool has_colours = false;
};

TopScreen::TopScreen(std::unique_ptr<Terminal> terminal) : terminal_(std::move(terminal)) {}

absl::StatusOr<std::unique_ptr<TopScreen>> TopScreen::Open() {
  auto terminal = std::make_unique<Terminal>();
  terminal->screen = newterm(nullptr, stdout, stdin);
  if (terminal->screen == nullptr) {
    const char* const name = std::getenv("TERM");
    return absl::FailedPreconditionError(absl::StrCat("TERM=", Printable(name == nullptr ? "" : name),
                                                      " names no terminal that can be drawn on; vramctl watch writes "
                                                      "lines instead"));
  }
  cbreak();
  noecho();
  keypad(stdscr, TRUE);
  nodelay(stdscr, TRUE);
  set_escdelay(25);
  curs_set(0);  // if the terminal supports hiding the cursor
  const char* const no_colour = std::getenv("NO_COLOR");
  if (has_colors() && (no_colour == nullptr || *no_colour == '\0') && start_color() == OK &&
      use_default_colors() == OK) {
    terminal->has_colours = true;
    for (short style = 0; style < static_cast<short>(kStyles); ++style) {
      init_pair(static_cast<short>(style + 1), kLooks[static_cast<size_t>(style)].colour, -1);
    }
  }
  return std::unique_ptr<TopScreen>(new TopScreen(std::move(terminal)));
}

TopScreen::~TopScreen() {
  endwin();
  delscreen(terminal_->screen);
}

int TopScreen::rows() const {
  return getmaxy(stdscr);
}

int TopScreen::columns() const {
  return getmaxx(stdscr);
}

void TopScreen::Paint(const std::vector<Line>& lines) {
  erase();
  for (size_t row = 0; row < lines.size(); ++row) {
    move(static_cast<int>(row), 0);
    for (const Span& span : lines[row]) {
      const auto style = static_cast<size_t>(span.style);
      const Look& look = kLooks[style];
      attr_set(look.attributes, terminal_->has_colours ? static_cast<short>(style + 1) : short{0}, nullptr);
      addnstr(span.text.data(), static_cast<int>(span.text.size()));
    }
  }
  attr_set(A_NORMAL, 0, nullptr);
  refresh();
}

void TopScreen::Resize() {
  winsize size = {};
  if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_row == 0 || size.ws_col == 0) return;
  resizeterm(size.ws_row, size.ws_col);
  clearok(stdscr, TRUE);
}

int TopScreen::ReadKey() {
  int key = getch();
  while (key == KEY_RESIZE) key = getch();  // Resize() leaves KEY_RESIZE: not a pressed key
  if (key == ERR) return -1;
  for (const auto& [from, to] : kKeys) {
    if (key == from) return to;
  }
  if (key == KEY_F(10)) return kKeyQuit;
  return key > 0 && key < 0x80 ? key : kKeyOther;
}

}  // namespace vrambroker::vramctl
