// SPDX-License-Identifier: Apache-2.0
//
// libvrambroker.so: checks arguments and keeps errors; the core does the rest. Uses no part of C++ that needs a
// library: C programs get no libstdc++ among their symbols.
#include <algorithm>
#include <cstdarg>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "allocator/base/amount_parser.h"
#include "client/c/core_api.h"
#include "client/c/library.h"
#include "client/c/thread_text.h"

namespace vrambroker::c_library {
namespace {

// ---- Errors ----

thread_local Error last_error;
ThreadText last_report;  // of the last error with a report

}  // namespace

int Fail(int code, const char* format, ...) {
  char text[sizeof last_error.message];  // separate buffer: the arguments may include the last message
  va_list arguments;
  va_start(arguments, format);
  // NOLINTNEXTLINE(clang-analyzer-valist.Uninitialized): a false report of clang 14 when it checks several files
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  last_error.code = code;
  last_error.has_oom = false;
  std::memcpy(last_error.message, text, std::strlen(text) + 1);
  return code;
}

int KeepError(const vrambroker_core* core) {
  last_error = *core->last_error();
  if (last_error.has_oom) (void)last_report.Keep(last_error.oom_json);
  last_error.oom_json = nullptr;  // owned by the core, and soon replaced
  return last_error.code;
}

const Error& LastError() {
  return last_error;
}

const char* LastReport() {
  return last_error.has_oom ? last_report.Get() : nullptr;
}

int FillText(const char* text, char* buffer, size_t size, size_t* needed) {
  const size_t bytes = text == nullptr ? 0 : std::strlen(text) + 1;
  if (needed != nullptr) *needed = bytes;
  if (text == nullptr) return VRAMBROKER_NOT_FOUND;
  if (size < bytes) return VRAMBROKER_OUT_OF_RANGE;
  std::memcpy(buffer, text, bytes);
  return VRAMBROKER_OK;
}

namespace {

int NullArgument(const char* function, const char* argument) {
  return Fail(VRAMBROKER_INVALID_ARGUMENT, "%s: %s is NULL", function, argument);
}

int BadStruct(const char* function, size_t struct_size) {
  return Fail(VRAMBROKER_INVALID_ARGUMENT, "%s: struct_size is %zu: set it to sizeof", function, struct_size);
}

// ---- Structs that may grow ----

// Every version has the fields up to these.
constexpr size_t kOptionsV1 = offsetof(vrambroker_options, context) + sizeof(void*);
constexpr size_t kOutOfMemoryV1 = offsetof(vrambroker_out_of_memory, advice) + sizeof(vrambroker_out_of_memory::advice);
constexpr size_t kSessionV1 = offsetof(vrambroker_session, name) + sizeof(vrambroker_session::name);
constexpr size_t kDeviceV1 = offsetof(vrambroker_device, name) + sizeof(vrambroker_device::name);
constexpr size_t kStatsV1 = offsetof(vrambroker_memory_stats, num_device_free) + sizeof(uint64_t);
constexpr size_t kSegmentUseV1 = offsetof(vrambroker_segment_use, idle_bytes) + sizeof(uint64_t);
constexpr size_t kTrimV1 = offsetof(vrambroker_trim, device) + sizeof(int);

}  // namespace

// Copies `options`; options unknown to the program get their default. False: an error is remembered.
bool ReadOptions(const char* function, const vrambroker_options* options, vrambroker_options* known) {
  *known = VRAMBROKER_OPTIONS_INIT;
  if (options == nullptr) return true;
  // Check first the fields with a fixed place in every version.
  if (options->struct_size < offsetof(vrambroker_options, placement)) {
    return BadStruct(function, options->struct_size) == VRAMBROKER_OK;
  }
  if (options->abi_version != VRAMBROKER_ABI_VERSION) {
    Fail(
        VRAMBROKER_FAILED_PRECONDITION,
        "the program was compiled for ABI version %u, but %s has version %d: recompile the program with that library's "
        "vrambroker.h, or run it with the library of its own version",
        options->abi_version, OwnPath(), VRAMBROKER_ABI_VERSION);
    return false;
  }
  if (options->struct_size < kOptionsV1) return BadStruct(function, options->struct_size) == VRAMBROKER_OK;
  const auto* bytes = reinterpret_cast<const unsigned char*>(options);
  for (size_t i = sizeof *options; i < options->struct_size; ++i) {
    if (bytes[i] != 0) {
      Fail(VRAMBROKER_FAILED_PRECONDITION, "%s: an option is set that %s, version %s, does not have", function,
           OwnPath(), VRAMBROKER_VERSION);
      return false;
    }
  }
  // A program compiled before an option existed leaves the option at its default.
  std::memset(known, 0, sizeof *known);
  std::memcpy(known, options, std::min(options->struct_size, sizeof *known));
  return true;
}

}  // namespace vrambroker::c_library

