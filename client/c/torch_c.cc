// SPDX-License-Identifier: Apache-2.0
//
// libvrambroker.so: the functions called by PyTorch, and a log of their refusals.
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>

#include "client/c/byte_cap.h"
#include "client/c/core_api.h"
#include "client/c/library.h"

using namespace vrambroker::c_library;  // NOLINT(google-build-using-namespace): the C functions have no namespace

namespace {

std::atomic<bool> told{false};
std::atomic<bool> exiting{false};

void Tell(const char* function) {
  if (told.exchange(true)) return;
  std::fprintf(stderr, "vrambroker: %s: %s: %s (reported once)\n", function, vrambroker_code_name(LastError().code),
               LastError().message);
}

// ---- Refusals ----

constexpr size_t kRefusals = 16;
constexpr size_t kRefusalV1 = offsetof(vrambroker_torch_refusal, out_of_memory) +
                              offsetof(vrambroker_out_of_memory, waited_ms) + sizeof(uint64_t);
constexpr size_t kOriginV1 = offsetof(vrambroker_torch_refusal_origin, served_since) + sizeof(int);
pthread_mutex_t refusals_mutex = PTHREAD_MUTEX_INITIALIZER;
vrambroker_torch_refusal refusals[kRefusals];  // guarded by refusals_mutex; refusal n is at n % kRefusals
char* reports[kRefusals];                      // guarded by refusals_mutex; per refusal, as JSON, or null
struct Origin {
  uint64_t thread;
  int64_t time_ms;
  bool served_since;
};
Origin origins[kRefusals];              // guarded by refusals_mutex; per refusal
thread_local bool was_refused = false;  // this thread has a refusal without a later grant of as much
uint64_t refused = 0;                   // guarded by refusals_mutex

[[gnu::constructor]] void RenewLockInChildren() {  // another thread of the parent may have held the lock
  pthread_atfork(nullptr, nullptr, [] { pthread_mutex_init(&refusals_mutex, nullptr); });
}

int64_t NowMs() {
  timespec now = {};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<int64_t>(now.tv_sec) * 1000 + now.tv_nsec / 1'000'000;
}

uint64_t ThisThread() {
  return static_cast<uint64_t>(syscall(SYS_gettid));
}

// Notes a grant of `bytes` to this thread: earlier refusals of as much were then no error.
void NoteServed(uint64_t bytes) {
  if (!was_refused) return;
  const uint64_t thread = ThisThread();
  bool is_any_left = false;
  pthread_mutex_lock(&refusals_mutex);
  for (size_t i = 0; i < kRefusals; ++i) {
    if (origins[i].thread != thread) continue;
    if (refusals[i].requested_bytes == bytes) origins[i].served_since = true;
    is_any_left = is_any_left || !origins[i].served_since;
  }
  pthread_mutex_unlock(&refusals_mutex);
  was_refused = is_any_left;
}

// Records this thread's last error as the answer to a request for `bytes`.
void Remember(uint64_t bytes, int device) {
  const Error& error = LastError();
  pthread_mutex_lock(&refusals_mutex);
  vrambroker_torch_refusal& refusal = refusals[refused % kRefusals];
  refusal = {};
  origins[refused % kRefusals] = {.thread = ThisThread(), .time_ms = NowMs(), .served_since = false};
  was_refused = true;
  refusal.number = ++refused;
  refusal.requested_bytes = bytes;
  refusal.device = device;
  refusal.code = error.code;
  if (error.has_oom) refusal.out_of_memory = error.oom;
  std::snprintf(refusal.message, sizeof refusal.message, "%s", error.message);
  char*& report = reports[(refused - 1) % kRefusals];
  std::free(report);
  report = LastReport() == nullptr ? nullptr : ::strdup(LastReport());
  pthread_mutex_unlock(&refusals_mutex);
}

// ---- Bytes held in blocks, against torch.cuda.set_per_process_memory_fraction() ----

constexpr int kDevices = 64;  // PyTorch's maximum
ByteCap caps[kDevices];

bool Charge(uint64_t bytes, int device) {
  if (device < 0 || device >= kDevices) return true;  // the core refuses such a device
  const ByteCap::Charged charged = caps[device].Charge(bytes);
  if (charged.ok) return true;
  Fail(VRAMBROKER_RESOURCE_EXHAUSTED,
       "%llu bytes more, with %llu already held, would exceed the %llu that this process allowed itself on CUDA device "
       "%d with torch.cuda.set_per_process_memory_fraction()",
       static_cast<unsigned long long>(bytes), static_cast<unsigned long long>(charged.held),
       static_cast<unsigned long long>(charged.cap), device);
  return false;
}

void Uncharge(uint64_t bytes, int device) {
  if (device >= 0 && device < kDevices) caps[device].Uncharge(bytes);
}

// ---- Requests ----

// Null: an error is remembered.
void* TorchMalloc(const char* function, ssize_t size, int device, void* stream, vrambroker_torch_memory what) {
  static std::atomic<bool> registered{false};
  void* pointer = nullptr;
  if (size == 0) return nullptr;  // as cudaMalloc()
  const vrambroker_core* const core = Core();
  const auto bytes = static_cast<uint64_t>(size);
  if (core != nullptr) {
    if (size < 0) {
      Fail(VRAMBROKER_INVALID_ARGUMENT, "%s: size is %zd", function, size);
    } else if (what != VRAMBROKER_TORCH_BLOCK || Charge(bytes, device)) {
      Kept(core, core->torch_malloc(bytes, device, reinterpret_cast<uintptr_t>(stream), what, &pointer));
      if (pointer == nullptr && what == VRAMBROKER_TORCH_BLOCK) Uncharge(bytes, device);
    }
  }
  if (pointer == nullptr && what == VRAMBROKER_TORCH_SEGMENT_NOW) return nullptr;  // not a refusal yet
  if (pointer == nullptr) {
    Remember(bytes, device);
    Tell(function);
    return nullptr;
  }
  NoteServed(bytes);
  // After exit() begins, memory is no longer returned: the daemon reclaims it with the process. Registered after the
  // core has made its objects, so called before their destruction.
  if (!registered.load(std::memory_order_relaxed) && !registered.exchange(true)) {
    (void)std::atexit([] { exiting.store(true); });
  }
  return pointer;
}

}  // namespace

