// SPDX-License-Identifier: Apache-2.0
//
// Between the broker's C++ types and messages.
#ifndef VRAMBROKER_SERVER_CONVERT_H_
#define VRAMBROKER_SERVER_CONVERT_H_

#include <grpcpp/grpcpp.h>

#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/broker.h"
#include "vrambroker/v1/admin.pb.h"
#include "vrambroker/v1/broker.pb.h"
#include "vrambroker/v1/types.pb.h"

namespace vrambroker {

// Code, message, and payloads as details.
v1::StatusDetails ToProto(const absl::Status& status);
grpc::Status ToGrpc(const absl::Status& status);

// Answers a unary call.
grpc::ServerUnaryReactor* Reply(grpc::CallbackServerContext* context, const absl::Status& status);

v1::MemoryStats ToProto(const MemoryStats& stats);
v1::Device ToProto(const SegmentPool& pool);
v1::Session ToProto(const SessionInfo& info);
v1::AllocateResponse ToProto(const Allocation& allocation);

// nullopt when neither bytes nor fraction is set.
std::optional<Limit> FromProto(const v1::Limit& limit);

// InvalidArgument unless the request names 1 to 1024 blocks.
absl::StatusOr<std::vector<BlockId>> BlockIds(const v1::FreeRequest& request);

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_CONVERT_H_
