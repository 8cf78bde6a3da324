// SPDX-License-Identifier: Apache-2.0
#include "tests/cuda_substitute/machine.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace vrambroker::cuda_substitute {
namespace {

constexpr uint32_t kMaxProcesses = 4096;
constexpr uint32_t kMaxAllocations = 1 << 16;
constexpr uint32_t kMaxReferences = 1 << 18;

struct Process {
  pid_t pid;  // the value 0 marks a free place
  uint64_t start_time;
  uint32_t contexts[kMaxDevices];
};

struct Allocation {
  uint64_t id;  // the value 0 marks a free place
  uint64_t bytes;
  int device;           // a device, or kHost
  uint32_t owner;       // a process
  bool freed;           // the owner has freed the allocation
  bool exported;        // a file may hold the allocation, too
  uint32_t references;  // number of holds
};

struct Reference {
  uint64_t id;  // an allocation's id; the value 0 marks a free place
  uint32_t process;
  uint32_t allocation;
};

[[noreturn]] void Die(const std::string& what) {
  std::fprintf(stderr, "CUDA substitute: %s: %s\n", what.c_str(), std::strerror(errno));
  std::abort();
}

// Returns the start time of a process; 0 when the process has gone. Start times tell apart processes that had the same
// number.
uint64_t StartTime(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::ostringstream whole;
  whole << file.rdbuf();  // an iterator would throw where the process goes between the two calls
  const std::string text = whole.str();
  const size_t name_end = text.rfind(')');
  if (name_end == std::string::npos || name_end + 2 >= text.size()) return 0;
  char state = 0;
  unsigned long start = 0;  // NOLINT(google-runtime-int): sscanf's type
  // Field 3 is the state, field 22 the start time.
  if (std::sscanf(text.c_str() + name_end + 2,
                  "%c %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %lu", &state,
                  &start) != 2) {
    return 0;
  }
  return state == 'Z' || state == 'X' ? 0 : start;
}

}  // namespace

// The state begins as zeros, except for the fields that MakeMachine() sets. A search in a table begins where the last
// search ended.
struct SharedState {
  pthread_mutex_t mu;
  MachineOptions options;
  uint64_t last_id;
  uint64_t used[kMaxDevices];
  uint32_t only_as_files;  // allocations that only an exported file holds
  uint32_t next_process;
  uint32_t next_allocation;
  uint32_t next_reference;
  Process processes[kMaxProcesses];
  Allocation allocations[kMaxAllocations];
  Reference references[kMaxReferences];
};

