// SPDX-License-Identifier: Apache-2.0
//
// vramctl watch: writes figures as JSON lines, for scripts.
#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "allocator/wire/admin_json.h"
#include "client/vramctl/commands/commands.h"
#include "client/vramctl/daemon/daemon_calls.h"
#include "client/vramctl/options/refusal.h"
#include "client/vramctl/views/output.h"
#include "client/vramctl/views/session_output.h"

namespace vrambroker::vramctl {
namespace {

using Json = nlohmann::ordered_json;

std::string LineOf(const Overview& overview) {
  Json sessions = Json::array();
  for (const v1::Session& session : overview.sessions.sessions()) sessions.push_back(ToJson(session));
  const Json line = {{"time", absl::FormatTime(absl::RFC3339_full, absl::Now(), absl::UTCTimeZone())},
                     {"daemon_version", overview.devices.daemon_version()},
                     {"run_id", overview.devices.run_id()},
                     {"devices", DevicesJson(overview)},
                     {"sessions", std::move(sessions)}};
  return absl::StrCat(JsonText(line), "\n");
}

// Writes at once, past stdio's buffer. Cancelled: the reader is gone.
absl::Status WriteOut(absl::string_view text) {
  while (!text.empty()) {
    const ssize_t size = write(STDOUT_FILENO, text.data(), text.size());
    if (size < 0 && errno == EINTR) continue;
    if (size < 0 && errno == EPIPE) return absl::CancelledError("the reader has gone");
    if (size < 0) return absl::DataLossError(absl::StrCat("the output was not written: ", strerror(errno)));
    text.remove_prefix(static_cast<size_t>(size));
  }
  return absl::OkStatus();
}

// Returns false if the reader of the output is gone.
bool SleepUntil(std::chrono::steady_clock::time_point time) {
  while (true) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(time - std::chrono::steady_clock::now());
    if (left.count() <= 0) return true;
    pollfd output = {.fd = STDOUT_FILENO, .events = 0, .revents = 0};
    const int ready = poll(&output, 1, static_cast<int>(left.count()) + 1);
    if (ready > 0) return false;
    if (ready < 0 && errno != EINTR) return true;
  }
}

}  // namespace

absl::StatusOr<absl::Duration> IntervalOf(const Context& context) {
  if (!(context.interval >= 0.1 && context.interval <= 3600)) {  // rejects NaN, too
    return absl::InvalidArgumentError(
        absl::StrCat("--interval: ", context.interval, " is not between 0.1 and 3600 seconds"));
  }
  return absl::Seconds(context.interval);
}

absl::Status Watch(const Context& context) {
  const absl::StatusOr<absl::Duration> interval = IntervalOf(context);
  if (!interval.ok()) return interval.status();
  signal(SIGPIPE, SIG_IGN);  // a vanished reader is noticed when writing, and is not a failure
  absl::StatusOr<Daemon> daemon = Daemon::Connect(context);
  if (!daemon.ok()) return daemon.status();
  auto next = std::chrono::steady_clock::now();
  for (uint64_t lines = 0;;) {
    const absl::StatusOr<Overview> overview = ReadOverview(*daemon);
    if (!overview.ok()) {
      return Refusal(absl::Status(overview.status().code(),
                                  absl::StrCat("the daemon stopped answering after ", Counted(lines, "line"), ": ",
                                               overview.status().message())));
    }
    if (absl::Status written = WriteOut(LineOf(*overview)); !written.ok()) {
      return absl::IsCancelled(written) ? absl::OkStatus() : written;
    }
    if (++lines == context.count) return absl::OkStatus();
    next = std::max(next + absl::ToChronoMilliseconds(*interval),
                    std::chrono::steady_clock::now());  // skips the lines missed during a slow answer
    if (!SleepUntil(next)) return absl::OkStatus();
  }
}

}  // namespace vrambroker::vramctl
