// SPDX-License-Identifier: Apache-2.0
//
// The scopes of this process, and the current scope of each thread.
#ifndef VRAMBROKER_CLIENT_HEAP_SCOPE_STACK_H_
#define VRAMBROKER_CLIENT_HEAP_SCOPE_STACK_H_

#include <atomic>
#include <cstdint>
#include <vector>

#include "absl/strings/string_view.h"
#include "allocator/heap/scopes.h"

namespace vrambroker::client_internal {

// Whether any thread has ever entered a scope: programs without scopes skip the thread-local lookup.
extern std::atomic<bool> scopes_are_used;
ScopeId CurrentScopeOfThread();

// The scope of this thread's allocations. 0: no scope.
inline ScopeId CurrentScope() {
  return scopes_are_used.load(std::memory_order_relaxed) ? CurrentScopeOfThread() : ScopeId{0};
}

// Enters the scope `name` inside this thread's current scope. Returns the current scope, for LeaveScope(). `file` and
// `line`: the scope is a frame of the thread's stack. Names beyond ScopeTable's bounds: see ScopeTable.
ScopeId EnterScope(absl::string_view name, absl::string_view file = {}, uint32_t line = 0);
// Makes `outer` this thread's scope again. REQUIRES: EnterScope() returned `outer`.
void LeaveScope(ScopeId outer);
// Whether EnterScope() may have returned `id`, not 0.
bool IsScope(uint64_t id);

// All scopes so far, by id. Thread-safe.
std::vector<Scope> AllScopes();
// `scope` and its enclosing scopes, outermost first.
std::vector<Scope> ScopesAround(ScopeId scope);

}  // namespace vrambroker::client_internal

#endif  // VRAMBROKER_CLIENT_HEAP_SCOPE_STACK_H_
