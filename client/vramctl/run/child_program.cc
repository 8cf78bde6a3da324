// SPDX-License-Identifier: Apache-2.0
#include "client/vramctl/run/child_program.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <optional>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "allocator/base/unique_fd.h"

namespace vrambroker::vramctl {
namespace {

// Signals passed on to the program. Not listed: signals impossible to catch, signals caused by a closed pipe or a fault
// (SIGPIPE, SIGSEGV and the like), and SIGTTIN and SIGTTOU, sent by the terminal to both processes.
std::vector<int> PassedOn() {
  std::vector<int> signals = {SIGINT,  SIGTERM, SIGHUP,    SIGQUIT, SIGUSR1, SIGUSR2, SIGWINCH, SIGCONT, SIGTSTP,
                              SIGALRM, SIGABRT, SIGVTALRM, SIGPROF, SIGXCPU, SIGURG,  SIGIO,    SIGPWR};
  for (int signal = SIGRTMIN; signal <= SIGRTMAX; ++signal) signals.push_back(signal);
  return signals;
}

struct Event {
  int signal;
  int code;      // si_code: the origin of the signal
  pid_t sender;  // set for signals sent by a process
};

// Never closed, since the handlers stay.
int event_pipe = -1;
int events_read = -1;
std::atomic<unsigned> continues = 0;  // number of SIGCONT received by this process
unsigned continues_passed_on = 0;     // number of SIGCONT passed on

void OnSignal(int signal, siginfo_t* info, void* /*context*/) {
  const int before = errno;
  if (signal == SIGCONT) ++continues;
  const Event event = {.signal = signal, .code = info->si_code, .sender = info->si_code <= 0 ? info->si_pid : 0};
  (void)!write(event_pipe, &event, sizeof event);
  errno = before;
}

struct sigaction Handler() {
  struct sigaction action = {};
  action.sa_sigaction = OnSignal;
  action.sa_flags = SA_SIGINFO | SA_RESTART;
  return action;
}

// Installs handlers in this process, and restores the dispositions for the program. Blocking the signals would not do,
// since threads of gRPC may receive them.
class Signals {
 public:
  Signals() {
    const struct sigaction handler = Handler();
    for (const int signal : PassedOn()) {
      struct sigaction before = {};
      sigaction(signal, nullptr, &before);
      if (before.sa_handler == SIG_IGN) continue;  // as with nohup: the program ignores the signal, too
      sigaction(signal, &handler, nullptr);
      handled_.push_back(signal);
    }
    sigaction(SIGCHLD, &handler, &child_);
  }

  // Call in the child before execve(). Does not allocate.
  void Restore() const {
    struct sigaction action = {};
    action.sa_handler = SIG_DFL;
    for (const int signal : handled_) sigaction(signal, &action, nullptr);
    sigaction(SIGCHLD, child_.sa_handler == SIG_IGN ? &child_ : &action, nullptr);
  }

