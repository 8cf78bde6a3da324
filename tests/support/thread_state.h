// SPDX-License-Identifier: Apache-2.0
//
// Reads a thread's state from the kernel.
#ifndef VRAMBROKER_TESTS_SUPPORT_THREAD_STATE_H_
#define VRAMBROKER_TESTS_SUPPORT_THREAD_STATE_H_

#include <sys/types.h>

#include <fstream>
#include <string>

namespace vrambroker {

// Returns the state letter of /proc: 'S' waits, 'T' was stopped, 'Z' has ended. 0 means that there is no such thread.
// `process` is a process id.
inline char StateOfThread(const std::string& thread, const std::string& process) {
  std::ifstream file("/proc/" + process + "/task/" + thread + "/stat");
  std::string id, name;  // programs of tests have no space in the name
  char state = 0;
  file >> id >> name >> state;
  return state;
}
// Returns the state of a thread of this process.
inline char StateOfThread(pid_t thread) {
  return StateOfThread(std::to_string(thread), "self");
}

}  // namespace vrambroker

#endif  // VRAMBROKER_TESTS_SUPPORT_THREAD_STATE_H_
