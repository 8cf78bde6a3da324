// SPDX-License-Identifier: Apache-2.0
//
// Conversion of a heap's figures and snapshots to messages, and back: both ends of the session stream need both.
#ifndef VRAMBROKER_ALLOCATOR_WIRE_HEAP_CONVERT_H_
#define VRAMBROKER_ALLOCATOR_WIRE_HEAP_CONVERT_H_

#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "allocator/heap/fit_report.h"
#include "allocator/heap/heap_snapshot.h"
#include "allocator/heap/memory_stats.h"
#include "allocator/heap/scope_use.h"
#include "allocator/heap/scopes.h"
#include "vrambroker/v1/admin.pb.h"
#include "vrambroker/v1/types.pb.h"

namespace vrambroker {

v1::MemoryStats StatsToProto(const MemoryStats& stats);
MemoryStats StatsFromProto(const v1::MemoryStats& proto);

// A snapshot as messages, none near gRPC's limit. Messages are made one at a time: a million events take much more
// memory as messages.
class SnapshotParts {
 public:
  static constexpr int kItemsInPart = 4096;  // blocks and events; a scope may be as long as kItemsInScope items
  static constexpr int kItemsInScope = 8;

  explicit SnapshotParts(HeapSnapshot snapshot, int items_in_part = kItemsInPart)
      : snapshot_(std::move(snapshot)), items_in_part_(items_in_part) {}

  // Returns the next part; nullopt after the last part. There is at least one.
  std::optional<v1::GetSnapshotResponse> Next();

 private:
  // Adds the next scopes, for at most `room` items. Returns the items used.
  int AddScopes(int room, v1::GetSnapshotResponse* part);
  // Adds at most `room` blocks of the next segment. Returns the number added.
  int AddSegment(int room, v1::GetSnapshotResponse* part);

  HeapSnapshot snapshot_;
  int items_in_part_;
  bool is_first_ = true;
  size_t scope_ = 0;
  size_t segment_ = 0;  // next segment
  size_t block_ = 0;    // next block of that segment
  size_t event_ = 0;
};

// Adds the next part to `heap`, empty at first. InvalidArgument names content impossible for a snapshot of this
// version.
absl::Status AddSnapshotPart(const v1::GetSnapshotResponse& part, HeapSnapshot* heap);

v1::OutOfMemory::Holes HolesToProto(const Holes& holes);
// `uses`: at most ScopeUse::kMaxInReport are taken.
void ScopeUsesToProto(const std::vector<ScopeUse>& uses,
                      google::protobuf::RepeatedPtrField<v1::OutOfMemory::ScopeUse>* proto);
std::vector<ScopeUse> ScopeUsesFromProto(const google::protobuf::RepeatedPtrField<v1::OutOfMemory::ScopeUse>& proto);
// InvalidArgument: more segments or blocks than in a report.
absl::StatusOr<Holes> HolesFromProto(const v1::OutOfMemory::Holes& proto);

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_WIRE_HEAP_CONVERT_H_
