// SPDX-License-Identifier: Apache-2.0
//
// Compares the driver's declarations in libvrambroker-preload.so with the CUDA Toolkit: sizes, offsets and values.
// Compiled only where the toolkit is installed.
#include <stddef.h>
#include <stdint.h>

namespace ours {
#include "client/preload/driver_api.h"

// The toolkit's macros rename functions.
#define TYPE(name, arguments) using type_of_##name = int(*) arguments;
CUDA_HOOKS(TYPE)
CUDA_CALLS(TYPE)
#undef TYPE
}  // namespace ours

#define __CUDA_API_VERSION_INTERNAL  // declares old versions, too
#include <cudaTypedefs.h>

template <typename Result, typename... Arguments>
struct Sizes {
  static constexpr size_t kSizes[] = {sizeof(Result), sizeof(Arguments)...};
};
template <typename Result, typename... Arguments>
constexpr Sizes<Result, Arguments...> SizesOf(Result (*)(Arguments...)) {
  return {};
}

template <typename Ours, typename Theirs>
constexpr bool Same(Ours, Theirs) {
  if (sizeof Ours::kSizes != sizeof Theirs::kSizes) return false;
  for (size_t i = 0; i < sizeof Ours::kSizes / sizeof(size_t); ++i) {
    if (Ours::kSizes[i] != Theirs::kSizes[i]) return false;
  }
  return true;
}

