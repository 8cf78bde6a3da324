// SPDX-License-Identifier: Apache-2.0
//
// Scopes: names given by a program to the parts of its work, so that a heap can say which part holds the memory.
//
// Scopes nest: "layer3" in "forward" is "forward/layer3". Frames of a program's stack are kept likewise, each within
// its caller.
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

// Index of a scope in its list. 0 stands for no scope.
using ScopeId = uint16_t;

struct Scope {
  ScopeId parent = 0;  // the enclosing scope, earlier in the list
  std::string name;    // of a frame: the function
  std::string file;    // of a frame; empty: a scope named by the program
  uint32_t line = 0;   // of a frame
};

// Returns `text` fit for display: at most `max_bytes` of UTF-8, with U+FFFD for invalid bytes. Removes control
// characters of ASCII and Unicode, including changes of the direction of writing.
std::string CleanScopeText(absl::string_view text, size_t max_bytes);

// Returns the path of a scope, such as "forward/layer3": the names from the outermost scope to `id`, without frames of
// the stack. With frames only, the path is the innermost frame as "function (file:line)". A path of more than
// kMaxScopePathBytes loses its beginning: see EndOfScopePath(). "" for 0, and for an id missing in `scopes`.
std::string ScopePath(absl::Span<const Scope> scopes, ScopeId id);
constexpr size_t kMaxScopePathBytes = 255;
// Bytes of a path reported by a refusal, at most. The metadata of a call carry the whole refusal, and hold 8 KiB.
constexpr size_t kMaxReportedScopeBytes = 40;
// Returns `path`; if longer than `max_bytes`, "..." and the path's end: the end says more than the beginning.
std::string EndOfScopePath(std::string path, size_t max_bytes);

// Returns a copy of the list with the whole path of each scope as its name. For text with a scope for every block.
std::vector<Scope> WithoutNesting(absl::Span<const Scope> scopes);

// ScopeTable: the scopes of a program, or of a session, each kept once. Bounded: names come from outside, and a program
// may make up new names at every step. Not thread-safe.
class ScopeTable {
 public:
  static constexpr size_t kMaxScopes = 4095;
  static constexpr size_t kMaxTextBytes = 256 << 10;  // of all names and files
  static constexpr size_t kMaxNameBytes = 128;
  static constexpr size_t kMaxFileBytes = 256;
  static constexpr int kMaxDepth = 64;
  static constexpr int kMaxFrameDepth = 48;

  // Returns the scope `name` within `parent`, after adding a new scope if necessary. Returns `parent` when the name is
  // empty, or the scope would lie deeper than kMaxDepth. A full table adds nothing and returns "(more scopes than are
  // kept)" for new scopes. Frames lie at most kMaxFrameDepth deep, leaving some depth for names within frames.
  ScopeId Find(ScopeId parent, absl::string_view name, absl::string_view file = {}, uint32_t line = 0);

  // Scopes by id. The first entry stands for no scope. Empty until Find() has added a scope.
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
