// SPDX-License-Identifier: Apache-2.0
//
// libvrambroker.so: answers calls of cudaMalloc(), cudaFree() and cudaMemGetInfo() by a single library of the process,
// PyTorch's own caching allocator. Redirects these three in the library's import table; the rest of the process is not
// affected.
#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "client/c/library.h"

using namespace vrambroker::c_library;  // NOLINT(google-build-using-namespace): the C functions have no namespace

namespace {

// Values of cudaError_t.
constexpr int kCudaSuccess = 0;
constexpr int kCudaInvalidValue = 1;
constexpr int kCudaOutOfMemory = 2;

using MallocFunction = int (*)(void** pointer, size_t bytes);
using FreeFunction = int (*)(void* pointer);
using MemGetInfoFunction = int (*)(size_t* free_bytes, size_t* total_bytes);
using GetDeviceFunction = int (*)(int* device);
using SetDeviceFunction = int (*)(int device);
using IsCapturingFunction = int (*)(void* stream, int* status);
using GetLastErrorFunction = int (*)();
// c10::cuda::CUDAStream as returned in two registers: type and index of its device, and its number.
struct TorchStream {
  int64_t device;
  int64_t id;
};
using CurrentStreamFunction = TorchStream (*)(signed char device);
using StreamFunction = void* (*)(const TorchStream* self);

std::atomic<bool> serving{false};
std::atomic<MallocFunction> real_malloc{nullptr};
std::atomic<FreeFunction> real_free{nullptr};
std::atomic<MemGetInfoFunction> real_mem_get_info{nullptr};
std::atomic<GetDeviceFunction> get_device{nullptr};
std::atomic<SetDeviceFunction> set_device{nullptr};
std::atomic<IsCapturingFunction> is_capturing{nullptr};
std::atomic<GetLastErrorFunction> get_last_error{nullptr};
std::atomic<CurrentStreamFunction> current_stream{nullptr};
std::atomic<StreamFunction> stream_of{nullptr};

// ---- Segments handed out ----

struct Segment {
  void* pointer;
  uint64_t stream;  // used by the stream's work
  bool has_stream;  // otherwise used by any stream
};

pthread_mutex_t segments_mutex = PTHREAD_MUTEX_INITIALIZER;
Segment* segments = nullptr;  // guarded by segments_mutex, like segment_count and segment_room
size_t segment_count = 0;
size_t segment_room = 0;

bool AddSegment(const Segment& segment) {
  pthread_mutex_lock(&segments_mutex);
  bool added = segment_count < segment_room;
  if (!added) {
    const size_t room = std::max<size_t>(256, 2 * segment_room);
    if (void* const larger = std::realloc(segments, room * sizeof(Segment))) {
      segments = static_cast<Segment*>(larger);
      segment_room = room;
      added = true;
    }
  }
  if (added) segments[segment_count++] = segment;
  pthread_mutex_unlock(&segments_mutex);
  return added;
}

// False: not our segment.
bool RemoveSegment(const void* pointer, Segment* removed) {
  pthread_mutex_lock(&segments_mutex);
  size_t i = 0;
  while (i < segment_count && segments[i].pointer != pointer) ++i;
  const bool found = i < segment_count;
  if (found) {
    *removed = segments[i];
    segments[i] = segments[--segment_count];
  }
  pthread_mutex_unlock(&segments_mutex);
  return found;
}

// ---- The calls ----

// The broker's client restores the caller's device, with its own runtime. When this library's runtime does not see
// that, restore the device here, too; only then, since choosing a device creates a context on it.
class KeepsDevice {
 public:
  KeepsDevice() { known_ = Get(&device_); }
  ~KeepsDevice() {
    int now = 0;
    if (!known_ || (Get(&now) && now == device_)) return;
    if (const SetDeviceFunction set = set_device.load(); set != nullptr) (void)set(device_);
  }
  KeepsDevice(const KeepsDevice&) = delete;
  KeepsDevice& operator=(const KeepsDevice&) = delete;
  int device() const { return device_; }

 private:
  static bool Get(int* device) {
    const GetDeviceFunction get = get_device.load();
    return get != nullptr && get(device) == kCudaSuccess;
  }

