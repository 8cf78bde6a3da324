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
// By default (Placement::kLeased) the process has a separate caching allocator over whole segments leased from the
// daemon: a request served from the cache makes no call. The daemon still owns, counts and limits every byte.
//
// The library never ends or blocks its process, whatever happens to the daemon: calls fail with a status.
//   UNAVAILABLE          no daemon, or the daemon went away. Held memory stays usable; a leasing client reconnects.
//   RESOURCE_EXHAUSTED   no memory: GetOutOfMemory() gives the reason. Held memory stays usable.
//   FAILED_PRECONDITION  the daemon has another version; or this process was made by fork()
//   ABORTED              an operator has ended the session
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
// (bytes). InvalidArgument: any other text, also a number from 1 to 1048575 without a unit, since the number may not
// mean bytes.
absl::StatusOr<Limit> ParseLimit(absl::string_view text);

// $VRAMBROKER_SOCKET_DIR, or /run/vrambroker.
std::string DefaultSocketDir();

// Where blocks are cut out of segments.
enum class Placement {
  kLeased,  // in this process: a request served from the cache makes no call to the daemon
  kRemote,  // in the daemon: every request is a call; for programs with rare allocations, and for tests
};

struct ClientOptions {
  std::string socket_dir = DefaultSocketDir();
  // The session's name in metrics, logs and tools; up to 63 letters, digits and . _ - / : @ characters. Other
  // characters become _, the rest is cut, and the log says so. Empty: $VRAMBROKER_NAME, else the command name of this
  // process.
  std::string name;
  std::optional<Limit> limit;  // none: $VRAMBROKER_LIMIT, else the limit of the daemon's policy
  // Memory of each device to be kept free for this session at all times, whether held or not. None:
  // $VRAMBROKER_GUARANTEE, else everything granted by the daemon's policy. Connect() fails when the policy allows less
  // (PERMISSION_DENIED) or other sessions hold too much of the memory (RESOURCE_EXHAUSTED).
  std::optional<Limit> guarantee;
  // The session's devices, each by the daemon's ordinal ("0") or by UUID ("GPU-..."). The session cannot use other
  // devices, and its guarantee applies to these devices only. Empty: the devices in $VRAMBROKER_DEVICES, separated by
  // commas; else the GPUs visible to this process (CUDA_VISIBLE_DEVICES), or all devices when the process sees all
  // GPUs, or none.
  std::vector<std::string> devices;
  // Time for a request without memory to wait for returns by other sessions, at most an hour. Zero: $VRAMBROKER_WAIT,
  // else the request fails as soon as the holders of reclaimable memory have been asked.
  absl::Duration wait = absl::ZeroDuration();
  // Settings of the session's allocator, in PyTorch's syntax: "max_split_size_mb:128,garbage_collection_threshold:0.8".
  // None: the first variable set among $PYTORCH_CUDA_ALLOC_CONF, $PYTORCH_HIP_ALLOC_CONF, $PYTORCH_ALLOC_CONF. Empty:
  // the daemon's settings. Connect() refuses unreadable text with INVALID_ARGUMENT; see also Client::warnings().
  std::optional<std::string> alloc_conf;
  Placement placement = Placement::kLeased;
  // kLeased: segments without blocks for longer than this time are returned to the daemon automatically.
  absl::Duration idle_decay = absl::InfiniteDuration();
  absl::Duration connect_timeout = absl::Seconds(5);  // infinite, or beyond every clock's range: no timeout
  absl::Duration call_timeout = absl::Seconds(30);
  // Called on a thread of the library when the session is lost; with kLeased, each time. Must not block: a thread
  // destroying the client waits for the call. Never called after the client is gone.
  std::function<void(const absl::Status&)> on_lost;
  // Receives a line, without line end, when the daemon is lost and when it is reached again, called like on_lost; and
  // in Connect(), when the session gets a name other than requested. None: the line is written to stderr.
  std::function<void(const std::string& line)> log;
};

