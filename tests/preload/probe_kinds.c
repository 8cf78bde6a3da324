// SPDX-License-Identifier: Apache-2.0
//
// "alloc KIND BYTES", "free NUMBER": allocations have numbers from 0, also failed allocations. Other commands use
// memory in other ways.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/preload/probe.h"

static struct thing things[4096];
static int count;
static void* stream;
static void* pool;
static void* other_context;

static struct properties on_device(void) {
  struct properties properties;
  memset(&properties, 0, sizeof properties);
  properties.type = 1;          /* pinned memory */
  properties.location_type = 1; /* device */
  properties.location = device_here();
  return properties;
}

/* Returns an array with rows of floats, 4 KiB each. */
static struct array3d array_of(size_t bytes) {
  return (struct array3d){1024, bytes / 4096, 0, 0x20, 1, 0};
}

/* Creates memory: "handle" on the thread's device, "handle:TYPE:ID" at a location. */
static int create(struct thing* thing) {
  struct properties properties = on_device();
  sscanf(thing->kind, "handle:%d:%d", &properties.location_type, &properties.location);
  properties.handle_types = properties.location_type == 2 ? 0 : 1; /* file descriptor */
  return driver.cuMemCreate(&thing->handle, thing->bytes, &properties, 0);
}

/* Maps memory like PyTorch: the mapping alone keeps the memory. */
static int create_and_map(struct thing* thing) {
  int error = create(thing);
  if (error == 0) error = driver.cuMemAddressReserve(&thing->address, thing->bytes, 0, 0, 0);
  if (error == 0) error = driver.cuMemMap(thing->address, thing->bytes, 0, thing->handle, 0);
  if (error == 0) error = driver.cuMemRelease(thing->handle);
  return error;
}

/* Allocates from a new pool. */
static int create_pool(struct thing* thing) {
  const struct properties properties = on_device();
  int error = driver.cuMemPoolCreate(&thing->array, &properties);
  if (error != 0) return error;
  error = driver.cuMemAllocFromPoolAsync(&thing->address, thing->bytes, thing->array, NULL);
  if (error != 0) driver.cuMemPoolDestroy(thing->array);
  return error;
}

/* Makes an executable graph with an allocating node. */
static int create_graph(struct thing* thing) {
  struct allocation allocation;
  void* node;
  memset(&allocation, 0, sizeof allocation);
  allocation.type = 1;
  allocation.location_type = 1;
  allocation.location = device_here();
  allocation.bytes = thing->bytes;
  int error = driver.cuGraphCreate(&thing->array, 0);
  if (error != 0) return error;
  error = driver.cuGraphAddMemAllocNode(&node, thing->array, NULL, 0, &allocation);
  if (error == 0) error = driver.cuGraphInstantiateWithFlags(&thing->exec, thing->array, 0);
  if (error != 0) driver.cuGraphDestroy(thing->array);
  return error;
}

static int destroy_graph(const struct thing* thing) {
  int error = driver.cuGraphExecDestroy(thing->exec);
  if (error == 0) error = driver.cuGraphDestroy(thing->array);
  return error != 0 ? error : driver.cuDeviceGraphMemTrim(device_here());
}

/* "map_beside COUNT BYTES": maps handles side by side as one thing, to be unmapped at once. "map_same": maps a single
 * handle COUNT times. */
static int map_beside(int handles, size_t bytes, int is_same) {
  struct thing* const all = &things[count++];
  struct thing each = {.kind = "handle", .bytes = bytes};
  snprintf(all->kind, sizeof all->kind, "mapped");
  all->bytes = (size_t)handles * bytes;
  int error = driver.cuMemAddressReserve(&all->address, all->bytes, 0, 0, 0);
  for (int i = 0; i < handles && error == 0; i++) {
    if (i == 0 || !is_same) error = create(&each);
    if (error == 0) error = driver.cuMemMap(all->address + (size_t)i * bytes, bytes, 0, each.handle, 0);
    if (error == 0 && (i + 1 == handles || !is_same)) error = driver.cuMemRelease(each.handle);
  }
  return error;
}

