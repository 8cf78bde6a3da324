// SPDX-License-Identifier: Apache-2.0
//
// vrambroker-device-plugin between a real daemon and a fake kubelet: units, claims of containers, and restarts.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>

#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "allocator/base/bytes.h"
#include "tests/support/fake_kubelet.h"
#include "tests/support/paths.h"
#include "tests/support/test_device.h"
#include "tests/support/util.h"
#include "tests/support/vramctl_test.h"

namespace vrambroker::testing_support {
namespace {

using absl::StatusCode;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr char kResource[] = "vrambroker.dev/memory-32mi";
constexpr size_t kUnitsOfDevice = 8;  // 256 MiB

// Containers with units, as the kubelet lists them, together with the plugin's own pod.
struct Pods {
  ::v1::ListPodResourcesResponse list;
  bool is_old_kubelet = false;  // version 1.20 has one entry for all units of a container

  explicit Pods(bool old_kubelet = false) : is_old_kubelet(old_kubelet) {
    Add("vrambroker", "plugin", "device-plugin", {});
  }
  Pods& Add(const std::string& pod_namespace, const std::string& pod, const std::string& container,
            const std::vector<std::string>& units, const std::string& resource = kResource) {
    ::v1::PodResources* added = list.add_pod_resources();
    added->set_namespace_(pod_namespace);
    added->set_name(pod);
    ::v1::ContainerResources* of = added->add_containers();
    of->set_name(container);
    for (const std::string& unit : units) {
      ::v1::ContainerDevices* devices =
          is_old_kubelet && of->devices_size() > 0 ? of->mutable_devices(0) : of->add_devices();
      devices->set_resource_name(resource);
      devices->add_device_ids(unit);
    }
    return *this;
  }
};

class DevicePluginTest : public VramctlDaemonTest {
 protected:
  void Begin(const Arguments& flags = {}, DaemonOptions options = {}) {
    kubelet_dir_ = MakeTempDir();
    StartKubelet();
    ASSERT_OK(StartDaemon(options));
    ASSERT_NO_FATAL_FAILURE(StartPlugin(flags));
  }
  void StartKubelet(bool removes_plugins = true) {
    kubelet_ = nullptr;  // the old kubelet ends first
    kubelet_ = std::make_unique<FakeKubelet>(kubelet_dir_, removes_plugins);
    kubelet_->SetPods(Pods().list);
  }
  void StartPlugin(const Arguments& flags = {}) {
    Arguments arguments = {paths::kDevicePlugin, "--socket-dir=" + dir(), "--kubelet-dir=" + kubelet_dir_,
                           "--unit=32MiB"};
    arguments.insert(arguments.end(), flags.begin(), flags.end());
    ASSERT_OK_AND_ASSIGN(plugin_,
                         ChildProcess::Start(arguments, {{"POD_NAME", "plugin"}, {"POD_NAMESPACE", "vrambroker"}}));
  }
  bool WaitForUnits(size_t count, const std::string& resource = kResource) {
    return WaitFor([&] { return kubelet_->HealthyUnits(resource) == count; });
  }
  void TearDown() override {
    if (plugin_ != nullptr && plugin_->Running()) {
      plugin_->Signal(SIGTERM);
      const absl::StatusOr<int> exit_code = plugin_->Wait();
      EXPECT_TRUE(exit_code.ok() && *exit_code == 0) << exit_code.status() << " " << exit_code.value_or(-1);
    }
    if (HasFailure() && plugin_ != nullptr)
      std::cerr << "---- the plugin's log ----\n" << plugin_->ErrorText() << "----\n";
    VramctlDaemonTest::TearDown();
  }

