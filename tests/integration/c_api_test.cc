// SPDX-License-Identifier: Apache-2.0
//
// Programs in C and Python that use libvrambroker.so (tests/support/c_client.c and neighbouring files).
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "tests/support/daemon_test.h"
#include "tests/support/paths.h"
#include "tests/support/raw_client.h"
#include "tests/support/test_device.h"

namespace vrambroker::testing_support {
namespace {

namespace fs = std::filesystem;

class CApiTest : public DaemonTest {
 protected:
  void SetUp() override { ASSERT_OK(StartDaemon()); }

  void CheckRuns(const Arguments& program, Environment environment = {}) {
    environment.emplace_back("VRAMBROKER_SOCKET_DIR", dir());
    const RunResult result = RunProgram(program, environment);
    EXPECT_EQ(result.exit_code, 0) << result.out << result.err;
  }
};

TEST_F(CApiTest, AllocatesWritesAndRefusesWildPointers) {
  CheckRuns({paths::kCClient, "basic"});
}
TEST_F(CApiTest, Remote) {
  CheckRuns({paths::kCClient, "remote"});
}
TEST_F(CApiTest, OptionsAndVersions) {
  CheckRuns({paths::kCClient, "options"});
}
TEST_F(CApiTest, OutOfMemory) {
  CheckRuns({paths::kCClient, "oom"});
}
TEST_F(CApiTest, TheWholeReportOfARefusal) {
  CheckRuns({paths::kCClient, "oom_report_leased"});
  CheckRuns({paths::kCClient, "oom_report_remote"});
}
TEST_F(CApiTest, Recordings) {
  for (const char* scenario : {"recording_leased", "recording_remote"}) {
    const std::string folder = MakeTempDir();
    CheckRuns({paths::kCClient, scenario}, {{"C_CLIENT_FOLDER", folder}});
    const RunResult replayed = RunProgram({VramctlProgram(), "replay", folder + "/of-c.pickle", "--format=json"});
    EXPECT_EQ(replayed.exit_code, 0) << replayed.err;
    EXPECT_TRUE(absl::StrContains(replayed.out, "\"peak_allocated_bytes\": 54784")) << replayed.out;
  }
}
TEST_F(CApiTest, Example) {
  CheckRuns({paths::kCExample});
}

TEST_F(CApiTest, AForkIsRefused) {
  CheckRuns({paths::kCClient, "fork"});
}

TEST_F(CApiTest, NothingOfGrpcIsVisible) {
  CheckRuns({paths::kCClient, "symbols"});
}

TEST_F(CApiTest, AProgramMayHaveAnotherGrpc) {
  if (kSanitized) GTEST_SKIP() << "a sanitizer's malloc() rules RTLD_DEEPBIND out";
  CheckRuns({paths::kCClientOwnGrpc});
}

TEST_F(CApiTest, Python) {
  HOST_DEVICE_ONLY();
  if (*paths::kPython == 0) GTEST_SKIP() << "no Python 3";
  if (kSanitized) GTEST_SKIP() << "Python is built without the sanitizer";
  CheckRuns({paths::kPython, absl::StrCat(paths::kSourceDir, "/tests/support/ctypes_client.py"), paths::kCLibrary});
}

TEST_F(CApiTest, MemoryOutlivesTheDaemon) {
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<ChildProcess> program,
                       ChildProcess::Start({paths::kCClient, "lost"}, {{"VRAMBROKER_SOCKET_DIR", dir()}}));
  ASSERT_OK_AND_ASSIGN(std::string line, program->ReadLine());
  EXPECT_EQ(line, "ready") << program->ErrorText();
  daemon_->Kill();
  ASSERT_OK(program->WriteLine("killed"));
  const absl::StatusOr<std::string> lost = program->ReadLine();
  ASSERT_TRUE(lost.ok()) << program->ErrorText();
  ASSERT_OK(daemon_->Restart());
  ASSERT_OK(program->WriteLine("restarted"));
  ASSERT_OK_AND_ASSIGN(const int exit_code, program->Wait());
  EXPECT_EQ(exit_code, 0) << program->ErrorText();
}

TEST_F(CApiTest, TorchTakesItsNameAndLimitFromTheEnvironment) {
  ASSERT_OK_AND_ASSIGN(
      const std::unique_ptr<ChildProcess> program,
      ChildProcess::Start({paths::kCClient, "torch"}, {{"VRAMBROKER_SOCKET_DIR", dir()},
                                                       // CUDA's ordinals, not the daemon's.
                                                       {"CUDA_VISIBLE_DEVICES", OnSubstitute() ? "1,0" : "0"},
                                                       {"VRAMBROKER_NAME", "torch-job"},
                                                       {"VRAMBROKER_LIMIT", "64MiB"}}));
  const absl::StatusOr<std::string> line = program->ReadLine();
  ASSERT_TRUE(line.ok()) << program->ErrorText();
  EXPECT_EQ(*line, "held");
  ASSERT_OK_AND_ASSIGN(RawClient raw, RawClient::Connect(dir()));
  EXPECT_OK(raw.GetSession(Ref("torch-job")));
  ASSERT_OK(program->WriteLine("end"));
  ASSERT_OK_AND_ASSIGN(const int exit_code, program->Wait());
  EXPECT_EQ(exit_code, 0) << program->ErrorText();
  const std::string err = program->ErrorText();
  EXPECT_TRUE(absl::StrContains(err, "vrambroker_torch_malloc: RESOURCE_EXHAUSTED")) << err;
  EXPECT_EQ(std::count(err.begin(), err.end(), '\n'), 1) << err;
  EXPECT_TRUE(WaitFor([&] { return !raw.GetSession(Ref("torch-job")).ok(); }));
}

// Copies the library into a new folder, with its core beside the library. Returns the path of the library.
fs::path CopyLibrary() {
  const fs::path dir = fs::canonical(MakeTempDir());
  fs::copy_file(paths::kCCore, dir / "libvrambroker-core.so");
  fs::copy_file(paths::kCLibrary, dir / "libvrambroker.so.1");
  return dir / "libvrambroker.so.1";
}

TEST_F(CApiTest, CopiesShareOneCore) {
  if (kSanitized) GTEST_SKIP() << "a sanitizer takes the copies' variables for one another's";
  CheckRuns({paths::kCClientCopies, paths::kCLibrary, CopyLibrary(), CopyLibrary()});
}

TEST(CLibraryTest, ItNamesACoreOfAnotherVersionThatIsInUse) {
  const RunResult result =
      RunProgram({paths::kCClientCopies, paths::kCLibrary},
                 {{"C_CLIENT_OTHER_CORE", paths::kOtherCore}, {"VRAMBROKER_SOCKET_DIR", MakeTempDir()}});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_TRUE(absl::StrContains(result.out, "9: another copy of vrambroker")) << result.out;
  EXPECT_TRUE(absl::StrContains(result.out, absl::StrCat(paths::kOtherCore, ", version 99.9.9, which "))) << result.out;
  EXPECT_TRUE(absl::StrContains(result.out, "let all of the program use the same libvrambroker.so")) << result.out;
}

// A daemon that does not answer does not hold a caller who gives up.
TEST_F(CApiTest, WaitingIsGivenUp) {
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<ChildProcess> program,
                       ChildProcess::Start({paths::kCClient, "give_up"}, {{"VRAMBROKER_SOCKET_DIR", dir()}}));
  for (const char* placement : {"leased", "whole", "remote"}) {
    const absl::StatusOr<std::string> waits = program->ReadLine();
    ASSERT_TRUE(waits.ok() && *waits == placement) << program->ErrorText();
    daemon_->process().Signal(SIGSTOP);
    ASSERT_OK(program->WriteLine("stopped"));
    const absl::StatusOr<std::string> gave_up = program->ReadLine();
    daemon_->process().Signal(SIGCONT);
    ASSERT_TRUE(gave_up.ok() && *gave_up == "given up") << program->ErrorText();
    ASSERT_OK(program->WriteLine("goes on"));
  }
  ASSERT_OK_AND_ASSIGN(const int exit_code, program->Wait());
  EXPECT_EQ(exit_code, 0) << program->ErrorText();
}

