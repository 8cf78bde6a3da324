// SPDX-License-Identifier: Apache-2.0
#include "server/identity/process_info.h"

#include <poll.h>

#include <algorithm>
#include <fstream>
#include <sstream>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "allocator/base/names.h"

namespace vrambroker {
namespace {

std::string ReadProc(pid_t pid, const char* file) {
  std::ifstream stream(absl::StrCat("/proc/", pid, "/", file));
  std::ostringstream text;
  text << stream.rdbuf();
  return text.str();
}

}  // namespace

bool HasEnded(const UniqueFd& pidfd) {
  pollfd ended = {.fd = pidfd.get(), .events = POLLIN, .revents = 0};
  return poll(&ended, 1, 0) != 0;
}

std::string CommandName(pid_t pid) {
  std::string name(absl::StripSuffix(ReadProc(pid, "comm"), "\n"));
  std::replace_if(
      name.begin(), name.end(), [](char c) { return !IsNameCharacter(c); }, '_');
  return name.empty() ? "client" : name;
}

std::optional<std::string> CgroupOf(pid_t pid) {
  return ParseCgroup(ReadProc(pid, "cgroup"));
}

absl::StatusOr<ProcessUser> UserOf(pid_t pid) {
  std::optional<ProcessUser> user = ParseProcessUser(ReadProc(pid, "status"));
  if (!user.has_value()) return absl::NotFoundError(absl::StrCat("pid: no process ", pid, " can be seen in /proc"));
  return *std::move(user);
}

std::optional<ProcessImage> ImageOf(pid_t pid) {
  // PID (NAME) STATE ...: the name may have anything in it. By proc_pid_stat(5).
  const std::string text = ReadProc(pid, "stat");
  const size_t name_end = text.rfind(')');
  if (name_end == std::string::npos) return std::nullopt;
  const std::vector<absl::string_view> fields =
      absl::StrSplit(absl::string_view(text).substr(name_end + 1), absl::ByAnyChar(" \n"), absl::SkipEmpty());
  const auto read = [&fields](size_t field, uint64_t& number) {
    return fields.size() > field - 3 && absl::SimpleAtoi(fields[field - 3], &number);
  };
  constexpr uint64_t kNotTold = 1;
  uint64_t virtual_bytes = 0;
  ProcessImage image;
  if (!read(23, virtual_bytes) || !read(26, image.code) || !read(28, image.stack)) return std::nullopt;
  // One that ends has no memory any more. In the middle of exec() it has, and both numbers are 0.
  if (virtual_bytes == 0 || image.code == kNotTold) return std::nullopt;
  return image;
}

bool IsInInnerPidNamespace(pid_t pid) {
  return ParseHasInnerPid(ReadProc(pid, "status"));
}

bool ParseHasInnerPid(const std::string& text) {
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    // "NSpid:\t4711\t20": its number in the namespace of this /proc, then in each that is further in.
    if (!absl::ConsumePrefix(&line, "NSpid:")) continue;
    const std::vector<absl::string_view> numbers = absl::StrSplit(line, absl::ByAnyChar(" \t"), absl::SkipEmpty());
    return numbers.size() > 1;
  }
  return false;
}

std::optional<std::string> ParseCgroup(const std::string& text) {
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    // "12:cpu:/x" are hierarchies of version 1.
    if (!absl::ConsumePrefix(&line, "0::") || line.empty()) continue;
    std::string path(line);
    // Users who may make control groups name them as they like, and the path goes into messages and onto terminals.
    std::replace_if(
        path.begin(), path.end(), [](char c) { return c < ' ' || c > '~'; }, '?');
    return path;
  }
  return std::nullopt;
}

std::optional<ProcessUser> ParseProcessUser(const std::string& text) {
  ProcessUser user;
  bool has_uid = false;
  const auto ids = [](absl::string_view list) {
    std::vector<uint32_t> numbers;
    for (const absl::string_view word : absl::StrSplit(list, absl::ByAnyChar(" \t"), absl::SkipEmpty())) {
      uint32_t number = 0;
      if (absl::SimpleAtoi(word, &number)) numbers.push_back(number);
    }
    return numbers;
  };
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    // Real, effective, saved, of the file system.
    if (absl::ConsumePrefix(&line, "Uid:")) {
      const std::vector<uint32_t> uids = ids(line);
      if (uids.size() < 2) return std::nullopt;
      user.uid = uids[1];
      has_uid = true;
    } else if (absl::ConsumePrefix(&line, "Gid:")) {
      const std::vector<uint32_t> gids = ids(line);
      if (gids.size() < 2) return std::nullopt;
      user.gids.insert(user.gids.begin(), gids[1]);
    } else if (absl::ConsumePrefix(&line, "Groups:")) {
      for (const uint32_t gid : ids(line)) {
        if (std::find(user.gids.begin(), user.gids.end(), gid) == user.gids.end()) user.gids.push_back(gid);
      }
    }
  }
  if (!has_uid || user.gids.empty()) return std::nullopt;
  return user;
}

}  // namespace vrambroker