  size_t devices() { return CtlJson({"status"})["devices"].size(); }
  std::string Unit(uint32_t number, size_t device = 0) {
    return absl::StrCat(CtlJson({"status"})["devices"][device]["uuid"].get<std::string>(), "::", number);
  }
  std::vector<std::string> Claims() {
    std::vector<std::string> names;
    const Json list = CtlJson({"claim", "ls"});
    for (const Json& claim : list["claims"]) names.push_back(claim["name"]);
    return names;
  }
  Json Show(const std::string& claim) {
    const Json shown = CtlJson({"claim", "show", claim});
    return shown["claim"];
  }
  std::string PodOf(const std::string& claim) {
    const Json shown = Show(claim);
    return shown["labels"].value("pod", "");
  }
  // Returns the claim of a container: the mount's directory has the claim's name.
  static std::string ClaimOf(const ::v1beta1::ContainerAllocateResponse& answer) {
    return std::filesystem::path(answer.mounts(0).host_path()).filename();
  }
  // Adds a container with `unit` to the pod. Returns the container's claim once the claim has the pod's name.
  absl::StatusOr<std::string> ClaimOfPod(const std::string& pod, const std::string& unit) {
    absl::StatusOr<::v1beta1::ContainerAllocateResponse> answer = kubelet_->Allocate(kResource, {unit});
    if (!answer.ok()) return answer.status();
    pods_.Add("team", pod, "main", {unit});
    kubelet_->SetPods(pods_.list);
    if (WaitFor([&] { return PodOf(ClaimOf(*answer)) == pod; })) return ClaimOf(*answer);
    return absl::DeadlineExceededError("the claim does not get the name of " + pod);
  }
  // Starts a process in the container that asks for `bytes`. Returns the answer after the process has ended.
  static absl::Status Ask(const ::v1beta1::ContainerAllocateResponse& answer, uint64_t bytes) {
    absl::StatusOr<ClientProcess> process = ClientProcess::Connect(answer.mounts(0).host_path(), "asks");
    if (!process.ok()) return process.status();
    return process->Call(absl::StrCat("alloc ", bytes)).status();
  }

