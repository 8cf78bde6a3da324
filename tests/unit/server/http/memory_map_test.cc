// SPDX-License-Identifier: Apache-2.0
//
// Tests of the page's memory map: how much the map keeps of sessions' blocks and of their scopes' names.
#include "server/http/memory_map.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/unit/server/core/broker_fixture.h"

namespace vrambroker {
namespace {

using ::testing::Each;
using ::testing::EndsWith;
using ::testing::IsEmpty;
using ::testing::SizeIs;

class MemoryMapTest : public BrokerTest {
 protected:
  // Sessions in these tests answer without a client: the patience does not matter.
  static MemoryMapOptions Keeping(size_t max_blocks) {
    return {.patience = std::chrono::hours(1), .max_blocks = max_blocks};
  }
  // Returns the innermost of kMaxDepth nested scopes. The outer scopes have the longest names.
  static ScopeId DeepScope(Session& session, const std::string& innermost) {
    const std::string name(ScopeTable::kMaxNameBytes, 'd');
    std::vector<RemoteSession::NamedScope> scopes(ScopeTable::kMaxDepth - 1, {.name = name});
    scopes.push_back({.name = innermost});
    return session.remote()->FindScope(scopes);
  }
  void AllocateIn(const SessionPtr& session, ScopeId scope) {
    ASSERT_TRUE(Allocate(session, 512, 0, 0, {.scope = scope}).ok());
  }
  // Opens a session with `blocks` blocks, each in its own scope.
  SessionPtr OpenWithScopes(const std::string& name, int blocks) {
    const SessionPtr session = Open(name);
    for (int i = 0; i < blocks; ++i) AllocateIn(session, DeepScope(*session, absl::StrCat("layer", i)));
    return session;
  }
};

TEST_F(MemoryMapTest, APathIsCarriedOnceHoweverManyBlocksHaveIt) {
  const SessionPtr session = Open("deep");
  const ScopeId scope = DeepScope(*session, "layer");
  for (int i = 0; i < 300; ++i) AllocateIn(session, scope);
  MemoryMap map(broker_.get(), Keeping(10'000));
  const DeviceMap device = map.Get(0);
  ASSERT_THAT(device.sessions, SizeIs(1));
  ASSERT_EQ(device.sessions[0].answer, MappedSession::Answer::kBlocks);
  const std::vector<std::string>& names = device.sessions[0].scopes;
  ASSERT_THAT(names, SizeIs(scope + 1));
  EXPECT_THAT(names[scope], SizeIs(kMaxScopePathBytes));
  EXPECT_THAT(names[scope], EndsWith("dd/layer"));
  // The outer scopes hold no blocks themselves.
  EXPECT_THAT(std::vector<std::string>(names.begin(), names.end() - 1), Each(IsEmpty()));
}

TEST_F(MemoryMapTest, NamesOfScopesWithoutBlocksAreNotCarried) {
  const SessionPtr session = Open("many");
  for (int i = 0; i < 1000; ++i)
    session->remote()->FindScope(std::vector<RemoteSession::NamedScope>{{.name = absl::StrCat("step ", i)}});
  AllocateIn(session, 1);
  MemoryMap map(broker_.get(), Keeping(10'000));
  EXPECT_THAT(map.Get(0).sessions.at(0).scopes, testing::ElementsAre("", "step 0"));
}

// A name takes as much memory as several blocks, and counts as much.
TEST_F(MemoryMapTest, NamesCountAgainstWhatIsKept) {
  constexpr int kBlocks = 100;
  const SessionPtr plain = Open("plain");
  for (int i = 0; i < kBlocks; ++i) AllocateIn(plain, 0);
  const SessionPtr scoped = OpenWithScopes("scoped", kBlocks);
  MemoryMap small(broker_.get(), Keeping(3 * kBlocks));
  const DeviceMap few = small.Get(0);
  ASSERT_THAT(few.sessions, SizeIs(2));
  EXPECT_EQ(few.sessions[0].answer, MappedSession::Answer::kBlocks);
  EXPECT_EQ(few.sessions[1].answer, MappedSession::Answer::kTooManyBlocks);
  EXPECT_THAT(few.sessions[1].scopes, IsEmpty());
  MemoryMap large(broker_.get(), Keeping(30 * kBlocks));
  const DeviceMap all = large.Get(0);
  EXPECT_EQ(all.sessions.at(1).answer, MappedSession::Answer::kBlocks);
  EXPECT_THAT(all.sessions.at(1).scopes.back(), EndsWith("/layer99"));
}

TEST_F(MemoryMapTest, SaysWhatEachScopeHolds) {
  const SessionPtr session = Open("layers");
  const auto scope = [&](const std::string& name) {
    return session->remote()->FindScope(std::vector<RemoteSession::NamedScope>{{.name = name}});
  };
  const absl::StatusOr<Allocation> first = Allocate(session, 2048, 0, 0, {.scope = scope("activations")});
  ASSERT_TRUE(first.ok()) << first.status();
  AllocateIn(session, scope("weights"));
  ASSERT_TRUE(broker_->allocations().Free(session, {first->block}).ok());
  MemoryMap map(broker_.get(), Keeping(10'000));
  const DeviceMap device = map.Get(0);
  ASSERT_THAT(device.sessions.at(0).scope_uses, SizeIs(2));
  const ScopeUse& weights = device.sessions[0].scope_uses[0];
  EXPECT_EQ(weights.scope, "weights");
  EXPECT_EQ(weights.allocated_bytes, 512u);
  EXPECT_EQ(weights.bytes_at_peak, 512u);
  EXPECT_EQ(weights.blocks, 1u);
  // The scope pins its whole segment except the block.
  EXPECT_EQ(weights.pinned_hole_bytes, device.segments.at(0).info.bytes - 512);
  const ScopeUse& activations = device.sessions[0].scope_uses[1];
  EXPECT_EQ(activations.scope, "activations");
  EXPECT_EQ(activations.allocated_bytes, 0u);
  EXPECT_EQ(activations.bytes_at_peak, 2048u);
  EXPECT_EQ(activations.pinned_hole_bytes, 0u);
  // The list that blocks point into lacks names of scopes without blocks.
  EXPECT_THAT(device.sessions[0].scopes, testing::ElementsAre("", "", "weights"));
}

TEST_F(MemoryMapTest, OfManyScopesThoseThatHoldMostAreCarried) {
  const SessionPtr session = Open("many");
  for (size_t i = 0; i < MemoryMap::kMaxScopeUses + 7; ++i) {
    const std::string name = absl::StrCat("step ", i);
    const ScopeId scope = session->remote()->FindScope(std::vector<RemoteSession::NamedScope>{{.name = name}});
    ASSERT_TRUE(Allocate(session, i == MemoryMap::kMaxScopeUses ? 4096 : 512, 0, 0, {.scope = scope}).ok());
  }
  MemoryMap map(broker_.get(), Keeping(10'000));
  const DeviceMap device = map.Get(0);
  ASSERT_THAT(device.sessions, SizeIs(1));
  EXPECT_THAT(device.sessions[0].scope_uses, SizeIs(MemoryMap::kMaxScopeUses));
  EXPECT_EQ(device.sessions[0].more_scope_uses, 7u);
  EXPECT_THAT(device.sessions[0].scope_uses,
              testing::Contains(testing::Field(&ScopeUse::scope, absl::StrCat("step ", MemoryMap::kMaxScopeUses))));
}

// The figures of a scope take as much memory as the scope's name, and count as much.
TEST_F(MemoryMapTest, WhatScopesHoldCountsAgainstWhatIsKept) {
  constexpr size_t kScopes = 100;
  const SessionPtr session = Open("peak");
  for (size_t i = 0; i < kScopes; ++i) {
    const std::string name = absl::StrCat("step ", i);
    AllocateIn(session, session->remote()->FindScope(std::vector<RemoteSession::NamedScope>{{.name = name}}));
  }
  // Names and blocks without the figures would fit.
  MemoryMap map(broker_.get(), Keeping(10 * kScopes));
  EXPECT_EQ(map.Get(0).sessions.at(0).answer, MappedSession::Answer::kTooManyBlocks);
}

// Each session alone would fit the bound; all sessions together do not.
TEST_F(MemoryMapTest, NamesOfAllSessionsTogetherAreBounded) {
  constexpr int kSessions = 4;
  constexpr int kBlocks = 100;
  for (int i = 0; i < kSessions; ++i) OpenWithScopes(absl::StrCat("job", i), kBlocks);
  MemoryMap map(broker_.get(), Keeping(25 * kBlocks));
  size_t kept = 0;
  size_t names = 0;
  for (const MappedSession& session : map.Get(0).sessions) {
    kept += session.answer == MappedSession::Answer::kBlocks ? 1 : 0;
    names += session.scopes.size();
  }
  EXPECT_EQ(kept, 1u);
  EXPECT_LE(names, 25u * kBlocks);
}

}  // namespace
}  // namespace vrambroker
