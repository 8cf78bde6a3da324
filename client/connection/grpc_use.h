// SPDX-License-Identifier: Apache-2.0
//
// gRPC does not survive fork(): who uses it, in a line of forks, is the only one that may.
#ifndef VRAMBROKER_CLIENT_CONNECTION_GRPC_USE_H_
#define VRAMBROKER_CLIENT_CONNECTION_GRPC_USE_H_

#include <sys/types.h>

namespace vrambroker::client_internal {

// Before the first object of gRPC is made. Not earlier: children of a process that found no daemon may connect.
void UseGrpc();

// The process that did, this one or one that it comes from; 0 for none.
pid_t GrpcUser();

// This process was made by fork() after that.
bool IsForkedFromGrpc();

}  // namespace vrambroker::client_internal

#endif  // VRAMBROKER_CLIENT_CONNECTION_GRPC_USE_H_