 private:
  std::vector<int> handled_;
  struct sigaction child_ = {};
};

std::vector<char*> Pointers(const std::vector<std::string>& texts) {
  std::vector<char*> pointers;
  pointers.reserve(texts.size() + 1);
  for (const std::string& text : texts) pointers.push_back(const_cast<char*>(text.c_str()));
  pointers.push_back(nullptr);
  return pointers;
}

// Stops this process after the program has stopped, so the shell sees the job stopped. The kernel does nothing if no
// shell could continue the process, as without job control. Does nothing if SIGCONT has arrived meanwhile and is yet to
// be passed on: the process would stop for good.
void StopAsWell() {
  struct sigaction before = {};
  sigaction(SIGTSTP, nullptr, &before);
  if (before.sa_handler == SIG_IGN) return;
  struct sigaction action = {};
  sigset_t only;
  sigemptyset(&only);
  sigaddset(&only, SIGTSTP);
  pthread_sigmask(SIG_BLOCK, &only, nullptr);
  action.sa_handler = SIG_DFL;
  sigaction(SIGTSTP, &action, nullptr);
  raise(SIGTSTP);  // pending until a SIGCONT removes the signal
  action.sa_handler = SIG_IGN;
  if (continues != continues_passed_on) sigaction(SIGTSTP, &action, nullptr);  // SIGCONT has removed the pending signal
  pthread_sigmask(SIG_UNBLOCK, &only, nullptr);
  sigaction(SIGTSTP, &before, nullptr);
}

// True if a shell with job control waits for this process and has handed over the terminal.
bool IsJobInForeground() {
  if (getpgrp() != getpid()) return false;  // started by a script
  const UniqueFd terminal(open("/dev/tty", O_RDONLY | O_NOCTTY | O_CLOEXEC));
  return terminal.valid() && tcgetpgrp(terminal.get()) == getpgrp();
}

// Checks the state of the program; nullopt: still running.
std::optional<ProgramEnd> LookAt(pid_t child) {
  for (;;) {
    siginfo_t info = {};
    if (waitid(P_PID, static_cast<id_t>(child), &info, WEXITED | WSTOPPED | WNOHANG) != 0) {
      if (errno == EINTR) continue;
      return ProgramEnd{};  // cannot happen: only this function waits for the program
    }
    if (info.si_pid == 0) return std::nullopt;
    if (info.si_code == CLD_EXITED) return ProgramEnd{.exit_code = info.si_status};
    if (info.si_code == CLD_KILLED || info.si_code == CLD_DUMPED) {
      return ProgramEnd{.exit_code = 128 + info.si_status, .signal = info.si_status};
    }
    // A sender of SIGSTOP means the program alone, and continues the program alone. But a shell waiting for its job
    // regains the terminal only if the job stops, and continues the job with `fg`.
    if (info.si_status != SIGSTOP || IsJobInForeground()) StopAsWell();
  }
}

// On hangup, a terminal signals only the leader of its session, and the leader must signal the rest. A program in a
// session of its own must not receive signals of the terminal.
bool IsLeaderOf(pid_t child) {
  return getsid(0) == getpid() && getsid(child) == getpid();
}

// Terminal signals reach the whole process group. Signals sent by the program to its group have reached the program,
// too.
bool HasReachedChild(const Event& event, pid_t child) {
  if (event.code <= 0) return event.sender == child;
  if (event.signal == SIGHUP || event.signal == SIGCONT) return !IsLeaderOf(child);
  constexpr std::array kOfTerminals = {SIGINT, SIGQUIT, SIGTSTP, SIGWINCH};
  return std::find(kOfTerminals.begin(), kOfTerminals.end(), event.signal) != kOfTerminals.end();
}

}  // namespace

absl::StatusOr<ProgramEnd> RunChildProgram(const std::string& path, const std::vector<std::string>& arguments,
                                           const std::vector<std::string>& environment) {
  const std::vector<char*> argv = Pointers(arguments);
  const std::vector<char*> envp = Pointers(environment);
  // Run a file without #! as a shell script, like execvp().
  std::vector<std::string> of_shell = {"sh", path};
  if (!arguments.empty()) of_shell.insert(of_shell.end(), arguments.begin() + 1, arguments.end());
  const std::vector<char*> shell_argv = Pointers(of_shell);
  int events[2];
  int failure[2];
  if (pipe2(events, O_CLOEXEC) != 0 || pipe2(failure, O_CLOEXEC) != 0) return absl::ErrnoToStatus(errno, "no pipe");
  events_read = events[0];
  const UniqueFd failure_end(failure[0]);
  UniqueFd failure_write(failure[1]);
  (void)fcntl(events[1], F_SETFL, O_NONBLOCK);
  event_pipe = events[1];

  // Signals arriving between fork() and execve() belong to the program.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  const Signals signals;
  const pid_t child = fork();
  if (child == 0) {
    signals.Restore();
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    execve(path.c_str(), argv.data(), envp.data());
    int error = errno;
    if (error == ENOEXEC) {
      execve("/bin/sh", shell_argv.data(), envp.data());
      error = errno;
    }
    (void)!write(failure[1], &error, sizeof error);
    _exit(126);
  }
  const int fork_error = errno;
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (child < 0) return absl::ErrnoToStatus(fork_error, "cannot start a process");
  failure_write.Reset();
  int error = 0;
  ssize_t got = 0;
  do {
    got = read(failure_end.get(), &error, sizeof error);
  } while (got < 0 && errno == EINTR);
  if (got == sizeof error) {
    (void)waitpid(child, nullptr, 0);
    return absl::FailedPreconditionError(absl::StrCat(path, ": ", std::strerror(error)));
  }
  for (std::optional<ProgramEnd> end = LookAt(child);; end = LookAt(child)) {
    if (end.has_value()) return *end;
    Event event = {};
    pollfd readable = {.fd = events_read, .events = POLLIN, .revents = 0};
    // Wait in poll(), not read(): ThreadSanitizer runs no handlers in read().
    while (poll(&readable, 1, -1) < 0 && errno == EINTR) {
    }
    got = read(events_read, &event, sizeof event);
    if (got != sizeof event) continue;
    if (event.signal == SIGCONT) ++continues_passed_on;
    if (event.signal != SIGCHLD && !HasReachedChild(event, child)) kill(child, event.signal);
  }
}

void EndBySignal(int signal) {
  prctl(PR_SET_DUMPABLE, 0);  // the program has already dumped core, if allowed
  struct sigaction action = {};
  action.sa_handler = SIG_DFL;
  sigaction(signal, &action, nullptr);
  sigset_t only;
  sigemptyset(&only);
  sigaddset(&only, signal);
  pthread_sigmask(SIG_UNBLOCK, &only, nullptr);
  kill(getpid(), signal);
}

}  // namespace vrambroker::vramctl