  std::string kubelet_dir_;
  Pods pods_;  // pods that ClaimOfPod() adds
  std::unique_ptr<FakeKubelet> kubelet_;
  std::unique_ptr<ChildProcess> plugin_;
};

TEST_F(DevicePluginTest, EachDevicesCapacityIsUnits) {
  ASSERT_NO_FATAL_FAILURE(Begin());
  ASSERT_TRUE(WaitForUnits(devices() * kUnitsOfDevice));
  const std::map<std::string, bool> units = kubelet_->Units(kResource);
  for (size_t device = 0; device < devices(); ++device) {
    for (uint32_t number = 0; number < kUnitsOfDevice; ++number) EXPECT_TRUE(units.contains(Unit(number, device)));
  }
}

TEST_F(DevicePluginTest, AContainerGetsAClaimOfItsUnits) {
  ASSERT_NO_FATAL_FAILURE(Begin());
  ASSERT_TRUE(WaitForUnits(devices() * kUnitsOfDevice));
  ASSERT_OK_AND_ASSIGN(const auto answer, kubelet_->Allocate(kResource, {Unit(0), Unit(1), Unit(5)}));
  ASSERT_EQ(answer.mounts_size(), 1);
  EXPECT_TRUE(absl::StartsWith(answer.mounts(0).host_path(), dir() + "/claims/k8s-0-0-"))
      << answer.mounts(0).host_path();
  EXPECT_EQ(answer.mounts(0).container_path(), "/run/vrambroker");
  EXPECT_TRUE(answer.mounts(0).read_only());
  EXPECT_EQ(answer.envs().at("VRAMBROKER_SOCKET_DIR"), "/run/vrambroker");

  const Json claim = Show(ClaimOf(answer));
  EXPECT_EQ(claim["devices"][0]["limit_bytes"], 96_MiB);
  for (size_t device = 1; device < devices(); ++device) EXPECT_EQ(claim["devices"][device]["limit_bytes"], 0);
  EXPECT_EQ(claim["labels"]["kubernetes_resource"], kResource);
  EXPECT_EQ(claim["labels"]["kubernetes_units"], "0-1,5");
  EXPECT_OK(Ask(answer, 96_MiB));
  EXPECT_STATUS(Ask(answer, 97_MiB), StatusCode::kResourceExhausted, "claim " + ClaimOf(answer));
}

// The container has no other claim's directory, and the user of the container's processes is unknown.
TEST_F(DevicePluginTest, EveryUserOfTheContainerMayConnect) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root, to be another user";
  HOST_DEVICE_ONLY();  // CUDA may share memory only within one user
  ASSERT_NO_FATAL_FAILURE(Begin());
  ASSERT_TRUE(WaitForUnits(devices() * kUnitsOfDevice));
  ASSERT_OK_AND_ASSIGN(const auto answer, kubelet_->Allocate(kResource, {Unit(0)}));
  ASSERT_OK_AND_ASSIGN(ClientProcess process, ClientProcess::Start(answer.mounts(0).host_path()));
  ASSERT_OK(process.Call("setuid 65534"));
  ASSERT_OK(process.Call("connect nobody -"));
  EXPECT_OK(process.Call(absl::StrCat("alloc ", 20_MiB)));
}

TEST_F(DevicePluginTest, EachContainerHasAClaimOfItsOwn) {
  ASSERT_NO_FATAL_FAILURE(Begin());
  ASSERT_TRUE(WaitForUnits(devices() * kUnitsOfDevice));
  ::v1beta1::AllocateRequest request;
  request.add_container_requests()->add_devicesids(Unit(0));
  request.add_container_requests()->add_devicesids(Unit(1));
  ASSERT_OK_AND_ASSIGN(const auto answer, kubelet_->Allocate(kResource, request));
  ASSERT_EQ(answer.container_responses_size(), 2);
  EXPECT_NE(ClaimOf(answer.container_responses(0)), ClaimOf(answer.container_responses(1)));
  EXPECT_EQ(Claims().size(), 2u);
}

TEST_F(DevicePluginTest, ARequestIsServedByOneDevice) {
  ASSERT_NO_FATAL_FAILURE(Begin({}, {.devices = 2}));
  ASSERT_EQ(devices(), 2u);
  ASSERT_TRUE(WaitForUnits(2 * kUnitsOfDevice));
  EXPECT_STATUS(kubelet_->Allocate(kResource, {Unit(0, 0), Unit(0, 1)}), StatusCode::kFailedPrecondition,
                "are of several devices");
  EXPECT_STATUS(kubelet_->Allocate(kResource, {"GPU-of-another-node::0"}), StatusCode::kNotFound, "has no device");
  EXPECT_STATUS(kubelet_->Allocate(kResource, {"nonsense"}), StatusCode::kInvalidArgument, "is no unit of memory");
  EXPECT_STATUS(kubelet_->Allocate(kResource, std::vector<std::string>{}), StatusCode::kInvalidArgument, "no unit");
  EXPECT_THAT(Claims(), IsEmpty());
  // Units are of the device with the fewest free units that suffice.
  const std::vector<std::string> available = {Unit(0, 0), Unit(1, 0), Unit(2, 0), Unit(4, 1), Unit(6, 1)};
  ASSERT_OK_AND_ASSIGN(const std::vector<std::string> two, kubelet_->PreferredUnits(kResource, available, {}, 2));
  EXPECT_THAT(two, ElementsAre(Unit(4, 1), Unit(6, 1)));
  ASSERT_OK_AND_ASSIGN(const std::vector<std::string> same,
                       kubelet_->PreferredUnits(kResource, available, {Unit(2, 0)}, 2));
  EXPECT_THAT(same, ElementsAre(Unit(0, 0), Unit(2, 0)));
  ASSERT_OK_AND_ASSIGN(const std::vector<std::string> none, kubelet_->PreferredUnits(kResource, available, {}, 4));
  EXPECT_THAT(none, IsEmpty());
}

TEST_F(DevicePluginTest, UnitsThatItNeverOfferedAreRefused) {
  ASSERT_NO_FATAL_FAILURE(Begin());
  ASSERT_TRUE(WaitForUnits(devices() * kUnitsOfDevice));
  for (const uint32_t number : {uint32_t{kUnitsOfDevice}, uint32_t{4294967295}}) {
    EXPECT_STATUS(kubelet_->Allocate(kResource, {Unit(0), Unit(number)}), StatusCode::kNotFound,
                  absl::StrCat("device 0 has no unit ", number, " of memory: of ", kResource, " it has ",
                               kUnitsOfDevice, " units, numbered from 0"));
  }
  EXPECT_THAT(Claims(), ::testing::IsEmpty());
  EXPECT_OK(kubelet_->Allocate(kResource, {Unit(kUnitsOfDevice - 1)}).status());
}

// An error that repeated all ids in full would end the connection, and fail later calls.
TEST_F(DevicePluginTest, IdsOfAnyLengthDisturbNoOtherCall) {
  ASSERT_NO_FATAL_FAILURE(Begin());
  ASSERT_TRUE(WaitForUnits(devices() * kUnitsOfDevice));
  const std::string id(100000, 'x');
  const std::string unit = Unit(0);
  for (int i = 0; i < 3; ++i) {
    EXPECT_STATUS(kubelet_->Allocate(kResource, {id}), StatusCode::kInvalidArgument, "is no unit of memory");
    EXPECT_STATUS(kubelet_->Allocate(kResource, {id + "::0"}), StatusCode::kNotFound, "has no device x");
    EXPECT_STATUS(kubelet_->Allocate(kResource, {unit, id + "::0"}), StatusCode::kFailedPrecondition,
                  "are of several devices");
    EXPECT_OK(kubelet_->PreferredUnits(kResource, {unit, id}, {id}, 1).status());
  }
  EXPECT_OK(kubelet_->Allocate(kResource, {unit}).status());
}

TEST_F(DevicePluginTest, ADeviceCanBeAResourceOfItsOwn) {
  ASSERT_NO_FATAL_FAILURE(Begin({"--resource-per-device", "--resource=example.com/vram"}, {.devices = 2}));
  ASSERT_TRUE(WaitForUnits(kUnitsOfDevice, "example.com/vram-0"));
  ASSERT_TRUE(WaitForUnits(kUnitsOfDevice, "example.com/vram-1"));
  ASSERT_OK_AND_ASSIGN(const auto answer, kubelet_->Allocate("example.com/vram-1", {Unit(3, 1)}));
  const Json claim = Show(ClaimOf(answer));
  EXPECT_EQ(claim["devices"][0]["limit_bytes"], 0);
  EXPECT_EQ(claim["devices"][1]["limit_bytes"], 32_MiB);
}

// A failed device changes the numbers of the devices after it.
TEST_F(DevicePluginTest, ADeviceThatIsNumberedAnewKeepsItsResource) {
  if (!OnSubstitute()) GTEST_SKIP() << "needs two GPUs that can be put in another order";
  ASSERT_NO_FATAL_FAILURE(Begin({"--resource-per-device"}, {.devices = 2}));
  const std::string first = absl::StrCat(kResource, "-0");
  const std::string second = absl::StrCat(kResource, "-1");
  ASSERT_TRUE(WaitForUnits(kUnitsOfDevice, first) && WaitForUnits(kUnitsOfDevice, second));
  const std::map<std::string, bool> units = kubelet_->Units(first);
  const std::string unit = Unit(0, 0);
  daemon_->Kill();
  ASSERT_TRUE(WaitForUnits(0, first));
  // DaemonProcess gives the GPUs in the other order.
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<ChildProcess> next,
                       ChildProcess::Start(daemon_->CommandLine(), {{"CUDA_VISIBLE_DEVICES", "0,1"}}));
  ASSERT_TRUE(WaitForUnits(kUnitsOfDevice, first) && WaitForUnits(kUnitsOfDevice, second));
  EXPECT_EQ(Unit(0, 1), unit) << "the devices have the same order";
  EXPECT_EQ(kubelet_->Units(first), units);
  // The claim's limit is on the unit's device, which has another ordinal now.
  ASSERT_OK_AND_ASSIGN(const auto answer, kubelet_->Allocate(first, {unit}));
  EXPECT_EQ(Show(ClaimOf(answer))["devices"][1]["limit_bytes"], 32_MiB);
}

