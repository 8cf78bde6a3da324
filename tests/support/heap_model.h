// SPDX-License-Identifier: Apache-2.0
//
// HeapModel: a DirectHeap on a simulated device, and checks that must hold after every operation. The model is for
// random and fuzzed sequences: any operation is legal in any state.
#ifndef VRAMBROKER_TESTS_SUPPORT_HEAP_MODEL_H_
#define VRAMBROKER_TESTS_SUPPORT_HEAP_MODEL_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "allocator/replay/direct_heap.h"
#include "allocator/replay/simulated_device.h"
#include "tests/support/scripted_events.h"
#include "tests/support/simulated_source.h"

namespace vrambroker {

struct HeapConfig {
  AllocatorOptions options;
  uint64_t device_bytes = 1_GiB;
};

struct HeapOp {
  enum class Kind : uint8_t {
    kAllocate,      // allocates `a` bytes on stream `b`
    kTryAllocate,   // allocates from the cache only
    kFree,          // frees the held block that `a` selects
    kRecordStream,  // stream `b` uses the held block that `a` selects
    kFinish,        // stream `b` finishes `a` events
    kPoll,
    kEmptyCache,
    kSetLimit,     // sets the limit to `a` bytes
    kSetFraction,  // sets the fraction to `a` thousandths
    kDeviceLimit,  // the source has `a` bytes from now on
    kFail,         // events fail from now on, by the low four bits of `a`
    kResetPeaks,
    kResetTotals,
    kTrim,  // wants `a` bytes that are free for `b` ticks
    kTick,
  };
  static constexpr int kKinds = 15;
  static constexpr uint64_t kStreams = 4;  // operations take stream numbers modulo kStreams

  Kind kind = Kind::kPoll;
  uint64_t a = 0;
  uint64_t b = 0;
};

std::string ToString(const HeapOp& op);

class HeapModel {
 public:
  explicit HeapModel(const HeapConfig& config);

  // Returns an empty text, or the check that fails after the operation.
  std::string Do(const HeapOp& op);
  // Frees and gives back all memory, and checks that no byte is left. No operation may follow.
  std::string End();

  uint64_t ooms() const { return ooms_; }
  uint64_t deferred_frees() const { return deferred_frees_; }

 private:
  using Place = std::tuple<uint64_t, uint64_t>;  // segment, offset
  struct Held {
    uint64_t bytes = 0;
    Block* block = nullptr;
    Stream stream = 0;
    std::vector<Stream> users;  // has no repetition
  };
  struct Pending {
    uint64_t bytes = 0;
    std::vector<std::pair<Stream, uint64_t>> events;  // stream, and the number of the event to wait for
  };
  struct FreeSince {
    uint64_t op = 0;
    uint64_t tick = 0;
  };

  std::string Allocate(uint64_t requested, Stream stream, bool may_grow);
  std::string CheckNew(const Block& block, uint64_t requested, Stream stream, std::optional<Place> best);
  std::string CheckRefusal(uint64_t requested, Stream stream, const MemoryStats& before);
  void Free(uint64_t which);
  std::string Trim(uint64_t wanted_bytes, uint64_t min_idle_ticks);
  void NoteFreeSegments();
  void DropCompleted();
  std::string CheckState() const;
  std::optional<Place> BestFit(uint64_t block_bytes, Stream stream);

  const HeapConfig config_;
  SimulatedSource source_;
  SimulatedDevice streams_;  // serves only for events
  ScriptedEvents events_;
  DirectHeap allocator_;

  std::map<Place, Held> held_;
  std::map<Place, Pending> pending_;
  std::map<uint64_t, FreeSince> free_segments_;  // wholly free segments, key: id
  uint64_t ops_ = 0;
  uint64_t ticks_ = 0;
  uint64_t held_bytes_ = 0;
  uint64_t limit_;
  uint64_t ooms_ = 0;
  uint64_t deferred_frees_ = 0;
  bool events_failed_ = false;  // stays true: from then on the model cannot tell which frees are complete
};

}  // namespace vrambroker

#endif  // VRAMBROKER_TESTS_SUPPORT_HEAP_MODEL_H_
