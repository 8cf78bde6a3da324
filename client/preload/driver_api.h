/* SPDX-License-Identifier: Apache-2.0
 *
 * Known parts of NVIDIA's driver API and of NVML: types in plain C, since the headers of both may be missing, and
 * functions. CUDA_HOOKS and NVML_HOOKS list the hooked functions; CUDA_CALLS and NVML_CALLS list functions called
 * without a hook. An older driver lacks some functions. Names, types and numbers follow the references of CUDA 13.0 and
 * NVML.
 */
#ifndef VRAMBROKER_CLIENT_PRELOAD_DRIVER_API_H_
#define VRAMBROKER_CLIENT_PRELOAD_DRIVER_API_H_

#include <stddef.h>
#include <stdint.h>

typedef int cu_device;
typedef unsigned long long cu_address;
typedef unsigned int cu_address32; /* for functions without _v2 */
typedef struct CUctx_st* cu_context;
typedef struct CUstream_st* cu_stream;
typedef struct CUevent_st* cu_event;
typedef struct CUarray_st* cu_array;
typedef cu_array cu_mipmapped;
typedef struct CUmemPoolHandle_st* cu_pool;
typedef struct CUgraph_st* cu_graph;
typedef struct CUgraphNode_st* cu_node;
typedef struct CUgraphExec_st* cu_exec;
typedef unsigned long long cu_handle; /* handle of memory without an address */
typedef struct nvmlDevice_st* nvml_device;

typedef struct {
  unsigned char bytes[16];
} cu_uuid;

typedef struct {
  size_t width, height;
  int format;
  unsigned int channels;
} cu_array_descriptor;

typedef struct {
  unsigned int width, height;
  int format;
  unsigned int channels;
} cu_array_descriptor32; /* for functions without _v2 */

typedef struct {
  unsigned int width, height, depth;
  int format;
  unsigned int channels, flags;
} cu_array3d_descriptor32;

typedef struct {
  size_t width, height, depth;
  int format;
  unsigned int channels, flags;
} cu_array3d_descriptor;

typedef struct {
  unsigned char device, domain;
} cu_domain;

typedef struct {
  int type;
  union {
    int id;          /* number of the device, or of the host's NUMA node */
    cu_domain local; /* for CU_LOCATION_DOMAIN */
  };
} cu_location;

typedef struct {
  int type, handle_types;
  cu_location location; /* later fields are not read */
} cu_allocation;

/* Part of a sparse array, and the memory mapped there. */
typedef struct {
  int array_type;
  cu_array array;
  int part_type;
  union {
    unsigned int level[8]; /* mip level, layer, 3 offsets, 3 extents */
    struct {
      unsigned int layer;
      unsigned long long offset, size;
    } tail; /* for CU_PART_TAIL, of a mipmapped array */
  };
  int operation, handle_type;
  cu_handle handle;
  unsigned long long offset;
  unsigned int devices, flags, reserved[2];
} cu_tile;

typedef struct {
  int type, handle_types;
  cu_location location; /* later fields are not read */
} cu_pool_properties;

typedef struct {
  int type, reserved[3];
  cu_pool_properties memory; /* for CU_NODE_MEMORY; later fields are not read */
} cu_node_parameters;

typedef struct {
  unsigned long long total, free, used;
} nvml_memory;

typedef struct {
  unsigned int version;
  unsigned long long total, reserved, free, used;
} nvml_memory_v2;

enum {
  CU_OK = 0,
  CU_INVALID_VALUE = 1,
  CU_OUT_OF_MEMORY = 2,
  CU_LOCATION_DEVICE = 1,
  CU_LOCATION_HOST = 2,
  CU_LOCATION_HOST_NUMA = 3,
  CU_LOCATION_HOST_NUMA_CURRENT = 4,
  CU_LOCATION_DOMAIN = 6, /* a part of a device, since CUDA 13.4 */
  CU_MANAGED = 2,         /* a type of memory */
  CU_PART_TAIL = 1,
  CU_TILE_MAP = 1, /* an operation */
  CU_ARRAY_LAYERED = 0x01,
  CU_ARRAY_CUBEMAP = 0x04,
  CU_ARRAY_SPARSE = 0x40,
  CU_ARRAY_DEFERRED = 0x80,
  CU_POOL_RESERVED = 5, /* attributes */
  CU_GRAPH_RESERVED = 2,
  CU_NODE_MEMORY = 10, /* graph node allocating memory */
  CU_NOT_FOUND = 500,  /* "named symbol not found": the driver lacks the function */
};