namespace {

SharedState* Map(const std::string& folder, int flags) {
  const std::string path = folder + "/state";
  const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC | flags, 0666);
  if (fd < 0) Die("no machine in " + folder);
  if (flags != 0 && (fchmod(fd, 0666) != 0 || ftruncate(fd, sizeof(SharedState)) != 0)) Die("setting up " + path);
  void* memory = mmap(nullptr, sizeof(SharedState), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  if (memory == MAP_FAILED) Die("mapping " + path);
  return static_cast<SharedState*>(memory);
}

std::string FileOf(const std::string& folder, uint64_t id) {
  return folder + "/" + std::to_string(id);
}

// Opens the memory of an allocation. The first use makes the file: most memory is never used. Returns -1 before the
// first use.
int TryOpenFile(const std::string& folder, uint64_t id) {
  const int fd = open(FileOf(folder, id).c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0 && errno != ENOENT) Die("memory " + FileOf(folder, id));
  return fd;
}

// REQUIRES: the machine's lock is held.
int OpenFile(const std::string& folder, uint64_t id, uint64_t bytes) {
  if (const int fd = TryOpenFile(folder, id); fd >= 0) return fd;
  // New memory is not cleared, like the driver's memory. The file has another name at first: a process that finds the
  // file finds the whole file.
  const std::string name = FileOf(folder, id) + ".new";
  const int fd = open(name.c_str(), O_RDWR | O_CLOEXEC | O_CREAT | O_TRUNC, 0666);
  const std::string some(std::min<uint64_t>(bytes, 4096), '\xA5');
  const auto last = static_cast<off_t>(bytes - some.size());
  if (fd < 0 || fchmod(fd, 0666) != 0 || ftruncate(fd, static_cast<off_t>(bytes)) != 0 ||
      pwrite(fd, some.data(), some.size(), 0) < 0 || pwrite(fd, some.data(), some.size(), last) < 0 ||
      rename(name.c_str(), FileOf(folder, id).c_str()) != 0) {
    Die("memory " + FileOf(folder, id));
  }
  return fd;
}

// Adds to the used bytes of a device; negative numbers, modulo 2^64, subtract. Memory of the host does not count.
void Count(SharedState* state, int device, uint64_t bytes) {
  if (device != kHost) state->used[device] += bytes;
}

// Tells whether any process has an exported file open: a lock covers the file and all copies of the descriptor.
bool IsOpenSomewhere(const std::string& folder, uint64_t id) {
  const int fd = TryOpenFile(folder, id);
  if (fd < 0) return false;  // the exporting process has gone
  const bool locked = flock(fd, LOCK_EX | LOCK_NB) != 0;
  close(fd);
  return locked;
}

// Frees memory without a reference, unless a file holds the memory. Returns true when a file does.
bool IsOnlyAFile(const std::string& folder, Allocation& allocation) {
  if (allocation.exported && IsOpenSomewhere(folder, allocation.id)) return true;
  (void)unlink(FileOf(folder, allocation.id).c_str());
  allocation.id = 0;
  return false;
}

// Recounts the totals and the counts from the references. Memory without a holder goes.
void Recount(SharedState* state, const std::string& folder) {
  for (Allocation& allocation : state->allocations) allocation.references = 0;
  for (const Reference& reference : state->references) {
    if (reference.id != 0) ++state->allocations[reference.allocation].references;
  }
  std::fill(std::begin(state->used), std::end(state->used), 0);
  state->only_as_files = 0;
  for (Allocation& allocation : state->allocations) {
    if (allocation.id == 0) continue;
    if (allocation.references == 0) {
      if (!IsOnlyAFile(folder, allocation)) continue;
      ++state->only_as_files;
    }
    Count(state, allocation.device, allocation.bytes);
  }
  for (const Process& process : state->processes) {
    if (process.pid == 0) continue;
    for (int device = 0; device < kMaxDevices; ++device) {
      state->used[device] += process.contexts[device] * state->options.context_bytes;
    }
  }
}

// Gives back the memory of processes that have ended, and of exported files that were closed, like the driver.
void Bury(SharedState* state, const std::string& folder) {
  std::vector<bool> gone(kMaxProcesses);
  bool any = false;
  for (uint32_t i = 0; i < kMaxProcesses; ++i) {
    Process& process = state->processes[i];
    if (process.pid == 0 || StartTime(process.pid) == process.start_time) continue;
    process = {};
    gone[i] = any = true;
  }
  if (!any && state->only_as_files == 0) return;
  for (Reference& reference : state->references) {
    if (reference.id != 0 && gone[reference.process]) reference = {};
  }
  for (Allocation& allocation : state->allocations) {
    if (allocation.id != 0 && gone[allocation.owner]) allocation.freed = true;
  }
  Recount(state, folder);
}

class Lock {
 public:
  Lock(SharedState* state, const std::string& folder) : state_(state) {
    if (pthread_mutex_lock(&state_->mu) != EOWNERDEAD) return;
    // A process was killed in the middle of a change.
    pthread_mutex_consistent(&state_->mu);
    Recount(state_, folder);
  }
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;
  ~Lock() { pthread_mutex_unlock(&state_->mu); }

 private:
  SharedState* const state_;
};

template <typename Entry, size_t kSize, typename IsFree>
uint32_t FindFree(Entry (&table)[kSize], uint32_t& next, const IsFree& is_free) {
  for (size_t tried = 0; tried < kSize; ++tried) {
    const uint32_t place = next++ % kSize;
    if (is_free(table[place])) return place;
  }
  errno = ENOSPC;
  Die("a table of the machine is full");
}

uint32_t AddReference(SharedState* state, uint32_t process, uint32_t allocation) {
  const uint32_t place =
      FindFree(state->references, state->next_reference, [](const Reference& reference) { return reference.id == 0; });
  state->references[place] = {.id = state->allocations[allocation].id, .process = process, .allocation = allocation};
  ++state->allocations[allocation].references;
  return place;
}

// Tells whether there is room for `bytes`. Before a refusal, gives back the memory of processes that have ended.
bool HasRoom(SharedState* state, const std::string& folder, int device, uint64_t bytes) {
  if (device == kHost) return true;
  const auto fits = [&] {
    return bytes <= state->options.device_bytes && state->used[device] <= state->options.device_bytes - bytes;
  };
  if (fits()) return true;
  Bury(state, folder);
  return fits();
}

}  // namespace

