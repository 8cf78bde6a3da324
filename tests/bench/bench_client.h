// SPDX-License-Identifier: Apache-2.0
//
// A client of the daemon that makes an Allocate + Free pair in one of several ways.
#ifndef VRAMBROKER_TESTS_BENCH_BENCH_CLIENT_H_
#define VRAMBROKER_TESTS_BENCH_BENCH_CLIENT_H_

#include <array>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace vrambroker::bench {

enum class Way { kEmpty, kUnary, kStream, kLibrary };
inline constexpr std::array<Way, 4> kWays = {Way::kEmpty, Way::kUnary, Way::kStream, Way::kLibrary};
const char* WayName(Way way);
inline constexpr uint64_t kBlockBytes = 64 << 10;

class BenchClient {
 public:
  // Connects, and opens a session for every way but kEmpty. The first pair brings a segment, so the cache serves every
  // later pair.
  static absl::StatusOr<std::unique_ptr<BenchClient>> Connect(const std::string& socket_dir, Way way);
  virtual ~BenchClient() = default;

  // Makes an Allocate + Free of kBlockBytes, one after the other. kEmpty: makes two empty calls instead.
  virtual absl::Status Pair() = 0;
};

}  // namespace vrambroker::bench

#endif  // VRAMBROKER_TESTS_BENCH_BENCH_CLIENT_H_