#define CUDA_HOOKS(X)                                                                                               \
  X(cuGetProcAddress, (const char* symbol, void** function, int version, uint64_t flags))                           \
  X(cuGetProcAddress_v2, (const char* symbol, void** function, int version, uint64_t flags, int* status))           \
  /* memory.c */                                                                                                    \
  X(cuMemAlloc, (cu_address32 * address, unsigned int bytes))                                                       \
  X(cuMemAlloc_v2, (cu_address * address, size_t bytes))                                                            \
  X(cuMemAllocPitch,                                                                                                \
    (cu_address32 * address, unsigned int* pitch, unsigned int width, unsigned int height, unsigned int element))   \
  X(cuMemAllocPitch_v2, (cu_address * address, size_t * pitch, size_t width, size_t height, unsigned int element))  \
  X(cuMemAllocManaged, (cu_address * address, size_t bytes, unsigned int flags))                                    \
  X(cuMemFree, (cu_address32 address))                                                                              \
  X(cuMemFree_v2, (cu_address address))                                                                             \
  /* arrays.c */                                                                                                    \
  X(cuArrayCreate, (cu_array * array, const cu_array_descriptor32* descriptor))                                     \
  X(cuArray3DCreate, (cu_array * array, const cu_array3d_descriptor32* descriptor))                                 \
  X(cuArrayCreate_v2, (cu_array * array, const cu_array_descriptor* descriptor))                                    \
  X(cuArray3DCreate_v2, (cu_array * array, const cu_array3d_descriptor* descriptor))                                \
  X(cuArrayDestroy, (cu_array array))                                                                               \
  X(cuMipmappedArrayCreate, (cu_mipmapped * array, const cu_array3d_descriptor* descriptor, unsigned int levels))   \
  X(cuMipmappedArrayDestroy, (cu_mipmapped array))                                                                  \
  /* handles.c */                                                                                                   \
  X(cuMemCreate, (cu_handle * handle, size_t bytes, const cu_allocation* allocation, unsigned long long flags))     \
  X(cuMemRelease, (cu_handle handle))                                                                               \
  X(cuMemRetainAllocationHandle, (cu_handle * handle, void* address))                                               \
  X(cuMemMap, (cu_address address, size_t bytes, size_t offset, cu_handle handle, unsigned long long flags))        \
  X(cuMemUnmap, (cu_address address, size_t bytes))                                                                 \
  X(cuMemMapArrayAsync, (const cu_tile* list, unsigned int count, cu_stream stream))                                \
  X(cuMemMapArrayAsync_ptsz, (const cu_tile* list, unsigned int count, cu_stream stream))                           \
  /* pools.c */                                                                                                     \
  X(cuMemAllocAsync, (cu_address * address, size_t bytes, cu_stream stream))                                        \
  X(cuMemAllocAsync_ptsz, (cu_address * address, size_t bytes, cu_stream stream))                                   \
  X(cuMemAllocFromPoolAsync, (cu_address * address, size_t bytes, cu_pool pool, cu_stream stream))                  \
  X(cuMemAllocFromPoolAsync_ptsz, (cu_address * address, size_t bytes, cu_pool pool, cu_stream stream))             \
  X(cuMemFreeAsync, (cu_address address, cu_stream stream))                                                         \
  X(cuMemFreeAsync_ptsz, (cu_address address, cu_stream stream))                                                    \
  X(cuMemPoolCreate, (cu_pool * pool, const cu_pool_properties* properties))                                        \
  X(cuMemGetDefaultMemPool, (cu_pool * pool, cu_location * location, int type))                                     \
  X(cuMemGetMemPool, (cu_pool * pool, cu_location * location, int type))                                            \
  X(cuMemPoolDestroy, (cu_pool pool))                                                                               \
  X(cuMemPoolTrimTo, (cu_pool pool, size_t bytes))                                                                  \
  X(cuStreamSynchronize, (cu_stream stream))                                                                        \
  X(cuStreamSynchronize_ptsz, (cu_stream stream))                                                                   \
  X(cuEventSynchronize, (cu_event event))                                                                           \
  X(cuCtxSynchronize, (void))                                                                                       \
  X(cuCtxSynchronize_v2, (cu_context context))                                                                      \
  /* graphs.c */                                                                                                    \
  X(cuGraphAddMemAllocNode, (cu_node * node, cu_graph graph, const cu_node* after, size_t count, void* parameters)) \
  X(cuGraphAddNode, (cu_node * node, cu_graph graph, const cu_node* after, size_t count, void* parameters))         \
  X(cuGraphAddNode_v2,                                                                                              \
    (cu_node * node, cu_graph graph, const cu_node* after, const void* edges, size_t count, void* parameters))      \
  X(cuGraphInstantiate, (cu_exec * exec, cu_graph graph, cu_node * wrong, char* log, size_t bytes))                 \
  X(cuGraphInstantiate_v2, (cu_exec * exec, cu_graph graph, cu_node * wrong, char* log, size_t bytes))              \
  X(cuGraphInstantiateWithFlags, (cu_exec * exec, cu_graph graph, unsigned long long flags))                        \
  X(cuGraphInstantiateWithParams, (cu_exec * exec, cu_graph graph, void* parameters))                               \
  X(cuGraphInstantiateWithParams_ptsz, (cu_exec * exec, cu_graph graph, void* parameters))                          \
  X(cuGraphUpload, (cu_exec exec, cu_stream stream))                                                                \
  X(cuGraphUpload_ptsz, (cu_exec exec, cu_stream stream))                                                           \
  X(cuGraphLaunch, (cu_exec exec, cu_stream stream))                                                                \
  X(cuGraphLaunch_ptsz, (cu_exec exec, cu_stream stream))                                                           \
  X(cuDeviceGraphMemTrim, (cu_device device))                                                                       \
  /* contexts.c */                                                                                                  \
  X(cuCtxCreate, (cu_context * context, unsigned int flags, cu_device device))                                      \
  X(cuCtxCreate_v2, (cu_context * context, unsigned int flags, cu_device device))                                   \
  X(cuCtxCreate_v3, (cu_context * context, void* affinity, int count, unsigned int flags, cu_device device))        \
  X(cuCtxCreate_v4, (cu_context * context, void* parameters, unsigned int flags, cu_device device))                 \
  X(cuDevicePrimaryCtxRetain, (cu_context * context, cu_device device))                                             \
  X(cuCtxDestroy, (cu_context context))                                                                             \
  X(cuCtxDestroy_v2, (cu_context context))                                                                          \
  X(cuDevicePrimaryCtxReset, (cu_device device))                                                                    \
  X(cuDevicePrimaryCtxReset_v2, (cu_device device))                                                                 \
  X(cuDevicePrimaryCtxRelease, (cu_device device))                                                                  \
  X(cuDevicePrimaryCtxRelease_v2, (cu_device device))                                                               \
  /* info.c */                                                                                                      \
  X(cuMemGetInfo, (unsigned int* free_bytes, unsigned int* total_bytes))                                            \
  X(cuMemGetInfo_v2, (size_t * free_bytes, size_t * total_bytes))                                                   \
  X(cuDeviceTotalMem, (unsigned int* bytes, cu_device device))                                                      \
  X(cuDeviceTotalMem_v2, (size_t * bytes, cu_device device))

