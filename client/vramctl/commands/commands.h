// SPDX-License-Identifier: Apache-2.0
//
// The commands of vramctl. Each prints its result to standard output; the caller prints a status other than OK.
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

// ParseSessionRef() parses SESSION.
absl::Status Status(const Context& context);
absl::Status Sessions(const Context& context);
// Shows a live view on a terminal until the user quits.
absl::Status Top(const Context& context);
// Writes a line of JSON at each interval, with the values of status and sessions. Ends quietly when the reader is gone.
absl::Status Watch(const Context& context);
// Returns the interval of Top() or Watch(). InvalidArgument: out of bounds.
absl::StatusOr<absl::Duration> IntervalOf(const Context& context);
// Prints the segments of a session, or of all, with their blocks. An error for a session is printed in its place.
absl::Status Map(const Context& context, const std::optional<std::string>& session);
// Prints the last refused requests, newest first.
absl::Status Ooms(const Context& context);
// Finds settings able to serve a refused request, by trying them on the recording.
absl::Status DiagnoseRefusal(const Context& context, uint64_t refusal);
// Diagnoses the last refusal of a session, live or ended. Without a refusal on record: finds settings able to run the
// session with less memory.
absl::Status DiagnoseSession(const Context& context, const std::string& session);
// Diagnoses a snapshot in a file, without a daemon.
absl::Status DiagnoseFile(const Context& context, const std::string& path);
absl::Status Stats(const Context& context, const std::optional<std::string>& session);
absl::Status Summary(const Context& context, const std::optional<std::string>& session);
absl::Status SetLimit(const Context& context, const std::string& session, const std::string& limit);
absl::Status SetGuarantee(const Context& context, const std::string& session, const std::string& guarantee);
absl::Status SetPriority(const Context& context, const std::string& session, const std::string& priority);
absl::Status ShowQuarantine(const Context& context);
absl::Status Trim(const Context& context, const std::string& session);
absl::Status End(const Context& context, const std::string& session);
// Makes the daemon return its cached memory to the driver: of context.only_device, or of all devices.
absl::Status ReleaseIdle(const Context& context);

// context.claim names the claim and holds its terms.
absl::Status CreateClaim(const Context& context);
absl::Status ChangeClaim(const Context& context);
absl::Status ShowClaims(const Context& context);
absl::Status ShowClaim(const Context& context);
absl::Status RemoveClaim(const Context& context);
absl::Status WriteClaimCdi(const Context& context);

// Explains the policy's grants to the client described by context.policy (default: this process).
absl::Status ExplainPolicy(const Context& context);
// Makes the daemon reload its configuration file.
absl::Status Reload(const Context& context);

// Makes a session keep its last `events` events; 0: none.
absl::Status Record(const Context& context, const std::string& session, const std::string& events);
// Writes a session's heaps as a PyTorch snapshot to context.output: JSON for names ending in .json and for "-"
// (standard output), else a pickle.
absl::Status Snapshot(const Context& context, const std::string& session);
// Prints the growth from the first file to the second.
absl::Status DiffSnapshots(const Context& context, const std::string& before, const std::string& after);

// Records a session for a while, or until a request is refused, and writes a snapshot as Snapshot() does, with the
// events of this period. A signal ends the recording early. If the session was recording before, its recording
// continues afterwards; else it stops. If the session ends meanwhile, writes the data read so far and reports the end
// in the status.
absl::Status RunTrace(const Context& context, const std::string& session);

// Runs a client: allocates, writes a pattern, prints its address, holds until SIGINT or SIGTERM, then verifies the
// pattern. Reconnects to a restarted daemon. Fails if refused, if an operator ends the session, if no daemon is running
// at the end, or if the bytes have changed.
absl::Status Hold(const Context& context, const std::string& bytes);

// Runs a program, context.run.program, with a claim for its processes. The status carries the exit code of vramctl: see
// exit_code.h.
absl::Status Run(const Context& context);

// Replays a trace through the allocator with a simulated device, without a daemon.
absl::Status RunReplay(const Context& context, const std::string& trace);
// Replays a trace with a grid of settings to find those needing less memory.
absl::Status RunTune(const Context& context, const std::string& trace);

// Plans before a job runs: the memory of a training step, the memory for serving, whether several jobs fit on one
// device.
absl::Status PlanTrain(const Context& context);
absl::Status PlanServe(const Context& context);
absl::Status PlanShare(const Context& context);

// InvalidArgument names the flag.
absl::StatusOr<SettingsTarget> TargetOf(const Context& context);

// For replay, tune and plan. InvalidArgument names the flag, or the file and its line.
absl::StatusOr<ReplayConfig> ReplayConfigOf(const ReplayFlags& flags);
absl::StatusOr<Trace> ReadTraceArgument(const Context& context, const std::string& path);
// Uses the settings of the recording, unless the flags name different ones. ResourceExhausted: the device has no room
// for the memory held at the start of the trace.
absl::StatusOr<ReplayConfig> ConfigFor(const ReplayFlags& flags, const Trace& trace, const ReplayConfig& given);

}  // namespace vrambroker::vramctl

#endif  // VRAMBROKER_CLIENT_VRAMCTL_COMMANDS_COMMANDS_H_
