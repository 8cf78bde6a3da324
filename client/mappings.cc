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

void Mappings::Close(uint64_t segment_id) {
  Mapping mapping;
  {
    MutexLock lock(mu_);
    const auto it = mappings_.find(segment_id);
    if (it == mappings_.end() || it->second.address == nullptr) return;
    mapping = it->second;
    mappings_.erase(it);
  }
  // An error here leaves a mapping that nobody uses; there is nobody to tell.
  (void)mapping.device->CloseHandle(mapping.address, mapping.bytes);
}

void Mappings::CloseAll() {
  std::vector<uint64_t> ids;
  {
    MutexLock lock(mu_);
    for (const auto& [id, mapping] : mappings_) ids.push_back(id);
  }
  for (const uint64_t id : ids) Close(id);
}

}  // namespace vrambroker::client_internal
