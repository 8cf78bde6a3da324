// SPDX-License-Identifier: Apache-2.0
//
// Programs that link the substitute get the driver's functions here, and functions for tests on this process's driver.
// Programs that also run on real GPUs must not link the substitute: such programs would never load NVIDIA's driver.
#ifndef VRAMBROKER_TESTS_CUDA_SUBSTITUTE_DRIVER_H_
#define VRAMBROKER_TESTS_CUDA_SUBSTITUTE_DRIVER_H_

#include <cuda.h>

#include <chrono>
#include <cstdint>
#include <string>

#include "allocator/device/cuda_driver.h"

// cuda.h gives these names to newer functions. The driver exports both forms.
#undef cuGetProcAddress
#undef cuDeviceGetUuid
#undef cuDeviceTotalMem
#undef cuDevicePrimaryCtxRelease
#undef cuDevicePrimaryCtxReset
#undef cuCtxCreate
#undef cuCtxDestroy
#undef cuMemGetInfo
#undef cuMemAlloc
#undef cuMemAllocPitch
#undef cuMemFree
#undef cuArrayCreate
#undef cuArray3DCreate
#undef cuGraphAddNode

// The first versions of functions have sizes and addresses of 32 bits.
typedef unsigned int Address32;
struct ArrayDescriptor32 {
  unsigned int Width, Height;
  CUarray_format Format;
  unsigned int NumChannels;
};
struct Array3dDescriptor32 {
  unsigned int Width, Height, Depth;
  CUarray_format Format;
  unsigned int NumChannels, Flags;
};

