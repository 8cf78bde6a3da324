// SPDX-License-Identifier: Apache-2.0
#include "server/http/memory_map.h"

#include <algorithm>
#include <deque>
#include <map>
#include <optional>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"

namespace vrambroker {
namespace {

using Heap = std::shared_ptr<const MappedHeap>;
using Key = std::pair<SessionId, int>;  // and device

// Questions in progress to the clients of a user: half of the default of max_questions_per_uid, so that viewing cannot
// block reclaiming. Further questions wait their turn.
constexpr size_t kQuestionsPerUid = 8;

// Charge for a scope's path, or for a scope's use, in blocks, against the blocks cached for all sessions together.
constexpr size_t kBlocksOfScope = 8;

MappedHeap Map(HeapSnapshot snapshot) {
  std::vector<ScopeUse> uses = ScopeUses(snapshot);
  const size_t all_uses = uses.size();
  uses = LargestScopeUses(std::move(uses), MemoryMap::kMaxScopeUses);
  const size_t more = all_uses - uses.size();
  MappedHeap heap{
      .segments = std::move(snapshot.segments), .scopes = {}, .scope_uses = std::move(uses), .more_scope_uses = more};
  for (const SegmentSnapshot& segment : heap.segments) {
    for (const BlockSnapshot& block : segment.blocks) {
      if (block.scope == 0) continue;
      if (block.scope >= heap.scopes.size()) heap.scopes.resize(size_t{block.scope} + 1);
      std::string& path = heap.scopes[block.scope];
      if (path.empty()) path = ScopePath(snapshot.scopes, block.scope);
    }
  }
  return heap;
}

// Compares sessions with ids.
struct ById {
  bool operator()(const SessionView& session, SessionId id) const { return session.id < id; }
  bool operator()(SessionId id, const SessionView& session) const { return id < session.id; }
};

}  // namespace

struct MemoryMap::Shared : std::enable_shared_from_this<Shared> {
  struct Question {
    SessionPtr session;
    int device = 0;
  };
  struct User {
    size_t under_way = 0;
    std::deque<Question> waiting;
  };
  struct Entry {
    bool pending = false;             // to be asked, or asked and not answered
    std::optional<SteadyTime> asked;  // time of the last question
    SteadyTime taken;                 // arrival time of `heap`
    Heap heap;                        // null: no answer
    bool too_many = false;
    size_t blocks = 0;
    size_t may_have = 0;  // bound on blocks, from the reserved memory
  };

  Shared(Broker* the_broker, MemoryMapOptions the_options) : broker(*the_broker), options(std::move(the_options)) {}

  Broker& broker;
  const MemoryMapOptions options;
  Mutex mu;
  CondVar answered;
  std::map<UserKey, User> users ABSL_GUARDED_BY(mu);
  std::map<Key, Entry> entries ABSL_GUARDED_BY(mu);
  size_t blocks ABSL_GUARDED_BY(mu) = 0;  // of all entries

  void Forget(Entry& entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    blocks -= entry.blocks;
    entry.blocks = 0;
    entry.heap = nullptr;
    entry.too_many = false;
  }

  // Does not wait again for a client asked long before `now`.
  bool IsAnswerOnItsWay(const std::vector<MappedSession>& sessions, int device, SteadyTime now) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    for (const MappedSession& session : sessions) {
      const auto it = entries.find({session.id, device});
      if (it != entries.end() && it->second.pending && now - it->second.asked.value_or(now) < options.patience)
        return true;
    }
    return false;
  }

  // Asks waiting questions, as many at a time as allowed.
  void AskClientsOf(const UserKey& uid) ABSL_LOCKS_EXCLUDED(mu) {
    while (true) {
      Question next;
      {
        MutexLock lock(mu);
        const auto user = users.find(uid);
        if (user == users.end()) return;
        if (user->second.waiting.empty()) {
          if (user->second.under_way == 0) users.erase(user);
          return;
        }
        if (user->second.under_way >= kQuestionsPerUid) return;
        next = std::move(user->second.waiting.front());
        user->second.waiting.pop_front();
        ++user->second.under_way;
      }
      const Key key(next.session->id(), next.device);
      const auto receive = [self = shared_from_this(), key, uid](absl::StatusOr<HeapSnapshot> snapshot) {
        self->Receive(key, std::move(snapshot));
        {
          MutexLock lock(self->mu);
          --self->users[uid].under_way;
        }
        self->AskClientsOf(uid);
      };
      next.session->Snapshot(next.device, receive, /*with_history=*/false);
    }
  }

