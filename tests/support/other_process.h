// SPDX-License-Identifier: Apache-2.0
//
// Child processes that continue in the code of a test, if need be as other users. The functions are for tests without
// threads and without CUDA: a child of a process that has called the driver cannot use the driver.
#ifndef VRAMBROKER_TESTS_SUPPORT_OTHER_PROCESS_H_
#define VRAMBROKER_TESTS_SUPPORT_OTHER_PROCESS_H_

#include <gtest/gtest.h>
#include <linux/capability.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <cstdint>
#include <functional>

namespace vrambroker::testing_support {

inline constexpr uid_t kNobody = 65534;
inline constexpr uid_t kOther = 54321;

// Runs `body` in a child process, as `uid` with only these capabilities; returns the process id.
inline pid_t RunAs(uid_t uid, uint64_t capabilities, const std::function<void()>& body) {
  const pid_t child = fork();
  if (child != 0) return child;
  __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3, .pid = 0};
  std::array<__user_cap_data_struct, 2> sets = {};
  sets[0].effective = sets[0].permitted = static_cast<uint32_t>(capabilities);
  sets[1].effective = sets[1].permitted = static_cast<uint32_t>(capabilities >> 32);
  if (prctl(PR_SET_KEEPCAPS, 1) != 0 || setresgid(uid, uid, uid) != 0 || setresuid(uid, uid, uid) != 0 ||
      syscall(SYS_capset, &header, sets.data()) != 0 || prctl(PR_SET_DUMPABLE, 1) != 0) {
    _exit(100);
  }
  body();
  _exit(0);
}

// A child process that runs `body`. The constructor returns when `body` has called IsReady().
class Child {
 public:
  explicit Child(const std::function<void()>& body) {
    std::array<int, 2> pipe_fds = {};
    EXPECT_EQ(pipe(pipe_fds.data()), 0);
    pid_ = fork();
    if (pid_ == 0) {
      ready = pipe_fds[1];
      body();
      _exit(0);
    }
    close(pipe_fds[1]);
    char byte = 0;
    EXPECT_EQ(read(pipe_fds[0], &byte, 1), 1) << "the child has ended before it was ready";
    close(pipe_fds[0]);
  }
  ~Child() {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  pid_t pid() const { return pid_; }

  // The body calls IsReady() when the child is ready.
  static void IsReady() { (void)!write(ready, "r", 1); }
  // The body calls Stay() to report the child ready, and to keep the child's state until the end.
  static void Stay() {
    IsReady();
    for (;;) pause();
  }

 private:
  static inline int ready = -1;
  pid_t pid_ = -1;
};

}  // namespace vrambroker::testing_support

#endif  // VRAMBROKER_TESTS_SUPPORT_OTHER_PROCESS_H_
