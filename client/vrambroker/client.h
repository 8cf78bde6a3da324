// SPDX-License-Identifier: Apache-2.0
//
// The C++ client library: memory from vrambrokerd, mapped in this process.
//
//   absl::StatusOr<vrambroker::Client> client = vrambroker::Client::Connect({.name = "trainer"});
//   if (!client.ok()) ...
//   absl::StatusOr<vrambroker::Buffer> buffer = client->Allocate(24 << 20);
//   if (!buffer.ok()) {
//     if (auto oom = vrambroker::GetOutOfMemory(buffer.status())) ...   // cause, limit, reserved, ...
//   }
//   memset(buffer->data(), 0, buffer->size());                         // host device; on cuda a device pointer
//
// By default (Placement::kLeased) the process has a caching allocator of its own, over whole segments leased from the
// daemon: a request that the cache can serve makes no call. The daemon still owns, counts and limits every byte.
//
// Nothing here ends or blocks the process it lives in, whatever happens to the daemon: calls fail with a status.
//   UNAVAILABLE          no daemon, or it went away. What is held stays usable; a leasing client reconnects by itself.
//   RESOURCE_EXHAUSTED   no memory: GetOutOfMemory() says why. What is held stays usable.
//   FAILED_PRECONDITION  the daemon is of another version; or this process was made by fork()
//   ABORTED              the session was ended by an operator
//   PERMISSION_DENIED    the sockets belong to another user
//   DEADLINE_EXCEEDED    the daemon did not answer in time
#ifndef VRAMBROKER_CLIENT_H_
#define VRAMBROKER_CLIENT_H_

#if __cplusplus < 201703L
#error "vrambroker/client.h needs C++17 or newer (-std=c++17); vrambroker/vrambroker.h, the C library, works with any"
#endif

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "allocator/heap/memory_stats.h"

