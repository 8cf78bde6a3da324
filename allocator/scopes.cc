// SPDX-License-Identifier: Apache-2.0
#include "allocator/scopes.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "allocator/utf8.h"

namespace vrambroker {
namespace {

constexpr absl::string_view kOverflowName = "(more scopes than are kept)";

bool ContinuesCharacter(char byte) {
  return (static_cast<unsigned char>(byte) & 0xC0) == 0x80;
}

}  // namespace

std::string CleanScopeText(absl::string_view text, size_t max_bytes) {
  // More than that cannot be needed, and a client may send any amount.
  std::string clean = ToUtf8(text.substr(0, 2 * max_bytes));
  clean.erase(std::remove_if(clean.begin(), clean.end(),
                             [](char byte) { return static_cast<unsigned char>(byte) < 0x20 || byte == 0x7F; }),
              clean.end());
  if (clean.size() <= max_bytes) return clean;
  size_t end = max_bytes;
  while (end > 0 && ContinuesCharacter(clean[end])) --end;
  clean.resize(end);
  return clean;
}

std::string ScopePath(absl::Span<const Scope> scopes, ScopeId id) {
  if (id == 0 || id >= scopes.size()) return "";
  std::string path;
  for (ScopeId at = id; at != 0; at = scopes[at].parent) {
    const Scope& scope = scopes[at];
    if (!scope.file.empty()) continue;
    path = path.empty() ? scope.name : absl::StrCat(scope.name, "/", path);
    if (path.size() > kMaxScopePathBytes) break;
  }
  if (path.empty()) path = absl::StrCat(scopes[id].name, " (", scopes[id].file, ":", scopes[id].line, ")");
  return EndOfScopePath(std::move(path), kMaxScopePathBytes);
}

std::string EndOfScopePath(std::string path, size_t max_bytes) {
  if (path.size() <= max_bytes) return path;
  constexpr absl::string_view kCut = "...";
  size_t begin = path.size() - (max_bytes - kCut.size());
  while (begin < path.size() && ContinuesCharacter(path[begin])) ++begin;
  return absl::StrCat(kCut, path.substr(begin));
}

ScopeId ScopeTable::Find(ScopeId parent, absl::string_view name, absl::string_view file, uint32_t line) {
  const std::string clean_name = CleanScopeText(name, kMaxNameBytes);
  if (clean_name.empty()) return parent;
  const Key key(parent, line, clean_name, CleanScopeText(file, kMaxFileBytes));
  if (const auto it = ids_.find(key); it != ids_.end()) return it->second;
  if (parent != 0 && (parent >= scopes_.size() || depths_[parent] >= kMaxDepth)) return parent;
  const std::string& clean_file = std::get<3>(key);
  const size_t bytes = clean_name.size() + clean_file.size();
  // One place is kept for what says that there are more.
  if (scopes_.size() >= kMaxScopes || text_bytes_ + bytes > kMaxTextBytes) {
    if (overflow_ == 0) overflow_ = Add(0, kOverflowName, "", 0);
    return overflow_;
  }
  text_bytes_ += bytes;
  const ScopeId id = Add(parent, clean_name, clean_file, line);
  ids_.emplace(key, id);
  return id;
}

ScopeId ScopeTable::Add(ScopeId parent, absl::string_view name, absl::string_view file, uint32_t line) {
  if (scopes_.empty()) {
    scopes_.emplace_back();
    depths_.push_back(0);
  }
  const auto id = static_cast<ScopeId>(scopes_.size());
  depths_.push_back(static_cast<uint8_t>(depths_[parent] + 1));
  scopes_.push_back({.parent = parent, .name = std::string(name), .file = std::string(file), .line = line});
  return id;
}

}  // namespace vrambroker
