// SPDX-License-Identifier: Apache-2.0
//
// Functions of the driver by base name and version, and functions that use the thread's own stream for the default
// stream.
#include <cstring>
#include <type_traits>

#include "tests/cuda_substitute/driver.h"
#include "tests/cuda_substitute/driver_state.h"

#if defined(__cuda_cuda_h__) && CUDA_VERSION >= 13000
#include <cudaTypedefs.h>
#endif

// F(base name, first CUDA version, function).
#define VRAMBROKER_CUDA_SYMBOLS(F)                                                       \
  F(cuInit, 2000, cuInit)                                                                \
  F(cuDriverGetVersion, 2020, cuDriverGetVersion)                                        \
  F(cuGetErrorName, 6000, cuGetErrorName)                                                \
  F(cuGetErrorString, 6000, cuGetErrorString)                                            \
  F(cuGetProcAddress, 11030, cuGetProcAddress)                                           \
  F(cuGetProcAddress, 12000, cuGetProcAddress_v2)                                        \
  F(cuGetExportTable, 3000, cuGetExportTable)                                            \
  F(cuDeviceGetCount, 2000, cuDeviceGetCount)                                            \
  F(cuDeviceGet, 2000, cuDeviceGet)                                                      \
  F(cuDeviceGetName, 2000, cuDeviceGetName)                                              \
  F(cuDeviceGetUuid, 9020, cuDeviceGetUuid)                                              \
  F(cuDeviceGetUuid, 11040, cuDeviceGetUuid_v2)                                          \
  F(cuDeviceTotalMem, 3020, cuDeviceTotalMem_v2)                                         \
  F(cuDeviceGetAttribute, 2000, cuDeviceGetAttribute)                                    \
  F(cuDevicePrimaryCtxGetState, 7000, cuDevicePrimaryCtxGetState)                        \
  F(cuDevicePrimaryCtxRetain, 7000, cuDevicePrimaryCtxRetain)                            \
  F(cuDevicePrimaryCtxReset, 11000, cuDevicePrimaryCtxReset_v2)                          \
  F(cuDevicePrimaryCtxRelease, 11000, cuDevicePrimaryCtxRelease_v2)                      \
  F(cuCtxCreate, 3020, cuCtxCreate_v2)                                                   \
  F(cuCtxCreate, 11040, cuCtxCreate_v3)                                                  \
  F(cuCtxCreate, 12050, cuCtxCreate_v4)                                                  \
  F(cuCtxDestroy, 4000, cuCtxDestroy_v2)                                                 \
  F(cuCtxGetCurrent, 4000, cuCtxGetCurrent)                                              \
  F(cuCtxPushCurrent, 4000, cuCtxPushCurrent_v2)                                         \
  F(cuCtxPopCurrent, 4000, cuCtxPopCurrent_v2)                                           \
  F(cuCtxSetCurrent, 4000, cuCtxSetCurrent)                                              \
  F(cuCtxGetDevice, 2000, cuCtxGetDevice)                                                \
  F(cuCtxGetDevice, 13000, cuCtxGetDevice_v2)                                            \
  F(cuCtxSynchronize, 2000, cuCtxSynchronize)                                            \
  F(cuMemGetInfo, 3020, cuMemGetInfo_v2)                                                 \
  F(cuMemAlloc, 3020, cuMemAlloc_v2)                                                     \
  F(cuMemAllocPitch, 3020, cuMemAllocPitch_v2)                                           \
  F(cuMemAllocManaged, 6000, cuMemAllocManaged)                                          \
  F(cuMemHostAlloc, 2020, cuMemHostAlloc)                                                \
  F(cuMemAllocHost, 3020, cuMemAllocHost_v2)                                             \
  F(cuMemFreeHost, 2000, cuMemFreeHost)                                                  \
  F(cuPointerGetAttribute, 4000, cuPointerGetAttribute)                                  \
  F(cuMemFree, 3020, cuMemFree_v2)                                                       \
  F(cuMemGetAddressRange, 3020, cuMemGetAddressRange_v2)                                 \
  F(cuMemcpyHtoD, 3020, cuMemcpyHtoD_v2)                                                 \
  F(cuMemcpyDtoH, 3020, cuMemcpyDtoH_v2)                                                 \
  F(cuMemsetD8Async, 3020, cuMemsetD8Async)                                              \
  F(cuIpcGetMemHandle, 4010, cuIpcGetMemHandle)                                          \
  F(cuIpcOpenMemHandle, 11000, cuIpcOpenMemHandle_v2)                                    \
  F(cuIpcCloseMemHandle, 4010, cuIpcCloseMemHandle)                                      \
  F(cuArrayCreate, 3020, cuArrayCreate_v2)                                               \
  F(cuArray3DCreate, 3020, cuArray3DCreate_v2)                                           \
  F(cuArrayDestroy, 2000, cuArrayDestroy)                                                \
  F(cuArrayGetMemoryRequirements, 11060, cuArrayGetMemoryRequirements)                   \
  F(cuMipmappedArrayCreate, 5000, cuMipmappedArrayCreate)                                \
  F(cuMipmappedArrayDestroy, 5000, cuMipmappedArrayDestroy)                              \
  F(cuMipmappedArrayGetMemoryRequirements, 11060, cuMipmappedArrayGetMemoryRequirements) \
  F(cuMemGetAllocationGranularity, 10020, cuMemGetAllocationGranularity)                 \
  F(cuMemCreate, 10020, cuMemCreate)                                                     \
  F(cuMemRelease, 10020, cuMemRelease)                                                   \
  F(cuMemRetainAllocationHandle, 11000, cuMemRetainAllocationHandle)                     \
  F(cuMemAddressReserve, 10020, cuMemAddressReserve)                                     \
  F(cuMemAddressFree, 10020, cuMemAddressFree)                                           \
  F(cuMemMap, 10020, cuMemMap)                                                           \
  F(cuMemUnmap, 10020, cuMemUnmap)                                                       \
  F(cuMemMapArrayAsync, 11010, cuMemMapArrayAsync)                                       \
  F(cuMemSetAccess, 10020, cuMemSetAccess)                                               \
  F(cuMemExportToShareableHandle, 10020, cuMemExportToShareableHandle)                   \
  F(cuMemImportFromShareableHandle, 10020, cuMemImportFromShareableHandle)               \
  F(cuDeviceGetDefaultMemPool, 11020, cuDeviceGetDefaultMemPool)                         \
  F(cuDeviceGetMemPool, 11020, cuDeviceGetMemPool)                                       \
  F(cuDeviceSetMemPool, 11020, cuDeviceSetMemPool)                                       \
  F(cuMemGetDefaultMemPool, 13000, cuMemGetDefaultMemPool)                               \
  F(cuMemGetMemPool, 13000, cuMemGetMemPool)                                             \
  F(cuMemSetMemPool, 13000, cuMemSetMemPool)                                             \
  F(cuMemPoolCreate, 11020, cuMemPoolCreate)                                             \
  F(cuMemPoolDestroy, 11020, cuMemPoolDestroy)                                           \
  F(cuMemPoolGetAttribute, 11020, cuMemPoolGetAttribute)                                 \
  F(cuMemPoolSetAttribute, 11020, cuMemPoolSetAttribute)                                 \
  F(cuMemPoolTrimTo, 11020, cuMemPoolTrimTo)                                             \
  F(cuMemAllocAsync, 11020, cuMemAllocAsync)                                             \
  F(cuMemAllocFromPoolAsync, 11020, cuMemAllocFromPoolAsync)                             \
  F(cuMemFreeAsync, 11020, cuMemFreeAsync)                                               \
  F(cuGraphCreate, 10000, cuGraphCreate)                                                 \
  F(cuGraphAddMemAllocNode, 11040, cuGraphAddMemAllocNode)                               \
  F(cuGraphAddMemFreeNode, 11040, cuGraphAddMemFreeNode)                                 \
  F(cuGraphAddNode, 12020, cuGraphAddNode)                                               \
  F(cuGraphAddNode, 12030, cuGraphAddNode_v2)                                            \
  F(cuGraphInstantiateWithFlags, 11040, cuGraphInstantiateWithFlags)                     \
  F(cuGraphLaunch, 10000, cuGraphLaunch)                                                 \
  F(cuGraphExecDestroy, 10000, cuGraphExecDestroy)                                       \
  F(cuDeviceGetGraphMemAttribute, 11040, cuDeviceGetGraphMemAttribute)                   \
  F(cuDeviceSetGraphMemAttribute, 11040, cuDeviceSetGraphMemAttribute)                   \
  F(cuDeviceGraphMemTrim, 11040, cuDeviceGraphMemTrim)                                   \
  F(cuStreamCreate, 2000, cuStreamCreate)                                                \
  F(cuStreamDestroy, 4000, cuStreamDestroy_v2)                                           \
  F(cuStreamQuery, 2000, cuStreamQuery)                                                  \
  F(cuStreamSynchronize, 2000, cuStreamSynchronize)                                      \
  F(cuStreamGetCtx, 9020, cuStreamGetCtx)                                                \
  F(cuStreamGetCtx, 12050, cuStreamGetCtx_v2)                                            \
  F(cuLaunchHostFunc, 10000, cuLaunchHostFunc)                                           \
  F(cuStreamIsCapturing, 10000, cuStreamIsCapturing)                                     \
  F(cuStreamBeginCapture, 10010, cuStreamBeginCapture_v2)                                \
  F(cuStreamEndCapture, 10000, cuStreamEndCapture)                                       \
  F(cuThreadExchangeStreamCaptureMode, 10010, cuThreadExchangeStreamCaptureMode)         \
  F(cuGraphDestroy, 10000, cuGraphDestroy)                                               \
  F(cuEventCreate, 2000, cuEventCreate)                                                  \
  F(cuEventDestroy, 4000, cuEventDestroy_v2)                                             \
  F(cuEventQuery, 2000, cuEventQuery)                                                    \
  F(cuEventRecord, 2000, cuEventRecord)                                                  \
  F(cuEventSynchronize, 2000, cuEventSynchronize)

