// SPDX-License-Identifier: Apache-2.0
#include "client/session/visible_devices.h"

#include <cstdlib>

#include "absl/algorithm/container.h"
#include "absl/strings/string_view.h"
#include "allocator/device/cuda_device.h"
#include "allocator/device/device.h"
#include "client/connection/connection.h"
#include "vrambroker/v1/broker.grpc.pb.h"

namespace vrambroker::client_internal {

absl::StatusOr<std::vector<std::string>> VisibleDevices(const std::shared_ptr<grpc::Channel>& channel,
                                                        absl::Duration timeout) {
  std::vector<std::string> visible;
  // Elsewhere a process sees all GPUs. Leave CUDA alone then: a program may fork() before starting CUDA.
  const char* const container = std::getenv("NVIDIA_VISIBLE_DEVICES");
  const bool may_hide =
      std::getenv("CUDA_VISIBLE_DEVICES") != nullptr || (container != nullptr && absl::string_view(container) != "all");
  if (!may_hide || !HasCudaDriver()) return visible;
  grpc::ClientContext context;
  SetTimeout(context, timeout);
  v1::GetDevicesResponse response;
  const absl::Status asked =
      FromGrpc(v1::Broker::NewStub(channel)->GetDevices(&context, v1::GetDevicesRequest(), &response));
  if (absl::IsUnimplemented(asked) || absl::IsPermissionDenied(asked)) return visible;
  if (absl::IsDeadlineExceeded(asked)) return NoAnswerError(timeout);
  if (!asked.ok()) return ExplainClosed(asked);
  // A daemon with one GPU leaves no choice.
  const auto is_cuda = [](const v1::Device& device) { return device.kind() == v1::DEVICE_KIND_CUDA; };
  if (response.devices_size() < 2 || !absl::c_all_of(response.devices(), is_cuda)) return visible;
  const absl::StatusOr<std::vector<std::unique_ptr<Device>>> own = MakeCudaDevices();
  if (!own.ok()) return visible;
  for (const v1::Device& device : response.devices()) {
    const auto is_it = [&](const std::unique_ptr<Device>& seen) { return seen->properties().uuid == device.uuid(); };
    if (absl::c_any_of(*own, is_it)) visible.push_back(device.uuid());
  }
  if (visible.size() == static_cast<size_t>(response.devices_size())) visible.clear();
  return visible;
}

}  // namespace vrambroker::client_internal