TEST_F(DevicePluginTest, AClaimIsNamedAfterItsPodAndGoesWithIt) {
  ASSERT_NO_FATAL_FAILURE(Begin());
  ASSERT_TRUE(WaitForUnits(devices() * kUnitsOfDevice));
  const std::vector<std::string> two = {Unit(0), Unit(1)};
  ASSERT_OK_AND_ASSIGN(const auto first, kubelet_->Allocate(kResource, two));
  ASSERT_OK_AND_ASSIGN(const auto second, kubelet_->Allocate(kResource, {Unit(2)}));
  kubelet_->SetPods(Pods().Add("team", "trainer", "main", two).Add("team", "server", "web", {Unit(2)}).list);
  EXPECT_TRUE(WaitFor([&] { return PodOf(ClaimOf(first)) == "trainer" && PodOf(ClaimOf(second)) == "server"; }));
  const Json claim = Show(ClaimOf(first));
  EXPECT_EQ(claim["labels"]["namespace"], "team");
  EXPECT_EQ(claim["labels"]["container"], "main");
  EXPECT_EQ(claim["labels"]["kubernetes_units"], "0-1");
  EXPECT_EQ(claim["devices"][0]["limit_bytes"], 64_MiB);

  kubelet_->SetPods(Pods().Add("team", "server", "web", {Unit(2)}).list);
  EXPECT_TRUE(WaitFor([&] { return Claims() == std::vector<std::string>{ClaimOf(second)}; }));
}

