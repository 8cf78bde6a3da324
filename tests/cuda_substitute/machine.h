// SPDX-License-Identifier: Apache-2.0
//
// The substitute's machine: GPUs in shared memory, and what every process has of them.
#ifndef VRAMBROKER_TESTS_CUDA_SUBSTITUTE_MACHINE_H_
#define VRAMBROKER_TESTS_CUDA_SUBSTITUTE_MACHINE_H_

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tests/cuda_substitute/substitute.h"

namespace vrambroker::cuda_substitute {

inline constexpr int kMaxDevices = 8;
inline constexpr int kHost = -1;  // in place of a device: memory that takes nothing of one

struct SharedState;

// As MakeMachine() was told.
MachineOptions OptionsOf(const std::string& folder);

// What a process uses of a device: its contexts and its memory. Memory that several hold is its owner's, and when the
// owner has gone the first one's.
struct ProcessUse {
  pid_t pid = 0;
  uint64_t bytes = 0;
};
// Those that use anything, each once.
std::vector<ProcessUse> ProcessesOf(const std::string& folder, int device);

// Whether a thread of the process is in the middle of a call. While that is stopped, calls of all others wait: unlike
// the driver, all processes of a machine share one lock.
bool HoldsLock(const std::string& folder, pid_t process);

// One process's hold on an allocation: it made it, or has it open.
struct Hold {
  uint32_t allocation = 0;  // place in the machine's table
  uint32_t reference = 0;   // likewise
  uint64_t id = 0;          // of the allocation; never used twice
  uint64_t bytes = 0;
  int device = 0;
};

// This process's part of a machine. Thread-safe. All state is in the machine's folder, under a lock of all processes.
class Machine {
 public:
  // `folder` is of MakeMachine(). Aborts when it cannot be used.
  explicit Machine(std::string folder);
  Machine(const Machine&) = delete;
  Machine& operator=(const Machine&) = delete;
  ~Machine();

  const MachineOptions& options() const;

  // One more context of this process on `device`. False: there is no room for it.
  bool AddContext(int device);
  // One less: its bytes come back.
  void RemoveContext(int device);
  // Contexts included.
  uint64_t UsedBytes(int device);

  // Nothing when there is no room. `device` may be kHost.
  std::optional<Hold> Allocate(int device, uint64_t bytes);
  // Nothing when the allocation was freed by its owner, or the owner has gone.
  std::optional<Hold> Open(uint32_t allocation, uint64_t id);
  // Ends one. The bytes come back when the last process has. `freed`: by the owner.
  void Release(const Hold& hold, bool freed);

  // A file that holds the memory while any process has it, or a copy of it, open.
  int Export(const Hold& hold);
  // Nothing for what is no such file.
  std::optional<Hold> Import(int fd);

  // The memory as a file, open for reading and writing. To be closed.
  int File(const Hold& hold) const;
  // [offset, offset + bytes) lies within the allocation.
  void Read(const Hold& hold, uint64_t offset, void* to, uint64_t bytes) const;
  void Write(const Hold& hold, uint64_t offset, const void* from, uint64_t bytes) const;
  void Fill(const Hold& hold, uint64_t offset, char byte, uint64_t bytes) const;

 private:
  const std::string folder_;
  SharedState* const state_;
  uint32_t self_ = 0;  // this process's place
};

}  // namespace vrambroker::cuda_substitute

#endif  // VRAMBROKER_TESTS_CUDA_SUBSTITUTE_MACHINE_H_
