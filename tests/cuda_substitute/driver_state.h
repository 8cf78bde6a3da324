// SPDX-License-Identifier: Apache-2.0
//
// The state of the substitute's driver in this process: devices, contexts, memory, streams and captures. Every function
// of the driver goes through the calls below.
#ifndef VRAMBROKER_TESTS_CUDA_SUBSTITUTE_DRIVER_STATE_H_
#define VRAMBROKER_TESTS_CUDA_SUBSTITUTE_DRIVER_STATE_H_

#include <cuda.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tests/cuda_substitute/devices.h"
#include "tests/cuda_substitute/faults.h"
#include "tests/cuda_substitute/machine.h"
#include "tests/cuda_substitute/substitute.h"

namespace vrambroker::cuda_substitute {

using Clock = std::chrono::steady_clock;

constexpr size_t kGranule = size_t{2} << 20;  // the unit of device memory
constexpr int kMaxContexts = 1024;            // limits a device's contexts in the life of a process
constexpr int kNoContext = -1;
// Types of locations that the headers may not know. Newer CUDA may bring more types: kLaterLocation stands for all
// newer types.
constexpr int kDeviceLocalityDomain = 6;  // CUDA 13.4 brought the type
constexpr int kLaterLocation = 7;
constexpr int kLocalityDomains = 2;  // number per device
constexpr uint64_t kHandleMark = 0x76726d6275696463;

// A node of a graph takes memory, or frees memory.
struct GraphNode {
  char* address = nullptr;
  bool frees = false;
};

struct StreamState {
  int context = 0;
  bool blocking = true;  // the stream and the default stream wait for each other
  CUstreamCaptureStatus capture = CU_STREAM_CAPTURE_STATUS_NONE;
  CUstreamCaptureMode capture_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
  std::thread::id capture_thread;  // the thread that began the capture
  std::vector<GraphNode> captured;
  Clock::time_point busy_until;
  uint64_t host_function = 0;  // the last queued function

  bool capturing() const { return capture != CU_STREAM_CAPTURE_STATUS_NONE; }
  void Invalidate() { capture = CU_STREAM_CAPTURE_STATUS_INVALIDATED; }
};

struct EventState {
  int context = 0;
  bool captured = false;
  CUstream captured_on = nullptr;
  Clock::time_point done_at;
};

// The content of a CUipcMemHandle.
struct Handle {
  uint64_t mark;
  uint64_t id;
  uint32_t allocation;
  pid_t exporter;
  uid_t user;
};
static_assert(sizeof(Handle) <= sizeof(CUipcMemHandle));

inline char* PointerTo(CUdeviceptr address) {
  return reinterpret_cast<char*>(static_cast<uintptr_t>(address));
}
inline CUdeviceptr AddressOf(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer);
}

enum class Kind {
  kAllocated,  // memory of cuMemAlloc()
  kManaged,
  kOpened,  // memory of another process
  kMapped,  // memory of cuMemMap()
  kPool,    // a block of a pool
  kGraph,   // memory of a graph's node
};

// Device memory in this process: addresses that the CPU may not touch, except for managed memory.
struct Mapping {
  Hold hold;
  Kind kind = Kind::kAllocated;
  int context = kNoContext;  // the mapping ends with this context
  uint64_t bytes = 0;
  uint32_t opens = 0;  // counts opens of kOpened
  bool accessible = true;
};

// A context is a number: the number modulo kMaxDevices is the context's device. A device's first context is the primary
// context.
inline int DeviceOf(int context) {
  return context % kMaxDevices;
}
inline bool IsPrimary(int context) {
  return context < kMaxDevices;
}
// Returns the handle that applications see: never null.
inline CUcontext ContextOf(int context) {
  return reinterpret_cast<CUcontext>(static_cast<intptr_t>(context + 1));
}
inline int NumberOf(CUcontext context) {
  return static_cast<int>(reinterpret_cast<intptr_t>(context)) - 1;
}

struct ThreadState {
  std::vector<int> contexts;  // the thread's stack
  CUstreamCaptureMode capture_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
};

inline ThreadState& Thread() {
  thread_local ThreadState state;
  return state;
}

// REQUIRES, for both functions: the thread has a context.
inline int CurrentContext() {
  return Thread().contexts.back();
}
inline int CurrentDevice() {
  return DeviceOf(CurrentContext());
}