TEST_F(DevicePluginTest, ListsOfOldKubeletsAreReadToo) {
  ASSERT_NO_FATAL_FAILURE(Begin());
  ASSERT_TRUE(WaitForUnits(devices() * kUnitsOfDevice));
  const std::vector<std::string> two = {Unit(3), Unit(4)};
  ASSERT_OK_AND_ASSIGN(const auto answer, kubelet_->Allocate(kResource, two));
  kubelet_->SetPods(Pods(/*old_kubelet=*/true).Add("team", "trainer", "main", two).list);
  EXPECT_TRUE(WaitFor([&] {
    const Json claim = Show(ClaimOf(answer));
    return claim["labels"].value("container", "") == "main";
  }));
}

TEST_F(DevicePluginTest, AClaimStaysAsLongAsAProcessHoldsMemoryOfIt) {
  ASSERT_NO_FATAL_FAILURE(Begin());
  ASSERT_TRUE(WaitForUnits(devices() * kUnitsOfDevice));
  ASSERT_OK_AND_ASSIGN(const std::string held, ClaimOfPod("held", Unit(0)));
  ASSERT_OK_AND_ASSIGN(const std::string idle, ClaimOfPod("idle", Unit(1)));
  ASSERT_OK_AND_ASSIGN(ClientProcess process, ClientProcess::Connect(dir() + "/claims/" + held, "late"));
  ASSERT_OK(process.Call(absl::StrCat("alloc ", 20_MiB)));
  kubelet_->SetPods(Pods().list);
  EXPECT_TRUE(WaitFor([&] { return Claims() == std::vector<std::string>{held}; }));
  EXPECT_EQ(Show(held)["state"], "active");
  process.process().Signal(SIGKILL);
  EXPECT_TRUE(WaitFor([&] { return Claims().empty(); }));
}

// A kubelet that has just started does not know all its pods.
TEST_F(DevicePluginTest, AnIncompleteListRemovesNothing) {
  ASSERT_NO_FATAL_FAILURE(Begin());
  ASSERT_TRUE(WaitForUnits(devices() * kUnitsOfDevice));
  ASSERT_OK_AND_ASSIGN(const std::string claim, ClaimOfPod("trainer", Unit(0)));
  kubelet_->SetPods({});
  const int lists = kubelet_->pod_lists();
  EXPECT_TRUE(WaitFor([&] { return kubelet_->pod_lists() >= lists + 5; }));
  EXPECT_THAT(Claims(), ElementsAre(claim));
  EXPECT_THAT(plugin_->ErrorText(), HasSubstr("lacks vrambroker/plugin, this one"));
  kubelet_->SetPods(Pods().list);
  EXPECT_TRUE(WaitFor([&] { return Claims().empty(); }));
}

TEST_F(DevicePluginTest, OtherClaimsAreLeftAlone) {
  ASSERT_NO_FATAL_FAILURE(Begin());
  ASSERT_TRUE(WaitForUnits(devices() * kUnitsOfDevice));
  const std::string other = "k8s-0-0-operators";
  ASSERT_EQ(Ctl({"claim", "create", other, "--limit=64MiB", "--label=namespace=team", "--label=pod=trainer"}).exit_code,
            0);
  ASSERT_OK(ClaimOfPod("trainer", Unit(0)));
  kubelet_->SetPods(Pods().list);
  EXPECT_TRUE(WaitFor([&] { return Claims() == std::vector<std::string>{other}; }));
  const int lists = kubelet_->pod_lists();
  EXPECT_TRUE(WaitFor([&] { return kubelet_->pod_lists() >= lists + 2; }));
  EXPECT_THAT(Claims(), ElementsAre(other));
}

