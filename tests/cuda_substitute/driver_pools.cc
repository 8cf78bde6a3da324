// SPDX-License-Identifier: Apache-2.0
//
// Memory pools, and memory that is taken and freed in the order of a stream. Pools belong to a device or the host, and
// to no context.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <tuple>
#include <utility>

#include "tests/cuda_substitute/driver.h"
#include "tests/cuda_substitute/driver_state.h"
#include "tests/cuda_substitute/machine.h"

namespace vrambroker::cuda_substitute {
namespace {

constexpr uint64_t kBlock = uint64_t{32} << 20;  // a pool reserves as much at once, where there is room
constexpr uint64_t kUnit = 512;                  // the unit of allocations

struct PoolRange {
  uint64_t bytes = 0;
  bool used = true;
  const StreamState* freed_on = nullptr;
  Clock::time_point free_at;
  uint64_t behind = 0;  // a host function that the stream waited for
};

struct Block {
  Hold hold;
  std::map<uint64_t, PoolRange> ranges;  // key: first offset; ranges are used, or freed and not yet free
};

// Says whose default pool a pool may be: the location's type and id, and the type of the memory.
using PoolKey = std::tuple<int, int, int>;

struct Pool {
  int place = 0;  // a physical device, or kHost
  PoolKey key;
  bool is_default = false;
  bool destroyed = false;
  uint64_t max_bytes = 0;  // the value 0 means no limit
  uint64_t threshold = 0;
  uint64_t reserved = 0;
  uint64_t reserved_high = 0;
  uint64_t used = 0;
  uint64_t used_high = 0;
  int reuse[3] = {1, 1, 1};
  std::map<char*, Block> blocks;
};

// REQUIRES: the driver's lock is held.
struct Pools {
  std::map<const void*, std::unique_ptr<Pool>> all;
  std::map<PoolKey, Pool*> defaults;
  std::map<PoolKey, Pool*> current;

