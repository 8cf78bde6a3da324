// SPDX-License-Identifier: Apache-2.0
//
// Real use of a GPU by processes: overhead, drift, and uncounted programs. Runs on the substitutes of NVIDIA's driver
// and of its management library.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <functional>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "allocator/base/bytes.h"
#include "tests/integration/cuda_fixture.h"
#include "tests/support/client_process.h"
#include "tests/support/http.h"

namespace vrambroker::testing_support {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr uint64_t kContext = 300_MiB;

class CudaReconciliationTest : public CudaTest {
 protected:
  // Starts the daemon on a separate machine, where contexts take memory.
  void StartOnMachine() {
    machine_ = MakeTempDir();
    cuda_substitute::MakeMachine(machine_,
                                 {.devices = kSubstituteDevices, .device_bytes = 16_GiB, .context_bytes = kContext});
    ASSERT_OK(StartDaemon({.capacity = "4GiB",
                           .config = "overhead_allowance: \"320MiB\"",
                           .http = true,
                           .environment = {{cuda_substitute::kMachineVariable, machine_}}}));
  }
  // Starts a program on the daemon's machine. A fork of this process would fail: a child cannot use the driver after
  // the test has called the driver.
  absl::StatusOr<ClientProcess> Program() const {
    return ClientProcess::Start(dir(), {{cuda_substitute::kMachineVariable, machine_}});
  }
  // Returns the command that takes memory of the daemon's GPU past the broker.
  static std::string Take(uint64_t bytes) { return absl::StrCat("take_gpu ", kDaemonsGpu, " ", bytes); }
  Json Device() { return CtlJson({"status"})["devices"][0]; }
  // Returns the process's entry of the device as soon as `is_so` is true. The daemon looks every five seconds.
  Json AwaitProcess(pid_t pid, const std::function<bool(const Json&)>& is_so) {
    Json found = Json::object();
    const bool in_time = WaitFor([&] {
      const Json device = Device();
      for (const Json& process : device["processes"]) {
        if (process["pid"] == pid) found = process;
      }
      return found.contains("pid") && is_so(found);
    });
    EXPECT_TRUE(in_time) << "not as expected: " << Device().dump(1);
    return found;
  }
  MetricsPage Page() { return MetricsPage(daemon_->Get("/metrics")->body); }

