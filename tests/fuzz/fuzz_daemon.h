// SPDX-License-Identifier: Apache-2.0
//
// A whole daemon in the process of a fuzz target: the real broker, services and gRPC server on host devices, without
// main() and HTTP. Beside the input's sessions, three control sessions of "another process" hold memory. The memory
// must survive every input unharmed.
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

// Reports the violated rule, and ends the process, and so the input's run.
void Require(bool holds, absl::string_view rule);

// Returns false if `condition` does not become true within `patience`.
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
  // The daemon of the process, which serves all inputs.
  static FuzzDaemon& Get();

  const std::shared_ptr<grpc::Channel>& channel() const { return channel_; }
  // For calls of the process that come over no socket.
  const SegmentCalls& segment_calls() const { return *segment_calls_; }
  // Names a leased session by id and token, if any exists beside the control's sessions.
  void NameSession(uint64_t which, v1::SegmentCall* call) const;
  // Charged bytes of a counted session; 0 without the session.
  uint64_t ChargedBytes(uint64_t session, int device) const;
  // Acts as an operator on a counted session outside of the control.
  void OperateOnCounted(uint64_t which, uint64_t what);
  const std::string& count_socket() const { return count_path_; }
  // Ids that inputs may try: ids of the control sessions, and of their segments and blocks.
  std::vector<uint64_t> control_ids() const;

  // Closes all sessions but the control's, as if their process had ended. Requires that all memory of the closed
  // sessions is back, that all figures add up, and that the control's memory and accounts are unchanged.
  void CheckAndReset();

 private:
  FuzzDaemon();
  void Connect();
  void OpenControl();
  void CheckControl();
  std::vector<SessionPtr> Others() const;

  static constexpr uint64_t kCapacity = 64 << 20;
  static constexpr uint64_t kCounted = 4 << 20;  // counted_'s charge on each device

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
  SessionPtr leasing_;                // the control's leased session, on device 0
  SessionPtr remote_;                 // the control's remote session, on device 1
  SessionPtr counted_;                // the control's counted session, on both devices
  std::vector<Lease> leases_;         // leases of leasing_
  std::vector<unsigned char*> maps_;  // maps of leases_
  std::vector<UniqueFd> files_;       // files of leases_
  Allocation block_;                  // block of remote_
};

}  // namespace vrambroker

#endif  // VRAMBROKER_TESTS_FUZZ_FUZZ_DAEMON_H_
