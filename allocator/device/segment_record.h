// SPDX-License-Identifier: Apache-2.0
//
// SegmentRecord: memory files handed out by a host device, recorded for the device of the next process. Anybody can
// give a file of their own the name of a segment. Without CAP_DAC_READ_SEARCH a process cannot see the creator of a
// file held by another user's process. The record tells segments from other files.
#ifndef VRAMBROKER_ALLOCATOR_DEVICE_SEGMENT_RECORD_H_
#define VRAMBROKER_ALLOCATOR_DEVICE_SEGMENT_RECORD_H_

#include <cstdint>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"

namespace vrambroker {

// Sizes in bytes by inode. The kernel keeps all memory files in one file system of its own, so the inode is enough.
using RecordedFiles = absl::flat_hash_map<uint64_t, uint64_t>;

// Thread-safe.
class SegmentRecord {
 public:
  virtual ~SegmentRecord() = default;

  // The device is about to hand out the file.
  virtual void Add(uint64_t inode, uint64_t bytes) = 0;
  // The device is about to free the file.
  virtual void Remove(uint64_t inode) = 0;

  // Returns files added and not removed by earlier devices.
  virtual RecordedFiles Left() = 0;
  // True if Left() names every file of earlier devices that processes can hold: no part of the record was lost.
  virtual bool IsWhole() = 0;
  // A search found processes holding exactly `inodes`. The next device need not know the rest of Left(). For the
  // present device the rest stays, because a descriptor on its way through a socket is invisible.
  virtual void KeepFound(const absl::flat_hash_set<uint64_t>& inodes) = 0;
};

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_DEVICE_SEGMENT_RECORD_H_
