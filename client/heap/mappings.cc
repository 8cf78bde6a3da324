// SPDX-License-Identifier: Apache-2.0
#include "client/heap/mappings.h"

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "client/heap/stream_waits.h"

namespace vrambroker::client_internal {

void Mappings::AddStream(Mapping& mapping, Stream stream) {
  auto& streams = mapping.streams;
  if (std::find(streams.begin(), streams.end(), stream) == streams.end()) streams.push_back(stream);
}

absl::StatusOr<void*> Mappings::Open(uint64_t segment_id, uint64_t bytes, Stream stream, SegmentOpener* device,
                                     const std::function<absl::StatusOr<SegmentHandle>()>& fetch) {
  {
    MutexLock lock(mu_);
    while (true) {
      const auto it = mappings_.find(segment_id);
      if (it == mappings_.end()) break;
      if (it->second.address != nullptr) {
        AddStream(it->second, stream);
        return it->second.address;
      }
      opened_.Wait(mu_);
    }
    mappings_[segment_id] = Mapping{.device = device, .bytes = bytes, .streams = {stream}};
  }
  absl::StatusOr<SegmentHandle> handle = fetch();
  absl::StatusOr<void*> address = handle.ok() ? device->OpenHandle(*handle, bytes) : handle.status();
  MutexLock lock(mu_);
  if (address.ok()) {
    mappings_[segment_id].address = *address;
  } else {
    mappings_.erase(segment_id);  // the next caller tries again
  }
  opened_.NotifyAll();
  return address;
}

std::vector<uint64_t> Mappings::Close(const std::vector<uint64_t>& segment_ids) {
  std::vector<uint64_t> closed;
  std::vector<std::pair<uint64_t, Mapping>> closing;
  {
    MutexLock lock(mu_);
    for (const uint64_t id : segment_ids) {
      const auto it = mappings_.find(id);
      if (it == mappings_.end() || it->second.address == nullptr) {
        closed.push_back(id);
        continue;
      }
      closing.emplace_back(id, std::move(it->second));
      mappings_.erase(it);
    }
  }
  std::map<SegmentOpener*, StreamWaits> waits;
  for (const auto& [id, mapping] : closing) {
    StreamWaits& of_device = waits.try_emplace(mapping.device, mapping.device).first->second;
    const bool is_unused = std::all_of(mapping.streams.begin(), mapping.streams.end(),
                                       [&](Stream stream) { return of_device.WaitFor(stream).ok(); });
    if (is_unused && mapping.device->CloseHandle(mapping.address, mapping.bytes).ok()) {
      closed.push_back(id);
      continue;
    }
    MutexLock lock(mu_);
    mappings_.emplace(id, mapping);
    refused_.push_back(id);
  }
  return closed;
}

std::vector<uint64_t> Mappings::CloseRefused() {
  std::vector<uint64_t> refused;
  {
    MutexLock lock(mu_);
    refused.swap(refused_);
  }
  return Close(refused);
}

bool Mappings::CloseAll() {
  std::vector<uint64_t> ids;
  {
    MutexLock lock(mu_);
    ids.reserve(mappings_.size());
    for (const auto& [id, mapping] : mappings_) ids.push_back(id);
  }
  return Close(ids).size() == ids.size();
}

}  // namespace vrambroker::client_internal
