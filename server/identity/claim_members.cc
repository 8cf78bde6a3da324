// SPDX-License-Identifier: Apache-2.0
#include "server/identity/claim_members.h"

#include <fcntl.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "allocator/device/process_files.h"
#include "server/base/replace_file.h"

namespace vrambroker {
namespace {

constexpr size_t kMostMemberBytes = size_t{16} << 20;
constexpr size_t kFewLines = 1024;  // are not worth a rewrite

// "4711 123456 train\n"
std::string Line(const ProcessId& process, absl::string_view claim) {
  return absl::StrCat(process.pid, " ", process.started, " ", claim, "\n");
}

bool Runs(const ProcessId& process) {
  return process.started != 0 && StartOf(process.pid) == process.started;
}

}  // namespace

ClaimMembers::ByProcess ClaimMembers::TakeOver() {
  MutexLock lock(mu_);
  if (const absl::StatusOr<std::string> text = ReadOwnFile(path_, kMostMemberBytes); text.ok()) {
    std::vector<absl::string_view> lines = absl::StrSplit(*text, '\n');
    lines.pop_back();  // text without an end of line is half written
    for (const absl::string_view line : lines) {
      const std::vector<absl::string_view> words = absl::StrSplit(line, ' ');
      ProcessId process;
      if (words.size() != 3 || !absl::SimpleAtoi(words[0], &process.pid) ||
          !absl::SimpleAtoi(words[1], &process.started)) {
        continue;
      }
      members_[process] = std::string(words[2]);
    }
  }
  if (absl::Status status = Rewrite(); !status.ok()) {
    spdlog::warn("which processes are in which claim is not noted for the next start: {}", status.ToString());
  }
  return members_;
}

void ClaimMembers::Note(const ProcessId& process, absl::string_view claim) {
  MutexLock lock(mu_);
  NoteLocked(process, claim);
}

void ClaimMembers::NoteUnlessKnown(const ProcessId& process, absl::string_view claim) {
  MutexLock lock(mu_);
  if (!members_.contains(process)) NoteLocked(process, claim);
}

void ClaimMembers::NoteLocked(const ProcessId& process, absl::string_view claim) {
  if (process.started == 0) return;  // indistinguishable from a later process with the pid
  std::string& noted = members_[process];
  if (noted == claim) return;
  noted = std::string(claim);
  absl::Status status;
  if (lines_ >= most_lines_ || !file_.valid()) {
    status = Rewrite();
  } else {
    const std::string line = Line(process, claim);
    ++lines_;
    if (write(file_.get(), line.data(), line.size()) != static_cast<ssize_t>(line.size())) {
      status = absl::ErrnoToStatus(errno, absl::StrCat("cannot write ", path_));
      file_.Reset();  // half a line was written: rewrite the whole file next time
    }
  }
  if (status.ok() || std::exchange(has_warned_, true)) return;
  spdlog::warn("which processes are in which claim is not noted for the next start: {}", status.ToString());
}

void ClaimMembers::Forget(absl::string_view claim) {
  MutexLock lock(mu_);
  if (absl::erase_if(members_, [claim](const auto& member) { return member.second == claim; }) == 0) return;
  if (absl::Status status = Rewrite(); !status.ok()) {
    spdlog::warn("the members of claim {} are noted still: {}", std::string(claim), status.ToString());
  }
}

absl::Status ClaimMembers::Rewrite() {
  absl::erase_if(members_, [](const auto& member) { return !Runs(member.first); });
  std::string text;
  for (const auto& [process, claim] : members_) absl::StrAppend(&text, Line(process, claim));
  lines_ = members_.size();
  most_lines_ = std::max(kFewLines, 2 * lines_);
  // Needs no durability: a new boot ends all members anyway.
  if (absl::Status status = ReplaceFile(path_, text, /*outlives_machine=*/false); !status.ok()) return status;
  file_ = UniqueFd(open(path_.c_str(), O_WRONLY | O_APPEND | O_CLOEXEC | O_NOFOLLOW));
  if (!file_.valid()) return absl::ErrnoToStatus(errno, absl::StrCat("cannot open ", path_));
  return absl::OkStatus();
}

}  // namespace vrambroker