TEST_F(DevicePluginTest, AKubeletThatStartsAgainIsRegisteredWith) {
  ASSERT_NO_FATAL_FAILURE(Begin());
  ASSERT_TRUE(WaitForUnits(devices() * kUnitsOfDevice));
  ASSERT_OK_AND_ASSIGN(const auto before, kubelet_->Allocate(kResource, {Unit(0)}));
  StartKubelet();
  kubelet_->SetPods(Pods().Add("team", "trainer", "main", {Unit(0)}).list);
  EXPECT_TRUE(WaitForUnits(devices() * kUnitsOfDevice));
  ASSERT_OK_AND_ASSIGN(const auto after, kubelet_->Allocate(kResource, {Unit(1)}));
  EXPECT_NE(ClaimOf(before), ClaimOf(after));
  EXPECT_TRUE(WaitFor([&] { return PodOf(ClaimOf(before)) == "trainer"; }));
  EXPECT_OK(Ask(before, 32_MiB));
}

TEST_F(DevicePluginTest, AKubeletThatLeavesItsPluginsSocketsIsRegisteredWithToo) {
  ASSERT_NO_FATAL_FAILURE(Begin());
  ASSERT_TRUE(WaitForUnits(devices() * kUnitsOfDevice));
  StartKubelet(/*removes_plugins=*/false);
  EXPECT_TRUE(WaitForUnits(devices() * kUnitsOfDevice));
  EXPECT_OK(kubelet_->Allocate(kResource, {Unit(0)}));
}

TEST_F(DevicePluginTest, AKubeletThatRefusesIsAskedAgain) {
  kubelet_dir_ = MakeTempDir();
  StartKubelet();
  kubelet_->RefuseRegistrations("not today");
  ASSERT_OK(StartDaemon());
  ASSERT_NO_FATAL_FAILURE(StartPlugin());
  EXPECT_TRUE(WaitFor([&] { return kubelet_->registrations(kResource) >= 2; }));
  EXPECT_THAT(plugin_->ErrorText(), HasSubstr("does not register vrambroker.dev/memory-32mi: not today"));
  kubelet_->RefuseRegistrations("");
  EXPECT_TRUE(WaitForUnits(devices() * kUnitsOfDevice));
}

TEST_F(DevicePluginTest, ASocketThatSomebodyRemovesIsMadeAgain) {
  ASSERT_NO_FATAL_FAILURE(Begin());
  ASSERT_TRUE(WaitForUnits(devices() * kUnitsOfDevice));
  const std::string socket = kubelet_dir_ + "/device-plugins/vrambroker.dev_memory-32mi.sock";
  ASSERT_TRUE(std::filesystem::remove(socket));
  EXPECT_TRUE(WaitFor([&] { return std::filesystem::exists(socket) && kubelet_->registrations(kResource) == 2; }));
  EXPECT_TRUE(WaitForUnits(devices() * kUnitsOfDevice));
  EXPECT_OK(kubelet_->Allocate(kResource, {Unit(0)}));
}

