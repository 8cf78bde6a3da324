// SPDX-License-Identifier: Apache-2.0
#ifndef VRAMBROKER_SERVER_RPC_LIBRARY_LOGS_H_
#define VRAMBROKER_SERVER_RPC_LIBRARY_LOGS_H_

namespace vrambroker {

// Redirects the logs of protobuf and gRPC to LogClientEvent(), which limits the rate: clients cause most of the lines.
void LimitLibraryLogs();

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_RPC_LIBRARY_LOGS_H_
