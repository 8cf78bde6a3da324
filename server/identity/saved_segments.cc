// SPDX-License-Identifier: Apache-2.0
#include "server/identity/saved_segments.h"

#include <fcntl.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "allocator/base/segment_bytes.h"
#include "allocator/device/device.h"
#include "server/base/replace_file.h"
#include "server/identity/saved_state.h"

namespace vrambroker {
namespace {

using SegmentSlot = std::array<uint64_t, 2>;  // inode, bytes
static_assert(sizeof(SegmentSlot) == 16);

constexpr size_t kSlotsBegin = 128;
constexpr size_t kMostSlots = size_t{1} << 20;  // more than a process has descriptors
constexpr char kFirstLine[] = "vrambroker segments 1\n";

std::string HeaderFor(const std::string& owner, const std::string& boot) {
  std::string header = absl::StrCat(kFirstLine, "boot ", boot, "\nowner ", owner, "\n");
  header.resize(kSlotsBegin);
  return header;
}

off_t OffsetOf(size_t slot) {
  return static_cast<off_t>(kSlotsBegin + slot * sizeof(SegmentSlot));
}

}  // namespace

SavedSegments::SavedSegments(const std::string& dir, int ordinal, const std::string& owner, bool is_new_owner)
    : path_(absl::StrCat(dir, "/vrambroker.segments.", ordinal)), is_whole_(is_new_owner) {
  const std::string boot = BootId();
  const std::string header = HeaderFor(owner, boot);
  MutexLock lock(mu_);
  absl::StatusOr<UniqueFd> file = OpenOwnFile(path_, O_RDWR);
  const absl::StatusOr<std::string> text =
      file.ok() ? ReadOpenFile(*file, path_, static_cast<size_t>(OffsetOf(kMostSlots))) : file.status();
  const bool is_ours = text.ok() && text->size() >= kSlotsBegin && absl::StartsWith(*text, kFirstLine);
  if (is_ours && !boot.empty() && absl::StartsWith(*text, header)) {
    file_ = *std::move(file);
    ReadSlots(absl::string_view(*text).substr(kSlotsBegin));
    return;
  }
  is_whole_ = is_whole_ || (is_ours && !boot.empty());  // of another owner, or of an earlier boot: void
  if (!is_ours && !absl::IsNotFound(text.status())) {
    spdlog::warn(
        "{} is damaged, or others than this user may write it: a new one is made, and memory that processes of other "
        "users hold of earlier runs is counted only as far as their clients say so and there is room{}",
        path_, text.ok() ? "" : absl::StrCat(" (", text.status().message(), ")"));
  }
  const absl::Status made = ReplaceFile(path_, header, /*outlives_machine=*/false);
  file = made.ok() ? OpenOwnFile(path_, O_RDWR) : made;
  if (file.ok()) {
    file_ = *std::move(file);
  } else {
    spdlog::error(
        "{}: a daemon that is not root will not count after a restart what processes of other users still hold",
        std::string(file.status().message()));
  }
}

void SavedSegments::ReadSlots(absl::string_view slots) {
  slots_ = slots.size() / sizeof(SegmentSlot);  // ignores a partial slot at the end
  size_t damaged = 0;
  for (size_t i = 0; i < slots_; ++i) {
    SegmentSlot slot;
    std::memcpy(slot.data(), slots.data() + i * sizeof slot, sizeof slot);
    const auto& [inode, bytes] = slot;
    const bool is_whole = inode != 0 && CheckSegmentBytes(bytes).ok() && bytes < kMaxRequestBytes;
    if (is_whole && slot_of_.try_emplace(inode, i).second) {
      left_[inode] = bytes;
      continue;
    }
    free_slots_.push_back(i);
    if (inode == 0 && bytes == 0) continue;
    ++damaged;
    (void)Write(i, 0, 0);
  }
  is_whole_ = damaged == 0;
  if (damaged > 0) {
    spdlog::warn(
        "{} has {} damaged entries: what processes of other users hold of these segments is counted only as far as "
        "their clients say so and there is room",
        path_, damaged);
  }
}

void SavedSegments::Add(uint64_t inode, uint64_t bytes) {
  MutexLock lock(mu_);
  left_.erase(inode);  // the old file of that inode is gone
  Fill(inode, bytes);
}

void SavedSegments::Remove(uint64_t inode) {
  MutexLock lock(mu_);
  Clear(inode);
}

RecordedFiles SavedSegments::Left() {
  MutexLock lock(mu_);
  return left_;
}

bool SavedSegments::IsWhole() {
  MutexLock lock(mu_);
  return is_whole_;
}

void SavedSegments::KeepFound(const absl::flat_hash_set<uint64_t>& inodes) {
  MutexLock lock(mu_);
  for (const auto& [inode, bytes] : left_) {
    if (!inodes.contains(inode)) {
      Clear(inode);
    } else if (!slot_of_.contains(inode)) {
      Fill(inode, bytes);
    }
  }
}

void SavedSegments::Fill(uint64_t inode, uint64_t bytes) {
  if (!file_.valid() || inode == 0) return;
  const auto [it, is_new] = slot_of_.try_emplace(inode, slots_);
  if (is_new && !free_slots_.empty()) {
    it->second = free_slots_.back();
    free_slots_.pop_back();
  } else if (is_new) {
    ++slots_;
  }
  if (Write(it->second, inode, bytes)) return;
  free_slots_.push_back(it->second);
  slot_of_.erase(it);
}

void SavedSegments::Clear(uint64_t inode) {
  const auto it = slot_of_.find(inode);
  if (it == slot_of_.end()) return;
  (void)Write(it->second, 0, 0);  // otherwise the next daemon would look for a removed file
  free_slots_.push_back(it->second);
  slot_of_.erase(it);
}

bool SavedSegments::Write(size_t slot, uint64_t inode, uint64_t bytes) {
  const SegmentSlot text = {inode, bytes};
  errno = ENOSPC;  // errno for a partial write
  if (slot < kMostSlots && pwrite(file_.get(), text.data(), sizeof text, OffsetOf(slot)) == sizeof text) return true;
  if (!std::exchange(has_said_so_, true)) {
    spdlog::error(
        "{}: a daemon that is not root will not count after a restart what processes of other users still hold of "
        "segments that they get from now on",
        std::string(absl::ErrnoToStatus(errno, absl::StrCat("cannot write ", path_)).message()));
  }
  return false;
}

}  // namespace vrambroker
