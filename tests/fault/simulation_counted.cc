// SPDX-License-Identifier: Apache-2.0
//
// Programs of the simulation that get memory from the driver themselves, and have the memory counted.
#include <algorithm>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "allocator/base/bytes.h"
#include "server/requests/charges.h"
#include "tests/fault/simulation.h"

namespace vrambroker::fault {
namespace {

class NobodyListens : public SessionEvents {
 public:
  void CloseSegments(absl::Span<const SegmentId>) override {}
  void LimitChanged(int, uint64_t) override {}
  void Draining(const std::string&) override {}
  void Ended(const std::string&) override {}
  void Ask(uint64_t, const ClientQuestion&) override {}
};

}  // namespace

void Simulation::OpenCounted() {
  counted_.push_back(std::make_unique<SimCounted>());
  SimCounted& program = *counted_.back();
  program.pid = ++next_pid_;
  program.uid = static_cast<uid_t>(1000 + Random(3));
  Hello(program);
}

void Simulation::Hello(SimCounted& program) {
  watched_ = &program.gone;
  const OpenOptions options{.name = absl::StrCat("p", program.pid),
                            .limit = Chance(50) ? std::optional<Limit>(RandomBytes()) : std::nullopt,
                            .placement = Placement::kCounted};
  const absl::StatusOr<SessionPtr> session =
      broker_->OpenSession({.pid = program.pid, .uid = program.uid, .pidfd = std::make_shared<UniqueFd>()}, options,
                           std::make_shared<NobodyListens>());
  if (!session.ok()) return Fail(session.status().ToString());
  if (program.session != nullptr) broker_->Close(program.session, "another one", CloseReason::kGoodbye);
  program.session = *session;
  program.connected = true;
  ++program.connection;
  ++counts_.sessions;
  if (Chance(30)) (void)broker_->limits().SetPriority(*session, static_cast<int>(Random(3)) - 1);
  if (Chance(30)) broker_->limits().SetGuarantee(*session, Limit(RandomBytes() / 2), [](const absl::Status&) {});
}

void Simulation::ActCounted(SimCounted& program) {
  if (!program.alive) return;
  const uint64_t dice = Random(100);
  if (!program.connected) {
    if (dice < 40) {  // reconnects by exec(): memory of the old program is gone
      memory_.clients_bytes -= std::exchange(program.used, 0);
      program.charged = 0;
      Hello(program);
    } else if (dice < 50) {
      KillCounted(program);
    }
    return;
  }
  if (dice < 45) {
    Charge(program);
  } else if (dice < 60) {
    const uint64_t used = program.used + (program.charged - program.used) / 2_MiB * Random(2) * 2_MiB;
    memory_.clients_bytes += used - program.used;
    program.used = used;
  } else if (dice < 85) {
    Uncharge(program);
  } else if (dice < 88) {
    if (broker_->limits().SetLimit(program.session, Limit(RandomBytes())).ok()) ++program.limit_changes;
  } else if (dice < 90) {
    broker_->limits().SetGuarantee(program.session, Limit(RandomBytes() - 2_MiB), [](const absl::Status&) {});
  } else if (dice < 94) {
    ++counts_.disconnects;
    program.connected = false;
    ++program.connection;
    broker_->Disconnect(program.session);
  } else if (dice < 95) {
    (void)broker_->EndSession(program.session, "an operator");
  } else if (dice < 97) {
    KillCounted(program);
  }
}

void Simulation::Charge(SimCounted& program) {
  const uint64_t bytes = RandomBytes();
  RequestOptions options{.may_reclaim = Chance(60)};
  if (options.may_reclaim && Chance(60)) options.wait = std::chrono::milliseconds(Random(6000));
  ++program.asking;
  broker_->charges().Charge(
      program.session, 0, bytes,
      [this, &program, bytes, session = program.session, connection = program.connection,
       changes = program.limit_changes](const absl::Status& status) {
        --program.asking;
        if (!status.ok()) {
          ++counts_.refusals;
          return;
        }
        ++counts_.charges;
        const std::optional<AccountState> account = pool_->GetAccount(session->id());
        if (account.has_value() && changes == program.limit_changes && account->reserved_bytes > account->limit_bytes) {
          Fail(absl::StrCat("a charge passed the limit: ", account->reserved_bytes, " of ", account->limit_bytes));
        }
        // The client cannot be told of the charge.
        if (!program.alive || connection != program.connection) {
          (void)broker_->charges().Uncharge(session, 0, bytes);
          return;
        }
        program.charged += bytes;
      },
      options);
}

void Simulation::Uncharge(SimCounted& program) {
  if (program.charged == 0) return;
  const uint64_t bytes = 2_MiB * (1 + Random(program.charged / 2_MiB));
  const uint64_t left = program.charged - bytes;
  const uint64_t used = std::min(program.used, left);
  memory_.clients_bytes -= program.used - used;
  program.used = used;
  program.charged = left;
  const absl::Status status = broker_->charges().Uncharge(program.session, 0, bytes);
  if (!status.ok()) Fail(absl::StrCat("a program could not give back what it was charged: ", status.ToString()));
}

void Simulation::KillCounted(SimCounted& program) {
  if (!program.alive) return;
  ++counts_.kills;
  program.alive = false;
  memory_.clients_bytes -= std::exchange(program.used, 0);
  program.gone();
}

void Simulation::CheckCounted() {
  for (const auto& program : counted_) {
    if (!program->alive || !program->connected || program->asking > 0) continue;
    const uint64_t charged = pool_->GetAccount(program->session->id()).value_or(AccountState()).reserved_bytes;
    if (charged != program->charged) {
      Fail(absl::StrCat("a program that was granted ", program->charged, " bytes is charged ", charged));
    }
  }
  // The driver has all memory charged to programs.
  if (threads_.size() == 0 && memory_.live_bytes + memory_.clients_bytes > capacity_) {
    Fail("the driver had to give more than it has");
  }
}

}  // namespace vrambroker::fault