// Applications also call these functions.
#define VRAMBROKER_CUDA_APPLICATION_FUNCTIONS(F)                                                                       \
  F(cuGetProcAddress, (const char* symbol, void** function, int version, cuuint64_t flags))                            \
  F(cuGetProcAddress_v2,                                                                                               \
    (const char* symbol, void** function, int version, cuuint64_t flags, CUdriverProcAddressQueryResult* status))      \
  F(cuGetExportTable, (const void** table, const CUuuid* id))                                                          \
  F(cuDeviceGetUuid, (CUuuid * uuid, CUdevice device))                                                                 \
  F(cuDevicePrimaryCtxRelease_v2, (CUdevice device))                                                                   \
  F(cuCtxCreate_v2, (CUcontext * context, unsigned int flags, CUdevice device))                                        \
  F(cuCtxCreate_v3,                                                                                                    \
    (CUcontext * context, CUexecAffinityParam * affinity, int count, unsigned int flags, CUdevice device))             \
  F(cuCtxCreate_v4, (CUcontext * context, CUctxCreateParams * parameters, unsigned int flags, CUdevice device))        \
  F(cuCtxDestroy_v2, (CUcontext context))                                                                              \
  F(cuCtxGetCurrent, (CUcontext * context))                                                                            \
  F(cuCtxGetDevice_v2, (CUdevice * device, CUcontext context))                                                         \
  F(cuMemAllocPitch_v2, (CUdeviceptr * address, size_t * pitch, size_t width, size_t height, unsigned int element))    \
  F(cuMemAllocManaged, (CUdeviceptr * address, size_t bytes, unsigned int flags))                                      \
  F(cuMemHostAlloc, (void** address, size_t bytes, unsigned int flags))                                                \
  F(cuMemAllocHost_v2, (void** address, size_t bytes))                                                                 \
  F(cuMemFreeHost, (void* address))                                                                                    \
  F(cuPointerGetAttribute, (void* data, CUpointer_attribute attribute, CUdeviceptr address))                           \
  F(cuArrayCreate_v2, (CUarray * array, const CUDA_ARRAY_DESCRIPTOR* descriptor))                                      \
  F(cuArray3DCreate_v2, (CUarray * array, const CUDA_ARRAY3D_DESCRIPTOR* descriptor))                                  \
  F(cuArrayDestroy, (CUarray array))                                                                                   \
  F(cuArrayGetMemoryRequirements, (CUDA_ARRAY_MEMORY_REQUIREMENTS * requirements, CUarray array, CUdevice device))     \
  F(cuMipmappedArrayCreate,                                                                                            \
    (CUmipmappedArray * array, const CUDA_ARRAY3D_DESCRIPTOR* descriptor, unsigned int levels))                        \
  F(cuMipmappedArrayDestroy, (CUmipmappedArray array))                                                                 \
  F(cuMipmappedArrayGetMemoryRequirements,                                                                             \
    (CUDA_ARRAY_MEMORY_REQUIREMENTS * requirements, CUmipmappedArray array, CUdevice device))                          \
  F(cuMemGetAllocationGranularity,                                                                                     \
    (size_t * bytes, const CUmemAllocationProp* properties, CUmemAllocationGranularity_flags option))                  \
  F(cuMemCreate, (CUmemGenericAllocationHandle * handle, size_t bytes, const CUmemAllocationProp* properties,          \
                  unsigned long long flags))                                                                           \
  F(cuMemRelease, (CUmemGenericAllocationHandle handle))                                                               \
  F(cuMemRetainAllocationHandle, (CUmemGenericAllocationHandle * handle, void* address))                               \
  F(cuMemAddressReserve,                                                                                               \
    (CUdeviceptr * address, size_t bytes, size_t alignment, CUdeviceptr hint, unsigned long long flags))               \
  F(cuMemAddressFree, (CUdeviceptr address, size_t bytes))                                                             \
  F(cuMemMap,                                                                                                          \
    (CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags)) \
  F(cuMemUnmap, (CUdeviceptr address, size_t bytes))                                                                   \
  F(cuMemMapArrayAsync, (CUarrayMapInfo * tiles, unsigned int count, CUstream stream))                                 \
  F(cuMemSetAccess, (CUdeviceptr address, size_t bytes, const CUmemAccessDesc* accesses, size_t count))                \
  F(cuMemExportToShareableHandle,                                                                                      \
    (void* shareable, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type, unsigned long long flags))  \
  F(cuMemImportFromShareableHandle,                                                                                    \
    (CUmemGenericAllocationHandle * handle, void* shareable, CUmemAllocationHandleType type))                          \
  F(cuDeviceGetDefaultMemPool, (CUmemoryPool * pool, CUdevice device))                                                 \
  F(cuDeviceGetMemPool, (CUmemoryPool * pool, CUdevice device))                                                        \
  F(cuDeviceSetMemPool, (CUdevice device, CUmemoryPool pool))                                                          \
  F(cuMemGetDefaultMemPool, (CUmemoryPool * pool, CUmemLocation * location, CUmemAllocationType type))                 \
  F(cuMemGetMemPool, (CUmemoryPool * pool, CUmemLocation * location, CUmemAllocationType type))                        \
  F(cuMemSetMemPool, (CUmemLocation * location, CUmemAllocationType type, CUmemoryPool pool))                          \
  F(cuMemPoolCreate, (CUmemoryPool * pool, const CUmemPoolProps* properties))                                          \
  F(cuMemPoolDestroy, (CUmemoryPool pool))                                                                             \
  F(cuMemPoolGetAttribute, (CUmemoryPool pool, CUmemPool_attribute attribute, void* value))                            \
  F(cuMemPoolSetAttribute, (CUmemoryPool pool, CUmemPool_attribute attribute, void* value))                            \
  F(cuMemPoolTrimTo, (CUmemoryPool pool, size_t keep))                                                                 \
  F(cuMemAllocAsync, (CUdeviceptr * address, size_t bytes, CUstream stream))                                           \
  F(cuMemAllocFromPoolAsync, (CUdeviceptr * address, size_t bytes, CUmemoryPool pool, CUstream stream))                \
  F(cuMemFreeAsync, (CUdeviceptr address, CUstream stream))                                                            \
  F(cuGraphCreate, (CUgraph * graph, unsigned int flags))                                                              \
  F(cuGraphAddMemAllocNode, (CUgraphNode * node, CUgraph graph, const CUgraphNode* dependencies, size_t count,         \
                             CUDA_MEM_ALLOC_NODE_PARAMS* parameters))                                                  \
  F(cuGraphAddMemFreeNode,                                                                                             \
    (CUgraphNode * node, CUgraph graph, const CUgraphNode* dependencies, size_t count, CUdeviceptr address))           \
  F(cuGraphAddNode,                                                                                                    \
    (CUgraphNode * node, CUgraph graph, const CUgraphNode* dependencies, size_t count, CUgraphNodeParams* parameters)) \
  F(cuGraphAddNode_v2, (CUgraphNode * node, CUgraph graph, const CUgraphNode* dependencies,                            \
                        const CUgraphEdgeData* edges, size_t count, CUgraphNodeParams* parameters))                    \
  F(cuGraphInstantiateWithFlags, (CUgraphExec * exec, CUgraph graph, unsigned long long flags))                        \
  F(cuGraphLaunch, (CUgraphExec exec, CUstream stream))                                                                \
  F(cuGraphExecDestroy, (CUgraphExec exec))                                                                            \
  F(cuDeviceGetGraphMemAttribute, (CUdevice device, CUgraphMem_attribute attribute, void* value))                      \
  F(cuDeviceSetGraphMemAttribute, (CUdevice device, CUgraphMem_attribute attribute, void* value))                      \
  F(cuDeviceGraphMemTrim, (CUdevice device))                                                                           \
  F(cuCtxSetCurrent, (CUcontext context))                                                                              \
  F(cuDevicePrimaryCtxReset_v2, (CUdevice device))                                                                     \
  F(cuStreamGetCtx, (CUstream stream, CUcontext * context))                                                            \
  F(cuStreamGetCtx_v2, (CUstream stream, CUcontext * context, CUgreenCtx * green))                                     \
  F(cuLaunchHostFunc, (CUstream stream, CUhostFn function, void* data))                                                \
  F(cuStreamBeginCapture_v2, (CUstream stream, CUstreamCaptureMode mode))                                              \
  F(cuStreamEndCapture, (CUstream stream, CUgraph * graph))                                                            \
  F(cuGraphDestroy, (CUgraph graph))

