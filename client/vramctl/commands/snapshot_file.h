// SPDX-License-Identifier: Apache-2.0
//
// Writes the files, or standard output, for `-o FILE` of vramctl. See client/session/snapshot_file.h.
#ifndef VRAMBROKER_CLIENT_VRAMCTL_COMMANDS_SNAPSHOT_FILE_H_
#define VRAMBROKER_CLIENT_VRAMCTL_COMMANDS_SNAPSHOT_FILE_H_

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "allocator/heap/heap_snapshot.h"

namespace vrambroker::vramctl {

// InvalidArgument if `path` is empty, or exists and is not a file; the code of errno if its folder is not writable.
absl::Status CheckSnapshotPath(const std::string& path);

// Writes all of `bytes`, or leaves `path` unchanged; "-" is standard output. Errors name the path.
absl::Status WriteFile(const std::string& path, absl::string_view bytes);

// Writes heaps by device. JSON for paths ending in .json and for "-" (standard output), else a pickle. Readers of
// `path` see either the old file or the complete new file. Errors name the path.
absl::Status WriteSnapshot(absl::Span<const HeapSnapshot> heaps, const std::string& path);

// FailedPrecondition if the session leases only whole segments, on all of its devices: its blocks are cut by the
// application's own allocator, so there is nothing to record. The message says where blocks can be recorded.
absl::Status CheckHasBlocks(absl::Span<const HeapSnapshot> heaps, const std::string& session);

}  // namespace vrambroker::vramctl

#endif  // VRAMBROKER_CLIENT_VRAMCTL_COMMANDS_SNAPSHOT_FILE_H_
