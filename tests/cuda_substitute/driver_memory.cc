// SPDX-License-Identifier: Apache-2.0
//
// Memory that a context has: device memory by address, memory of the host, and memory shared by handles.
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <functional>
#include <mutex>
#include <optional>
#include <utility>

#include "tests/cuda_substitute/driver.h"
#include "tests/cuda_substitute/driver_state.h"
#include "tests/cuda_substitute/machine.h"

using namespace vrambroker::cuda_substitute;  // NOLINT(google-build-using-namespace): the driver has C functions
using Lock = std::lock_guard<std::mutex>;

// Allocates memory of the current context's device. `low` asks for an address of 32 bits.
static CUresult Allocate(const char* function, CUdeviceptr* address, size_t bytes, Kind kind, bool low = false) {
  ZeroBeforeInit(address);
  return UnsafeCall(function, [&](Driver& driver) {
    if (bytes == 0) return CUDA_ERROR_INVALID_VALUE;
    const std::optional<Hold> hold =
        driver.machine()->Allocate(driver.Physical(CurrentDevice()), RoundUp(bytes, kGranule));
    if (!hold.has_value()) return CUDA_ERROR_OUT_OF_MEMORY;
    const Lock lock(driver.mu());
    char* const pointer = low ? driver.ReserveLow(hold->bytes) : driver.Reserve(hold->bytes);
    driver.MapAt(pointer, *hold, kind, CurrentContext());
    *address = AddressOf(pointer);
    return CUDA_SUCCESS;
  });
}

CUresult cuMemAlloc_v2(CUdeviceptr* address, size_t bytes) {
  return Allocate("cuMemAlloc", address, bytes, Kind::kAllocated);
}

CUresult cuMemAlloc(Address32* address, unsigned int bytes) {
  CUdeviceptr memory = 0;
  ZeroBeforeInit(address);
  const CUresult error = Allocate("cuMemAlloc", &memory, bytes, Kind::kAllocated, /*low=*/true);
  if (error == CUDA_SUCCESS) *address = static_cast<Address32>(memory);
  return error;
}

static CUresult AllocatePitch(CUdeviceptr* address, size_t* pitch, size_t width, size_t height, unsigned int element,
                              bool low) {
  ZeroBeforeInit(pitch);
  constexpr size_t kPitch = 512;
  if (element != 4 && element != 8 && element != 16) return CUDA_ERROR_INVALID_VALUE;
  const size_t row = RoundUp(width, kPitch);
  const CUresult error = Allocate("cuMemAllocPitch", address, row * height, Kind::kAllocated, low);
  if (error == CUDA_SUCCESS) *pitch = row;
  return error;
}

CUresult cuMemAllocPitch_v2(CUdeviceptr* address, size_t* pitch, size_t width, size_t height, unsigned int element) {
  return AllocatePitch(address, pitch, width, height, element, /*low=*/false);
}

CUresult cuMemAllocPitch(Address32* address, unsigned int* pitch, unsigned int width, unsigned int height,
                         unsigned int element) {
  CUdeviceptr memory = 0;
  size_t row = 0;
  ZeroBeforeInit(address, pitch);
  const CUresult error = AllocatePitch(&memory, &row, width, height, element, /*low=*/true);
  if (error != CUDA_SUCCESS) return error;
  *address = static_cast<Address32>(memory);
  *pitch = static_cast<unsigned int>(row);
  return CUDA_SUCCESS;
}

// Takes device memory at once, and keeps the memory.
CUresult cuMemAllocManaged(CUdeviceptr* address, size_t bytes, unsigned int flags) {
  if (flags != CU_MEM_ATTACH_GLOBAL && flags != CU_MEM_ATTACH_HOST) return CUDA_ERROR_INVALID_VALUE;
  return Allocate("cuMemAllocManaged", address, bytes, Kind::kManaged);
}

CUresult cuMemFree_v2(CUdeviceptr address) {
  return UnsafeCall("cuMemFree", [&](Driver& driver) {
    char* const pointer = PointerTo(address);
    Hold hold;
    {
      const Lock lock(driver.mu());
      if (FreeInPool(driver, pointer, nullptr) || FreeOfGraph(driver, pointer, nullptr)) return CUDA_SUCCESS;
      const Mapping* const mapping = driver.MappingAt(pointer);
      if (mapping == nullptr || (mapping->kind != Kind::kAllocated && mapping->kind != Kind::kManaged)) {
        return CUDA_ERROR_INVALID_VALUE;
      }
      hold = mapping->hold;
    }
    WaitForContext(driver);
    {
      const Lock lock(driver.mu());
      driver.Unmap(pointer);
    }
    driver.machine()->Release(hold, /*freed=*/true);
    return CUDA_SUCCESS;
  });
}

CUresult cuMemFree(Address32 address) {
  return cuMemFree_v2(address);
}

