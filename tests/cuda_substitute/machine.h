// SPDX-License-Identifier: Apache-2.0
//
// The substitute's machine: GPUs in shared memory, and each process's share of the GPUs.
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
inline constexpr int kHost = -1;  // stands for no device: such memory takes no bytes of a device

struct SharedState;

// Returns the options that MakeMachine() got.
MachineOptions OptionsOf(const std::string& folder);

// ProcessUse counts a process's contexts and memory on a device. Memory with several holders counts for the memory's
// owner; when the owner has gone, for the first holder.
struct ProcessUse {
  pid_t pid = 0;
  uint64_t bytes = 0;
};
// Returns the processes that use the device, each process once.
std::vector<ProcessUse> ProcessesOf(const std::string& folder, int device);

// Tells whether a thread of the process is in the middle of a call. While that thread is stopped, calls of all
// processes wait: unlike with the real driver, all processes of a machine share a lock.
bool HoldsLock(const std::string& folder, pid_t process);

// A process's hold on an allocation that the process made, or has open.
struct Hold {
  uint32_t allocation = 0;  // place in the machine's table
  uint32_t reference = 0;   // place in the machine's table
  uint64_t id = 0;          // the allocation's id; never used twice
  uint64_t bytes = 0;
  int device = 0;
};

// Machine is this process's part of a machine. The class is thread-safe. All state is in the machine's folder, under a
// lock that all processes share.
class Machine {
 public:
  // REQUIRES: MakeMachine() made `folder`. Aborts when the folder is not usable.
  explicit Machine(std::string folder);
  Machine(const Machine&) = delete;
  Machine& operator=(const Machine&) = delete;
  ~Machine();

  const MachineOptions& options() const;

  // Adds a context of this process on `device`. Returns false when there is no room for the context.
  bool AddContext(int device);
  // Removes a context: the context's bytes come back.
  void RemoveContext(int device);
  // Returns the used bytes, contexts included.
  uint64_t UsedBytes(int device);

  // Returns no hold when there is no room. `device` may be kHost.
  std::optional<Hold> Allocate(int device, uint64_t bytes);
  // Returns no hold when the owner has freed the allocation, or has gone.
  std::optional<Hold> Open(uint32_t allocation, uint64_t id);
  // Ends a hold. The bytes come back with the end of the last hold, unless an exported file holds the memory. `freed`
  // means that the owner frees the memory.
  void Release(const Hold& hold, bool freed);

  // Returns a file that holds the memory while any process has the file, or a copy of the descriptor, open.
  int Export(const Hold& hold);
  // Returns no hold for a file that Export() did not make.
  std::optional<Hold> Import(int fd);

  // Opens the memory as a file for reading and writing. The caller closes the file.
  int File(const Hold& hold) const;
  // REQUIRES: [offset, offset + bytes) lies within the allocation.
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