// Why a request was refused; all sizes are bytes. The same fields as vrambroker.v1.OutOfMemory.
struct OutOfMemory {
  enum class Cause {
    kUnknown,
    kLimit,
    kCapacity,
    kFragmentation,  // without the holes between used blocks, the request would have fit
    kLargerThanDevice
  };
  struct Holder {
    std::string client;
    uint64_t reserved_bytes = 0;
    uint64_t allocated_bytes = 0;
  };
  // Unused, but unavailable memory of another session.
  struct IdleHolder {
    enum class Why {
      kUnknown,
      kWithinGuarantee,  // when returned, the bytes would stay kept for the session
      kInPartUsed,       // in segments with used blocks
      kDidNotAnswer,     // asked to trim, the session did not answer in time
      kDisconnected,     // no client to ask; the bytes return when the session's process ends
      kNotAsked,         // the session was not asked to trim
      kKept              // asked to trim, the session gave less
    };
    std::string client;
    uint64_t idle_bytes = 0;
    Why why = Why::kUnknown;
  };
  // A block of this session preventing the return of its segment.
  struct PinningBlock {
    uint64_t address = 0;  // a label, as in snapshots and `vramctl map`
    uint64_t block_bytes = 0;
    uint64_t held_seconds = 0;  // since its allocation
    std::string scope;          // MemoryScope of the allocation: "forward/layer3"; empty: none
  };
  // A segment of this session with free memory between used blocks: holes.
  struct PinnedSegment {
    uint64_t address = 0;  // a label
    uint64_t segment_bytes = 0;
    uint64_t hole_bytes = 0;
    uint64_t largest_hole_bytes = 0;
    uint64_t pinning_blocks = 0;             // COUNT
    std::vector<PinningBlock> longest_held;  // of the pinning blocks, at most 3
  };
  // Memory of a MemoryScope of this session, without nested scopes.
  struct ScopeUse {
    std::string scope;  // empty: outside of all scopes
    uint64_t allocated_bytes = 0;
    uint64_t bytes_at_peak = 0;      // at the peak of the session's allocated bytes on the device
    uint64_t blocks = 0;             // COUNT, in use
    uint64_t pinned_hole_bytes = 0;  // holes in segments pinned by the scope's blocks
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
  uint64_t guarantee_bytes = 0;           // of the session
  uint64_t inactive_split_bytes = 0;      // of the session: free, in segments with used blocks
  uint64_t device_kept_free_bytes = 0;    // part of device_available_bytes, kept for other sessions' guarantees
  uint64_t device_idle_bytes = 0;         // kept by the daemon for reuse, not leased
  uint64_t device_quarantined_bytes = 0;  // of disconnected or ended sessions, and of ended processes
  uint64_t idle_elsewhere_bytes = 0;      // unused memory of all other sessions
  std::vector<IdleHolder> idle_holders;   // of idle_elsewhere_bytes, most bytes first; several per session possible
  uint64_t waited_ms = 0;                 // milliseconds spent waiting for memory
  std::string explanation;                // the cause, with the deciding figures
  uint64_t block_bytes = 0;               // requested_bytes, rounded
  uint64_t room_bytes = 0;                // still reservable by the session
  uint64_t hole_bytes = 0;                // of the session: free memory between used blocks, not returned by trims
  uint64_t holes = 0;                     // COUNT; 0 when only the application knows its holes
  uint64_t hole_segments = 0;             // COUNT of segments with holes
  std::vector<PinnedSegment> pinned_segments;  // of hole_segments, at most 3, most bytes of holes first
  std::string scope;                           // of the request
  std::vector<ScopeUse> scopes;                // at most 3, largest held or pinned first; none without MemoryScope
  // The number of the refusal, counted since the daemon's start: `vramctl ooms --diagnose N`. 0: not on record.
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

// A program's current use of its whole segments on a device, for programs with a custom allocator. In bytes; the rest
// of the leased memory is freed, but still in use by a stream.
struct SegmentUse {
  uint64_t allocated_bytes = 0;       // in blocks handed out
  uint64_t requested_bytes = 0;       // part of allocated_bytes, as requested
  uint64_t inactive_split_bytes = 0;  // free, in segments with used blocks
  uint64_t idle_bytes = 0;            // in segments without blocks: returnable
  uint64_t allocated_bytes_peak = 0;  // maximum of allocated_bytes so far; 0: the maximum reported
};

// The daemon's request for the program's reclaimable memory; see Client::WaitForTrim().
struct TrimRequest {
  uint64_t number = 0;
  int device = -1;                             // ordinal; -1: any device
  uint64_t bytes = 0;                          // wanted; the largest number: all reclaimable memory
  absl::Duration time = absl::ZeroDuration();  // until the daemon gets an answer
};

namespace client_internal {
class Heap;
class SessionClient;
}  // namespace client_internal

// A block of device memory, returned by the destructor. Move-only. Threads may use different buffers concurrently; a
// single buffer is for one thread at a time. A buffer may outlive its Client: the session then ends after its last
// buffer.
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
  // Returns the block, without waiting for the daemon. Work on the block's own stream, and on streams named by
  // RecordStream(), may still be running; with kRemote, only on the block's own stream.
  ~Buffer() { Release(); }

