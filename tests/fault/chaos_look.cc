// SPDX-License-Identifier: Apache-2.0
#include "tests/fault/chaos_look.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <system_error>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace vrambroker::fault {
namespace {

struct File {
  uint64_t bytes = 0;
  std::string device;  // ordinal of the device
};
using Files = std::map<std::string, File>;  // keys: inodes

constexpr char kAnyName[] = "/memfd:vrambroker-segment";

uint64_t Sum(const Files& files) {
  uint64_t bytes = 0;
  for (const auto& [inode, file] : files) bytes += file.bytes;
  return bytes;
}

std::map<std::string, uint64_t> SumByDevice(const Files& files) {
  std::map<std::string, uint64_t> bytes;
  for (const auto& [inode, file] : files) bytes[file.device] += file.bytes;
  return bytes;
}

// Returns the mapped segment files of a process whose names begin with `name`; empty if the process has ended. Sets
// `found_name` to the beginning of a file's name, up to and including the daemon's own part. The mapped size comes from
// the kernel, not from the file's name.
Files MappedFiles(const std::string& process, const std::string& name, std::string* found_name = nullptr) {
  Files files;
  std::ifstream maps(absl::StrCat(process, "/maps"));
  for (std::string line; std::getline(maps, line);) {
    // Example: 7f00-7f20 rw-s 00000000 00:01 1234   /memfd:vrambroker-segment:OWNER:ORDINAL:RUN:BYTES (deleted)
    if (!absl::StrContains(line, name)) continue;
    const std::vector<std::string> words = absl::StrSplit(line, ' ', absl::SkipEmpty());
    const std::vector<std::string> range = absl::StrSplit(words[0], '-');
    uint64_t begin = 0;
    uint64_t end = 0;
    uint64_t offset = 0;
    if (words.size() < 6 || range.size() != 2 || !absl::SimpleHexAtoi(range[0], &begin) ||
        !absl::SimpleHexAtoi(range[1], &end) || !absl::SimpleHexAtoi(words[2], &offset)) {
      continue;
    }
    const std::vector<std::string> parts = absl::StrSplit(words[5], ':');
    File& file = files[words[4]];
    file.bytes = std::max(file.bytes, offset + end - begin);
    file.device = parts.size() > 3 ? parts[3] : "";
    const size_t owner_end = words[5].find(':', sizeof kAnyName);
    if (found_name != nullptr && owner_end != std::string::npos) *found_name = words[5].substr(0, owner_end + 1);
  }
  return files;
}

// Returns the mapped segment files of all processes of the machine.
Files MappedByAnybody(const std::string& name) {
  Files files;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/proc", error)) {
    pid_t pid = 0;
    if (absl::SimpleAtoi(entry.path().filename().string(), &pid)) files.merge(MappedFiles(entry.path(), name));
  }
  return files;
}

}  // namespace

absl::Status Looks::Look(const std::vector<Client>& clients) {
  Files all;
  for (const Client& client : clients) {
    Files files = MappedFiles(absl::StrCat("/proc/", client.pid), kAnyName, &name_);
    for (const auto& [device, bytes] : SumByDevice(files)) {
      most_of_one_ = std::max(most_of_one_, bytes);
      if (bytes > client.limit_bytes) {
        return absl::InternalError(absl::StrCat("a client (", client.role, ", pid ", client.pid, ") has ", bytes,
                                                " bytes of device ", device, " mapped; its limit is ",
                                                client.limit_bytes));
      }
    }
    all.merge(std::move(files));
  }
  ++count_;
  for (const auto& [device, held] : SumByDevice(all)) {
    most_held_ = std::max(most_held_, held);
    if (held > capacity_bytes_) {
      return absl::InternalError(
          absl::StrCat("clients hold ", held, " bytes of device ", device, ", whose capacity is ", capacity_bytes_));
    }
  }
  // Children only lose mappings: mappings that children have after the look at their parents existed during that look.
  if (!name_.empty()) all.merge(MappedByAnybody(name_));
  most_with_children_ = std::max(most_with_children_, Sum(all));
  return absl::OkStatus();
}

uint64_t Looks::BytesLeft() const {
  return name_.empty() ? 0 : Sum(MappedByAnybody(name_));
}

}  // namespace vrambroker::fault
