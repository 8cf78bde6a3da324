// SPDX-License-Identifier: Apache-2.0
//
// Unusual programs: with other preloaded libraries, with sanitizers, and beyond the reach of a preload.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <string>

#include "absl/strings/str_cat.h"
#include "allocator/base/bytes.h"
#include "tests/preload/preload_fixture.h"

namespace vrambroker::testing_support {
namespace {

using ::testing::HasSubstr;

// The driver's answers to one_allocation.c.
constexpr char kGiven[] = "0\n";
constexpr char kOutOfMemory[] = "2\n";

class PreloadOthers : public PreloadTest {
 protected:
  void SetUp() override { StartDaemon("64MiB"); }

  // Allocates 32 MiB under a limit of 16 MiB.
  RunResult Allocate(const std::string& program, const Environment& more = {}, const Arguments& runner = {}) const {
    Environment environment = Preloaded({{"VRAMBROKER_LIMIT", "16MiB"}});
    environment.insert(environment.end(), more.begin(), more.end());
    Arguments arguments = runner;
    arguments.insert(arguments.end(), {program, driver_, absl::StrCat(32_MiB)});
    return RunProgram(arguments, environment);
  }

  static std::string Built(const std::string& name) { return absl::StrCat(PRELOAD_OTHERS_DIR "/", name); }

  std::string driver_ = paths::kEmptyDriver;
};

TEST_F(PreloadOthers, DriverByItsFullPathIsHeld) {
  const RunResult result = Allocate(Built("one_allocation"));
  EXPECT_EQ(result.out, kOutOfMemory) << result.err;
}

TEST_F(PreloadOthers, LibraryThatOverridesDlsymBeforeItOrBehindIt) {
  for (const std::string& order :
       {absl::StrCat(DLSYM_LIBRARY ":", paths::kPreload), absl::StrCat(paths::kPreload, ":" DLSYM_LIBRARY)}) {
    const RunResult result = Allocate(Built("one_allocation"), {{"LD_PRELOAD", order}, {"DLSYM_LIBRARY_REPORT", "1"}});
    EXPECT_EQ(result.out, kOutOfMemory) << order << result.err;
    EXPECT_THAT(result.err, HasSubstr("dlsym_library: ")) << order;
    EXPECT_THAT(result.err, Not(HasSubstr("dlsym_library: 0 calls"))) << order;
  }
}

// --- Sanitizers: their runtimes ask dlsym for functions before the C library's own work ---

#ifdef WITH_SANITIZERS
TEST_F(PreloadOthers, ProgramWithAddressSanitizerIsHeld) {
  const RunResult result = Allocate(Built("one_allocation_asan"), {{"ASAN_OPTIONS", "verify_asan_link_order=0"}});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.out, kOutOfMemory) << result.err;
}

// The shared runtime of g++ may refuse every preloaded library without verify_asan_link_order=0, and says why.
TEST_F(PreloadOthers, AddressSanitizerThatRefusesSaysSo) {
  const RunResult result = Allocate(Built("one_allocation_asan"));
  if (result.exit_code == 0) {
    EXPECT_EQ(result.out, kOutOfMemory) << result.err;
  } else {
    EXPECT_THAT(result.err, HasSubstr("ASan runtime does not come first"));
  }
}

TEST_F(PreloadOthers, ProgramWithThreadSanitizerIsHeld) {
  const RunResult result = Allocate(Built("one_allocation_tsan"));
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.out, kOutOfMemory) << result.err;
}
#endif

// --- Escapes: a preload is no fence, and reconciliation notices the escaped memory ---

TEST_F(PreloadOthers, StaticProgramEscapes) {
  const RunResult result = Allocate(Built("one_allocation_static"));
  EXPECT_EQ(result.out, kGiven) << result.err;
  EXPECT_EQ(result.err, "");
}

TEST_F(PreloadOthers, CleanedEnvironmentEscapes) {
  const RunResult result = Allocate(Built("one_allocation"), {}, {"/usr/bin/env", "-u", "LD_PRELOAD"});
  EXPECT_EQ(result.out, kGiven) << result.err;
  EXPECT_EQ(result.err, "");
}

// The dynamic linker silently ignores LD_PRELOAD for a setuid program.
TEST_F(PreloadOthers, SetuidProgramEscapes) {
  if (geteuid() != 0) GTEST_SKIP() << "making a program of another user's needs root";
  const std::string folder = MakeTempDir();
  const std::string program = folder + "/one_allocation";
  driver_ = folder + "/libcuda.so.1";
  std::filesystem::copy_file(Built("one_allocation"), program);
  std::filesystem::copy_file(paths::kEmptyDriver, driver_);
  ASSERT_EQ(chmod(driver_.c_str(), 0755), 0);
  ASSERT_EQ(chmod(program.c_str(), 0755), 0);
  EXPECT_EQ(Allocate(program).out, kOutOfMemory);
  constexpr uid_t kNobody = 65534;
  ASSERT_EQ(chown(program.c_str(), kNobody, kNobody), 0);
  ASSERT_EQ(chmod(program.c_str(), 04755), 0);
  const RunResult result = Allocate(program);
  EXPECT_EQ(result.out, kGiven) << result.err;
  EXPECT_EQ(result.err, "");
}

}  // namespace
}  // namespace vrambroker::testing_support
