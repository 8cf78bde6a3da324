// SPDX-License-Identifier: Apache-2.0
//
// The scopes of this process, and the one that each of its threads is in.
#ifndef VRAMBROKER_CLIENT_HEAP_SCOPE_STACK_H_
#define VRAMBROKER_CLIENT_HEAP_SCOPE_STACK_H_

#include <atomic>
#include <cstdint>
#include <vector>

#include "absl/strings/string_view.h"
#include "allocator/heap/scopes.h"

namespace vrambroker::client_internal {

// Whether any thread has ever entered one: those who never do pay for no look at their thread.
extern std::atomic<bool> scopes_are_used;
ScopeId CurrentScopeOfThread();

// What this thread allocates for now. 0: it is in no scope.
inline ScopeId CurrentScope() {
  return scopes_are_used.load(std::memory_order_relaxed) ? CurrentScopeOfThread() : ScopeId{0};
}

// This thread is in the scope `name` of its current one from now on. Returns that one, for LeaveScope(). `file` and
// `line`: it is a frame of the thread's stack. Names beyond ScopeTable's bounds: see there.
ScopeId EnterScope(absl::string_view name, absl::string_view file = {}, uint32_t line = 0);
// This thread is in `outer` again. REQUIRES: EnterScope() returned it.
void LeaveScope(ScopeId outer);
// Whether EnterScope() may have returned `id`, which is not 0.
bool IsScope(uint64_t id);

// All of them so far, by id. Safe to call from any thread.
std::vector<Scope> AllScopes();
// `scope` and those around it, outermost first.
std::vector<Scope> ScopesAround(ScopeId scope);

}  // namespace vrambroker::client_internal

#endif  // VRAMBROKER_CLIENT_HEAP_SCOPE_STACK_H_
