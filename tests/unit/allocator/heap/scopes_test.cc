// SPDX-License-Identifier: Apache-2.0
//
// Scopes: the list, the memory in each scope, and the way into snapshots.
#include "allocator/heap/scopes.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "allocator/heap/scope_use.h"
#include "allocator/wire/heap_convert.h"
#include "tests/unit/allocator/heap/simulated_heap_fixture.h"

namespace vrambroker {
namespace {

using ::testing::IsEmpty;
using ::testing::SizeIs;

// Reads the list after `id` is known, because a search for `id` may move the list.
std::string PathOf(const ScopeTable& table, ScopeId id) {
  return ScopePath(table.scopes(), id);
}

TEST(ScopeTableTest, KeepsEachScopeOnce) {
  ScopeTable table;
  EXPECT_THAT(table.scopes(), IsEmpty());
  const ScopeId forward = table.Find(0, "forward");
  const ScopeId layer = table.Find(forward, "layer3");
  EXPECT_NE(forward, 0);
  EXPECT_EQ(table.Find(0, "forward"), forward);
  EXPECT_EQ(table.Find(forward, "layer3"), layer);
  EXPECT_NE(table.Find(0, "layer3"), layer);
  EXPECT_NE(table.Find(forward, "layer3", "model.py", 7), layer) << "a frame is another thing than a name";
  EXPECT_NE(table.Find(0, "f", "model.py", 7), table.Find(0, "f", "model.py", 8));
  EXPECT_EQ(PathOf(table, layer), "forward/layer3");
  EXPECT_EQ(PathOf(table, 0), "");
  EXPECT_EQ(PathOf(table, 1000), "") << "it is not there";
  EXPECT_EQ(table.Find(layer, ""), layer) << "nothing is no scope";
}

TEST(ScopeTableTest, FramesAreNotPartOfThePath) {
  ScopeTable table;
  const ScopeId frame = table.Find(table.Find(0, "forward"), "step", "train.py", 12);
  EXPECT_EQ(PathOf(table, table.Find(frame, "layer3")), "forward/layer3");
  EXPECT_EQ(PathOf(table, frame), "forward");
  EXPECT_EQ(PathOf(table, table.Find(0, "step", "train.py", 12)), "step (train.py:12)");
}

TEST(ScopeTableTest, TextIsCleanAndBounded) {
  EXPECT_EQ(CleanScopeText("a\x1b[31m\n\tb\x7f", 100), "a[31mb");
  EXPECT_EQ(CleanScopeText("\xff\xc3\xa4", 100), "\xef\xbf\xbd\xc3\xa4");
  EXPECT_EQ(CleanScopeText("a\xc2\x9b"
                           "2Jb\xc2\xa0",
                           100),
            "a2Jb\xc2\xa0")
      << "C1 is a terminal's, too";
  EXPECT_EQ(CleanScopeText("a\xe2\x80\xae"
                           "b\xe2\x81\xa6"
                           "c\xe2\x80\xa8"
                           "d\xef\xbb\xbf",
                           100),
            "abcd");
  EXPECT_EQ(CleanScopeText("\xe2\x82\xac\xe2\x80\x93", 100), "\xe2\x82\xac\xe2\x80\x93") << "a euro and a dash";
  EXPECT_EQ(CleanScopeText("aa\xc3\xa4", 3), "aa") << "no half a character";
  ScopeTable table;
  EXPECT_EQ(table.Find(0, "\n"), 0);
  const std::string full(ScopeTable::kMaxNameBytes, 'n');
  EXPECT_EQ(table.scopes()[table.Find(0, full + "more")].name, full);
  ScopeId deep = 0;
  for (int i = 0; i < ScopeTable::kMaxDepth; ++i) deep = table.Find(deep, "deep");
  EXPECT_EQ(table.Find(deep, "deeper"), deep);
  const std::string path = PathOf(table, deep);
  EXPECT_EQ(path.size(), kMaxScopePathBytes);
  EXPECT_TRUE(path.starts_with("...")) << path;
  EXPECT_TRUE(path.ends_with("/deep/deep")) << path;
}

TEST(ScopeTableTest, WhatIsTooMuchIsOneScope) {
  ScopeTable many;
  ScopeId last = 0;
  for (int i = 0; i < 5000; ++i) last = many.Find(0, absl::StrCat("step ", i));
  EXPECT_THAT(many.scopes(), SizeIs(ScopeTable::kMaxScopes + 1));
  EXPECT_EQ(PathOf(many, last), "(more scopes than are kept)");
  EXPECT_EQ(PathOf(many, many.Find(0, "step 7")), "step 7") << "what is there stays";
  // The table keeps no scopes within the overflow.
  EXPECT_EQ(many.Find(last, "within"), last);

  ScopeTable large;
  const std::string file(ScopeTable::kMaxFileBytes, 'f');
  for (uint32_t line = 0; line < 4000; ++line) last = large.Find(0, absl::StrCat(line), file, line);
  size_t bytes = 0;
  for (const Scope& scope : large.scopes()) bytes += scope.name.size() + scope.file.size();
  EXPECT_LE(bytes, ScopeTable::kMaxTextBytes + 100);
  EXPECT_EQ(PathOf(large, last), "(more scopes than are kept)");
  EXPECT_EQ(large.Find(0, "x"), last) << "from then on also what is short";
}

TEST(ScopeTableTest, WithoutNestingEachIsOneFrame) {
  ScopeTable table;
  EXPECT_THAT(WithoutNesting(table.scopes()), IsEmpty());
  ScopeId deep = 0;
  for (int i = 0; i < ScopeTable::kMaxDepth; ++i) deep = table.Find(deep, absl::StrCat("depth ", i));
  const ScopeId frame = table.Find(table.Find(0, "main", "train.py", 1), "step", "train.py", 12);
  const ScopeId named = table.Find(frame, "forward");
  const std::vector<Scope> flat = WithoutNesting(table.scopes());
  ASSERT_THAT(flat, SizeIs(table.scopes().size())) << "blocks keep their ids";
  for (size_t id = 0; id < flat.size(); ++id) {
    EXPECT_EQ(flat[id].parent, 0);
    EXPECT_EQ(flat[id].file, "");
    EXPECT_EQ(flat[id].line, 0u);
    EXPECT_EQ(flat[id].name, PathOf(table, static_cast<ScopeId>(id)));
    EXPECT_LE(flat[id].name.size(), kMaxScopePathBytes);
  }
  EXPECT_TRUE(flat[deep].name.ends_with("/depth 62/depth 63")) << flat[deep].name;
  EXPECT_EQ(flat[frame].name, "step (train.py:12)");
  EXPECT_EQ(flat[named].name, "forward");
}

// The table keeps a program's own names, however deep the stack is.
TEST(ScopeTableTest, FramesLeaveRoomForNames) {
  ScopeTable table;
  ScopeId frame = 0;
  for (uint32_t line = 0; line < 100; ++line) frame = table.Find(frame, "f", "deep.py", line);
  EXPECT_THAT(table.scopes(), SizeIs(1 + ScopeTable::kMaxFrameDepth));
  EXPECT_EQ(PathOf(table, table.Find(table.Find(frame, "forward"), "layer3")), "forward/layer3");
}

TEST(ScopeUseTest, AReportHasTheLargestScope) {
  std::vector<ScopeUse> uses;
  for (const char* name : {"a", "b", "c"})
    uses.push_back({.scope = name, .allocated_bytes = 1, .pinned_hole_bytes = 9});
  uses.push_back({.scope = "", .allocated_bytes = 8});
  uses.push_back({.scope = "large", .allocated_bytes = 7});
  uses = LargestScopeUses(uses, 3);
  ASSERT_THAT(uses, SizeIs(3));
  EXPECT_EQ(uses[0].scope, "a");
  EXPECT_EQ(LargestNamedScope(uses)->scope, "large");
  uses = {{.scope = "", .allocated_bytes = 8}};
  EXPECT_EQ(LargestNamedScope(uses), uses.end());
}

class ScopedHeapTest : public SimulatedHeapTest {
 protected:
  Block* GetIn(ScopeId scope, uint64_t bytes) {
    Block* block = allocator_->TryAllocate(bytes, 0, scope);
    if (block != nullptr) return block;
    absl::StatusOr<Block*> allocated = allocator_->Allocate(bytes, 0, scope);
    EXPECT_TRUE(allocated.ok()) << allocated.status();
    return allocated.ok() ? *allocated : nullptr;
  }
  HeapSnapshot Snapshot() {
    HeapSnapshot snapshot = allocator_->Snapshot();
    snapshot.scopes = table_.scopes();
    return snapshot;
  }
  std::map<std::string, ScopeUse> Uses() {
    std::map<std::string, ScopeUse> uses;
    for (const ScopeUse& use : ScopeUses(Snapshot())) uses[use.scope] = use;
    return uses;
  }