  // The mapped address in this process: ordinary memory on the host device, a device pointer on cuda. nullptr when
  // empty.
  void* data() const { return data_; }
  uint64_t size() const { return size_; }                // as requested, bytes
  uint64_t block_bytes() const { return block_bytes_; }  // bytes taken, rounded
  int device() const { return device_; }                 // ordinal
  uint64_t segment_id() const;
  uint64_t offset_bytes() const;  // in the segment

  // Copy between ordinary memory and the buffer, on any device; done at the return. OUT_OF_RANGE outside of size().
  absl::Status Write(uint64_t offset, const void* from, uint64_t bytes);
  absl::Status Read(uint64_t offset, void* to, uint64_t bytes) const;

  // Declares that `stream` uses the buffer, too: returned memory is not reused before all work queued on `stream` at
  // the return is done (torch.Tensor.record_stream). Destroy `stream` only after the return; if a CUDA graph was being
  // captured on `stream` then, only after its work is done, since CUDA reuses the handle for new streams. With kRemote:
  // FAILED_PRECONDITION.
  absl::Status RecordStream(uint64_t stream);

  // Returns the block; with kRemote, waits for the daemon and reports the result. Without a daemon the memory is simply
  // no longer used: UNAVAILABLE. Does nothing on an empty buffer.
  absl::Status Reset();

 private:
  friend class client_internal::Heap;

  absl::Status CheckRange(uint64_t offset, uint64_t bytes) const;
  // Inline, because Take() runs several times on a buffer's way to its owner.
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
  uint64_t block_ = 0;                     // the heap's id of the block
  void* data_ = nullptr;
  uint64_t size_ = 0;
  uint64_t block_bytes_ = 0;
  int device_ = 0;
};

// Names the purpose of this thread's allocations, while the scope lives: the layers of a model, the phases of a step.
// Snapshots, `vramctl map`, the daemon's page and reports of refusals then show held memory by scope. Scopes nest:
// "layer3" within "forward" is "forward/layer3". Other threads are not affected. Applies to all clients of the process;
// costs a look-up at the beginning, and next to nothing per allocation.
//
//   vrambroker::MemoryScope scope("forward/layer3");
//
// At most 4094 different names are kept, 128 bytes per name, 256 KiB in total; later names are shown as one name. So a
// name should not contain a step number. Scopes nest at most 64 deep: a deeper scope changes nothing, and its
// allocations count for the 64th. Segments of LeaseSegment() are in no scope.
class MemoryScope {
 public:
  explicit MemoryScope(absl::string_view name);
  ~MemoryScope();
  MemoryScope(const MemoryScope&) = delete;
  MemoryScope& operator=(const MemoryScope&) = delete;

 private:
  const uint16_t outer_;
};

// A session with the daemon. Movable, not copyable. All methods are thread-safe. A child made by fork() can neither use
// the parent's Client nor Connect() (FAILED_PRECONDITION): gRPC does not survive a fork. Fork before the first
// Connect() that finds a daemon, or exec. The session ends with this process, even when such a child lives on.
class Client {
 public:
  static absl::StatusOr<Client> Connect(const ClientOptions& options = {});

