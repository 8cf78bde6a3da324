// SPDX-License-Identifier: Apache-2.0
#include "client/vramctl/commands/snapshot_file.h"

#include <unistd.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "allocator/replay/pickle.h"
#include "allocator/replay/torch_snapshot.h"
#include "client/session/snapshot_file.h"
#include "client/vramctl/daemon/daemon_calls.h"
#include "client/vramctl/options/refusal.h"

namespace vrambroker::vramctl {

absl::Status CheckSnapshotPath(const std::string& path) {
  if (path == "-") return absl::OkStatus();
  if (path.empty()) return absl::InvalidArgumentError("-o: the name of a file is needed");
  const absl::Status status = client_internal::CheckFilePath(path);
  return {status.code(), status.ok() ? "" : absl::StrCat("-o ", status.message())};
}

absl::Status WriteFile(const std::string& path, absl::string_view bytes) {
  return path == "-" ? client_internal::WriteToDescriptor(STDOUT_FILENO, bytes)
                     : client_internal::WriteWholeFile(path, bytes);
}

absl::Status WriteSnapshot(absl::Span<const HeapSnapshot> heaps, const std::string& path) {
  if (path == "-") return WriteFile(path, absl::StrCat(WriteJson(TorchSnapshot(heaps)), "\n"));
  return client_internal::WriteSnapshotFile(heaps, path);
}

namespace {

// Whether the heap has blocks by now. Earlier blocks appear in the recording, if any.
bool HasBlocks(const HeapSnapshot& heap) {
  const auto is_block = [](const HistoryEvent& event) { return event.action != HistoryAction::kSnapshot; };
  return std::any_of(heap.history.begin(), heap.history.end(), is_block) ||
         std::any_of(heap.segments.begin(), heap.segments.end(), [](const auto& segment) { return !segment.whole; });
}

}  // namespace

absl::Status CheckHasBlocks(absl::Span<const HeapSnapshot> heaps, const std::string& session) {
  const bool holds_any =
      std::any_of(heaps.begin(), heaps.end(), [](const HeapSnapshot& heap) { return !heap.segments.empty(); });
  if (!holds_any || std::any_of(heaps.begin(), heaps.end(), HasBlocks)) return absl::OkStatus();
  return Refusal(absl::FailedPreconditionError(
      absl::StrCat(session,
                   " leases whole segments: the blocks are cut by an allocator of the application's own, as PyTorch's, "
                   "so that nothing "
                   "is recorded here; record it with torch.cuda.memory._record_memory_history, and run vramctl tune on "
                   "the snapshot")));
}

}  // namespace vrambroker::vramctl
