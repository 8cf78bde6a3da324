// SPDX-License-Identifier: Apache-2.0
//
// vramctl diagnose FILE: summarizes a snapshot without a daemon; if the snapshot has a history, also finds settings
// needing less memory.
#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/types/span.h"
#include "allocator/heap/scope_use.h"
#include "client/vramctl/commands/commands.h"
#include "client/vramctl/commands/heap_file.h"
#include "client/vramctl/daemon/daemon_calls.h"
#include "client/vramctl/views/bars.h"
#include "client/vramctl/views/heap_sums.h"
#include "client/vramctl/views/output.h"
#include "client/vramctl/views/scope_table.h"

namespace vrambroker::vramctl {

absl::Status DiagnoseFile(const Context& context, const std::string& path) {
  const absl::StatusOr<std::vector<HeapSnapshot>> heaps = ReadHeapFile(path);
  if (!heaps.ok()) return heaps.status();
  if (absl::Status status = CheckHeapDevice(context, *heaps); !status.ok()) return status;
  nlohmann::ordered_json devices = nlohmann::ordered_json::array();
  for (size_t device = 0; device < heaps->size(); ++device) {
    const HeapSnapshot& heap = (*heaps)[device];
    if (context.only_device.has_value() && *context.only_device != static_cast<int>(device)) continue;
    const HeapSums sums = SumsOf(absl::MakeConstSpan(&heap, 1));
    if (context.json) {
      devices.push_back({{"device", device}, {"sums", HeapSumsJson(sums)}});
      continue;
    }
    if (heap.segments.empty()) continue;
    std::printf("%s, device %zu: %s\n", Printable(path).c_str(), device, SumsText(sums).c_str());
    constexpr size_t kMostScopes = 20;
    for (const std::string& line : ScopeLines(ScopeUses(heap), kMostScopes, /*has_peak=*/false)) {
      std::printf("  %s\n", line.c_str());
    }
  }
  if (context.json) {
    Print({{"event", nullptr}, {"file", path}, {"devices", std::move(devices)}});
    return absl::OkStatus();
  }
  std::printf("\n");
  absl::Status tuned = RunTune(context, path);
  if (!absl::StrContains(tuned.message(), "records no events to replay; run ")) return tuned;
  std::printf("No setting can be tried: the file has no history (torch.cuda.memory._record_memory_history()).\n");
  return absl::OkStatus();
}

}  // namespace vrambroker::vramctl