namespace vrambroker {

// An upper bound on reserved memory: bytes, or a fraction (0 to 1) of each device's capacity.
using Limit = std::variant<uint64_t, double>;

// Reads a share, "0.5" (with a decimal point) or "40%", or a size, "512MiB", "8G" (GiB), "24GB" (10^9) or "536870912"
// (bytes). InvalidArgument: anything else, also a number from 1 to 1048575 without a unit, which may be meant for
// something else than bytes.
absl::StatusOr<Limit> ParseLimit(absl::string_view text);

// $VRAMBROKER_SOCKET_DIR, or /run/vrambroker.
std::string DefaultSocketDir();

// Where blocks are cut out of segments.
enum class Placement {
  kLeased,  // in this process: a request that finds a cached block costs no call to the daemon
  kRemote,  // in the daemon: every request is a call; for programs that allocate rarely, and for tests
};

struct ClientOptions {
  std::string socket_dir = DefaultSocketDir();
  // What the session is called in metrics, logs and tools; up to 63 letters, digits and . _ - / : @ characters. Others
  // become _, the rest is cut, and the log says so. Empty: $VRAMBROKER_NAME, else the command name of this process.
  std::string name;
  std::optional<Limit> limit;  // none: $VRAMBROKER_LIMIT, else what the daemon's policy allows
  // What of each device is to be kept free for this session at all times, whether it holds it or not. None:
  // $VRAMBROKER_GUARANTEE, else all that the daemon's policy grants. Connect() fails when the policy allows less
  // (PERMISSION_DENIED) or others hold too much of it (RESOURCE_EXHAUSTED).
  std::optional<Limit> guarantee;
  // The daemon's devices that the session uses, each by its ordinal ("0") or its UUID ("GPU-..."). It has nothing of
  // the others, and its guarantee is taken on these alone. Empty: those of $VRAMBROKER_DEVICES, which has them between
  // commas; else the GPUs that this process sees (CUDA_VISIBLE_DEVICES), or all devices if it sees all of them, or
  // none.
  std::vector<std::string> devices;
  // How long a request for which there is no memory waits for other sessions to give some back, at most an hour. Zero:
  // $VRAMBROKER_WAIT, else it fails as soon as those that hold reclaimable memory were asked for it.
  absl::Duration wait = absl::ZeroDuration();
  // How the session's allocator works, in PyTorch's syntax: "max_split_size_mb:128,garbage_collection_threshold:0.8".
  // None: the first that is set of $PYTORCH_CUDA_ALLOC_CONF, $PYTORCH_HIP_ALLOC_CONF, $PYTORCH_ALLOC_CONF. Empty: the
  // daemon's settings. Connect() refuses text it cannot read with INVALID_ARGUMENT; see also Client::warnings().
  std::optional<std::string> alloc_conf;
  Placement placement = Placement::kLeased;
  // kLeased: segments that hold no block for longer than this go back to the daemon by themselves.
  absl::Duration idle_decay = absl::InfiniteDuration();
  absl::Duration connect_timeout = absl::Seconds(5);  // infinite, or more than any clock can count: for ever
  absl::Duration call_timeout = absl::Seconds(30);
  // Called on a thread of the library when the session is lost; with kLeased, each time. Must not block: a thread that
  // destroys the client waits for it. Not called once the client is gone.
  std::function<void(const absl::Status&)> on_lost;
  // Gets a line, without its end, when the daemon is lost, and when it is reached again, called as on_lost; and in
  // Connect(), when the session gets another name than the one asked for. None: the line is written to stderr.
  std::function<void(const std::string& line)> log;
};

// Why a request was refused; all sizes are bytes. The same fields as vrambroker.v1.OutOfMemory.
struct OutOfMemory {
  enum class Cause {
    kUnknown,
    kLimit,
    kCapacity,
    kFragmentation,  // without the holes between its blocks the session would have had the memory
    kLargerThanDevice
  };
  struct Holder {
    std::string client;
    uint64_t reserved_bytes = 0;
    uint64_t allocated_bytes = 0;
  };
  // Unused memory of another session that was not to be had.
  struct IdleHolder {
    enum class Why {
      kUnknown,
      kWithinGuarantee,  // given back, they would stay kept for it
      kInPartUsed,       // in segments that also hold used blocks
      kDidNotAnswer,     // it was asked to trim, and did not answer in time
      kDisconnected,     // there is nobody to ask; they come back when its process goes
      kNotAsked,         // nobody asked it to trim
      kKept              // it was asked to trim, and gave less
    };
    std::string client;
    uint64_t idle_bytes = 0;
    Why why = Why::kUnknown;
  };
  // A block of this session that keeps its segment from being given back.
  struct PinningBlock {
    uint64_t address = 0;  // a label, as in snapshots and `vramctl map`
    uint64_t block_bytes = 0;
    uint64_t held_seconds = 0;  // since it was handed out
    std::string scope;          // MemoryScope in which it was allocated: "forward/layer3"; empty: in none
  };
  // A segment of this session that holds blocks in use and free memory between them: holes.
  struct PinnedSegment {
    uint64_t address = 0;  // a label
    uint64_t segment_bytes = 0;
    uint64_t hole_bytes = 0;
    uint64_t largest_hole_bytes = 0;
    uint64_t pinning_blocks = 0;             // COUNT
    std::vector<PinningBlock> longest_held;  // of these, at most 3
  };
  // What a MemoryScope of this session has, without the scopes within it.
  struct ScopeUse {
    std::string scope;  // empty: outside of any
    uint64_t allocated_bytes = 0;
    uint64_t bytes_at_peak = 0;      // when the session's allocated bytes on the device were at their peak
    uint64_t blocks = 0;             // COUNT, in use
    uint64_t pinned_hole_bytes = 0;  // holes of the segments that its blocks keep from being given back
  };
  Cause cause = Cause::kUnknown;
  int device = 0;
  uint64_t requested_bytes = 0;
  uint64_t segment_bytes = 0;
  uint64_t limit_bytes = 0;
  uint64_t reserved_bytes = 0;
  uint64_t allocated_bytes = 0;
  uint64_t idle_bytes = 0;
  uint64_t largest_free_block_bytes = 0;
  uint64_t device_capacity_bytes = 0;
  uint64_t device_available_bytes = 0;
  std::vector<Holder> largest_holders;
  std::string advice;
  uint64_t guarantee_bytes = 0;                // of the session
  uint64_t inactive_split_bytes = 0;           // of the session: free, in segments that also hold used blocks
  uint64_t device_kept_free_bytes = 0;         // of device_available_bytes: kept for other sessions' guarantees
  uint64_t device_idle_bytes = 0;              // held by the daemon for reuse, leased to nobody
  uint64_t device_quarantined_bytes = 0;       // of sessions that disconnected or were ended, and of ended processes
  uint64_t idle_elsewhere_bytes = 0;           // unused memory of all other sessions
  std::vector<IdleHolder> idle_holders;        // of these, most bytes first; a session may have several
  uint64_t waited_ms = 0;                      // milliseconds that the request waited for memory
  std::string explanation;                     // the cause, with the figures that decide it
  uint64_t block_bytes = 0;                    // requested_bytes, rounded
  uint64_t room_bytes = 0;                     // that the session could still reserve
  uint64_t hole_bytes = 0;                     // of the session: free memory between used blocks, which no trim returns
  uint64_t holes = 0;                          // COUNT; 0 where only the application knows its holes
  uint64_t hole_segments = 0;                  // COUNT of segments that have any
  std::vector<PinnedSegment> pinned_segments;  // of these, at most 3, most bytes of holes first
  std::string scope;                           // of the request
  std::vector<ScopeUse> scopes;                // at most 3, those that hold or pin most first; none without MemoryScope
  // The number of the refusal, from 1 since the daemon started: `vramctl ooms --diagnose N`. 0: it is not on record.
  uint64_t refusal = 0;
};

const char* OutOfMemoryCauseName(OutOfMemory::Cause cause);  // "LIMIT", "CAPACITY", ...
const char* IdleWhyName(OutOfMemory::IdleHolder::Why why);   // "WITHIN_GUARANTEE", "IN_PART_USED", ...

// The typed detail of a refusal; nullopt for every other status.
std::optional<OutOfMemory> GetOutOfMemory(const absl::Status& status);

struct DeviceInfo {
  int ordinal = 0;
  std::string uuid;
  std::string name;
  std::string kind;  // "host" or "cuda"
  uint64_t total_bytes = 0;
  uint64_t capacity_bytes = 0;
};

// What a program with an allocator of its own makes of its whole segments on one device. In bytes; the rest of what it
// has leased is freed, but still in use by a stream.
struct SegmentUse {
  uint64_t allocated_bytes = 0;       // in blocks handed out
  uint64_t requested_bytes = 0;       // of these, as asked for
  uint64_t inactive_split_bytes = 0;  // free, in segments that also hold used blocks
  uint64_t idle_bytes = 0;            // of segments that hold no block: what it could give back
  uint64_t allocated_bytes_peak = 0;  // the most of allocated_bytes so far; 0: the most that was reported
};

// The daemon asks for memory that is reclaimable in the program; see Client::WaitForTrim().
struct TrimRequest {
  uint64_t number = 0;
  int device = -1;                             // ordinal; -1: of any
  uint64_t bytes = 0;                          // wanted; the largest number: all that is reclaimable
  absl::Duration time = absl::ZeroDuration();  // until the daemon gets its answer
};

namespace client_internal {
class Heap;
class SessionClient;
}  // namespace client_internal

// A block of device memory, given back when it is destroyed. Move-only. Several threads may use different buffers;
// one buffer is for one thread at a time. It may outlive its Client: the session then ends after its last buffer.
class Buffer {
 public:
  Buffer() = default;
  Buffer(Buffer&& other) noexcept { Take(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    if (this == &other) return *this;
    Release();
    Take(other);
    return *this;
  }
  // Gives the block back, without waiting for the daemon. Work on its own stream, and on those that RecordStream()
  // named, may still be under way; with kRemote, on its own stream only.
  ~Buffer() { Release(); }

  // Where it is mapped in this process: ordinary memory on the host device, a device pointer on cuda.
  // nullptr when empty.
  void* data() const { return data_; }
  uint64_t size() const { return size_; }                // as asked for, bytes
  uint64_t block_bytes() const { return block_bytes_; }  // what it takes, rounded
  int device() const { return device_; }                 // ordinal
  uint64_t segment_id() const;
  uint64_t offset_bytes() const;  // in the segment

  // Copies between ordinary memory and the buffer, on any device; done when it returns. OUT_OF_RANGE outside
  // of size().
  absl::Status Write(uint64_t offset, const void* from, uint64_t bytes);
  absl::Status Read(uint64_t offset, void* to, uint64_t bytes) const;

  // `stream` uses the buffer, too: after it is given back, its memory is not reused before the work that was queued on
  // `stream` until then is done (torch.Tensor.record_stream). Destroy `stream` after that only; if a CUDA graph was
  // captured on it then, when its work is done, since CUDA gives its handle to new streams. With kRemote:
  // FAILED_PRECONDITION.
  absl::Status RecordStream(uint64_t stream);

  // Gives the block back; with kRemote, waits for the daemon and says whether it took it. When the daemon is gone the
  // memory is simply no longer used: UNAVAILABLE. Does nothing on an empty buffer.
  absl::Status Reset();

 private:
  friend class client_internal::Heap;

  absl::Status CheckRange(uint64_t offset, uint64_t bytes) const;
  // Inline, because it happens several times on the way of a buffer to its owner.
  void Take(Buffer& other) {
    heap_ = std::exchange(other.heap_, nullptr);
    block_ = std::exchange(other.block_, 0);
    data_ = std::exchange(other.data_, nullptr);
    size_ = std::exchange(other.size_, 0);
    block_bytes_ = std::exchange(other.block_bytes_, 0);
    device_ = std::exchange(other.device_, 0);
  }
  void Release() {
    if (heap_ != nullptr) GiveBack();
    heap_ = nullptr;
  }
  void GiveBack();

  client_internal::Heap* heap_ = nullptr;  // lives until its last block is freed
  uint64_t block_ = 0;                     // what the heap calls the block
  void* data_ = nullptr;
  uint64_t size_ = 0;
  uint64_t block_bytes_ = 0;
  int device_ = 0;
};

// Names what this thread allocates for, as long as it lives: the layers of a model, the phases of a step. Snapshots,
// `vramctl map`, the daemon's page and reports of refusals then say what holds the memory, by scope. They nest:
// "layer3" within "forward" is "forward/layer3". Other threads are not in it. Of all clients of the process; costs a
// look-up where it begins, and allocations next to nothing.
//
//   vrambroker::MemoryScope scope("forward/layer3");
//
// At most 4094 different names are kept, of 128 bytes each, 256 KiB in all; what comes later is shown as one. So a name
// should not have the number of a step in it. Scopes nest at most 64 deep: a deeper one changes nothing, and what is
// allocated in it counts for the 64th. Segments of LeaseSegment() are in no scope.
class MemoryScope {
 public:
  explicit MemoryScope(absl::string_view name);
  ~MemoryScope();
  MemoryScope(const MemoryScope&) = delete;
  MemoryScope& operator=(const MemoryScope&) = delete;

