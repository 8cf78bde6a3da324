// SPDX-License-Identifier: Apache-2.0
#ifndef VRAMBROKER_SERVER_RPC_LIBRARY_LOGS_H_
#define VRAMBROKER_SERVER_RPC_LIBRARY_LOGS_H_

namespace vrambroker {

// From now on LogClientEvent() writes what protobuf and gRPC log, mostly of what clients send: they would write every
// line.
void LimitLibraryLogs();

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_RPC_LIBRARY_LOGS_H_
