// SPDX-License-Identifier: Apache-2.0
#include "client/vramctl/snapshot_file.h"

#include <unistd.h>

#include "absl/strings/str_cat.h"
#include "allocator/replay/pickle.h"
#include "allocator/replay/torch_snapshot.h"
#include "client/snapshot_file.h"

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

}  // namespace vrambroker::vramctl
