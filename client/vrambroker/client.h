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
// Nothing here ends or blocks the process it lives in, whatever happens to the daemon: calls fail with a status.
//   UNAVAILABLE          no daemon, or it went away; connect again. What is held stays usable.
//   RESOURCE_EXHAUSTED   no memory: GetOutOfMemory() says why. What is held stays usable.
//   FAILED_PRECONDITION  the daemon is of another version; or this process was made by fork()
//   ABORTED              the session was ended by an operator
//   PERMISSION_DENIED    the sockets belong to another user
//   DEADLINE_EXCEEDED    the daemon did not answer in time
#ifndef VRAMBROKER_CLIENT_H_
#define VRAMBROKER_CLIENT_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "allocator/memory_stats.h"

namespace vrambroker {

// An upper bound on reserved memory: bytes, or a fraction (0 to 1) of each device's capacity.
using Limit = std::variant<uint64_t, double>;

// Reads "0.5" (a fraction: with a decimal point), "512MiB" or "536870912" (bytes).
absl::StatusOr<Limit> ParseLimit(absl::string_view text);

// $VRAMBROKER_SOCKET_DIR, or /run/vrambroker.
std::string DefaultSocketDir();

struct ClientOptions {
  std::string socket_dir = DefaultSocketDir();
  // What the session is called in metrics, logs and tools; up to 63 letters, digits and . _ - / : @ characters.
  // Empty: the command name of this process.
  std::string name;
  std::optional<Limit> limit;  // none: what the daemon's policy allows
  // How the session's allocator works, in PyTorch's syntax: "max_split_size_mb:128,garbage_collection_threshold:0.8".
  // None: $PYTORCH_ALLOC_CONF, or else $PYTORCH_CUDA_ALLOC_CONF, where set and not empty. Empty: the daemon's settings.
  // Connect() refuses what it does not understand with INVALID_ARGUMENT; see also Client::warnings().
  std::optional<std::string> alloc_conf;
  absl::Duration connect_timeout = absl::Seconds(5);
  absl::Duration call_timeout = absl::Seconds(30);
  // Called once, on a thread of the library, when the session is lost. Must not block or destroy the client.
  std::function<void(const absl::Status&)> on_lost;
};

// Why a request was refused; all sizes are bytes. The same fields as vrambroker.v1.OutOfMemory.
struct OutOfMemory {
  enum class Cause { kUnknown, kLimit, kCapacity, kFragmentation, kLargerThanDevice };
  struct Holder {
    std::string client;
    uint64_t reserved_bytes = 0;
    uint64_t allocated_bytes = 0;
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
};

const char* OutOfMemoryCauseName(OutOfMemory::Cause cause);  // "LIMIT", "CAPACITY", ...

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

class Device;
namespace client_internal {
class SessionClient;
}

// A block of device memory, given back when it is destroyed. Move-only. Several threads may use different buffers;
// one buffer is for one thread at a time. It keeps its session alive, so it may outlive its Client.
class Buffer {
 public:
  Buffer() = default;
  Buffer(Buffer&& other) noexcept { *this = std::move(other); }
  Buffer& operator=(Buffer&& other) noexcept;
  // Gives the block back, without waiting for the daemon. REQUIRES: the GPU has finished with it on every stream but
  // the one that it was allocated for.
  ~Buffer() { Release(); }

  // Where it is mapped in this process: ordinary memory on the host device, a device pointer on cuda.
  // nullptr when empty.
  void* data() const { return data_; }
  uint64_t size() const { return size_; }                // as asked for, bytes
  uint64_t block_bytes() const { return block_bytes_; }  // what it takes, rounded
  int device() const { return device_; }                 // ordinal
  uint64_t segment_id() const { return segment_id_; }
  uint64_t offset_bytes() const { return offset_bytes_; }  // in the segment

  // Copies between ordinary memory and the buffer, on any device; done when it returns. OUT_OF_RANGE outside
  // of size().
  absl::Status Write(uint64_t offset, const void* from, uint64_t bytes);
  absl::Status Read(uint64_t offset, void* to, uint64_t bytes) const;

  // Gives the block back, waits for the daemon, and says whether it took it. When the daemon is gone the memory is
  // simply no longer used: UNAVAILABLE. Does nothing on an empty buffer.
  absl::Status Reset();

 private:
  friend class client_internal::SessionClient;

  absl::Status CheckRange(uint64_t offset, uint64_t bytes) const;
  void Release();

  std::shared_ptr<client_internal::SessionClient> session_;
  Device* opener_ = nullptr;  // the session's
  void* data_ = nullptr;
  uint64_t size_ = 0;
  uint64_t block_bytes_ = 0;
  uint64_t block_id_ = 0;
  uint64_t segment_id_ = 0;
  uint64_t offset_bytes_ = 0;
  int device_ = 0;
};

// A session with the daemon. Movable, not copyable. All methods are safe to call from any thread.
// A child made by fork() can neither use it nor Connect() itself (FAILED_PRECONDITION): gRPC does not survive a fork.
// Fork before the first Connect(), or exec.
class Client {
 public:
  static absl::StatusOr<Client> Connect(const ClientOptions& options = {});

  Client(Client&&) noexcept = default;
  Client& operator=(Client&&) noexcept = default;
  // Ends the session, once its last Buffer is gone too.
  ~Client() = default;

  // At least 1 byte. One round trip to the daemon, over the session's stream; opening a segment for the first time
  // costs one more. `stream` is the queue of GPU work that the buffer is for, for example a cudaStream_t's value:
  // memory that was freed serves its own stream only.
  absl::StatusOr<Buffer> Allocate(uint64_t bytes, int device = 0, uint64_t stream = 0);

  // Gives wholly free segments back to the daemon; returns their bytes.
  absl::StatusOr<uint64_t> EmptyCache();

  absl::StatusOr<MemoryStats> GetMemoryStats(int device = 0);
  absl::Status ResetPeakStats(int device = 0);
  // The same, and the totals (allocated, freed, num_...) start again at 0.
  absl::Status ResetStats(int device = 0);

  uint64_t session_id() const;
  const std::string& name() const;  // as the daemon made it unique
  const std::vector<DeviceInfo>& devices() const;
  // The limit on `device` now, bytes; an operator may change it at any time. 0 for an unknown device.
  uint64_t limit_bytes(int device = 0) const;

  // What Connect() found worth saying: a sentence for each setting of the allocator that has no effect here.
  const std::vector<std::string>& warnings() const;

  // OK while the session lives; else why it does not. Known within milliseconds of the daemon's end.
  absl::Status status() const;

 private:
  explicit Client(std::shared_ptr<client_internal::SessionClient> session) : session_(std::move(session)) {}

  std::shared_ptr<client_internal::SessionClient> session_;
};

}  // namespace vrambroker

#endif  // VRAMBROKER_CLIENT_H_
