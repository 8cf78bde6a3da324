// SPDX-License-Identifier: Apache-2.0
#include "server/identity/saved_state.h"

#include <fcntl.h>
#include <spdlog/spdlog.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <fstream>
#include <optional>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "allocator/base/unique_fd.h"

namespace vrambroker {
namespace {

constexpr size_t kOwnerDigits = 16;
constexpr size_t kMostBytes = 64 << 10;  // of the file

std::string PathIn(const std::string& dir) {
  return absl::StrCat(dir, "/vrambroker.state");
}

absl::StatusOr<std::string> RandomOwner() {
  uint64_t number = 0;
  if (getrandom(&number, sizeof number, 0) != sizeof number) return absl::ErrnoToStatus(errno, "getrandom failed");
  return absl::StrCat(absl::Hex(number, absl::kZeroPad16));
}

// Empty when it cannot be read.
std::string BootId() {
  std::string id;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> id;
  return id;
}

// Lines:
//   owner 0123456789abcdef
//   boot 01234567-89ab-cdef-0123-456789abcdef
//   free 84892712960 GPU-01234567-89ab-cdef-0123-456789abcdef
std::optional<SavedState> Parse(absl::string_view text) {
  SavedState state;
  bool is_of_this_boot = false;
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    if (absl::ConsumePrefix(&line, "owner ")) {
      state.owner = std::string(line);
    } else if (absl::ConsumePrefix(&line, "boot ")) {
      is_of_this_boot = !line.empty() && line == BootId();
    } else if (absl::ConsumePrefix(&line, "free ")) {
      const std::pair<absl::string_view, absl::string_view> bytes_and_uuid =
          absl::StrSplit(line, absl::MaxSplits(' ', 1));
      uint64_t bytes = 0;
      if (is_of_this_boot && absl::SimpleAtoi(bytes_and_uuid.first, &bytes)) {
        state.free_bytes[std::string(bytes_and_uuid.second)] = bytes;
      }
    }
  }
  const bool is_whole =
      state.owner.size() == kOwnerDigits && std::all_of(state.owner.begin(), state.owner.end(), absl::ascii_isxdigit);
  return is_whole ? std::optional(std::move(state)) : std::nullopt;
}

// None: there is no such file, or others could have written it. They may read it: what it says is no secret.
std::optional<std::string> Read(const std::string& path) {
  const UniqueFd file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  struct stat found = {};
  if (!file.valid() || fstat(file.get(), &found) != 0 || !S_ISREG(found.st_mode) || found.st_uid != geteuid() ||
      (found.st_mode & 0022) != 0) {
    return std::nullopt;
  }
  std::string text(kMostBytes, '\0');
  const ssize_t size = read(file.get(), text.data(), text.size());
  text.resize(size < 0 ? 0 : static_cast<size_t>(size));
  return text;
}

absl::Status WriteNew(const std::string& path, absl::string_view text) {
  // What is lost with the machine is of no use after that: there is nothing to flush.
  const UniqueFd file(open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (!file.valid()) return absl::ErrnoToStatus(errno, absl::StrCat("cannot create ", path));
  errno = ENOSPC;  // of a short write
  if (write(file.get(), text.data(), text.size()) == static_cast<ssize_t>(text.size())) return absl::OkStatus();
  return absl::ErrnoToStatus(errno, absl::StrCat("cannot write ", path));
}

}  // namespace

absl::StatusOr<SavedState> LoadState(const std::string& dir) {
  const std::string path = PathIn(dir);
  struct stat found = {};
  const bool exists = lstat(path.c_str(), &found) == 0;
  const std::optional<std::string> text = Read(path);
  if (std::optional<SavedState> state = text.has_value() ? Parse(*text) : std::nullopt) return *std::move(state);
  if (exists) {
    spdlog::warn(
        "{} is damaged, or others than this user may write it: a new one is made, and memory that processes hold of "
        "earlier runs is counted only as far as their clients say so and there is room",
        path);
  } else {
    spdlog::info(
        "{} is new: memory that processes hold of earlier runs, if any, is counted only as far as their clients say so "
        "and there is room",
        path);
  }
  absl::StatusOr<std::string> owner = RandomOwner();
  if (!owner.ok()) return owner.status();
  SavedState state{.owner = *std::move(owner)};
  if (absl::Status status = SaveState(dir, state); !status.ok()) return status;
  return state;
}

absl::Status SaveState(const std::string& dir, const SavedState& state) {
  const std::string path = PathIn(dir);
  const std::string new_path = path + ".new";
  std::string text = absl::StrCat("owner ", state.owner, "\nboot ", BootId(), "\n");
  for (const auto& [uuid, bytes] : state.free_bytes) absl::StrAppend(&text, "free ", bytes, " ", uuid, "\n");
  if (Read(path) == text) return absl::OkStatus();
  (void)unlink(new_path.c_str());
  absl::Status status = WriteNew(new_path, text);
  if (status.ok() && rename(new_path.c_str(), path.c_str()) != 0) {
    status = absl::ErrnoToStatus(errno, absl::StrCat("cannot replace ", path));
  }
  if (!status.ok()) (void)unlink(new_path.c_str());
  return status;
}

}  // namespace vrambroker