TEST_F(DevicePluginTest, UnitsAreUnhealthyWhileTheDaemonIsAway) {
  ASSERT_NO_FATAL_FAILURE(Begin());
  const size_t all = devices() * kUnitsOfDevice;
  const std::string unit = Unit(0);
  ASSERT_TRUE(WaitForUnits(all));
  ASSERT_OK_AND_ASSIGN(const auto before, kubelet_->Allocate(kResource, {unit}));
  kubelet_->SetPods(Pods().Add("team", "trainer", "main", {unit}).list);
  ASSERT_OK_AND_ASSIGN(ClientProcess process, ClientProcess::Connect(before.mounts(0).host_path(), "trainer"));
  ASSERT_OK(process.Call(absl::StrCat("alloc ", 20_MiB)));
  daemon_->Kill();
  EXPECT_TRUE(WaitForUnits(0));
  EXPECT_EQ(kubelet_->Units(kResource).size(), all);
  EXPECT_STATUS(kubelet_->Allocate(kResource, {unit}), StatusCode::kUnavailable,
                "the daemon does not serve device 0 now");
  ASSERT_OK(daemon_->Restart());
  EXPECT_TRUE(WaitForUnits(all));
  // The claim's clients find the daemon in the same directory.
  EXPECT_THAT(Claims(), ElementsAre(ClaimOf(before)));
  EXPECT_TRUE(WaitFor([&] { return Show(ClaimOf(before))["devices"][0]["reserved_bytes"] == 20_MiB; }));
  EXPECT_STATUS(Ask(before, 20_MiB), StatusCode::kResourceExhausted, "claim " + ClaimOf(before));
}

TEST_F(DevicePluginTest, APluginThatStartsAgainKnowsTheClaims) {
  ASSERT_NO_FATAL_FAILURE(Begin());
  ASSERT_TRUE(WaitForUnits(devices() * kUnitsOfDevice));
  ASSERT_OK_AND_ASSIGN(const std::string kept, ClaimOfPod("trainer", Unit(0)));
  ASSERT_OK(ClaimOfPod("server", Unit(1)));
  plugin_->Signal(SIGKILL);
  ASSERT_OK(plugin_->Wait());
  EXPECT_TRUE(WaitForUnits(0));
  kubelet_->SetPods(Pods().Add("team", "trainer", "main", {Unit(0)}).list);
  ASSERT_NO_FATAL_FAILURE(StartPlugin());
  EXPECT_TRUE(WaitForUnits(devices() * kUnitsOfDevice));
  EXPECT_TRUE(WaitFor([&] { return Claims() == std::vector<std::string>{kept}; }));
}

TEST_F(DevicePluginTest, WhatNeverStartedIsWaitedFor) {
  kubelet_dir_ = MakeTempDir();
  ASSERT_OK(StartDaemon());
  daemon_->Kill();
  ASSERT_NO_FATAL_FAILURE(StartPlugin());
  EXPECT_TRUE(WaitFor([&] { return absl::StrContains(plugin_->ErrorText(), "daemon unavailable"); }));
  ASSERT_OK(daemon_->Restart());
  EXPECT_TRUE(WaitFor([&] { return absl::StrContains(plugin_->ErrorText(), "kubelet unavailable"); }));
  StartKubelet();
  EXPECT_TRUE(WaitForUnits(devices() * kUnitsOfDevice));
  EXPECT_OK(kubelet_->Allocate(kResource, {Unit(0)}));
}

TEST_F(DevicePluginTest, OneServesANode) {
  ASSERT_NO_FATAL_FAILURE(Begin());
  ASSERT_TRUE(WaitForUnits(devices() * kUnitsOfDevice));
  const RunResult second = RunProgram({paths::kDevicePlugin, "--socket-dir=" + dir(), "--kubelet-dir=" + kubelet_dir_},
                                      {{"POD_NAME", "other"}, {"POD_NAMESPACE", "vrambroker"}});
  EXPECT_EQ(second.exit_code, 1);
  EXPECT_THAT(second.err, HasSubstr("another vrambroker-device-plugin serves the memory of " + dir()));
}

// Another plugin on the node has another daemon, and the same size of unit.
TEST_F(DevicePluginTest, ASocketThatAnotherPluginServesIsLeftAlone) {
  ASSERT_NO_FATAL_FAILURE(Begin());
  ASSERT_TRUE(WaitForUnits(devices() * kUnitsOfDevice));
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<DaemonProcess> other_daemon, DaemonProcess::Start());
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<ChildProcess> other,
                       ChildProcess::Start({paths::kDevicePlugin, "--socket-dir=" + other_daemon->socket_dir(),
                                            "--kubelet-dir=" + kubelet_dir_, "--unit=32MiB"},
                                           {{"POD_NAME", "other"}, {"POD_NAMESPACE", "vrambroker"}}));
  EXPECT_TRUE(WaitFor([&] { return absl::StrContains(other->ErrorText(), "another process serves "); }));
  EXPECT_EQ(kubelet_->registrations(kResource), 1);
  EXPECT_EQ(kubelet_->HealthyUnits(kResource), devices() * kUnitsOfDevice);
}

