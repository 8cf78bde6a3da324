// SPDX-License-Identifier: Apache-2.0
#include "allocator/heap/scopes.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "allocator/base/utf8.h"

namespace vrambroker {
namespace {

constexpr absl::string_view kOverflowName = "(more scopes than are kept)";

// Length of the control character at the beginning of `text` (UTF-8), in bytes; 0 for any other character. C0, DEL and
// C1 control terminals; the rest change the direction of the following text, or end a line.
size_t ControlBytes(absl::string_view text) {
  const auto byte = [&](size_t i) { return i < text.size() ? static_cast<unsigned char>(text[i]) : 0; };
  if (byte(0) < 0x20 || byte(0) == 0x7F) return 1;
  if (byte(0) == 0xC2 && byte(1) < 0xA0) return 2;
  if (byte(0) == 0xEF && byte(1) == 0xBB && byte(2) == 0xBF) return 3;  // U+FEFF
  if (byte(0) != 0xE2) return 0;
  const bool turns_or_ends =
      byte(1) == 0x80 && ((byte(2) >= 0x8B && byte(2) <= 0x8F) || (byte(2) >= 0xA8 && byte(2) <= 0xAE));
  const bool isolates = byte(1) == 0x81 && byte(2) >= 0xA0 && byte(2) <= 0xAF;
  return turns_or_ends || isolates ? 3 : 0;
}

bool ContinuesCharacter(char byte) {
  return (static_cast<unsigned char>(byte) & 0xC0) == 0x80;
}

}  // namespace

std::string CleanScopeText(absl::string_view text, size_t max_bytes) {
  // Twice `max_bytes` is always enough, and a client may send any amount.
  const std::string utf8 = ToUtf8(text.substr(0, 2 * max_bytes));
  std::string clean;
  for (size_t i = 0; i < utf8.size();) {
    if (const size_t control = ControlBytes(absl::string_view(utf8).substr(i)); control > 0) {
      i += control;
    } else {
      clean.push_back(utf8[i++]);
    }
  }
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

std::vector<Scope> WithoutNesting(absl::Span<const Scope> scopes) {
  std::vector<Scope> flat;
  flat.reserve(scopes.size());
  for (size_t id = 0; id < scopes.size(); ++id) flat.push_back({.name = ScopePath(scopes, static_cast<ScopeId>(id))});
  return flat;
}

ScopeId ScopeTable::Find(ScopeId parent, absl::string_view name, absl::string_view file, uint32_t line) {
  Key key(parent, line, CleanScopeText(name, kMaxNameBytes), CleanScopeText(file, kMaxFileBytes));
  const std::string& clean_name = std::get<2>(key);
  const std::string& clean_file = std::get<3>(key);
  if (clean_name.empty()) return parent;
  if (const auto it = ids_.find(key); it != ids_.end()) return it->second;
  const int max_depth = clean_file.empty() ? kMaxDepth : kMaxFrameDepth;
  if (parent != 0 && (parent >= scopes_.size() || depths_[parent] >= max_depth)) return parent;
  if (overflow_ != 0) return overflow_;
  const size_t bytes = clean_name.size() + clean_file.size();
  // Reserves a place for the overflow scope.
  if (scopes_.size() >= kMaxScopes || text_bytes_ + bytes > kMaxTextBytes) {
    return overflow_ = Add(0, kOverflowName, "", 0);
  }
  text_bytes_ += bytes;
  const ScopeId id = Add(parent, clean_name, clean_file, line);
  ids_.emplace(std::move(key), id);
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
