// SPDX-License-Identifier: Apache-2.0
//
// Simulation: the real broker (sessions, pool, ledger, request queue, quarantine) over a simulated device, clock,
// workers and clients. A seed chooses a sequence of single steps: a failure repeats exactly.
#ifndef VRAMBROKER_TESTS_FAULT_SIMULATION_H_
#define VRAMBROKER_TESTS_FAULT_SIMULATION_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "server/core/broker.h"
#include "tests/fault/sim_device.h"
#include "tests/fault/sim_threads.h"

namespace vrambroker::fault {

struct SimulationCounts {
  uint64_t steps = 0;
  uint64_t sessions = 0;
  uint64_t leases = 0;
  uint64_t refusals = 0;
  uint64_t waited = 0;  // requests granted after a wait
  uint64_t charges = 0;
  uint64_t kills = 0;
  uint64_t disconnects = 0;
  uint64_t resumes = 0;
  uint64_t lost_messages = 0;
  uint64_t driver_failures = 0;
  uint64_t quarantines = 0;  // segments held by a child of an ended process
  std::chrono::nanoseconds longest_held_back{0};
};

class SimClient;

// A program that gets memory from the driver itself and has the memory counted. The program uses no memory beyond its
// known charge.
struct SimCounted {
  pid_t pid = 0;
  uid_t uid = 0;
  SessionPtr session;
  uint64_t charged = 0;  // charge known to the program
  uint64_t used = 0;     // part of `charged` that the program got from the driver
  bool alive = true;
  uint64_t connection = 1;  // number of the main connection; changes after each break
  bool connected = true;
  size_t asking = 0;  // requests without an answer
  uint64_t limit_changes = 0;
  std::function<void()> gone;
};

class Simulation {
 public:
  explicit Simulation(uint64_t seed);
  ~Simulation();

  // Runs `steps` steps, and then ends everything. Returns the first failure; empty if there is none.
  std::string Run(int steps);
  const SimulationCounts& counts() const { return counts_; }

 private:
  friend class SimClient;

  // A request of a client.
  struct Request {
    SimClient* client = nullptr;
    uint64_t bytes = 0;
    SteadyTime began;
    uint64_t limit_changes = 0;  // limit changes of the session before the request
    bool may_reclaim = false;
    bool at_once = true;  // the answer came before the call returned
  };

  uint64_t Random(uint64_t below) { return random_() % below; }
  bool Chance(int percent) { return static_cast<int>(Random(100)) < percent; }
  uint64_t RandomBytes();
  void Fail(const std::string& what);
  void Step();
  void Open();
  void Act(SimClient& client);
  void Lease(SimClient& client);
  void Leased(const Request& request, const absl::StatusOr<std::vector<vrambroker::Lease>>& leases);
  void Refused(const Request& request, const absl::Status& status);
  void Kill(SimClient& client);
  void ReportGone(SimClient& client);
  void Advance(std::chrono::nanoseconds by);
  void FireTimer();
  // Runs all tasks and delivers all messages, without letting time pass.
  void Settle();
  void CheckSums();
  // Checks that growth has not taken the account's claim beyond the claim's limit.
  void CheckClaim(const AccountState& account);
  void CheckWaiting();
  void CheckHeldBack();
  void CheckNobodyIsStuck();
  void EndAll();
  // Programs with memory of their own from the driver: simulation_counted.cc.
  void OpenCounted();
  // Opens a session for the program, instead of the lost session.
  void Hello(SimCounted& program);
  void ActCounted(SimCounted& program);
  void Charge(SimCounted& program);
  void Uncharge(SimCounted& program);
  void KillCounted(SimCounted& program);
  void CheckCounted();
  // Gives the segment to the client in the simulation's books.
  void TakeOver(SimClient& client, uint64_t address);
  void GiveUp(const SimClient& client);

  std::mt19937_64 random_;
  const uint64_t capacity_;
  const bool driver_runs_out_;  // the driver may have less memory than it reported
  std::string failure_;
  SimulationCounts counts_;
  SteadyTime now_{std::chrono::hours(1)};
  SteadyTime next_health_ = now_;
  struct ClaimBytes {
    uint64_t charged = 0;
    uint64_t limit = 0;
  };
  std::map<ClaimId, ClaimBytes> claims_;  // bytes at the last check
  std::optional<SteadyTime> timer_;
  SimMemory memory_;
  SimThreads threads_;
  std::atomic<uint64_t> next_segment_{1};
  std::unique_ptr<SegmentPool> pool_;
  std::unique_ptr<Broker> broker_;
  std::vector<std::unique_ptr<SimClient>> clients_;   // including ended clients
  std::vector<SimClient*> gone_;                      // ended clients that the daemon does not know about yet
  std::vector<std::unique_ptr<SimCounted>> counted_;  // including ended programs
  std::function<void()>* watched_ = nullptr;          // callback for the end of the process that opens a session now
  std::map<uint64_t, SimClient*> owner_;              // owner of each leased address
  std::map<pid_t, std::vector<uint64_t>> children_;   // mappings of forked children of dead processes
  std::map<pid_t, std::string> child_domains_;
  using HeldBackKey = std::tuple<SessionId, SteadyTime, uint64_t>;  // key of a waiting request
  std::map<HeldBackKey, SteadyTime> held_back_;  // time since when only a hold keeps the request from its memory
  pid_t next_pid_ = 100;
  bool ending_ = false;
};

}  // namespace vrambroker::fault

#endif  // VRAMBROKER_TESTS_FAULT_SIMULATION_H_
