// SPDX-License-Identifier: Apache-2.0
//
// What `-o FILE` of vramctl writes: files, or standard output. See client/session/snapshot_file.h.
#ifndef VRAMBROKER_CLIENT_VRAMCTL_COMMANDS_SNAPSHOT_FILE_H_
#define VRAMBROKER_CLIENT_VRAMCTL_COMMANDS_SNAPSHOT_FILE_H_

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "allocator/heap/heap_snapshot.h"

namespace vrambroker::vramctl {

// InvalidArgument when `path` is empty, or exists and is no file; errno's code where its folder cannot be written into.
absl::Status CheckSnapshotPath(const std::string& path);

// `path` is what it was, or has all of `bytes`; "-" is standard output. Errors name the path.
absl::Status WriteFile(const std::string& path, absl::string_view bytes);

// Heaps by device. JSON for paths that end in .json and for "-" (standard output), else a pickle. A reader of `path`
// sees the file that was there, or the new one as a whole. Errors name the path.
absl::Status WriteSnapshot(absl::Span<const HeapSnapshot> heaps, const std::string& path);

// A session leases whole segments and nothing else, on all of its devices: FailedPrecondition says that its blocks are
// cut by an allocator of the application's own, so that there is nothing to record, and where it can be recorded.
absl::Status CheckHasBlocks(absl::Span<const HeapSnapshot> heaps, const std::string& session);

}  // namespace vrambroker::vramctl

#endif  // VRAMBROKER_CLIENT_VRAMCTL_COMMANDS_SNAPSHOT_FILE_H_
