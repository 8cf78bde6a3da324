// SPDX-License-Identifier: Apache-2.0
//
// SavedSegments: records the segments of a host device handed out by the daemon, in a file for the next daemon.
#ifndef VRAMBROKER_SERVER_IDENTITY_SAVED_SEGMENTS_H_
#define VRAMBROKER_SERVER_IDENTITY_SAVED_SEGMENTS_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/string_view.h"
#include "allocator/base/mutex.h"
#include "allocator/base/unique_fd.h"
#include "allocator/device/segment_record.h"

namespace vrambroker {

// `dir`/vrambroker.segments.ORDINAL has a header of 128 bytes. Slots of 16 bytes follow: a segment's inode and its size
// in bytes. A free slot is all zeros. A slot is written in a single call, so that a killed daemon leaves the slot
// whole.
//
// Every client knows the names of segments, but no client can create a memory file with an inode recorded in a slot:
// Linux 5.9 and newer never reuse an inode of memory files before the next boot. On older kernels, a file with the
// inode of a dead daemon's segment counts as that segment, up to the size in the slot. The file's user could just as
// well have kept the segment itself mapped.
class SavedSegments : public SegmentRecord {
 public:
  // Ignores entries of another owner or of an earlier boot. Replaces a file that is damaged or writable by other
  // users. Logs once when the file cannot be written; unrecorded segments are then missing from the next daemon's
  // Left(). `is_new_owner`: no earlier run can have left segments. REQUIRES: as LoadState().
  SavedSegments(const std::string& dir, int ordinal, const std::string& owner, bool is_new_owner = false);

  void Add(uint64_t inode, uint64_t bytes) override;
  void Remove(uint64_t inode) override;
  RecordedFiles Left() override;
  bool IsWhole() override;
  void KeepFound(const absl::flat_hash_set<uint64_t>& inodes) override;

 private:
  void ReadSlots(absl::string_view slots) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Fill(uint64_t inode, uint64_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Clear(uint64_t inode) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool Write(size_t slot, uint64_t inode, uint64_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const std::string path_;
  Mutex mu_;
  UniqueFd file_ ABSL_GUARDED_BY(mu_);                                  // invalid: nothing can be recorded
  absl::flat_hash_map<uint64_t, size_t> slot_of_ ABSL_GUARDED_BY(mu_);  // by inode
  std::vector<size_t> free_slots_ ABSL_GUARDED_BY(mu_);                 // below `slots_`
  size_t slots_ ABSL_GUARDED_BY(mu_) = 0;
  RecordedFiles left_ ABSL_GUARDED_BY(mu_);
  bool is_whole_ ABSL_GUARDED_BY(mu_);
  bool has_said_so_ ABSL_GUARDED_BY(mu_) = false;  // the failure to write has been logged
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_IDENTITY_SAVED_SEGMENTS_H_