  int device_ = 0;
  bool known_ = false;
};

std::atomic<int> captures{0};  // and pools in use
std::atomic<int> calls_under_way{0};

// Fills in the stream of a new segment. PyTorch allocates for the current stream of the requesting thread (allocate()
// in c10/cuda/CUDACachingAllocator.cpp, up to 2.11), but passes no stream to cudaMalloc() and cudaFree(). Any streams
// running a CUDA graph use memory allocated for the graph.
#ifdef __clang__
__attribute__((no_sanitize("function")))  // calls PyTorch's functions without PyTorch's headers
#endif
void FindStream(Segment* segment) {
  const CurrentStreamFunction current = current_stream.load();
  const StreamFunction of = stream_of.load();
  const IsCapturingFunction capturing = is_capturing.load();
  const GetLastErrorFunction clear_error = get_last_error.load();
  if (current == nullptr || of == nullptr || capturing == nullptr || clear_error == nullptr) return;
  if (captures.load() > 0) return;
  const TorchStream stream = current(/*device=*/-1);  // of the current device
  void* const handle = of(&stream);
  int status = 0;
  if (capturing(handle, &status) != kCudaSuccess) {
    (void)clear_error();  // otherwise PyTorch would blame its next kernel
    return;
  }
  if (status != 0) return;
  segment->stream = reinterpret_cast<uintptr_t>(handle);
  segment->has_stream = true;
}

// The refused last call of this thread; 0 bytes: not refused. Without a segment, PyTorch frees its cache and calls
// again for the same size (alloc_block() in c10/cuda/CUDACachingAllocator.cpp, up to 2.11).
struct Refused {
  size_t bytes;
  int device;
};
thread_local Refused last_refused = {};

// A segment from the broker, or null.
void* Lease(size_t bytes, int device) {
  const Refused last = last_refused;
  last_refused = {};
  const bool is_retry = last.bytes == bytes && last.device == device;
  if (is_retry || captures.load() > 0) return vrambroker_torch_malloc(static_cast<ssize_t>(bytes), device, nullptr);
  void* const segment = TorchSegmentNow(bytes, device);
  if (segment == nullptr) last_refused = {.bytes = bytes, .device = device};
  return segment;
}

void Return(const Segment& segment) {
  TorchReturnSegment("cudaFree", segment.pointer, segment.has_stream ? &segment.stream : nullptr);
}

int Malloc(void** pointer, size_t bytes) {
  if (!serving.load() || bytes == 0) return real_malloc.load()(pointer, bytes);
  if (pointer == nullptr) return kCudaInvalidValue;
  *pointer = nullptr;
  const KeepsDevice kept;
  Segment segment = {};
  FindStream(&segment);
  ++calls_under_way;
  segment.pointer = bytes > PTRDIFF_MAX ? nullptr : Lease(bytes, kept.device());
  --calls_under_way;
  if (segment.pointer == nullptr) return kCudaOutOfMemory;
  if (!AddSegment(segment)) {
    Return(segment);
    return kCudaOutOfMemory;
  }
  *pointer = segment.pointer;
  return kCudaSuccess;
}

int Free(void* pointer) {
  Segment segment = {};
  if (pointer == nullptr || !RemoveSegment(pointer, &segment)) return real_free.load()(pointer);
  const KeepsDevice kept;
  Return(segment);
  return kCudaSuccess;
}

// For this process's share: free memory under the process's limit, rather than on the GPU.
int MemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  const int code = real_mem_get_info.load()(free_bytes, total_bytes);
  if (!serving.load() || code != kCudaSuccess || free_bytes == nullptr || total_bytes == nullptr) return code;
  const KeepsDevice kept;
  vrambroker_client* client = nullptr;
  int ordinal = -1;
  vrambroker_device device = {};
  vrambroker_memory_stats stats = {};
  device.struct_size = sizeof device;
  stats.struct_size = sizeof stats;
  if (vrambroker_torch_client(&client) == VRAMBROKER_OK &&
      vrambroker_torch_device(kept.device(), &ordinal) == VRAMBROKER_OK &&
      vrambroker_get_device(client, ordinal, &device) == VRAMBROKER_OK &&
      vrambroker_get_memory_stats(client, ordinal, &stats) == VRAMBROKER_OK) {
    *total_bytes = device.limit_bytes;
    *free_bytes = device.limit_bytes - std::min(device.limit_bytes, stats.reserved_bytes);
  }
  return code;
}

// ---- The table of imported functions ----

struct Import {
  const char* name;
  void* ours;
  // Found in the library: a slot for calls, possibly more slots with the function's address.
  static constexpr size_t kMaxSlots = 4;
  void** slots[kMaxSlots];
  bool read_only[kMaxSlots];
  size_t count;
};

// The loader's data at an address.
template <typename Type>
Type* At(ElfW(Addr) address) {
  return reinterpret_cast<Type*>(address);  // NOLINT(performance-no-int-to-ptr)
}

struct Search {
  const char* library;
  Import* imports;
  size_t count;
  bool found;
  char path[4096];
};