#define CUDA_CALLS(X)                                                                 \
  X(cuCtxGetCurrent, (cu_context * context))                                          \
  X(cuCtxGetDevice, (cu_device * device))                                             \
  X(cuCtxPushCurrent_v2, (cu_context context))                                        \
  X(cuCtxPopCurrent_v2, (cu_context * context))                                       \
  X(cuDeviceGetUuid, (cu_uuid * uuid, cu_device device))                              \
  X(cuDeviceGetUuid_v2, (cu_uuid * uuid, cu_device device))                           \
  X(cuDevicePrimaryCtxGetState, (cu_device device, unsigned int* flags, int* active)) \
  X(cuStreamGetCtx, (cu_stream stream, cu_context * context))                         \
  X(cuStreamQuery, (cu_stream stream))                                                \
  X(cuStreamQuery_ptsz, (cu_stream stream))                                           \
  X(cuStreamIsCapturing, (cu_stream stream, int* status))                             \
  X(cuStreamIsCapturing_ptsz, (cu_stream stream, int* status))                        \
  X(cuDeviceGetMemPool, (cu_pool * pool, cu_device device))                           \
  X(cuDeviceSetMemPool, (cu_device device, cu_pool pool))                             \
  X(cuDeviceGetDefaultMemPool, (cu_pool * pool, cu_device device))                    \
  X(cuMemPoolGetAttribute, (cu_pool pool, int attribute, void* value))                \
  X(cuDeviceGetGraphMemAttribute, (cu_device device, int attribute, void* value))     \
  X(cuGraphExecDestroy, (cu_exec exec))

#define NVML_HOOKS(X)                                                    \
  X(nvmlDeviceGetMemoryInfo, (nvml_device device, nvml_memory * memory)) \
  X(nvmlDeviceGetMemoryInfo_v2, (nvml_device device, nvml_memory_v2 * memory))

#define NVML_CALLS(X) X(nvmlDeviceGetUUID, (nvml_device device, char* uuid, unsigned int bytes))

/* First line of a hook: gets the driver, or returns CU_NOT_FOUND if the driver lacks the function. */
#define REAL(function)                         \
  const struct driver* driver = real_driver(); \
  if (driver == NULL || driver->function == NULL) return CU_NOT_FOUND

/* Function called by programs instead of the driver's function of the same name. */
#define HOOK __attribute__((visibility("default")))
#define DECLARE_HOOK(name, arguments) HOOK int name arguments;
CUDA_HOOKS(DECLARE_HOOK)
NVML_HOOKS(DECLARE_HOOK)
#undef DECLARE_HOOK

#endif /* VRAMBROKER_CLIENT_PRELOAD_DRIVER_API_H_ */
