// SPDX-License-Identifier: Apache-2.0
//
// Heaps as a file in PyTorch's snapshot layout. Files are written whole or not at all.
#ifndef VRAMBROKER_CLIENT_SESSION_SNAPSHOT_FILE_H_
#define VRAMBROKER_CLIENT_SESSION_SNAPSHOT_FILE_H_

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "allocator/heap/heap_snapshot.h"

namespace vrambroker::client_internal {

// InvalidArgument when `path` is empty, or exists and is no file; errno's code when the folder is not writable.
absl::Status CheckFilePath(const std::string& path);

absl::Status WriteToDescriptor(int fd, absl::string_view bytes);

// Replaces the file atomically: a reader sees the old file or the whole new file. Follows links. Errors name the path.
// Several threads may write the same path: the last file stays.
absl::Status WriteWholeFile(const std::string& path, absl::string_view bytes);

// Writes heaps by device: JSON for paths ending in .json, else a pickle.
absl::Status WriteSnapshotFile(absl::Span<const HeapSnapshot> heaps, const std::string& path);

}  // namespace vrambroker::client_internal

#endif  // VRAMBROKER_CLIENT_SESSION_SNAPSHOT_FILE_H_
