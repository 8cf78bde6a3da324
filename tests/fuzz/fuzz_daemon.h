// SPDX-License-Identifier: Apache-2.0
//
// A whole daemon in the process of a fuzz target: the real broker, services and gRPC server on host devices, without
// main() and HTTP. Beside what the input does, three control sessions of "another process" hold memory, which must come
// through every input unharmed.
#ifndef VRAMBROKER_TESTS_FUZZ_FUZZ_DAEMON_H_
#define VRAMBROKER_TESTS_FUZZ_FUZZ_DAEMON_H_

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/string_view.h"
#include "server/base/event_loop.h"
#include "server/base/rate_limit.h"
#include "server/base/user_slots.h"
#include "server/base/worker_pool.h"
#include "server/core/broker.h"
#include "server/core/returning.h"
#include "server/pool/segment_pool.h"
#include "server/rpc/admin_service.h"
#include "server/rpc/broker_service.h"
#include "server/rpc/connections.h"
#include "server/rpc/count_calls.h"
#include "server/rpc/count_socket.h"
#include "server/rpc/rpc_meter.h"
#include "server/rpc/segment_calls.h"
#include "server/rpc/session_calls.h"
#include "vrambroker/v1/broker.pb.h"

namespace vrambroker {

// Ends the process, and with it this input's run, with what was violated.
void Require(bool holds, absl::string_view rule);

// False: `condition` did not come true within `patience`.
template <typename Condition>
bool WaitFor(std::chrono::milliseconds patience, const Condition& condition) {
  const auto deadline = std::chrono::steady_clock::now() + patience;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  return true;
}

class FuzzDaemon {
 public:
  // The one of this process; it serves all inputs.
  static FuzzDaemon& Get();

  const std::shared_ptr<grpc::Channel>& channel() const { return channel_; }
  // For calls that come over no socket, of this process.
  const SegmentCalls& segment_calls() const { return *segment_calls_; }
  // The id and the token of a session that leases, unless there is none but the control's.
  void NameSession(uint64_t which, v1::SegmentCall* call) const;
  // Of a counted session; 0 when there is none.
  uint64_t ChargedBytes(uint64_t session, int device) const;
  // What an operator may do with one that is not the control's.
  void OperateOnCounted(uint64_t which, uint64_t what);
  const std::string& count_socket() const { return count_path_; }
  // Ids that inputs may try: of the control sessions, their segments and blocks.
  std::vector<uint64_t> control_ids() const;

  // Closes all sessions but the control's, as if their process had gone, and requires that everything that they held
  // is back, that all figures add up, and that the control's memory and accounts are what they were.
  void CheckAndReset();

 private:
  FuzzDaemon();
  void Connect();
  void OpenControl();
  void CheckControl();
  std::vector<SessionPtr> Others() const;

  static constexpr uint64_t kCapacity = 64 << 20;
  static constexpr uint64_t kCounted = 4 << 20;  // of counted_, on each device

  std::atomic<uint64_t> next_segment_{1};
  std::vector<std::unique_ptr<SegmentPool>> pools_;
  WorkerPool workers_;
  EventLoop loop_;
  std::unique_ptr<Broker> broker_;
  CallRates rates_;
  UserSlots snapshots_;
  ProcessWatch processes_;
  Connections connections_;
  RpcMeter rpcs_;
  std::unique_ptr<SessionCalls> session_calls_;
  std::unique_ptr<SegmentCalls> segment_calls_;
  std::unique_ptr<Returning> returning_;
  std::unique_ptr<CountCalls> count_calls_;
  std::unique_ptr<CountSocket> count_socket_;
  std::string count_path_;
  std::unique_ptr<BrokerService> broker_service_;
  std::unique_ptr<AdminService> admin_service_;
  std::unique_ptr<grpc::Server> server_;
  std::thread loop_thread_;
  std::shared_ptr<grpc::Channel> channel_;

  Caller control_caller_;
  SessionPtr leasing_;                // the control that leases, on device 0
  SessionPtr remote_;                 // the one that allocates here, on device 1
  SessionPtr counted_;                // the one that has its own memory, on both
  std::vector<Lease> leases_;         // of leasing_
  std::vector<unsigned char*> maps_;  // of leases_
  std::vector<UniqueFd> files_;       // of leases_
  Allocation block_;                  // of remote_
};

}  // namespace vrambroker

#endif  // VRAMBROKER_TESTS_FUZZ_FUZZ_DAEMON_H_
