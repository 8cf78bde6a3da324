// SPDX-License-Identifier: Apache-2.0
#include "tests/bench/daemon_process.h"

#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdlib>
#include <filesystem>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "tests/support/unix_client.h"

namespace vrambroker::bench {

absl::StatusOr<std::unique_ptr<DaemonProcess>> DaemonProcess::Start(const std::string& program) {
  std::string socket_dir = "/tmp/vrambroker-bench-XXXXXX";
  if (mkdtemp(socket_dir.data()) == nullptr) return absl::ErrnoToStatus(errno, "mkdtemp failed");
  std::array<std::string, 6> args = {program,
                                     absl::StrCat("--socket_dir=", socket_dir),
                                     "--device=host",
                                     "--capacity=1GiB",
                                     "--http_address=off",
                                     "--log_level=warn"};
  std::array<char*, args.size() + 1> argv = {};
  for (size_t i = 0; i < args.size(); ++i) argv[i] = args[i].data();
  const pid_t pid = fork();
  if (pid < 0) return absl::ErrnoToStatus(errno, "fork failed");
  if (pid == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    execv(argv[0], argv.data());
    _exit(127);
  }
  std::unique_ptr<DaemonProcess> daemon(new DaemonProcess(socket_dir, pid));
  const absl::Time deadline = absl::Now() + absl::Seconds(20);
  // The socket exists before the daemon listens.
  while (!testing_support::ConnectUnix(socket_dir + "/vrambroker.sock", SOCK_STREAM).valid()) {
    if (absl::Now() > deadline || kill(pid, 0) != 0) {
      return absl::UnavailableError(absl::StrCat(program, " does not serve"));
    }
    absl::SleepFor(absl::Milliseconds(20));
  }
  return daemon;
}

DaemonProcess::~DaemonProcess() {
  kill(pid_, SIGTERM);
  waitpid(pid_, nullptr, 0);
  std::error_code ignored;
  std::filesystem::remove_all(socket_dir_, ignored);
}

double DaemonProcess::CpuSeconds() const {
  clockid_t clock;
  timespec time = {};
  if (clock_getcpuclockid(pid_, &clock) != 0 || clock_gettime(clock, &time) != 0) return 0;
  return absl::ToDoubleSeconds(absl::DurationFromTimespec(time));
}

}  // namespace vrambroker::bench