TEST_F(DevicePluginTest, TooManyUnitsAreRefusedWithAdvice) {
  ASSERT_NO_FATAL_FAILURE(Begin({"--unit=1MiB"}, {.capacity = "20001MiB"}));
  EXPECT_TRUE(WaitFor([&] { return absl::StrContains(plugin_->ErrorText(), "give --unit a larger size"); }));
  EXPECT_EQ(kubelet_->registrations("vrambroker.dev/memory-1mi"), 0);
}

TEST_F(DevicePluginTest, GpusAreGivenToTheContainer) {
  if (!OnCuda()) GTEST_SKIP() << "host devices need nothing in the container";
  ASSERT_NO_FATAL_FAILURE(Begin({}, {.devices = 2}));
  ASSERT_TRUE(WaitForUnits(devices() * kUnitsOfDevice));
  const std::string uuid = CtlJson({"status"})["devices"][1]["uuid"];
  ASSERT_OK_AND_ASSIGN(const auto by_environment, kubelet_->Allocate(kResource, {Unit(0, 1)}));
  EXPECT_EQ(by_environment.envs().at("NVIDIA_VISIBLE_DEVICES"), uuid);
  EXPECT_EQ(by_environment.cdi_devices_size(), 0);

  for (const std::string kind : {"cdi", "none"}) {
    plugin_->Signal(SIGTERM);
    ASSERT_OK(plugin_->Wait());
    EXPECT_TRUE(WaitForUnits(0));
    ASSERT_NO_FATAL_FAILURE(StartPlugin({"--gpu-access=" + kind}));
    ASSERT_TRUE(WaitForUnits(devices() * kUnitsOfDevice));
    ASSERT_OK_AND_ASSIGN(const auto answer, kubelet_->Allocate(kResource, {Unit(0, 1)}));
    EXPECT_FALSE(answer.envs().contains("NVIDIA_VISIBLE_DEVICES"));
    ASSERT_EQ(answer.cdi_devices_size(), kind == "cdi" ? 1 : 0);
    if (kind == "cdi") {
      EXPECT_EQ(answer.cdi_devices(0).name(), "nvidia.com/gpu=" + uuid);
    }
  }
}

TEST(DevicePluginOptionsTest, BadOptionsAreSaid) {
  const Environment pod = {{"POD_NAME", "plugin"}, {"POD_NAMESPACE", "vrambroker"}};
  const std::vector<std::pair<std::string, std::string>> bad = {
      {"--unit=100KiB", "--unit: 100.00 KiB is no whole number of MiB"},
      {"--unit=much", "--unit: "},
      {"--resource=memory", "--resource: \"memory\" is no name of a resource of Kubernetes"},
      {"--gpu-access=all", "--gpu-access: \"all\" is not env, cdi or none"},
      {"--log-format=xml", "--log-format: \"xml\" is not text or json"},
      {"--socket-dir=run", "--socket-dir: \"run\" is no absolute path"},
      {"--kubelet-dir=", "--kubelet-dir: "},
      {"--no-such-option", "see vrambroker-device-plugin --help"},
  };
  for (const auto& [option, error] : bad) {
    const RunResult result = RunProgram({paths::kDevicePlugin, option}, pod);
    EXPECT_EQ(result.exit_code, 2) << option;
    EXPECT_THAT(result.err, HasSubstr(error));
  }
  const RunResult outside = RunProgram({paths::kDevicePlugin}, {{"POD_NAME", ""}, {"POD_NAMESPACE", ""}});
  EXPECT_EQ(outside.exit_code, 2);
  EXPECT_THAT(outside.err, HasSubstr("POD_NAME and POD_NAMESPACE have to be"));
  const RunResult nowhere = RunProgram({paths::kDevicePlugin, "--socket-dir=/no/such/directory"}, pod);
  EXPECT_EQ(nowhere.exit_code, 1);
  EXPECT_THAT(nowhere.err, HasSubstr("cannot open /no/such/directory/device-plugin.lock"));
}

}  // namespace
}  // namespace vrambroker::testing_support
