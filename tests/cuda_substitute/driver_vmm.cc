// SPDX-License-Identifier: Apache-2.0
//
// Virtual memory management: memory by handle, addresses without memory, and mappings. The objects belong to no
// context.
#include <unistd.h>

#include <cstdint>
#include <iterator>
#include <map>
#include <mutex>
#include <optional>
#include <tuple>

#include "tests/cuda_substitute/driver.h"
#include "tests/cuda_substitute/driver_state.h"
#include "tests/cuda_substitute/machine.h"

namespace vrambroker::cuda_substitute {
namespace {

// Memory lives while a handle or a mapping does, in this process or in another process.
struct MemoryHandle {
  Hold hold;
  bool shareable = false;
  uint32_t references = 1;
  uint32_t mappings = 0;
};

// REQUIRES: the driver's lock is held.
struct Vmm {
  CUmemGenericAllocationHandle last = 0;
  std::map<CUmemGenericAllocationHandle, MemoryHandle> handles;
  std::map<char*, size_t> reservations;
  std::map<char*, CUmemGenericAllocationHandle> mapped;  // key: the first address
  // The key is the array, the level, the layer, and the start of the part. The substitute does not play mip tails.
  using Tile = std::tuple<const void*, unsigned int, unsigned int, unsigned int, unsigned int, unsigned int>;
  std::map<Tile, CUmemGenericAllocationHandle> tiles;

  static Vmm& Get() {
    static auto* const vmm = new Vmm;
    return *vmm;
  }
  CUmemGenericAllocationHandle Add(const MemoryHandle& handle) {
    handles[++last] = handle;
    return last;
  }
  // Returns null for an unknown or released handle: mappings alone keep no handle.
  MemoryHandle* Find(CUmemGenericAllocationHandle handle) {
    const auto it = handles.find(handle);
    return it == handles.end() || it->second.references == 0 ? nullptr : &it->second;
  }
  void Settle(Driver& driver, CUmemGenericAllocationHandle handle) {
    const MemoryHandle& state = handles.at(handle);
    if (state.references > 0 || state.mappings > 0) return;
    driver.machine()->Release(state.hold, /*freed=*/false);
    handles.erase(handle);
  }
  void Unmap(Driver& driver, CUmemGenericAllocationHandle handle) {
    --handles.at(handle).mappings;
    Settle(driver, handle);
  }
  bool IsReserved(char* address, size_t bytes) const {
    auto it = reservations.upper_bound(address);
    if (it == reservations.begin()) return false;
    --it;
    const auto offset = static_cast<size_t>(address - it->first);
    return offset < it->second && bytes <= it->second - offset;
  }
};

// Returns the mappings that make up [address, address + bytes) without a gap. Returns no mapping when there is a gap,
// or a part of a mapping.
std::vector<char*> MappingsIn(Driver& driver, char* address, size_t bytes) {
  std::vector<char*> found;
  for (char* at = address; at < address + bytes;) {
    const Mapping* const mapping = driver.MappingAt(at);
    if (mapping == nullptr || mapping->kind != Kind::kMapped) return {};
    found.push_back(at);
    at += mapping->bytes;
    if (at > address + bytes) return {};
  }
  return found;
}

bool IsWhole(uint64_t bytes) {
  return bytes != 0 && bytes % kGranule == 0;
}

CUresult NoSuchPlace(const CUmemLocation& location) {
  return location.type == CU_MEM_LOCATION_TYPE_DEVICE ? CUDA_ERROR_INVALID_DEVICE : CUDA_ERROR_INVALID_VALUE;
}

}  // namespace

void UnmapTiles(Driver& driver, const void* array) {
  Vmm& vmm = Vmm::Get();
  for (auto it = vmm.tiles.begin(); it != vmm.tiles.end();) {
    if (std::get<0>(it->first) != array) {
      ++it;
      continue;
    }
    vmm.Unmap(driver, it->second);
    it = vmm.tiles.erase(it);
  }
}

}  // namespace vrambroker::cuda_substitute

using namespace vrambroker::cuda_substitute;  // NOLINT(google-build-using-namespace): the driver has C functions
using Lock = std::lock_guard<std::mutex>;

CUresult cuMemGetAllocationGranularity(size_t* bytes, const CUmemAllocationProp* properties,
                                       CUmemAllocationGranularity_flags /*option*/) {
  return Call("cuMemGetAllocationGranularity", [&](Driver& driver) {
    if (!PlaceOf(driver, properties->location).has_value()) return NoSuchPlace(properties->location);
    *bytes = kGranule;
    return CUDA_SUCCESS;
  });
}

CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t bytes, const CUmemAllocationProp* properties,
                     unsigned long long flags) {
  return Call("cuMemCreate", [&](Driver& driver) {
    const CUmemAllocationHandleType type = properties->requestedHandleTypes;
    const std::optional<int> place = PlaceOf(driver, properties->location);
    if (!place.has_value()) return NoSuchPlace(properties->location);
    if (flags != 0 || !IsWhole(bytes) || properties->type != CU_MEM_ALLOCATION_TYPE_PINNED) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    if (type != CU_MEM_HANDLE_TYPE_NONE && properties->location.type == CU_MEM_LOCATION_TYPE_HOST) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    if ((type & ~CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) != 0) return CUDA_ERROR_NOT_SUPPORTED;
    const std::optional<Hold> hold = driver.machine()->Allocate(*place, bytes);
    if (!hold.has_value()) return CUDA_ERROR_OUT_OF_MEMORY;
    const Lock lock(driver.mu());
    *handle = Vmm::Get().Add({.hold = *hold, .shareable = type != CU_MEM_HANDLE_TYPE_NONE});
    return CUDA_SUCCESS;
  });
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  return Call("cuMemRelease", [&](Driver& driver) {
    const Lock lock(driver.mu());
    MemoryHandle* const state = Vmm::Get().Find(handle);
    if (state == nullptr) return CUDA_ERROR_INVALID_VALUE;
    --state->references;
    Vmm::Get().Settle(driver, handle);
    return CUDA_SUCCESS;
  });
}

// Works for a released handle, too, while the handle's memory is mapped.
CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle* handle, void* address) {
  return Call("cuMemRetainAllocationHandle", [&](Driver& driver) {
    const Lock lock(driver.mu());
    const auto* const mapping = driver.MappingOf(address);
    if (mapping == nullptr || mapping->second.kind != Kind::kMapped) return CUDA_ERROR_INVALID_VALUE;
    *handle = Vmm::Get().mapped.at(mapping->first);
    ++Vmm::Get().handles.at(*handle).references;
    return CUDA_SUCCESS;
  });
}

CUresult cuMemAddressReserve(CUdeviceptr* address, size_t bytes, size_t alignment, CUdeviceptr /*hint*/,
                             unsigned long long flags) {
  return Call("cuMemAddressReserve", [&](Driver& driver) {
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    if (flags != 0 || bytes == 0 || bytes % page != 0) return CUDA_ERROR_INVALID_VALUE;
    if ((alignment & (alignment - 1)) != 0) return CUDA_ERROR_INVALID_VALUE;
    const Lock lock(driver.mu());
    char* const reserved = driver.Reserve(bytes, std::max(alignment, kGranule));
    Vmm::Get().reservations[reserved] = bytes;
    *address = AddressOf(reserved);
    return CUDA_SUCCESS;
  });
}

CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes) {
  return Call("cuMemAddressFree", [&](Driver& driver) {
    const Lock lock(driver.mu());
    Vmm& vmm = Vmm::Get();
    const auto it = vmm.reservations.find(PointerTo(address));
    if (it == vmm.reservations.end() || it->second != bytes) return CUDA_ERROR_INVALID_VALUE;
    const auto mapped = vmm.mapped.lower_bound(it->first);
    if (mapped != vmm.mapped.end() && mapped->first < it->first + bytes) return CUDA_ERROR_INVALID_VALUE;
    munmap(it->first, bytes);
    vmm.reservations.erase(it);
    return CUDA_SUCCESS;
  });
}

CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags) {
  return Call("cuMemMap", [&](Driver& driver) {
    char* const pointer = PointerTo(address);
    const Lock lock(driver.mu());
    Vmm& vmm = Vmm::Get();
    MemoryHandle* const state = vmm.Find(handle);
    if (state == nullptr || flags != 0 || offset != 0) return CUDA_ERROR_INVALID_VALUE;
    if (address % kGranule != 0 || !IsWhole(bytes) || bytes > state->hold.bytes) return CUDA_ERROR_INVALID_VALUE;
    if (!vmm.IsReserved(pointer, bytes) || driver.MappingOf(pointer) != nullptr) return CUDA_ERROR_INVALID_VALUE;
    const auto next = vmm.mapped.lower_bound(pointer);
    if (next != vmm.mapped.end() && next->first < pointer + bytes) return CUDA_ERROR_INVALID_VALUE;
    driver.MapAt(pointer, state->hold, Kind::kMapped, kNoContext);
    Mapping* const mapping = driver.MappingAt(pointer);
    mapping->bytes = bytes;
    mapping->accessible = false;
    vmm.mapped[pointer] = handle;
    ++state->mappings;
    return CUDA_SUCCESS;
  });
}