  Client(Client&&) noexcept = default;
  Client& operator=(Client&&) noexcept = default;
  // Ends the session after all Buffers and pointers are returned: now, or soon after the last return. Afterwards the
  // daemon has everything back; the destructor waits 2 s for a silent daemon, and later a thread of the library tells
  // the daemon as soon as it answers.
  ~Client() = default;
  // For programs returning much memory before the end: from now on, calls returning memory (Free(), ReturnSegment(),
  // EmptyCache() and destructors of Buffers) wait at most 2 s for a silent daemon, then not again until the daemon has
  // answered. A thread of the library later tells the daemon the rest.
  void BeginEnd();

  // Allocates at least 1 byte. kLeased: from the cache; without a fit, from a segment of the daemon: a round trip, and
  // another to open the segment. kRemote: always a round trip. `stream` is the buffer's queue of GPU work, for example
  // a cudaStream_t's value: freed memory serves only its own stream, and returns to the daemon when the stream's work
  // is done. Call EmptyCache() before destroying a stream: afterwards the library can only wait for all devices, which
  // invalidates every capture of a CUDA graph.
  absl::StatusOr<Buffer> Allocate(uint64_t bytes, int device = 0, uint64_t stream = 0);

  // Like Allocate(), but returns a plain pointer for Free().
  absl::StatusOr<void*> Malloc(uint64_t bytes, int device = 0, uint64_t stream = 0);
  // INVALID_ARGUMENT, without effect, when `pointer` is not from Malloc() of this client, or was freed already. (For
  // finding mistakes only: while the segment of a freed block is being returned, the check is not reliable.)
  absl::Status Free(void* pointer);
  // Frees memory last used by `stream`, like RecordStream() and Free(). kRemote: waits for all work queued on `stream`.
  // FAILED_PRECONDITION, without effect, when waiting is impossible, as during a CUDA graph capture on `stream`.
  absl::Status Free(void* pointer, uint64_t stream);
  // Like Buffer::RecordStream().
  absl::Status RecordStream(void* pointer, uint64_t stream);

  // Leases a whole segment, for programs with a custom allocator; rounds `bytes` up to 2 MiB. Not cached: leasing and
  // returning are round trips to the daemon. kLeased only (FAILED_PRECONDITION).
  absl::StatusOr<void*> LeaseSegment(uint64_t bytes, int device = 0);
  // Returns a segment: afterwards no work on `stream` uses the segment, and the daemon has the segment back. All other
  // work on the segment must be done by then. During a CUDA graph capture on `stream`, the library keeps the segment,
  // and returns it on a library thread afterwards. INVALID_ARGUMENT as Free(). UNAVAILABLE: the daemon is gone, or gets
  // the segment when reachable and answering; in any case the memory is no longer yours.
  absl::Status ReturnSegment(void* pointer, uint64_t stream);
  // Like the overload with a stream, for all work on the GPU: waits for the whole device, like cudaFree(). The wait
  // invalidates every CUDA graph capture on the device, on any thread and in any mode: name the stream when there may
  // be captures.
  absl::Status ReturnSegment(void* pointer);

  // ---- For programs with a caching allocator of their own over whole segments; kLeased only ----

  // Like LeaseSegment(), but from free memory only: asks no session to return memory, does not wait, and does not count
  // a refusal (RESOURCE_EXHAUSTED). For programs that then free their cache, and ask again.
  absl::StatusOr<void*> TryLeaseSegment(uint64_t bytes, int device = 0);
  // Reports the program's current use of its segments. The daemon shows the figures, and asks for reclaimable memory
  // when other sessions need memory. Without a report, all leased memory counts as in use, as do later leases until the
  // next report.
  absl::Status ReportSegmentUse(const SegmentUse& use, int device = 0);
  // Sets whether the program answers the daemon's requests for reclaimable memory, by WaitForTrim() on a dedicated
  // thread. `on` false: makes WaitForTrim() return CANCELLED.
  absl::Status ServeTrims(bool on);
  // Waits for the daemon's request; DEADLINE_EXCEEDED after `timeout`. The program returns unused segments, if any
  // (ReturnSegment()), then calls EndTrim(). The daemon gets an answer as soon as the requested bytes are back, and in
  // any case after `TrimRequest::time`: it never waits longer for the program.
  absl::StatusOr<TrimRequest> WaitForTrim(absl::Duration timeout);
  // INVALID_ARGUMENT when no request had this number.
  absl::Status EndTrim(uint64_t number);

