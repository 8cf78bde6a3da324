// SPDX-License-Identifier: Apache-2.0
#include "tests/support/child_process.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "tests/cuda_substitute/machine.h"
#include "tests/cuda_substitute/substitute.h"

extern char** environ;  // NOLINT(readability-redundant-declaration)

namespace vrambroker::testing_support {
namespace {

struct Pipe {
  UniqueFd read_end;
  UniqueFd write_end;
};

absl::StatusOr<Pipe> MakePipe() {
  std::array<int, 2> ends;
  if (pipe2(ends.data(), O_CLOEXEC) != 0) return absl::ErrnoToStatus(errno, "pipe2 failed");
  return Pipe{UniqueFd(ends[0]), UniqueFd(ends[1])};
}

// Does only work that a child of vfork() in a program with many threads may do before exec: no call takes a lock.
[[noreturn]] void Exec(char** argv, char** envp, int in, int out, int err) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  // Restores default actions: tests that run in the background may inherit ignored signals, and a shell cannot trap
  // ignored signals.
  for (const int number : {SIGPIPE, SIGHUP, SIGINT, SIGQUIT}) signal(number, SIG_DFL);
  dup2(in, STDIN_FILENO);
  dup2(out, STDOUT_FILENO);
  dup2(err, STDERR_FILENO);
  execve(argv[0], argv, envp);
  _exit(127);
}

// Waits after SIGSTOP until all threads have stopped; the threads stop one after another. Returns false when the
// process has ended.
bool HasStopped(pid_t pid) {
  siginfo_t info = {};
  int failed = 0;
  while ((failed = waitid(P_PID, static_cast<id_t>(pid), &info, WSTOPPED | WNOWAIT)) != 0 && errno == EINTR) {
  }
  return failed == 0;
}

// Tells whether the process is in the middle of a call on the CUDA substitute. Stopping the process there would stop
// all other processes, which no GPU does.
bool HoldsMachine(pid_t pid) {
  const char* const machine = std::getenv(cuda_substitute::kMachineVariable);
  return machine != nullptr && cuda_substitute::HoldsLock(machine, pid);
}

}  // namespace

absl::StatusOr<std::unique_ptr<ChildProcess>> ChildProcess::Start(const Arguments& arguments,
                                                                  const Environment& environment) {
  absl::StatusOr<Pipe> in = MakePipe();
  absl::StatusOr<Pipe> out = MakePipe();
  if (!in.ok() || !out.ok()) return in.ok() ? out.status() : in.status();
  UniqueFd err(memfd_create("stderr", MFD_CLOEXEC));
  if (!err.valid()) return absl::ErrnoToStatus(errno, "memfd_create failed");

  std::vector<std::string> words = arguments;
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  // Sets each variable once: of two values the program takes the first, and the dynamic linker the last.
  std::map<std::string, std::string> values;
  for (char** variable = environ; *variable != nullptr; ++variable) {
    const std::pair<std::string, std::string> parts = absl::StrSplit(*variable, absl::MaxSplits('=', 1));
    values.insert(parts);
  }
  for (const auto& [name, value] : environment) values[name] = value;
  std::vector<std::string> variables;
  for (const auto& [name, value] : values) variables.push_back(absl::StrCat(name, "=", value));
  std::vector<char*> envp;
  for (std::string& variable : variables) envp.push_back(variable.data());
  envp.push_back(nullptr);

  const pid_t pid = vfork();  // avoids copying the large memory of a test under a sanitizer
  if (pid < 0) return absl::ErrnoToStatus(errno, "vfork failed");
  if (pid == 0) Exec(argv.data(), envp.data(), in->read_end.get(), out->write_end.get(), err.get());
  return std::unique_ptr<ChildProcess>(
      new ChildProcess(pid, std::move(in->write_end), std::move(out->read_end), std::move(err)));
}

ChildProcess::~ChildProcess() {
  if (exit_code_.has_value()) return;
  kill(pid_, SIGKILL);
  waitpid(pid_, nullptr, 0);
}

