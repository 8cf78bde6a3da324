// SPDX-License-Identifier: Apache-2.0
//
// A heap's figures and snapshots as messages, and back: both ends of the session stream need both.
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

// A snapshot as messages, of which none is near gRPC's limit. They are made one at a time: a million events as messages
// take much more memory than as themselves.
class SnapshotParts {
 public:
  static constexpr int kItemsInPart = 4096;  // blocks and events; a scope may be as long as kItemsInScope of them
  static constexpr int kItemsInScope = 8;

  explicit SnapshotParts(HeapSnapshot snapshot, int items_in_part = kItemsInPart)
      : snapshot_(std::move(snapshot)), items_in_part_(items_in_part) {}

  // The next part; nullopt after the last one. There is at least one.
  std::optional<v1::GetSnapshotResponse> Next();

 private:
  // Adds scopes that come next, for at most `room` items. Returns for how many.
  int AddScopes(int room, v1::GetSnapshotResponse* part);
  // Adds at most `room` blocks of the segment that comes next. Returns how many.
  int AddSegment(int room, v1::GetSnapshotResponse* part);

  HeapSnapshot snapshot_;
  int items_in_part_;
  bool is_first_ = true;
  size_t scope_ = 0;
  size_t segment_ = 0;  // what comes next
  size_t block_ = 0;    // ... of that segment
  size_t event_ = 0;
};

// Adds the part that comes next to `heap`, which begins empty. InvalidArgument names what no snapshot of this version
// has.
absl::Status AddSnapshotPart(const v1::GetSnapshotResponse& part, HeapSnapshot* heap);

v1::OutOfMemory::Holes HolesToProto(const Holes& holes);
// `uses`: at most ScopeUse::kMaxInReport are taken.
void ScopeUsesToProto(const std::vector<ScopeUse>& uses,
                      google::protobuf::RepeatedPtrField<v1::OutOfMemory::ScopeUse>* proto);
std::vector<ScopeUse> ScopeUsesFromProto(const google::protobuf::RepeatedPtrField<v1::OutOfMemory::ScopeUse>& proto);
// InvalidArgument: it names more segments or blocks than a report does.
absl::StatusOr<Holes> HolesFromProto(const v1::OutOfMemory::Holes& proto);

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_WIRE_HEAP_CONVERT_H_
