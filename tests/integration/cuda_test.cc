// SPDX-License-Identifier: Apache-2.0
//
// Particulars of CUDA: versions, ordinals, other programs on the GPU, and every call that can fail.
// cuda_streams_test.cc covers streams. The tests run over the substitute of tests/cuda_substitute; tests/gpu tries the
// same on a GPU.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "allocator/base/bytes.h"
#include "client/session/visible_devices.h"
#include "tests/cuda_substitute/driver.h"
#include "tests/cuda_substitute/substitute.h"
#include "tests/integration/cuda_fixture.h"
#include "tests/support/buffers.h"
#include "tests/support/paths.h"
#include "tests/support/test_device.h"

namespace vrambroker::testing_support {
namespace {

using cuda_substitute::MachineOptions;
using cuda_substitute::ThreadsGpu;
using cuda_substitute::UseGpu;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// ---- Starting ----

class CudaStartTest : public ::testing::Test {
 protected:
  void SetUp() override { ASSERT_TRUE(OnSubstitute()); }
  // Runs a daemon until its end, on the given machine, or without a machine.
  static RunResult Run(const std::string& machine, Arguments flags, Environment environment = {}) {
    environment.emplace_back(cuda_substitute::kMachineVariable, machine);
    Arguments arguments = {DaemonProgram(), "--socket_dir=" + MakeTempDir(), "--http_address=off"};
    arguments.insert(arguments.end(), flags.begin(), flags.end());
    return RunProgram(arguments, environment);
  }
  static std::string FolderOf(const std::string& file) { return file.substr(0, file.rfind('/')); }
  // Makes a folder with a libcuda.so.1 that is no library.
  static std::string NoLibrary() {
    std::string folder = MakeTempDir();
    std::ofstream(folder + "/libcuda.so.1") << "text";
    return folder;
  }
  static std::string MakeMachine(const MachineOptions& options) {
    std::string folder = MakeTempDir();
    cuda_substitute::MakeMachine(folder, options);
    return folder;
  }
  // Runs a daemon until the daemon serves. Returns the daemon's log.
  static std::string LogOf(const std::string& machine, const std::string& flag) {
    const absl::StatusOr<std::unique_ptr<ChildProcess>> daemon = ChildProcess::Start(
        {DaemonProgram(), "--socket_dir=" + MakeTempDir(), "--http_address=off", "--device=cuda", flag},
        {{cuda_substitute::kMachineVariable, machine}});
    if (!daemon.ok()) return daemon.status().ToString();
    EXPECT_TRUE(
        WaitFor([&] { return absl::StrContains((*daemon)->ErrorText(), "daemon ready") || !(*daemon)->Running(); }));
    (*daemon)->Signal(SIGTERM);
    EXPECT_EQ((*daemon)->Wait().value_or(-1), 0) << (*daemon)->ErrorText();
    return (*daemon)->ErrorText();
  }
};

TEST_F(CudaStartTest, RefusesWhatItCannotServe) {
  struct Case {
    std::string name;
    std::string machine;
    Environment environment;
    std::vector<std::string> said;
  };
  const std::vector<Case> cases = {
      {"no driver",
       "",
       {{"LD_LIBRARY_PATH", ""}},
       {"no NVIDIA driver is installed (libcuda.so.1 not found)", "--device=host needs no GPU"}},
      {"a driver that lacks something",
       "",
       {{"LD_LIBRARY_PATH", FolderOf(paths::kOldDriver)}},
       {"the NVIDIA driver is too old: ", paths::kOldDriver, "for CUDA 11.2, has no cu",
        "install driver 525 or later"}},
      {"a driver that cannot be loaded",
       "",
       {{"LD_LIBRARY_PATH", NoLibrary()}},
       {"the NVIDIA driver's library cannot be loaded", "libcuda.so.1"}},
      {"no GPU", "", {}, {"cuInit failed: CUDA_ERROR_NO_DEVICE (100)", "the driver sees no GPU"}},
      {"nothing visible",
       MakeMachine({}),
       {{"CUDA_VISIBLE_DEVICES", ""}},
       {"CUDA_ERROR_NO_DEVICE", "CUDA_VISIBLE_DEVICES"}},
      {"one process only",
       MakeMachine({.compute_mode = CU_COMPUTEMODE_EXCLUSIVE_PROCESS}),
       {},
       {"GPU 0 is in the compute mode EXCLUSIVE_PROCESS", "no client", "nvidia-smi -i GPU-", "-c DEFAULT"}},
      {"no process",
       MakeMachine({.compute_mode = CU_COMPUTEMODE_PROHIBITED}),
       {},
       {"compute mode PROHIBITED", "admits no process", "nvidia-smi -i GPU-", "-c DEFAULT"}},
      {"memory that cannot be shared",
       MakeMachine({}),
       {{cuda_substitute::kFaultsVariable, "cuIpcGetMemHandle:1+=801"}},
       {"cannot be shared", "cuIpcGetMemHandle", "CUDA_ERROR_NOT_SUPPORTED", "WSL2"}},
      {"a broken GPU",
       MakeMachine({}),
       {{cuda_substitute::kFaultsVariable, "cuMemAlloc:1+=214!"}},
       {"cuMemAlloc", "CUDA_ERROR_ECC_UNCORRECTABLE (214)", "Xid"}},
      {"a full GPU", MakeMachine({.device_bytes = 512_MiB}), {}, {"nothing is left", "headroom is 1.00 GiB"}},
  };
  // A daemon without the substitute finds this computer's own driver, if the computer has a driver.
  const bool has_driver =
      RunProgram({paths::kPython, "-c", "import ctypes; ctypes.CDLL('libcuda.so.1')"}, {{"LD_LIBRARY_PATH", ""}})
          .exit_code == 0;
  for (const Case& c : cases) {
    SCOPED_TRACE(c.name);
    if (c.name == "no driver" && has_driver) continue;
    const RunResult result = Run(c.machine, {"--device=cuda"}, c.environment);
    EXPECT_NE(result.exit_code, 0);
    for (const std::string& text : c.said) EXPECT_THAT(result.err, HasSubstr(text));
  }
}

TEST_F(CudaStartTest, CapacityIsWhatIsFreeLessHeadroom) {
  const std::string machine = MakeMachine({.device_bytes = 8_GiB, .context_bytes = 300_MiB});
  const std::string log = LogOf(machine, "--log_level=info");
  EXPECT_THAT(log, HasSubstr("cuda=\"driver for CUDA 13.0\""));
  EXPECT_THAT(log, HasSubstr(absl::StrCat("total=", 8_GiB, " capacity=", 8_GiB - 300_MiB - 1_GiB)))
      << "the daemon's own context counts";
  EXPECT_THAT(LogOf(machine, "--capacity=8GiB"), HasSubstr("is more than the 7.71 GiB that are free now"));
  EXPECT_EQ(cuda_substitute::UsedBytes(machine, 0), 0u);
}

// The daemon makes the first two calls at its start. Then the daemon looks every two seconds, and ends at the third bad
// look.
TEST_F(CudaStartTest, ADriverThatDoesNotAnswerAsItShouldEndsTheDaemon) {
  const RunResult result = Run(MakeMachine({.device_bytes = 8_GiB}), {"--device=cuda", "--capacity=256MiB"},
                               {{cuda_substitute::kFaultsVariable, "cuMemGetInfo:3+=999"}});
  EXPECT_EQ(result.exit_code, 3) << result.err;
  EXPECT_THAT(result.err, HasSubstr("daemon ready"));
  EXPECT_THAT(result.err, HasSubstr("no device can be used any more: device 0: cuMemGetInfo failed"));
  EXPECT_EQ(std::vector<std::string>(absl::StrSplit(result.err, "device cannot be used: ")).size(), 2u) << "once";
}

// ---- Serving ----

TEST_F(CudaTest, DevicesAreMatchedByUuid) {
  ASSERT_OK(StartDaemon());
  ASSERT_OK_AND_ASSIGN(Client client, Connect("client"));
  int count = 0;
  ASSERT_EQ(cuInit(0), CUDA_SUCCESS);
  ASSERT_EQ(cuDeviceGetCount(&count), CUDA_SUCCESS);
  ASSERT_EQ(count, 2) << "the daemon serves one of two";
  ASSERT_EQ(client.devices().size(), 1u);
  ASSERT_OK_AND_ASSIGN(Buffer buffer, client.Allocate(8_MiB));
  Fill(buffer, 1);
  EXPECT_TRUE(Holds(buffer, 1));
  EXPECT_EQ(Used(), 20_MiB) << "a segment for large blocks";
  EXPECT_EQ(cuda_substitute::UsedBytes(Machine(), 0), 0u);
}

TEST_F(CudaTest, ADeviceThatTheClientDoesNotSee) {
  ASSERT_OK(StartDaemon());
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<ChildProcess> child,
                       ChildProcess::Start({VramctlProgram(), "hold", "2MiB", "--socket_dir=" + dir()},
                                           {{"CUDA_VISIBLE_DEVICES", "0"}}));
  EXPECT_NE(child->Wait().value_or(0), 0);
  EXPECT_THAT(child->ErrorText(), HasSubstr("is not visible to this process; see CUDA_VISIBLE_DEVICES"));
}

// The daemon has the GPUs in the other order.
TEST_F(CudaTest, AClientNamesTheGpusThatItSees) {
  ASSERT_OK(StartDaemon({.devices = 2}));
  const auto has = [&](const std::string& name, const Environment& environment) {
    const Arguments hold = {VramctlProgram(), "hold", "2MiB", "--device=1", "--name=" + name, "--socket_dir=" + dir()};
    const absl::StatusOr<std::unique_ptr<ChildProcess>> child = ChildProcess::Start(hold, environment);
    EXPECT_OK(child);
    std::vector<bool> devices;
    EXPECT_TRUE(WaitFor([&] {
      const Json sessions = CtlJson({"sessions"})["sessions"];
      for (const Json& session : sessions) {
        if (session["name"] != name || session["devices"][1]["reserved_bytes"] == 0) continue;
        for (const Json& device : session["devices"]) devices.push_back(device["limit_bytes"] > 0);
      }
      return !devices.empty();
    }));
    return devices;
  };
  EXPECT_THAT(has("all", {}), ElementsAre(true, true));
  EXPECT_THAT(has("one", {{"CUDA_VISIBLE_DEVICES", "0"}}), ElementsAre(false, true));
  EXPECT_THAT(has("named", {{"CUDA_VISIBLE_DEVICES", "0"}, {"VRAMBROKER_DEVICES", "1,0"}}), ElementsAre(true, true));
}

// VisibleDevices() starts CUDA only where a variable may hide GPUs: a program may fork before the program starts CUDA.
// The channel leads nowhere, so a question to the daemon fails.
TEST(VisibleDevicesTest, TheDaemonIsAskedWhereAVariableMayHideGpus) {
  const auto nowhere = grpc::CreateChannel("unix:/nowhere/vrambroker.sock", grpc::InsecureChannelCredentials());
  const auto asks = [&](const char* name, const char* value) {
    for (const char* each : {"CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"}) unsetenv(each);
    setenv(name, value, 1);
    const absl::Status status = client_internal::VisibleDevices(nowhere, absl::Seconds(10)).status();
    unsetenv(name);
    return !status.ok();
  };
  EXPECT_FALSE(asks("NVIDIA_VISIBLE_DEVICES", "all"));
  EXPECT_TRUE(asks("NVIDIA_VISIBLE_DEVICES", "GPU-1"));
  EXPECT_TRUE(asks("CUDA_VISIBLE_DEVICES", "0"));
}

TEST_F(CudaTest, TheThreadsDeviceStaysAsItWas) {
  ASSERT_OK(StartDaemon());
  ASSERT_OK_AND_ASSIGN(Client client, Connect("client"));
  for (const int device : {-1, 0, 1}) {
    ASSERT_EQ(UseGpu(device), CUDA_SUCCESS);
    ASSERT_OK_AND_ASSIGN(Buffer buffer, client.Allocate(4_MiB));
    Fill(buffer, 1);
    EXPECT_OK(buffer.Reset());
    EXPECT_OK(client.EmptyCache());
    EXPECT_EQ(ThreadsGpu(), device);
  }
}

TEST_F(CudaTest, AnotherProgramTakesTheMemory) {
  size_t free = 0;
  size_t total = 0;
  ASSERT_OK(StartDaemon());
  ASSERT_OK_AND_ASSIGN(Client client, Connect("client"));
  CUdeviceptr others = 0;
  ASSERT_EQ(UseGpu(kDaemonsGpu), CUDA_SUCCESS);
  ASSERT_EQ(cuMemGetInfo_v2(&free, &total), CUDA_SUCCESS);
  ASSERT_EQ(cuMemAlloc_v2(&others, free - 4_MiB), CUDA_SUCCESS);
  EXPECT_STATUS(client.Allocate(20_MiB), absl::StatusCode::kResourceExhausted, "");
  ASSERT_EQ(cuMemFree_v2(others), CUDA_SUCCESS);
  EXPECT_OK(client.Allocate(20_MiB));
  ASSERT_EQ(UseGpu(0), CUDA_SUCCESS);
}

TEST_F(CudaTest, AHandleIsOpenedOncePerSegment) {
  ASSERT_OK(StartDaemon());
  ASSERT_OK_AND_ASSIGN(Client client, Connect("client"));
  const uint64_t before = cuda_substitute::Calls("cuIpcOpenMemHandle");
  std::vector<Buffer> buffers;
  for (int i = 0; i < 100; ++i) {
    ASSERT_OK_AND_ASSIGN(Buffer buffer, client.Allocate(64_KiB));
    buffers.push_back(std::move(buffer));
  }
  EXPECT_EQ(Reserved(client), 8_MiB);
  EXPECT_EQ(cuda_substitute::Calls("cuIpcOpenMemHandle") - before, 4u);
}

TEST_F(CudaTest, MemoryOfAKilledDaemonLivesAsLongAsItIsOpen) {
  ASSERT_OK(StartDaemon());
  ASSERT_OK_AND_ASSIGN(Client client, Connect("client"));
  ASSERT_OK_AND_ASSIGN(Buffer buffer, client.Allocate(30_MiB));
  Fill(buffer, 3);
  daemon_->Kill();
  EXPECT_TRUE(Holds(buffer, 3));
  EXPECT_EQ(Used(), 30_MiB);
  EXPECT_OK(buffer.Reset());
  EXPECT_TRUE(WaitFor([&] {
    (void)client.EmptyCache();
    return Used() == 0;
  })) << "nobody is left who has it";
}

// ---- Failing calls ----

// A call that fails once leads to an error for the caller, and to no other harm.
struct Fault {
  const char* fault;
  absl::StatusCode code;
  const char* said;
};

void PrintTo(const Fault& fault, std::ostream* out) {
  *out << fault.fault;
}

class CudaFaultTest : public CudaTest, public ::testing::WithParamInterface<Fault> {};

std::string FaultName(const ::testing::TestParamInfo<Fault>& info) {
  std::string name = info.param.fault;
  for (char& c : name) {
    if (!absl::ascii_isalnum(static_cast<unsigned char>(c))) c = '_';
  }
  return name;
}

class CudaDaemonFaultTest : public CudaFaultTest {};

TEST_P(CudaDaemonFaultTest, IsToldAndNothingIsLost) {
  const auto& [fault, code, said] = GetParam();
  ASSERT_OK(StartDaemon({.config = "idle_limit: '0' rules { session_name: 'other' tenant: 'other' }",
                         .environment = {{cuda_substitute::kFaultsVariable, fault}}}));
  {
    // The driver gets memory of another tenant back: the daemon zeroes memory that the driver gives from now on.
    ASSERT_OK_AND_ASSIGN(Client other, Connect("other"));
    EXPECT_OK(other.Allocate(2_MiB));
  }
  EXPECT_TRUE(WaitFor([&] { return Used() == 0; }));
  ASSERT_OK_AND_ASSIGN(Client client, Connect("client"));
  ASSERT_OK_AND_ASSIGN(Buffer first, client.Allocate(30_MiB));
  Fill(first, 1);
  EXPECT_STATUS(client.Allocate(50_MiB), code, said);
  EXPECT_TRUE(Holds(first, 1));
  EXPECT_EQ(Charged(), 30_MiB);
  EXPECT_EQ(Used(), 30_MiB);
  ASSERT_OK_AND_ASSIGN(Buffer second, client.Allocate(50_MiB));
  Fill(second, 2);
  EXPECT_TRUE(Holds(second, 2));
  EXPECT_EQ(CtlJson({"status"})["devices"][0]["fault"], "");
}

// The daemon makes its first calls for itself, at the start, except for the calls that zero memory. The next calls are
// for the other client, and for the client's first segment.
INSTANTIATE_TEST_SUITE_P(
    Calls, CudaDaemonFaultTest,
    ::testing::Values(Fault{"cuMemAlloc:4=46", absl::StatusCode::kUnavailable,
                            "cuMemAlloc failed: CUDA_ERROR_DEVICE_UNAVAILABLE (46)"},
                      Fault{"cuMemAlloc:4=1", absl::StatusCode::kInvalidArgument,
                            "cuMemAlloc failed: CUDA_ERROR_INVALID_VALUE (1)"},
                      Fault{"cuMemAlloc:4=998", absl::StatusCode::kInternal, "cuMemAlloc failed"},
                      Fault{"cuMemsetD8Async:2=1", absl::StatusCode::kInvalidArgument, "cuMemsetD8Async failed"},
                      Fault{"cuStreamSynchronize:2=998", absl::StatusCode::kInternal, "cuStreamSynchronize failed"},
                      Fault{"cuIpcGetMemHandle:4=801", absl::StatusCode::kUnimplemented,
                            "cuIpcGetMemHandle failed: CUDA_ERROR_NOT_SUPPORTED (801)"}),
    FaultName);

class CudaClientFaultTest : public CudaFaultTest {};

TEST_P(CudaClientFaultTest, IsToldAndNothingIsLost) {
  const auto& [fault, code, said] = GetParam();
  ASSERT_OK(StartDaemon());
  ASSERT_OK_AND_ASSIGN(Client client, Connect("client"));
  ASSERT_OK_AND_ASSIGN(Buffer first, client.Allocate(30_MiB));
  Fill(first, 1);
  cuda_substitute::SetFaults(fault);
  EXPECT_STATUS(client.Allocate(50_MiB), code, said);
  EXPECT_TRUE(Holds(first, 1));
  EXPECT_TRUE(WaitFor([&] { return CtlJson({"sessions"})["sessions"][0]["devices"][0]["reserved_bytes"] == 30_MiB; }));
  ASSERT_OK_AND_ASSIGN(Buffer second, client.Allocate(50_MiB));
  Fill(second, 2);
  EXPECT_TRUE(Holds(second, 2));
}

INSTANTIATE_TEST_SUITE_P(
    Calls, CudaClientFaultTest,
    ::testing::Values(Fault{"cuIpcOpenMemHandle:1=205", absl::StatusCode::kUnavailable, "CUDA_ERROR_MAP_FAILED (205)"},
                      Fault{"cuIpcOpenMemHandle:1=201", absl::StatusCode::kFailedPrecondition, "pid namespace"},
                      Fault{"cuIpcOpenMemHandle:1=2", absl::StatusCode::kInternal, "CUDA_ERROR_OUT_OF_MEMORY (2)"},
                      Fault{"cuCtxPushCurrent:1=998", absl::StatusCode::kInternal, "cuCtxPushCurrent failed"}),
    FaultName);

TEST_F(CudaTest, WhatTheDriverDoesNotTakeBackIsTriedAgain) {
  // The daemon makes the first call for itself, at its start.
  ASSERT_OK(StartDaemon({.config = "idle_decay: \"0s\"",
                         .environment = {{cuda_substitute::kFaultsVariable, "cuMemFree:2=998,cuMemFree:3=998"}}}));
  ASSERT_OK_AND_ASSIGN(Client client, Connect("client"));
  ASSERT_OK_AND_ASSIGN(Buffer buffer, client.Allocate(30_MiB));
  EXPECT_OK(buffer.Reset());
  EXPECT_OK(client.EmptyCache());
  EXPECT_TRUE(WaitFor([&] { return Used() == 0; }));
  EXPECT_TRUE(WaitFor([&] { return Charged() == 0; }));
  EXPECT_THAT(daemon_->log(), HasSubstr("back to the driver, will try again: "));
}

// The client is a separate process, which keeps the memory to its end.
TEST_F(CudaTest, WhatAClientCannotCloseAtItsEndStaysCharged) {
  ASSERT_OK(StartDaemon());
  for (const char* placement : {"", " remote"}) {
    SCOPED_TRACE(placement);
    ASSERT_OK_AND_ASSIGN(
        ClientProcess client,
        ClientProcess::Start(dir(), {{cuda_substitute::kFaultsVariable, "cuIpcCloseMemHandle:1+=998"}}));
    ASSERT_OK(client.Call(absl::StrCat("connect client -", placement)));
    ASSERT_OK(client.Call(absl::StrCat("alloc ", 30_MiB)));
    ASSERT_OK(client.Call("goodbye"));
    EXPECT_EQ(CtlJson({"sessions"})["sessions"][0]["devices"][0]["reserved_bytes"], 30_MiB);
    EXPECT_EQ(Used(), 30_MiB);
    client.process().Signal(SIGKILL);
    EXPECT_TRUE(WaitFor([&] { return Charged() == 0; }));
  }
}

TEST_F(CudaTest, WhatARemoteClientCannotCloseStaysCharged) {
  ASSERT_OK(StartDaemon());
  placement_ = Placement::kRemote;
  ASSERT_OK_AND_ASSIGN(Client client, Connect("client"));
  ASSERT_OK_AND_ASSIGN(Buffer buffer, client.Allocate(30_MiB));
  cuda_substitute::SetFaults("cuEventSynchronize:1+=998");
  EXPECT_OK(buffer.Reset());
  EXPECT_OK(client.EmptyCache());
  EXPECT_TRUE(WaitFor([] { return cuda_substitute::Calls("cuEventSynchronize") > 0; }));
  EXPECT_EQ(Charged(), 30_MiB);
  EXPECT_EQ(CtlJson({"sessions"})["sessions"][0]["devices"][0]["reserved_bytes"], 30_MiB);
  cuda_substitute::SetFaults("");
  // The first segment goes back with the next segment that the daemon asks back.
  ASSERT_OK_AND_ASSIGN(Buffer other, client.Allocate(50_MiB));
  EXPECT_OK(other.Reset());
  EXPECT_OK(client.EmptyCache());
  EXPECT_TRUE(WaitFor([&] { return CtlJson({"sessions"})["sessions"][0]["devices"][0]["reserved_bytes"] == 0; }));
}

TEST_F(CudaTest, WhatTheClientCannotCloseIsTriedAgain) {
  for (const char* fault : {"cuIpcCloseMemHandle:1+=998", "cuEventRecord:1+=998", "cuEventSynchronize:1+=998"}) {
    SCOPED_TRACE(fault);
    if (daemon_ == nullptr) {
      ASSERT_OK(StartDaemon());
    }
    ASSERT_OK_AND_ASSIGN(Client client, Connect("client"));
    ASSERT_OK_AND_ASSIGN(Buffer buffer, client.Allocate(30_MiB));
    EXPECT_OK(buffer.Reset());
    cuda_substitute::SetFaults(fault);
    EXPECT_OK(client.EmptyCache());
    EXPECT_EQ(CtlJson({"sessions"})["sessions"][0]["devices"][0]["reserved_bytes"], 30_MiB)
        << "charged while it is open";
    EXPECT_EQ(Used(), 30_MiB);
    cuda_substitute::SetFaults("");
    EXPECT_TRUE(WaitFor([&] { return CtlJson({"sessions"})["sessions"][0]["devices"][0]["reserved_bytes"] == 0; }))
        << "without being asked again";
  }
}

// ---- Errors that stay ----

TEST_F(CudaTest, ALostDeviceIsReported) {
  ASSERT_OK(StartDaemon({.config = "device_lost: \"stay\"",
                         .http = true,
                         .environment = {{cuda_substitute::kFaultsVariable, "cuMemAlloc:3=214!"}}}));
  ASSERT_OK_AND_ASSIGN(Client client, Connect("client"));
  ASSERT_OK_AND_ASSIGN(Buffer held, client.Allocate(30_MiB));
  Fill(held, 1);
  EXPECT_EQ(HealthCode(), 200);
  EXPECT_STATUS(client.Allocate(50_MiB), absl::StatusCode::kInternal, "CUDA_ERROR_ECC_UNCORRECTABLE (214)");
  EXPECT_STATUS(client.Allocate(50_MiB), absl::StatusCode::kInternal, "can no longer use the GPU");
  EXPECT_TRUE(WaitFor([&] { return HealthCode() == 503; }));
  ASSERT_OK_AND_ASSIGN(const HttpAnswer health, daemon_->Get("/healthz"));
  EXPECT_THAT(health.body, HasSubstr("device 0: cuMemAlloc failed"));
  EXPECT_EQ(daemon_->Metrics().Value("vrambroker_device_healthy", {{"gpu", "0"}}), 0);
  EXPECT_THAT(CtlJson({"status"})["devices"][0]["fault"], HasSubstr("CUDA_ERROR_ECC_UNCORRECTABLE"));
  EXPECT_THAT(Ctl({"status"}).out, HasSubstr("Device 0 cannot be used: cuMemAlloc failed"));
  EXPECT_TRUE(WaitFor([&] { return absl::StrContains(daemon_->log(), "device cannot be used: "); }));
  EXPECT_TRUE(Holds(held, 1)) << "what is held stays usable";
  const auto looks = [&] {
    return daemon_->Metrics()
        .Value("vrambroker_device_call_duration_seconds_count", {{"gpu", "0"}, {"call", "health"}})
        .value_or(0);
  };
  const double before = looks();
  EXPECT_TRUE(WaitFor([&] { return looks() >= before + 4; }));
  EXPECT_TRUE(daemon_->Running()) << "as it was told to";
  EXPECT_OK(held.Reset());
}

// The daemon makes the first two calls at its start.
TEST_F(CudaTest, ADriverThatDoesNotAnswerAsItShouldIsReported) {
  ASSERT_OK(StartDaemon({.config = "device_lost: \"stay\"",
                         .http = true,
                         .environment = {{cuda_substitute::kFaultsVariable, "cuMemGetInfo:3+=999"}}}));
  EXPECT_TRUE(WaitFor([&] { return HealthCode() == 503; }));
  ASSERT_OK_AND_ASSIGN(const HttpAnswer health, daemon_->Get("/healthz"));
  EXPECT_THAT(health.body, HasSubstr("device 0: cuMemGetInfo failed: CUDA_ERROR_UNKNOWN (999)"));
  EXPECT_EQ(daemon_->Metrics().Value("vrambroker_device_healthy", {{"gpu", "0"}}), 0);
  EXPECT_THAT(CtlJson({"status"})["devices"][0]["fault"], HasSubstr("CUDA_ERROR_UNKNOWN"));
  ASSERT_OK_AND_ASSIGN(Client client, Connect("client"));
  const absl::Status refused = client.Allocate(50_MiB).status();
  EXPECT_STATUS(refused, absl::StatusCode::kInternal, "nobody gets more of the daemon's device 0 (");
  EXPECT_STATUS(refused, absl::StatusCode::kInternal, "CUDA_ERROR_UNKNOWN (999)");
  EXPECT_STATUS(refused, absl::StatusCode::kInternal, "vrambrokerd has to be restarted");
}

TEST_F(CudaTest, ADaemonThatHasLostItsDeviceEnds) {
  ASSERT_OK(StartDaemon(
      {.config = "drain_timeout: \"5s\"", .environment = {{cuda_substitute::kFaultsVariable, "cuMemAlloc:3=214!"}}}));
  ASSERT_OK_AND_ASSIGN(Client client, Connect("client"));
  ASSERT_OK_AND_ASSIGN(Buffer held, client.Allocate(30_MiB));
  Fill(held, 1);
  EXPECT_STATUS(client.Allocate(50_MiB), absl::StatusCode::kInternal, "CUDA_ERROR_ECC_UNCORRECTABLE (214)");

  EXPECT_EQ(daemon_->process().Wait().value_or(-1), 3) << daemon_->log();
  EXPECT_THAT(daemon_->log(), HasSubstr("no device can be used any more: device 0: cuMemAlloc failed"));
  EXPECT_EQ(std::vector<std::string>(absl::StrSplit(daemon_->log(), "device cannot be used: ")).size(), 2u) << "once";
  EXPECT_TRUE(WaitFor([&] { return !client.status().ok(); }));
  EXPECT_STATUS(client.status(), absl::StatusCode::kUnavailable, "went away (no device can be used any more: device 0");
  EXPECT_TRUE(Holds(held, 1)) << "what is held stays usable";

  ASSERT_OK(daemon_->Restart());
  EXPECT_TRUE(WaitFor([&] { return client.status().ok(); })) << "clients find the next daemon";
  EXPECT_TRUE(Holds(held, 1));
  EXPECT_OK(held.Reset());
  EXPECT_OK(client.EmptyCache());
}

// Makes `looks` looks at the first of two devices fail. The daemon makes two calls for each device at its start. Every
// second call after the start is about the first device.
Environment BadLooksAtTheFirst(int looks) {
  std::vector<std::string> faults;
  for (int look = 0; look < looks; ++look) faults.push_back(absl::StrCat("cuMemGetInfo:", 5 + 2 * look, "=999"));
  return {{cuda_substitute::kFaultsVariable, absl::StrJoin(faults, ",")}};
}

TEST_F(CudaTest, WithOneDeviceLeftItsSessionsGoOn) {
  // Looks fail for longer than this test may take: the daemon looks every two seconds.
  ASSERT_OK(StartDaemon({.devices = 2, .http = true, .environment = BadLooksAtTheFirst(1000)}));
  ASSERT_OK_AND_ASSIGN(Client client, Connect("client"));
  EXPECT_TRUE(WaitFor([&] { return absl::StrContains(daemon_->log(), "device cannot be used: "); }));
  EXPECT_STATUS(client.Allocate(30_MiB, /*device=*/0), absl::StatusCode::kInternal, "the daemon's device 0 (");
  EXPECT_OK(client.Allocate(30_MiB, /*device=*/1));
  EXPECT_EQ(HealthCode(), 503);
}

TEST_F(CudaTest, ADeviceThatWorksAgainIsUsedAgain) {
  // Five bad looks are more than a daemon with one device survives.
  ASSERT_OK(StartDaemon({.devices = 2, .http = true, .environment = BadLooksAtTheFirst(5)}));
  ASSERT_OK_AND_ASSIGN(Client client, Connect("client"));
  EXPECT_TRUE(WaitFor([&] { return absl::StrContains(daemon_->log(), "device can be used again"); })) << daemon_->log();
  EXPECT_OK(client.Allocate(30_MiB, /*device=*/0));
  EXPECT_TRUE(WaitFor([&] { return HealthCode() == 200; }));
}

// ---- Users ----

// CUDA's documentation does not say whether processes of another user can open memory: tests/gpu asks a GPU.
TEST_F(CudaTest, ADriverThatSharesWithinOneUserOnlyIsToldOnBothSides) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root, for a client of another user";
  const std::string machine = MakeTempDir();
  cuda_substitute::MakeMachine(machine, {.devices = kSubstituteDevices, .one_user = true});
  const Environment environment = {{cuda_substitute::kMachineVariable, machine}};
  ASSERT_OK(StartDaemon({.config = "socket_mode: \"0666\"", .environment = environment}));
  for (const char* uid : {"65534", "65534", "65533"}) {
    for (const char* placement : {"", " remote"}) {
      SCOPED_TRACE(absl::StrCat(uid, placement));
      ASSERT_OK_AND_ASSIGN(ClientProcess other, ClientProcess::Start(dir(), environment));
      ASSERT_OK(other.Call(absl::StrCat("setuid ", uid)));
      ASSERT_OK(other.Call(absl::StrCat("connect other -", placement)));
      for (int i = 0; i < 2; ++i) {
        const absl::Status refused = other.Call("alloc 30000000").status();
        EXPECT_STATUS(refused, absl::StatusCode::kInvalidArgument,
                      absl::StrCat("this process of uid ", uid,
                                   " cannot open memory of the daemon, which runs as uid 0: "
                                   "CUDA may share memory only between processes of one user; run vrambrokerd as uid ",
                                   uid));
        EXPECT_STATUS(refused, absl::StatusCode::kInvalidArgument, "cuIpcOpenMemHandle failed");
      }
      if (*placement == '\0') {  // the daemon keeps a remote session's memory for the session
        EXPECT_TRUE(WaitFor([&] { return CtlJson({"status"})["devices"][0]["idle_bytes"] == Charged(); }))
            << "what cannot be opened goes back";
      }
    }
  }
  // Clients of the daemon's own user are not affected.
  ASSERT_OK_AND_ASSIGN(ClientProcess own, ClientProcess::Start(dir(), environment));
  ASSERT_OK(own.Call("connect own -"));
  EXPECT_OK(own.Call("alloc 30000000"));
  EXPECT_TRUE(WaitFor([&] { return absl::StrContains(daemon_->log(), "uid=65533 daemon_uid=0"); })) << daemon_->log();
  EXPECT_THAT(daemon_->log(), HasSubstr("uid=65534 daemon_uid=0"));
  EXPECT_THAT(daemon_->log(), HasSubstr("run the daemon as uid 65534, or a daemon of its own for each user"));
  EXPECT_EQ(std::vector<std::string>(absl::StrSplit(daemon_->log(), "clients of another user cannot open")).size(), 3u)
      << "once for each user: " << daemon_->log();
}

