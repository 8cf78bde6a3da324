// SPDX-License-Identifier: Apache-2.0
#include "allocator/device/gpu_processes.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <map>

#include "absl/strings/str_cat.h"
#include "allocator/device/nvml.h"

namespace vrambroker {
namespace {

constexpr uint64_t kNotAvailable = ~0ULL;  // NVML_VALUE_NOT_AVAILABLE

// Common beginning of all versions of nvmlProcessInfo_t.
struct RecordStart {
  uint32_t pid = 0;
  uint64_t used_bytes = 0;
};
constexpr std::array<size_t, 3> kRecordBytes = {16, 24, 32};
constexpr size_t kRoomBytes = 64;           // for each record: more than in any version
constexpr unsigned int kMoreProcesses = 8;  // allowance for processes that start between two calls
constexpr int kTries = 5;

absl::StatusOr<std::vector<GpuProcess>> CallList(const Nvml& nvml, const char* name, Nvml::ListProcesses list,
                                                 NvmlHandle device) {
  unsigned int room = kMoreProcesses;
  int error = kNvmlInsufficientSize;
  for (int i = 0; i < kTries && error == kNvmlInsufficientSize; ++i) {
    std::vector<char> records(room * kRoomBytes, kUnwritten);
    unsigned int count = room;
    error = list(device, &count, records.data());
    if (error == kNvmlSuccess) return ReadProcessRecords(records, std::min(count, room));
    room = count + kMoreProcesses;
  }
  return NvmlError(nvml, name, error);
}

}  // namespace

absl::StatusOr<std::vector<GpuProcess>> ReadProcessRecords(absl::Span<const char> records, size_t count) {
  std::vector<GpuProcess> processes;
  if (count == 0) return processes;
  // Records end with the upper bytes of a size, or with a number of an instance: neither has a byte kUnwritten.
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
  const absl::StatusOr<NvmlDevice> device = FindNvmlDevice(**nvml, uuid);
  if (!device.ok()) return device.status();
  // A process that computes and draws is in two lists, each time with its whole use.
  std::map<pid_t, uint64_t> uses;
  for (const auto& [name, list] : (*nvml)->lists) {
    const absl::StatusOr<std::vector<GpuProcess>> processes = CallList(**nvml, name, list, device->handle);
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