/* "unmap NUMBER:INDEX BYTES": unmaps one of the mappings. */
static int unmap_one(const char* which, size_t bytes) {
  int number = 0;
  unsigned int index = 0;
  sscanf(which, "%d:%u", &number, &index);
  return driver.cuMemUnmap(things[number].address + index * bytes, bytes);
}

/* Allocates by the first functions, with sizes and addresses of 32 bits. */
static int allocate32(struct thing* thing) {
  const unsigned int bytes = (unsigned int)thing->bytes;
  const struct array32 array = {1024, bytes / 4096, 0x20, 1};
  const struct array3d32 array3d = {1024, bytes / 4096, 0, 0x20, 1, 0};
  unsigned int address = 0;
  unsigned int pitch;
  if (strcmp(thing->kind, "array32") == 0) return driver.cuArrayCreate(&thing->array, &array);
  if (strcmp(thing->kind, "array3d32") == 0) return driver.cuArray3DCreate(&thing->array, &array3d);
  const int error = strcmp(thing->kind, "plain32") == 0
                        ? driver.cuMemAlloc(&address, bytes)
                        : driver.cuMemAllocPitch(&address, &pitch, 4000, bytes / 4096, 16);
  thing->address = address;
  return error;
}

int allocate_thing(struct thing* thing, const char* kind, size_t bytes) {
  struct array3d array3d = array_of(bytes);
  const struct array array = {array3d.width, array3d.height, array3d.format, array3d.channels};
  size_t pitch;
  snprintf(thing->kind, sizeof thing->kind, "%s", kind);
  thing->bytes = bytes;
  if (sscanf(kind, "array:%i:%u", &array3d.format, &array3d.channels) == 2) { /* array with a format */
    return driver.cuArray3DCreate_v2(&thing->array, &array3d);
  }
  if (strstr(kind, "32") != NULL) return allocate32(thing);
  if (strcmp(kind, "plain") == 0) return driver.cuMemAlloc_v2(&thing->address, bytes);
  if (strcmp(kind, "managed") == 0) return driver.cuMemAllocManaged(&thing->address, bytes, 1);
  if (strcmp(kind, "pitch") == 0) return driver.cuMemAllocPitch_v2(&thing->address, &pitch, 4000, bytes / 4096, 16);
  if (strcmp(kind, "array") == 0) return driver.cuArrayCreate_v2(&thing->array, &array);
  if (strcmp(kind, "array_sparse") == 0 || strcmp(kind, "array_deferred") == 0) {
    array3d.flags = kind[6] == 's' ? 0x40 : 0x80;
    return driver.cuArray3DCreate_v2(&thing->array, &array3d);
  }
  if (strcmp(kind, "array3d") == 0) return driver.cuArray3DCreate_v2(&thing->array, &array3d);
  if (strncmp(kind, "mipmapped", 9) == 0) { /* "mipmapped:LEVELS", or of one level */
    const unsigned int levels = kind[9] == ':' ? (unsigned int)atoi(kind + 10) : 1;
    return driver.cuMipmappedArrayCreate(&thing->array, &array3d, levels);
  }
  if (strncmp(kind, "handle", 6) == 0) return create(thing);
  if (strcmp(kind, "mapped") == 0) return create_and_map(thing);
  if (strcmp(kind, "own_pool") == 0) return create_pool(thing);
  if (strcmp(kind, "graph") == 0) return create_graph(thing);
  if (strcmp(kind, "async") == 0) return driver.cuMemAllocAsync(&thing->address, bytes, stream);
  if (strcmp(kind, "pool") == 0) return driver.cuMemAllocFromPoolAsync(&thing->address, bytes, pool, stream);
  return -1;
}

int free_thing(const struct thing* thing) {
  const char* kind = thing->kind;
  if (strncmp(kind, "array", 5) == 0) return driver.cuArrayDestroy(thing->array);
  if (strstr(kind, "32") != NULL) return driver.cuMemFree((unsigned int)thing->address);
  if (strncmp(kind, "mipmapped", 9) == 0) return driver.cuMipmappedArrayDestroy(thing->array);
  if (strncmp(kind, "handle", 6) == 0) return driver.cuMemRelease(thing->handle);
  if (strcmp(kind, "mapped") == 0) return driver.cuMemUnmap(thing->address, thing->bytes);
  if (strcmp(kind, "async") == 0 || strcmp(kind, "pool") == 0) {
    const int error = driver.cuMemFreeAsync(thing->address, stream);
    return error != 0 ? error : driver.cuStreamSynchronize(stream);
  }
  if (strcmp(kind, "own_pool") == 0) {
    const int error = driver.cuMemFreeAsync(thing->address, NULL);
    return error != 0 ? error : driver.cuMemPoolDestroy(thing->array);
  }
  if (strcmp(kind, "graph") == 0) return destroy_graph(thing);
  return driver.cuMemFree_v2(thing->address);
}