#define CHECK(name, type) static_assert(Same(SizesOf(ours::type_of_##name()), SizesOf(type())), #name)
CHECK(cuGetProcAddress, PFN_cuGetProcAddress_v11030);
CHECK(cuGetProcAddress_v2, PFN_cuGetProcAddress_v12000);
CHECK(cuMemAlloc, PFN_cuMemAlloc_v2000);
CHECK(cuMemAlloc_v2, PFN_cuMemAlloc_v3020);
CHECK(cuMemAllocPitch, PFN_cuMemAllocPitch_v2000);
CHECK(cuMemAllocPitch_v2, PFN_cuMemAllocPitch_v3020);
CHECK(cuMemAllocManaged, PFN_cuMemAllocManaged_v6000);
CHECK(cuMemFree, PFN_cuMemFree_v2000);
CHECK(cuMemFree_v2, PFN_cuMemFree_v3020);
CHECK(cuArrayCreate, PFN_cuArrayCreate_v2000);
CHECK(cuArray3DCreate, PFN_cuArray3DCreate_v2000);
CHECK(cuArrayCreate_v2, PFN_cuArrayCreate_v3020);
CHECK(cuArray3DCreate_v2, PFN_cuArray3DCreate_v3020);
CHECK(cuArrayDestroy, PFN_cuArrayDestroy_v2000);
CHECK(cuMipmappedArrayCreate, PFN_cuMipmappedArrayCreate_v5000);
CHECK(cuMipmappedArrayDestroy, PFN_cuMipmappedArrayDestroy_v5000);
CHECK(cuMemCreate, PFN_cuMemCreate_v10020);
CHECK(cuMemRelease, PFN_cuMemRelease_v10020);
CHECK(cuMemRetainAllocationHandle, PFN_cuMemRetainAllocationHandle_v11000);
CHECK(cuMemMap, PFN_cuMemMap_v10020);
CHECK(cuMemUnmap, PFN_cuMemUnmap_v10020);
CHECK(cuMemMapArrayAsync, PFN_cuMemMapArrayAsync_v11010);
CHECK(cuMemMapArrayAsync_ptsz, PFN_cuMemMapArrayAsync_v11010_ptsz);
CHECK(cuMemAllocAsync, PFN_cuMemAllocAsync_v11020);
CHECK(cuMemAllocAsync_ptsz, PFN_cuMemAllocAsync_v11020_ptsz);
CHECK(cuMemAllocFromPoolAsync, PFN_cuMemAllocFromPoolAsync_v11020);
CHECK(cuMemAllocFromPoolAsync_ptsz, PFN_cuMemAllocFromPoolAsync_v11020_ptsz);
CHECK(cuMemFreeAsync, PFN_cuMemFreeAsync_v11020);
CHECK(cuMemFreeAsync_ptsz, PFN_cuMemFreeAsync_v11020_ptsz);
CHECK(cuMemPoolCreate, PFN_cuMemPoolCreate_v11020);
CHECK(cuMemGetDefaultMemPool, PFN_cuMemGetDefaultMemPool_v13000);
CHECK(cuMemGetMemPool, PFN_cuMemGetMemPool_v13000);
CHECK(cuMemPoolDestroy, PFN_cuMemPoolDestroy_v11020);
CHECK(cuMemPoolTrimTo, PFN_cuMemPoolTrimTo_v11020);
CHECK(cuStreamSynchronize, PFN_cuStreamSynchronize_v2000);
CHECK(cuStreamSynchronize_ptsz, PFN_cuStreamSynchronize_v7000_ptsz);
CHECK(cuEventSynchronize, PFN_cuEventSynchronize_v2000);
CHECK(cuGraphAddMemAllocNode, PFN_cuGraphAddMemAllocNode_v11040);
CHECK(cuGraphAddNode, PFN_cuGraphAddNode_v12020);
CHECK(cuGraphAddNode_v2, PFN_cuGraphAddNode_v12030);
CHECK(cuGraphInstantiate, PFN_cuGraphInstantiate_v10000);
CHECK(cuGraphInstantiate_v2, PFN_cuGraphInstantiate_v11000);
CHECK(cuGraphInstantiateWithFlags, PFN_cuGraphInstantiateWithFlags_v11040);
CHECK(cuGraphInstantiateWithParams, PFN_cuGraphInstantiateWithParams_v12000);
CHECK(cuGraphInstantiateWithParams_ptsz, PFN_cuGraphInstantiateWithParams_v12000_ptsz);
CHECK(cuGraphUpload, PFN_cuGraphUpload_v11010);
CHECK(cuGraphUpload_ptsz, PFN_cuGraphUpload_v11010_ptsz);
CHECK(cuGraphLaunch, PFN_cuGraphLaunch_v10000);
CHECK(cuGraphLaunch_ptsz, PFN_cuGraphLaunch_v10000_ptsz);
CHECK(cuDeviceGraphMemTrim, PFN_cuDeviceGraphMemTrim_v11040);
CHECK(cuCtxCreate, PFN_cuCtxCreate_v2000);
CHECK(cuCtxCreate_v2, PFN_cuCtxCreate_v3020);
CHECK(cuCtxCreate_v3, PFN_cuCtxCreate_v11040);
CHECK(cuCtxCreate_v4, PFN_cuCtxCreate_v12050);
CHECK(cuCtxDestroy, PFN_cuCtxDestroy_v2000);
CHECK(cuCtxDestroy_v2, PFN_cuCtxDestroy_v4000);
CHECK(cuDevicePrimaryCtxRetain, PFN_cuDevicePrimaryCtxRetain_v7000);
CHECK(cuDevicePrimaryCtxReset, PFN_cuDevicePrimaryCtxReset_v7000);
CHECK(cuDevicePrimaryCtxReset_v2, PFN_cuDevicePrimaryCtxReset_v11000);
CHECK(cuDevicePrimaryCtxRelease, PFN_cuDevicePrimaryCtxRelease_v7000);
CHECK(cuDevicePrimaryCtxRelease_v2, PFN_cuDevicePrimaryCtxRelease_v11000);
CHECK(cuMemGetInfo, PFN_cuMemGetInfo_v2000);
CHECK(cuMemGetInfo_v2, PFN_cuMemGetInfo_v3020);
CHECK(cuDeviceTotalMem, PFN_cuDeviceTotalMem_v2000);
CHECK(cuDeviceTotalMem_v2, PFN_cuDeviceTotalMem_v3020);
CHECK(cuCtxGetCurrent, PFN_cuCtxGetCurrent_v4000);
CHECK(cuCtxGetDevice, PFN_cuCtxGetDevice_v2000);
CHECK(cuCtxPushCurrent_v2, PFN_cuCtxPushCurrent_v4000);
CHECK(cuCtxPopCurrent_v2, PFN_cuCtxPopCurrent_v4000);
CHECK(cuDeviceGetUuid, PFN_cuDeviceGetUuid_v9020);
CHECK(cuDeviceGetUuid_v2, PFN_cuDeviceGetUuid_v11040);
CHECK(cuDevicePrimaryCtxGetState, PFN_cuDevicePrimaryCtxGetState_v7000);
CHECK(cuStreamGetCtx, PFN_cuStreamGetCtx_v9020);
CHECK(cuStreamQuery, PFN_cuStreamQuery_v2000);
CHECK(cuStreamQuery_ptsz, PFN_cuStreamQuery_v7000_ptsz);
CHECK(cuStreamIsCapturing, PFN_cuStreamIsCapturing_v10000);
CHECK(cuStreamIsCapturing_ptsz, PFN_cuStreamIsCapturing_v10000_ptsz);
CHECK(cuDeviceGetMemPool, PFN_cuDeviceGetMemPool_v11020);
CHECK(cuDeviceSetMemPool, PFN_cuDeviceSetMemPool_v11020);
CHECK(cuDeviceGetDefaultMemPool, PFN_cuDeviceGetDefaultMemPool_v11020);
CHECK(cuMemPoolGetAttribute, PFN_cuMemPoolGetAttribute_v11020);
CHECK(cuDeviceGetGraphMemAttribute, PFN_cuDeviceGetGraphMemAttribute_v11040);
CHECK(cuGraphExecDestroy, PFN_cuGraphExecDestroy_v10000);
CHECK(cuCtxSynchronize, PFN_cuCtxSynchronize_v2000);
CHECK(cuCtxSynchronize_v2, PFN_cuCtxSynchronize_v13000);