 private:
  const uint16_t outer_;
};

// A session with the daemon. Movable, not copyable. All methods are safe to call from any thread.
// A child made by fork() can neither use it nor Connect() itself (FAILED_PRECONDITION): gRPC does not survive a fork.
// Fork before the first Connect() that finds a daemon, or exec. The session ends with this process, also when such a
// child lives on.
class Client {
 public:
  static absl::StatusOr<Client> Connect(const ClientOptions& options = {});

  Client(Client&&) noexcept = default;
  Client& operator=(Client&&) noexcept = default;
  // Ends the session, once its last Buffer and pointer are given back, too; while some are out, soon after that. When
  // it returns, the daemon has everything back; one that does not answer is waited for for 2 s, and then told by a
  // thread of the library as soon as it answers.
  ~Client() = default;
  // For programs that give many things back before that: from now on, what gives something back (Free(),
  // ReturnSegment(), EmptyCache() and the ends of Buffers) waits for 2 s at most for a daemon that does not answer, and
  // not again before it has answered. What it could not be told, a thread of the library tells it later.
  void BeginEnd();

  // At least 1 byte. kLeased: from the cache; when nothing there fits, a segment from the daemon: a round trip, and one
  // more to open it. kRemote: always a round trip. `stream` is the queue of GPU work that the buffer is for, for
  // example a cudaStream_t's value: memory that was freed serves its own stream only, and goes back to the daemon when
  // the work on that is done. Call EmptyCache() before you destroy a stream: once it is gone, the library can only wait
  // for all devices, which makes every capture of a CUDA graph invalid.
  absl::StatusOr<Buffer> Allocate(uint64_t bytes, int device = 0, uint64_t stream = 0);