  static Pools& Get() {
    static auto* const pools = new Pools;
    return *pools;
  }
  Pool* Add(const Pool& pool) {
    auto added = std::make_unique<Pool>(pool);
    Pool* const result = added.get();
    all[result] = std::move(added);
    return result;
  }
  // Returns null for an unknown or destroyed pool.
  Pool* Find(CUmemoryPool pool) {
    const auto it = all.find(pool);
    return it == all.end() || it->second->destroyed ? nullptr : it->second.get();
  }
  Pool* DefaultOf(const PoolKey& key, int place) {
    Pool*& pool = defaults[key];
    if (pool == nullptr) pool = Add({.place = place, .key = key, .is_default = true, .blocks = {}});
    return pool;
  }
  Pool* CurrentOf(const PoolKey& key, int place) {
    const auto it = current.find(key);
    return it == current.end() ? DefaultOf(key, place) : it->second;
  }
};

PoolKey OfDevice(int device) {
  return {CU_MEM_LOCATION_TYPE_DEVICE, device, CU_MEM_ALLOCATION_TYPE_PINNED};
}

PoolKey KeyOf(const CUmemLocation& location, CUmemAllocationType type) {
  const bool has_id = location.type != CU_MEM_LOCATION_TYPE_NONE && location.type != CU_MEM_LOCATION_TYPE_HOST;
  return {location.type, has_id ? location.id : 0, type};
}

// Finds the place of a pool for such memory. Returns no place when there is no such pool. Managed memory without a
// preferred location is on the thread's device.
std::optional<int> PlaceOfPool(const Driver& driver, const CUmemLocation& location, CUmemAllocationType type) {
  const bool is_managed = type == CU_MEM_ALLOCATION_TYPE_MANAGED;
  if (!is_managed && type != CU_MEM_ALLOCATION_TYPE_PINNED) return std::nullopt;
  if (is_managed && location.type == CU_MEM_LOCATION_TYPE_NONE) return driver.Physical(PreferredDevice());
  if (is_managed && static_cast<int>(location.type) == kDeviceLocalityDomain) return std::nullopt;
  return PlaceOf(driver, location);
}

CUmemoryPool HandleOf(Pool* pool) {
  return reinterpret_cast<CUmemoryPool>(pool);
}

// Freed memory is free again when the free has happened; for work on the same stream, at once.
void Settle(Block& block, const StreamState* stream) {
  const Clock::time_point now = Clock::now();
  for (auto it = block.ranges.begin(); it != block.ranges.end();) {
    const PoolRange& range = it->second;
    const bool has_happened =
        range.free_at == Driver::kUnknown ? !Driver::Get().Runs(range.behind) : range.free_at <= now;
    const bool is_free = !range.used && (has_happened || (stream != nullptr && range.freed_on == stream));
    it = is_free ? block.ranges.erase(it) : std::next(it);
  }
}

std::optional<uint64_t> FindGap(const Block& block, uint64_t bytes) {
  uint64_t begin = 0;
  for (const auto& [offset, range] : block.ranges) {
    if (offset - begin >= bytes) return begin;
    begin = offset + range.bytes;
  }
  return block.hold.bytes - begin >= bytes ? std::optional(begin) : std::nullopt;
}

std::optional<Hold> Grow(Driver& driver, Pool& pool, uint64_t bytes) {
  if (pool.max_bytes != 0 && bytes > pool.max_bytes - std::min(pool.max_bytes, pool.reserved)) return std::nullopt;
  return driver.machine()->Allocate(pool.place, bytes);
}

// Returns null when there is no room.
char* Take(Driver& driver, Pool& pool, uint64_t wanted, const StreamState* stream) {
  const uint64_t bytes = RoundUp(wanted, kUnit);
  const auto take = [&](char* base, Block& block, uint64_t offset) {
    block.ranges[offset] = {.bytes = bytes, .freed_on = nullptr, .free_at = {}, .behind = 0};
    pool.used += bytes;
    pool.used_high = std::max(pool.used_high, pool.used);
    return base + offset;
  };
  for (auto& [base, block] : pool.blocks) {
    Settle(block, stream);
    if (const std::optional<uint64_t> gap = FindGap(block, bytes); gap.has_value()) return take(base, block, *gap);
  }
  std::optional<Hold> hold = Grow(driver, pool, RoundUp(bytes, kBlock));
  if (!hold.has_value()) hold = Grow(driver, pool, RoundUp(bytes, kGranule));
  if (!hold.has_value()) return nullptr;
  pool.reserved += hold->bytes;
  pool.reserved_high = std::max(pool.reserved_high, pool.reserved);
  char* const base = driver.Map(*hold, Kind::kPool, kNoContext);
  return take(base, pool.blocks[base] = {.hold = *hold, .ranges = {}}, 0);
}

// Gives back empty blocks while `may_go` allows the pool to lose so many bytes.
template <typename MayGo>
void GiveBack(Driver& driver, Pool& pool, const MayGo& may_go) {
  for (auto it = pool.blocks.begin(); it != pool.blocks.end();) {
    const auto block = it++;
    Settle(block->second, nullptr);
    const Hold hold = block->second.hold;
    if (!block->second.ranges.empty() || !may_go(hold.bytes)) continue;
    driver.Unmap(block->first);
    driver.machine()->Release(hold, /*freed=*/true);
    pool.reserved -= hold.bytes;
    pool.blocks.erase(block);
  }
}

// Ends destroyed pools that have no allocation left.
void EndDestroyed(Driver& driver) {
  auto& all = Pools::Get().all;
  for (auto it = all.begin(); it != all.end();) {
    Pool& pool = *it->second;
    if (pool.destroyed) GiveBack(driver, pool, [](uint64_t) { return true; });
    it = pool.destroyed && pool.blocks.empty() ? all.erase(it) : std::next(it);
  }
}

struct Found {
  Pool* pool = nullptr;
  std::map<uint64_t, PoolRange>::iterator range;
  char* begin = nullptr;
};

// Returns the allocation that contains `address`.
std::optional<Found> FindAllocation(Driver& driver, const char* address) {
  const auto* const mapping = driver.MappingOf(address);
  if (mapping == nullptr || mapping->second.kind != Kind::kPool) return std::nullopt;
  for (const auto& [handle, pool] : Pools::Get().all) {
    const auto block = pool->blocks.find(mapping->first);
    if (block == pool->blocks.end()) continue;
    const auto offset = static_cast<uint64_t>(address - mapping->first);
    auto range = block->second.ranges.upper_bound(offset);
    if (range == block->second.ranges.begin()) return std::nullopt;
    --range;
    if (!range->second.used || offset - range->first >= range->second.bytes) return std::nullopt;
    return Found{.pool = pool.get(), .range = range, .begin = mapping->first + range->first};
  }
  return std::nullopt;
}

CUresult AllocateFrom(Driver& driver, Pool& pool, CUdeviceptr* address, size_t bytes, StreamState& stream) {
  if (bytes == 0) return CUDA_ERROR_INVALID_VALUE;
  if (stream.capturing()) {
    const int device = pool.place == kHost ? DeviceOf(stream.context) : driver.Ordinal(pool.place);
    return CaptureAllocation(driver, address, bytes, device, stream);
  }
  char* const memory = Take(driver, pool, bytes, &stream);
  if (memory == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
  *address = AddressOf(memory);
  return CUDA_SUCCESS;
}

}  // namespace

std::optional<std::pair<char*, uint64_t>> PoolAllocationAt(Driver& driver, const char* address) {
  const std::optional<Found> found = FindAllocation(driver, address);
  if (!found.has_value()) return std::nullopt;
  return std::make_pair(found->begin, found->range->second.bytes);
}

bool FreeInPool(Driver& driver, const char* address, const StreamState* stream) {
  const std::optional<Found> found = FindAllocation(driver, address);
  if (!found.has_value() || found->begin != address) return false;
  PoolRange& range = found->range->second;
  range.used = false;
  range.freed_on = stream;
  range.free_at = stream == nullptr ? Clock::now() : driver.DoneAt(*stream);
  range.behind = stream == nullptr ? 0 : stream->host_function;
  found->pool->used -= range.bytes;
  EndDestroyed(driver);
  return true;
}

void AfterSynchronize(Driver& driver) {
  const std::lock_guard<std::mutex> lock(driver.mu());
  for (const auto& [handle, pool] : Pools::Get().all) {
    GiveBack(driver, *pool, [&pool = *pool](uint64_t) { return pool.reserved > pool.threshold; });
  }
  EndDestroyed(driver);
}

}  // namespace vrambroker::cuda_substitute

using namespace vrambroker::cuda_substitute;  // NOLINT(google-build-using-namespace): the driver has C functions
using Lock = std::lock_guard<std::mutex>;

CUresult cuDeviceGetDefaultMemPool(CUmemoryPool* pool, CUdevice device) {
  return DeviceCall("cuDeviceGetDefaultMemPool", device, [&](Driver& driver) {
    const Lock lock(driver.mu());
    *pool = HandleOf(Pools::Get().DefaultOf(OfDevice(device), driver.Physical(device)));
    return CUDA_SUCCESS;
  });
}

CUresult cuDeviceGetMemPool(CUmemoryPool* pool, CUdevice device) {
  return DeviceCall("cuDeviceGetMemPool", device, [&](Driver& driver) {
    const Lock lock(driver.mu());
    *pool = HandleOf(Pools::Get().CurrentOf(OfDevice(device), driver.Physical(device)));
    return CUDA_SUCCESS;
  });
}

CUresult cuDeviceSetMemPool(CUdevice device, CUmemoryPool pool) {
  return DeviceCall("cuDeviceSetMemPool", device, [&](Driver& driver) {
    const Lock lock(driver.mu());
    Pool* const found = Pools::Get().Find(pool);
    if (found == nullptr || found->key != OfDevice(device)) return CUDA_ERROR_INVALID_VALUE;
    Pools::Get().current[found->key] = found;
    return CUDA_SUCCESS;
  });
}

CUresult cuMemGetDefaultMemPool(CUmemoryPool* pool, CUmemLocation* location, CUmemAllocationType type) {
  return Call("cuMemGetDefaultMemPool", [&](Driver& driver) {
    const std::optional<int> place = PlaceOfPool(driver, *location, type);
    if (!place.has_value()) return CUDA_ERROR_INVALID_VALUE;
    const Lock lock(driver.mu());
    *pool = HandleOf(Pools::Get().DefaultOf(KeyOf(*location, type), *place));
    return CUDA_SUCCESS;
  });
}

CUresult cuMemGetMemPool(CUmemoryPool* pool, CUmemLocation* location, CUmemAllocationType type) {
  return Call("cuMemGetMemPool", [&](Driver& driver) {
    const std::optional<int> place = PlaceOfPool(driver, *location, type);
    if (!place.has_value()) return CUDA_ERROR_INVALID_VALUE;
    const Lock lock(driver.mu());
    *pool = HandleOf(Pools::Get().CurrentOf(KeyOf(*location, type), *place));
    return CUDA_SUCCESS;
  });
}

CUresult cuMemSetMemPool(CUmemLocation* location, CUmemAllocationType type, CUmemoryPool pool) {
  return Call("cuMemSetMemPool", [&](Driver& driver) {
    const Lock lock(driver.mu());
    Pool* const found = Pools::Get().Find(pool);
    if (found == nullptr || found->key != KeyOf(*location, type)) return CUDA_ERROR_INVALID_VALUE;
    Pools::Get().current[found->key] = found;
    return CUDA_SUCCESS;
  });
}

CUresult cuMemPoolCreate(CUmemoryPool* pool, const CUmemPoolProps* properties) {
  return Call("cuMemPoolCreate", [&](Driver& driver) {
    const std::optional<int> place = PlaceOfPool(driver, properties->location, properties->allocType);
    const bool is_managed = properties->allocType == CU_MEM_ALLOCATION_TYPE_MANAGED;
    if (!place.has_value() || (is_managed && properties->maxSize != 0)) return CUDA_ERROR_INVALID_VALUE;
    if (properties->handleTypes != CU_MEM_HANDLE_TYPE_NONE) return CUDA_ERROR_NOT_SUPPORTED;
    const Lock lock(driver.mu());
    *pool = HandleOf(Pools::Get().Add({.place = *place,
                                       .key = KeyOf(properties->location, properties->allocType),
                                       .max_bytes = properties->maxSize,
                                       .blocks = {}}));
    return CUDA_SUCCESS;
  });
}

CUresult cuMemPoolDestroy(CUmemoryPool pool) {
  return Call("cuMemPoolDestroy", [&](Driver& driver) {
    const Lock lock(driver.mu());
    Pools& pools = Pools::Get();
    Pool* const found = pools.Find(pool);
    if (found == nullptr || found->is_default) return CUDA_ERROR_INVALID_VALUE;
    for (auto it = pools.current.begin(); it != pools.current.end();) {
      it = it->second == found ? pools.current.erase(it) : std::next(it);
    }
    found->destroyed = true;
    EndDestroyed(driver);
    return CUDA_SUCCESS;
  });
}

CUresult cuMemPoolGetAttribute(CUmemoryPool pool, CUmemPool_attribute attribute, void* value) {
  return Call("cuMemPoolGetAttribute", [&](Driver& driver) {
    const Lock lock(driver.mu());
    const Pool* const found = Pools::Get().Find(pool);
    if (found == nullptr) return CUDA_ERROR_INVALID_VALUE;
    const auto give = [value](uint64_t bytes) {
      std::memcpy(value, &bytes, sizeof bytes);
      return CUDA_SUCCESS;
    };
    switch (attribute) {
      case CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES:
      case CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC:
      case CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES:
        std::memcpy(value, &found->reuse[attribute - CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES], sizeof(int));
        return CUDA_SUCCESS;
      case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD:
        return give(found->threshold);
      case CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT:
        return give(found->reserved);
      case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
        return give(found->reserved_high);
      case CU_MEMPOOL_ATTR_USED_MEM_CURRENT:
        return give(found->used);
      case CU_MEMPOOL_ATTR_USED_MEM_HIGH:
        return give(found->used_high);
      default:
        return CUDA_ERROR_INVALID_VALUE;
    }
  });
}

// Accepts only 0 for the highest values, which then become the current values. The reuse attributes have no effect.
CUresult cuMemPoolSetAttribute(CUmemoryPool pool, CUmemPool_attribute attribute, void* value) {
  return Call("cuMemPoolSetAttribute", [&](Driver& driver) {
    const Lock lock(driver.mu());
    Pool* const found = Pools::Get().Find(pool);
    if (found == nullptr) return CUDA_ERROR_INVALID_VALUE;
    uint64_t bytes = 0;
    switch (attribute) {
      case CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES:
      case CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC:
      case CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES:
        std::memcpy(&found->reuse[attribute - CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES], value, sizeof(int));
        return CUDA_SUCCESS;
      case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD:
        std::memcpy(&found->threshold, value, sizeof found->threshold);
        return CUDA_SUCCESS;
      case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
      case CU_MEMPOOL_ATTR_USED_MEM_HIGH:
        std::memcpy(&bytes, value, sizeof bytes);
        if (bytes != 0) return CUDA_ERROR_INVALID_VALUE;
        if (attribute == CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH) found->reserved_high = found->reserved;
        if (attribute == CU_MEMPOOL_ATTR_USED_MEM_HIGH) found->used_high = found->used;
        return CUDA_SUCCESS;
      default:
        return CUDA_ERROR_INVALID_VALUE;
    }
  });
}

CUresult cuMemPoolTrimTo(CUmemoryPool pool, size_t keep) {
  return Call("cuMemPoolTrimTo", [&](Driver& driver) {
    const Lock lock(driver.mu());
    Pool* const found = Pools::Get().Find(pool);
    if (found == nullptr) return CUDA_ERROR_INVALID_VALUE;
    GiveBack(driver, *found,
             [&](uint64_t bytes) { return found->reserved >= bytes && found->reserved - bytes >= keep; });
    return CUDA_SUCCESS;
  });
}

CUresult cuMemAllocAsync(CUdeviceptr* address, size_t bytes, CUstream stream) {
  ZeroBeforeInit(address);
  return ContextCall("cuMemAllocAsync", [&](Driver& driver) {
    const Lock lock(driver.mu());
    StreamState* const state = driver.Stream(stream);
    if (state == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    const int device = DeviceOf(state->context);
    Pool& pool = *Pools::Get().CurrentOf(OfDevice(device), driver.Physical(device));
    return AllocateFrom(driver, pool, address, bytes, *state);
  });
}

CUresult cuMemAllocFromPoolAsync(CUdeviceptr* address, size_t bytes, CUmemoryPool pool, CUstream stream) {
  ZeroBeforeInit(address);
  return ContextCall("cuMemAllocFromPoolAsync", [&](Driver& driver) {
    const Lock lock(driver.mu());
    StreamState* const state = driver.Stream(stream);
    Pool* const found = Pools::Get().Find(pool);
    if (state == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    if (found == nullptr) return CUDA_ERROR_INVALID_VALUE;
    return AllocateFrom(driver, *found, address, bytes, *state);
  });
}

// Memory of cuMemAlloc() comes back at once.
CUresult cuMemFreeAsync(CUdeviceptr address, CUstream stream) {
  return ContextCall("cuMemFreeAsync", [&](Driver& driver) {
    char* const pointer = PointerTo(address);
    const Lock lock(driver.mu());
    StreamState* const state = driver.Stream(stream);
    if (state == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    if (state->capturing()) return CaptureFree(driver, pointer, *state);
    const auto* const mapping = driver.MappingOf(pointer);
    if (mapping == nullptr) return CUDA_ERROR_INVALID_VALUE;
    switch (mapping->second.kind) {
      case Kind::kPool:
        return FreeInPool(driver, pointer, state) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
      case Kind::kGraph:
        return FreeOfGraph(driver, pointer, state) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
      case Kind::kAllocated: {
        if (mapping->first != pointer) return CUDA_ERROR_INVALID_VALUE;
        const Hold hold = mapping->second.hold;
        driver.Unmap(pointer);
        driver.machine()->Release(hold, /*freed=*/true);
        return CUDA_SUCCESS;
      }
      default:
        return CUDA_ERROR_INVALID_VALUE;
    }
  });
}
