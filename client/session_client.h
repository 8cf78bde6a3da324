// SPDX-License-Identifier: Apache-2.0
#ifndef VRAMBROKER_CLIENT_SESSION_CLIENT_H_
#define VRAMBROKER_CLIENT_SESSION_CLIENT_H_

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "allocator/device.h"
#include "allocator/memory_stats.h"
#include "allocator/mutex.h"
#include "client/mappings.h"
#include "client/vrambroker/client.h"
#include "vrambroker/v1/broker.grpc.pb.h"

namespace vrambroker::client_internal {

class SessionStream;

// One session: the stream that keeps it, the calls, the mappings. Shared by a Client and its Buffers; the last of them
// says goodbye. Thread-safe.
class SessionClient : public std::enable_shared_from_this<SessionClient> {
 public:
  static absl::StatusOr<std::shared_ptr<SessionClient>> Open(const ClientOptions& options);
  ~SessionClient();

  absl::StatusOr<Buffer> Allocate(uint64_t bytes, int device);
  absl::Status Free(uint64_t block_id);
  absl::StatusOr<uint64_t> EmptyCache();
  absl::StatusOr<MemoryStats> GetMemoryStats(int device);
  absl::Status ResetPeakStats(int device);

  uint64_t session_id() const { return session_id_; }
  const std::string& name() const { return name_; }
  const std::vector<DeviceInfo>& devices() const { return devices_; }
  uint64_t limit_bytes(int device) const;
  absl::Status status() const;

 private:
  friend class SessionStream;
  // Everything that lives in gRPC. A child made by fork() must not touch it: gRPC's threads are not there.
  struct Connection;

  explicit SessionClient(const ClientOptions& options);

  // OK when a call may be made.
  absl::Status CheckUsable() const;
  // Makes a unary call: `method` of the stub with a deadline. A lost session explains itself.
  template <typename Method, typename Request, typename Response>
  absl::Status Call(Method method, const Request& request, Response* response);
  void Welcomed(const v1::Welcome& welcome);
  absl::StatusOr<Device*> DeviceFor(int ordinal) ABSL_LOCKS_EXCLUDED(mu_);

  // Constant after Open().
  const ClientOptions options_;
  const pid_t pid_;
  std::unique_ptr<Connection> connection_;
  uint64_t session_id_ = 0;
  std::string name_;
  std::vector<DeviceInfo> devices_;
  std::unique_ptr<std::atomic<uint64_t>[]> limits_;  // by device

  Mutex mu_;
  std::vector<std::unique_ptr<Device>> opened_devices_ ABSL_GUARDED_BY(mu_);  // by device; null until used
  Mappings mappings_;  // after the devices: closed before they go
};

}  // namespace vrambroker::client_internal

#endif  // VRAMBROKER_CLIENT_SESSION_CLIENT_H_
