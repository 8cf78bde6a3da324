// SPDX-License-Identifier: Apache-2.0
#include "client/vramctl/commands/heap_file.h"

#include <filesystem>
#include <system_error>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "allocator/replay/pickle.h"
#include "allocator/replay/torch_segments.h"
#include "allocator/replay/trace.h"
#include "client/vramctl/views/output.h"

namespace vrambroker::vramctl {

bool IsHeapFile(const std::string& argument) {
  if (absl::StartsWith(argument, "name:") || absl::StartsWith(argument, "id:")) return false;
  std::error_code error;
  return absl::StrContains(argument, '/') || absl::EndsWith(argument, ".pickle") ||
         absl::EndsWith(argument, ".pickle.gz") || std::filesystem::is_regular_file(argument, error);
}

nlohmann::ordered_json HeapSumsJson(const HeapSums& sums) {
  return {{"segments", sums.segments},
          {"blocks", sums.blocks},
          {"holes", sums.holes},
          {"reserved_bytes", sums.reserved_bytes},
          {"allocated_bytes", sums.allocated_bytes},
          {"pending_bytes", sums.pending_bytes},
          {"fragmented_bytes", sums.fragmented_bytes},
          {"reclaimable_bytes", sums.reclaimable_bytes},
          {"largest_hole_bytes", sums.largest_hole_bytes}};
}

absl::StatusOr<std::vector<HeapSnapshot>> ReadHeapFile(const std::string& path) {
  const absl::StatusOr<std::string> bytes = ReadMaybeGzipped(path);
  // A missing file is an ordinary wrong argument.
  if (!bytes.ok()) return absl::InvalidArgumentError(bytes.status().message());
  if (bytes->empty() || bytes->front() != '\x80') {
    return absl::InvalidArgumentError(
        absl::StrCat(InputName(path),
                     ": is no pickled snapshot, as torch.cuda.memory._dump_snapshot and vramctl "
                     "snapshot write it"));
  }
  const absl::StatusOr<PickleValue> snapshot = ReadPickle(*bytes);
  absl::StatusOr<std::vector<HeapSnapshot>> heaps = snapshot.ok() ? HeapsOfTorchSnapshot(*snapshot) : snapshot.status();
  if (heaps.ok()) return heaps;
  return absl::InvalidArgumentError(absl::StrCat(InputName(path), ": ", heaps.status().message()));
}

absl::Status CheckHeapDevice(const Context& context, const std::vector<HeapSnapshot>& heaps) {
  const int device = context.only_device.value_or(0);
  if (!context.only_device.has_value() || (device >= 0 && static_cast<size_t>(device) < heaps.size())) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("no device ", device, "; the file has ", Counted(heaps.size(), "device")));
}

}  // namespace vrambroker::vramctl