  ScopeTable table_;
  const ScopeId forward_ = table_.Find(0, "forward");
  const ScopeId backward_ = table_.Find(0, "backward");
};

TEST_F(ScopedHeapTest, TellsWhatEachScopeHoldsAndHeldAtThePeak) {
  Block* const weights = Get(4_MiB);
  Block* const first = GetIn(forward_, 8_MiB);
  Block* const second = GetIn(forward_, 4_MiB);
  allocator_->Free(first);
  GetIn(backward_, 2_MiB);
  std::map<std::string, ScopeUse> uses = Uses();
  EXPECT_EQ(uses["forward"].allocated_bytes, 4_MiB);
  EXPECT_EQ(uses["forward"].blocks, 1u);
  EXPECT_EQ(uses["forward"].bytes_at_peak, 12_MiB);
  EXPECT_EQ(uses["backward"].allocated_bytes, 2_MiB);
  EXPECT_EQ(uses["backward"].bytes_at_peak, 0u) << "there was none at the peak";
  EXPECT_EQ(uses[""].allocated_bytes, 4_MiB);
  EXPECT_EQ(uses[""].bytes_at_peak, 4_MiB);
  // A new peak begins.
  allocator_->ResetPeakStats();
  uses = Uses();
  EXPECT_EQ(uses["forward"].bytes_at_peak, 4_MiB);
  EXPECT_EQ(uses["backward"].bytes_at_peak, 2_MiB);
  allocator_->Free(second);
  allocator_->Free(weights);
  uses = Uses();
  EXPECT_EQ(uses["forward"].allocated_bytes, 0u);
  EXPECT_EQ(uses["forward"].bytes_at_peak, 4_MiB);
  EXPECT_EQ(uses[""].bytes_at_peak, 4_MiB);
}

TEST_F(ScopedHeapTest, WithoutScopesThereIsNothingToTell) {
  Get(4_MiB);
  EXPECT_THAT(allocator_->Snapshot().scope_bytes_at_peak, IsEmpty());
  EXPECT_THAT(ScopeUses(allocator_->Snapshot()), IsEmpty());
  EXPECT_THAT(allocator_->ExplainFit(4_MiB).scopes, IsEmpty());
}

TEST_F(ScopedHeapTest, ARefusalNamesScopes) {
  // Each group of five blocks has a segment of 20 MiB: 4 MiB in use, 4 MiB free, and so on.
  std::vector<Block*> blocks;
  for (int i = 0; i < 10; ++i) blocks.push_back(GetIn(i < 5 ? forward_ : backward_, 4_MiB));
  for (size_t i = 1; i < blocks.size(); i += 2) allocator_->Free(blocks[i]);
  const FitReport fit = allocator_->ExplainFit(20_MiB, 0, backward_, [this] { return table_.scopes(); });
  EXPECT_EQ(fit.scope, "backward");
  ASSERT_THAT(fit.holes.most_bytes, SizeIs(2));
  EXPECT_EQ(fit.holes.most_bytes[0].longest_held[0].scope, "backward") << "three of whose five are free";
  EXPECT_EQ(fit.holes.most_bytes[1].longest_held[0].scope, "forward");
  ASSERT_THAT(fit.scopes, SizeIs(2));
  EXPECT_EQ(fit.scopes[0].scope, "forward");
  EXPECT_EQ(fit.scopes[0].allocated_bytes, 12_MiB);
  EXPECT_EQ(fit.scopes[0].pinned_hole_bytes, 8_MiB);
  EXPECT_EQ(fit.scopes[1].allocated_bytes, 8_MiB);
  EXPECT_EQ(fit.scopes[1].pinned_hole_bytes, 12_MiB);
  EXPECT_EQ(fit.scopes[1].bytes_at_peak, 20_MiB);
}

// The refusal asks for names after the look at the heap, without the heap's lock. A scope from before the look has a
// name, and meanwhile the heap serves other requests.
TEST_F(ScopedHeapTest, ARefusalAsksForNamesWhenItHasLooked) {
  GetIn(forward_, 4_MiB);
  int asked = 0;
  ScopeId late = 0;
  const auto names = [&] {
    ++asked;
    late = table_.Find(0, "late");
    GetIn(late, 8_MiB);  // hangs if the caller holds the heap's lock
    return table_.scopes();
  };
  FitReport fit = allocator_->ExplainFit(20_MiB, 0, forward_, names);
  EXPECT_EQ(asked, 1);
  ASSERT_THAT(fit.scopes, SizeIs(1)) << "the heap was looked at before";
  EXPECT_EQ(fit.scopes[0].scope, "forward");
  fit = allocator_->ExplainFit(20_MiB, 0, forward_, names);
  ASSERT_THAT(fit.scopes, SizeIs(2));
  EXPECT_EQ(fit.scopes[0].scope, "late");
  EXPECT_EQ(fit.scopes[0].allocated_bytes, 8_MiB);
}

TEST_F(ScopedHeapTest, ARefusalAsksForNoNamesWhereThereAreNone) {
  Get(4_MiB);
  const FitReport fit = allocator_->ExplainFit(20_MiB, 0, 0, [] {
    ADD_FAILURE() << "copies a list for nothing";
    return std::vector<Scope>();
  });
  EXPECT_EQ(fit.scope, "");
}

TEST_F(ScopedHeapTest, WhatIsTooLargeToBeRoundedIsExplained) {
  GetIn(forward_, 4_MiB);
  for (const uint64_t bytes : {kMaxRequestBytes, ~uint64_t{0}}) {
    const FitReport fit = allocator_->ExplainFit(bytes, 0, backward_, [this] { return table_.scopes(); });
    EXPECT_EQ(fit.block_bytes, bytes);
    EXPECT_EQ(fit.segment_bytes, bytes);
    EXPECT_EQ(fit.pool_free_bytes, 16_MiB);
    EXPECT_EQ(fit.scope, "backward");
    ASSERT_THAT(fit.scopes, SizeIs(1));
    EXPECT_EQ(fit.scopes[0].allocated_bytes, 4_MiB);
  }
}

// A refusal counts under the heap's lock, a snapshot counts in a copy. The results agree.
TEST_F(ScopedHeapTest, ARefusalFindsWhatASnapshotShows) {
  std::mt19937 random(7);
  std::vector<ScopeId> scopes = {0, forward_, backward_};
  // Frames have several ids of one path, also in the same segment.
  for (uint32_t line = 0; line < 4; ++line) scopes.push_back(table_.Find(forward_, "step", "train.py", line));
  std::vector<Block*> blocks;
  for (int i = 0; i < 600; ++i) {
    const uint64_t bytes = random() % 2 == 0 ? 1 + random() % 1_MiB : 1_MiB + random() % 4_MiB;
    if (blocks.size() < 100 || random() % 2 == 0) {
      blocks.push_back(GetIn(scopes[random() % scopes.size()], bytes));
    } else {
      std::swap(blocks[random() % blocks.size()], blocks.back());
      allocator_->Free(blocks.back());
      blocks.pop_back();
    }
  }
  const std::vector<ScopeUse> reported =
      allocator_->ExplainFit(100_MiB, 0, 0, [this] { return table_.scopes(); }).scopes;
  const std::vector<ScopeUse> shown = LargestScopeUses(ScopeUses(Snapshot()));
  ASSERT_THAT(reported, SizeIs(3));
  // The reference counts directly in the snapshot.
  std::map<std::string, ScopeUse> counted;
  for (const SegmentSnapshot& segment : Snapshot().segments) {
    uint64_t holes = 0;
    std::set<std::string> pinning;
    for (const BlockSnapshot& block : segment.blocks) {
      if (block.state == BlockState::kFree) {
        holes += block.bytes;
        continue;
      }
      const std::string path = PathOf(table_, block.scope);
      pinning.insert(path);
      counted[path].allocated_bytes += block.bytes;
      ++counted[path].blocks;
    }
    for (const std::string& path : pinning) counted[path].pinned_hole_bytes += holes;
  }
  for (size_t i = 0; i < reported.size(); ++i) {
    EXPECT_EQ(reported[i].scope, shown[i].scope);
    for (const ScopeUse& use : {reported[i], shown[i]}) {
      EXPECT_EQ(use.allocated_bytes, counted[use.scope].allocated_bytes) << use.scope;
      EXPECT_EQ(use.blocks, counted[use.scope].blocks) << use.scope;
      EXPECT_EQ(use.pinned_hole_bytes, counted[use.scope].pinned_hole_bytes) << use.scope;
    }
    EXPECT_EQ(reported[i].bytes_at_peak, shown[i].bytes_at_peak) << reported[i].scope;
  }
}

TEST_F(ScopedHeapTest, EventsHaveTheScopeOfTheirBlock) {
  allocator_->SetRecording(100);
  Block* const block = GetIn(forward_, 4_MiB);
  allocator_->Free(block);
  EXPECT_FALSE(allocator_->Allocate(kCapacity + 1, 0, backward_).ok());
  size_t events = 0;
  for (const HistoryEvent& event : Snapshot().history) {
    switch (event.action) {
      case HistoryAction::kAllocate:
      case HistoryAction::kFreeRequested:
      case HistoryAction::kFreeCompleted:
        EXPECT_EQ(event.scope, forward_);
        ++events;
        break;
      case HistoryAction::kOutOfMemory:
        EXPECT_EQ(event.scope, backward_);
        ++events;
        break;
      default:
        EXPECT_EQ(event.scope, 0);
    }
  }
  EXPECT_EQ(events, 4u);
}

// The reference copies the bytes of all scopes at each new peak.
TEST_F(ScopedHeapTest, RandomHeapsAreCountedRight) {
  for (unsigned seed = 0; seed < 20; ++seed) {
    Configure("");
    std::mt19937 random(seed);
    std::vector<std::pair<Block*, ScopeId>> held;
    std::map<std::string, uint64_t> now;
    std::map<std::string, uint64_t> at_peak;
    uint64_t allocated = 0;
    uint64_t peak = 0;
    for (int i = 0; i < 400; ++i) {
      if (held.empty() || random() % 5 < 3) {
        const ScopeId scope = std::array<ScopeId, 3>{0, forward_, backward_}[random() % 3];
        Block* const block = GetIn(scope, 1 + random() % 3_MiB);
        held.emplace_back(block, scope);
        now[ScopePath(table_.scopes(), scope)] += block->bytes;
        allocated += block->bytes;
        if (allocated > peak) {
          peak = allocated;
          at_peak = now;
        }
      } else {
        std::swap(held[random() % held.size()], held.back());
        now[ScopePath(table_.scopes(), held.back().second)] -= held.back().first->bytes;
        allocated -= held.back().first->bytes;
        allocator_->Free(held.back().first);
        held.pop_back();
      }
    }
    std::map<std::string, ScopeUse> uses = Uses();
    for (const char* scope : {"", "forward", "backward"}) {
      EXPECT_EQ(uses[scope].allocated_bytes, now[scope]) << seed << " " << scope;
      EXPECT_EQ(uses[scope].bytes_at_peak, at_peak[scope]) << seed << " " << scope;
    }
  }
}

TEST_F(ScopedHeapTest, SnapshotsTravelInParts) {
  allocator_->SetRecording(1000);
  for (int i = 0; i < 200; ++i)
    GetIn(table_.Find(forward_, absl::StrCat("layer", i), i % 2 == 0 ? "" : "m.py", i), 512);
  const HeapSnapshot sent = Snapshot();
  for (const int items : {1, 7, 64, SnapshotParts::kItemsInPart}) {
    HeapSnapshot received;
    SnapshotParts parts(sent, items);
    while (const std::optional<v1::GetSnapshotResponse> part = parts.Next()) {
      ASSERT_EQ(AddSnapshotPart(*part, &received), absl::OkStatus());
    }
    ASSERT_THAT(received.scopes, SizeIs(sent.scopes.size()));
    for (size_t id = 0; id < sent.scopes.size(); ++id) {
      EXPECT_EQ(ScopePath(received.scopes, static_cast<ScopeId>(id)), ScopePath(sent.scopes, static_cast<ScopeId>(id)));
      EXPECT_EQ(received.scopes[id].file, sent.scopes[id].file);
      EXPECT_EQ(received.scopes[id].line, sent.scopes[id].line);
    }
    ASSERT_THAT(received.history, SizeIs(sent.history.size()));
    for (size_t i = 0; i < sent.history.size(); ++i) EXPECT_EQ(received.history[i].scope, sent.history[i].scope);
    const std::vector<ScopeUse> uses = ScopeUses(received);
    const std::vector<ScopeUse> expected = ScopeUses(sent);
    ASSERT_THAT(uses, SizeIs(expected.size()));
    for (size_t i = 0; i < uses.size(); ++i) {
      EXPECT_EQ(uses[i].scope, expected[i].scope);
      EXPECT_EQ(uses[i].allocated_bytes, expected[i].allocated_bytes);
      EXPECT_EQ(uses[i].bytes_at_peak, expected[i].bytes_at_peak);
    }
  }
}

// A client may send anything.
TEST(ScopePartsTest, WhatNoSnapshotHasIsRefused) {
  using Part = v1::GetSnapshotResponse;
  const auto fails = [](const Part& part, const char* why) {
    HeapSnapshot heap;
    const absl::Status status = AddSnapshotPart(part, &heap);
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), why)) << status;
  };
  Part part;
  part.add_scopes()->set_parent(1);
  fails(part, "scopes: parent 1 of scope 0");
  part.mutable_scopes(0)->set_parent(0);
  part.mutable_scopes(0)->mutable_scope()->set_name("x");
  fails(part, "scopes: scope 0 has a name");
  part.mutable_scopes(0)->clear_scope();
  part.add_scopes();
  fails(part, "scopes: scope 1 has no name");
  part.mutable_scopes(1)->mutable_scope()->set_name("n");
  part.mutable_scopes(1)->set_parent(1);
  fails(part, "scopes: parent 1 of scope 1");
  part.mutable_scopes(1)->set_parent(70'000);
  fails(part, "scopes: parent 70000");
  part.mutable_scopes(1)->set_parent(0);
  part.add_events()->set_action(Part::Event::ACTION_ALLOCATE);
  part.mutable_events(0)->set_scope(2);
  fails(part, "scope: 2; the snapshot has 2");
  part.mutable_events(0)->set_scope(65'537);
  fails(part, "scope: 65537");
  part.clear_events();
  Part::Segment* const segment = part.add_segments();
  segment->add_blocks()->set_state(Part::BLOCK_STATE_ALLOCATED);
  segment->mutable_blocks(0)->set_scope(9);
  fails(part, "scope: 9");
  part.clear_segments();
  while (part.scopes_size() <= static_cast<int>(ScopeTable::kMaxScopes)) {
    part.add_scopes()->mutable_scope()->set_name("n");
  }
  HeapSnapshot heap;
  part.mutable_scopes(1)->mutable_scope()->set_name("\x1b[2Jn");
  ASSERT_EQ(AddSnapshotPart(part, &heap), absl::OkStatus());
  EXPECT_EQ(heap.scopes[1].name, "[2Jn");
  EXPECT_TRUE(absl::IsInvalidArgument(AddSnapshotPart(part, &heap))) << "as many again";
  // The snapshot obeys the bounds of the table, on text and on depth.
  Part large = part;
  for (int i = 1; i < large.scopes_size(); ++i)
    large.mutable_scopes(i)->mutable_scope()->set_file(std::string(200, 'f'));
  fails(large, "scopes: more than 262144 bytes of names");
  Part deep = part;
  for (int i = 1; i < deep.scopes_size(); ++i) deep.mutable_scopes(i)->set_parent(static_cast<uint32_t>(i - 1));
  fails(deep, "scopes: more than 64 within one another");
}

}  // namespace
}  // namespace vrambroker
