// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/library_logs.h"

#include <google/protobuf/stubs/logging.h>
#include <grpc/support/log.h>

#include <string>

#include "server/base/client_log.h"

namespace vrambroker {

void LimitLibraryLogs() {
  google::protobuf::SetLogHandler(
      [](google::protobuf::LogLevel /*level*/, const char* /*file*/, int /*line*/, const std::string& message) {
        LogClientEvent(spdlog::level::warn, "protobuf: {}", message);
      });
  gpr_set_log_function([](gpr_log_func_args* args) { LogClientEvent(spdlog::level::warn, "gRPC: {}", args->message); });
}

}  // namespace vrambroker