// Programs for newer CUDA do not call these first versions.
#define VRAMBROKER_CUDA_FIRST_FUNCTIONS(F)                                                                     \
  F(cuDeviceTotalMem, (unsigned int* bytes, CUdevice device))                                                  \
  F(cuDevicePrimaryCtxRelease, (CUdevice device))                                                              \
  F(cuDevicePrimaryCtxReset, (CUdevice device))                                                                \
  F(cuCtxCreate, (CUcontext * context, unsigned int flags, CUdevice device))                                   \
  F(cuCtxDestroy, (CUcontext context))                                                                         \
  F(cuMemGetInfo, (unsigned int* free_bytes, unsigned int* total_bytes))                                       \
  F(cuMemAlloc, (Address32 * address, unsigned int bytes))                                                     \
  F(cuMemAllocPitch,                                                                                           \
    (Address32 * address, unsigned int* pitch, unsigned int width, unsigned int height, unsigned int element)) \
  F(cuMemFree, (Address32 address))                                                                            \
  F(cuArrayCreate, (CUarray * array, const ArrayDescriptor32* descriptor))                                     \
  F(cuArray3DCreate, (CUarray * array, const Array3dDescriptor32* descriptor))

// Functions that use the thread's own stream as the default stream: F(name without the suffix, suffix, parameters,
// arguments).
#define VRAMBROKER_CUDA_PER_THREAD_FUNCTIONS(F)                                                                     \
  F(cuMemcpyHtoD_v2, _ptds, (CUdeviceptr to, const void* from, size_t bytes), (to, from, bytes))                    \
  F(cuMemcpyDtoH_v2, _ptds, (void* to, CUdeviceptr from, size_t bytes), (to, from, bytes))                          \
  F(cuMemsetD8Async, _ptsz, (CUdeviceptr address, unsigned char value, size_t bytes, CUstream stream),              \
    (address, value, bytes, PerThread(stream)))                                                                     \
  F(cuMemAllocAsync, _ptsz, (CUdeviceptr * address, size_t bytes, CUstream stream),                                 \
    (address, bytes, PerThread(stream)))                                                                            \
  F(cuMemAllocFromPoolAsync, _ptsz, (CUdeviceptr * address, size_t bytes, CUmemoryPool pool, CUstream stream),      \
    (address, bytes, pool, PerThread(stream)))                                                                      \
  F(cuMemFreeAsync, _ptsz, (CUdeviceptr address, CUstream stream), (address, PerThread(stream)))                    \
  F(cuGraphLaunch, _ptsz, (CUgraphExec exec, CUstream stream), (exec, PerThread(stream)))                           \
  F(cuStreamQuery, _ptsz, (CUstream stream), (PerThread(stream)))                                                   \
  F(cuStreamSynchronize, _ptsz, (CUstream stream), (PerThread(stream)))                                             \
  F(cuStreamGetCtx, _ptsz, (CUstream stream, CUcontext * context), (PerThread(stream), context))                    \
  F(cuStreamGetCtx_v2, _ptsz, (CUstream stream, CUcontext * context, CUgreenCtx * green),                           \
    (PerThread(stream), context, green))                                                                            \
  F(cuLaunchHostFunc, _ptsz, (CUstream stream, CUhostFn function, void* data), (PerThread(stream), function, data)) \
  F(cuStreamIsCapturing, _ptsz, (CUstream stream, CUstreamCaptureStatus * status), (PerThread(stream), status))     \
  F(cuStreamBeginCapture_v2, _ptsz, (CUstream stream, CUstreamCaptureMode mode), (PerThread(stream), mode))         \
  F(cuStreamEndCapture, _ptsz, (CUstream stream, CUgraph * graph), (PerThread(stream), graph))                      \
  F(cuEventRecord, _ptsz, (CUevent event, CUstream stream), (event, PerThread(stream)))

