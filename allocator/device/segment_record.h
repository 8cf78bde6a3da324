// SPDX-License-Identifier: Apache-2.0
//
// SegmentRecord: which memory files a host device has handed out, for the device of the next process. Anybody can give
// a file of their own the name of a segment, and a process without CAP_DAC_READ_SEARCH cannot see who created a file
// that a process of another user holds. The record says which files are segments.
#ifndef VRAMBROKER_ALLOCATOR_DEVICE_SEGMENT_RECORD_H_
#define VRAMBROKER_ALLOCATOR_DEVICE_SEGMENT_RECORD_H_

#include <cstdint>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"

namespace vrambroker {

// Sizes in bytes by inode. The kernel keeps all memory files in one file system of its own, so the inode is enough.
using RecordedFiles = absl::flat_hash_map<uint64_t, uint64_t>;

// Safe to call from any thread.
class SegmentRecord {
 public:
  virtual ~SegmentRecord() = default;

  // The device is about to hand out this file.
  virtual void Add(uint64_t inode, uint64_t bytes) = 0;
  // The device is about to free it.
  virtual void Remove(uint64_t inode) = 0;

  // What earlier devices have added and not removed.
  virtual RecordedFiles Left() = 0;
  // Left() names all that processes can hold of earlier devices: no part of the record was lost.
  virtual bool IsWhole() = 0;
  // A search found that processes hold these and no others. The next device has no need to know of the others of
  // Left(); for this one they stay, because a descriptor on its way through a socket is not seen.
  virtual void KeepFound(const absl::flat_hash_set<uint64_t>& inodes) = 0;
};

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_DEVICE_SEGMENT_RECORD_H_
