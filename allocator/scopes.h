// SPDX-License-Identifier: Apache-2.0
//
// Scopes: the names that a program gives to the parts of its work, so that a heap can say which part holds its memory.
//
// A scope lies within another one: "layer3" in "forward" is "forward/layer3". Frames of a program's stack are kept in
// the same way, each within its caller.
#ifndef VRAMBROKER_ALLOCATOR_SCOPES_H_
#define VRAMBROKER_ALLOCATOR_SCOPES_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace vrambroker {

// A place in a list of scopes; 0: none.
using ScopeId = uint16_t;

struct Scope {
  ScopeId parent = 0;  // the scope around it, which comes earlier in the list
  std::string name;    // of a frame: the function
  std::string file;    // of a frame; empty: a scope that the program named
  uint32_t line = 0;   // of a frame
};

// Without what no name has: control characters (of Unicode, too, and those that turn the direction of writing), bytes
// that are not UTF-8, and what comes after `max_bytes`.
std::string CleanScopeText(absl::string_view text, size_t max_bytes);

// "forward/layer3": the named scopes around `id`, outermost first, without frames of the stack; of the innermost frame
// "function (file:line)" where nothing was named. At most kMaxScopePathBytes, of which the end is kept. "" for 0, and
// for what is not in `scopes`.
std::string ScopePath(absl::Span<const Scope> scopes, ScopeId id);
constexpr size_t kMaxScopePathBytes = 255;
// Of what a refusal says: all of it travels in the metadata of a call, of which there are 8 KiB.
constexpr size_t kMaxReportedScopeBytes = 40;
// The end of a path, which says more than its beginning, after "...", where it has more than `max_bytes`.
std::string EndOfScopePath(std::string path, size_t max_bytes);

// The same ids, each as one scope that has the whole path as its name: for where each block says all of it again.
std::vector<Scope> WithoutNesting(absl::Span<const Scope> scopes);

// The scopes of one program, or of one session, each kept once. Bounded, for names come from outside and may be made
// anew for each step. Not thread-safe.
class ScopeTable {
 public:
  static constexpr size_t kMaxScopes = 4095;
  static constexpr size_t kMaxTextBytes = 256 << 10;  // of all names and files
  static constexpr size_t kMaxNameBytes = 128;
  static constexpr size_t kMaxFileBytes = 256;
  static constexpr int kMaxDepth = 64;
  static constexpr int kMaxFrameDepth = 48;

  // The scope `name` within `parent`. What has no name, and what lies deeper than kMaxDepth, is `parent` itself. Once
  // the table is full, what is new is the scope "(more scopes than are kept)". Frames take at most kMaxFrameDepth of
  // the depth, so that names fit.
  ScopeId Find(ScopeId parent, absl::string_view name, absl::string_view file = {}, uint32_t line = 0);

  // By id; the first one is nothing. Empty as long as there is none.
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

#endif  // VRAMBROKER_ALLOCATOR_SCOPES_H_
