// SPDX-License-Identifier: Apache-2.0
//
// Claims on a separate broker. The test stands in for the claims' sockets and file.
#ifndef VRAMBROKER_TESTS_UNIT_SERVER_CORE_CLAIMS_FIXTURE_H_
#define VRAMBROKER_TESTS_UNIT_SERVER_CORE_CLAIMS_FIXTURE_H_

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "server/core/claims.h"
#include "tests/support/util.h"
#include "tests/unit/server/core/broker_fixture.h"

namespace vrambroker {

inline constexpr uid_t kOwner = 1000;

class ClaimsTest : public BrokerTest {
 protected:
  ClaimsTest() { Restart(); }

  void Restart() {
    BrokerOptions options;
    options.reclaim_timeout = std::chrono::milliseconds(200);
    options.claims = {.serve =
                          [this](const Claim& claim) {
                            MutexLock lock(hooks_mu_);
                            if (!serve_error_.ok()) {
                              half_served_.push_back(claim.name);
                              return serve_error_;
                            }
                            served_.push_back(claim.name);
                            ++serves_;
                            return absl::OkStatus();
                          },
                      .stop_serving =
                          [this](const Claim& claim) {
                            MutexLock lock(hooks_mu_);
                            std::erase(served_, claim.name);
                            std::erase(half_served_, claim.name);
                          },
                      .save =
                          [this](const std::vector<Claim>& claims) {
                            if (on_save_) std::exchange(on_save_, nullptr)();
                            if (!save_error_.ok()) return save_error_;
                            MutexLock lock(hooks_mu_);
                            saved_.clear();
                            for (const Claim& claim : claims) {
                              saved_.push_back(absl::StrCat(claim.name, " ", ClaimStateName(claim.state)));
                            }
                            if (on_saved_) std::exchange(on_saved_, nullptr)();
                            return absl::OkStatus();
                          },
                      .save_state =
                          [this](const Claim& claim) {
                            if (!state_error_.ok()) return state_error_;
                            MutexLock lock(hooks_mu_);
                            for (std::string& text : saved_) {
                              if (absl::StartsWith(text, claim.name + " ")) {
                                text = absl::StrCat(claim.name, " ", ClaimStateName(claim.state));
                              }
                            }
                            return absl::OkStatus();
                          },
                      .note_member =
                          [this](const ProcessId&, const std::string&) {
                            if (on_member_) std::exchange(on_member_, nullptr)();
                          },
                      .forget_members =
                          [this](const std::string& claim) {
                            MutexLock lock(hooks_mu_);
                            forgotten_.push_back(claim);
                          },
                      .most_own = most_own_};
    options.policy = policy_;
    workers_.reset();  // tasks end before the broker, as in the daemon
    workers_ = std::make_unique<WorkerPool>(4);
    Make(std::move(options));
  }

  absl::StatusOr<Claim> Answer(const std::function<void(const Claims::Done&)>& call) {
    Signal answered;
    absl::StatusOr<Claim> answer = absl::UnknownError("no answer");
    call([&](absl::StatusOr<Claim> claim) {
      answer = std::move(claim);
      answered.Notify();
    });
    answered.WaitForNotification();
    return answer;
  }
  absl::StatusOr<Claim> Create(const std::string& name, ClaimTerms terms) {
    if (!terms.owner.uid.has_value()) terms.owner.uid = kOwner;
    return Answer([&](const Claims::Done& done) { broker_->claims().Create(name, terms, done); });
  }
  absl::StatusOr<Claim> Update(const std::string& name, const ClaimChange& change) {
    return Answer([&](const Claims::Done& done) { broker_->claims().Update(name, change, done); });
  }
  absl::StatusOr<Claims::Deleted> Delete(const std::string& name, bool revoke = false) {
    Signal answered;
    absl::StatusOr<Claims::Deleted> answer = absl::UnknownError("no answer");
    broker_->claims().Delete(name, revoke, [&](absl::StatusOr<Claims::Deleted> deleted) {
      answer = std::move(deleted);
      answered.Notify();
    });
    answered.WaitForNotification();
    return answer;
  }
  // Waits for all changes that have begun: changes follow one another, and changes of users come last.
  void WaitForChanges() {
    const ClaimAsker user{.caller = Process(1, kOwner), .rule = SessionTerms()};
    const auto change = [&](const Claims::Done& done) { broker_->claims().Update("u1000.none", {}, done, user); };
    EXPECT_TRUE(absl::IsPermissionDenied(Answer(change).status()));
  }
  // Removes empty claims until the claim is gone; returns true on success.
  bool IsRemoved(const std::string& name) {
    const bool is_removed = testing_support::WaitFor([&] {
      broker_->claims().RemoveEmpty();
      return !broker_->claims().Find(name).ok();
    });
    WaitForChanges();  // Find() fails before the whole removal is done
    return is_removed;
  }

