// SPDX-License-Identifier: Apache-2.0
//
// vramctl top: a live view on a terminal, able to change sessions.
#include <langinfo.h>
#include <poll.h>
#include <signal.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <clocale>
#include <cstdio>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "allocator/base/unique_fd.h"
#include "client/vramctl/commands/commands.h"
#include "client/vramctl/commands/output_columns.h"
#include "client/vramctl/options/users.h"
#include "client/vramctl/top/daemon_poller.h"
#include "client/vramctl/top/details_reader.h"
#include "client/vramctl/top/session_actor.h"
#include "client/vramctl/top/top_screen.h"
#include "client/vramctl/views/top_view.h"

namespace vrambroker::vramctl {
namespace {

// Returns a descriptor for the signals handled here, including signals which would otherwise end the process without
// restoring the terminal.
UniqueFd TakeSignals() {
  sigset_t mask;
  sigemptyset(&mask);
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGWINCH}) sigaddset(&mask, signal);
  pthread_sigmask(SIG_BLOCK, &mask, nullptr);
  return UniqueFd(signalfd(-1, &mask, SFD_CLOEXEC | SFD_NONBLOCK));
}

// Returns false to end. `screen`: null before the screen is open.
bool HandleSignals(int fd, TopScreen* screen) {
  signalfd_siginfo signal = {};
  while (read(fd, &signal, sizeof signal) == static_cast<ssize_t>(sizeof signal)) {
    if (signal.ssi_signo != SIGWINCH) return false;
    if (screen != nullptr) screen->Resize();
  }
  return true;
}

// Writes the view as text, context.batches times. Ends quietly when the reader is gone.
absl::Status WriteBatches(const Context& context, absl::Duration interval, TopView& view) {
  constexpr int kColumns = 120;  // if neither a terminal nor COLUMNS sets a width
  DaemonPoller poller(context, interval);
  pollfd wait = {.fd = poller.fd(), .events = POLLIN, .revents = 0};
  for (uint64_t written = 0; written < context.batches;) {
    if (poll(&wait, 1, -1) < 0 && errno != EINTR) return absl::ErrnoToStatus(errno, "poll failed");
    const std::optional<TopData> data = poller.Take();
    if (!data.has_value()) continue;
    if (!data->status.ok()) return data->status;
    view.SetData(*data);
    std::printf("%s%s", written == 0 ? "" : "\n", view.Write(OutputColumns(kColumns)).c_str());
    if (std::fflush(stdout) != 0) {
      return errno == EPIPE ? absl::OkStatus() : absl::ErrnoToStatus(errno, "the output was not written");
    }
    ++written;
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status Top(const Context& context) {
  TopView::Options options;
  const absl::StatusOr<Column> sort = ParseColumn(context.sort);
  if (!sort.ok()) return sort.status();
  const absl::StatusOr<absl::Duration> interval = IntervalOf(context);
  if (!interval.ok()) return interval.status();
  if (context.json) return absl::InvalidArgumentError("top draws on a terminal; vramctl watch writes JSON");
  if (!context.batch && (isatty(STDIN_FILENO) == 0 || isatty(STDOUT_FILENO) == 0)) {
    return absl::FailedPreconditionError(
        "top needs a terminal as its input and output; vramctl top -b writes text, and vramctl watch writes JSON lines "
        "instead");
  }
  std::setlocale(LC_CTYPE, "");
  options.sort = *sort;
  options.utf8 = std::strcmp(nl_langinfo(CODESET), "UTF-8") == 0;
  options.user_name = UserName;
  TopView view(std::move(options));
  if (context.batch) return WriteBatches(context, *interval, view);

  const UniqueFd signals = TakeSignals();
  DaemonPoller poller(context, *interval);
  SessionActor actor(context);
  DetailsReader details_reader(context, *interval);
  std::array<pollfd, 5> wait = {{{.fd = STDIN_FILENO, .events = POLLIN, .revents = 0},
                                 {.fd = signals.get(), .events = POLLIN, .revents = 0},
                                 {.fd = poller.fd(), .events = POLLIN, .revents = 0},
                                 {.fd = actor.fd(), .events = POLLIN, .revents = 0},
                                 {.fd = details_reader.fd(), .events = POLLIN, .revents = 0}}};
  std::optional<TopData> data;
  while (!data.has_value()) {
    if (poll(&wait[1], 2, -1) < 0 && errno != EINTR) return absl::ErrnoToStatus(errno, "poll failed");
    if (!HandleSignals(signals.get(), nullptr)) return absl::OkStatus();
    data = poller.Take();
  }
  // A missing daemon is an error as for other commands; a slow daemon makes the screen wait.
  if (!data->status.ok() && !absl::IsDeadlineExceeded(data->status)) return data->status;
  view.SetData(*data);

  const absl::StatusOr<std::unique_ptr<TopScreen>> screen = TopScreen::Open();
  if (!screen.ok()) return screen.status();
  while (true) {
    (*screen)->Paint(view.Draw((*screen)->rows(), (*screen)->columns()));
    if (poll(wait.data(), wait.size(), -1) < 0) {
      if (errno == EINTR) continue;
      return absl::ErrnoToStatus(errno, "poll failed");
    }
    if (!HandleSignals(signals.get(), screen->get())) return absl::OkStatus();
    if (data = poller.Take(); data.has_value()) view.SetData(*data);
    if (const std::optional<SessionActor::Result> result = actor.Take(); result.has_value()) {
      view.SetResult(*result);
      poller.Hurry();
    }
    if (std::optional<DetailsData> details = details_reader.Take(); details.has_value()) {
      view.SetDetails(*std::move(details));
    }
    for (int key; (key = (*screen)->ReadKey()) >= 0;) {
      if (!view.HandleKey(key)) return absl::OkStatus();
    }
    if (std::optional<SessionOrder> order = view.TakeOrder(); order.has_value()) actor.Begin(*std::move(order));
    details_reader.Want(view.WantedDetails());
    if ((wait[0].revents & (POLLHUP | POLLERR)) != 0) return absl::OkStatus();  // the terminal is gone
  }
}

}  // namespace vrambroker::vramctl