static struct thing another;
static void* another_context;
static const char* another_kind;
static int another_failed;

static void create_another(void) {
  another_failed = create(&another);
}

static void create_another_context(void) {
  another_failed = driver.cuCtxCreate_v2(&another_context, 0, 0);
  if (another_failed == 0) another_failed = allocate_thing(&another, another_kind, another.bytes);
}

static void call_when_gone(void (*function)(void)) {
  void (*when_gone)(void (*)(void)) = dlsym(dlopen("libcuda.so.1", RTLD_NOW), "packing_when_gone");
  when_gone(function);
}

/* "free_unseen NUMBER", "destroy_pool_unseen": the packing driver frees memory of a pool, or destroys the pool. */
static int call_unseen(const char* function, address_t of) {
  int (*call)(address_t) = dlsym(dlopen("libcuda.so.1", RTLD_NOW), function);
  return call(of);
}

/* "unmap_and_reuse BYTES": unmaps memory, and at once creates other memory with the freed handle. The other memory is
 * half as large, and stays until "free_another". */
static int unmap_and_reuse(size_t bytes) {
  struct thing thing = {.kind = "mapped", .bytes = bytes};
  another = (struct thing){.kind = "handle", .bytes = bytes / 2};
  int error = create_and_map(&thing);
  const address_t handle = thing.handle;
  call_when_gone(create_another);
  if (error == 0) error = free_thing(&thing);
  call_when_gone(NULL);
  if (error == 0 && another.handle != handle) return -1;
  return error != 0 ? error : another_failed;
}

/* "destroy_and_reuse BYTES KIND": destroys a context with memory, and at once creates another context with other memory
 * at the freed address, or with the freed handle. */
static int destroy_and_reuse(size_t bytes, const char* kind) {
  void* context;
  struct thing thing = {.bytes = bytes};
  another = (struct thing){.bytes = bytes / 2};
  another_kind = kind;
  int error = driver.cuCtxCreate_v2(&context, 0, 0);
  if (error == 0) error = allocate_thing(&thing, kind, bytes);
  call_when_gone(create_another_context);
  if (error == 0) error = driver.cuCtxDestroy_v2(context);
  call_when_gone(NULL);
  if (error == 0 && another_context != context) return -1;
  if (error == 0 && (another.array != thing.array || another.address != thing.address)) return -1;
  return error != 0 ? error : another_failed;
}

/* "graph BYTES", "pool_graph BYTES": runs a graph with an allocation, from the device's pool or the chosen pool. The
 * graph's memory stays afterwards. */
static int run_graph(size_t bytes, int from_pool) {
  void* graph;
  void* exec;
  address_t address;
  int error = driver.cuStreamBeginCapture_v2(stream, 2);
  if (error == 0) {
    error = from_pool ? driver.cuMemAllocFromPoolAsync(&address, bytes, pool, stream)
                      : driver.cuMemAllocAsync(&address, bytes, stream);
  }
  if (error == 0) error = driver.cuMemFreeAsync(address, stream);
  if (error == 0) error = driver.cuStreamEndCapture(stream, &graph);
  if (error == 0) error = driver.cuGraphInstantiateWithFlags(&exec, graph, 0);
  if (error == 0) error = driver.cuGraphLaunch(exec, stream);
  return error != 0 ? error : driver.cuStreamSynchronize(stream);
}