// Returns a page that holds a 1, which children see as 0; null where the kernel cannot clear the page in children.
inline const volatile char* PageNotInherited() {
  const size_t bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  void* const page = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED) return nullptr;
  if (madvise(page, bytes, MADV_WIPEONFORK) != 0) {
    munmap(page, bytes);
    return nullptr;
  }
  *static_cast<char*>(page) = 1;
  return static_cast<char*>(page);
}

// Returns `bytes`, or the largest number of 32 bits.
inline unsigned int In32Bits(size_t bytes) {
  return static_cast<unsigned int>(std::min<size_t>(bytes, UINT32_MAX));
}

inline uint64_t RoundUp(uint64_t bytes, uint64_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

class Driver;

// ---- Functions of other files. REQUIRES, except for AfterSynchronize(): the driver's lock is held ----

// Ends a context's arrays.
void EndArrays(Driver& driver, int context);
// Unmaps the memory that is mapped into an array.
void UnmapTiles(Driver& driver, const void* array);
// Returns the pool allocation that contains `address`.
std::optional<std::pair<char*, uint64_t>> PoolAllocationAt(Driver& driver, const char* address);
// Frees memory of cuMemAllocAsync() when the work of `stream` is done; without a stream, at once. Returns false when
// there is no such allocation.
bool FreeInPool(Driver& driver, const char* address, const StreamState* stream);
// Does the same for memory that the launch of a graph took.
bool FreeOfGraph(Driver& driver, char* address, const StreamState* stream);
// Note the call in the stream's capture.
CUresult CaptureAllocation(Driver& driver, CUdeviceptr* address, size_t bytes, int device, StreamState& stream);
CUresult CaptureFree(Driver& driver, char* address, StreamState& stream);
// Gives back memory that the pools need not keep.
void AfterSynchronize(Driver& driver);

class Driver {
 public:
  // The driver is never destroyed: threads of the process may call until the process's very end.
  static Driver& Get() {
    static auto* const driver = new Driver;
    return *driver;
  }

  Faults& faults() { return faults_; }
  std::mutex& mu() { return mu_; }
  Machine* machine() { return machine_.get(); }  // null: there is no GPU
  // Tells whether this process is a child of a process that has called cuInit(). Every call asks, so the answer costs
  // no system call where the kernel can clear a page in children (MADV_WIPEONFORK).
  bool forked() const {
    if (pid_ == 0) return false;
    return own_page_ != nullptr ? *own_page_ == 0 : pid_ != getpid();
  }
  // Returns the machine's driver version, also before cuInit().
  int version() const {
    const std::string folder = Folder();
    return folder.empty() ? MachineOptions().driver_version : OptionsOf(folder).driver_version;
  }
  // Starts the driver for cuInit(). Calls before cuInit() do not keep children from using CUDA.
  void Start() {
    const std::lock_guard<std::mutex> lock(mu_);
    if (pid_ != 0) return;
    const std::string folder = Folder();
    if (folder.empty()) return;
    machine_ = std::make_unique<Machine>(folder);
    devices_ = VisibleDevices(machine_->options().devices);
    own_page_ = PageNotInherited();
    pid_ = getpid();
  }
  std::atomic<bool>& initialized() { return initialized_; }  // cuInit() was called
  std::atomic<bool>& has_context(int context) { return has_context_.at(static_cast<size_t>(context)); }
  // Tells whether `context` is a device's primary context, or a living context beside the primary context.
  bool IsContext(int context) {
    return context >= 0 && context < kMaxDevices * kMaxContexts && IsDevice(DeviceOf(context)) &&
           (IsPrimary(context) || has_context(context));
  }
  const std::vector<int>& devices() const { return devices_; }
  int Physical(int device) const { return devices_[static_cast<size_t>(device)]; }
  // Returns the ordinal of a physical device; -1 for a device that this process does not see, and for kHost.
  int Ordinal(int physical) const {
    const auto it = std::find(devices_.begin(), devices_.end(), physical);
    return it == devices_.end() ? -1 : static_cast<int>(it - devices_.begin());
  }
  bool IsDevice(int device) const { return device >= 0 && static_cast<size_t>(device) < devices_.size(); }

  // ---- REQUIRES, for all functions below: mu() is held ----

  // Reserves addresses for device memory.
  char* Reserve(size_t bytes, size_t alignment = kGranule) {
    // A real driver's addresses have this alignment.
    char* const all = static_cast<char*>(
        mmap(nullptr, bytes + alignment, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (all == MAP_FAILED) std::abort();
    const size_t before = RoundUp(reinterpret_cast<uintptr_t>(all), alignment) - reinterpret_cast<uintptr_t>(all);
    if (before > 0) munmap(all, before);
    if (before < alignment) munmap(all + before + bytes, alignment - before);
    return all + before;
  }
  // Reserves addresses of 32 bits.
  static char* ReserveLow(size_t bytes) {
    for (uintptr_t at = uintptr_t{256} << 20; at + bytes < uintptr_t{2047} << 20; at += kGranule) {
      void* const wanted = reinterpret_cast<void*>(at);
      void* const got =
          mmap(wanted, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
      if (got == wanted) return static_cast<char*>(got);
      if (got != MAP_FAILED) munmap(got, bytes);
    }
    std::abort();
  }
  char* Map(const Hold& hold, Kind kind, int context) {
    char* const address = Reserve(hold.bytes);
    MapAt(address, hold, kind, context);
    return address;
  }
  // Maps memory at addresses of Reserve().
  void MapAt(char* address, const Hold& hold, Kind kind, int context) {
    if (kind == Kind::kManaged) {
      const int file = machine_->File(hold);
      if (mmap(address, hold.bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0) == MAP_FAILED)
        std::abort();
      close(file);
    }
    mappings_[address] = {
        .hold = hold, .kind = kind, .context = context, .bytes = hold.bytes, .opens = kind == Kind::kOpened ? 1u : 0u};
    addresses_.emplace(hold.id, address);
  }
  void Unmap(char* address) {
    munmap(address, mappings_.at(address).bytes);
    Forget(address);
  }
  // Forgets a mapping. The addresses stay reserved.
  void Forget(char* address) {
    const auto it = mappings_.find(address);
    if (it == mappings_.end()) return;
    const auto [begin, end] = addresses_.equal_range(it->second.hold.id);
    addresses_.erase(std::find_if(begin, end, [&](const auto& entry) { return entry.second == address; }));
    mappings_.erase(it);
  }
  Mapping* MappingAt(const void* address) {
    const auto it = mappings_.find(const_cast<char*>(static_cast<const char*>(address)));
    return it == mappings_.end() ? nullptr : &it->second;
  }
  char* PointerOf(uint64_t id) {
    const auto it = addresses_.find(id);
    return it == addresses_.end() ? nullptr : it->second;
  }
  // Returns the memory that contains `address`, and the memory's first address; null when no memory contains `address`.
  std::pair<char* const, Mapping>* MappingOf(const void* address) {
    auto* const found = MappingUpTo(address);
    return found == nullptr || OffsetIn(*found, address) >= found->second.bytes ? nullptr : found;
  }
  // Returns the accessible memory that contains [address, address + bytes), and the offset in the memory.
  std::optional<std::pair<Hold, uint64_t>> Range(const void* address, size_t bytes) {
    const auto* const found = MappingUpTo(address);
    if (found == nullptr || !found->second.accessible) return std::nullopt;
    const uint64_t offset = OffsetIn(*found, address);
    if (offset > found->second.bytes || bytes > found->second.bytes - offset) return std::nullopt;
    return std::make_pair(found->second.hold, offset);
  }

  // Returns null for an unknown stream.
  StreamState* Stream(CUstream stream) {
    const auto number = reinterpret_cast<uintptr_t>(stream);
    if (stream == CU_STREAM_PER_THREAD) {
      CUstream& own = thread_streams_[{CurrentContext(), std::this_thread::get_id()}];
      if (own == nullptr) own = AddStream(/*blocking=*/true);
      return streams_.at(own).get();
    }
    if (number <= 1) {  // the default stream, also under the name CU_STREAM_LEGACY
      StreamState& state = default_streams_[CurrentContext()];
      state.context = CurrentContext();
      return &state;
    }
    const auto it = streams_.find(stream);
    return it == streams_.end() ? nullptr : it->second.get();
  }
  CUstream AddStream(bool blocking) {
    auto state = std::make_unique<StreamState>(StreamState{
        .context = CurrentContext(), .blocking = blocking, .capture_thread = {}, .captured = {}, .busy_until = {}});
    auto* const stream = reinterpret_cast<CUstream>(state.get());
    streams_[stream] = std::move(state);
    return stream;
  }
  // Removes a stream. Queued work goes on.
  bool RemoveStream(CUstream stream) {
    const auto it = streams_.find(stream);
    if (it == streams_.end()) return false;
    const StreamState& state = *it->second;
    destroyed_busy_until_[state.context] = std::max(destroyed_busy_until_[state.context], DoneAt(state));
    streams_.erase(it);
    return true;
  }

  // Ends a context, and the objects that end with the context. The context stays on the threads' stacks.
  void EndContext(int context) {
    for (auto it = mappings_.begin(); it != mappings_.end();) {
      const auto [address, mapping] = *it++;
      if (mapping.context != context) continue;
      Unmap(address);
      machine_->Release(mapping.hold, /*freed=*/mapping.kind != Kind::kOpened);
    }
    EndArrays(*this, context);
    for (auto it = host_memory_.begin(); it != host_memory_.end();) {
      const auto [address, memory] = *it++;
      if (memory.context == context) RemoveHostMemory(address);
    }
    for (auto it = streams_.begin(); it != streams_.end();) {
      it = it->second->context == context ? streams_.erase(it) : std::next(it);
    }
    for (auto it = thread_streams_.begin(); it != thread_streams_.end();) {
      it = it->first.first == context ? thread_streams_.erase(it) : std::next(it);
    }
    default_streams_.erase(context);
    has_context(context) = false;
    machine_->RemoveContext(Physical(DeviceOf(context)));
  }
  // Counts the retains of a device's primary context.
  uint32_t& retains(int device) { return retains_.at(static_cast<size_t>(device)); }
  // Returns a number for a context beside the primary context. No other context has had the number.
  std::optional<int> NewContext(int device) {
    const uint32_t number = ++made_contexts_.at(static_cast<size_t>(device));
    if (number >= kMaxContexts) return std::nullopt;
    return static_cast<int>(number) * kMaxDevices + device;
  }

  struct HostMemory {
    uint64_t bytes;
    int context;
  };
  void AddHostMemory(void* address, const HostMemory& memory) { host_memory_[static_cast<char*>(address)] = memory; }
  bool RemoveHostMemory(void* address) {
    const auto it = host_memory_.find(static_cast<char*>(address));
    if (it == host_memory_.end()) return false;
    munmap(address, it->second.bytes);
    host_memory_.erase(it);
    return true;
  }
  std::pair<char* const, HostMemory>* HostMemoryOf(const void* address) {
    auto* const wanted = const_cast<char*>(static_cast<const char*>(address));
    auto it = host_memory_.upper_bound(wanted);
    if (it == host_memory_.begin()) return nullptr;
    --it;
    return static_cast<uint64_t>(wanted - it->first) < it->second.bytes ? &*it : nullptr;
  }

  std::set<EventState*>& events() { return events_; }

  // Streams wait for functions of the program. Until a function has returned, the time when the stream is done is
  // unknown.
  static constexpr Clock::time_point kUnknown = Clock::time_point::max();
  bool Runs(uint64_t host_function) const { return host_functions_.count(host_function) != 0; }
  uint64_t AddHostFunction() {
    host_functions_.insert(++last_host_function_);
    return last_host_function_;
  }
  void EndHostFunction(uint64_t host_function) {
    host_functions_.erase(host_function);
    returned_.notify_all();
  }
  // Waits until `done_at` returns a time that has come. `done_at` runs under the lock; waits release the lock.
  template <typename DoneAtFunction>
  void WaitUntil(const DoneAtFunction& done_at) {
    std::unique_lock<std::mutex> lock(mu_);
    Clock::time_point until = done_at();
    while (until == kUnknown) {
      returned_.wait(lock);
      until = done_at();
    }
    lock.unlock();
    std::this_thread::sleep_until(until);
  }

  // Returns when the work that is queued on `stream` now is done. The default stream and blocking streams wait for each
  // other.
  Clock::time_point DoneAt(const StreamState& stream) {
    Clock::time_point time = OwnDoneAt(stream);
    const bool is_default = &stream == &default_streams_[stream.context];
    if (is_default) {
      for (const auto& [handle, other] : streams_) {
        if (other->context == stream.context && other->blocking) time = std::max(time, OwnDoneAt(*other));
      }
    } else if (stream.blocking) {
      time = std::max(time, OwnDoneAt(default_streams_[stream.context]));
    }
    return time;
  }
  Clock::time_point AllDoneAt(int context) {
    Clock::time_point time = std::max(OwnDoneAt(default_streams_[context]), destroyed_busy_until_[context]);
    for (const auto& [handle, stream] : streams_) {
      if (stream->context == context) time = std::max(time, OwnDoneAt(*stream));
    }
    return time;
  }

  // Checks a call that must not happen during a capture. The call disturbs the thread's own captures, unless the thread
  // or the capture is relaxed, and all captures when both are global. Disturbed captures become invalid.
  CUresult CheckUnsafe() {
    const CUstreamCaptureMode mode = Thread().capture_mode;
    return Disturb([mode](const StreamState& stream) {
      if (mode == CU_STREAM_CAPTURE_MODE_RELAXED || stream.capture_mode == CU_STREAM_CAPTURE_MODE_RELAXED) return false;
      return stream.capture_thread == std::this_thread::get_id() ||
             (mode == CU_STREAM_CAPTURE_MODE_GLOBAL && stream.capture_mode == CU_STREAM_CAPTURE_MODE_GLOBAL);
    });
  }
  // Checks a call that waits for a whole context, in any mode.
  CUresult CheckWhole(int context) {
    return Disturb([context](const StreamState& stream) { return stream.context == context; });
  }
  // Checks a call that asks or waits for a stream.
  CUresult CheckStream(StreamState* stream) {
    const CUresult error = CheckImplicit(*stream, /*disturbs=*/true);
    return error != CUDA_SUCCESS ? error : Disturb([stream](const StreamState& other) { return &other == stream; });
  }
  // Checks a call on the default stream, which includes all streams that the default stream waits for.
  CUresult CheckImplicit(const StreamState& stream, bool disturbs) {
    if (&stream != &default_streams_[stream.context]) return CUDA_SUCCESS;
    const auto is_part = [&stream](const StreamState& other) {
      return other.context == stream.context && other.blocking;
    };
    const bool captured = std::any_of(streams_.begin(), streams_.end(), [&is_part](const auto& entry) {
      return entry.second->capturing() && is_part(*entry.second);
    });
    if (captured && disturbs) (void)Disturb(is_part);
    return captured ? CUDA_ERROR_STREAM_CAPTURE_IMPLICIT : CUDA_SUCCESS;
  }

 private:
  Clock::time_point OwnDoneAt(const StreamState& stream) const {
    return Runs(stream.host_function) ? kUnknown : stream.busy_until;
  }

  template <typename IsDisturbed>
  CUresult Disturb(const IsDisturbed& is_disturbed) {
    bool any = false;
    for (auto& [handle, stream] : streams_) {
      if (!stream->capturing() || !is_disturbed(*stream)) continue;
      stream->Invalidate();
      any = true;
    }
    return any ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : CUDA_SUCCESS;
  }

  // Returns the last memory that begins at or before `address`.
  std::pair<char* const, Mapping>* MappingUpTo(const void* address) {
    const auto it = mappings_.upper_bound(const_cast<char*>(static_cast<const char*>(address)));
    return it == mappings_.begin() ? nullptr : &*std::prev(it);
  }
  static uint64_t OffsetIn(const std::pair<char* const, Mapping>& mapping, const void* address) {
    return static_cast<uint64_t>(static_cast<const char*>(address) - mapping.first);
  }

  Driver() = default;
  // Returns the machine's folder; an empty path when there is no machine.
  static std::string Folder() {
    const char* const folder = std::getenv(kMachineVariable);
    return folder == nullptr ? "" : folder;
  }

  std::atomic<pid_t> pid_{0};                // the process that started the driver
  const volatile char* own_page_ = nullptr;  // reads as 0 in children
  std::atomic<bool> initialized_{false};
  std::array<std::atomic<bool>, size_t{kMaxDevices} * kMaxContexts> has_context_{};
  Faults faults_;
  std::unique_ptr<Machine> machine_;
  std::vector<int> devices_;  // physical devices, by ordinal

  std::mutex mu_;
  std::array<uint32_t, kMaxDevices> retains_{};
  std::array<uint32_t, kMaxDevices> made_contexts_{};
  std::map<char*, Mapping> mappings_;
  std::unordered_multimap<uint64_t, char*> addresses_;  // key: an id of memory
  std::map<char*, HostMemory> host_memory_;
  std::map<int, StreamState> default_streams_;
  std::map<CUstream, std::unique_ptr<StreamState>> streams_;
  std::map<std::pair<int, std::thread::id>, CUstream> thread_streams_;  // key: context and thread
  std::map<int, Clock::time_point> destroyed_busy_until_;               // key: context; covers destroyed streams
  std::set<EventState*> events_;
  std::set<uint64_t> host_functions_;
  uint64_t last_host_function_ = 0;
  std::condition_variable returned_;  // a host function has returned
};

// Writes zeros when an allocating function is called before cuInit().
template <typename... Results>
void ZeroBeforeInit(Results*... results) {
  if (!Driver::Get().initialized()) ((*results = Results{}), ...);
}

// Every function goes through Call(), which checks who may call, and which calls are to fail.
template <typename Body>
CUresult Call(const char* function, const Body& body) {
  Driver& driver = Driver::Get();
  if (driver.forked() || !driver.initialized()) return CUDA_ERROR_NOT_INITIALIZED;
  if (const CUresult error = driver.faults().Count(function); error != CUDA_SUCCESS) return error;
  return body(driver);
}

// Does the same for functions about a device, which need not have a context.
template <typename Body>
CUresult DeviceCall(const char* function, CUdevice device, const Body& body) {
  return Call(function,
              [&](Driver& driver) { return driver.IsDevice(device) ? body(driver) : CUDA_ERROR_INVALID_DEVICE; });
}

// Returns the thread's device; the first device where the thread has no context.
inline int PreferredDevice() {
  return Thread().contexts.empty() ? 0 : CurrentDevice();
}

// Finds the place of memory at `location`: a physical device, or kHost. A location that does not exist has no place.
inline std::optional<int> PlaceOf(const Driver& driver, const CUmemLocation& location) {
  const auto device = [&driver](int ordinal) {
    return driver.IsDevice(ordinal) ? std::optional(driver.Physical(ordinal)) : std::nullopt;
  };
  switch (static_cast<int>(location.type)) {
    case CU_MEM_LOCATION_TYPE_DEVICE:
      return device(location.id);
    case CU_MEM_LOCATION_TYPE_HOST:
    case CU_MEM_LOCATION_TYPE_HOST_NUMA:
      return kHost;
    case kDeviceLocalityDomain:  // the device and the domain have a byte each
      return (location.id >> 8 & 0xff) < kLocalityDomains ? device(location.id & 0xff) : std::nullopt;
    case kLaterLocation:
      return device(PreferredDevice());
    default:
      return std::nullopt;
  }
}

// Does the same for functions that need a context.
template <typename Body>
CUresult ContextCall(const char* function, const Body& body) {
  return Call(function, [&](Driver& driver) {
    if (Thread().contexts.empty()) return CUDA_ERROR_INVALID_CONTEXT;
    if (!driver.has_context(CurrentContext())) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    return body(driver);
  });
}

// Does the same for functions that must not happen while a stream of the process is captured.
template <typename Body>
CUresult UnsafeCall(const char* function, const Body& body) {
  return ContextCall(function, [&](Driver& driver) {
    {
      const std::lock_guard<std::mutex> lock(driver.mu());
      if (const CUresult error = driver.CheckUnsafe(); error != CUDA_SUCCESS) return error;
    }
    return body(driver);
  });
}

inline void WaitForContext(Driver& driver) {
  driver.WaitUntil([&driver] { return driver.AllDoneAt(CurrentContext()); });
}

inline void WaitForStream(Driver& driver, StreamState* stream) {
  driver.WaitUntil([&driver, stream] { return driver.DoneAt(*stream); });
}

}  // namespace vrambroker::cuda_substitute

#endif  // VRAMBROKER_TESTS_CUDA_SUBSTITUTE_DRIVER_STATE_H_
