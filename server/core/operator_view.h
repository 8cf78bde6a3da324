// SPDX-License-Identifier: Apache-2.0
//
// OperatorView: assembles the operators' view from the broker's parts.
#ifndef VRAMBROKER_SERVER_CORE_OPERATOR_VIEW_H_
#define VRAMBROKER_SERVER_CORE_OPERATOR_VIEW_H_

#include <sys/types.h>

#include <functional>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "server/base/steady_time.h"
#include "server/core/broker_view.h"
#include "server/core/fragmentation_watch.h"
#include "server/core/reconciliation.h"
#include "server/pool/segment_pool.h"
#include "server/requests/refusals.h"
#include "server/requests/waiting_requests.h"
#include "server/sessions/session_registry.h"

namespace vrambroker {

// Thread-safe.
class OperatorView {
 public:
  // All parts outlive the object.
  struct Parts {
    const SessionRegistry* sessions = nullptr;
    const WaitingRequests* waiting = nullptr;
    const Refusals* refusals = nullptr;
    const FragmentationWatch* fragmentation = nullptr;
    const Reconciliation* reconciliation = nullptr;
    const Claims* claims = nullptr;
  };
  // `pools` are indexed by device. `user_name`: see BrokerOptions.
  OperatorView(std::vector<SegmentPool*> pools, std::function<SteadyTime()> clock,
               std::function<std::string(uid_t uid)> user_name, Parts parts);

  // The whole view. Counters of a pool, over all sessions, are consistent per device.
  BrokerView Look() const;
  SessionView Describe(const Session& session) const;

 private:
  // Adds the fields unknown to ViewOf().
  void Complete(absl::Span<SessionView> infos) const;
  void AddWaiting(absl::Span<SessionView> infos) const;
  void AddUse(absl::Span<SessionView> infos) const;
  // `shares`, by device: the pools' shares at the time of the rest of `view`.
  using Shares = absl::flat_hash_map<ShareId, ShareStats>;
  std::vector<ClaimView> LookAtClaims(const std::vector<Shares>& shares, const BrokerView& view) const;

  const std::vector<SegmentPool*> pools_;
  const std::function<SteadyTime()> clock_;
  const std::function<std::string(uid_t uid)> user_name_;
  const Parts parts_;
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_CORE_OPERATOR_VIEW_H_