void* vrambroker::c_library::TorchSegmentNow(size_t bytes, int device) {
  return TorchMalloc("cudaMalloc", static_cast<ssize_t>(bytes), device, nullptr, VRAMBROKER_TORCH_SEGMENT_NOW);
}

void vrambroker::c_library::TorchReturnSegment(const char* function, void* pointer, const uint64_t* stream) {
  if (pointer == nullptr || exiting.load()) return;
  const vrambroker_core* const core = Core();
  if (core == nullptr || Kept(core, core->torch_return_segment(pointer, stream)) != VRAMBROKER_OK) Tell(function);
}

extern "C" {

int vrambroker_torch_connect(const vrambroker_options* options) {
  vrambroker_options known;
  if (!ReadOptions(__func__, options, &known)) return LastError().code;
  const vrambroker_core* const core = Core();
  return core == nullptr ? LastError().code : Kept(core, core->torch_connect(&known));
}

int vrambroker_torch_client(vrambroker_client** client) {
  if (client == nullptr) return Fail(VRAMBROKER_INVALID_ARGUMENT, "%s: client is NULL", __func__);
  *client = nullptr;
  const vrambroker_core* const core = Core();
  return core == nullptr ? LastError().code : Kept(core, core->torch_client(client));
}

int vrambroker_torch_device(int cuda_device, int* device) {
  if (device == nullptr) return Fail(VRAMBROKER_INVALID_ARGUMENT, "%s: device is NULL", __func__);
  *device = -1;
  const vrambroker_core* const core = Core();
  return core == nullptr ? LastError().code : Kept(core, core->torch_device(cuda_device, device));
}

int vrambroker_torch_last_refusal(size_t index, vrambroker_torch_refusal* out) {
  if (out == nullptr) return Fail(VRAMBROKER_INVALID_ARGUMENT, "%s: out is NULL", __func__);
  if (out->struct_size < kRefusalV1) {
    return Fail(VRAMBROKER_INVALID_ARGUMENT, "%s: struct_size is %zu: set it to sizeof", __func__, out->struct_size);
  }
  pthread_mutex_lock(&refusals_mutex);
  const bool known = index < kRefusals && index < refused;
  const vrambroker_torch_refusal refusal = known ? refusals[(refused - 1 - index) % kRefusals] : refusals[0];
  pthread_mutex_unlock(&refusals_mutex);
  return known ? CopyOut(refusal, out) : VRAMBROKER_NOT_FOUND;
}

int vrambroker_torch_get_refusal_origin(uint64_t number, vrambroker_torch_refusal_origin* out) {
  if (out == nullptr) return Fail(VRAMBROKER_INVALID_ARGUMENT, "%s: out is NULL", __func__);
  if (out->struct_size < kOriginV1) {
    return Fail(VRAMBROKER_INVALID_ARGUMENT, "%s: struct_size is %zu: set it to sizeof", __func__, out->struct_size);
  }
  pthread_mutex_lock(&refusals_mutex);
  const bool known = number > 0 && number <= refused && refused - number < kRefusals;
  const Origin origin = known ? origins[(number - 1) % kRefusals] : Origin{};
  pthread_mutex_unlock(&refusals_mutex);
  if (!known) return VRAMBROKER_NOT_FOUND;
  return CopyOut(vrambroker_torch_refusal_origin{.struct_size = sizeof *out,
                                                 .thread = origin.thread,
                                                 .age_ms = NowMs() - origin.time_ms,
                                                 .served_since = origin.served_since ? 1 : 0},
                 out);
}

int vrambroker_torch_out_of_memory_json(uint64_t number, char* buffer, size_t size, size_t* needed) {
  if (size > 0 && buffer == nullptr) return Fail(VRAMBROKER_INVALID_ARGUMENT, "%s: buffer is NULL", __func__);
  pthread_mutex_lock(&refusals_mutex);
  const bool known = number > 0 && number <= refused && refused - number < kRefusals;
  const int code = FillText(known ? reports[(number - 1) % kRefusals] : nullptr, buffer, size, needed);
  pthread_mutex_unlock(&refusals_mutex);
  return code;
}

void* vrambroker_torch_malloc(ssize_t size, int device, void* stream) {
  return TorchMalloc(__func__, size, device, stream, VRAMBROKER_TORCH_SEGMENT);
}

// PyTorch passes the stream of the allocation, the current stream of its thread then.
void vrambroker_torch_free(void* pointer, ssize_t /*size*/, int /*device*/, void* stream) {
  const uint64_t number = reinterpret_cast<uintptr_t>(stream);
  TorchReturnSegment(__func__, pointer, &number);
}

void* vrambroker_torch_cached_malloc(ssize_t size, int device, void* stream) {
  void* const pointer = TorchMalloc(__func__, size, device, stream, VRAMBROKER_TORCH_BLOCK);
  if (pointer != nullptr || size == 0) return pointer;
  if (const vrambroker_core* const core = Core()) {
    char message[sizeof LastError().message + 128];
    std::snprintf(message, sizeof message, "CUDA out of memory (vrambroker). Tried to allocate %zd bytes on GPU %d. %s",
                  size, device, LastError().message);
    core->torch_throw(message);
  }
  return nullptr;
}

void vrambroker_torch_cached_free(void* pointer, ssize_t size, int device, void* /*stream*/) {
  if (pointer != nullptr && size > 0) Uncharge(static_cast<uint64_t>(size), device);
  if (pointer == nullptr || exiting.load()) return;
  const vrambroker_core* const core = Core();
  if (core == nullptr || Kept(core, core->torch_free(pointer)) != VRAMBROKER_OK) Tell(__func__);
}

void vrambroker_torch_record_stream(void* pointer, void* stream) {
  if (pointer == nullptr || exiting.load()) return;
  const vrambroker_core* const core = Core();
  if (core == nullptr ||
      Kept(core, core->torch_record_stream(pointer, reinterpret_cast<uintptr_t>(stream))) != VRAMBROKER_OK) {
    Tell(__func__);
  }
}

void vrambroker_torch_empty_cache(void) {
  if (exiting.load()) return;
  vrambroker_client* client = nullptr;
  if (vrambroker_torch_client(&client) != VRAMBROKER_OK || vrambroker_empty_cache(client, nullptr) != VRAMBROKER_OK) {
    Tell(__func__);
  }
}

int vrambroker_torch_set_cap(int device, uint64_t bytes) {
  if (device < 0 || device >= kDevices) {
    return Fail(VRAMBROKER_NOT_FOUND, "%s: no CUDA device %d", __func__, device);
  }
  caps[device].SetCap(bytes);
  return VRAMBROKER_OK;
}

}  // extern "C"
