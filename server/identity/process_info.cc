// SPDX-License-Identifier: Apache-2.0
#include "server/identity/process_info.h"

#include <poll.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <fstream>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "allocator/base/names.h"
#include "allocator/base/utf8.h"
#include "allocator/device/process_files.h"

namespace vrambroker {
namespace {

constexpr size_t kMostCommandBytes = 64;  // of each part of the command
constexpr absl::string_view kNul("\0", 1);

absl::string_view LastPart(absl::string_view path) {
  return path.substr(path.rfind('/') + 1);  // npos + 1 is 0
}

// Whether an argument can be the path of a file. An argument with further characters may be any text.
bool IsPath(absl::string_view argument) {
  return !argument.empty() && argument[0] != '-' && std::all_of(argument.begin(), argument.end(), [](char c) {
    return IsNameCharacter(c) || c == '+' || c == '~' || static_cast<unsigned char>(c) >= 0x80;
  });
}

bool IsScript(absl::string_view argument) {
  constexpr std::array<absl::string_view, 8> kEndings = {".py", ".sh", ".pl", ".rb", ".js", ".jl", ".R", ".lua"};
  return IsPath(argument) && std::any_of(kEndings.begin(), kEndings.end(), [argument](absl::string_view ending) {
           return absl::EndsWith(argument, ending);
         });
}

}  // namespace

bool HasEnded(const UniqueFd& pidfd) {
  pollfd ended = {.fd = pidfd.get(), .events = POLLIN, .revents = 0};
  return poll(&ended, 1, 0) != 0;
}

std::string CommandName(pid_t pid) {
  std::string name(absl::StripSuffix(ReadProcessFile(pid, "comm"), "\n"));
  std::replace_if(
      name.begin(), name.end(), [](char c) { return !IsNameCharacter(c); }, '_');
  return name.empty() ? "client" : name;
}

std::string CommandOf(pid_t pid) {
  // The program's name may be arbitrarily long; text beyond the limit is of no use.
  std::array<char, 4096> text = {};
  std::ifstream stream(absl::StrCat("/proc/", pid, "/cmdline"), std::ios::binary);
  stream.read(text.data(), text.size());
  return ParseCommand(absl::string_view(text.data(), static_cast<size_t>(stream.gcount())));
}

std::string ParseCommand(absl::string_view text) {
  const std::vector<absl::string_view> arguments = absl::StrSplit(absl::StripSuffix(text, kNul), '\0');
  // A process that changed its title has the whole title, with blanks, in place of its first argument.
  const absl::string_view program = LastPart(arguments[0].substr(0, arguments[0].find(' ')));
  std::string command = CleanText(program, kMostCommandBytes);
  if (command.empty()) return command;
  const bool is_python = absl::StartsWith(program, "python");
  size_t first = 1;  // index of a possible script
  for (; is_python && first < arguments.size(); ++first) {
    const absl::string_view argument = arguments[first];
    if (argument == "-c") return command;
    if (argument == "-m" && first + 1 < arguments.size()) {
      return absl::StrCat(command, " -m ", CleanText(arguments[first + 1], kMostCommandBytes));
    }
    if (argument == "-W" || argument == "-X") ++first;  // the option has a value
    if (!absl::StartsWith(argument, "-")) break;
  }
  if (first >= arguments.size()) return command;
  auto script = std::find_if(arguments.begin() + static_cast<std::ptrdiff_t>(first), arguments.end(), IsScript);
  // Python's own script may be a program without an ending.
  if (script == arguments.end() && is_python) script = arguments.begin() + static_cast<std::ptrdiff_t>(first);
  if (script == arguments.end() || !IsPath(*script)) return command;
  return absl::StrCat(command, " ", CleanText(LastPart(*script), kMostCommandBytes));
}

std::optional<std::string> CgroupOf(pid_t pid) {
  return ParseCgroup(ReadProcessFile(pid, "cgroup"));
}

absl::StatusOr<ProcessUser> UserOf(pid_t pid) {
  std::optional<ProcessUser> user = ParseProcessUser(ReadProcessFile(pid, "status"));
  if (!user.has_value()) return absl::NotFoundError(absl::StrCat("pid: no process ", pid, " can be seen in /proc"));
  return *std::move(user);
}

std::optional<ProcessImage> ImageOf(pid_t pid) {
  const std::string text = ReadProcessFile(pid, "stat");
  const std::vector<absl::string_view> fields = StatFields(text);
  const auto read = [&fields](size_t field, uint64_t& number) {
    return fields.size() > field - 3 && absl::SimpleAtoi(fields[field - 3], &number);
  };
  constexpr uint64_t kNotTold = 1;
  uint64_t virtual_bytes = 0;
  ProcessImage image;
  if (!read(23, virtual_bytes) || !read(26, image.code) || !read(28, image.stack)) return std::nullopt;
  // An ending process has no memory left. During exec() a process has memory, and both numbers are 0.
  if (virtual_bytes == 0 || image.code == kNotTold) return std::nullopt;
  return image;
}

bool IsInInnerPidNamespace(pid_t pid) {
  return ParseHasInnerPid(ReadProcessFile(pid, "status"));
}

bool ParseHasInnerPid(const std::string& text) {
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    // "NSpid:\t4711\t20": the pid in the namespace of this /proc, then in each inner namespace.
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
    // Users who may make control groups choose arbitrary names, and the path goes into messages and onto terminals.
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
    // Fields: real, effective, saved, file system.
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
