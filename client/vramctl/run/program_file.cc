// SPDX-License-Identifier: Apache-2.0
#include "client/vramctl/run/program_file.h"

#include <elf.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "allocator/base/unique_fd.h"

namespace vrambroker::vramctl {
namespace {

constexpr char kDefaultPath[] = "/bin:/usr/bin";  // default of execvp()

bool IsFile(const std::string& path, struct stat* found) {
  return stat(path.c_str(), found) == 0 && !S_ISDIR(found->st_mode);
}

absl::Status NotExecutable(const std::string& path, const char* why) {
  return absl::PermissionDeniedError(absl::StrCat(path, ": ", why));
}

std::string ReadAt(int fd, off_t offset, size_t bytes) {
  std::string data(bytes, '\0');
  const ssize_t got = pread(fd, data.data(), bytes, offset);
  data.resize(got < 0 ? 0 : static_cast<size_t>(got));
  return data;
}

template <typename T>
T As(const std::string& data) {
  T value = {};
  if (data.size() >= sizeof value) std::memcpy(&value, data.data(), sizeof value);
  return value;
}

// Whether a program for this machine uses a dynamic linker.
bool HasInterpreter(int fd, const Elf64_Ehdr& header) {
  for (int i = 0; i < header.e_phnum; ++i) {
    const off_t at = static_cast<off_t>(header.e_phoff) + static_cast<off_t>(i) * header.e_phentsize;
    if (As<Elf64_Phdr>(ReadAt(fd, at, sizeof(Elf64_Phdr))).p_type == PT_INTERP) return true;
  }
  return false;
}

// Programs with more rights than the caller ignore LD_PRELOAD.
std::string RaisesRights(const std::string& path) {
  struct stat found = {};
  if (stat(path.c_str(), &found) != 0) return "";
  if ((found.st_mode & S_ISUID) != 0 && found.st_uid != geteuid()) return "is setuid";
  constexpr mode_t kSetgid = S_ISGID | S_IXGRP;
  if ((found.st_mode & kSetgid) == kSetgid && found.st_gid != getegid()) return "is setgid";
  if (geteuid() != 0 && getxattr(path.c_str(), "security.capability", nullptr, 0) > 0) return "has file capabilities";
  return "";
}

}  // namespace

absl::StatusOr<std::string> FindProgram(const std::string& name) {
  struct stat found = {};
  if (name.empty()) return absl::NotFoundError("the name of the program is empty");
  if (absl::StrContains(name, '/')) {
    if (stat(name.c_str(), &found) != 0) {
      return errno == EACCES ? NotExecutable(name, std::strerror(errno))
                             : absl::NotFoundError(absl::StrCat(name, ": ", std::strerror(errno)));
    }
    if (S_ISDIR(found.st_mode)) return NotExecutable(name, "is a directory");
    if (access(name.c_str(), X_OK) != 0) return NotExecutable(name, std::strerror(errno));
    return name;
  }
  const char* const path = std::getenv("PATH");
  std::string not_executable;
  for (const absl::string_view folder : absl::StrSplit(path != nullptr ? path : kDefaultPath, ':')) {
    std::string file = folder.empty() ? absl::StrCat("./", name) : absl::StrCat(folder, "/", name);
    if (!IsFile(file, &found)) continue;
    if (access(file.c_str(), X_OK) == 0) return file;
    if (not_executable.empty()) not_executable = file;
  }
  if (!not_executable.empty()) return NotExecutable(not_executable, std::strerror(EACCES));
  return absl::NotFoundError(absl::StrCat(name, ": there is no such program in $PATH"));
}

std::string WhyNoPreload(const std::string& path) {
  if (std::string why = RaisesRights(path); !why.empty()) return why;
  const UniqueFd file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK));
  if (!file.valid()) return "";  // executable but not readable
  const std::string start = ReadAt(file.get(), 0, 256);
  if (absl::StartsWith(start, "#!")) {
    const absl::string_view line = absl::string_view(start).substr(2, start.find('\n') - 2);
    const std::vector<std::string> words =
        absl::StrSplit(absl::StripAsciiWhitespace(line), absl::ByAnyChar(" \t"), absl::SkipEmpty());
    if (words.empty() || words.front() == path) return "";
    const std::string why = absl::StartsWith(words.front(), "/") ? WhyNoPreload(words.front()) : "";
    return why.empty() ? "" : absl::StrCat("is run by ", words.front(), ", which ", why);
  }
  if (!absl::StartsWith(start, ELFMAG)) return "";
  if (start[EI_CLASS] != ELFCLASS64) return "is a 32-bit program";
  return HasInterpreter(file.get(), As<Elf64_Ehdr>(start)) ? "" : "is statically linked";
}

}  // namespace vrambroker::vramctl