/* "node_graph BYTES DEVICE", "any_node_graph BYTES DEVICE": makes a graph by an allocating node with a device. */
static int make_node_graph(void** exec, address_t* address, size_t bytes, int device, int as_any) {
  struct node any;
  void* node;
  void* graph;
  memset(&any, 0, sizeof any);
  any.type = 10; /* allocation node */
  any.of.allocation.type = 1;
  any.of.allocation.location_type = 1;
  any.of.allocation.location = device;
  any.of.allocation.bytes = bytes;
  int error = driver.cuGraphCreate(&graph, 0);
  if (error == 0) {
    error = as_any ? driver.cuGraphAddNode_v2(&node, graph, NULL, NULL, 0, &any)
                   : driver.cuGraphAddMemAllocNode(&node, graph, NULL, 0, &any.of.allocation);
  }
  *address = any.of.allocation.address;
  return error != 0 ? error : driver.cuGraphInstantiateWithFlags(exec, graph, 0);
}

static int run_node_graph(size_t bytes, int device, int as_any) {
  void* exec;
  address_t address;
  int error = make_node_graph(&exec, &address, bytes, device, as_any);
  if (error == 0) error = driver.cuGraphLaunch(exec, stream);
  if (error == 0) error = driver.cuStreamSynchronize(stream);
  return error != 0 ? error : driver.cuMemFree_v2(address);
}

/* --- a held stream, and a thread using the stream --- */

static sem_t may_go;
static pthread_t worker;
static size_t worker_bytes;

static void wait_for_go(void* unused) {
  (void)unused;
  sem_wait(&may_go);
}

static int hold_stream(void) {
  sem_init(&may_go, 0, 0);
  return driver.cuLaunchHostFunc(stream, wait_for_go, NULL);
}

static void* allocate_in_thread(void* of_stream) {
  address_t address;
  set_current();
  return (void*)(size_t)driver.cuMemAllocFromPoolAsync(&address, worker_bytes, pool, of_stream);
}

static void* launch_in_thread(void* of_stream) {
  void* exec;
  address_t address;
  set_current();
  int error = make_node_graph(&exec, &address, worker_bytes, 0, 0);
  if (error == 0) error = driver.cuGraphLaunch(exec, of_stream);
  return (void*)(size_t)error;
}

static void* make_array_in_thread(void* unused) {
  struct thing thing;
  (void)unused;
  set_current();
  return (void*)(size_t)allocate_thing(&thing, "array", worker_bytes);
}

/* "pool_thread BYTES", "launch_thread BYTES", "array_thread BYTES": starts a thread. The thread allocates from the pool
 * on the stream, launches an allocating graph on the stream, or makes an array. "join": prints the thread's error. */
static int begin_thread(const char* word, size_t bytes) {
  void* (*const function)(void*) = *word == 'p'   ? allocate_in_thread
                                   : *word == 'l' ? launch_in_thread
                                                  : make_array_in_thread;
  worker_bytes = bytes;
  return pthread_create(&worker, NULL, function, stream);
}

static int join_thread(void) {
  void* error = NULL;
  pthread_join(worker, &error);
  return (int)(size_t)error;
}

/* "map_tile ARRAY HANDLE", "unmap_tile ARRAY": maps or unmaps the first tile of a sparse array. "map_tiles": maps the
 * first two tiles at once. */
static int map_tiles(unsigned int tiles, const struct thing* array, const struct thing* memory) {
  struct tile tile;
  memset(&tile, 0, sizeof tile);
  tile.array = array->array;
  tile.extent[0] = tiles;
  tile.extent[1] = tile.extent[2] = 1;
  tile.operation = memory != NULL ? 1 : 2;
  tile.handle = memory != NULL ? memory->handle : 0;
  tile.devices = 1;
  return driver.cuMemMapArrayAsync(&tile, 1, stream);
}

/* "map_two ARRAY HANDLE": a tile each for a handle and the next one, by one call. "map_again": both into the first. */
static int map_two(const struct thing* array, const struct thing* memory, int is_same) {
  struct tile tiles[2];
  memset(tiles, 0, sizeof tiles);
  for (unsigned int i = 0; i < 2; i++) {
    tiles[i].array = array->array;
    tiles[i].offset[0] = is_same ? 0 : i;
    tiles[i].extent[0] = tiles[i].extent[1] = tiles[i].extent[2] = 1;
    tiles[i].operation = 1;
    tiles[i].handle = memory[i].handle;
    tiles[i].devices = 1;
  }
  return driver.cuMemMapArrayAsync(tiles, 2, stream);
}

