// SPDX-License-Identifier: Apache-2.0
//
// The driver in a program's view, independent of the library's declarations.
#ifndef VRAMBROKER_TESTS_PRELOAD_PROBE_H_
#define VRAMBROKER_TESTS_PRELOAD_PROBE_H_

#include <stddef.h>

/* F(function, name for cuGetProcAddress, version, arguments) */
#define PROBE_FUNCTIONS(F)                                                                                  \
  F(cuInit, "cuInit", 2000, (unsigned int flags))                                                           \
  F(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain", 7000, (void** context, int device))               \
  F(cuDevicePrimaryCtxRelease_v2, "cuDevicePrimaryCtxRelease", 11000, (int device))                         \
  F(cuDevicePrimaryCtxReset_v2, "cuDevicePrimaryCtxReset", 11000, (int device))                             \
  F(cuCtxCreate_v2, "cuCtxCreate", 3020, (void** context, unsigned int flags, int device))                  \
  F(cuCtxDestroy_v2, "cuCtxDestroy", 4000, (void* context))                                                 \
  F(cuCtxSetCurrent, "cuCtxSetCurrent", 4000, (void* context))                                              \
  F(cuCtxSynchronize, "cuCtxSynchronize", 2000, (void))                                                     \
  F(cuMemGetInfo_v2, "cuMemGetInfo", 3020, (size_t * left, size_t * total))                                 \
  F(cuDeviceTotalMem_v2, "cuDeviceTotalMem", 3020, (size_t * bytes, int device))                            \
  F(cuMemAlloc_v2, "cuMemAlloc", 3020, (address_t * address, size_t bytes))                                 \
  F(cuMemAllocPitch_v2, "cuMemAllocPitch", 3020,                                                            \
    (address_t * address, size_t * pitch, size_t width, size_t height, unsigned int element))               \
  F(cuMemAlloc, "cuMemAlloc", 2000, (unsigned int* address, unsigned int bytes))                            \
  F(cuMemAllocPitch, "cuMemAllocPitch", 3019,                                                               \
    (unsigned* address, unsigned* pitch, unsigned width, unsigned height, unsigned element))                \
  F(cuMemFree, "cuMemFree", 3010, (unsigned int address))                                                   \
  F(cuArrayCreate, "cuArrayCreate", 2000, (void** array, const struct array32* descriptor))                 \
  F(cuArray3DCreate, "cuArray3DCreate", 2000, (void** array, const struct array3d32* descriptor))           \
  F(cuMemAllocManaged, "cuMemAllocManaged", 6000, (address_t * address, size_t bytes, unsigned int flags))  \
  F(cuMemFree_v2, "cuMemFree", 3020, (address_t address))                                                   \
  F(cuArrayCreate_v2, "cuArrayCreate", 3020, (void** array, const struct array* descriptor))                \
  F(cuArray3DCreate_v2, "cuArray3DCreate", 3020, (void** array, const struct array3d* descriptor))          \
  F(cuArrayDestroy, "cuArrayDestroy", 2000, (void* array))                                                  \
  F(cuMipmappedArrayCreate, "cuMipmappedArrayCreate", 5000,                                                 \
    (void** array, const struct array3d* descriptor, unsigned int levels))                                  \
  F(cuMipmappedArrayDestroy, "cuMipmappedArrayDestroy", 5000, (void* array))                                \
  F(cuMemCreate, "cuMemCreate", 10020,                                                                      \
    (address_t * handle, size_t bytes, const struct properties* properties, unsigned long long flags))      \
  F(cuMemRelease, "cuMemRelease", 10020, (address_t handle))                                                \
  F(cuMemRetainAllocationHandle, "cuMemRetainAllocationHandle", 11000, (address_t * handle, void* address)) \
  F(cuMemAddressReserve, "cuMemAddressReserve", 10020,                                                      \
    (address_t * address, size_t bytes, size_t alignment, address_t hint, unsigned long long flags))        \
  F(cuMemMap, "cuMemMap", 10020,                                                                            \
    (address_t address, size_t bytes, size_t offset, address_t handle, unsigned long long flags))           \
  F(cuMemUnmap, "cuMemUnmap", 10020, (address_t address, size_t bytes))                                     \
  F(cuMemMapArrayAsync, "cuMemMapArrayAsync", 11010, (struct tile * tiles, unsigned count, void* stream))   \
  F(cuMemExportToShareableHandle, "cuMemExportToShareableHandle", 10020,                                    \
    (void* shareable, address_t handle, int type, unsigned long long flags))                                \
  F(cuMemImportFromShareableHandle, "cuMemImportFromShareableHandle", 10020,                                \
    (address_t * handle, void* shareable, int type))                                                        \
  F(cuStreamCreate, "cuStreamCreate", 2000, (void** stream, unsigned int flags))                            \
  F(cuStreamSynchronize, "cuStreamSynchronize", 2000, (void* stream))                                       \
  F(cuStreamBeginCapture_v2, "cuStreamBeginCapture", 10010, (void* stream, int mode))                       \
  F(cuStreamEndCapture, "cuStreamEndCapture", 10000, (void* stream, void** graph))                          \
  F(cuMemAllocAsync, "cuMemAllocAsync", 11020, (address_t * address, size_t bytes, void* stream))           \
  F(cuMemAllocFromPoolAsync, "cuMemAllocFromPoolAsync", 11020,                                              \
    (address_t * address, size_t bytes, void* pool, void* stream))                                          \
  F(cuMemFreeAsync, "cuMemFreeAsync", 11020, (address_t address, void* stream))                             \
  F(cuDeviceGetDefaultMemPool, "cuDeviceGetDefaultMemPool", 11020, (void** pool, int device))               \
  F(cuMemGetDefaultMemPool, "cuMemGetDefaultMemPool", 13000, (void** pool, const int* location, int type))  \
  F(cuMemGetMemPool, "cuMemGetMemPool", 13000, (void** pool, const int* location, int type))                \
  F(cuMemPoolCreate, "cuMemPoolCreate", 11020, (void** pool, const struct properties* properties))          \
  F(cuMemPoolDestroy, "cuMemPoolDestroy", 11020, (void* pool))                                              \
  F(cuDeviceSetMemPool, "cuDeviceSetMemPool", 11020, (int device, void* pool))                              \
  F(cuMemPoolTrimTo, "cuMemPoolTrimTo", 11020, (void* pool, size_t bytes))                                  \
  F(cuMemPoolSetAttribute, "cuMemPoolSetAttribute", 11020, (void* pool, int attribute, void* value))        \
  F(cuLaunchHostFunc, "cuLaunchHostFunc", 10000, (void* stream, void (*function)(void*), void* data))       \
  F(cuGraphCreate, "cuGraphCreate", 10000, (void** graph, unsigned int flags))                              \
  F(cuGraphAddMemAllocNode, "cuGraphAddMemAllocNode", 11040,                                                \
    (void** node, void* graph, void* const* after, size_t count, struct allocation* parameters))            \
  F(cuGraphAddNode_v2, "cuGraphAddNode", 12030,                                                             \
    (void** node, void* graph, void* const* after, const void* edges, size_t count, void* parameters))      \
  F(cuGraphInstantiateWithFlags, "cuGraphInstantiateWithFlags", 11040,                                      \
    (void** exec, void* graph, unsigned long long flags))                                                   \
  F(cuGraphLaunch, "cuGraphLaunch", 10000, (void* exec, void* stream))                                      \
  F(cuGraphExecDestroy, "cuGraphExecDestroy", 10000, (void* exec))                                          \
  F(cuGraphDestroy, "cuGraphDestroy", 10000, (void* graph))                                                 \
  F(cuDeviceGraphMemTrim, "cuDeviceGraphMemTrim", 11040, (int device))

typedef unsigned long long address_t; /* address, or a handle of memory */

struct array {
  size_t width, height;
  int format;
  unsigned int channels;
};

struct array32 {
  unsigned int width, height;
  int format;
  unsigned int channels;
};

struct array3d32 {
  unsigned int width, height, depth;
  int format;
  unsigned int channels, flags;
};

struct array3d {
  size_t width, height, depth;
  int format;
  unsigned int channels, flags;
};

struct tile {
  int array_type;
  void* array;
  int part_type;
  unsigned int padding, level, layer, offset[3], extent[3];
  int operation, handle_type;
  address_t handle, handle_offset;
  unsigned int devices, flags, reserved[2];
};

/* Properties of memory by handle, and of a pool. The pool's properties are longer. */
struct properties {
  int type, handle_types, location_type, location;
  void* windows;
  size_t most;
  unsigned char rest[64];
};

/* Parameters of a graph's allocating node: alone, and as a node of any kind. */
struct allocation {
  int type, handle_types, location_type, location;
  void* windows;
  size_t most;
  unsigned char rest[56];
  const void* access;
  size_t access_count, bytes;
  address_t address;
};
struct node {
  int type, reserved[3];
  union {
    struct allocation allocation;
    long long all[29];
  } of;
  long long reserved_too;
};

#define FUNCTION(name, base, version, arguments) int(*name) arguments;
struct driver {
  PROBE_FUNCTIONS(FUNCTION)
};
#undef FUNCTION
#ifdef PROBE_LINKED
#define FUNCTION(name, base, version, arguments) extern int name arguments;
PROBE_FUNCTIONS(FUNCTION)
#undef FUNCTION
#endif

extern struct driver driver;

struct thing {
  char kind[16];
  address_t address;
  address_t handle;
  size_t bytes;
  void* array; /* array, pool or graph */
  void* exec;
};

/* Allocates and frees on the thread's device (set_current). Returns the driver's error (probe_kinds.c). */
int allocate_thing(struct thing* thing, const char* kind, size_t bytes);
int free_thing(const struct thing* thing);
unsigned long long size_of(const char* text);
/* Sets the thread's context: the primary context of the first device, or of the device chosen here. */
void* set_current(void);
void use_device_here(int device);
int device_here(void);

/* Runs threads with allocations and frees (probe_crowd.c). */
void crowd(const char* kind, int threads, int times, unsigned long long bytes);
void pack(void* packing_driver, int threads, int times, int limit);

/* Allocates and frees by kind (probe_kinds.c), and prints the error. */
void probe_kinds(const char* word, const char* first, const char* second);

/* Handles signals, standard error and the program's end (probe_signals.c). 0: unknown word. */
int probe_signals(const char* word, const char* first, const char* second);

#endif  // VRAMBROKER_TESTS_PRELOAD_PROBE_H_
