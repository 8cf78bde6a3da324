// SPDX-License-Identifier: Apache-2.0
#ifndef VRAMBROKER_TESTS_SUPPORT_SHARED_COUNTERS_H_
#define VRAMBROKER_TESTS_SUPPORT_SHARED_COUNTERS_H_

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "allocator/base/unique_fd.h"

namespace vrambroker::testing_support {

// Maps counters that all processes with the same file share: the counts of a killed process are not lost. A new file
// holds zeros, which must be a valid value of T. Ends the process when the file cannot be opened or mapped.
template <typename T>
T* MapCounters(const std::string& path) {
  const UniqueFd fd(open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  void* memory = MAP_FAILED;
  if (fd.valid() && ftruncate(fd.get(), sizeof(T)) == 0) {
    memory = mmap(nullptr, sizeof(T), PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  }
  if (memory == MAP_FAILED) {
    std::perror(path.c_str());
    std::exit(1);
  }
  return static_cast<T*>(memory);
}

// Counters of clients that race for a common limit: test_client's "race".
struct RaceCounters {
  std::array<std::atomic<uint64_t>, 16> held;  // bytes, by client
  std::atomic<uint64_t> rounds;                // allocations of all clients
};

}  // namespace vrambroker::testing_support

#endif  // VRAMBROKER_TESTS_SUPPORT_SHARED_COUNTERS_H_
