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

  absl::StatusOr<Buffer> Allocate(uint64_t bytes, int device, uint64_t stream);
  // Waits for the daemon's answer.
  absl::Status Free(uint64_t block_id);
  // Does not wait, and never fails: for destructors.
  void FreeLater(uint64_t block_id);
  absl::StatusOr<uint64_t> EmptyCache();
  absl::StatusOr<MemoryStats> GetMemoryStats(int device);
  absl::Status ResetPeakStats(int device, bool accumulated);

  uint64_t session_id() const { return session_id_; }
  const std::string& name() const { return name_; }
  const std::vector<DeviceInfo>& devices() const { return devices_; }
  uint64_t limit_bytes(int device) const;
  const std::vector<std::string>& warnings() const { return warnings_; }
  absl::Status status() const;

 private:
  friend class SessionStream;
  // Everything that a child made by fork() must not touch: gRPC, whose threads are not there, locks that another
  // thread may have held, the mappings, which are the parent's to close.
  struct Connection;

  explicit SessionClient(const ClientOptions& options);

  // OK when a call may be made.
  absl::Status CheckUsable() const;
  // Makes a unary call: `method` of the stub with a deadline. A lost session explains itself.
  template <typename Method, typename Request, typename Response>
  absl::Status Call(Method method, const Request& request, Response* response);
  void Welcomed(const v1::Welcome& welcome);
  absl::StatusOr<Device*> DeviceFor(int ordinal);

  // Constant after Open().
  const ClientOptions options_;
  const pid_t pid_;
  std::unique_ptr<Connection> connection_;
  uint64_t session_id_ = 0;
  std::string name_;
  std::vector<DeviceInfo> devices_;
  std::vector<std::string> warnings_;
  std::unique_ptr<std::atomic<uint64_t>[]> limits_;  // by device
};

}  // namespace vrambroker::client_internal

#endif  // VRAMBROKER_CLIENT_SESSION_CLIENT_H_