  // The same as a plain pointer, to be given back by Free().
  absl::StatusOr<void*> Malloc(uint64_t bytes, int device = 0, uint64_t stream = 0);
  // INVALID_ARGUMENT when `pointer` is not from Malloc() of this client, or was freed: then nothing happens. (That is
  // for finding mistakes: while the segment of a freed block is being given back it cannot be told.)
  absl::Status Free(void* pointer);
  // Frees memory that `stream` used last, as RecordStream() and Free() do. kRemote: waits for what was queued on
  // `stream` until then. FAILED_PRECONDITION when it cannot, as while a CUDA graph is captured on `stream`: then
  // nothing happens.
  absl::Status Free(void* pointer, uint64_t stream);
  // As Buffer::RecordStream().
  absl::Status RecordStream(void* pointer, uint64_t stream);

  // A whole segment, for programs with an allocator of their own; `bytes` are rounded up to 2 MiB. Not cached: a round
  // trip to the daemon, both ways. kLeased only (FAILED_PRECONDITION).
  absl::StatusOr<void*> LeaseSegment(uint64_t bytes, int device = 0);
  // When it returns, no work on `stream` uses the segment any more, and the daemon has it back. All other work that
  // used it is to be done by then. While a CUDA graph is captured on `stream`, it is kept, and a thread of the library
  // gives it back afterwards. INVALID_ARGUMENT as Free(). UNAVAILABLE: the daemon is gone, or gets it when it can be
  // reached and answers; the memory is not yours in any case.
  absl::Status ReturnSegment(void* pointer, uint64_t stream);
  // The same for all work on the GPU: waits for the whole device, as cudaFree() does. That makes every capture of a
  // CUDA graph on the device invalid, on whatever thread and in whatever mode: where there are captures, name the
  // stream.
  absl::Status ReturnSegment(void* pointer);

