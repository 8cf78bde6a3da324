// SPDX-License-Identifier: Apache-2.0
//
// The commands of vramctl. Each prints its result to standard output; a status that is not OK is the caller's to print.
// InvalidArgument means wrong use, unless IsRefusal().
#ifndef VRAMBROKER_CLIENT_VRAMCTL_COMMANDS_COMMANDS_H_
#define VRAMBROKER_CLIENT_VRAMCTL_COMMANDS_COMMANDS_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "allocator/replay/replay.h"
#include "allocator/replay/settings_target.h"
#include "allocator/replay/trace.h"
#include "client/vramctl/options/context.h"
#include "client/vramctl/options/refusal.h"

namespace vrambroker::vramctl {

// SESSION is as ParseSessionRef() reads it.
absl::Status Status(const Context& context);
absl::Status Sessions(const Context& context);
// A live view on a terminal, until it is told to quit.
absl::Status Top(const Context& context);
// A line of JSON at each interval, with the values of status and sessions. Ends quietly when nobody reads it any more.
absl::Status Watch(const Context& context);
// Of these two. InvalidArgument: out of bounds.
absl::StatusOr<absl::Duration> IntervalOf(const Context& context);
// The segments of a session, or of all, with their blocks. What cannot be had of one of them is said in its place.
absl::Status Map(const Context& context, const std::optional<std::string>& session);
// The last requests that got no memory, newest first.
absl::Status Ooms(const Context& context);
// Which settings would have served one of them, by trying them on what was recorded.
absl::Status DiagnoseRefusal(const Context& context, uint64_t refusal);
// The same of the last one of a session, which may have ended. Where none is on record: which settings would have
// needed less for what the session did.
absl::Status DiagnoseSession(const Context& context, const std::string& session);
// Does that for a snapshot in a file, without a daemon.
absl::Status DiagnoseFile(const Context& context, const std::string& path);
absl::Status Stats(const Context& context, const std::optional<std::string>& session);
absl::Status Summary(const Context& context, const std::optional<std::string>& session);
absl::Status SetLimit(const Context& context, const std::string& session, const std::string& limit);
absl::Status SetGuarantee(const Context& context, const std::string& session, const std::string& guarantee);
absl::Status SetPriority(const Context& context, const std::string& session, const std::string& priority);
absl::Status ShowQuarantine(const Context& context);
absl::Status Trim(const Context& context, const std::string& session);
absl::Status End(const Context& context, const std::string& session);
// Has the driver get what the daemon caches: of context.only_device, or of all.
absl::Status ReleaseIdle(const Context& context);

// context.claim says which, and what.
absl::Status CreateClaim(const Context& context);
absl::Status ChangeClaim(const Context& context);
absl::Status ShowClaims(const Context& context);
absl::Status ShowClaim(const Context& context);
absl::Status RemoveClaim(const Context& context);
absl::Status WriteClaimCdi(const Context& context);

// What the policy grants to whom context.policy describes (nobody: this process), and why.
absl::Status ExplainPolicy(const Context& context);
// Has the daemon read its configuration file again.
absl::Status Reload(const Context& context);

// Has a session keep its last `events` events; 0: none.
absl::Status Record(const Context& context, const std::string& session, const std::string& events);
// Writes a session's heaps as PyTorch's snapshot to context.output: JSON for names that end in .json and for "-"
// (standard output), else a pickle.
absl::Status Snapshot(const Context& context, const std::string& session);
// Prints what has grown from one file to another.
absl::Status DiffSnapshots(const Context& context, const std::string& before, const std::string& after);

// Records a session for a while, or until a request of it is refused, and writes what Snapshot() does, with the events
// of that time. A signal ends it early. A recording that goes on already goes on; else the session records nothing
// afterwards. When the session ends meanwhile, what was read before is written, and the status says so.
absl::Status RunTrace(const Context& context, const std::string& session);

// A client that allocates, writes a pattern, says where it is and holds until SIGINT or SIGTERM; then it verifies the
// pattern. A daemon that goes away is reached again. Fails when it is refused, when an operator ends its session, when
// there is no daemon at the end, or when it finds other bytes than it wrote.
absl::Status Hold(const Context& context, const std::string& bytes);

// A program, context.run.program, with a claim for its processes. A status with the exit code of vramctl: see
// exit_code.h.
absl::Status Run(const Context& context);

// Without a daemon: a trace through the allocator with a simulated device.
absl::Status RunReplay(const Context& context, const std::string& trace);
// The same with a grid of settings: which would have needed less.
absl::Status RunTune(const Context& context, const std::string& trace);

// Before a job runs: what a training step needs, what serving needs, whether several jobs fit on one device.
absl::Status PlanTrain(const Context& context);
absl::Status PlanServe(const Context& context);
absl::Status PlanShare(const Context& context);

// InvalidArgument names the flag.
absl::StatusOr<SettingsTarget> TargetOf(const Context& context);

// For replay, tune and plan. InvalidArgument names the flag, or the file and its line.
absl::StatusOr<ReplayConfig> ReplayConfigOf(const ReplayFlags& flags);
absl::StatusOr<Trace> ReadTraceArgument(const Context& context, const std::string& path);
// With the settings of the recording, unless the flags name others. ResourceExhausted: the device has no room for what
// the trace begins with.
absl::StatusOr<ReplayConfig> ConfigFor(const ReplayFlags& flags, const Trace& trace, const ReplayConfig& given);

}  // namespace vrambroker::vramctl

#endif  // VRAMBROKER_CLIENT_VRAMCTL_COMMANDS_COMMANDS_H_
