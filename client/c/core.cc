// SPDX-License-Identifier: Apache-2.0
//
// libvrambroker-core.so: the C++ client behind the function table in core_api.h.
#include <algorithm>
#include <cstring>
#include <exception>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "allocator/heap/memory_stats.h"
#include "client/c/core.h"
#include "client/c/core_api.h"
#include "client/c/thread_text.h"
#include "client/connection/grpc_use.h"
#include "client/heap/give_up.h"
#include "client/heap/out_of_memory_json.h"
#include "client/heap/scope_stack.h"
#include "client/vrambroker/client.h"

namespace vrambroker::client_internal {
namespace {

thread_local vrambroker_core_error last_error;
ThreadText last_report;  // of the last error with a report

const vrambroker_core_error* CoreLastError() {
  return &last_error;
}

Client& Of(vrambroker_client* client) {
  return static_cast<CoreClient*>(client)->client;
}

// ---- Errors ----

template <size_t kSize>
void CopyText(absl::string_view from, char (&to)[kSize]) {
  to[from.copy(to, kSize - 1)] = '\0';
}

int CauseToC(OutOfMemory::Cause cause) {
  switch (cause) {
    case OutOfMemory::Cause::kUnknown:
      break;
    case OutOfMemory::Cause::kLimit:
      return VRAMBROKER_CAUSE_LIMIT;
    case OutOfMemory::Cause::kCapacity:
      return VRAMBROKER_CAUSE_CAPACITY;
    case OutOfMemory::Cause::kFragmentation:
      return VRAMBROKER_CAUSE_FRAGMENTATION;
    case OutOfMemory::Cause::kLargerThanDevice:
      return VRAMBROKER_CAUSE_LARGER_THAN_DEVICE;
  }
  return VRAMBROKER_CAUSE_UNKNOWN;
}

int SetError(int code, absl::string_view message) {
  last_error.code = code;
  last_error.has_oom = false;
  last_error.oom_json = nullptr;
  CopyText(message, last_error.message);
  return code;
}

}  // namespace

int Fail(int code, const char* message) {
  return SetError(code, message);
}

int Report(const absl::Status& status) {
  if (status.ok()) return VRAMBROKER_OK;
  SetError(static_cast<int>(status.code()), status.message());
  const std::optional<OutOfMemory> oom = GetOutOfMemory(status);
  if (!oom.has_value()) return last_error.code;
  last_error.has_oom = true;
  vrambroker_out_of_memory& out = last_error.oom;
  out = {};
  out.struct_size = sizeof out;
  out.cause = CauseToC(oom->cause);
  out.device = oom->device;
  out.requested_bytes = oom->requested_bytes;
  out.segment_bytes = oom->segment_bytes;
  out.limit_bytes = oom->limit_bytes;
  out.reserved_bytes = oom->reserved_bytes;
  out.allocated_bytes = oom->allocated_bytes;
  out.idle_bytes = oom->idle_bytes;
  out.largest_free_block_bytes = oom->largest_free_block_bytes;
  out.device_capacity_bytes = oom->device_capacity_bytes;
  out.device_available_bytes = oom->device_available_bytes;
  CopyText(oom->advice, out.advice);
  out.guarantee_bytes = oom->guarantee_bytes;
  out.inactive_split_bytes = oom->inactive_split_bytes;
  out.device_kept_free_bytes = oom->device_kept_free_bytes;
  out.device_idle_bytes = oom->device_idle_bytes;
  out.device_quarantined_bytes = oom->device_quarantined_bytes;
  out.idle_elsewhere_bytes = oom->idle_elsewhere_bytes;
  out.waited_ms = oom->waited_ms;
  out.block_bytes = oom->block_bytes;
  out.room_bytes = oom->room_bytes;
  out.hole_bytes = oom->hole_bytes;
  out.holes = oom->holes;
  out.hole_segments = oom->hole_segments;
  CopyText(oom->explanation, out.explanation);
  last_error.oom_json = last_report.Keep(OutOfMemoryJsonOf(status).c_str());
  return last_error.code;
}

// ---- Sessions ----

namespace {

absl::StatusOr<absl::Duration> Milliseconds(const char* option, int64_t value, absl::Duration otherwise) {
  if (value < 0) return absl::InvalidArgumentError(absl::StrCat(option, ": ", value, " is less than 0"));
  return value == 0 ? otherwise : absl::Milliseconds(value);
}

}  // namespace

absl::Status ReturnSegment(Client& client, void* pointer, const uint64_t* stream) {
  if (pointer == nullptr) return absl::OkStatus();
  return stream == nullptr ? client.ReturnSegment(pointer) : client.ReturnSegment(pointer, *stream);
}

absl::StatusOr<ClientOptions> OptionsFromC(const vrambroker_options& from) {
  ClientOptions options;
  if (from.placement > VRAMBROKER_REMOTE) {
    return absl::InvalidArgumentError(absl::StrCat("placement: ", from.placement, " is neither LEASED nor REMOTE"));
  }
  options.placement = from.placement == VRAMBROKER_REMOTE ? Placement::kRemote : Placement::kLeased;
  if (from.socket_dir != nullptr) options.socket_dir = from.socket_dir;
  if (from.name != nullptr) options.name = from.name;
  if (from.limit != nullptr) {
    const absl::StatusOr<Limit> limit = ParseLimit(from.limit);
    if (!limit.ok()) return absl::InvalidArgumentError(absl::StrCat("limit: ", limit.status().message()));
    options.limit = *limit;
  }
  if (from.guarantee != nullptr) {
    const absl::StatusOr<Limit> guarantee = ParseLimit(from.guarantee);
    if (!guarantee.ok()) return absl::InvalidArgumentError(absl::StrCat("guarantee: ", guarantee.status().message()));
    options.guarantee = *guarantee;
  }
  if (from.devices != nullptr) options.devices = absl::StrSplit(from.devices, ',');
  if (from.alloc_conf != nullptr) options.alloc_conf = from.alloc_conf;
  absl::StatusOr<absl::Duration> time = Milliseconds("idle_decay_ms", from.idle_decay_ms, options.idle_decay);
  if (!time.ok()) return time.status();
  options.idle_decay = *time;
  time = Milliseconds("connect_timeout_ms", from.connect_timeout_ms, options.connect_timeout);
  if (!time.ok()) return time.status();
  options.connect_timeout = *time;
  time = Milliseconds("call_timeout_ms", from.call_timeout_ms, options.call_timeout);
  if (!time.ok()) return time.status();
  options.call_timeout = *time;
  time = Milliseconds("wait_ms", from.wait_ms, options.wait);
  if (!time.ok()) return time.status();
  options.wait = *time;
  if (from.on_lost != nullptr) {
    options.on_lost = [function = from.on_lost, context = from.context](const absl::Status& why) {
      function(context, static_cast<int>(why.code()), std::string(why.message()).c_str());
    };
  }
  if (from.log != nullptr) {
    options.log = [function = from.log, context = from.context](const std::string& line) {
      function(context, line.c_str());
    };
  }
  return options;
}

int Take(const absl::StatusOr<void*>& from, void** pointer) {
  if (from.ok()) {
    *pointer = *from;
    return VRAMBROKER_OK;
  }
  return Report(from.status());
}

namespace {

int CoreConnect(const vrambroker_options* options, vrambroker_client** client) {
  return Guarded([&] {
    const absl::StatusOr<ClientOptions> converted = OptionsFromC(*options);
    if (!converted.ok()) return Report(converted.status());
    absl::StatusOr<Client> connected = Client::Connect(*converted);
    if (!connected.ok()) return Report(connected.status());
    *client = new CoreClient(*std::move(connected));
    return Report(absl::OkStatus());
  });
}

int CoreDisconnect(vrambroker_client* client) {
  return Guarded([&] {
    delete static_cast<CoreClient*>(client);
    return Report(absl::OkStatus());
  });
}

int CoreBeginDisconnect(vrambroker_client* client) {
  return Guarded([&] {
    Of(client).BeginEnd();
    return Report(absl::OkStatus());
  });
}

int CoreStatus(vrambroker_client* client) {
  return Guarded([&] { return Report(Of(client).status()); });
}

int CoreGetSession(vrambroker_client* client, vrambroker_session* out) {
  return Guarded([&] {
    out->session_id = Of(client).session_id();
    out->calls = Of(client).calls();
    CopyText(Of(client).name(), out->name);
    return Report(absl::OkStatus());
  });
}

const char* CoreWarning(vrambroker_client* client, size_t index) {
  const std::vector<std::string>& warnings = Of(client).warnings();
  return index < warnings.size() ? warnings[index].c_str() : nullptr;
}

// ---- Devices ----

absl::Status CheckDevice(const Client& client, int device) {
  const size_t count = client.devices().size();
  if (device >= 0 && static_cast<size_t>(device) < count) return absl::OkStatus();
  return absl::NotFoundError(
      absl::StrCat("no device ", device, "; the daemon has ", count, count == 1 ? " device" : " devices"));
}

int CoreDeviceCount(vrambroker_client* client) {
  return static_cast<int>(Of(client).devices().size());
}

int CoreGetDevice(vrambroker_client* client, int device, vrambroker_device* out) {
  return Guarded([&] {
    if (const absl::Status status = CheckDevice(Of(client), device); !status.ok()) return Report(status);
    const DeviceInfo& info = Of(client).devices()[static_cast<size_t>(device)];
    out->ordinal = info.ordinal;
    out->total_bytes = info.total_bytes;
    out->capacity_bytes = info.capacity_bytes;
    out->limit_bytes = Of(client).limit_bytes(device);
    CopyText(info.kind, out->kind);
    CopyText(info.uuid, out->uuid);
    CopyText(info.name, out->name);
    return Report(absl::OkStatus());
  });
}

// ---- Memory ----

int CoreMalloc(vrambroker_client* client, uint64_t bytes, int device, uint64_t stream, void** pointer) {
  return Guarded([&] { return Take(Of(client).Malloc(bytes, device, stream), pointer); });
}

int CoreFree(vrambroker_client* client, void* pointer) {
  return Guarded([&] { return Report(Of(client).Free(pointer)); });
}

int CoreFreeStream(vrambroker_client* client, void* pointer, uint64_t stream) {
  return Guarded([&] { return Report(Of(client).Free(pointer, stream)); });
}

int CoreRecordStream(vrambroker_client* client, void* pointer, uint64_t stream) {
  return Guarded([&] { return Report(Of(client).RecordStream(pointer, stream)); });
}

int CoreMallocUntil(vrambroker_client* client, uint64_t bytes, int device, uint64_t stream, const int* give_up,
                    void** pointer) {
  const GiveUpScope scope(give_up);
  return CoreMalloc(client, bytes, device, stream, pointer);
}

int CoreLeaseSegment(vrambroker_client* client, uint64_t bytes, int device, const int* give_up, void** pointer) {
  const GiveUpScope scope(give_up);
  return Guarded([&] { return Take(Of(client).LeaseSegment(bytes, device), pointer); });
}

int CoreTryLeaseSegment(vrambroker_client* client, uint64_t bytes, int device, void** pointer) {
  return Guarded([&] { return Take(Of(client).TryLeaseSegment(bytes, device), pointer); });
}

int CoreReportSegmentUse(vrambroker_client* client, int device, const vrambroker_segment_use* use) {
  return Guarded([&] {
    return Report(Of(client).ReportSegmentUse({.allocated_bytes = use->allocated_bytes,
                                               .requested_bytes = use->requested_bytes,
                                               .inactive_split_bytes = use->inactive_split_bytes,
                                               .idle_bytes = use->idle_bytes,
                                               .allocated_bytes_peak = use->allocated_bytes_peak},
                                              device));
  });
}

int CoreServeTrims(vrambroker_client* client, bool on) {
  return Guarded([&] { return Report(Of(client).ServeTrims(on)); });
}

int CoreWaitForTrim(vrambroker_client* client, int64_t timeout_ms, vrambroker_trim* out) {
  return Guarded([&] {
    const absl::StatusOr<TrimRequest> trim = Of(client).WaitForTrim(absl::Milliseconds(timeout_ms));
    if (!trim.ok()) return Report(trim.status());
    out->number = trim->number;
    out->bytes = trim->bytes;
    out->time_ms = absl::ToInt64Milliseconds(trim->time);
    out->device = trim->device;
    return Report(absl::OkStatus());
  });
}

int CoreEndTrim(vrambroker_client* client, uint64_t number) {
  return Guarded([&] { return Report(Of(client).EndTrim(number)); });
}

int CoreReturnSegment(vrambroker_client* client, void* pointer, const uint64_t* stream) {
  return Guarded([&] { return Report(ReturnSegment(Of(client), pointer, stream)); });
}

int CoreWrite(vrambroker_client* client, void* pointer, uint64_t offset, const void* from, uint64_t bytes) {
  return Guarded([&] { return Report(Of(client).Write(pointer, offset, from, bytes)); });
}

int CoreRead(vrambroker_client* client, const void* pointer, uint64_t offset, void* to, uint64_t bytes) {
  return Guarded([&] { return Report(Of(client).Read(pointer, offset, to, bytes)); });
}

int CoreEmptyCache(vrambroker_client* client, uint64_t* released_bytes) {
  return Guarded([&] {
    const absl::StatusOr<uint64_t> released = Of(client).EmptyCache();
    *released_bytes = released.value_or(0);
    return Report(released.status());
  });
}

// ---- Figures ----

int CoreMemoryInfo(vrambroker_client* client, int device, uint64_t* free_bytes, uint64_t* total_bytes) {
  return Guarded([&] {
    const absl::StatusOr<MemoryStats> stats = Of(client).GetMemoryStats(device);
    if (!stats.ok()) return Report(stats.status());
    const uint64_t allocated = stats->allocated_bytes.all.current;
    *total_bytes = Of(client).limit_bytes(device);
    *free_bytes = *total_bytes - std::min(*total_bytes, allocated);  // a limit may be below held memory
    return Report(absl::OkStatus());
  });
}

int CoreGetMemoryStats(vrambroker_client* client, int device, vrambroker_memory_stats* out) {
  return Guarded([&] {
    const absl::StatusOr<MemoryStats> stats = Of(client).GetMemoryStats(device);
    if (!stats.ok()) return Report(stats.status());
    out->allocated_bytes = stats->allocated_bytes.all.current;
    out->allocated_bytes_peak = stats->allocated_bytes.all.peak;
    out->reserved_bytes = stats->reserved_bytes.all.current;
    out->reserved_bytes_peak = stats->reserved_bytes.all.peak;
    out->active_bytes = stats->active_bytes.all.current;
    out->active_bytes_peak = stats->active_bytes.all.peak;
    out->requested_bytes = stats->requested_bytes.all.current;
    out->requested_bytes_peak = stats->requested_bytes.all.peak;
    out->inactive_split_bytes = stats->inactive_split_bytes.all.current;
    out->allocations = stats->allocation.all.current;
    out->segments = stats->segment.all.current;
    out->num_alloc_retries = stats->num_alloc_retries;
    out->num_ooms = stats->num_ooms;
    out->num_device_alloc = stats->num_device_alloc;
    out->num_device_free = stats->num_device_free;
    return Report(absl::OkStatus());
  });
}

// Copies `text` with a terminating NUL; OutOfRange when it does not fit.
int Fill(const std::string& text, char* buffer, size_t size, size_t* needed) {
  *needed = text.size() + 1;
  if (size < *needed) {
    return Report(absl::OutOfRangeError(absl::StrCat("the buffer has ", size, " bytes and needs ", *needed)));
  }
  std::memcpy(buffer, text.c_str(), *needed);
  return Report(absl::OkStatus());
}

int CoreMemoryStatsJson(vrambroker_client* client, int device, char* buffer, size_t size, size_t* needed) {
  return Guarded([&] {
    const absl::StatusOr<MemoryStats> stats = Of(client).GetMemoryStats(device);
    if (!stats.ok()) return Report(stats.status());
    std::string json;
    for (const auto& [key, value] : FlatMemoryStats(*stats)) {
      absl::StrAppend(&json, json.empty() ? "{\"" : ", \"", key, "\": ", value);
    }
    json += '}';
    return Fill(json, buffer, size, needed);
  });
}

int CoreResetMemoryStats(vrambroker_client* client, int device, bool accumulated) {
  return Guarded(
      [&] { return Report(accumulated ? Of(client).ResetStats(device) : Of(client).ResetPeakStats(device)); });
}

int CoreResetAccumulatedMemoryStats(vrambroker_client* client, int device) {
  return Guarded([&] { return Report(Of(client).ResetTotals(device)); });
}

int CoreMemorySummary(vrambroker_client* client, int device, bool abbreviated, char* buffer, size_t size,
                      size_t* needed) {
  return Guarded([&] {
    const absl::StatusOr<std::string> table = Of(client).MemorySummary(device, abbreviated);
    return table.ok() ? Fill(*table, buffer, size, needed) : Report(table.status());
  });
}

int CoreSetMemoryFraction(vrambroker_client* client, double fraction, int device) {
  return Guarded([&] { return Report(Of(client).SetMemoryFraction(fraction, device)); });
}

// ---- Recordings ----

int CoreSetRecording(vrambroker_client* client, uint64_t max_events) {
  return Guarded([&] { return Report(Of(client).SetRecording(max_events)); });
}

int CoreDumpSnapshot(vrambroker_client* client, const char* path) {
  return Guarded([&] { return Report(Of(client).DumpSnapshot(path)); });
}

int CoreSnapshotJson(vrambroker_client* client, bool with_history, char* buffer, size_t size, size_t* needed) {
  return Guarded([&] {
    const absl::StatusOr<std::string> json = Of(client).SnapshotJson(with_history);
    if (!json.ok()) return Report(json.status());
    const int code = Fill(*json, buffer, size, needed);
    // The next snapshot includes this snapshot as an event, at least: with the exact size a caller could loop for ever.
    if (size < *needed) *needed += *needed / 8 + 4096;
    return code;
  });
}

// ---- Scopes ----

uint32_t CoreScopeBegin(const char* name, const char* file, int line) {
  if (name == nullptr || *name == '\0') return CurrentScope();
  try {
    return EnterScope(name, file == nullptr ? "" : file, line > 0 ? static_cast<uint32_t>(line) : 0);
  } catch (const std::exception&) {
    return CurrentScope();  // no memory for a name
  }
}

void CoreScopeEnd(uint32_t outer) {
  LeaveScope(outer != 0 && IsScope(outer) ? static_cast<ScopeId>(outer) : ScopeId{0});
}

constexpr vrambroker_core kCore = {
    .version = kVrambrokerCoreVersion,
    .last_error = &CoreLastError,
    .uses_grpc = [] { return GrpcUser() != 0; },
    .is_forked = &IsForkedFromGrpc,
    .connect = &CoreConnect,
    .disconnect = &CoreDisconnect,
    .begin_disconnect = &CoreBeginDisconnect,
    .status = &CoreStatus,
    .get_session = &CoreGetSession,
    .warning = &CoreWarning,
    .device_count = &CoreDeviceCount,
    .get_device = &CoreGetDevice,
    .malloc = &CoreMalloc,
    .free = &CoreFree,
    .free_stream = &CoreFreeStream,
    .record_stream = &CoreRecordStream,
    .malloc_until = &CoreMallocUntil,
    .lease_segment = &CoreLeaseSegment,
    .try_lease_segment = &CoreTryLeaseSegment,
    .return_segment = &CoreReturnSegment,
    .report_segment_use = &CoreReportSegmentUse,
    .serve_trims = &CoreServeTrims,
    .wait_for_trim = &CoreWaitForTrim,
    .end_trim = &CoreEndTrim,
    .write = &CoreWrite,
    .read = &CoreRead,
    .empty_cache = &CoreEmptyCache,
    .memory_info = &CoreMemoryInfo,
    .get_memory_stats = &CoreGetMemoryStats,
    .memory_stats_json = &CoreMemoryStatsJson,
    .reset_memory_stats = &CoreResetMemoryStats,
    .reset_accumulated_memory_stats = &CoreResetAccumulatedMemoryStats,
    .memory_summary = &CoreMemorySummary,
    .set_memory_fraction = &CoreSetMemoryFraction,
    .set_recording = &CoreSetRecording,
    .dump_snapshot = &CoreDumpSnapshot,
    .snapshot_json = &CoreSnapshotJson,
    .scope_begin = &CoreScopeBegin,
    .scope_end = &CoreScopeEnd,
    .torch_connect = &CoreTorchConnect,
    .torch_client = &CoreTorchClient,
    .torch_device = &CoreTorchDevice,
    .torch_malloc = &CoreTorchMalloc,
    .torch_free = &CoreTorchFree,
    .torch_return_segment = &CoreTorchReturnSegment,
    .torch_record_stream = &CoreTorchRecordStream,
    .torch_throw = &CoreTorchThrow,
};

}  // namespace

CoreClient::CoreClient(Client connected) : vrambroker_client{.core = &kCore}, client(std::move(connected)) {}

}  // namespace vrambroker::client_internal

const vrambroker_core* vrambroker_core_v1(uint32_t version) {
  return version == kVrambrokerCoreVersion ? &vrambroker::client_internal::kCore : nullptr;
}

const char* vrambroker_core_release(void) {
  return VRAMBROKER_VERSION;
}