CUresult cuMemHostAlloc(void** address, size_t bytes, unsigned int /*flags*/) {
  ZeroBeforeInit(address);
  return UnsafeCall("cuMemHostAlloc", [&](Driver& driver) {
    if (bytes == 0) return CUDA_ERROR_INVALID_VALUE;
    void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    const Lock lock(driver.mu());
    driver.AddHostMemory(memory, {.bytes = bytes, .context = CurrentContext()});
    *address = memory;
    return CUDA_SUCCESS;
  });
}

CUresult cuMemAllocHost_v2(void** address, size_t bytes) {
  return cuMemHostAlloc(address, bytes, 0);
}

CUresult cuMemFreeHost(void* address) {
  return UnsafeCall("cuMemFreeHost", [&](Driver& driver) {
    const Lock lock(driver.mu());
    return driver.RemoveHostMemory(address) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
  });
}

// Returns the allocation of device memory that contains `address`. REQUIRES: the lock is held.
static std::optional<std::pair<char*, uint64_t>> AllocationAt(Driver& driver, const char* address) {
  const auto* const found = driver.MappingOf(address);
  if (found == nullptr) return std::nullopt;
  if (found->second.kind == Kind::kPool) return PoolAllocationAt(driver, address);
  return std::make_pair(found->first, found->second.bytes);
}

CUresult cuMemGetAddressRange_v2(CUdeviceptr* base, size_t* bytes, CUdeviceptr address) {
  return ContextCall("cuMemGetAddressRange", [&](Driver& driver) {
    const Lock lock(driver.mu());
    const std::optional<std::pair<char*, uint64_t>> found = AllocationAt(driver, PointerTo(address));
    if (!found.has_value()) return CUDA_ERROR_INVALID_VALUE;
    if (base != nullptr) *base = AddressOf(found->first);
    if (bytes != nullptr) *bytes = found->second;
    return CUDA_SUCCESS;
  });
}

// Writes `value` to `data`. REQUIRES: `Type` is the attribute's type.
template <typename Type>
static void Give(void* data, Type value) {
  std::memcpy(data, &value, sizeof value);
}

CUresult cuPointerGetAttribute(void* data, CUpointer_attribute attribute, CUdeviceptr address) {
  return Call("cuPointerGetAttribute", [&](Driver& driver) {
    const Lock lock(driver.mu());
    const auto* const device = driver.MappingOf(PointerTo(address));
    const auto* const host = driver.HostMemoryOf(PointerTo(address));
    const std::optional<std::pair<char*, uint64_t>> allocation = AllocationAt(driver, PointerTo(address));
    if (!allocation.has_value() && host == nullptr) return CUDA_ERROR_INVALID_VALUE;
    const bool managed = device != nullptr && device->second.kind == Kind::kManaged;
    const int context = device != nullptr ? device->second.context : host->second.context;
    switch (attribute) {
      case CU_POINTER_ATTRIBUTE_CONTEXT:
        if (context == kNoContext) Give<CUcontext>(data, nullptr);
        if (context != kNoContext) Give(data, ContextOf(context));
        return CUDA_SUCCESS;
      case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        Give<unsigned int>(data, device != nullptr ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST);
        return CUDA_SUCCESS;
      case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
        Give(data, address);
        return CUDA_SUCCESS;
      case CU_POINTER_ATTRIBUTE_HOST_POINTER:
        if (host == nullptr && !managed) return CUDA_ERROR_INVALID_VALUE;
        Give<void*>(data, PointerTo(address));
        return CUDA_SUCCESS;
      case CU_POINTER_ATTRIBUTE_IS_MANAGED:
        Give<unsigned int>(data, managed ? 1 : 0);
        return CUDA_SUCCESS;
      case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
        Give<int>(data, device != nullptr ? driver.Ordinal(device->second.hold.device) : DeviceOf(context));
        return CUDA_SUCCESS;
      case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
        Give(data, AddressOf(device != nullptr ? allocation->first : host->first));
        return CUDA_SUCCESS;
      case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
        Give<size_t>(data, device != nullptr ? allocation->second : host->second.bytes);
        return CUDA_SUCCESS;
      case CU_POINTER_ATTRIBUTE_MAPPED:
        Give<int>(data, 1);
        return CUDA_SUCCESS;
      default:
        return CUDA_ERROR_NOT_SUPPORTED;
    }
  });
}

// Writes zeros beside an error.
CUresult cuMemGetInfo_v2(size_t* free_bytes, size_t* total_bytes) {
  *free_bytes = 0;
  *total_bytes = 0;
  return ContextCall("cuMemGetInfo", [&](Driver& driver) {
    *total_bytes = driver.machine()->options().device_bytes;
    *free_bytes = *total_bytes - driver.machine()->UsedBytes(driver.Physical(CurrentDevice()));
    return CUDA_SUCCESS;
  });
}

CUresult cuMemGetInfo(unsigned int* free_bytes, unsigned int* total_bytes) {
  size_t left = 0;
  size_t total = 0;
  const CUresult error = cuMemGetInfo_v2(&left, &total);
  *free_bytes = In32Bits(left);
  *total_bytes = In32Bits(total);
  return error;
}