TEST(CLibraryTest, TorchWithoutADaemonSaysSoOnce) {
  const RunResult result =
      RunProgram({paths::kCClient, "torch_without_daemon"}, {{"VRAMBROKER_SOCKET_DIR", MakeTempDir()}});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_TRUE(absl::StrContains(result.err, "vrambroker_torch_malloc: UNAVAILABLE: no vrambrokerd")) << result.err;
  EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;
}

// A copy of the library has a missing core, a wrong core, and then the right core beside it.
TEST(CLibraryTest, ItNamesAMissingOrWrongCore) {
  if (kSanitized) GTEST_SKIP() << "a sanitizer wants to be loaded first";
  const fs::path dir = fs::canonical(MakeTempDir());
  const fs::path library = dir / "libvrambroker.so.1";
  const fs::path core = dir / "libvrambroker-core.so";
  fs::copy_file(paths::kCLibrary, library);
  const Environment environment = {{"LD_PRELOAD", library.string()}, {"VRAMBROKER_SOCKET_DIR", dir.string()}};
  RunResult result = RunProgram({paths::kCClient, "connect"}, environment);
  EXPECT_TRUE(absl::StrContains(result.out, absl::StrCat("cannot load ", core.string()))) << result.out << result.err;
  EXPECT_TRUE(absl::StrContains(result.out, "install the same version of it beside libvrambroker.so")) << result.out;
  fs::copy_file(paths::kCLibrary, core);
  result = RunProgram({paths::kCClient, "connect"}, environment);
  EXPECT_TRUE(
      absl::StrContains(result.out, absl::StrCat(core.string(), " and ", library.string(), " have different versions")))
      << result.out << result.err;
  fs::copy_file(paths::kCCore, core, fs::copy_options::overwrite_existing);
  result = RunProgram({paths::kCClient, "connect"}, environment);
  EXPECT_TRUE(absl::StrContains(result.out, "no vrambrokerd")) << result.out << result.err;
}

