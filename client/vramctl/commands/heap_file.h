// SPDX-License-Identifier: Apache-2.0
//
// Snapshots in files, for commands normally asking the daemon for a session's snapshot.
#ifndef VRAMBROKER_CLIENT_VRAMCTL_COMMANDS_HEAP_FILE_H_
#define VRAMBROKER_CLIENT_VRAMCTL_COMMANDS_HEAP_FILE_H_

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "allocator/heap/heap_snapshot.h"
#include "client/vramctl/options/context.h"
#include "client/vramctl/views/heap_sums.h"

namespace vrambroker::vramctl {

// Whether an argument names a file rather than a session: the argument has a slash, ends in .pickle or .pickle.gz, or
// is the name of a file here. name:NAME is always a session.
bool IsHeapFile(const std::string& argument);

nlohmann::ordered_json HeapSumsJson(const HeapSums& sums);

// Reads the heaps of a pickled snapshot, by device. InvalidArgument names the file.
absl::StatusOr<std::vector<HeapSnapshot>> ReadHeapFile(const std::string& path);

// InvalidArgument if the file lacks the device context.only_device.
absl::Status CheckHeapDevice(const Context& context, const std::vector<HeapSnapshot>& heaps);

}  // namespace vrambroker::vramctl

#endif  // VRAMBROKER_CLIENT_VRAMCTL_COMMANDS_HEAP_FILE_H_
