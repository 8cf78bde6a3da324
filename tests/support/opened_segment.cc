// SPDX-License-Identifier: Apache-2.0
#include "tests/support/opened_segment.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

#include "allocator/device/cuda_device.h"
#include "allocator/device/host_device.h"
#include "client/connection/descriptor_channel.h"
#include "tests/support/test_device.h"
#include "tests/support/util.h"

namespace vrambroker::testing_support {
namespace {

absl::StatusOr<std::unique_ptr<Device>> FindDevice(const std::string& uuid) {
  if (!OnCuda()) return MakeHostDevice(0, 0);
  absl::StatusOr<std::vector<std::unique_ptr<Device>>> devices = MakeCudaDevices();
  if (!devices.ok()) return devices.status();
  const auto it = std::find_if(devices->begin(), devices->end(),
                               [&](const auto& device) { return device->properties().uuid == uuid; });
  if (it == devices->end()) return absl::NotFoundError("no GPU " + uuid);
  return std::move(*it);
}

absl::StatusOr<SegmentHandle> Fetch(const std::string& dir, const v1::SegmentHandle& handle) {
  if (OnCuda()) {
    CudaIpcHandle ipc = {};
    std::memcpy(ipc.data(), handle.cuda_ipc().data(), std::min(ipc.size(), handle.cuda_ipc().size()));
    return SegmentHandle(ipc);
  }
  absl::StatusOr<UniqueFd> descriptor =
      client_internal::DescriptorChannel(dir).Fetch(handle.descriptor_ticket(), kPatience);
  if (!descriptor.ok()) return descriptor.status();
  return SegmentHandle(*std::move(descriptor));
}

}  // namespace

absl::StatusOr<OpenedSegment> OpenedSegment::Open(const std::string& dir, const std::string& uuid,
                                                  const v1::SegmentHandle& handle, uint64_t bytes) {
  absl::StatusOr<std::unique_ptr<Device>> device = FindDevice(uuid);
  if (!device.ok()) return device.status();
  const absl::StatusOr<SegmentHandle> fetched = Fetch(dir, handle);
  if (!fetched.ok()) return fetched.status();
  const absl::StatusOr<void*> memory = (*device)->OpenHandle(*fetched, bytes);
  if (!memory.ok()) return memory.status();
  return OpenedSegment(*std::move(device), *memory, bytes);
}

OpenedSegment::~OpenedSegment() {
  if (device_ != nullptr) (void)device_->CloseHandle(memory_, bytes_);
}

void OpenedSegment::Fill(uint64_t seed) {
  std::string content(bytes_, '?');
  testing_support::Fill(content.data(), bytes_, seed);
  if (!device_->CopyIn(memory_, content.data(), bytes_).ok()) std::abort();
}

bool OpenedSegment::Holds(uint64_t seed) const {
  std::string content(bytes_, '?');
  if (!device_->CopyOut(content.data(), memory_, bytes_).ok()) std::abort();
  return testing_support::Holds(content.data(), bytes_, seed);
}

}  // namespace vrambroker::testing_support
