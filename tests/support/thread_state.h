// SPDX-License-Identifier: Apache-2.0
//
// What the kernel says about a thread of this process.
#ifndef VRAMBROKER_TESTS_SUPPORT_THREAD_STATE_H_
#define VRAMBROKER_TESTS_SUPPORT_THREAD_STATE_H_

#include <sys/types.h>

#include <fstream>
#include <string>

namespace vrambroker {

// As in /proc: 'S' waits for something, 'Z' has ended. 0: there is no such thread.
inline char StateOfThread(pid_t thread) {
  std::ifstream file("/proc/self/task/" + std::to_string(thread) + "/stat");
  std::string id, name;  // of programs whose name has no space, as tests have
  char state = 0;
  file >> id >> name >> state;
  return state;
}

}  // namespace vrambroker

#endif  // VRAMBROKER_TESTS_SUPPORT_THREAD_STATE_H_
