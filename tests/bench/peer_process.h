// SPDX-License-Identifier: Apache-2.0
//
// A peer: an allocator in a separate process. An allocator that replaces malloc() replaces only the peer's malloc().
#ifndef VRAMBROKER_TESTS_BENCH_PEER_PROCESS_H_
#define VRAMBROKER_TESTS_BENCH_PEER_PROCESS_H_

#include <sys/types.h>

#include <array>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "allocator/base/unique_fd.h"
#include "tests/bench/workload.h"

namespace vrambroker::bench {

struct Peer {
  const char* name;
  Subject subject;
  const char* library = "";      // preloaded library that contains malloc()
  const char* environment = "";  // NAME=VALUE for the peer
};

inline constexpr std::array<Peer, 7> kPeers = {{
    {"vrambroker", Subject::kVrambroker},
    {"recording", Subject::kRecording},
    {"tcmalloc", Subject::kHost, "libtcmalloc_minimal.so.4"},
    {"jemalloc", Subject::kHost, "libjemalloc.so.2"},
    // The tuned jemalloc gives no memory back to the system, and keeps blocks of up to 32 MiB with each thread.
    {"je-tuned", Subject::kHost, "libjemalloc.so.2",
     "MALLOC_CONF=dirty_decay_ms:-1,muzzy_decay_ms:-1,lg_tcache_max:25"},
    {"mimalloc", Subject::kHost, "libmimalloc.so.2"},
    {"empty", Subject::kEmpty},
}};

class PeerProcess {
 public:
  // Runs the benchmark program again with `arguments`, which lead to ServePeer(). NotFound: the peer's library is not
  // installed.
  static absl::StatusOr<std::unique_ptr<PeerProcess>> Start(const Peer& peer,
                                                            const std::vector<std::string>& arguments);
  ~PeerProcess();
  PeerProcess(const PeerProcess&) = delete;
  PeerProcess& operator=(const PeerProcess&) = delete;

  absl::StatusOr<Cost> Measure(const std::string& workload);

 private:
  PeerProcess(pid_t pid, UniqueFd socket) : pid_(pid), socket_(std::move(socket)) {}

  const pid_t pid_;
  UniqueFd socket_;
};

// Serves the peer's parent until the parent hangs up.
absl::Status ServePeer(const Peer& peer, const std::string& golden_dir, size_t ops);

}  // namespace vrambroker::bench

#endif  // VRAMBROKER_TESTS_BENCH_PEER_PROCESS_H_