// The driver exports these functions. Where cuda.h is the CUDA Toolkit's header, the compiler compares the
// declarations.
extern "C" {
#define VRAMBROKER_DECLARE(name, parameters) __attribute__((visibility("default"))) CUresult name parameters;
#define VRAMBROKER_DECLARE_PER_THREAD(name, suffix, parameters, arguments) VRAMBROKER_DECLARE(name##suffix, parameters)
VRAMBROKER_CUDA_DRIVER_FUNCTIONS(VRAMBROKER_DECLARE)
VRAMBROKER_CUDA_APPLICATION_FUNCTIONS(VRAMBROKER_DECLARE)
VRAMBROKER_CUDA_FIRST_FUNCTIONS(VRAMBROKER_DECLARE)
VRAMBROKER_CUDA_PER_THREAD_FUNCTIONS(VRAMBROKER_DECLARE_PER_THREAD)
#undef VRAMBROKER_DECLARE_PER_THREAD
#undef VRAMBROKER_DECLARE
}

namespace vrambroker::cuda_substitute {

// Replaces the faults of kFaultsVariable, and counts calls from this call on.
[[gnu::visibility("default")]] void SetFaults(const std::string& faults);
// Returns the number of calls of a function so far, refused calls included. `function` is the documented name:
// "cuMemAlloc", not "cuMemAlloc_v2".
[[gnu::visibility("default")]] uint64_t Calls(const std::string& function);
// Queues work on `stream`, behind the work that is queued there already. The work takes `duration`, like a kernel on a
// real GPU.
[[gnu::visibility("default")]] void Launch(CUstream stream, std::chrono::nanoseconds duration);
// Works like cudaSetDevice() in a program with a CUDA runtime: makes the device's primary context the thread's context.
// A missing primary context is made first. With -1 the thread has no context, like a thread that never chose a device.
[[gnu::visibility("default")]] CUresult UseGpu(int device);
// Returns the device of the thread's context; -1 when the thread has no context.
[[gnu::visibility("default")]] int ThreadsGpu();

}  // namespace vrambroker::cuda_substitute

#endif  // VRAMBROKER_TESTS_CUDA_SUBSTITUTE_DRIVER_H_