using namespace vrambroker::c_library;  // NOLINT(google-build-using-namespace): the C functions have no namespace

#define VRAMBROKER_REQUIRE(argument) \
  if ((argument) == nullptr) return NullArgument(__func__, #argument)
// Not for hot functions: there the client checks.
#define VRAMBROKER_REQUIRE_CLIENT(client) \
  VRAMBROKER_REQUIRE(client);             \
  if (const int code = CheckNotForked(); code != VRAMBROKER_OK) return code
#define VRAMBROKER_REQUIRE_STRUCT(argument, minimum) \
  VRAMBROKER_REQUIRE(argument);                      \
  if ((argument)->struct_size < (minimum)) return BadStruct(__func__, (argument)->struct_size)

extern "C" {

// ---- Errors ----

const char* vrambroker_code_name(int code) {
  switch (code) {
    case VRAMBROKER_OK:
      return "OK";
    case VRAMBROKER_CANCELLED:
      return "CANCELLED";
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

int vrambroker_last_out_of_memory_json(char* buffer, size_t size, size_t* needed) {
  if (size > 0) VRAMBROKER_REQUIRE(buffer);
  return FillText(LastReport(), buffer, size, needed);
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

// ---- Amounts ----

int vrambroker_parse_bytes(const char* text, uint64_t* bytes) {
  VRAMBROKER_REQUIRE(text);
  VRAMBROKER_REQUIRE(bytes);
  char why[AMOUNT_WHY_BYTES];
  uint64_t value = 0;
  if (amount_read_size(text, std::strlen(text), &value, why) != 0) {
    return Fail(VRAMBROKER_INVALID_ARGUMENT, "%s", why);
  }
  *bytes = value;
  return VRAMBROKER_OK;
}

int vrambroker_parse_duration(const char* text, int64_t* milliseconds) {
  VRAMBROKER_REQUIRE(text);
  VRAMBROKER_REQUIRE(milliseconds);
  char why[AMOUNT_WHY_BYTES];
  uint64_t value = 0;
  if (amount_read_milliseconds(text, std::strlen(text), &value, why) != 0) {
    return Fail(VRAMBROKER_INVALID_ARGUMENT, "%s", why);
  }
  *milliseconds = static_cast<int64_t>(value);
  return VRAMBROKER_OK;
}

// ---- Sessions ----

int vrambroker_connect(const vrambroker_options* options, vrambroker_client** client) {
  VRAMBROKER_REQUIRE(client);
  *client = nullptr;
  vrambroker_options known;
  if (!ReadOptions(__func__, options, &known)) return LastError().code;
  const vrambroker_core* const core = Core();
  return core == nullptr ? last_error.code : Kept(core, core->connect(&known, client));
}

int vrambroker_disconnect(vrambroker_client* client) {
  if (client == nullptr) return VRAMBROKER_OK;
  VRAMBROKER_REQUIRE_CLIENT(client);
  const vrambroker_core* const core = client->core;  // disconnect() destroys the client
  return Kept(core, core->disconnect(client));
}

int vrambroker_begin_disconnect(vrambroker_client* client) {
  VRAMBROKER_REQUIRE_CLIENT(client);
  return Kept(client->core, client->core->begin_disconnect(client));
}

int vrambroker_status(vrambroker_client* client) {
  VRAMBROKER_REQUIRE_CLIENT(client);
  return Kept(client->core, client->core->status(client));
}

int vrambroker_get_session(vrambroker_client* client, vrambroker_session* out) {
  VRAMBROKER_REQUIRE_CLIENT(client);
  VRAMBROKER_REQUIRE_STRUCT(out, kSessionV1);
  vrambroker_session session = {};
  const int code = Kept(client->core, client->core->get_session(client, &session));
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
  const int code = Kept(client->core, client->core->get_device(client, device, &found));
  return code == VRAMBROKER_OK ? CopyOut(found, out) : code;
}

// ---- Memory ----

int vrambroker_malloc(vrambroker_client* client, uint64_t bytes, int device, void** pointer) {
  VRAMBROKER_REQUIRE(pointer);
  *pointer = nullptr;
  VRAMBROKER_REQUIRE(client);
  return Kept(client->core, client->core->malloc(client, bytes, device, 0, pointer));
}

int vrambroker_malloc_stream(vrambroker_client* client, uint64_t bytes, int device, void* stream, void** pointer) {
  VRAMBROKER_REQUIRE(pointer);
  *pointer = nullptr;
  VRAMBROKER_REQUIRE(client);
  return Kept(client->core, client->core->malloc(client, bytes, device, reinterpret_cast<uintptr_t>(stream), pointer));
}

int vrambroker_malloc_until(vrambroker_client* client, uint64_t bytes, int device, void* stream, const int* give_up,
                            void** pointer) {
  VRAMBROKER_REQUIRE(pointer);
  *pointer = nullptr;
  VRAMBROKER_REQUIRE(client);
  return Kept(client->core,
              client->core->malloc_until(client, bytes, device, reinterpret_cast<uintptr_t>(stream), give_up, pointer));
}

int vrambroker_free(vrambroker_client* client, void* pointer) {
  VRAMBROKER_REQUIRE(client);
  return Kept(client->core, client->core->free(client, pointer));
}

int vrambroker_free_stream(vrambroker_client* client, void* pointer, void* stream) {
  VRAMBROKER_REQUIRE(client);
  return Kept(client->core, client->core->free_stream(client, pointer, reinterpret_cast<uintptr_t>(stream)));
}

int vrambroker_record_stream(vrambroker_client* client, void* pointer, void* stream) {
  VRAMBROKER_REQUIRE(client);
  return Kept(client->core, client->core->record_stream(client, pointer, reinterpret_cast<uintptr_t>(stream)));
}

int vrambroker_lease_segment(vrambroker_client* client, uint64_t bytes, int device, void** pointer) {
  VRAMBROKER_REQUIRE(pointer);
  *pointer = nullptr;
  VRAMBROKER_REQUIRE_CLIENT(client);
  return Kept(client->core, client->core->lease_segment(client, bytes, device, nullptr, pointer));
}

int vrambroker_lease_segment_until(vrambroker_client* client, uint64_t bytes, int device, const int* give_up,
                                   void** pointer) {
  VRAMBROKER_REQUIRE(pointer);
  *pointer = nullptr;
  VRAMBROKER_REQUIRE_CLIENT(client);
  return Kept(client->core, client->core->lease_segment(client, bytes, device, give_up, pointer));
}

int vrambroker_try_lease_segment(vrambroker_client* client, uint64_t bytes, int device, void** pointer) {
  VRAMBROKER_REQUIRE(pointer);
  *pointer = nullptr;
  VRAMBROKER_REQUIRE_CLIENT(client);
  return Kept(client->core, client->core->try_lease_segment(client, bytes, device, pointer));
}

int vrambroker_report_segment_use(vrambroker_client* client, int device, const vrambroker_segment_use* use) {
  VRAMBROKER_REQUIRE_CLIENT(client);
  VRAMBROKER_REQUIRE_STRUCT(use, kSegmentUseV1);
  vrambroker_segment_use known = {};  // fields unknown to the program are 0
  std::memcpy(&known, use, std::min(use->struct_size, sizeof known));
  return Kept(client->core, client->core->report_segment_use(client, device, &known));
}

int vrambroker_serve_trims(vrambroker_client* client, int on) {
  VRAMBROKER_REQUIRE_CLIENT(client);
  return Kept(client->core, client->core->serve_trims(client, on != 0));
}

int vrambroker_wait_for_trim(vrambroker_client* client, int64_t timeout_ms, vrambroker_trim* out) {
  VRAMBROKER_REQUIRE_CLIENT(client);
  VRAMBROKER_REQUIRE_STRUCT(out, kTrimV1);
  vrambroker_trim trim = {};
  const int code = Kept(client->core, client->core->wait_for_trim(client, timeout_ms, &trim));
  return code == VRAMBROKER_OK ? CopyOut(trim, out) : code;
}

int vrambroker_end_trim(vrambroker_client* client, uint64_t number) {
  VRAMBROKER_REQUIRE_CLIENT(client);
  return Kept(client->core, client->core->end_trim(client, number));
}

int vrambroker_return_segment(vrambroker_client* client, void* pointer) {
  VRAMBROKER_REQUIRE_CLIENT(client);
  return Kept(client->core, client->core->return_segment(client, pointer, nullptr));
}

int vrambroker_return_segment_stream(vrambroker_client* client, void* pointer, void* stream) {
  VRAMBROKER_REQUIRE_CLIENT(client);
  const uint64_t number = reinterpret_cast<uintptr_t>(stream);
  return Kept(client->core, client->core->return_segment(client, pointer, &number));
}

int vrambroker_write(vrambroker_client* client, void* pointer, uint64_t offset, const void* from, uint64_t bytes) {
  VRAMBROKER_REQUIRE_CLIENT(client);
  if (bytes > 0) VRAMBROKER_REQUIRE(from);
  return Kept(client->core, client->core->write(client, pointer, offset, from, bytes));
}

int vrambroker_read(vrambroker_client* client, const void* pointer, uint64_t offset, void* to, uint64_t bytes) {
  VRAMBROKER_REQUIRE_CLIENT(client);
  if (bytes > 0) VRAMBROKER_REQUIRE(to);
  return Kept(client->core, client->core->read(client, pointer, offset, to, bytes));
}

int vrambroker_empty_cache(vrambroker_client* client, uint64_t* released_bytes) {
  VRAMBROKER_REQUIRE_CLIENT(client);
  uint64_t unwanted = 0;
  return Kept(client->core, client->core->empty_cache(client, released_bytes == nullptr ? &unwanted : released_bytes));
}

// ---- Figures ----

int vrambroker_memory_info(vrambroker_client* client, int device, uint64_t* free_bytes, uint64_t* total_bytes) {
  VRAMBROKER_REQUIRE_CLIENT(client);
  VRAMBROKER_REQUIRE(free_bytes);
  VRAMBROKER_REQUIRE(total_bytes);
  return Kept(client->core, client->core->memory_info(client, device, free_bytes, total_bytes));
}

int vrambroker_get_memory_stats(vrambroker_client* client, int device, vrambroker_memory_stats* out) {
  VRAMBROKER_REQUIRE_CLIENT(client);
  VRAMBROKER_REQUIRE_STRUCT(out, kStatsV1);
  vrambroker_memory_stats stats = {};
  const int code = Kept(client->core, client->core->get_memory_stats(client, device, &stats));
  return code == VRAMBROKER_OK ? CopyOut(stats, out) : code;
}

int vrambroker_memory_stats_json(vrambroker_client* client, int device, char* buffer, size_t size, size_t* needed) {
  VRAMBROKER_REQUIRE_CLIENT(client);
  if (size > 0) VRAMBROKER_REQUIRE(buffer);
  size_t unwanted = 0;
  return Kept(client->core,
              client->core->memory_stats_json(client, device, buffer, size, needed == nullptr ? &unwanted : needed));
}

int vrambroker_reset_peak_memory_stats(vrambroker_client* client, int device) {
  VRAMBROKER_REQUIRE_CLIENT(client);
  return Kept(client->core, client->core->reset_memory_stats(client, device, false));
}

int vrambroker_reset_memory_stats(vrambroker_client* client, int device) {
  VRAMBROKER_REQUIRE_CLIENT(client);
  return Kept(client->core, client->core->reset_memory_stats(client, device, true));
}

int vrambroker_reset_accumulated_memory_stats(vrambroker_client* client, int device) {
  VRAMBROKER_REQUIRE_CLIENT(client);
  return Kept(client->core, client->core->reset_accumulated_memory_stats(client, device));
}

int vrambroker_memory_summary(vrambroker_client* client, int device, int abbreviated, char* buffer, size_t size,
                              size_t* needed) {
  VRAMBROKER_REQUIRE_CLIENT(client);
  if (size > 0) VRAMBROKER_REQUIRE(buffer);
  size_t unwanted = 0;
  return Kept(client->core, client->core->memory_summary(client, device, abbreviated != 0, buffer, size,
                                                         needed == nullptr ? &unwanted : needed));
}

int vrambroker_set_memory_fraction(vrambroker_client* client, double fraction, int device) {
  VRAMBROKER_REQUIRE_CLIENT(client);
  return Kept(client->core, client->core->set_memory_fraction(client, fraction, device));
}

// ---- Recordings ----

int vrambroker_set_recording(vrambroker_client* client, uint64_t max_events) {
  VRAMBROKER_REQUIRE_CLIENT(client);
  return Kept(client->core, client->core->set_recording(client, max_events));
}

int vrambroker_dump_snapshot(vrambroker_client* client, const char* path) {
  VRAMBROKER_REQUIRE_CLIENT(client);
  VRAMBROKER_REQUIRE(path);
  return Kept(client->core, client->core->dump_snapshot(client, path));
}

int vrambroker_snapshot_json(vrambroker_client* client, int with_history, char* buffer, size_t size, size_t* needed) {
  VRAMBROKER_REQUIRE_CLIENT(client);
  if (size > 0) VRAMBROKER_REQUIRE(buffer);
  size_t unwanted = 0;
  return Kept(client->core, client->core->snapshot_json(client, with_history != 0, buffer, size,
                                                        needed == nullptr ? &unwanted : needed));
}

// ---- Scopes ----

uint32_t vrambroker_scope_begin(const char* name, const char* file, int line) {
  const vrambroker_core* const core = Core();
  return core == nullptr ? 0 : core->scope_begin(name, file, line);
}

void vrambroker_scope_end(uint32_t outer) {
  if (const vrambroker_core* const core = Core(); core != nullptr) core->scope_end(outer);
}

}  // extern "C"
