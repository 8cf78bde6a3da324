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

// The program gets these when this process does. Not here: what cannot be caught, what writing to a
// closed pipe or a fault causes (SIGPIPE, SIGSEGV and the like), and SIGTTIN and SIGTTOU, which the terminal sends to
// both.
std::vector<int> PassedOn() {
  std::vector<int> signals = {SIGINT,  SIGTERM, SIGHUP,    SIGQUIT, SIGUSR1, SIGUSR2, SIGWINCH, SIGCONT, SIGTSTP,
                              SIGALRM, SIGABRT, SIGVTALRM, SIGPROF, SIGXCPU, SIGURG,  SIGIO,    SIGPWR};
  for (int signal = SIGRTMIN; signal <= SIGRTMAX; ++signal) signals.push_back(signal);
  return signals;
}

struct Event {
  int signal;
  int code;      // si_code: where it comes from
  pid_t sender;  // of one that a process has sent
};

// Never closed: the handlers stay.
int event_pipe = -1;
int events_read = -1;
std::atomic<unsigned> continues = 0;  // how often this process got SIGCONT
unsigned continues_passed_on = 0;     // of these

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

// Handlers of this process, and what the program is to have in their place. Threads of gRPC may get the signals, so
// blocking them would not do.
class Signals {
 public:
  Signals() {
    const struct sigaction handler = Handler();
    for (const int signal : PassedOn()) {
      struct sigaction before = {};
      sigaction(signal, nullptr, &before);
      if (before.sa_handler == SIG_IGN) continue;  // as nohup does: the program ignores it, too
      sigaction(signal, &handler, nullptr);
      handled_.push_back(signal);
    }
    sigaction(SIGCHLD, &handler, &child_);
  }

  // In the child, before it becomes the program. No allocation.
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

// This process stops as its program has, so that the shell sees the job stopped. Where nobody could continue it, as
// without a shell's job control, the kernel does nothing. Nor does this where it has been continued meanwhile, which
// the program is told next: it would stop for good.
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
  raise(SIGTSTP);  // pending, until a SIGCONT takes it away
  action.sa_handler = SIG_IGN;
  if (continues != continues_passed_on) sigaction(SIGTSTP, &action, nullptr);  // it is pending no more
  pthread_sigmask(SIG_UNBLOCK, &only, nullptr);
  sigaction(SIGTSTP, &before, nullptr);
}

// A shell with job control waits for it, and has left the terminal to it.
bool IsJobInForeground() {
  if (getpgrp() != getpid()) return false;  // a script's
  const UniqueFd terminal(open("/dev/tty", O_RDONLY | O_NOCTTY | O_CLOEXEC));
  return terminal.valid() && tcgetpgrp(terminal.get()) == getpgrp();
}

// What has happened to the program by now; nullopt: it has not ended.
std::optional<ProgramEnd> LookAt(pid_t child) {
  for (;;) {
    siginfo_t info = {};
    if (waitid(P_PID, static_cast<id_t>(child), &info, WEXITED | WSTOPPED | WNOHANG) != 0) {
      if (errno == EINTR) continue;
      return ProgramEnd{};  // nobody else waits for it: it is not to be
    }
    if (info.si_pid == 0) return std::nullopt;
    if (info.si_code == CLD_EXITED) return ProgramEnd{.exit_code = info.si_status};
    if (info.si_code == CLD_KILLED || info.si_code == CLD_DUMPED) {
      return ProgramEnd{.exit_code = 128 + info.si_status, .signal = info.si_status};
    }
    // Who sends SIGSTOP means the program alone, and continues it alone. But a shell that waits for its job gets its
    // terminal back only if that stops, and continues it with `fg`.
    if (info.si_status != SIGSTOP || IsJobInForeground()) StopAsWell();
  }
}

// A terminal that hangs up tells the leader of its session alone, and leaves the rest to the leader. A program that has
// gone into a session of its own wants to hear nothing of the terminal.
bool IsLeaderOf(pid_t child) {
  return getsid(0) == getpid() && getsid(child) == getpid();
}

// The terminal sends it to the whole process group, and a program that signals its group does, too.
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
  // A file without #! is a script of the shell's, as for execvp().
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

  // A signal that comes between fork() and execve() is the program's.
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
    // Not read(): ThreadSanitizer runs no handler in it.
    while (poll(&readable, 1, -1) < 0 && errno == EINTR) {
    }
    got = read(events_read, &event, sizeof event);
    if (got != sizeof event) continue;
    if (event.signal == SIGCONT) ++continues_passed_on;
    if (event.signal != SIGCHLD && !HasReachedChild(event, child)) kill(child, event.signal);
  }
}

void EndBySignal(int signal) {
  prctl(PR_SET_DUMPABLE, 0);  // the program has left a core, if there is to be one
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