  // Like Buffer::Write() and Read(), for memory from Malloc() or LeaseSegment(): OUT_OF_RANGE outside the memory,
  // INVALID_ARGUMENT as Free().
  absl::Status Write(void* pointer, uint64_t offset, const void* from, uint64_t bytes);
  absl::Status Read(const void* pointer, uint64_t offset, void* to, uint64_t bytes) const;

  // Returns wholly free segments to the daemon; returns their bytes. Waits for streams still using freed blocks.
  absl::StatusOr<uint64_t> EmptyCache();

  absl::StatusOr<MemoryStats> GetMemoryStats(int device = 0);
  absl::Status ResetPeakStats(int device = 0);
  // Resets peaks, and restarts the totals (allocated, freed, num_...) at 0.
  absl::Status ResetStats(int device = 0);
  // Resets only the totals, like torch.cuda.reset_accumulated_memory_stats(). kLeased only (FAILED_PRECONDITION).
  absl::Status ResetTotals(int device = 0);
  // The table of torch.cuda.memory_summary(), also shown by `vramctl summary`. `abbreviated`: without the rows by pool.
  absl::StatusOr<std::string> MemorySummary(int device = 0, bool abbreviated = false);

  // Like torch.cuda.set_per_process_memory_fraction(): from now on this client reserves at most this fraction (0 to 1)
  // of the device's capacity, and never more than the session's limit; 1 removes the fraction. Held memory above the
  // fraction stays. The library refuses larger requests (RESOURCE_EXHAUSTED with this limit as kLimit) without telling
  // the daemon. INVALID_ARGUMENT: invalid fraction. kLeased only (FAILED_PRECONDITION).
  absl::Status SetMemoryFraction(double fraction, int device = 0);

  // ---- Recordings ----

  // From now on each device's heap keeps its last `max_events` events for snapshots, besides events kept so far; about
  // 40 bytes per event. 0 restores the daemon's configuration (record_events). kLeased: events are in this process,
  // without need for the daemon. kRemote: events are in the daemon; RESOURCE_EXHAUSTED when this user's remote sessions
  // already record the daemon's maximum. INVALID_ARGUMENT above kMaxRecordedEvents. Times are exact when `max_events`
  // exceeds record_events. Segments of LeaseSegment() are not events.
  absl::Status SetRecording(size_t max_events);
  static constexpr size_t kMaxRecordedEvents = 1'000'000;
  // Writes all heaps with recorded events as a file in PyTorch's snapshot layout: a pickle, for `vramctl replay` and
  // pytorch.org/memory_viz, or JSON when `path` ends in .json. Replaces the file atomically: a reader sees the old file
  // or the whole new file. Errors name the file, and leave the old file. kLeased: works even after the daemon has gone.
  absl::Status DumpSnapshot(const std::string& path);
  // Like DumpSnapshot(), as JSON text; without history, only segments and blocks.
  absl::StatusOr<std::string> SnapshotJson(bool with_history = true);

  uint64_t session_id() const;  // of the current session
  std::string name() const;     // made unique by the daemon
  const std::vector<DeviceInfo>& devices() const;
  // The current limit on `device`, bytes: the session's limit, changeable by an operator at any time, or
  // SetMemoryFraction()'s when lower. 0 for an unknown device.
  uint64_t limit_bytes(int device = 0) const;

  // Warnings from Connect(): a sentence for each allocator setting without effect here.
  const std::vector<std::string>& warnings() const;

  // OK while the session lives; else the reason for its end, known within milliseconds of the daemon's end. kLeased: OK
  // again after reaching the daemon, or a new daemon; memory from an old daemon stays usable until freed.
  absl::Status status() const;

  // Calls to the daemon so far: requests over the session's stream and separate calls; for benchmarks.
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