  // ---- For programs with an allocator of their own over whole segments, which has a cache; kLeased only ----

  // As LeaseSegment(), of what is free now: nobody is asked to give memory back, nothing is waited for, and a refusal
  // (RESOURCE_EXHAUSTED) is not counted as one. For programs that then free what they cache, and ask again.
  absl::StatusOr<void*> TryLeaseSegment(uint64_t bytes, int device = 0);
  // What the program makes of the segments that it holds, at this moment. The daemon shows it, and asks for what is
  // reclaimable when others need it. Without it, all that is leased counts as in use, as what is leased from now on
  // does until the next report.
  absl::Status ReportSegmentUse(const SegmentUse& use, int device = 0);
  // Whether the program answers when the daemon asks for its reclaimable memory: by WaitForTrim(), on a thread of its
  // own. With `on` false, WaitForTrim() returns CANCELLED.
  absl::Status ServeTrims(bool on);
  // Waits until the daemon asks for memory; DEADLINE_EXCEEDED after `timeout`. The program returns segments that it
  // does not use (ReturnSegment()), and calls EndTrim() then, also when there are none. The daemon hears as soon as it
  // has what it asked for, and after `TrimRequest::time` in any case: it never waits longer for the program.
  absl::StatusOr<TrimRequest> WaitForTrim(absl::Duration timeout);
  // INVALID_ARGUMENT when no request had this number.
  absl::Status EndTrim(uint64_t number);