void MakeMachine(const std::string& folder, const MachineOptions& options) {
  SharedState* state = Map(folder, O_CREAT | O_EXCL);
  state->options = options;
  pthread_mutexattr_t attributes;
  pthread_mutexattr_init(&attributes);
  pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
  pthread_mutex_init(&state->mu, &attributes);
  pthread_mutexattr_destroy(&attributes);
  munmap(state, sizeof *state);
}

MachineOptions OptionsOf(const std::string& folder) {
  SharedState* state = Map(folder, 0);
  const MachineOptions options = state->options;
  munmap(state, sizeof *state);
  return options;
}

uint64_t UsedBytes(const std::string& folder, int device) {
  SharedState* state = Map(folder, 0);
  uint64_t bytes = 0;
  {
    const Lock lock(state, folder);
    Bury(state, folder);
    bytes = state->used[device];
  }
  munmap(state, sizeof *state);
  return bytes;
}

bool HoldsLock(const std::string& folder, pid_t process) {
  SharedState* state = Map(folder, 0);
  // The first word of a robust mutex has the number of the thread that holds the mutex: see "robust futexes" in the
  // kernel's documentation.
  const int thread = __atomic_load_n(&state->mu.__data.__lock, __ATOMIC_ACQUIRE) & FUTEX_TID_MASK;
  munmap(state, sizeof *state);
  return thread != 0 &&
         access(("/proc/" + std::to_string(process) + "/task/" + std::to_string(thread)).c_str(), F_OK) == 0;
}

std::vector<ProcessUse> ProcessesOf(const std::string& folder, int device) {
  SharedState* state = Map(folder, 0);
  std::map<pid_t, uint64_t> uses;
  {
    const Lock lock(state, folder);
    Bury(state, folder);
    std::map<uint32_t, uint32_t> holders;  // key: an allocation; value: a process
    for (const Reference& reference : state->references) {
      if (reference.id == 0) continue;
      const auto [it, first] = holders.emplace(reference.allocation, reference.process);
      if (!first && reference.process == state->allocations[reference.allocation].owner) it->second = reference.process;
    }
    for (const auto& [allocation, process] : holders) {
      if (state->allocations[allocation].device != device) continue;
      uses[state->processes[process].pid] += state->allocations[allocation].bytes;
    }
    for (const Process& process : state->processes) {
      if (process.pid == 0 || process.contexts[device] == 0) continue;
      uses[process.pid] += process.contexts[device] * state->options.context_bytes;
    }
  }
  munmap(state, sizeof *state);
  std::vector<ProcessUse> result;
  for (const auto& [pid, bytes] : uses) result.push_back({.pid = pid, .bytes = bytes});
  return result;
}

Machine::Machine(std::string folder) : folder_(std::move(folder)), state_(Map(folder_, 0)) {
  const Lock lock(state_, folder_);
  Bury(state_, folder_);
  self_ = FindFree(state_->processes, state_->next_process, [](const Process& process) { return process.pid == 0; });
  state_->processes[self_] = {.pid = getpid(), .start_time = StartTime(getpid()), .contexts = {}};
}

Machine::~Machine() {
  munmap(state_, sizeof *state_);
}

const MachineOptions& Machine::options() const {
  return state_->options;
}

bool Machine::AddContext(int device) {
  const Lock lock(state_, folder_);
  if (!HasRoom(state_, folder_, device, state_->options.context_bytes)) return false;
  ++state_->processes[self_].contexts[device];
  Count(state_, device, state_->options.context_bytes);
  return true;
}

void Machine::RemoveContext(int device) {
  const Lock lock(state_, folder_);
  --state_->processes[self_].contexts[device];
  Count(state_, device, -state_->options.context_bytes);
}

uint64_t Machine::UsedBytes(int device) {
  const Lock lock(state_, folder_);
  Bury(state_, folder_);
  return state_->used[device];
}

