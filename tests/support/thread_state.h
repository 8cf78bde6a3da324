// SPDX-License-Identifier: Apache-2.0
//
// What the kernel says about a thread.
#ifndef VRAMBROKER_TESTS_SUPPORT_THREAD_STATE_H_
#define VRAMBROKER_TESTS_SUPPORT_THREAD_STATE_H_

#include <sys/types.h>

#include <fstream>
#include <string>

namespace vrambroker {

// As in /proc: 'S' waits for something, 'T' was stopped, 'Z' has ended. 0: there is no such thread. `process`: its pid.
inline char StateOfThread(const std::string& thread, const std::string& process) {
  std::ifstream file("/proc/" + process + "/task/" + thread + "/stat");
  std::string id, name;  // of programs whose name has no space, as tests have
  char state = 0;
  file >> id >> name >> state;
  return state;
}
// Of this process.
inline char StateOfThread(pid_t thread) {
  return StateOfThread(std::to_string(thread), "self");
}

}  // namespace vrambroker

#endif  // VRAMBROKER_TESTS_SUPPORT_THREAD_STATE_H_
