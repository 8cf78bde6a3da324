// SPDX-License-Identifier: Apache-2.0
//
// Names, numbers and layouts are those of NVIDIA's "NVML API Reference Guide". No header of it is needed.
#include "allocator/device/gpu_processes.h"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "allocator/base/mutex.h"

namespace vrambroker {
namespace {

constexpr char kNvmlLibrary[] = "libnvidia-ml.so.1";

// nvmlReturn_t
constexpr int kSuccess = 0;
constexpr int kNotSupported = 3;
constexpr int kNotFound = 6;
constexpr int kInsufficientSize = 7;
constexpr uint64_t kNotAvailable = ~0ULL;  // NVML_VALUE_NOT_AVAILABLE

// nvmlProcessInfo_t: its versions begin alike.
struct RecordStart {
  uint32_t pid = 0;
  uint64_t used_bytes = 0;
};
constexpr std::array<size_t, 3> kRecordBytes = {16, 24, 32};
constexpr size_t kRoomBytes = 64;           // for each record: more than any version has
constexpr unsigned int kMoreProcesses = 8;  // may come between two calls
constexpr int kTries = 5;

using NvmlDevice = void*;
using ListProcesses = int (*)(NvmlDevice device, unsigned int* count, void* records);

struct Nvml {
  int (*init)() = nullptr;
  const char* (*error_string)(int error) = nullptr;
  int (*get_handle)(const char* uuid, NvmlDevice* device) = nullptr;
  // Those that compute, those that draw, and those that compute by way of an MPS server.
  std::vector<std::pair<const char*, ListProcesses>> lists;
};

template <typename Function>
bool FindFunction(void* library, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
  return *function != nullptr;
}

absl::Status NvmlError(const Nvml& nvml, const char* call, int error) {
  const std::string text = absl::StrCat(call, " failed: ", nvml.error_string(error), " (", error, ")");
  return error == kNotSupported ? absl::UnimplementedError(text) : absl::InternalError(text);
}

absl::StatusOr<Nvml> LoadNvml() {
  // Never closed: it may have threads.
  void* const library = dlopen(kNvmlLibrary, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* const error = dlerror();
    return absl::UnimplementedError(
        absl::StrCat("NVIDIA's management library (NVML) cannot be loaded: ", error == nullptr ? kNvmlLibrary : error,
                     "; a container needs NVIDIA_DRIVER_CAPABILITIES=compute,utility"));
  }
  Nvml nvml;
  const bool is_whole = FindFunction(library, "nvmlInit_v2", &nvml.init) &&
                        FindFunction(library, "nvmlErrorString", &nvml.error_string) &&
                        FindFunction(library, "nvmlDeviceGetHandleByUUID", &nvml.get_handle);
  for (const char* const name : {"nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetGraphicsRunningProcesses_v3",
                                 "nvmlDeviceGetMPSComputeRunningProcesses_v3"}) {
    if (ListProcesses list = nullptr; FindFunction(library, name, &list)) nvml.lists.emplace_back(name, list);
  }
  if (!is_whole || nvml.lists.empty()) {
    return absl::UnimplementedError(absl::StrCat("the driver is too old: its ", kNvmlLibrary,
                                                 " does not list processes; install driver 525 or later"));
  }
  return nvml;
}

absl::StatusOr<const Nvml*> LoadedNvml() {
  static Mutex mu;
  static const Nvml* loaded ABSL_GUARDED_BY(mu) = nullptr;
  MutexLock lock(mu);
  if (loaded != nullptr) return loaded;
  const absl::StatusOr<Nvml> nvml = LoadNvml();
  if (!nvml.ok()) return nvml.status();
  if (const int error = nvml->init(); error != kSuccess) return NvmlError(*nvml, "nvmlInit_v2", error);
  loaded = new Nvml(*nvml);
  return loaded;
}

absl::StatusOr<NvmlDevice> HandleOf(const Nvml& nvml, const std::string& uuid) {
  NvmlDevice device = nullptr;
  int error = nvml.get_handle(uuid.c_str(), &device);
  if (absl::string_view number = uuid; error == kNotFound && absl::ConsumePrefix(&number, "GPU-")) {
    // CUDA does not say what it is the id of.
    error = nvml.get_handle(absl::StrCat("MIG-", number).c_str(), &device);
  }
  if (error != kSuccess) return NvmlError(nvml, "nvmlDeviceGetHandleByUUID", error);
  return device;
}

absl::StatusOr<std::vector<GpuProcess>> CallList(const Nvml& nvml, const char* name, ListProcesses list,
                                                 NvmlDevice device) {
  unsigned int room = kMoreProcesses;
  int error = kInsufficientSize;
  for (int i = 0; i < kTries && error == kInsufficientSize; ++i) {
    std::vector<char> records(room * kRoomBytes, kUnwritten);
    unsigned int count = room;
    error = list(device, &count, records.data());
    if (error == kSuccess) return ReadProcessRecords(records, std::min(count, room));
    room = count + kMoreProcesses;
  }
  return NvmlError(nvml, name, error);
}

}  // namespace

absl::StatusOr<std::vector<GpuProcess>> ReadProcessRecords(absl::Span<const char> records, size_t count) {
  std::vector<GpuProcess> processes;
  if (count == 0) return processes;
  // The last bytes of a record are the upper ones of a size, or a number of an instance: none of them is kUnwritten.
  const auto last = std::find_if(records.rbegin(), records.rend(), [](char byte) { return byte != kUnwritten; });
  const auto written = static_cast<size_t>(records.rend() - last);
  const size_t bytes = written / count;
  if (written % count != 0 || std::find(kRecordBytes.begin(), kRecordBytes.end(), bytes) == kRecordBytes.end()) {
    return absl::InternalError(
        absl::StrCat("NVML wrote ", count, " processes into ", written,
                     " bytes: no layout that is known; please report it with the driver's version"));
  }
  for (size_t i = 0; i < count; ++i) {
    RecordStart record;
    std::memcpy(&record, records.data() + i * bytes, sizeof record);
    if (record.used_bytes == kNotAvailable) {
      return absl::UnimplementedError("NVML does not tell how much each process uses of this GPU");
    }
    processes.push_back({.pid = static_cast<pid_t>(record.pid), .bytes = record.used_bytes});
  }
  return processes;
}

absl::StatusOr<std::vector<GpuProcess>> FindGpuProcesses(const std::string& uuid) {
  const absl::StatusOr<const Nvml*> nvml = LoadedNvml();
  if (!nvml.ok()) return nvml.status();
  const absl::StatusOr<NvmlDevice> device = HandleOf(**nvml, uuid);
  if (!device.ok()) return device.status();
  // One that computes and draws is in two lists, with all that it uses.
  std::map<pid_t, uint64_t> uses;
  for (const auto& [name, list] : (*nvml)->lists) {
    const absl::StatusOr<std::vector<GpuProcess>> processes = CallList(**nvml, name, list, *device);
    if (absl::IsUnimplemented(processes.status()) && list != (*nvml)->lists.front().second) continue;
    if (!processes.ok()) return processes.status();
    for (const GpuProcess& process : *processes) {
      uint64_t& bytes = uses[process.pid];
      bytes = std::max(bytes, process.bytes);
    }
  }
  std::vector<GpuProcess> processes;
  processes.reserve(uses.size());
  for (const auto& [pid, bytes] : uses) processes.push_back({.pid = pid, .bytes = bytes});
  return processes;
}

}  // namespace vrambroker