// A conda environment that is a few years old has such a libstdc++.
TEST(CLibraryTest, ItNamesALibstdcxxThatIsTooOld) {
  if (kSanitized) GTEST_SKIP() << "a sanitizer wants to be loaded first";
  Dl_info info;
  void* const found = dlsym(RTLD_DEFAULT, "__cxa_throw");
  ASSERT_TRUE(found != nullptr && dladdr(found, &info) != 0);
  std::ifstream file(info.dli_fname, std::ios::binary);
  std::string bytes{std::istreambuf_iterator<char>(file), {}};
  ASSERT_GT(absl::StrReplaceAll({{"GLIBCXX_3.4.29", "GLIBCXX_3.4.XX"}, {"GLIBCXX_3.4.30", "GLIBCXX_3.4.YY"}}, &bytes),
            0)
      << info.dli_fname;
  const fs::path old = fs::canonical(MakeTempDir()) / "libstdc++.so.6";
  std::ofstream(old, std::ios::binary) << bytes;
  const RunResult result = RunProgram({paths::kCClient, "connect"}, {{"LD_PRELOAD", old.string()}});
  for (const std::string& part :
       {absl::StrCat("cannot load ", fs::canonical(paths::kCCore).string(), ", because this program's C++ library is "),
        absl::StrCat("too old: ", old.string(), ": version `GLIBCXX_3.4."), std::string("bundle, which brings its own"),
        std::string("conda install 'libstdcxx-ng>=1"), std::string("in LD_PRELOAD")}) {
    EXPECT_TRUE(absl::StrContains(result.out, part)) << part << "\n" << result.out << result.err;
  }
}

}  // namespace
}  // namespace vrambroker::testing_support