CUresult cuMemUnmap(CUdeviceptr address, size_t bytes) {
  return Call("cuMemUnmap", [&](Driver& driver) {
    const Lock lock(driver.mu());
    const std::vector<char*> mappings = MappingsIn(driver, PointerTo(address), bytes);
    if (mappings.empty()) return CUDA_ERROR_INVALID_VALUE;
    for (char* const mapping : mappings) {
      const auto it = Vmm::Get().mapped.find(mapping);
      const CUmemGenericAllocationHandle handle = it->second;
      Vmm::Get().mapped.erase(it);
      driver.Forget(mapping);
      Vmm::Get().Unmap(driver, handle);
    }
    return CUDA_SUCCESS;
  });
}

// Maps at once, without waiting for the stream.
CUresult cuMemMapArrayAsync(CUarrayMapInfo* tiles, unsigned int count, CUstream /*stream*/) {
  return Call("cuMemMapArrayAsync", [&](Driver& driver) {
    const Lock lock(driver.mu());
    Vmm& vmm = Vmm::Get();
    for (unsigned int i = 0; i < count; ++i) {
      const auto& part = tiles[i].subresource.sparseLevel;
      MemoryHandle* const state = vmm.Find(tiles[i].memHandle.memHandle);
      const bool maps = tiles[i].memOperationType == CU_MEM_OPERATION_TYPE_MAP;
      if (tiles[i].subresourceType != CU_ARRAY_SPARSE_SUBRESOURCE_TYPE_SPARSE_LEVEL) return CUDA_ERROR_NOT_SUPPORTED;
      if (maps && state == nullptr) return CUDA_ERROR_INVALID_VALUE;
      const Vmm::Tile tile = {
          tiles[i].resource.array, part.level, part.layer, part.offsetX, part.offsetY, part.offsetZ};
      if (maps) ++state->mappings;
      if (const auto before = vmm.tiles.find(tile); before != vmm.tiles.end()) {
        vmm.Unmap(driver, before->second);
        vmm.tiles.erase(before);
      }
      if (maps) vmm.tiles[tile] = tiles[i].memHandle.memHandle;
    }
    return CUDA_SUCCESS;
  });
}

CUresult cuMemSetAccess(CUdeviceptr address, size_t bytes, const CUmemAccessDesc* accesses, size_t count) {
  return Call("cuMemSetAccess", [&](Driver& driver) {
    const Lock lock(driver.mu());
    const std::vector<char*> mappings = MappingsIn(driver, PointerTo(address), bytes);
    if (mappings.empty() || count == 0) return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < count; ++i) {
      if (!PlaceOf(driver, accesses[i].location).has_value()) return NoSuchPlace(accesses[i].location);
      for (char* const mapping : mappings) {
        driver.MappingAt(mapping)->accessible = accesses[i].flags != CU_MEM_ACCESS_FLAGS_PROT_NONE;
      }
    }
    return CUDA_SUCCESS;
  });
}

CUresult cuMemExportToShareableHandle(void* shareable, CUmemGenericAllocationHandle handle,
                                      CUmemAllocationHandleType type, unsigned long long flags) {
  return Call("cuMemExportToShareableHandle", [&](Driver& driver) {
    const Lock lock(driver.mu());
    const MemoryHandle* const state = Vmm::Get().Find(handle);
    if (state == nullptr || flags != 0 || !state->shareable) return CUDA_ERROR_INVALID_VALUE;
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_INVALID_VALUE;
    *static_cast<int*>(shareable) = driver.machine()->Export(state->hold);
    return CUDA_SUCCESS;
  });
}

// Each import gives another handle.
CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* handle, void* shareable,
                                        CUmemAllocationHandleType type) {
  return Call("cuMemImportFromShareableHandle", [&](Driver& driver) {
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_NOT_SUPPORTED;
    const Lock lock(driver.mu());
    const std::optional<Hold> hold = driver.machine()->Import(static_cast<int>(reinterpret_cast<intptr_t>(shareable)));
    if (!hold.has_value()) return CUDA_ERROR_INVALID_VALUE;
    if (hold->device != kHost && driver.Ordinal(hold->device) < 0) {
      driver.machine()->Release(*hold, /*freed=*/false);
      return CUDA_ERROR_NOT_SUPPORTED;
    }
    *handle = Vmm::Get().Add({.hold = *hold, .shareable = true});
    return CUDA_SUCCESS;
  });
}
