// SPDX-License-Identifier: Apache-2.0
//
// The command line, parsed for the commands.
#ifndef VRAMBROKER_CLIENT_VRAMCTL_OPTIONS_CONTEXT_H_
#define VRAMBROKER_CLIENT_VRAMCTL_OPTIONS_CONTEXT_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "client/vramctl/options/claim_flags.h"
#include "client/vramctl/options/plan_flags.h"
#include "client/vramctl/options/run_flags.h"

namespace vrambroker::vramctl {

// Flags of replay, tune, plan; alloc_conf: hold, too. Empty: not given.
struct ReplayFlags {
  std::string conf;        // a file with alloc_conf=, device_bytes= and fraction=
  std::string alloc_conf;  // overrides conf, as do device_bytes and fraction
  std::string device_bytes;
  std::string fraction;
  bool per_op = false;
};

// Flags of policy explain. Empty: not given.
struct PolicyFlags {
  std::string pid;
  std::string uid;  // uid and gid are names or numbers
  std::string gid;
  std::string cgroup;
};

struct TraceFlags {
  double seconds = 10;
  bool until_oom = false;  // replaces seconds
};

struct Context {
  std::string socket_dir;
  absl::Duration timeout =
      absl::Seconds(30);  // of each call; longer than the daemon waits for a client (client_timeout)
  bool json = false;
  std::string name;                  // hold, policy explain
  std::string limit;                 // hold; empty: none
  int device = 0;                    // hold, stats, summary; replay, tune: of a PyTorch snapshot
  std::string output;                // snapshot, trace, replay, plan: a file, or "-"
  uint32_t last = 20;                // ooms: number of refusals; 0: all
  std::string session;               // ooms: session to show; empty: all sessions
  std::string target;                // diagnose, ooms, tune: user of the settings; empty: not given
  std::optional<uint64_t> diagnose;  // ooms: refusal id
  std::optional<int> only_device;    // map, release: nullopt: all; elsewhere: see `device`
  std::vector<std::string> diff;     // snapshot: two files to compare; empty: not given
  bool abbreviated = false;          // summary
  double interval = 1;               // top, watch: seconds
  uint64_t count = 0;                // watch: lines; 0: no end
  bool batch = false;                // top: as text, `batches` times
  uint64_t batches = 1;
  std::string sort = "reserved";  // top: a column
  ReplayFlags replay;
  PolicyFlags policy;
  ClaimFlags claim;
  PlanFlags plan;
  RunFlags run;
  TraceFlags trace;
};

}  // namespace vrambroker::vramctl

#endif  // VRAMBROKER_CLIENT_VRAMCTL_OPTIONS_CONTEXT_H_
