// SPDX-License-Identifier: Apache-2.0
#include "server/base/memory_trim.h"

#include <malloc.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>

namespace vrambroker {
namespace {

// Resident memory of the process now, without shared memory: segments, libraries. 0 when /proc is unreadable.
uint64_t PrivateBytes() {
  std::ifstream statm("/proc/self/statm");
  uint64_t size = 0;
  uint64_t resident = 0;
  uint64_t shared = 0;
  if (!(statm >> size >> resident >> shared)) return 0;
  return (resident - std::min(resident, shared)) * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
}

}  // namespace

bool MemoryTrim::Look() {
  const uint64_t now = PrivateBytes();
  least_bytes_ = std::min(least_bytes_, now);
  if (now - least_bytes_ >= kGrowthBytes) {
    looks_left_ = kMoreLooks;
  } else if (looks_left_ == 0) {
    return false;
  } else {
    --looks_left_;
  }
  malloc_trim(0);
  least_bytes_ = PrivateBytes();
  return true;
}

}  // namespace vrambroker