static int import_handle(const struct thing* from) {
  int descriptor = -1;
  struct thing* thing = &things[count++];
  snprintf(thing->kind, sizeof thing->kind, "handle");
  const int error = driver.cuMemExportToShareableHandle(&descriptor, from->handle, 1, 0);
  return error != 0 ? error : driver.cuMemImportFromShareableHandle(&thing->handle, (void*)(size_t)descriptor, 1);
}

/* Prints NVML's figures of the first GPU. */
static int management(const char* version) {
  struct {
    unsigned int version;
    unsigned long long total, reserved, free, used;
  } second = {40 | 2u << 24, 0, 0, 0, 0};
  struct {
    unsigned long long total, free, used;
  } first = {0, 0, 0};
  void* device;
  void* library = dlopen("libnvidia-ml.so.1", RTLD_NOW);
  if (library == NULL) return -1;
  int (*init)(void) = dlsym(library, "nvmlInit_v2");
  int (*by_index)(unsigned int, void**) = dlsym(library, "nvmlDeviceGetHandleByIndex_v2");
  int (*info)(void*, void*) = dlsym(library, "nvmlDeviceGetMemoryInfo");
  int (*info2)(void*, void*) = dlsym(library, "nvmlDeviceGetMemoryInfo_v2");
  int error = init();
  if (error == 0) error = by_index(0, &device);
  if (error == 0) error = strcmp(version, "2") == 0 ? info2(device, &second) : info(device, &first);
  if (strcmp(version, "2") == 0) {
    printf("%d %llu %llu %llu %llu\n", error, second.total, second.used, second.free, second.reserved);
  } else {
    printf("%d %llu %llu %llu\n", error, first.total, first.used, first.free);
  }
  return error;
}

/* "default_pool", "current_pool" or "new_pool": selects a pool of the location "TYPE:ID", "managed" or not. */
static int pool_at(const char* word, const char* location, const char* memory) {
  struct properties properties = on_device();
  sscanf(location, "%d:%d", &properties.location_type, &properties.location);
  if (strcmp(memory, "managed") == 0) properties.type = 2;
  if (strcmp(word, "new_pool") == 0) return driver.cuMemPoolCreate(&pool, &properties);
  const int of[] = {properties.location_type, properties.location};
  return (strcmp(word, "default_pool") == 0 ? driver.cuMemGetDefaultMemPool : driver.cuMemGetMemPool)(&pool, of,
                                                                                                      properties.type);
}

static int use_device(int device) {
  void* context;
  const int error = driver.cuDevicePrimaryCtxRetain(&context, device);
  return error != 0 ? error : driver.cuCtxSetCurrent(context);
}

static int other(const char* word, const char* first, const char* second);

/* "deep WORD": runs WORD deeper on the stack, where local variables of the library have other addresses. */
static int deep(const char* word) {
  volatile char space[4096];
  space[0] = 0;
  const int result = other(word, "", "");
  return result + space[0];
}