 private:
  std::string machine_;
};

TEST_F(CudaReconciliationTest, AProgramThatNobodyCountsIsNamed) {
  StartOnMachine();
  {
    ASSERT_OK_AND_ASSIGN(ClientProcess program, Program());
    ASSERT_OK(program.Call(Take(500_MiB)));
    const Json found =
        AwaitProcess(program.pid(), [](const Json& process) { return process["used_bytes"] == kContext + 500_MiB; });
    EXPECT_EQ(found["kind"], "uncounted");
    EXPECT_EQ(found["uid"], getuid());
    const std::string name = found["name"];
    const std::string text = Ctl({"status"}).out;
    EXPECT_THAT(text, HasSubstr(absl::StrCat(name, ", pid ", program.pid())));
    EXPECT_THAT(text, HasSubstr("which nobody counts"));
    EXPECT_EQ(Page().Value("vrambroker_device_uncounted_process_bytes", {{"gpu", "0"}, {"process", name}}),
              static_cast<double>(kContext + 500_MiB));
    EXPECT_EQ(Page().Value("vrambroker_device_processes_known"), 1);

    // Users without the right to look at other users' sessions see no processes of other users.
    ASSERT_EQ(Ctl({"claim", "create", "mine", "--limit=1GiB"}).exit_code, 0);
    const RunResult claims =
        RunProgram({VramctlProgram(), "status", "--format=json", "--socket_dir=" + dir() + "/claims/mine"});
    ASSERT_EQ(claims.exit_code, 0) << claims.err;
    EXPECT_TRUE(Json::parse(claims.out)["devices"][0]["processes"].empty()) << claims.out;
  }
  AwaitProcess(daemon_->pid(), [&](const Json&) { return Device()["processes"].size() == 1; });
  EXPECT_THAT(Ctl({"status"}).out, Not(HasSubstr("which nobody counts")));
}

TEST_F(CudaReconciliationTest, ACountedProgramsContextIsOverheadAndMoreIsDrift) {
  StartOnMachine();
  ASSERT_OK_AND_ASSIGN(ClientProcess program, Program());
  ASSERT_OK(program.Call("count_hello train -"));
  ASSERT_OK(program.Call(absl::StrCat("charge ", 500_MiB)));
  ASSERT_OK(program.Call(Take(500_MiB)));
  const Json counted = AwaitProcess(program.pid(), [](const Json& process) {
    return process["kind"] == "client" && process["used_bytes"] == kContext + 500_MiB;
  });
  EXPECT_EQ(counted["charged_bytes"], 500_MiB);
  EXPECT_EQ(counted["overhead_bytes"], kContext);
  EXPECT_EQ(counted["drift_bytes"], 0);
  const Json session = CtlJson({"sessions"})["sessions"][0]["devices"][0];
  EXPECT_EQ(session["used_bytes"], kContext + 500_MiB);
  EXPECT_EQ(session["overhead_bytes"], kContext);
  EXPECT_EQ(Page().Value("vrambroker_device_overhead_bytes"), static_cast<double>(2 * kContext)) << "the daemon's, too";
  EXPECT_EQ(Page().Value("vrambroker_client_overhead_bytes", {{"client", "train"}}), static_cast<double>(kContext));
  EXPECT_THAT(Ctl({"status"}).out,
              HasSubstr("600.00 MiB for CUDA contexts and libraries of the daemon and 1 client\n"));

  ASSERT_OK(program.Call(Take(400_MiB)));
  const Json drifting = AwaitProcess(program.pid(), [](const Json& process) { return process["drift_bytes"] > 0; });
  EXPECT_EQ(drifting["drift_bytes"], kContext + 400_MiB - 320_MiB);
  EXPECT_EQ(Page().Value("vrambroker_device_drift_bytes", {{"kind", "uncharged"}}),
            static_cast<double>(kContext + 400_MiB - 320_MiB));
  EXPECT_THAT(Ctl({"status"}).out, HasSubstr(" and is charged for 500.00 MiB\n"));
}

TEST_F(CudaReconciliationTest, EverybodySeesWhatTheSensorsShow) {
  StartOnMachine();
  ASSERT_EQ(Ctl({"claim", "create", "mine", "--limit=1GiB"}).exit_code, 0);
  const auto of_claim = [this] {
    const RunResult result =
        RunProgram({VramctlProgram(), "status", "--format=json", "--socket_dir=" + dir() + "/claims/mine"});
    return Json::parse(result.out, nullptr, /*allow_exceptions=*/false)["devices"][0];
  };
  ASSERT_TRUE(WaitFor([&] { return !of_claim()["use_percent"].is_null(); })) << of_claim();
  const Json state = Json::parse(daemon_->Get("/api/v1/state")->body, nullptr, /*allow_exceptions=*/false);
  for (const Json& device : {Device(), of_claim(), state["devices"][0]}) {
    EXPECT_EQ(device["use_percent"], cuda_substitute::kSensorUsePercent) << device;
    EXPECT_EQ(device["temperature_celsius"], cuda_substitute::kSensorCelsius) << device;
    EXPECT_EQ(device["power_watts"], cuda_substitute::kSensorMilliwatts / 1000.0) << device;
  }
}

TEST_F(CudaReconciliationTest, AMachineWhoseDriverDoesNotTellSaysSo) {
  ASSERT_OK(StartDaemon({.environment = {{cuda_substitute::kNvmlErrorVariable, "9"}}}));
  ASSERT_TRUE(WaitFor([&] { return absl::StrContains(Ctl({"status"}).out, "is not known: nvmlInit_v2"); }));
  EXPECT_THAT(Ctl({"status"}).out,
              HasSubstr("what each process uses is not known: nvmlInit_v2 failed: Driver Not Loaded (9)"));
  EXPECT_TRUE(Device()["processes"].empty());
  EXPECT_TRUE(Device()["power_watts"].is_null());
}

}  // namespace
}  // namespace vrambroker::testing_support