// F(base name, first CUDA version, function), for first versions of functions. cudaTypedefs.h does not name first
// versions.
#define VRAMBROKER_CUDA_FIRST_SYMBOLS(F)                        \
  F(cuDeviceTotalMem, 2000, cuDeviceTotalMem)                   \
  F(cuDevicePrimaryCtxReset, 7000, cuDevicePrimaryCtxReset)     \
  F(cuDevicePrimaryCtxRelease, 7000, cuDevicePrimaryCtxRelease) \
  F(cuCtxCreate, 2000, cuCtxCreate)                             \
  F(cuCtxDestroy, 2000, cuCtxDestroy)                           \
  F(cuMemGetInfo, 2000, cuMemGetInfo)                           \
  F(cuMemAlloc, 2000, cuMemAlloc)                               \
  F(cuMemAllocPitch, 2000, cuMemAllocPitch)                     \
  F(cuMemFree, 2000, cuMemFree)                                 \
  F(cuArrayCreate, 2000, cuArrayCreate)                         \
  F(cuArray3DCreate, 2000, cuArray3DCreate)

// F(base name, first CUDA version, function without the suffix, suffix).
#define VRAMBROKER_CUDA_PER_THREAD_SYMBOLS(F)                       \
  F(cuMemcpyHtoD, 7000, cuMemcpyHtoD_v2, _ptds)                     \
  F(cuMemcpyDtoH, 7000, cuMemcpyDtoH_v2, _ptds)                     \
  F(cuMemsetD8Async, 7000, cuMemsetD8Async, _ptsz)                  \
  F(cuMemAllocAsync, 11020, cuMemAllocAsync, _ptsz)                 \
  F(cuMemAllocFromPoolAsync, 11020, cuMemAllocFromPoolAsync, _ptsz) \
  F(cuMemFreeAsync, 11020, cuMemFreeAsync, _ptsz)                   \
  F(cuGraphLaunch, 10000, cuGraphLaunch, _ptsz)                     \
  F(cuStreamQuery, 7000, cuStreamQuery, _ptsz)                      \
  F(cuStreamSynchronize, 7000, cuStreamSynchronize, _ptsz)          \
  F(cuStreamGetCtx, 9020, cuStreamGetCtx, _ptsz)                    \
  F(cuStreamGetCtx, 12050, cuStreamGetCtx_v2, _ptsz)                \
  F(cuLaunchHostFunc, 10000, cuLaunchHostFunc, _ptsz)               \
  F(cuStreamIsCapturing, 10000, cuStreamIsCapturing, _ptsz)         \
  F(cuStreamBeginCapture, 10010, cuStreamBeginCapture_v2, _ptsz)    \
  F(cuStreamEndCapture, 10000, cuStreamEndCapture, _ptsz)           \
  F(cuEventRecord, 7000, cuEventRecord, _ptsz)

