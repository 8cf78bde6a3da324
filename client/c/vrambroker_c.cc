// SPDX-License-Identifier: Apache-2.0
//
// libvrambroker.so: checks arguments, keeps errors, and loads the core when it is first needed. It uses nothing of C++
// that needs a library: C programs get no libstdc++ into their symbols.
#include <dlfcn.h>
#include <limits.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstdarg>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "client/c/core_api.h"
#include "client/c/library.h"

namespace vrambroker::c_library {
namespace {

constexpr char kCoreName[] = "libvrambroker-core.so";
constexpr char kForked[] =
    "this process was made by fork() after its parent had used vrambroker: use it in the parent only, fork before the "
    "first vrambroker_connect(), or exec";

// ---- Errors ----

// Of no type with a destructor: PyTorch calls while the process exits, when those have run.
thread_local Error last_error;

void SetError(int code, const char* message, size_t length, const vrambroker_out_of_memory* oom) {
  Error& error = last_error;
  error.code = code;
  error.has_oom = oom != nullptr;
  if (oom != nullptr) error.oom = *oom;
  if (length >= sizeof error.message) length = sizeof error.message - 1;
  std::memcpy(error.message, message, length);
  error.message[length] = '\0';
}

}  // namespace

int Fail(int code, const char* format, ...) {
  char text[sizeof last_error.message];
  va_list arguments;
  va_start(arguments, format);
  // NOLINTNEXTLINE(clang-analyzer-valist.Uninitialized): a false report of clang 14 when it checks several files
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  SetError(code, text, std::strlen(text), nullptr);
  return code;
}

const Error& LastError() {
  return last_error;
}

namespace {

int NullArgument(const char* function, const char* argument) {
  return Fail(VRAMBROKER_INVALID_ARGUMENT, "%s: %s is NULL", function, argument);
}

int BadStruct(const char* function, size_t struct_size) {
  return Fail(VRAMBROKER_INVALID_ARGUMENT, "%s: struct_size is %zu: set it to sizeof", function, struct_size);
}

// ---- fork() ----

// A child that was forked after first use has none of the library's threads, and maybe locks that nobody will unlock.
std::atomic<bool> used{false};
std::atomic<bool> forked{false};

// ---- The core ----

char own_path[PATH_MAX];  // links followed; empty when it could not be found out

// When the library is loaded: a relative path may mean nothing later.
[[gnu::constructor]] void AtLoad() {
  Dl_info info;
  if (dladdr(reinterpret_cast<const void*>(&AtLoad), &info) == 0 || realpath(info.dli_fname, own_path) == nullptr) {
    own_path[0] = '\0';
  }
  pthread_atfork(nullptr, nullptr, [] {
    if (used.load(std::memory_order_relaxed)) forked.store(true, std::memory_order_relaxed);
  });
}

// Where `name` is, as the program's own libraries find it. Null when nowhere.
const void* FileWith(void* program, const char* name) {
  Dl_info info;
  void* const found = dlsym(program, name);
  return found != nullptr && dladdr(found, &info) != 0 ? info.dli_fbase : nullptr;
}

// A program with a gRPC or protobuf of its own in its global symbols would have the core use that one. RTLD_DEEPBIND
// keeps them apart, but also the core's malloc() from one that replaces the C library's, which cannot be mixed.
int DeepBindIfNeeded() {
  int flag = 0;
#ifdef RTLD_DEEPBIND
  void* const program = dlopen(nullptr, RTLD_LAZY);
  if (program == nullptr) return 0;
  const bool own_grpc = FileWith(program, "grpc_init") != nullptr ||
                        FileWith(program, "_ZN6google8protobuf8internal13VerifyVersionEiiPKc") != nullptr;
  const bool own_malloc = FileWith(program, "malloc") != FileWith(program, "getenv") ||
                          FileWith(program, "_Znwm") != FileWith(program, "__cxa_throw");
  if (own_grpc && !own_malloc) flag = RTLD_DEEPBIND;
  dlclose(program);
#endif
  return flag;
}

const vrambroker_core_host host = {.set_error = &SetError};
std::atomic<const vrambroker_core*> loaded{nullptr};
pthread_mutex_t load_mutex = PTHREAD_MUTEX_INITIALIZER;

// Null: the error says why. REQUIRES: load_mutex is held.
const vrambroker_core* Load() {
  char path[PATH_MAX];
  const char* const slash = std::strrchr(own_path, '/');
  const int directory = slash == nullptr ? 0 : static_cast<int>(slash - own_path + 1);
  if (std::snprintf(path, sizeof path, "%.*s%s", directory, own_path, kCoreName) >= static_cast<int>(sizeof path)) {
    Fail(VRAMBROKER_FAILED_PRECONDITION, "%s: the path is too long", own_path);
    return nullptr;
  }
  // Local: its symbols, and those of gRPC and protobuf, stay out of the program's. Never closed: gRPC has threads.
  void* const library = dlopen(path, RTLD_NOW | RTLD_LOCAL | DeepBindIfNeeded());
  if (library == nullptr) {
    const char* const why = dlerror();
    Fail(VRAMBROKER_FAILED_PRECONDITION,
         "cannot load %s: %s; install the same version of it beside libvrambroker.so, with the gRPC that it needs",
         path, why == nullptr ? "unknown" : why);
    return nullptr;
  }
  const auto get = reinterpret_cast<VrambrokerCoreV1>(dlsym(library, "vrambroker_core_v1"));
  const vrambroker_core* const core = get == nullptr ? nullptr : get(kVrambrokerCoreVersion, &host);
  if (core == nullptr) {
    Fail(VRAMBROKER_FAILED_PRECONDITION, "%s and %s have different versions: install both from one build of vrambroker",
         path, own_path);
    return nullptr;
  }
  return core;
}

}  // namespace

const vrambroker_core* Core() {
  if (forked.load(std::memory_order_relaxed)) {
    Fail(VRAMBROKER_FAILED_PRECONDITION, "%s", kForked);
    return nullptr;
  }
  if (const vrambroker_core* core = loaded.load(std::memory_order_acquire)) return core;
  used.store(true, std::memory_order_relaxed);
  pthread_mutex_lock(&load_mutex);
  const vrambroker_core* core = loaded.load(std::memory_order_relaxed);
  if (core == nullptr) {
    core = Load();
    loaded.store(core, std::memory_order_release);
  }
  pthread_mutex_unlock(&load_mutex);
  return core;
}

// ---- Structs that may grow ----

namespace {

// The fields up to these are in every version.
constexpr size_t kOptionsV1 = offsetof(vrambroker_options, context) + sizeof(void*);
constexpr size_t kOutOfMemoryV1 = offsetof(vrambroker_out_of_memory, advice) + sizeof(vrambroker_out_of_memory::advice);
constexpr size_t kSessionV1 = offsetof(vrambroker_session, name) + sizeof(vrambroker_session::name);
constexpr size_t kDeviceV1 = offsetof(vrambroker_device, name) + sizeof(vrambroker_device::name);
constexpr size_t kStatsV1 = offsetof(vrambroker_memory_stats, num_device_free) + sizeof(uint64_t);

}  // namespace

// `options` with what its program does not know at its default. False: an error is remembered.
bool ReadOptions(const char* function, const vrambroker_options* options, vrambroker_options* known) {
  *known = VRAMBROKER_OPTIONS_INIT;
  if (options == nullptr) return true;
  // First what has been, and will be, in the same place in every version.
  if (options->struct_size < offsetof(vrambroker_options, placement)) {
    return BadStruct(function, options->struct_size) == VRAMBROKER_OK;
  }
  if (options->abi_version != VRAMBROKER_ABI_VERSION) {
    Fail(
        VRAMBROKER_FAILED_PRECONDITION,
        "the program was compiled for ABI version %u, but %s has version %d: recompile the program with that library's "
        "vrambroker.h, or run it with the library of its own version",
        options->abi_version, own_path, VRAMBROKER_ABI_VERSION);
    return false;
  }
  if (options->struct_size < kOptionsV1) return BadStruct(function, options->struct_size) == VRAMBROKER_OK;
  const auto* bytes = reinterpret_cast<const unsigned char*>(options);
  for (size_t i = sizeof *options; i < options->struct_size; ++i) {
    if (bytes[i] != 0) {
      Fail(VRAMBROKER_FAILED_PRECONDITION, "%s: an option is set that %s, version %s, does not have", function,
           own_path, VRAMBROKER_VERSION);
      return false;
    }
  }
  // A program that was compiled before an option came leaves it at its default.
  std::memset(known, 0, sizeof *known);
  std::memcpy(known, options, std::min(options->struct_size, sizeof *known));
  return true;
}

}  // namespace vrambroker::c_library

