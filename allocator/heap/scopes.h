// SPDX-License-Identifier: Apache-2.0
//
// Scopes: the names that a program gives to the parts of its work, so that a heap can say which part holds its memory.
//
// A scope lies within another one: "layer3" in "forward" is "forward/layer3". Frames of a program's stack are kept in
// the same way, each within its caller.
#ifndef VRAMBROKER_ALLOCATOR_HEAP_SCOPES_H_
#define VRAMBROKER_ALLOCATOR_HEAP_SCOPES_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace vrambroker {

// The place of a scope in its list. 0 stands for no scope.
using ScopeId = uint16_t;

struct Scope {
  ScopeId parent = 0;  // the scope around it, which comes earlier in the list
  std::string name;    // of a frame: the function
  std::string file;    // of a frame; empty: a scope that the program named
  uint32_t line = 0;   // of a frame
};

// `text` fit to be shown: at most `max_bytes` of UTF-8, with U+FFFD for bytes that are none. Control characters are
// left out: those of ASCII, and those of Unicode, such as the ones that change the direction of writing.
std::string CleanScopeText(absl::string_view text, size_t max_bytes);

// The path of a scope, such as "forward/layer3": the names from the outermost scope to `id`, without frames of the
// stack. Where there are only frames it is the innermost one, as "function (file:line)". A path of more than
// kMaxScopePathBytes loses its beginning: see EndOfScopePath(). "" for 0, and for an id that is not in `scopes`.
std::string ScopePath(absl::Span<const Scope> scopes, ScopeId id);
constexpr size_t kMaxScopePathBytes = 255;
// The most of a path that a refusal reports. The metadata of a call carry the whole refusal, and hold 8 KiB.
constexpr size_t kMaxReportedScopeBytes = 40;
// `path`; where that is longer than `max_bytes`, "..." and the end of it, which says more than its beginning.
std::string EndOfScopePath(std::string path, size_t max_bytes);

// The same list, with the whole path of each scope as its name. For text that repeats the scope with every block.
std::vector<Scope> WithoutNesting(absl::Span<const Scope> scopes);

// The scopes of one program, or of one session, each kept once. Bounded: names come from outside, and a program may
// make up new ones at every step. Not thread-safe.
class ScopeTable {
 public:
  static constexpr size_t kMaxScopes = 4095;
  static constexpr size_t kMaxTextBytes = 256 << 10;  // of all names and files
  static constexpr size_t kMaxNameBytes = 128;
  static constexpr size_t kMaxFileBytes = 256;
  static constexpr int kMaxDepth = 64;
  static constexpr int kMaxFrameDepth = 48;

  // Returns the scope `name` within `parent`, and adds it if it is new; `parent` itself when the name is empty, or the
  // scope would lie deeper than kMaxDepth. A full table adds nothing: new scopes are "(more scopes than are kept)".
  // Frames lie at most kMaxFrameDepth deep, which leaves some depth for names within them.
  ScopeId Find(ScopeId parent, absl::string_view name, absl::string_view file = {}, uint32_t line = 0);

  // By id. The first entry stands for no scope. Empty until Find() has added a scope.
  const std::vector<Scope>& scopes() const { return scopes_; }

 private:
  using Key = std::tuple<ScopeId, uint32_t, std::string, std::string>;

  ScopeId Add(ScopeId parent, absl::string_view name, absl::string_view file, uint32_t line);

  std::vector<Scope> scopes_;
  std::vector<uint8_t> depths_;  // by id
  std::map<Key, ScopeId> ids_;
  size_t text_bytes_ = 0;
  ScopeId overflow_ = 0;
};

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_HEAP_SCOPES_H_