#ifdef PFN_cuGetProcAddress  // the toolkit's cudaTypedefs.h, which has a type for each version of each function
#define VRAMBROKER_COMPARE(base, version, function) \
  static_assert(std::is_same_v<PFN_##base##_v##version, decltype(&::function)>);
#define VRAMBROKER_COMPARE_PER_THREAD(base, version, function, suffix) \
  static_assert(std::is_same_v<PFN_##base##_v##version##suffix, decltype(&::function##suffix)>);
VRAMBROKER_CUDA_SYMBOLS(VRAMBROKER_COMPARE)
VRAMBROKER_CUDA_PER_THREAD_SYMBOLS(VRAMBROKER_COMPARE_PER_THREAD)
#undef VRAMBROKER_COMPARE_PER_THREAD
#undef VRAMBROKER_COMPARE
#endif

namespace vrambroker::cuda_substitute {
namespace {

struct Symbol {
  const char* base;
  int version;
  bool per_thread;
  void* function;
};

// Makes the table at the first call: casts of functions are no constants.
const std::vector<Symbol>& Symbols() {
#define VRAMBROKER_ENTRY(base, version, function) {#base, version, false, reinterpret_cast<void*>(&::function)},
#define VRAMBROKER_ENTRY_PER_THREAD(base, version, function, suffix) \
  {#base, version, true, reinterpret_cast<void*>(&::function##suffix)},
  static const auto* const symbols =
      new std::vector<Symbol>{VRAMBROKER_CUDA_SYMBOLS(VRAMBROKER_ENTRY) VRAMBROKER_CUDA_FIRST_SYMBOLS(VRAMBROKER_ENTRY)
                                  VRAMBROKER_CUDA_PER_THREAD_SYMBOLS(VRAMBROKER_ENTRY_PER_THREAD)};
#undef VRAMBROKER_ENTRY_PER_THREAD
#undef VRAMBROKER_ENTRY
  return *symbols;
}

// Returns the newest function that is not newer than `version`, or the newest function for a negative `version`; null,
// and the reason in `status`, when there is no such function. Where some functions use the thread's own stream,
// `per_thread` selects only these functions.
void* Find(const char* name, int version, bool per_thread, CUdriverProcAddressQueryResult& status) {
  const int newest = Driver::Get().version();
  std::vector<const Symbol*> all;
  std::vector<const Symbol*> of_thread;
  for (const Symbol& symbol : Symbols()) {
    if (std::strcmp(symbol.base, name) != 0 || symbol.version > newest) continue;
    (symbol.per_thread ? of_thread : all).push_back(&symbol);
  }
  if (per_thread && !of_thread.empty()) all = of_thread;
  const Symbol* found = nullptr;
  for (const Symbol* const symbol : all) {
    if (version >= 0 && symbol->version > version) continue;
    if (found == nullptr || symbol->version > found->version) found = symbol;
  }
  status = all.empty()        ? CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND
           : found == nullptr ? CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT
                              : CU_GET_PROC_ADDRESS_SUCCESS;
  return found == nullptr ? nullptr : found->function;
}

// Serves both forms of cuGetProcAddress(), also before cuInit().
CUresult GetProcAddress(const char* name, void*& function, int version, cuuint64_t flags,
                        CUdriverProcAddressQueryResult& status) {
  constexpr cuuint64_t kBoth = CU_GET_PROC_ADDRESS_LEGACY_STREAM | CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM;
  if (name == nullptr || (flags & ~kBoth) != 0) return CUDA_ERROR_INVALID_VALUE;
  if (const CUresult error = Driver::Get().faults().Count("cuGetProcAddress"); error != CUDA_SUCCESS) return error;
  function = Find(name, version, (flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM) != 0, status);
  return CUDA_SUCCESS;
}

CUstream PerThread(CUstream stream) {
  return stream == nullptr ? CU_STREAM_PER_THREAD : stream;
}

}  // namespace
}  // namespace vrambroker::cuda_substitute

using namespace vrambroker::cuda_substitute;  // NOLINT(google-build-using-namespace): the driver has C functions

// The form of CUDA 11: without a function, the call returns an error, and leaves the pointer alone.
CUresult cuGetProcAddress(const char* symbol, void** function, int version, cuuint64_t flags) {
  CUdriverProcAddressQueryResult status = CU_GET_PROC_ADDRESS_SUCCESS;
  void* found = nullptr;
  if (const CUresult error = GetProcAddress(symbol, found, version, flags, status); error != CUDA_SUCCESS) return error;
  if (found == nullptr) return CUDA_ERROR_NOT_FOUND;
  *function = found;
  return CUDA_SUCCESS;
}

CUresult cuGetProcAddress_v2(const char* symbol, void** function, int version, cuuint64_t flags,
                             CUdriverProcAddressQueryResult* status) {
  CUdriverProcAddressQueryResult why = CU_GET_PROC_ADDRESS_SUCCESS;
  void* found = nullptr;
  if (const CUresult error = GetProcAddress(symbol, found, version, flags, why); error != CUDA_SUCCESS) return error;
  *function = found;
  if (status != nullptr) *status = why;
  return CUDA_SUCCESS;
}

// The substitute has no tables of functions that NVIDIA does not document.
CUresult cuGetExportTable(const void** table, const CUuuid* /*id*/) {
  *table = nullptr;
  return CUDA_ERROR_INVALID_VALUE;
}

#define VRAMBROKER_DEFINE(name, suffix, parameters, arguments) \
  CUresult name##suffix parameters {                           \
    return name arguments;                                     \
  }
VRAMBROKER_CUDA_PER_THREAD_FUNCTIONS(VRAMBROKER_DEFINE)
#undef VRAMBROKER_DEFINE
