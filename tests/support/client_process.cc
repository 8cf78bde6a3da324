// SPDX-License-Identifier: Apache-2.0
#include "tests/support/client_process.h"

#include <utility>

#include "absl/strings/cord.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "tests/support/hex.h"

namespace vrambroker::testing_support {

absl::StatusOr<ClientProcess> ClientProcess::Start(const std::string& socket_dir, const Environment& environment) {
  absl::StatusOr<std::unique_ptr<ChildProcess>> process =
      ChildProcess::Start({TestClientProgram(), socket_dir}, environment);
  if (!process.ok()) return process.status();
  return ClientProcess(*std::move(process));
}

absl::StatusOr<ClientProcess> ClientProcess::Connect(const std::string& socket_dir, const std::string& name,
                                                     const std::string& limit) {
  absl::StatusOr<ClientProcess> client = Start(socket_dir);
  if (!client.ok()) return client;
  const auto answer = client->Call(absl::StrCat("connect ", name, " ", limit));
  if (!answer.ok()) return answer.status();
  return client;
}

absl::StatusOr<std::vector<std::string>> ClientProcess::Call(absl::string_view command) {
  if (absl::Status status = Send(command); !status.ok()) return status;
  return Receive();
}

absl::StatusOr<std::vector<std::string>> ClientProcess::Receive() {
  absl::StatusOr<std::string> line = process_->ReadLine();
  if (!line.ok()) return line.status();
  std::vector<std::string> words = absl::StrSplit(*line, ' ', absl::SkipEmpty());
  if (!words.empty() && words[0] == "ok") return std::vector<std::string>(words.begin() + 1, words.end());
  // An error reads "error CODE MESSAGE [TYPE_URL VALUE]...": texts are in hexadecimal digits, '-' stands for an empty
  // text.
  int code = 0;
  if (words.size() < 3 || words[0] != "error" || !absl::SimpleAtoi(words[1], &code)) {
    return absl::InternalError(absl::StrCat("test_client answered '", *line, "'"));
  }
  absl::Status status(static_cast<absl::StatusCode>(code), words[2] == "-" ? "" : HexToBytes(words[2]));
  for (size_t i = 3; i + 1 < words.size(); i += 2) {
    status.SetPayload(HexToBytes(words[i]), absl::Cord(HexToBytes(words[i + 1])));
  }
  return status;
}

}  // namespace vrambroker::testing_support
