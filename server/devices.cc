// SPDX-License-Identifier: Apache-2.0
#include "server/devices.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <iterator>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "allocator/base/bytes.h"
#include "allocator/base/segment_bytes.h"
#include "allocator/device/cuda_device.h"
#include "allocator/device/host_device.h"
#include "server/base/log_line.h"
#include "server/identity/driver_gpus.h"
#include "server/identity/saved_segments.h"

namespace vrambroker {
namespace {

bool HasDefaultCapacity(const SegmentOwner& device, const Config& config) {
  return !config.capacity.has_value() && device.properties().has_other_programs;
}

// The configured capacity of a device, or the configured share of `memory_bytes`; `otherwise` if not configured.
uint64_t ConfiguredCapacity(const Config& config, uint64_t memory_bytes, uint64_t otherwise) {
  if (!config.capacity.has_value()) return otherwise;
  if (const uint64_t* bytes = std::get_if<uint64_t>(&*config.capacity)) return *bytes;
  const double share = std::get<double>(*config.capacity) * static_cast<double>(memory_bytes);
  return std::min(static_cast<uint64_t>(share), memory_bytes) / kSegmentGranuleBytes * kSegmentGranuleBytes;
}

absl::StatusOr<uint64_t> ChooseCapacity(SegmentOwner& device, const Config& config, SavedState* state) {
  const DeviceProperties& properties = device.properties();
  const absl::StatusOr<uint64_t> free = device.FreeBytes();
  if (!free.ok()) return free.status();
  uint64_t capacity = properties.total_bytes;  // a host device was made as large as configured
  uint64_t most_free = 0;
  if (properties.has_other_programs) {
    capacity = ConfiguredCapacity(config, properties.total_bytes, capacity);
    uint64_t& saved = state->free_bytes[properties.uuid];
    saved = std::min(properties.total_bytes, std::max(saved, *free));
    most_free = saved;
  }
  if (HasDefaultCapacity(device, config)) {
    const uint64_t usable = most_free - std::min(most_free, config.headroom_bytes);
    capacity = usable / kSegmentGranuleBytes * kSegmentGranuleBytes;
    if (capacity == 0) {
      return absl::ResourceExhaustedError(absl::StrCat(
          "nothing is left of device ", properties.ordinal, ": ", FormatBytes(*free), " of its ",
          FormatBytes(properties.total_bytes), " is free, and headroom is ", FormatBytes(config.headroom_bytes),
          "; other programs use it (nvidia-smi), or set headroom or capacity"));
    }
  }
  if (capacity > properties.total_bytes || capacity < kSegmentGranuleBytes) {
    return absl::InvalidArgumentError(absl::StrCat("capacity: ", FormatBytes(capacity), " of device ",
                                                   properties.ordinal, ", which has ",
                                                   FormatBytes(properties.total_bytes)));
  }
  if (capacity > *free) {
    spdlog::warn(
        "device={} capacity {} is more than the {} that are free now: other programs use the device, or clients of an "
        "earlier run of the daemon",
        properties.ordinal, FormatBytes(capacity), FormatBytes(*free));
  }
  return capacity;
}

// Checks before a client notices: a device whose memory cannot be shared is useless here.
absl::Status CheckCanShare(SegmentOwner& device) {
  const absl::StatusOr<DeviceSegment> segment = device.AllocateSegment(kSegmentGranuleBytes);
  if (!segment.ok()) return segment.status();
  const absl::Status exported = device.ExportSegment(*segment).status();
  const absl::Status freed = device.FreeSegment(*segment);
  return exported.ok() ? freed : exported;
}

}  // namespace

absl::StatusOr<std::vector<ChosenDevice>> ChooseDevices(const Config& config, SavedState* state) {
  std::vector<std::unique_ptr<SegmentOwner>> devices;
  std::string why = "as configured";
  if (config.device != DeviceChoice::kHost) {
    absl::StatusOr<std::vector<std::unique_ptr<Device>>> cuda = MakeCudaDevices();
    if (cuda.ok()) {
      std::move(cuda->begin(), cuda->end(), std::back_inserter(devices));
      LogLine("cuda found").Add("cuda", CudaVersions()).Write(spdlog::level::info);
      if (config.device == DeviceChoice::kAuto) why = "auto: a GPU is usable";
    } else if (config.device == DeviceChoice::kCuda) {
      const std::string advice = AdviceFor(FindDriverGpus());
      return absl::Status(cuda.status().code(),
                          absl::StrCat("device cuda: ", cuda.status().message(), advice.empty() ? "" : "; ", advice,
                                       "; --device=host needs no GPU"));
    } else {
      if (absl::Status status = CheckMayServeHost(FindDriverGpus(), cuda.status()); !status.ok()) return status;
      why = absl::StrCat("auto: ", cuda.status().message());
    }
  }
  if (devices.empty()) {
    if (config.host_driver_latency > absl::ZeroDuration()) {
      spdlog::warn("simulated driver latency {} on every segment allocated and freed: for benchmarks only",
                   absl::FormatDuration(config.host_driver_latency));
    }
    const uint64_t memory = HostMemoryBytes();
    const uint64_t capacity = ConfiguredCapacity(config, memory, DefaultHostBytes());
    if (capacity > memory / static_cast<uint64_t>(config.host_devices)) {
      spdlog::warn(
          "capacity {} on {} host device(s) is more than the {} of memory that this machine has: clients may be killed "
          "when they use it; set a lower --capacity",
          FormatBytes(capacity), config.host_devices, FormatBytes(memory));
    }
    for (int ordinal = 0; ordinal < config.host_devices; ++ordinal) {
      devices.push_back(MakeHostDevice(ordinal, capacity, absl::ToChronoNanoseconds(config.host_driver_latency),
                                       state->owner,
                                       std::make_unique<SavedSegments>(config.socket_dir, ordinal, state->owner,
                                                                       /*is_new_owner=*/state->is_new)));
    }
  }
  std::vector<ChosenDevice> chosen;
  for (std::unique_ptr<SegmentOwner>& device : devices) {
    const DeviceProperties& properties = device->properties();
    if (absl::Status status = properties.has_contexts ? CheckComputeMode(properties.ordinal) : absl::OkStatus();
        !status.ok()) {
      return status;
    }
    if (absl::Status status = CheckCanShare(*device); !status.ok()) {
      return absl::Status(status.code(), absl::StrCat("device ", properties.ordinal, " (", properties.name,
                                                      ") cannot be shared: ", status.message()));
    }
    const absl::StatusOr<uint64_t> capacity = ChooseCapacity(*device, config, state);
    if (!capacity.ok()) return capacity.status();
    LogLine("device ready")
        .Add("device", properties.ordinal)
        .Add("kind", properties.kind)
        .Add("name", properties.name)
        .Add("uuid", properties.uuid)
        .Add("total", properties.total_bytes)
        .Add("capacity", *capacity)
        .Add("why", why)
        .Write(spdlog::level::info);
    const uint64_t headroom = HasDefaultCapacity(*device, config) ? config.headroom_bytes : 0;
    const uint64_t most_free = properties.has_other_programs ? state->free_bytes[properties.uuid] : 0;
    chosen.push_back({.device = std::move(device),
                      .capacity_bytes = *capacity,
                      .headroom_bytes = headroom,
                      .most_free_bytes = most_free});
  }
  return chosen;
}

}  // namespace vrambroker
