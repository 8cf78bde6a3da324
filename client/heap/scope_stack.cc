// SPDX-License-Identifier: Apache-2.0
#include "client/heap/scope_stack.h"

#include <pthread.h>

#include <algorithm>

#include "allocator/base/mutex.h"
#include "client/vrambroker/client.h"

namespace vrambroker {
namespace client_internal {
namespace {

struct Table {
  Mutex mu;
  ScopeTable scopes ABSL_GUARDED_BY(mu);
};

void LockForFork();
void UnlockAfterFork();

// Never destroyed: threads may allocate while the process exits.
Table& ProcessTable() {
  static Table* const table = [] {
    // A child made by fork() may continue entering scopes, even when another thread held the lock.
    pthread_atfork(&LockForFork, &UnlockAfterFork, &UnlockAfterFork);
    return new Table;
  }();
  return *table;
}

void LockForFork() ABSL_NO_THREAD_SAFETY_ANALYSIS {
  ProcessTable().mu.Lock();
}

void UnlockAfterFork() ABSL_NO_THREAD_SAFETY_ANALYSIS {
  ProcessTable().mu.Unlock();
}

thread_local ScopeId current_scope = 0;

}  // namespace

std::atomic<bool> scopes_are_used{false};

ScopeId CurrentScopeOfThread() {
  return current_scope;
}

ScopeId EnterScope(absl::string_view name, absl::string_view file, uint32_t line) {
  const ScopeId outer = current_scope;
  Table& table = ProcessTable();
  {
    MutexLock lock(table.mu);
    current_scope = table.scopes.Find(outer, name, file, line);
  }
  // Skip repeated stores: every allocating thread reads the flag.
  if (!scopes_are_used.load(std::memory_order_relaxed)) scopes_are_used.store(true, std::memory_order_relaxed);
  return outer;
}

void LeaveScope(ScopeId outer) {
  current_scope = outer;
}

bool IsScope(uint64_t id) {
  Table& table = ProcessTable();
  MutexLock lock(table.mu);
  return id < table.scopes.scopes().size();
}

std::vector<Scope> AllScopes() {
  Table& table = ProcessTable();
  MutexLock lock(table.mu);
  return table.scopes.scopes();
}

std::vector<Scope> ScopesAround(ScopeId scope) {
  std::vector<Scope> around;
  if (scope == 0) return around;
  Table& table = ProcessTable();
  MutexLock lock(table.mu);
  const std::vector<Scope>& scopes = table.scopes.scopes();
  for (ScopeId at = scope; at != 0; at = scopes[at].parent) around.push_back(scopes[at]);
  std::reverse(around.begin(), around.end());
  return around;
}

}  // namespace client_internal

MemoryScope::MemoryScope(absl::string_view name) : outer_(client_internal::EnterScope(name)) {}

MemoryScope::~MemoryScope() {
  client_internal::LeaveScope(outer_);
}

}  // namespace vrambroker
