// SPDX-License-Identifier: Apache-2.0
#include "tests/support/util.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <thread>
#include <vector>

#include "tests/support/paths.h"

namespace vrambroker::testing_support {
namespace {

uint64_t Word(uint64_t seed, uint64_t index) {
  uint64_t x = seed * 0x9E3779B97F4A7C15u + index * 0xBF58476D1CE4E5B9u + 1;
  x = (x ^ (x >> 31)) * 0x94D049BB133111EBu;
  return x ^ (x >> 29);
}

// Returns the program of this build. In a bundle, where a build's paths mean nothing, $VRAMBROKER_TEST_BIN names the
// programs' folder.
std::string Program(const char* path) {
  const char* const folder = std::getenv("VRAMBROKER_TEST_BIN");
  if (folder == nullptr || *folder == '\0') return path;
  return (std::filesystem::path(folder) / std::filesystem::path(path).filename()).string();
}

}  // namespace

double PatienceFactor() {
  const char* const text = std::getenv("VRAMBROKER_TEST_PATIENCE");
  if (text == nullptr || *text == '\0') return 1;
  const double factor = std::atof(text);
  if (factor >= 1 && factor <= 100) return factor;
  std::fprintf(stderr, "VRAMBROKER_TEST_PATIENCE is '%s', not a number from 1 to 100\n", text);
  std::abort();
}

bool WaitFor(const std::function<bool()>& condition, absl::Duration timeout) {
  // Tests set the system clock, but not this clock.
  using Clock = std::chrono::steady_clock;
  const auto begin = Clock::now();
  const auto deadline = begin + absl::ToChronoMilliseconds(timeout);
  while (true) {
    const auto look = Clock::now();
    if (condition()) return true;
    const auto now = Clock::now();
    if (now > deadline) return false;
    // A condition may start a program: without pauses, checks of the condition would delay the awaited event.
    const Clock::duration pause = std::max<Clock::duration>(2 * (now - look), (now - begin) / 8);
    std::this_thread::sleep_for(
        std::clamp<Clock::duration>(pause, std::chrono::milliseconds(5), std::chrono::milliseconds(50)));
  }
}

void Fill(void* memory, uint64_t bytes, uint64_t seed, uint64_t start) {
  char* to = static_cast<char*>(memory);
  for (uint64_t at = 0; at < bytes; at += sizeof(uint64_t)) {
    const uint64_t word = Word(seed, start + at);
    std::memcpy(to + at, &word, std::min<uint64_t>(sizeof word, bytes - at));
  }
}

bool Holds(const void* memory, uint64_t bytes, uint64_t seed, uint64_t start) {
  const char* from = static_cast<const char*>(memory);
  for (uint64_t at = 0; at < bytes; at += sizeof(uint64_t)) {
    const uint64_t word = Word(seed, start + at);
    if (std::memcmp(from + at, &word, std::min<uint64_t>(sizeof word, bytes - at)) != 0) return false;
  }
  return true;
}

std::string MakeTempDir() {
  struct Dirs {
    std::vector<std::string> paths;
    ~Dirs() {
      std::error_code ignored;
      for (const std::string& path : paths) std::filesystem::remove_all(path, ignored);
    }
  };
  static Dirs dirs;
  std::string path = "/tmp/vrambroker-test-XXXXXX";
  if (mkdtemp(path.data()) == nullptr || chmod(path.c_str(), 0755) != 0) {
    std::perror("mkdtemp");
    std::abort();
  }
  dirs.paths.push_back(path);
  return path;
}

const char* DaemonProgram() {
  static const auto* const program = new std::string(Program(paths::kDaemon));
  return program->c_str();
}
const char* VramctlProgram() {
  static const auto* const program = new std::string(Program(paths::kVramctl));
  return program->c_str();
}
const char* TestClientProgram() {
  static const auto* const program = new std::string(Program(paths::kTestClient));
  return program->c_str();
}

}  // namespace vrambroker::testing_support