bool IsFunctionSlot(uint64_t type) {
#if defined(__x86_64__)
  return type == R_X86_64_JUMP_SLOT || type == R_X86_64_GLOB_DAT;
#elif defined(__aarch64__)
  return type == R_AARCH64_JUMP_SLOT || type == R_AARCH64_GLOB_DAT;
#else
  (void)type;
  return false;
#endif
}

int Look(dl_phdr_info* info, size_t /*size*/, void* argument) {
  Search& search = *static_cast<Search*>(argument);
  if (info->dlpi_name == nullptr || !IsFileNamed(info->dlpi_name, search.library)) return 0;
  search.found = true;
  std::strncpy(search.path, info->dlpi_name, sizeof search.path - 1);
  const ElfW(Addr) base = info->dlpi_addr;
  const ElfW(Dyn)* dynamic = nullptr;
  ElfW(Addr) relro_begin = 0;
  ElfW(Addr) relro_end = 0;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const ElfW(Phdr)& header = info->dlpi_phdr[i];
    if (header.p_type == PT_DYNAMIC) dynamic = At<const ElfW(Dyn)>(base + header.p_vaddr);
    if (header.p_type == PT_GNU_RELRO) {
      relro_begin = base + header.p_vaddr;
      relro_end = relro_begin + header.p_memsz;
    }
  }
  if (dynamic == nullptr) return 1;
  // Whole pages, as protected by the loader.
  const ElfW(Addr) in_page = static_cast<ElfW(Addr)>(sysconf(_SC_PAGESIZE)) - 1;
  relro_begin &= ~in_page;
  relro_end &= ~in_page;
  const ElfW(Sym)* symbols = nullptr;
  const char* strings = nullptr;
  const ElfW(Rela) * tables[2] = {};
  size_t sizes[2] = {};
  for (; dynamic->d_tag != DT_NULL; ++dynamic) {
    const ElfW(Addr) address = dynamic->d_un.d_ptr;  // some loaders have added the base already
    const ElfW(Addr) there = address >= base ? address : base + address;
    switch (dynamic->d_tag) {
      case DT_SYMTAB:
        symbols = At<const ElfW(Sym)>(there);
        break;
      case DT_STRTAB:
        strings = At<const char>(there);
        break;
      case DT_JMPREL:
        tables[0] = At<const ElfW(Rela)>(there);
        break;
      case DT_PLTRELSZ:
        sizes[0] = dynamic->d_un.d_val;
        break;
      case DT_RELA:
        tables[1] = At<const ElfW(Rela)>(there);
        break;
      case DT_RELASZ:
        sizes[1] = dynamic->d_un.d_val;
        break;
      default:
        break;
    }
  }
  if (symbols == nullptr || strings == nullptr) return 1;
  for (size_t table = 0; table < 2; ++table) {
    for (size_t i = 0; tables[table] != nullptr && i < sizes[table] / sizeof(ElfW(Rela)); ++i) {
      const ElfW(Rela)& relocation = tables[table][i];
      if (!IsFunctionSlot(ELF64_R_TYPE(relocation.r_info))) continue;
      const char* const name = strings + symbols[ELF64_R_SYM(relocation.r_info)].st_name;
      for (size_t k = 0; k < search.count; ++k) {
        if (std::strcmp(name, search.imports[k].name) != 0) continue;
        const ElfW(Addr) slot = base + relocation.r_offset;
        Import& import = search.imports[k];
        if (import.count == Import::kMaxSlots) continue;
        import.slots[import.count] = At<void*>(slot);
        import.read_only[import.count++] = slot >= relro_begin && slot < relro_end;
      }
    }
  }
  return 1;
}

// Writes `value` into all slots of `import`, or returns false.
bool Write(const Import& import, void* value) {
  const auto page_size = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  for (size_t i = 0; i < import.count; ++i) {
    void* const page = At<void>(reinterpret_cast<uintptr_t>(import.slots[i]) & ~(page_size - 1));
    if (import.read_only[i] && mprotect(page, page_size, PROT_READ | PROT_WRITE) != 0) return false;
    __atomic_store_n(import.slots[i], value, __ATOMIC_RELEASE);
    if (import.read_only[i]) (void)mprotect(page, page_size, PROT_READ);
  }
  return true;
}

// The current target of `import`. Before the first call, the slot may still point to the loader.
void* Present(void* library, const char* path, const Import& import) {
  void* const value = __atomic_load_n(import.slots[0], __ATOMIC_ACQUIRE);
  Dl_info info;
  if (dladdr(value, &info) != 0 && info.dli_fname != nullptr && std::strcmp(info.dli_fname, path) != 0) return value;
  return dlsym(library, import.name);
}

