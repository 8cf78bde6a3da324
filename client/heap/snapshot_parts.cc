// SPDX-License-Identifier: Apache-2.0
#include "client/heap/snapshot_parts.h"

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "allocator/wire/heap_convert.h"

namespace vrambroker::client_internal {

grpc::Status ReadSnapshotParts(grpc::ClientReader<v1::GetSnapshotResponse>* reader, grpc::ClientContext* context,
                               HeapSnapshot* heap) {
  for (v1::GetSnapshotResponse part; reader->Read(&part);) {
    const absl::Status status = AddSnapshotPart(part, heap);
    if (status.ok()) continue;
    context->TryCancel();
    (void)reader->Finish();
    return {grpc::StatusCode::INTERNAL, absl::StrCat("the daemon is of another version: ", status.message())};
  }
  return reader->Finish();
}

}  // namespace vrambroker::client_internal
