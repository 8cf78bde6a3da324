// SPDX-License-Identifier: Apache-2.0
//
// gRPC does not survive fork(): in a line of forks, only a single process may use gRPC.
#ifndef VRAMBROKER_CLIENT_CONNECTION_GRPC_USE_H_
#define VRAMBROKER_CLIENT_CONNECTION_GRPC_USE_H_

#include <sys/types.h>

namespace vrambroker::client_internal {

// Call before making the first gRPC object. Not earlier: children of a process without a daemon may still connect.
void UseGrpc();

// The process that called UseGrpc(): this process or an ancestor; 0: no call.
pid_t GrpcUser();

// True when this process was forked after UseGrpc().
bool IsForkedFromGrpc();

}  // namespace vrambroker::client_internal

#endif  // VRAMBROKER_CLIENT_CONNECTION_GRPC_USE_H_