std::optional<Hold> Machine::Allocate(int device, uint64_t bytes) {
  const Lock lock(state_, folder_);
  if (!HasRoom(state_, folder_, device, bytes)) return std::nullopt;
  Hold hold{.id = ++state_->last_id, .bytes = bytes, .device = device};
  hold.allocation = FindFree(state_->allocations, state_->next_allocation,
                             [](const Allocation& allocation) { return allocation.id == 0; });
  state_->allocations[hold.allocation] = {.id = hold.id,
                                          .bytes = bytes,
                                          .device = device,
                                          .owner = self_,
                                          .freed = false,
                                          .exported = false,
                                          .references = 0};
  Count(state_, device, bytes);
  hold.reference = AddReference(state_, self_, hold.allocation);
  return hold;
}

std::optional<Hold> Machine::Open(uint32_t allocation, uint64_t id) {
  const Lock lock(state_, folder_);
  Bury(state_, folder_);
  if (allocation >= kMaxAllocations || id == 0) return std::nullopt;
  const Allocation& found = state_->allocations[allocation];
  if (found.id != id || found.freed) return std::nullopt;
  return Hold{.allocation = allocation,
              .reference = AddReference(state_, self_, allocation),
              .id = id,
              .bytes = found.bytes,
              .device = found.device};
}

void Machine::Release(const Hold& hold, bool freed) {
  const Lock lock(state_, folder_);
  state_->references[hold.reference] = {};
  Allocation& allocation = state_->allocations[hold.allocation];
  if (freed) allocation.freed = true;
  if (--allocation.references > 0) return;
  if (IsOnlyAFile(folder_, allocation)) {
    ++state_->only_as_files;
  } else {
    Count(state_, allocation.device, -allocation.bytes);
  }
}

int Machine::Export(const Hold& hold) {
  const Lock lock(state_, folder_);
  state_->allocations[hold.allocation].exported = true;
  const int fd = OpenFile(folder_, hold.id, hold.bytes);
  if (flock(fd, LOCK_SH) != 0) Die("locking an exported file");
  return fd;
}

std::optional<Hold> Machine::Import(int fd) {
  const Lock lock(state_, folder_);
  struct stat given = {};
  if (fstat(fd, &given) != 0) return std::nullopt;
  for (uint32_t i = 0; i < kMaxAllocations; ++i) {
    const Allocation& allocation = state_->allocations[i];
    struct stat file = {};
    if (allocation.id == 0 || !allocation.exported || stat(FileOf(folder_, allocation.id).c_str(), &file) != 0)
      continue;
    if (file.st_dev != given.st_dev || file.st_ino != given.st_ino) continue;
    if (allocation.references == 0) --state_->only_as_files;
    return Hold{.allocation = i,
                .reference = AddReference(state_, self_, i),
                .id = allocation.id,
                .bytes = allocation.bytes,
                .device = allocation.device};
  }
  return std::nullopt;
}

int Machine::File(const Hold& hold) const {
  if (const int fd = TryOpenFile(folder_, hold.id); fd >= 0) return fd;
  const Lock lock(state_, folder_);
  return OpenFile(folder_, hold.id, hold.bytes);
}

void Machine::Read(const Hold& hold, uint64_t offset, void* to, uint64_t bytes) const {
  const int fd = File(hold);
  for (uint64_t done = 0; done < bytes;) {
    const ssize_t n = pread(fd, static_cast<char*>(to) + done, bytes - done, static_cast<off_t>(offset + done));
    if (n <= 0) Die("reading memory");
    done += static_cast<uint64_t>(n);
  }
  close(fd);
}

void Machine::Write(const Hold& hold, uint64_t offset, const void* from, uint64_t bytes) const {
  const int fd = File(hold);
  for (uint64_t done = 0; done < bytes;) {
    const ssize_t n =
        pwrite(fd, static_cast<const char*>(from) + done, bytes - done, static_cast<off_t>(offset + done));
    if (n <= 0) Die("writing memory");
    done += static_cast<uint64_t>(n);
  }
  close(fd);
}

void Machine::Fill(const Hold& hold, uint64_t offset, char byte, uint64_t bytes) const {
  if (bytes == 0) return;
  if (byte == 0) {  // a hole in a file reads as zeros, and takes no memory
    const int fd = File(hold);
    if (fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
                  static_cast<off_t>(bytes)) != 0) {
      Die("clearing memory");
    }
    close(fd);
    return;
  }
  const std::vector<char> content(bytes, byte);
  Write(hold, offset, content.data(), bytes);
}

}  // namespace vrambroker::cuda_substitute
