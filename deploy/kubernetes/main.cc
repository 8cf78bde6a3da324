// SPDX-License-Identifier: Apache-2.0
//
// vrambroker-device-plugin: the memory of vrambrokerd's devices as a Kubernetes resource. Exit codes: 0 stopped on
// request, 1 could not serve, 2 bad options.
#include <fcntl.h>
#include <signal.h>
#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>
#include <sys/file.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "allocator/base/bytes.h"
#include "allocator/base/command_line.h"
#include "allocator/base/room_to_start.h"
#include "allocator/base/unique_fd.h"
#include "deploy/kubernetes/node.h"
#include "deploy/kubernetes/units.h"
#include "server/base/log_line.h"

namespace {

using vrambroker::kubernetes::GpuAccess;
using vrambroker::kubernetes::Node;
using vrambroker::kubernetes::NodeOptions;

constexpr char kProgram[] = "vrambroker-device-plugin";

struct Options {
  std::string socket_dir = "/run/vrambroker";
  std::string kubelet_dir = "/var/lib/kubelet";
  std::string unit = "256MiB";
  std::string resource;
  bool resource_per_device = false;
  std::string gpu_access = "env";
  std::string log_format = "text";
};

std::unique_ptr<CLI::App> MakeApp(Options& options) {
  std::unique_ptr<CLI::App> app =
      vrambroker::MakeCommandLine(kProgram,
                                  "A device plugin for Kubernetes: containers ask for units of vrambrokerd's memory, "
                                  "and get a claim of that size.");
  app->option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  app->add_option("--socket-dir", options.socket_dir,
                  "Directory of the daemon's sockets, by its path on the node. Default: /run/vrambroker.")
      ->type_name("DIR");
  app->add_option("--unit", options.unit, "Size of a unit of memory, in whole MiB. Default: 256MiB.")
      ->type_name("BYTES");
  app->add_option("--resource", options.resource,
                  "Name of the resource. Default: a name with the unit, as vrambroker.dev/memory-256mi.")
      ->type_name("NAME");
  app->add_flag(
         "--resource-per-device", options.resource_per_device,
         "Offer a resource for each device, with -0, -1, ... at the end of its name: the scheduler then knows the "
         "free memory of each device.")
      ->disable_flag_override();
  app->add_option("--gpu-access", options.gpu_access,
                  "Access of containers to the GPU of their memory: env sets NVIDIA_VISIBLE_DEVICES, cdi asks for the "
                  "CDI device nvidia.com/gpu=UUID (kubelet 1.28 and later), none leaves the access to other means. "
                  "Default: env.")
      ->type_name("KIND");
  app->add_option("--kubelet-dir", options.kubelet_dir, "The kubelet's directory. Default: /var/lib/kubelet.")
      ->type_name("DIR");
  app->add_option("--log-format", options.log_format, "text, or json for one object per line. Default: text.")
      ->type_name("FORMAT");
  app->footer(
      "Environment:\n"
      "  POD_NAMESPACE, POD_NAME  The plugin's own pod. Required: a list of pods from\n"
      "                        the kubelet is incomplete without the plugin's own pod.\n"
      "\n"
      "Exit status:\n"
      "  0                     Stopped on request.\n"
      "  1                     Could not serve.\n"
      "  2                     Bad options.");
  return app;
}

std::string EnvironmentOf(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

absl::StatusOr<NodeOptions> CheckOptions(const Options& options) {
  const auto bad = [](absl::string_view option, const absl::Status& status) {
    return absl::InvalidArgumentError(absl::StrCat(option, ": ", absl::string_view(status.message())));
  };
  NodeOptions node = {.socket_dir = options.socket_dir,
                      .kubelet_dir = options.kubelet_dir,
                      .resource = options.resource,
                      .resource_per_device = options.resource_per_device,
                      .pod = EnvironmentOf("POD_NAME"),
                      .pod_namespace = EnvironmentOf("POD_NAMESPACE")};
  const absl::StatusOr<uint64_t> unit = vrambroker::ParseBytes(options.unit);
  if (!unit.ok()) return bad("--unit", unit.status());
  if (absl::Status status = vrambroker::kubernetes::CheckUnitBytes(*unit); !status.ok()) return bad("--unit", status);
  node.unit_bytes = *unit;
  if (node.resource.empty()) node.resource = vrambroker::kubernetes::ResourceName(*unit);
  if (absl::Status status = vrambroker::kubernetes::CheckResourceName(node.resource); !status.ok()) {
    return bad("--resource", status);
  }
  const std::map<std::string, GpuAccess> kinds = {
      {"env", GpuAccess::kEnvironment}, {"cdi", GpuAccess::kCdi}, {"none", GpuAccess::kNone}};
  const auto kind = kinds.find(options.gpu_access);
  if (kind == kinds.end()) {
    return absl::InvalidArgumentError(
        absl::StrCat("--gpu-access: \"", options.gpu_access, "\" is not env, cdi or none"));
  }
  node.gpu_access = kind->second;
  if (options.log_format != "text" && options.log_format != "json") {
    return absl::InvalidArgumentError(absl::StrCat("--log-format: \"", options.log_format, "\" is not text or json"));
  }
  for (const auto& [option, directory] :
       {std::pair("--socket-dir", &node.socket_dir), std::pair("--kubelet-dir", &node.kubelet_dir)}) {
    if (directory->empty() || directory->front() != '/') {
      return absl::InvalidArgumentError(absl::StrCat(option, ": \"", *directory, "\" is no absolute path"));
    }
  }
  if (node.pod.empty() || node.pod_namespace.empty()) {
    return absl::InvalidArgumentError(
        "POD_NAME and POD_NAMESPACE have to be the name and the namespace of the pod in which this runs; a DaemonSet "
        "sets them by fieldRef: metadata.name, metadata.namespace");
  }
  return node;
}

// Prevents two plugins from offering the same memory twice. Released when the process ends.
absl::StatusOr<vrambroker::UniqueFd> LockNode(const std::string& socket_dir) {
  const std::string path = absl::StrCat(socket_dir, "/device-plugin.lock");
  vrambroker::UniqueFd file(open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!file.valid()) return absl::ErrnoToStatus(errno, absl::StrCat("cannot open ", path));
  if (flock(file.get(), LOCK_EX | LOCK_NB) == 0) return file;
  if (errno != EWOULDBLOCK) return absl::ErrnoToStatus(errno, absl::StrCat("cannot lock ", path));
  return absl::AlreadyExistsError(absl::StrCat("another ", kProgram, " serves the memory of ", socket_dir));
}

int Fail(const absl::Status& status, int code) {
  std::fprintf(stderr, "%s: %s\n", kProgram, std::string(status.message()).c_str());
  return code;
}

}  // namespace

int main(int argc, char** argv) {
  // Before starting any thread: every thread inherits the mask, and main() takes the signals.
  sigset_t mask;
  sigemptyset(&mask);
  for (const int signal : {SIGTERM, SIGINT}) sigaddset(&mask, signal);
  pthread_sigmask(SIG_BLOCK, &mask, nullptr);
  ::signal(SIGPIPE, SIG_IGN);

  Options options;
  const std::unique_ptr<CLI::App> app = MakeApp(options);
  if (const std::optional<int> code = vrambroker::ParseOrPrint(*app, argc, argv)) return *code;
  const absl::StatusOr<NodeOptions> node_options = CheckOptions(options);
  if (!node_options.ok()) return Fail(node_options.status(), 2);
  const absl::StatusOr<vrambroker::UniqueFd> node_lock = LockNode(node_options->socket_dir);
  if (!node_lock.ok()) return Fail(node_lock.status(), 1);
  if (const absl::Status room = vrambroker::CheckRoomForGrpc(/*own_threads=*/4); !room.ok()) return Fail(room, 1);

  spdlog::set_default_logger(spdlog::stderr_color_mt(kProgram));
  vrambroker::SetLogFormat(options.log_format == "json" ? vrambroker::LogFormat::kJson : vrambroker::LogFormat::kText,
                           /*times=*/true);
  vrambroker::LogLine("serving")
      .Add("resource", node_options->resource)
      .Add("unit_bytes", node_options->unit_bytes)
      .Add("socket_dir", node_options->socket_dir)
      .Write(spdlog::level::info);

  Node node(*node_options);
  const timespec period = {.tv_sec = Node::kPeriod.count(), .tv_nsec = 0};
  int signal = -1;
  while (signal < 0) {
    node.Step();
    signal = sigtimedwait(&mask, nullptr, &period);
  }
  vrambroker::LogLine("stopped").Add("signal", signal).Write(spdlog::level::info);
  return 0;
}
