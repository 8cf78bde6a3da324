// SPDX-License-Identifier: Apache-2.0
//
// SavedState: what the daemon of a socket directory leaves there for the next one.
#ifndef VRAMBROKER_SERVER_IDENTITY_SAVED_STATE_H_
#define VRAMBROKER_SERVER_IDENTITY_SAVED_STATE_H_

#include <cstdint>
#include <string>

#include "absl/container/btree_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace vrambroker {

struct SavedState {
  // Whose the segments are, as their names say, in every run: 16 random hexadecimal digits. Neither the directory's
  // path nor its device number would do: daemons in containers have the same path, and a container that is started
  // again has another device number.
  std::string owner;
  bool is_new = false;  // it was made now, in a directory without one
  // By UUID of a GPU, the most that was free at the start of one of the runs since clients last held nothing. What they
  // hold is not free when the next one starts: capacity by default, and limits that are fractions of it, would shrink.
  absl::btree_map<std::string, uint64_t> free_bytes;
};

// Of the machine's run; empty when it cannot be read.
std::string BootId();

// From `dir`/vrambroker.state. When there is none, or it is damaged or not this user's alone, a new one is made: memory
// that processes hold of earlier runs is not found then. One that cannot be written, for a full disk or a directory in
// its place, holds for this run alone, which is logged. What earlier boots of the machine left is of the owner alone.
// REQUIRES: `dir` is locked by LockSocketDir().
absl::StatusOr<SavedState> LoadState(const std::string& dir);
// At once or not at all. REQUIRES: as LoadState().
absl::Status SaveState(const std::string& dir, const SavedState& state);

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_IDENTITY_SAVED_STATE_H_
