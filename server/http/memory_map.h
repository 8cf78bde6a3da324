// SPDX-License-Identifier: Apache-2.0
//
// MemoryMap: every segment of a device with the blocks in it, for people who look.
//
// Sessions that lease keep their blocks in their clients, which have to be asked. All are asked at once, for a short
// time; what they answer is remembered, so that ten people who look cost no more than one.
#ifndef VRAMBROKER_SERVER_HTTP_MEMORY_MAP_H_
#define VRAMBROKER_SERVER_HTTP_MEMORY_MAP_H_

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "allocator/heap/heap_snapshot.h"
#include "allocator/heap/scope_use.h"
#include "server/core/broker.h"

namespace vrambroker {

struct MappedSession {
  enum class Answer { kBlocks, kNone, kTooManyBlocks };
  SessionId id{};
  std::string name;
  Answer answer = Answer::kNone;
  std::chrono::milliseconds age{0};  // of the answer
  std::vector<std::string> scopes;   // ScopePath() of each BlockSnapshot::scope, "" of others; empty: it uses none
  std::vector<ScopeUse>
      scope_uses;              // LargestScopeUses() of its heap, at most MemoryMap::kMaxScopeUses; empty: as above
  size_t more_scope_uses = 0;  // COUNT, of those that are not in it
};

// What is kept of a client's answer.
struct MappedHeap {
  std::vector<SegmentSnapshot> segments;
  std::vector<std::string> scopes;   // as MappedSession::scopes
  std::vector<ScopeUse> scope_uses;  // as MappedSession::scope_uses
  size_t more_scope_uses = 0;
};

struct MappedSegment {
  SegmentView info;
  const SegmentSnapshot* blocks = nullptr;  // null: not known; kept by DeviceMap::answers
};

struct DeviceMap {
  std::vector<MappedSession> sessions;  // that hold memory of the device, by id
  std::vector<MappedSegment> segments;  // as SegmentPool::GetSegments()
  std::vector<std::shared_ptr<const MappedHeap>> answers;
};

struct MemoryMapOptions {
  std::chrono::milliseconds patience{700};  // with all clients together
  std::chrono::milliseconds fresh{1000};    // no client is asked more often
  std::chrono::milliseconds kept{5000};     // an older answer is none; who gave none is asked again after this
  size_t max_blocks = 300'000;              // that are kept, of all sessions and devices: about 10 MB
  std::function<SteadyTime()> clock = [] { return std::chrono::steady_clock::now(); };
};

// Safe to call from any thread.
class MemoryMap {
 public:
  static constexpr size_t kMaxScopeUses = 500;  // of a session

  // The broker outlives all calls.
  explicit MemoryMap(Broker* broker, const MemoryMapOptions& options = {});

  // (slow) Waits for clients, at most `patience`. REQUIRES: the broker has the device.
  DeviceMap Get(int device);

 private:
  struct Shared;  // with answers that come later

  Broker& broker_;
  const MemoryMapOptions options_;
  const std::shared_ptr<Shared> shared_;
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_HTTP_MEMORY_MAP_H_
