// SPDX-License-Identifier: Apache-2.0
//
// Test of tests/gpu/unmodified.py, the checks of unmodified PyTorch: runs the checks' logic with a stand-in for PyTorch
// on the substitute for NVIDIA's driver.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "absl/strings/str_cat.h"
#include "allocator/base/bytes.h"
#include "tests/cuda_substitute/substitute.h"
#include "tests/support/any_library.h"
#include "tests/support/child_process.h"
#include "tests/support/paths.h"
#include "tests/support/test_device.h"
#include "tests/support/util.h"

namespace vrambroker::testing_support {
namespace {

using Json = nlohmann::json;

std::string FolderOf(const std::string& file) {
  return std::filesystem::path(file).parent_path();
}

const std::string& StandIn() {
  static const std::string& folder = *new std::string(absl::StrCat(paths::kSourceDir, "/tests/gpu/fake_torch"));
  return folder;
}

// Runs the checks with the folder `torch` on Python's module path. Returns the results by name.
std::map<std::string, Json> Check(const std::string& torch, const std::string& preload = paths::kPreload) {
  const std::string machine = MakeTempDir();
  cuda_substitute::MakeMachine(machine, {.devices = 1, .device_bytes = 16_GiB, .context_bytes = 300_MiB});
  // The checks' programs are built without sanitizers, and load the substitutes from this folder.
  const std::string libraries = MakeTempDir();
  std::filesystem::copy_file(paths::kCudaSubstitute, libraries + "/libcuda.so.1");
  std::filesystem::copy_file(paths::kNvmlSubstitute, libraries + "/libnvidia-ml.so.1");
  const std::string out = MakeTempDir() + "/checks.json";
  const RunResult result = RunProgram(
      {paths::kPython, "-B", absl::StrCat(paths::kSourceDir, "/tests/gpu/unmodified.py"), "--out", out, "--preload",
       preload, "--programs", FolderOf(paths::kDaemon), FolderOf(paths::kVramctl), "--seconds", "1200"},
      {{cuda_substitute::kMachineVariable, machine},
       {"LD_LIBRARY_PATH", libraries},
       {"PYTHONPATH", torch},
       {"CUDA_VISIBLE_DEVICES", "0"},
       {"VRAMBROKER_TEST_PATIENCE", "5"}});
  std::ifstream file(out);
  const Json document = Json::parse(file, nullptr, /*allow_exceptions=*/false);
  EXPECT_TRUE(document.is_object()) << result.out << result.err;
  std::map<std::string, Json> checks;
  if (document.is_object()) {
    for (const Json& check : document["checks"]) checks[check["name"]] = check;
  }
  return checks;
}

TEST(UnmodifiedChecksTest, WithAStandInForPyTorchTheyAreOk) {
  const std::map<std::string, Json> checks = Check(StandIn());
  EXPECT_EQ(checks.size(), 10u);
  for (const auto& [name, check] : checks) {
    const bool needs_more = name == "cuda_graph" || name == "all_reduce";
    EXPECT_EQ(check["result"], needs_more ? "not_run" : "ok") << check.dump(1);
  }
}

TEST(UnmodifiedChecksTest, AProgramThatNobodyCountsFailsThem) {
  for (const auto& [name, check] : Check(StandIn(), AnyLibrary())) {
    const bool needs_more = name == "cuda_graph" || name == "all_reduce" || check["kind"] == "experiment";
    EXPECT_EQ(check["result"] == "fail", !needs_more) << check.dump(1);
  }
}

TEST(UnmodifiedChecksTest, WithoutPyTorchNothingIsRun) {
  const std::string broken = MakeTempDir();
  std::filesystem::create_directory(broken + "/torch");
  std::ofstream(broken + "/torch/__init__.py") << "raise ImportError('none here')\n";
  for (const auto& [name, check] : Check(broken)) {
    EXPECT_EQ(check["result"], "not_run") << name;
    EXPECT_EQ(check["detail"], "no PyTorch: none here") << name;
  }
}

}  // namespace
}  // namespace vrambroker::testing_support
