// SPDX-License-Identifier: Apache-2.0
//
// A daemon on the substitute's GPUs, and programs unaware of vrambroker.
#ifndef VRAMBROKER_TESTS_PRELOAD_PRELOAD_FIXTURE_H_
#define VRAMBROKER_TESTS_PRELOAD_PRELOAD_FIXTURE_H_

#include <gtest/gtest.h>

#include <cstdlib>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "tests/cuda_substitute/substitute.h"
#include "tests/support/child_process.h"
#include "tests/support/daemon_process.h"
#include "tests/support/paths.h"
#include "tests/support/test_device.h"

namespace vrambroker::testing_support {

inline constexpr uint64_t kMiB = uint64_t{1} << 20;

// Names of the packing driver's devices.
inline constexpr char kPackingUuid[] = "GPU-11111111-1111-1111-1111-111111111111";
inline constexpr char kSecondPackingUuid[] = "GPU-22222222-2222-2222-2222-222222222222";

// Returns the answer to "info".
inline std::string Info(uint64_t free_mib, uint64_t total_mib) {
  return absl::StrCat("0 ", free_mib * kMiB, " ", total_mib * kMiB);
}

// A running probe (probe.c).
class Program {
 public:
  explicit Program(std::unique_ptr<ChildProcess> process) : process_(std::move(process)) {}

  void Tell(const std::string& command) { ASSERT_TRUE(process_->WriteLine(command).ok()) << ErrorText(); }
  std::string Hear() {
    const absl::StatusOr<std::string> line = process_->ReadLine();
    return line.ok() ? *line : line.status().ToString() + ErrorText();
  }
  std::string Ask(const std::string& command) {
    Tell(command);
    return Hear();
  }
  std::string ErrorText() const { return process_->ErrorText(); }
  ChildProcess& process() { return *process_; }

 private:
  std::unique_ptr<ChildProcess> process_;
};

inline std::string FolderOf(const std::string& file) {
  return file.substr(0, file.rfind('/'));
}

class PreloadTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    setenv("VRAMBROKER_TEST_DEVICE", "substitute", 1);
    OnSubstitute(&machine());
  }

  static std::string& machine() {
    static std::string& folder = *new std::string;
    return folder;
  }

  void StartDaemon(const std::string& capacity, const std::string& config = "") {
    absl::StatusOr<std::unique_ptr<DaemonProcess>> daemon =
        DaemonProcess::Start({.capacity = capacity, .config = config, .devices = kSubstituteDevices});
    ASSERT_TRUE(daemon.ok()) << daemon.status();
    daemon_ = *std::move(daemon);
  }
  DaemonProcess& daemon() { return *daemon_; }

  // Returns the environment of a program with the library.
  Environment Preloaded(const Environment& more = {}) const {
    Environment environment = {{"LD_PRELOAD", paths::kPreload},
                               {"LD_LIBRARY_PATH", FolderOf(paths::kPlainCudaSubstitute)}};
    if (daemon_ != nullptr) environment.emplace_back("VRAMBROKER_SOCKET_DIR", daemon_->socket_dir());
    environment.insert(environment.end(), more.begin(), more.end());
    return environment;
  }
  Program Run(const std::string& route, const Environment& more = {}) const {
    const char* const program = route == "linked" ? paths::kPreloadProbeLinked : paths::kPreloadProbe;
    return Program(ChildProcess::Start({program, route}, Preloaded(more)).value());
  }

  uint64_t UsedOnMachine() const { return cuda_substitute::UsedBytes(machine(), 0); }

 private:
  std::unique_ptr<DaemonProcess> daemon_;
};

}  // namespace vrambroker::testing_support

#endif  // VRAMBROKER_TESTS_PRELOAD_PRELOAD_FIXTURE_H_
