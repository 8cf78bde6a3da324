// SPDX-License-Identifier: Apache-2.0
#ifndef VRAMBROKER_CLIENT_HEAP_SNAPSHOT_PARTS_H_
#define VRAMBROKER_CLIENT_HEAP_SNAPSHOT_PARTS_H_

#include <grpcpp/grpcpp.h>

#include "allocator/heap/heap_snapshot.h"
#include "vrambroker/v1/admin.grpc.pb.h"

namespace vrambroker::client_internal {

// Reads the stream to its end and adds each part to `heap`. When a part is unreadable, cancels the call of `context`
// and returns INTERNAL.
grpc::Status ReadSnapshotParts(grpc::ClientReader<v1::GetSnapshotResponse>* reader, grpc::ClientContext* context,
                               HeapSnapshot* heap);

}  // namespace vrambroker::client_internal

#endif  // VRAMBROKER_CLIENT_HEAP_SNAPSHOT_PARTS_H_