static int other(const char* word, const char* first, const char* second) {
  struct properties properties = on_device();
  void* context = NULL;
  address_t handle;
  unsigned long long threshold = *first == '\0' ? ~0ull : size_of(first);
  if (strcmp(word, "stream") == 0) return driver.cuStreamCreate(&stream, 1);
  if (strcmp(word, "pool") == 0) return driver.cuMemPoolCreate(&pool, &properties);
  if (strstr(word, "_pool") != NULL && *first != '\0') return pool_at(word, first, second);
  if (strcmp(word, "device") == 0) return use_device(atoi(first));
  if (strcmp(word, "default_pool") == 0) return driver.cuDeviceGetDefaultMemPool(&pool, 0);
  if (strcmp(word, "make_current") == 0) return driver.cuDeviceSetMemPool(device_here(), pool);
  if (strcmp(word, "keep") == 0) return driver.cuMemPoolSetAttribute(pool, 4, &threshold);
  if (strcmp(word, "destroy_pool") == 0) return driver.cuMemPoolDestroy(pool);
  if (strcmp(word, "free_unseen") == 0) return call_unseen("packing_free", things[atoi(first)].address);
  if (strcmp(word, "destroy_pool_unseen") == 0) return call_unseen("packing_destroy_pool", (address_t)(size_t)pool);
  if (strcmp(word, "free_later") == 0) return driver.cuMemFreeAsync(things[atoi(first)].address, stream);
  if (strcmp(word, "trim") == 0) return driver.cuMemPoolTrimTo(pool, 0);
  if (strcmp(word, "graph") == 0) return run_graph(size_of(first), 0);
  if (strcmp(word, "pool_graph") == 0) return run_graph(size_of(first), 1);
  if (strstr(word, "node_graph") != NULL) return run_node_graph(size_of(first), atoi(second), *word == 'a');
  if (strcmp(word, "trim_graphs") == 0) return driver.cuDeviceGraphMemTrim(atoi(first));
  if (strcmp(word, "map_beside") == 0) return map_beside(atoi(first), size_of(second), 0);
  if (strcmp(word, "map_same") == 0) return map_beside(atoi(first), size_of(second), 1);
  if (strcmp(word, "unmap") == 0) return unmap_one(first, size_of(second));
  if (strcmp(word, "hold") == 0) return hold_stream();
  if (strcmp(word, "go") == 0) return sem_post(&may_go);
  if (strstr(word, "_thread") != NULL) return begin_thread(word, size_of(first));
  if (strcmp(word, "join") == 0) return join_thread();
  if (strcmp(word, "cancel_worker") == 0) return pthread_cancel(worker);
  if (strcmp(word, "make_graph") == 0) {
    return make_node_graph(&context, &handle, size_of(first), atoi(second), 0);
  }
  if (strcmp(word, "unmap_and_reuse") == 0) return unmap_and_reuse(size_of(first));
  if (strcmp(word, "destroy_and_reuse") == 0) return destroy_and_reuse(size_of(first), second);
  if (strcmp(word, "free_another") == 0) return free_thing(&another);
  if (strcmp(word, "synchronize") == 0) return driver.cuCtxSynchronize();
  if (strcmp(word, "retain") == 0) {
    return driver.cuMemRetainAllocationHandle(&handle, (void*)things[atoi(first)].address);
  }
  if (strcmp(word, "release") == 0) return driver.cuMemRelease(things[atoi(first)].handle);
  if (strcmp(word, "map_tile") == 0) return map_tiles(1, &things[atoi(first)], &things[atoi(second)]);
  if (strcmp(word, "map_tiles") == 0) return map_tiles(2, &things[atoi(first)], &things[atoi(second)]);
  if (strcmp(word, "map_two") == 0) return map_two(&things[atoi(first)], &things[atoi(second)], 0);
  if (strcmp(word, "map_again") == 0) return map_two(&things[atoi(first)], &things[atoi(second)], 1);
  if (strcmp(word, "unmap_tile") == 0) return map_tiles(1, &things[atoi(first)], NULL);
  if (strcmp(word, "import") == 0) return import_handle(&things[atoi(first)]);
  if (strcmp(word, "context") == 0) return driver.cuCtxCreate_v2(&other_context, 0, 0);
  if (strcmp(word, "deep") == 0) return deep(first);
  if (strcmp(word, "destroy_context") == 0) {
    const int error = driver.cuCtxDestroy_v2(other_context);
    driver.cuDevicePrimaryCtxRetain(&context, 0);
    driver.cuDevicePrimaryCtxRelease_v2(0);
    return error != 0 ? error : driver.cuCtxSetCurrent(context);
  }
  if (strcmp(word, "reset") == 0 || strcmp(word, "leave") == 0) {
    const int error =
        strcmp(word, "reset") == 0 ? driver.cuDevicePrimaryCtxReset_v2(0) : driver.cuDevicePrimaryCtxRelease_v2(0);
    driver.cuDevicePrimaryCtxRetain(&context, 0);
    return error != 0 ? error : driver.cuCtxSetCurrent(context);
  }
  return -1;
}

void probe_kinds(const char* word, const char* first, const char* second) {
  int error = -1;
  if (strcmp(word, "nvml") == 0) {
    if (management(first) < 0) printf("no library\n");
    return;
  }
  if (strcmp(word, "alloc") == 0) {
    error = allocate_thing(&things[count++], first, size_of(second));
  } else if (strcmp(word, "free") == 0) {
    error = free_thing(&things[atoi(first)]);
  } else {
    error = other(word, first, second);
  }
  printf("%d\n", error);
}