  // As Buffer::Write() and Read(), of what Malloc() or LeaseSegment() gave: OUT_OF_RANGE outside of it,
  // INVALID_ARGUMENT as Free().
  absl::Status Write(void* pointer, uint64_t offset, const void* from, uint64_t bytes);
  absl::Status Read(const void* pointer, uint64_t offset, void* to, uint64_t bytes) const;

  // Gives wholly free segments back to the daemon; returns their bytes. Waits for streams that still use freed blocks.
  absl::StatusOr<uint64_t> EmptyCache();

  absl::StatusOr<MemoryStats> GetMemoryStats(int device = 0);
  absl::Status ResetPeakStats(int device = 0);
  // The same, and the totals (allocated, freed, num_...) start again at 0.
  absl::Status ResetStats(int device = 0);
  // The totals alone, as torch.cuda.reset_accumulated_memory_stats(). kLeased only (FAILED_PRECONDITION).
  absl::Status ResetTotals(int device = 0);
  // The table of torch.cuda.memory_summary(), also of `vramctl summary`. `abbreviated`: without its rows by pool.
  absl::StatusOr<std::string> MemorySummary(int device = 0, bool abbreviated = false);

  // As torch.cuda.set_per_process_memory_fraction(): from now on this client reserves at most this fraction (0 to 1) of
  // the device's capacity, and never more than the session's limit; 1 ends that. What is held beyond it stays. A
  // request that does not fit is refused here (RESOURCE_EXHAUSTED with a kLimit that is this one), and the daemon does
  // not hear of it. INVALID_ARGUMENT: no such fraction. kLeased only (FAILED_PRECONDITION).
  absl::Status SetMemoryFraction(double fraction, int device = 0);

  // ---- Recordings ----

  // From now on each device's heap keeps its last `max_events` events for snapshots, beside those that it has kept so
  // far, about 40 bytes each. 0 ends that: it keeps again what the daemon's configuration says (record_events).
  // kLeased: they are in this process, and the daemon is not needed. kRemote: they are in the daemon;
  // RESOURCE_EXHAUSTED when the remote sessions of this user record as many events as it allows. INVALID_ARGUMENT above
  // kMaxRecordedEvents. Their times are exact where that is more than record_events. Segments of LeaseSegment() are no
  // events.
  absl::Status SetRecording(size_t max_events);
  static constexpr size_t kMaxRecordedEvents = 1'000'000;
  // Writes all heaps with their recorded events as a file in PyTorch's snapshot layout: a pickle, for `vramctl replay`
  // and pytorch.org/memory_viz, or JSON when `path` ends in .json. Replaces the file in one step: a reader sees the old
  // file or the whole new one. Errors name the file, and the old one stays. kLeased: also after the daemon has gone.
  absl::Status DumpSnapshot(const std::string& path);
  // The same as a JSON text; without history, of the segments and blocks alone.
  absl::StatusOr<std::string> SnapshotJson(bool with_history = true);

  uint64_t session_id() const;  // of the current session
  std::string name() const;     // as the daemon made it unique
  const std::vector<DeviceInfo>& devices() const;
  // The limit on `device` now, bytes: the session's, which an operator may change at any time, or SetMemoryFraction()'s
  // where that is lower. 0 for an unknown device.
  uint64_t limit_bytes(int device = 0) const;

  // What Connect() found worth saying: a sentence for each setting of the allocator that has no effect here.
  const std::vector<std::string>& warnings() const;

  // OK while the session lives; else why it does not. Known within milliseconds of the daemon's end. kLeased: OK again
  // when the daemon, or a new one, has been reached; memory of an old one stays usable until it is freed.
  absl::Status status() const;

  // Calls made to the daemon so far: requests of the session's stream and calls of their own; for benchmarks.
  uint64_t calls() const;

 private:
  struct EndSession {
    void operator()(client_internal::SessionClient* session) const;
  };
  explicit Client(std::unique_ptr<client_internal::SessionClient, EndSession> session) : session_(std::move(session)) {}

  std::unique_ptr<client_internal::SessionClient, EndSession> session_;
};

}  // namespace vrambroker

#endif  // VRAMBROKER_CLIENT_H_
