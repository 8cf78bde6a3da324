// SPDX-License-Identifier: Apache-2.0
//
// Kinds of memory in the substitute of NVIDIA's driver: which kinds take device memory, and when each kind is freed.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <string>

#include "tests/cuda_substitute/driver.h"
#include "tests/cuda_substitute/substitute.h"
#include "tests/unit/allocator/device/cuda_substitute_fixture.h"

namespace vrambroker::cuda_substitute {
namespace {

template <typename Type>
Type Attribute(CUpointer_attribute attribute, const void* address) {
  Type value{};
  if (cuPointerGetAttribute(&value, attribute, reinterpret_cast<CUdeviceptr>(address)) != CUDA_SUCCESS) _exit(102);
  return value;
}
void* Pointer(CUdeviceptr address) {
  return reinterpret_cast<void*>(address);
}

TEST_F(CudaSubstituteTest, RowsOfPitchedMemoryAreAligned) {
  const Process process([&] {
    CUdeviceptr memory = 0;
    size_t pitch = 0;
    if (cuMemAllocPitch_v2(&memory, &pitch, 513, 4096, 4) != CUDA_SUCCESS || pitch != 1024) return 1;
    if (UsedBytes(machine_, 0) != kContext + 1024 * 4096) return 2;
    if (cuMemAllocPitch_v2(&memory, &pitch, 513, 4096, 3) != CUDA_ERROR_INVALID_VALUE) return 3;
    if (cuMemAllocPitch_v2(&memory, &pitch, kAll, 1, 4) != CUDA_ERROR_OUT_OF_MEMORY) return 4;
    return cuMemFree_v2(memory) == CUDA_SUCCESS && UsedBytes(machine_, 0) == kContext ? 0 : 5;
  });
  EXPECT_EQ(process.Wait(), 0);
}

TEST_F(CudaSubstituteTest, ManagedMemoryIsOfTheDeviceAndOfTheCpu) {
  const Process process([&] {
    CUdeviceptr memory = 0;
    char byte = 0;
    if (cuMemAllocManaged(&memory, kBytes, 0) != CUDA_ERROR_INVALID_VALUE) return 1;
    if (cuMemAllocManaged(&memory, kAll, CU_MEM_ATTACH_GLOBAL) != CUDA_ERROR_OUT_OF_MEMORY) return 2;
    if (cuMemAllocManaged(&memory, kBytes, CU_MEM_ATTACH_GLOBAL) != CUDA_SUCCESS) return 3;
    if (UsedBytes(machine_, 0) != kContext + kBytes) return 4;
    std::memset(Pointer(memory), 'm', kBytes);
    if (cuMemcpyDtoH_v2(&byte, memory + kBytes - 1, 1) != CUDA_SUCCESS || byte != 'm') return 5;
    if (cuMemsetD8Async(memory, 'd', kBytes, nullptr) != CUDA_SUCCESS) return 6;
    if (*static_cast<volatile char*>(Pointer(memory)) != 'd') return 7;
    if (Attribute<unsigned int>(CU_POINTER_ATTRIBUTE_IS_MANAGED, Pointer(memory)) != 1) return 8;
    if (cuMemFree_v2(memory) != CUDA_SUCCESS || UsedBytes(machine_, 0) != kContext) return 9;
    return 0;
  });
  EXPECT_EQ(process.Wait(), 0);
}

TEST_F(CudaSubstituteTest, MemoryOfTheHostTakesNothingOfTheDevice) {
  const Process process([&] {
    void* memory = nullptr;
    if (cuMemHostAlloc(&memory, 2 * kAll, 0) != CUDA_SUCCESS) return 1;
    std::memset(memory, 'h', kBytes);
    if (UsedBytes(machine_, 0) != kContext) return 2;
    if (Attribute<unsigned int>(CU_POINTER_ATTRIBUTE_MEMORY_TYPE, memory) != CU_MEMORYTYPE_HOST) return 3;
    if (cuMemFree_v2(reinterpret_cast<CUdeviceptr>(memory)) != CUDA_ERROR_INVALID_VALUE) return 4;
    if (cuMemFreeHost(memory) != CUDA_SUCCESS) return 5;
    return cuMemFreeHost(memory) == CUDA_ERROR_INVALID_VALUE ? 0 : 6;
  });
  EXPECT_EQ(process.Wait(), 0);
}

TEST_F(CudaSubstituteTest, APointerSaysWhatItPointsTo) {
  const Process process(
      [&] {
        CUdeviceptr memory = 0;
        CUcontext context = nullptr;
        if (cuMemAlloc_v2(&memory, kBytes) != CUDA_SUCCESS || cuCtxGetCurrent(&context) != CUDA_SUCCESS) return 1;
        void* const inside = Pointer(memory + 100);
        if (Attribute<CUcontext>(CU_POINTER_ATTRIBUTE_CONTEXT, inside) != context) return 2;
        if (Attribute<unsigned int>(CU_POINTER_ATTRIBUTE_MEMORY_TYPE, inside) != CU_MEMORYTYPE_DEVICE) return 3;
        if (Attribute<int>(CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, inside) != 1) return 4;
        if (Attribute<CUdeviceptr>(CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, inside) != memory) return 5;
        if (Attribute<size_t>(CU_POINTER_ATTRIBUTE_RANGE_SIZE, inside) != kBytes) return 6;
        void* host = nullptr;
        if (cuPointerGetAttribute(&host, CU_POINTER_ATTRIBUTE_HOST_POINTER, memory) != CUDA_ERROR_INVALID_VALUE) {
          return 7;
        }
        int value = 0;
        return cuPointerGetAttribute(&value, CU_POINTER_ATTRIBUTE_MAPPED, memory + kBytes) == CUDA_ERROR_INVALID_VALUE
                   ? 0
                   : 8;
      },
      1);
  EXPECT_EQ(process.Wait(), 0);
}

// ---- Arrays ----

CUDA_ARRAY3D_DESCRIPTOR Described(size_t width, size_t height, size_t depth, unsigned int flags) {
  return {
      .Width = width, .Height = height, .Depth = depth, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 4, .Flags = flags};
}

TEST_F(CudaSubstituteTest, ArraysTakeMemoryUntilTheyAreDestroyed) {
  const Process process([&] {
    const CUDA_ARRAY_DESCRIPTOR flat = {
        .Width = 1024, .Height = 1024, .Format = CU_AD_FORMAT_UNSIGNED_INT8, .NumChannels = 2};
    const CUDA_ARRAY3D_DESCRIPTOR deep = Described(256, 256, 8, 0);  // 8 MiB
    CUarray first = nullptr;
    CUarray second = nullptr;
    CUmipmappedArray mipmapped = nullptr;
    if (cuArrayCreate_v2(&first, &flat) != CUDA_SUCCESS || UsedBytes(machine_, 0) != kContext + (2 << 20)) return 1;
    if (cuArray3DCreate_v2(&second, &deep) != CUDA_SUCCESS || UsedBytes(machine_, 0) != kContext + (10 << 20)) return 2;
    // The second level has half of each extent: an eighth of the elements.
    if (cuMipmappedArrayCreate(&mipmapped, &deep, 2) != CUDA_SUCCESS) return 3;
    if (UsedBytes(machine_, 0) != kContext + (20 << 20)) return 4;
    CUDA_ARRAY_MEMORY_REQUIREMENTS requirements = {};
    if (cuArrayGetMemoryRequirements(&requirements, second, 0) != CUDA_ERROR_INVALID_VALUE) return 5;
    const CUDA_ARRAY3D_DESCRIPTOR huge = Described(1024, 1024, 4, 0);
    CUarray none = nullptr;
    if (cuArray3DCreate_v2(&none, &huge) != CUDA_ERROR_OUT_OF_MEMORY) return 6;
    if (cuArrayDestroy(first) != CUDA_SUCCESS || cuArrayDestroy(first) != CUDA_ERROR_INVALID_HANDLE) return 7;
    if (cuArrayDestroy(second) != CUDA_SUCCESS || cuMipmappedArrayDestroy(mipmapped) != CUDA_SUCCESS) return 8;
    if (UsedBytes(machine_, 0) != kContext) return 9;
    if (cuArray3DCreate_v2(&second, &deep) != CUDA_SUCCESS || cuDevicePrimaryCtxReset_v2(0) != CUDA_SUCCESS) return 10;
    return UsedBytes(machine_, 0) == 0 ? 0 : 11;
  });
  EXPECT_EQ(process.Wait(), 0);
}

TEST_F(CudaSubstituteTest, OnlyArraysThatAreMappedLaterSayWhatTheyNeed) {
  const Process process([&] {
    const CUDA_ARRAY3D_DESCRIPTOR descriptor = Described(256, 256, 8, CUDA_ARRAY3D_DEFERRED_MAPPING);
    CUarray array = nullptr;
    CUmipmappedArray mipmapped = nullptr;
    if (cuArray3DCreate_v2(&array, &descriptor) != CUDA_SUCCESS) return 1;
    if (cuMipmappedArrayCreate(&mipmapped, &descriptor, 2) != CUDA_SUCCESS) return 2;
    if (UsedBytes(machine_, 0) != kContext) return 3;
    CUDA_ARRAY_MEMORY_REQUIREMENTS requirements = {};
    if (cuArrayGetMemoryRequirements(&requirements, array, 0) != CUDA_SUCCESS) return 4;
    if (requirements.size != 8 << 20) return 5;
    if (cuMipmappedArrayGetMemoryRequirements(&requirements, mipmapped, 0) != CUDA_SUCCESS) return 6;
    if (requirements.size != 10 << 20) return 7;
    return cuArrayDestroy(array) == CUDA_SUCCESS && cuMipmappedArrayDestroy(mipmapped) == CUDA_SUCCESS ? 0 : 8;
  });
  EXPECT_EQ(process.Wait(), 0);
}

// ---- Contexts ----

TEST_F(CudaSubstituteTest, TheLastReleaseOfThePrimaryContextFreesAll) {
  const Process process(
      [&] {
        CUcontext context = nullptr;
        CUdeviceptr memory = 0;
        if (cuInit(0) != CUDA_SUCCESS || cuDevicePrimaryCtxRelease_v2(0) != CUDA_ERROR_INVALID_CONTEXT) return 1;
        for (int i = 0; i < 2; ++i) {
          if (cuDevicePrimaryCtxRetain(&context, 0) != CUDA_SUCCESS) return 2;
        }
        if (cuCtxSetCurrent(context) != CUDA_SUCCESS || cuMemAlloc_v2(&memory, kBytes) != CUDA_SUCCESS) return 3;
        if (cuDevicePrimaryCtxRelease_v2(0) != CUDA_SUCCESS || UsedBytes(machine_, 0) != kContext + kBytes) return 4;
        if (cuDevicePrimaryCtxRelease_v2(0) != CUDA_SUCCESS || UsedBytes(machine_, 0) != 0) return 5;
        if (cuDevicePrimaryCtxRelease_v2(0) != CUDA_ERROR_INVALID_CONTEXT) return 6;
        return cuMemAlloc_v2(&memory, kBytes) == CUDA_ERROR_CONTEXT_IS_DESTROYED ? 0 : 7;
      },
      kNoGpu);
  EXPECT_EQ(process.Wait(), 0);
}

TEST_F(CudaSubstituteTest, AContextBesideThePrimaryOneTakesItsMemoryWithIt) {
  const Process process([&] {
    CUcontext primary = nullptr;
    CUcontext own = nullptr;
    CUcontext current = nullptr;
    CUdeviceptr kept = 0;
    CUdeviceptr gone = 0;
    CUdevice device = -1;
    if (cuCtxGetCurrent(&primary) != CUDA_SUCCESS || cuMemAlloc_v2(&kept, kBytes) != CUDA_SUCCESS) return 1;
    if (cuCtxCreate_v2(&own, 0, 1) != CUDA_SUCCESS || cuCtxGetCurrent(&current) != CUDA_SUCCESS) return 2;
    if (own == primary || current != own || cuCtxGetDevice(&device) != CUDA_SUCCESS || device != 1) return 3;
    if (cuCtxGetDevice_v2(&device, primary) != CUDA_SUCCESS || device != 0) return 4;
    if (cuMemAlloc_v2(&gone, kBytes) != CUDA_SUCCESS || UsedBytes(machine_, 1) != kContext + kBytes) return 5;
    unsigned int flags = 0;
    int active = 1;
    if (cuDevicePrimaryCtxGetState(1, &flags, &active) != CUDA_SUCCESS || active != 0) return 6;
    if (cuCtxDestroy_v2(primary) != CUDA_ERROR_INVALID_CONTEXT) return 7;
    if (cuCtxDestroy_v2(own) != CUDA_SUCCESS || UsedBytes(machine_, 1) != 0) return 8;
    if (UsedBytes(machine_, 0) != kContext + kBytes) return 9;
    if (cuCtxGetCurrent(&current) != CUDA_SUCCESS || current != primary) return 10;
    return cuCtxDestroy_v2(own) == CUDA_ERROR_INVALID_CONTEXT && cuMemFree_v2(kept) == CUDA_SUCCESS ? 0 : 11;
  });
  EXPECT_EQ(process.Wait(), 0);
}

TEST_F(CudaSubstituteTest, EachContextTakesMemoryAndThereIsNoneWithout) {
  const Process process([&] {
    CUcontext context = nullptr;
    CUdeviceptr memory = 0;
    if (cuMemAlloc_v2(&memory, kAll - 2 * kContext) != CUDA_SUCCESS) return 1;
    if (cuCtxCreate_v2(&context, 0, 0) != CUDA_SUCCESS || UsedBytes(machine_, 0) != kAll) return 2;
    CUcontext other = nullptr;
    if (cuCtxCreate_v2(&other, 0, 0) != CUDA_ERROR_OUT_OF_MEMORY) return 3;
    AwaitGo();
    return 4;
  });
  while (UsedBytes(machine_, 0) != kAll) usleep(1000);
  const auto retain = [] {
    CUcontext context = nullptr;
    return cuInit(0) == CUDA_SUCCESS ? static_cast<int>(cuDevicePrimaryCtxRetain(&context, 0)) : -1;
  };
  EXPECT_EQ(Process(retain, kNoGpu).Wait(), CUDA_ERROR_OUT_OF_MEMORY);
  process.Kill();
  EXPECT_EQ(Process(retain, kNoGpu).Wait(), CUDA_SUCCESS);
  EXPECT_EQ(UsedBytes(machine_, 0), 0u);
}

}  // namespace
}  // namespace vrambroker::cuda_substitute
