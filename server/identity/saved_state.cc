// SPDX-License-Identifier: Apache-2.0
#include "server/identity/saved_state.h"

#include <spdlog/spdlog.h>
#include <sys/random.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <fstream>
#include <optional>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "server/base/replace_file.h"

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

}  // namespace

std::string BootId() {
  std::string id;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> id;
  return id;
}

absl::StatusOr<SavedState> LoadState(const std::string& dir) {
  const std::string path = PathIn(dir);
  struct stat found = {};
  const bool exists = lstat(path.c_str(), &found) == 0;
  const absl::StatusOr<std::string> text = ReadOwnFile(path, kMostBytes);
  if (std::optional<SavedState> state = text.ok() ? Parse(*text) : std::nullopt) return *std::move(state);
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
  SavedState state{.owner = *std::move(owner), .is_new = !exists};
  if (absl::Status status = SaveState(dir, state); !status.ok()) {
    spdlog::error("{}: the next daemon will count what processes hold of this run only as far as their clients say so",
                  std::string(status.message()));
  }
  return state;
}

absl::Status SaveState(const std::string& dir, const SavedState& state) {
  const std::string path = PathIn(dir);
  std::string text = absl::StrCat("owner ", state.owner, "\nboot ", BootId(), "\n");
  for (const auto& [uuid, bytes] : state.free_bytes) absl::StrAppend(&text, "free ", bytes, " ", uuid, "\n");
  if (const absl::StatusOr<std::string> saved = ReadOwnFile(path, kMostBytes); saved.ok() && *saved == text) {
    return absl::OkStatus();
  }
  // Needs no durability: state lost with the machine would be of no use afterwards.
  return ReplaceFile(path, text, /*outlives_machine=*/false);
}

}  // namespace vrambroker