  void Receive(const Key& key, absl::StatusOr<HeapSnapshot> snapshot) ABSL_LOCKS_EXCLUDED(mu) {
    size_t count = 0;
    size_t charged = 0;
    std::optional<MappedHeap> heap;
    if (snapshot.ok()) {
      for (const SegmentSnapshot& segment : snapshot->segments) count += segment.blocks.size();
      heap = Map(*std::move(snapshot));
      charged = count + kBlocksOfScope * (heap->scopes.size() + heap->scope_uses.size());
    }
    MutexLock lock(mu);
    const auto it = entries.find(key);
    if (it == entries.end()) return;  // the session has gone meanwhile
    Entry& entry = it->second;
    entry.pending = false;
    Forget(entry);
    entry.taken = options.clock();
    if (heap.has_value()) {
      entry.too_many = count > entry.may_have || blocks + charged > options.max_blocks;
      if (!entry.too_many) {
        entry.blocks = charged;
        blocks += charged;
        entry.heap = std::make_shared<const MappedHeap>(*std::move(heap));
      }
    }
    answered.NotifyAll();
  }
};

MemoryMap::MemoryMap(Broker* broker, const MemoryMapOptions& options)
    : broker_(*broker), options_(options), shared_(std::make_shared<Shared>(broker, options)) {}

DeviceMap MemoryMap::Get(int device) {
  const auto deadline = std::chrono::steady_clock::now() + options_.patience;
  DeviceMap map;
  const BrokerView view = broker_.operator_view().Look();
  const SteadyTime now = options_.clock();
  absl::flat_hash_set<UserKey> to_ask;
  {
    MutexLock lock(shared_->mu);
    for (auto it = shared_->entries.begin(); it != shared_->entries.end();) {
      // Sorted by id, like the sessions of the view.
      const bool open = std::binary_search(view.sessions.begin(), view.sessions.end(), it->first.first, ById());
      if (!open) shared_->Forget(it->second);
      it = open ? std::next(it) : shared_->entries.erase(it);
    }
  }
  for (const SessionView& session : view.sessions) {
    if (session.devices[static_cast<size_t>(device)].account.reserved_bytes == 0) continue;
    map.sessions.push_back({.id = session.id, .name = session.name});
    const absl::StatusOr<SessionPtr> found = broker_.sessions().Find(SessionRef(session.id));
    if (!found.ok()) continue;  // the session has just ended
    MutexLock lock(shared_->mu);
    Shared::Entry& entry = shared_->entries[{session.id, device}];
    const auto pause = entry.heap != nullptr ? options_.fresh : options_.kept;
    if (entry.pending || (entry.asked.has_value() && now - *entry.asked < pause)) continue;
    entry.pending = true;
    entry.asked = now;
    entry.may_have = session.devices[static_cast<size_t>(device)].account.reserved_bytes / kMinBlockBytes;
    shared_->users[session.caller.user()].waiting.push_back({.session = *found, .device = device});
    to_ask.insert(session.caller.user());
  }
  for (const UserKey& uid : to_ask) shared_->AskClientsOf(uid);

  // Indexed by holder and segment: a client's claims about other clients' segments are not believed.
  absl::flat_hash_map<std::pair<SessionId, uint64_t>, const SegmentSnapshot*> blocks;
  {
    MutexLock lock(shared_->mu);
    while (shared_->IsAnswerOnItsWay(map.sessions, device, now)) {
      if (!shared_->answered.WaitUntil(shared_->mu, deadline)) break;
    }
    const SteadyTime end = options_.clock();
    for (MappedSession& session : map.sessions) {
      const auto it = shared_->entries.find({session.id, device});
      if (it == shared_->entries.end()) continue;
      const Shared::Entry& entry = it->second;
      session.age = std::chrono::duration_cast<std::chrono::milliseconds>(end - entry.taken);
      if (entry.too_many) session.answer = MappedSession::Answer::kTooManyBlocks;
      if (entry.heap == nullptr || session.age > options_.kept) continue;
      session.answer = MappedSession::Answer::kBlocks;
      map.answers.push_back(entry.heap);
      session.scopes = entry.heap->scopes;
      session.scope_uses = entry.heap->scope_uses;
      session.more_scope_uses = entry.heap->more_scope_uses;
      for (const SegmentSnapshot& segment : entry.heap->segments)
        blocks.emplace(std::pair(session.id, Raw(segment.id)), &segment);
    }
  }
  // Reads the segments after the answers, so that a segment returned meanwhile is not drawn twice.
  for (SegmentView& info : broker_.pools()[static_cast<size_t>(device)]->GetSegments()) {
    const bool may_have_blocks =
        info.state == SegmentView::State::kLeased || info.state == SegmentView::State::kReturning;
    const auto it = may_have_blocks ? blocks.find(std::pair(info.holder, info.id)) : blocks.end();
    const bool known = it != blocks.end() && it->second->bytes == info.bytes;
    map.segments.push_back({.info = std::move(info), .blocks = known ? it->second : nullptr});
  }
  return map;
}

}  // namespace vrambroker