template <typename Function>
Function As(void* address) {
  return reinterpret_cast<Function>(address);
}

pthread_mutex_t take_mutex = PTHREAD_MUTEX_INITIALIZER;
bool taken = false;  // guarded by take_mutex

[[gnu::constructor]] void RenewLocksInChildren() {  // other threads of the parent may have held the locks
  pthread_atfork(nullptr, nullptr, [] {
    pthread_mutex_init(&segments_mutex, nullptr);
    pthread_mutex_init(&take_mutex, nullptr);
  });
}

// REQUIRES: take_mutex is held.
int Take(const char* name) {
  if (taken) return VRAMBROKER_OK;
  Import imports[] = {{"cudaMalloc", reinterpret_cast<void*>(&Malloc), {}, {}, 0},
                      {"cudaFree", reinterpret_cast<void*>(&Free), {}, {}, 0},
                      {"cudaMemGetInfo", reinterpret_cast<void*>(&MemGetInfo), {}, {}, 0}};
  static Search search;  // 4 KiB
  search = {.library = name, .imports = imports, .count = sizeof imports / sizeof *imports};
  dl_iterate_phdr(&Look, &search);
  if (!search.found) return Fail(VRAMBROKER_NOT_FOUND, "no %s is loaded in this process", name);
  for (const Import& import : imports) {
    if (import.count == 0) {
      return Fail(VRAMBROKER_UNIMPLEMENTED, "%s does not import %s: its CUDA runtime is linked into it, or it has none",
                  search.path, import.name);
    }
  }
  void* const library = dlopen(search.path, RTLD_LAZY | RTLD_NOLOAD);  // kept open: the library calls our functions
  if (library == nullptr) return Fail(VRAMBROKER_NOT_FOUND, "%s cannot be opened: %s", search.path, dlerror());
  real_malloc = As<MallocFunction>(Present(library, search.path, imports[0]));
  real_free = As<FreeFunction>(Present(library, search.path, imports[1]));
  real_mem_get_info = As<MemGetInfoFunction>(Present(library, search.path, imports[2]));
  get_device = As<GetDeviceFunction>(dlsym(library, "cudaGetDevice"));
  set_device = As<SetDeviceFunction>(dlsym(library, "cudaSetDevice"));
  is_capturing = As<IsCapturingFunction>(dlsym(library, "cudaStreamIsCapturing"));
  get_last_error = As<GetLastErrorFunction>(dlsym(library, "cudaGetLastError"));
  // c10::cuda::getCurrentCUDAStream(signed char) and c10::cuda::CUDAStream::stream() const.
  current_stream = As<CurrentStreamFunction>(dlsym(library, "_ZN3c104cuda20getCurrentCUDAStreamEa"));
  stream_of = As<StreamFunction>(dlsym(library, "_ZNK3c104cuda10CUDAStream6streamEv"));
  if (real_malloc.load() == nullptr || real_free.load() == nullptr || real_mem_get_info.load() == nullptr) {
    return Fail(VRAMBROKER_UNIMPLEMENTED, "the CUDA runtime of %s is not found", search.path);
  }
  // cudaFree first: it frees unknown pointers as before.
  void* const real[] = {reinterpret_cast<void*>(real_malloc.load()), reinterpret_cast<void*>(real_free.load()),
                        reinterpret_cast<void*>(real_mem_get_info.load())};
  for (const size_t i : {1, 0, 2}) {
    if (!Write(imports[i], imports[i].ours)) {
      const int error = errno;
      for (size_t k = 0; k < sizeof imports / sizeof *imports; ++k) (void)Write(imports[k], real[k]);
      errno = error;
      return Fail(VRAMBROKER_UNIMPLEMENTED, "the table of imported functions of %s cannot be written: %s", search.path,
                  std::strerror(errno));
    }
  }
  taken = true;
  return VRAMBROKER_OK;
}

}  // namespace

extern "C" {

int vrambroker_torch_serve(const char* library) {
  vrambroker_client* client = nullptr;
  const int code = vrambroker_torch_client(&client);
  if (code != VRAMBROKER_OK) return code;
  pthread_mutex_lock(&take_mutex);
  const int taking = Take(library == nullptr ? "libc10_cuda.so" : library);
  if (taking == VRAMBROKER_OK) serving.store(true);
  pthread_mutex_unlock(&take_mutex);
  return taking;
}

void vrambroker_torch_unserve(void) {
  serving.store(false);
}

void vrambroker_torch_count_captures(int change) {
  captures.fetch_add(change);
}

int vrambroker_torch_calls_under_way(void) {
  return calls_under_way.load();
}

}  // extern "C"