absl::Status ChildProcess::WriteLine(absl::string_view line) {
  const std::string text = absl::StrCat(line, "\n");
  signal(SIGPIPE, SIG_IGN);  // makes writing to an ended child an error that does not end the test
  for (size_t done = 0; done < text.size();) {
    const ssize_t size = write(in_.get(), text.data() + done, text.size() - done);
    if (size < 0) return absl::ErrnoToStatus(errno, "writing to the child failed");
    done += static_cast<size_t>(size);
  }
  return absl::OkStatus();
}

bool ChildProcess::ReadMore(absl::Time deadline) {
  while (true) {
    const absl::Duration left = deadline - absl::Now();
    if (left <= absl::ZeroDuration()) return false;
    pollfd wait = {.fd = out_.get(), .events = POLLIN, .revents = 0};
    const int ready = poll(&wait, 1, static_cast<int>(absl::ToInt64Milliseconds(left)) + 1);
    if (ready == 0 || (ready < 0 && errno == EINTR)) continue;
    std::array<char, 1 << 16> buffer;
    const ssize_t size = read(out_.get(), buffer.data(), buffer.size());
    if (size <= 0) return false;
    unread_.append(buffer.data(), static_cast<size_t>(size));
    return true;
  }
}

absl::StatusOr<std::string> ChildProcess::ReadLine(absl::Duration timeout) {
  const absl::Time deadline = absl::Now() + timeout;
  size_t end;
  while ((end = unread_.find('\n')) == std::string::npos) {
    if (ReadMore(deadline)) continue;
    return absl::Now() >= deadline
               ? absl::DeadlineExceededError("the child wrote no line in time")
               : absl::UnavailableError(absl::StrCat("the child's output has ended; stderr: ", ErrorText()));
  }
  std::string line = unread_.substr(0, end);
  unread_.erase(0, end + 1);
  return line;
}

std::string ChildProcess::ReadRest(absl::Duration timeout) {
  const absl::Time deadline = absl::Now() + timeout;
  while (ReadMore(deadline)) {
  }
  return std::exchange(unread_, "");
}

std::string ChildProcess::ErrorText() const {
  std::string text;
  std::array<char, 1 << 16> buffer;
  ssize_t size;
  while ((size = pread(err_.get(), buffer.data(), buffer.size(), static_cast<off_t>(text.size()))) > 0) {
    text.append(buffer.data(), static_cast<size_t>(size));
  }
  return text;
}

void ChildProcess::Signal(int signal) const {
  if (exit_code_.has_value()) return;
  kill(pid_, signal);
  while (signal == SIGSTOP && HasStopped(pid_) && HoldsMachine(pid_)) {
    kill(pid_, SIGCONT);
    absl::SleepFor(absl::Milliseconds(1));  // lets the process proceed; no result depends on the pause
    kill(pid_, SIGSTOP);
  }
}

void ChildProcess::StopAll(const std::vector<const ChildProcess*>& processes) {
  for (const ChildProcess* process : processes) {
    if (!process->exit_code_.has_value()) kill(process->pid_, SIGSTOP);
  }
  for (const ChildProcess* process : processes) process->Signal(SIGSTOP);
}

bool ChildProcess::Running() {
  return absl::IsDeadlineExceeded(Wait(absl::ZeroDuration()).status());
}

absl::StatusOr<int> ChildProcess::Wait(absl::Duration timeout) {
  const bool ended = WaitFor(
      [this] {
        int status = 0;
        if (!exit_code_.has_value() && waitpid(pid_, &status, WNOHANG) == pid_) {
          exit_code_ = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
        }
        return exit_code_.has_value();
      },
      timeout);
  if (!ended) return absl::DeadlineExceededError(absl::StrCat("process ", pid_, " still runs"));
  return *exit_code_;
}

RunResult RunProgram(const Arguments& arguments, const Environment& environment) {
  RunResult result;
  absl::StatusOr<std::unique_ptr<ChildProcess>> child = ChildProcess::Start(arguments, environment);
  if (!child.ok()) {
    result.err = child.status().ToString();
    return result;
  }
  result.out = (*child)->ReadRest();
  result.exit_code = (*child)->Wait().value_or(-1);
  result.err = (*child)->ErrorText();
  return result;
}

}  // namespace vrambroker::testing_support