  Caller In(const absl::StatusOr<Claim>& claim, pid_t pid = 1, uid_t uid = kOwner) {
    Caller caller = Process(pid, uid);
    if (claim.ok()) caller.claim = claim->id;
    return caller;
  }
  ClaimDeviceView View(const std::string& name, size_t device = 0) {
    for (const ClaimView& of : broker_->operator_view().Look().claims) {
      if (of.claim.name == name) return of.devices[device];
    }
    ADD_FAILURE() << "no claim " << name;
    return {};
  }

  // A heap collects garbage by the last limit told to the heap. 12 MiB free stays beside 14 MiB in use if half of the
  // limit is 20 MiB, and goes if half of the limit is 10 MiB.
  static inline const AllocatorOptions kCollects{.garbage_collection_threshold = 0.5};
  void ExpectHeapKnows40MiB(const SessionPtr& session) {
    const absl::StatusOr<Allocation> free = Allocate(session, 12_MiB);
    ASSERT_TRUE(free.ok()) << free.status();
    ASSERT_EQ(broker_->allocations().Free(session, {free->block}), absl::OkStatus());
    ASSERT_TRUE(Allocate(session, 14_MiB).ok());
    EXPECT_EQ(session->GetMemoryStats(0).num_device_free, 0u);
  }

  std::shared_ptr<const Policy> policy_;
  std::function<void()> on_save_;    // called once
  std::function<void()> on_saved_;   // called once
  std::function<void()> on_member_;  // called once, after a session's entry and before Find() has the session
  absl::Status serve_error_;
  absl::Status save_error_;
  absl::Status state_error_;
  size_t most_own_ = Claims::kMaxOwnClaims;  // applies from the next Restart() on
  std::vector<std::string> served() {
    MutexLock lock(hooks_mu_);
    return served_;
  }
  // Returns claims whose sockets may exist in part.
  std::vector<std::string> half_served() {
    MutexLock lock(hooks_mu_);
    return half_served_;
  }
  // Returns claims whose members are forgotten.
  std::vector<std::string> forgotten() {
    MutexLock lock(hooks_mu_);
    return forgotten_;
  }
  std::vector<std::string> saved() {
    MutexLock lock(hooks_mu_);
    return saved_;
  }

 private:
  Mutex hooks_mu_;  // workers call the hooks
  std::vector<std::string> served_ ABSL_GUARDED_BY(hooks_mu_);
  std::vector<std::string> half_served_ ABSL_GUARDED_BY(hooks_mu_);
  std::vector<std::string> forgotten_ ABSL_GUARDED_BY(hooks_mu_);
  std::vector<std::string> saved_ ABSL_GUARDED_BY(hooks_mu_);

 protected:
  std::atomic<int> serves_{0};
};

}  // namespace vrambroker

#endif  // VRAMBROKER_TESTS_UNIT_SERVER_CORE_CLAIMS_FIXTURE_H_
