// SPDX-License-Identifier: Apache-2.0
#include "client/mappings.h"

#include <vector>

namespace vrambroker::client_internal {

absl::StatusOr<void*> Mappings::Open(uint64_t segment_id, uint64_t bytes, Device* device,
                                     const std::function<absl::StatusOr<SegmentHandle>()>& fetch) {
  {
    MutexLock lock(mu_);
    while (true) {
      const auto it = mappings_.find(segment_id);
      if (it == mappings_.end()) break;
      if (it->second.address != nullptr) return it->second.address;
      opened_.Wait(mu_);
    }
    mappings_[segment_id] = Mapping{.device = device, .bytes = bytes};
  }
  absl::StatusOr<SegmentHandle> handle = fetch();
  absl::StatusOr<void*> address = handle.ok() ? device->OpenHandle(*handle, bytes) : handle.status();
  MutexLock lock(mu_);
  if (address.ok()) {
    mappings_[segment_id].address = *address;
  } else {
    mappings_.erase(segment_id);  // the next one who wants it tries again
  }
  opened_.NotifyAll();
  return address;
}

bool Mappings::Close(uint64_t segment_id) {
  Mapping mapping;
  {
    MutexLock lock(mu_);
    const auto it = mappings_.find(segment_id);
    if (it == mappings_.end() || it->second.address == nullptr) return true;
    mapping = it->second;
    mappings_.erase(it);
  }
  if (mapping.device->CloseHandle(mapping.address, mapping.bytes).ok()) return true;
  MutexLock lock(mu_);
  mappings_.emplace(segment_id, mapping);
  refused_.push_back(segment_id);
  return false;
}

std::vector<uint64_t> Mappings::CloseRefused() {
  std::vector<uint64_t> refused;
  {
    MutexLock lock(mu_);
    refused.swap(refused_);
  }
  std::vector<uint64_t> closed;
  for (const uint64_t id : refused) {
    if (Close(id)) closed.push_back(id);
  }
  return closed;
}

bool Mappings::CloseAll() {
  std::vector<uint64_t> ids;
  {
    MutexLock lock(mu_);
    ids.reserve(mappings_.size());
    for (const auto& [id, mapping] : mappings_) ids.push_back(id);
  }
  bool closed = true;
  for (const uint64_t id : ids) closed = Close(id) && closed;
  return closed;
}

}  // namespace vrambroker::client_internal