// Waits for the default stream, then copies in either direction. Refuses when [address, address + bytes) is no device
// memory.
static CUresult Copy(const char* function, CUdeviceptr address, size_t bytes,
                     const std::function<void(Machine& machine, const Hold& hold, uint64_t offset)>& copy) {
  return UnsafeCall(function, [&](Driver& driver) {
    std::optional<std::pair<Hold, uint64_t>> range;
    StreamState* stream = nullptr;
    {
      const Lock lock(driver.mu());
      range = driver.Range(PointerTo(address), bytes);
      stream = driver.Stream(nullptr);
      if (const CUresult error = driver.CheckStream(stream); error != CUDA_SUCCESS) return error;
    }
    if (!range.has_value()) return CUDA_ERROR_INVALID_VALUE;
    WaitForStream(driver, stream);
    copy(*driver.machine(), range->first, range->second);
    return CUDA_SUCCESS;
  });
}

CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void* from, size_t bytes) {
  return Copy("cuMemcpyHtoD", to, bytes,
              [&](Machine& machine, const Hold& hold, uint64_t offset) { machine.Write(hold, offset, from, bytes); });
}

CUresult cuMemcpyDtoH_v2(void* to, CUdeviceptr from, size_t bytes) {
  return Copy("cuMemcpyDtoH", from, bytes,
              [&](Machine& machine, const Hold& hold, uint64_t offset) { machine.Read(hold, offset, to, bytes); });
}

CUresult cuMemsetD8Async(CUdeviceptr address, unsigned char value, size_t bytes, CUstream stream) {
  return ContextCall("cuMemsetD8Async", [&](Driver& driver) {
    std::optional<std::pair<Hold, uint64_t>> range;
    {
      const Lock lock(driver.mu());
      if (driver.Stream(stream) == nullptr) return CUDA_ERROR_INVALID_HANDLE;
      range = driver.Range(PointerTo(address), bytes);
    }
    if (!range.has_value()) return CUDA_ERROR_INVALID_VALUE;
    driver.machine()->Fill(range->first, range->second, static_cast<char>(value), bytes);
    return CUDA_SUCCESS;
  });
}

// ---- Sharing memory ----

CUresult cuIpcGetMemHandle(CUipcMemHandle* handle, CUdeviceptr address) {
  return ContextCall("cuIpcGetMemHandle", [&](Driver& driver) {
    const Lock lock(driver.mu());
    const Mapping* const mapping = driver.MappingAt(PointerTo(address));
    if (mapping == nullptr || mapping->kind != Kind::kAllocated) return CUDA_ERROR_INVALID_VALUE;
    // Makes the file of the memory: another user's process may not make the file.
    close(driver.machine()->File(mapping->hold));
    const Handle content{.mark = kHandleMark,
                         .id = mapping->hold.id,
                         .allocation = mapping->hold.allocation,
                         .exporter = getpid(),
                         .user = geteuid()};
    std::memset(handle, 0, sizeof *handle);
    std::memcpy(handle, &content, sizeof content);
    return CUDA_SUCCESS;
  });
}

CUresult cuIpcOpenMemHandle_v2(CUdeviceptr* address, CUipcMemHandle handle, unsigned int flags) {
  return UnsafeCall("cuIpcOpenMemHandle", [&](Driver& driver) {
    Handle content;
    std::memcpy(&content, &handle, sizeof content);
    if (flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS) return CUDA_ERROR_INVALID_VALUE;
    if (content.mark != kHandleMark) return CUDA_ERROR_INVALID_HANDLE;
    if (content.exporter == getpid()) return CUDA_ERROR_INVALID_CONTEXT;
    if (driver.machine()->options().one_user && content.user != geteuid()) return CUDA_ERROR_INVALID_VALUE;
    const Lock lock(driver.mu());
    if (char* const pointer = driver.PointerOf(content.id); pointer != nullptr) {
      ++driver.MappingAt(pointer)->opens;
      *address = AddressOf(pointer);
      return CUDA_SUCCESS;
    }
    const std::optional<Hold> hold = driver.machine()->Open(content.allocation, content.id);
    if (!hold.has_value()) return CUDA_ERROR_MAP_FAILED;
    *address = AddressOf(driver.Map(*hold, Kind::kOpened, CurrentContext()));
    return CUDA_SUCCESS;
  });
}

CUresult cuIpcCloseMemHandle(CUdeviceptr address) {
  return UnsafeCall("cuIpcCloseMemHandle", [&](Driver& driver) {
    char* const pointer = PointerTo(address);
    Hold hold;
    {
      const Lock lock(driver.mu());
      Mapping* const mapping = driver.MappingAt(pointer);
      if (mapping == nullptr || mapping->kind != Kind::kOpened) return CUDA_ERROR_INVALID_VALUE;
      if (--mapping->opens > 0) return CUDA_SUCCESS;
      hold = mapping->hold;
      driver.Unmap(pointer);
    }
    driver.machine()->Release(hold, /*freed=*/false);
    return CUDA_SUCCESS;
  });
}