using namespace vrambroker::c_library;  // NOLINT(google-build-using-namespace): the C functions have no namespace

#define VRAMBROKER_REQUIRE(argument) \
  if ((argument) == nullptr) return NullArgument(__func__, #argument)
// Not where every instruction counts: those functions of the client look themselves.
#define VRAMBROKER_REQUIRE_CLIENT(client) \
  VRAMBROKER_REQUIRE(client);             \
  if (forked.load(std::memory_order_relaxed)) return Fail(VRAMBROKER_FAILED_PRECONDITION, "%s", kForked)
#define VRAMBROKER_REQUIRE_STRUCT(argument, minimum) \
  VRAMBROKER_REQUIRE(argument);                      \
  if ((argument)->struct_size < (minimum)) return BadStruct(__func__, (argument)->struct_size)

extern "C" {

// ---- Errors ----

const char* vrambroker_code_name(int code) {
  switch (code) {
    case VRAMBROKER_OK:
      return "OK";
    case VRAMBROKER_INVALID_ARGUMENT:
      return "INVALID_ARGUMENT";
    case VRAMBROKER_DEADLINE_EXCEEDED:
      return "DEADLINE_EXCEEDED";
    case VRAMBROKER_NOT_FOUND:
      return "NOT_FOUND";
    case VRAMBROKER_PERMISSION_DENIED:
      return "PERMISSION_DENIED";
    case VRAMBROKER_RESOURCE_EXHAUSTED:
      return "RESOURCE_EXHAUSTED";
    case VRAMBROKER_FAILED_PRECONDITION:
      return "FAILED_PRECONDITION";
    case VRAMBROKER_ABORTED:
      return "ABORTED";
    case VRAMBROKER_OUT_OF_RANGE:
      return "OUT_OF_RANGE";
    case VRAMBROKER_UNIMPLEMENTED:
      return "UNIMPLEMENTED";
    case VRAMBROKER_INTERNAL:
      return "INTERNAL";
    case VRAMBROKER_UNAVAILABLE:
      return "UNAVAILABLE";
    default:
      return "UNKNOWN";
  }
}

int vrambroker_last_error_code(void) {
  return last_error.code;
}

const char* vrambroker_last_error_message(void) {
  return last_error.message;
}

int vrambroker_last_out_of_memory(vrambroker_out_of_memory* out) {
  VRAMBROKER_REQUIRE_STRUCT(out, kOutOfMemoryV1);
  return last_error.has_oom ? CopyOut(last_error.oom, out) : VRAMBROKER_NOT_FOUND;
}

const char* vrambroker_cause_name(int cause) {
  switch (cause) {
    case VRAMBROKER_CAUSE_LIMIT:
      return "LIMIT";
    case VRAMBROKER_CAUSE_CAPACITY:
      return "CAPACITY";
    case VRAMBROKER_CAUSE_FRAGMENTATION:
      return "FRAGMENTATION";
    case VRAMBROKER_CAUSE_LARGER_THAN_DEVICE:
      return "LARGER_THAN_DEVICE";
    default:
      return "UNKNOWN";
  }
}

// ---- Versions ----

int vrambroker_abi_version(void) {
  return VRAMBROKER_ABI_VERSION;
}

const char* vrambroker_version(void) {
  return VRAMBROKER_VERSION;
}

// ---- Sessions ----

int vrambroker_connect(const vrambroker_options* options, vrambroker_client** client) {
  VRAMBROKER_REQUIRE(client);
  *client = nullptr;
  vrambroker_options known;
  if (!ReadOptions(__func__, options, &known)) return LastError().code;
  const vrambroker_core* const core = Core();
  return core == nullptr ? last_error.code : core->connect(&known, client);
}

int vrambroker_disconnect(vrambroker_client* client) {
  if (client == nullptr) return VRAMBROKER_OK;
  VRAMBROKER_REQUIRE_CLIENT(client);
  return client->core->disconnect(client);
}

int vrambroker_status(vrambroker_client* client) {
  VRAMBROKER_REQUIRE_CLIENT(client);
  return client->core->status(client);
}

int vrambroker_get_session(vrambroker_client* client, vrambroker_session* out) {
  VRAMBROKER_REQUIRE_CLIENT(client);
  VRAMBROKER_REQUIRE_STRUCT(out, kSessionV1);
  vrambroker_session session = {};
  const int code = client->core->get_session(client, &session);
  return code == VRAMBROKER_OK ? CopyOut(session, out) : code;
}

const char* vrambroker_warning(vrambroker_client* client, size_t index) {
  return client == nullptr ? nullptr : client->core->warning(client, index);
}

// ---- Devices ----

int vrambroker_device_count(vrambroker_client* client, int* count) {
  VRAMBROKER_REQUIRE_CLIENT(client);
  VRAMBROKER_REQUIRE(count);
  *count = client->core->device_count(client);
  return VRAMBROKER_OK;
}

int vrambroker_get_device(vrambroker_client* client, int device, vrambroker_device* out) {
  VRAMBROKER_REQUIRE_CLIENT(client);
  VRAMBROKER_REQUIRE_STRUCT(out, kDeviceV1);
  vrambroker_device found = {};
  const int code = client->core->get_device(client, device, &found);
  return code == VRAMBROKER_OK ? CopyOut(found, out) : code;
}

// ---- Memory ----

int vrambroker_malloc(vrambroker_client* client, uint64_t bytes, int device, void** pointer) {
  VRAMBROKER_REQUIRE(pointer);
  *pointer = nullptr;
  VRAMBROKER_REQUIRE(client);
  return client->core->malloc(client, bytes, device, 0, pointer);
}

int vrambroker_malloc_stream(vrambroker_client* client, uint64_t bytes, int device, void* stream, void** pointer) {
  VRAMBROKER_REQUIRE(pointer);
  *pointer = nullptr;
  VRAMBROKER_REQUIRE(client);
  return client->core->malloc(client, bytes, device, reinterpret_cast<uintptr_t>(stream), pointer);
}

int vrambroker_free(vrambroker_client* client, void* pointer) {
  VRAMBROKER_REQUIRE(client);
  return client->core->free(client, pointer);
}

int vrambroker_free_stream(vrambroker_client* client, void* pointer, void* stream) {
  VRAMBROKER_REQUIRE(client);
  return client->core->free_stream(client, pointer, reinterpret_cast<uintptr_t>(stream));
}

int vrambroker_record_stream(vrambroker_client* client, void* pointer, void* stream) {
  VRAMBROKER_REQUIRE(client);
  return client->core->record_stream(client, pointer, reinterpret_cast<uintptr_t>(stream));
}

int vrambroker_lease_segment(vrambroker_client* client, uint64_t bytes, int device, void** pointer) {
  VRAMBROKER_REQUIRE(pointer);
  *pointer = nullptr;
  VRAMBROKER_REQUIRE_CLIENT(client);
  return client->core->lease_segment(client, bytes, device, pointer);
}

int vrambroker_return_segment(vrambroker_client* client, void* pointer) {
  VRAMBROKER_REQUIRE_CLIENT(client);
  return client->core->return_segment(client, pointer);
}

int vrambroker_write(vrambroker_client* client, void* pointer, uint64_t offset, const void* from, uint64_t bytes) {
  VRAMBROKER_REQUIRE_CLIENT(client);
  if (bytes > 0) VRAMBROKER_REQUIRE(from);
  return client->core->write(client, pointer, offset, from, bytes);
}

int vrambroker_read(vrambroker_client* client, const void* pointer, uint64_t offset, void* to, uint64_t bytes) {
  VRAMBROKER_REQUIRE_CLIENT(client);
  if (bytes > 0) VRAMBROKER_REQUIRE(to);
  return client->core->read(client, pointer, offset, to, bytes);
}

int vrambroker_empty_cache(vrambroker_client* client, uint64_t* released_bytes) {
  VRAMBROKER_REQUIRE_CLIENT(client);
  uint64_t unwanted = 0;
  return client->core->empty_cache(client, released_bytes == nullptr ? &unwanted : released_bytes);
}

// ---- Figures ----

int vrambroker_memory_info(vrambroker_client* client, int device, uint64_t* free_bytes, uint64_t* total_bytes) {
  VRAMBROKER_REQUIRE_CLIENT(client);
  VRAMBROKER_REQUIRE(free_bytes);
  VRAMBROKER_REQUIRE(total_bytes);
  return client->core->memory_info(client, device, free_bytes, total_bytes);
}

int vrambroker_get_memory_stats(vrambroker_client* client, int device, vrambroker_memory_stats* out) {
  VRAMBROKER_REQUIRE_CLIENT(client);
  VRAMBROKER_REQUIRE_STRUCT(out, kStatsV1);
  vrambroker_memory_stats stats = {};
  const int code = client->core->get_memory_stats(client, device, &stats);
  return code == VRAMBROKER_OK ? CopyOut(stats, out) : code;
}

int vrambroker_memory_stats_json(vrambroker_client* client, int device, char* buffer, size_t size, size_t* needed) {
  VRAMBROKER_REQUIRE_CLIENT(client);
  if (size > 0) VRAMBROKER_REQUIRE(buffer);
  size_t unwanted = 0;
  return client->core->memory_stats_json(client, device, buffer, size, needed == nullptr ? &unwanted : needed);
}

int vrambroker_reset_peak_memory_stats(vrambroker_client* client, int device) {
  VRAMBROKER_REQUIRE_CLIENT(client);
  return client->core->reset_memory_stats(client, device, false);
}

int vrambroker_reset_memory_stats(vrambroker_client* client, int device) {
  VRAMBROKER_REQUIRE_CLIENT(client);
  return client->core->reset_memory_stats(client, device, true);
}

}  // extern "C"
