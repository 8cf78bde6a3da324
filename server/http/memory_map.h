// SPDX-License-Identifier: Apache-2.0
//
// MemoryMap: every segment of a device with its blocks, for display.
//
// Leasing sessions keep their blocks in the clients, which have to be asked. All clients are asked at once, for a short
// time. The answers are cached, so that ten viewers cost no more than a single viewer.
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
  std::vector<std::string> scopes;   // ScopePath() of each BlockSnapshot::scope, "" of unused scopes; empty: no scopes
  std::vector<ScopeUse>
      scope_uses;              // LargestScopeUses() of the heap, at most MemoryMap::kMaxScopeUses; empty: as above
  size_t more_scope_uses = 0;  // number of scope uses omitted
};

// The cached part of a client's answer.
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
  std::vector<MappedSession> sessions;  // sessions holding memory of the device, by id
  std::vector<MappedSegment> segments;  // as SegmentPool::GetSegments()
  std::vector<std::shared_ptr<const MappedHeap>> answers;
};

struct MemoryMapOptions {
  std::chrono::milliseconds patience{700};  // with all clients together
  std::chrono::milliseconds fresh{1000};    // no client is asked more often
  std::chrono::milliseconds kept{5000};     // maximum age of an answer; pause after a missing answer
  size_t max_blocks = 300'000;              // cached, of all sessions and devices: about 10 MB
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
  struct Shared;  // with late answers

  Broker& broker_;
  const MemoryMapOptions options_;
  const std::shared_ptr<Shared> shared_;
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_HTTP_MEMORY_MAP_H_
