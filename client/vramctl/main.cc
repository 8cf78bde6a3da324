// SPDX-License-Identifier: Apache-2.0
//
// vramctl: inspects a running vrambrokerd and changes its settings. Exit codes: 0 done, 1 refused or failed, 2 wrong
// use; vramctl run exits with the code of its program.
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <functional>
#include <new>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <system_error>
#include <vector>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "absl/types/optional.h"
#include "allocator/base/room_to_start.h"
#include "allocator/wire/admin_json.h"
#include "client/vramctl/arguments.h"
#include "client/vramctl/commands/commands.h"
#include "client/vramctl/completion.h"
#include "client/vramctl/options/exit_code.h"
#include "client/vramctl/options/refusal.h"

namespace {

using vrambroker::vramctl::CommandLine;

// Prints for scripts: the code of a refusal, and its details beyond the message.
void PrintErrorJson(const absl::Status& status) {
  nlohmann::ordered_json error = {{"code", absl::StatusCodeToString(status.code())},
                                  {"message", std::string(status.message())}};
  const absl::optional<absl::Cord> detail = status.GetPayload("type.googleapis.com/vrambroker.v1.OutOfMemory");
  vrambroker::v1::OutOfMemory oom;
  if (detail.has_value() && oom.ParseFromString(std::string(*detail))) error["out_of_memory"] = vrambroker::ToJson(oom);
  std::fprintf(stderr, "%s\n", vrambroker::JsonText({{"error", error}}).c_str());
}

absl::Status Run(const std::function<absl::Status()>& command) {
  absl::Status status;
  try {
    status = command();
  } catch (const std::bad_alloc&) {  // a trace may unpack to more than the available memory
    status = absl::ResourceExhaustedError("this machine has not enough memory for that");
  } catch (const std::system_error& error) {
    status = error.code() == std::errc::resource_unavailable_try_again ? vrambroker::NoThreadError()
                                                                       : absl::InternalError(error.what());
  }
  if (status.ok() && (std::fflush(stdout) != 0 || std::ferror(stdout) != 0)) {
    status = absl::DataLossError(absl::StrCat("the output was not written: ", std::strerror(errno)));
  }
  return status;
}

}  // namespace

int main(int argc, char** argv) {
  CommandLine command_line;
  if (argc > 1 && std::string(argv[1]) == vrambroker::vramctl::kCompletionCommand) {
    vrambroker::vramctl::PrintCompletions(command_line.app(), std::vector<std::string>(argv + 2, argv + argc));
    return 0;
  }
  const absl::StatusOr<std::function<absl::Status()>> command = command_line.Parse(argc, argv);
  const absl::Status status = command.ok() ? Run(*command) : command.status();
  if (status.ok()) return 0;
  const std::optional<int> exit_code = vrambroker::vramctl::ExitCodeOf(status);
  if (exit_code.has_value() && status.message().empty()) return *exit_code;
  if (command_line.context().json) {
    PrintErrorJson(status);
  } else {
    std::fprintf(stderr, "vramctl: %s\n", std::string(status.message()).c_str());
  }
  if (exit_code.has_value()) return *exit_code;
  return absl::IsInvalidArgument(status) && !vrambroker::vramctl::IsRefusal(status) ? 2 : 1;
}