static_assert(sizeof(ours::cu_array_descriptor) == sizeof(CUDA_ARRAY_DESCRIPTOR));
static_assert(offsetof(ours::cu_array_descriptor, channels) == offsetof(CUDA_ARRAY_DESCRIPTOR, NumChannels));
static_assert(sizeof(ours::cu_array_descriptor32) == sizeof(CUDA_ARRAY_DESCRIPTOR_v1));
static_assert(sizeof(ours::cu_array3d_descriptor32) == sizeof(CUDA_ARRAY3D_DESCRIPTOR_v1));
static_assert(sizeof(ours::cu_array3d_descriptor) == sizeof(CUDA_ARRAY3D_DESCRIPTOR));
static_assert(offsetof(ours::cu_array3d_descriptor, flags) == offsetof(CUDA_ARRAY3D_DESCRIPTOR, Flags));
static_assert(offsetof(ours::cu_allocation, location) == offsetof(CUmemAllocationProp, location));
static_assert(offsetof(ours::cu_pool_properties, location) == offsetof(CUmemPoolProps, location));
static_assert(sizeof(ours::cu_tile) == sizeof(CUarrayMapInfo));
static_assert(offsetof(ours::cu_tile, array) == offsetof(CUarrayMapInfo, resource));
static_assert(offsetof(ours::cu_tile, level[5]) == offsetof(CUarrayMapInfo, subresource.sparseLevel.extentWidth));
static_assert(offsetof(ours::cu_tile, tail.offset) == offsetof(CUarrayMapInfo, subresource.miptail.offset));
static_assert(offsetof(ours::cu_tile, operation) == offsetof(CUarrayMapInfo, memOperationType));
static_assert(offsetof(ours::cu_tile, handle) == offsetof(CUarrayMapInfo, memHandle));
static_assert(int{ours::CU_TILE_MAP} == int{CU_MEM_OPERATION_TYPE_MAP});
static_assert(int{ours::CU_PART_TAIL} == int{CU_ARRAY_SPARSE_SUBRESOURCE_TYPE_MIPTAIL});
static_assert(sizeof(ours::cu_uuid) == sizeof(CUuuid));
static_assert(int{ours::CU_POOL_RESERVED} == int{CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT});
static_assert(int{ours::CU_GRAPH_RESERVED} == int{CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT});
static_assert(int{ours::CU_NODE_MEMORY} == int{CU_GRAPH_NODE_TYPE_MEM_ALLOC});
static_assert(int{ours::CU_LOCATION_DEVICE} == int{CU_MEM_LOCATION_TYPE_DEVICE});
static_assert(int{ours::CU_LOCATION_HOST} == int{CU_MEM_LOCATION_TYPE_HOST});
static_assert(int{ours::CU_LOCATION_HOST_NUMA} == int{CU_MEM_LOCATION_TYPE_HOST_NUMA});
static_assert(int{ours::CU_LOCATION_HOST_NUMA_CURRENT} == int{CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT});
static_assert(int{ours::CU_MANAGED} == int{CU_MEM_ALLOCATION_TYPE_MANAGED});
static_assert(sizeof(ours::cu_location) == sizeof(CUmemLocation));
#if CUDA_VERSION >= 13040
static_assert(int{ours::CU_LOCATION_DOMAIN} == int{CU_MEM_LOCATION_TYPE_DEVICE_LOCALITY_DOMAIN});
static_assert(offsetof(ours::cu_location, local.device) == offsetof(CUmemLocation, localized.deviceId));
#endif
static_assert(ours::CU_ARRAY_LAYERED == CUDA_ARRAY3D_LAYERED && ours::CU_ARRAY_CUBEMAP == CUDA_ARRAY3D_CUBEMAP);
static_assert(ours::CU_ARRAY_SPARSE == CUDA_ARRAY3D_SPARSE && ours::CU_ARRAY_DEFERRED == CUDA_ARRAY3D_DEFERRED_MAPPING);
static_assert(offsetof(ours::cu_node_parameters, type) == offsetof(CUgraphNodeParams, type));
static_assert(offsetof(ours::cu_node_parameters, memory) ==
              offsetof(CUgraphNodeParams, alloc) + offsetof(CUDA_MEM_ALLOC_NODE_PARAMS_v2, poolProps));
static_assert(offsetof(CUDA_MEM_ALLOC_NODE_PARAMS, poolProps) == 0);
