// SPDX-License-Identifier: Apache-2.0
//
// SavedState: state left in a socket directory by its daemon for the next daemon.
#ifndef VRAMBROKER_SERVER_IDENTITY_SAVED_STATE_H_
#define VRAMBROKER_SERVER_IDENTITY_SAVED_STATE_H_

#include <cstdint>
#include <string>

#include "absl/container/btree_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace vrambroker {

struct SavedState {
  // Owner in the names of segments, constant over all runs: 16 random hexadecimal digits. Neither the directory's path
  // nor its device number would do: daemons in containers have the same path, and a restarted container has another
  // device number.
  std::string owner;
  bool is_new = false;  // `owner` was made now, in a directory without state
  // By UUID of a GPU, the most memory free at the start of any run since clients last held none. Memory held by clients
  // is not free at the next start: without the record, the default capacity, and limits as fractions of it, would
  // shrink.
  absl::btree_map<std::string, uint64_t> free_bytes;
};

// Identifies the boot of the machine; empty when unreadable.
std::string BootId();

// Loads `dir`/vrambroker.state. When the file is missing, damaged or writable by other users, makes a new state:
// memory held by processes from earlier runs is then not found. If the new file cannot be written, because of a full
// disk or a directory in its place, the state holds for this run alone, with a log line. Earlier boots of the machine
// leave only the owner. REQUIRES: `dir` is locked by LockSocketDir().
absl::StatusOr<SavedState> LoadState(const std::string& dir);
// Saves atomically. REQUIRES: as LoadState().
absl::Status SaveState(const std::string& dir, const SavedState& state);

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_IDENTITY_SAVED_STATE_H_