TEST_F(CudaTest, AnErrorOfOpeningWithinOneUserIsNotBlamedOnUsers) {
  ASSERT_OK(StartDaemon());
  ASSERT_OK_AND_ASSIGN(Client client, Connect("client"));
  cuda_substitute::SetFaults("cuIpcOpenMemHandle:1=1");
  const absl::Status refused = client.Allocate(30_MiB).status();
  EXPECT_THAT(refused.ToString(), HasSubstr("cuIpcOpenMemHandle failed"));
  EXPECT_THAT(refused.ToString(), ::testing::Not(HasSubstr("uid")));
  EXPECT_TRUE(WaitFor([&] { return absl::StrContains(daemon_->log(), "client cannot open its memory"); }));
  EXPECT_OK(client.Allocate(30_MiB));
}

// The broken client is a separate process: nothing works in such a process any more.
TEST_F(CudaTest, AClientsErrorIsItsOwn) {
  ASSERT_OK(StartDaemon());
  ASSERT_OK_AND_ASSIGN(ClientProcess broken,
                       ClientProcess::Start(dir(), {{cuda_substitute::kFaultsVariable, "cuEventSynchronize:1=700!"}}));
  ASSERT_OK(broken.Call("connect broken -"));
  ASSERT_OK_AND_ASSIGN(const std::vector<std::string> held, broken.Call("alloc 30000000"));
  ASSERT_OK_AND_ASSIGN(ClientProcess other, ClientProcess::Connect(dir(), "other"));
  ASSERT_OK(other.Call("fill 2 100000 3"));
  EXPECT_OK(broken.Call("free " + held.at(0)));
  EXPECT_OK(broken.Call("empty"));
  EXPECT_STATUS(broken.Call("alloc 50000000"), absl::StatusCode::kInternal, "CUDA_ERROR_ILLEGAL_ADDRESS (700)");
  EXPECT_OK(other.Call("check 3"));
  EXPECT_OK(other.Call("alloc 3000000"));
  EXPECT_EQ(CtlJson({"status"})["devices"][0]["fault"], "");
}

}  // namespace
}  // namespace vrambroker::testing_support
