// SPDX-License-Identifier: Apache-2.0
#ifndef VRAMBROKER_TESTS_SUPPORT_CLIENT_PROCESS_H_
#define VRAMBROKER_TESTS_SUPPORT_CLIENT_PROCESS_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "tests/support/child_process.h"

namespace vrambroker::testing_support {

// A process that uses the client library as commands say; test_client.cc lists the commands.
class ClientProcess {
 public:
  static absl::StatusOr<ClientProcess> Start(const std::string& socket_dir, const Environment& environment = {});
  // Starts a process and connects a client.
  static absl::StatusOr<ClientProcess> Connect(const std::string& socket_dir, const std::string& name,
                                               const std::string& limit = "-");

  // Returns the words of the answer, or the status that the client got, with the status's details.
  absl::StatusOr<std::vector<std::string>> Call(absl::string_view command);
  // Send() and Receive() are the halves of Call(), and let several processes work at once.
  absl::Status Send(absl::string_view command) { return process_->WriteLine(command); }
  absl::StatusOr<std::vector<std::string>> Receive();

  ChildProcess& process() { return *process_; }
  pid_t pid() const { return process_->pid(); }

 private:
  explicit ClientProcess(std::unique_ptr<ChildProcess> process) : process_(std::move(process)) {}

  std::unique_ptr<ChildProcess> process_;
};

}  // namespace vrambroker::testing_support

#endif  // VRAMBROKER_TESTS_SUPPORT_CLIENT_PROCESS_H_
