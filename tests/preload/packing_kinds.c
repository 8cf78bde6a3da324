// SPDX-License-Identifier: Apache-2.0
//
// Memory of the packing driver's other kinds: arrays, memory by handle, pools and graphs. A free number is reused at
// once.
#include <stdint.h>
#include <string.h>

#include "tests/preload/packing.h"

enum { RECORDS = 1 << 14, POOL_UNITS = 2, POOL_PLACE = 512 << 10, FRAGMENTED = 5 };

enum kind { NOTHING, ARRAY, MEMORY, MAPPING, POOL, FROM_POOL, GRAPH };

static struct record {
  enum kind kind;
  int device;
  unsigned long long bytes; /* pool: bytes in use */
  unsigned long long units; /* pool: reserved units; graph: needed units */
  const void* context;      /* array: context of its creation */
  int references;           /* memory: references; pool: allocations */
  int mappings;
  int of;                 /* mapping: its memory; allocation: its pool */
  int is_had;             /* allocation from a pool, or graph: given to the program */
  unsigned long long had; /* pool: bytes given to the program */
} records[RECORDS];
static int unused[RECORDS];
static int count_unused;
static int next;

static const unsigned long long addresses = 0x7e0000000000;

static unsigned long long array_bytes[DEVICES]; /* small arrays share units */
static unsigned long long graph_units[DEVICES]; /* units of graphs, also of destroyed graphs */
static unsigned long long graphs_use[DEVICES];
static unsigned long long graphs_had[DEVICES];
static int pools_of_devices[DEVICES];
static unsigned long long unhad_units[DEVICES]; /* units of other pools without memory given to the program */

static __thread enum kind begun; /* POOL: thread allocates from its device's pool; GRAPH: thread makes a graph */
static int calls[DEVICES][GRAPH + 1];

/* --- records, under the lock --- */

static int make(enum kind kind, int device, unsigned long long bytes) {
  if (count_unused == 0 && next + 1 == RECORDS) return 0;
  const int number = count_unused != 0 ? unused[--count_unused] : ++next;
  records[number] = (struct record){.kind = kind, .device = device, .bytes = bytes};
  return number;
}

static struct record* find(unsigned long long number, enum kind kind) {
  if (number != 0 && number < RECORDS && records[number].kind == kind) return &records[number];
  packing_misused("a call with what is no more");
  return NULL;
}

static void drop(struct record* record) {
  record->kind = NOTHING;
  unused[count_unused++] = (int)(record - records);
}

/* --- unfinished calls, under the lock --- */

/* Several calls may share a reserve. The last call to finish gives back the excess. */
static long long beyond(unsigned long long units, unsigned long long had, int is_called) {
  return is_called && units > had ? (long long)(units - had) : 0;
}

long long packing_growth(int device) {
  const struct record* const pool = &records[pools_of_devices[device]];
  return (long long)unhad_units[device] + beyond(pool->units, units_of(pool->had), calls[device][POOL]) +
         beyond(graph_units[device], graphs_had[device], calls[device][GRAPH]);
}

void packing_call_begins(const char* kind) {
  begun = strcmp(kind, "async") == 0 ? POOL : strcmp(kind, "graph") == 0 ? GRAPH : NOTHING;
  calls[packing_device()][begun]++;
}

/* Adds units to the pool; negative units are given back. */
static int grow(struct record* pool, long long units) {
  const int error = packing_take(pool->device, units);
  if (error != OK) return error;
  pool->units += (unsigned long long)units;
  if (pool != &records[pools_of_devices[pool->device]] && pool->had == 0)
    unhad_units[pool->device] += (unsigned long long)units;
  return OK;
}

/* Records whether the program has the allocation. */
static void have(struct record* memory, int is_had) {
  struct record* const pool = &records[memory->of];
  const int is_own = pool != &records[pools_of_devices[pool->device]];
  if (memory->is_had == is_had) return;
  if (is_own && pool->had == 0) unhad_units[pool->device] -= pool->units;
  pool->had += is_had ? memory->bytes : -memory->bytes;
  if (is_own && pool->had == 0) unhad_units[pool->device] += pool->units;
  memory->is_had = is_had;
}

static unsigned long long number_of(unsigned long long address) {
  return address < addresses ? 0 : (address - addresses) >> 30;
}

void packing_call_is_done(unsigned long long number) {
  struct record* const memory = &records[number_of(number)];
  calls[packing_device()][begun]--;
  if (memory->kind == FROM_POOL) have(memory, 1);
  if (begun == GRAPH && number != 0) {
    records[number].is_had = 1;
    graphs_had[records[number].device] += records[number].units;
  }
  begun = NOTHING;
}

/* --- arrays of floats --- */

static unsigned long long units_of_arrays(int device) {
  return units_of(array_bytes[device]);
}

static int add_array(int device, unsigned long long bytes, int sign) {
  const unsigned long long before = units_of_arrays(device);
  if (bytes >= SMALL) return packing_take(device, sign * (long long)units_of(bytes));
  array_bytes[device] += (unsigned long long)sign * bytes;
  const int error = packing_take(device, (long long)(units_of_arrays(device) - before));
  if (error != OK) array_bytes[device] -= bytes;
  return error;
}

static int make_array(void** array, size_t width, size_t height, size_t depth) {
  const unsigned long long bytes = 4ull * width * (height == 0 ? 1 : height) * (depth == 0 ? 1 : depth);
  packing_lock();
  const int number = make(ARRAY, packing_device(), bytes);
  const int error = number == 0 ? NO_MEMORY : add_array(packing_device(), bytes, 1);
  if (error == OK) {
    records[number].context = packing_context();
    *array = (void*)(uintptr_t)number;
  } else if (number != 0) {
    drop(&records[number]);
  }
  packing_unlock();
  return error;
}

struct array {
  size_t width, height;
  int format;
  unsigned int channels;
};

struct array3d {
  size_t width, height, depth;
  int format;
  unsigned int channels, flags;
};

PUBLIC int cuArrayCreate_v2(void** array, const struct array* of) {
  return make_array(array, of->width, of->height, 0);
}

PUBLIC int cuArray3DCreate_v2(void** array, const struct array3d* of) {
  return make_array(array, of->width, of->height, of->depth);
}

PUBLIC int cuMipmappedArrayCreate(void** array, const struct array3d* of, unsigned int levels) {
  return levels != 1 ? INVALID : make_array(array, of->width, of->height, of->depth);
}

PUBLIC int cuArrayDestroy(void* array) {
  packing_lock();
  struct record* const record = find((uintptr_t)array, ARRAY);
  if (record != NULL) {
    add_array(record->device, record->bytes, -1);
    drop(record);
  }
  packing_unlock();
  return record == NULL ? INVALID : OK;
}

PUBLIC int cuMipmappedArrayDestroy(void* array) {
  return cuArrayDestroy(array);
}

void packing_free_arrays(const void* gone) {
  for (int i = 1; i <= next; i++) {
    if (records[i].kind != ARRAY || records[i].context != gone) continue;
    add_array(records[i].device, records[i].bytes, -1);
    drop(&records[i]);
  }
}

/* --- memory by handle --- */

struct properties {
  int type, handle_types, location_type, location;
};

PUBLIC int cuMemCreate(unsigned long long* handle, size_t bytes, const struct properties* properties,
                       unsigned long long flags) {
  packing_lock();
  const int number = make(MEMORY, properties->location, bytes);
  int error = flags != 0 || number == 0 ? INVALID : OK;
  if (error == OK) error = packing_take(properties->location, (long long)units_of(bytes));
  if (error == OK) {
    records[number].references = 1;
    *handle = (unsigned long long)number;
  } else if (number != 0) {
    drop(&records[number]);
  }
  packing_unlock();
  return error;
}

static void drop_memory(struct record* record) {
  if (record->references != 0 || record->mappings != 0) return;
  packing_take(record->device, -(long long)units_of(record->bytes));
  drop(record);
}

PUBLIC int cuMemRelease(unsigned long long handle) {
  packing_lock();
  struct record* const record = find(handle, MEMORY);
  if (record != NULL) {
    record->references--;
    drop_memory(record);
  }
  packing_unlock();
  return record == NULL ? INVALID : OK;
}

/* Each range begins at its number times 1 GiB, counted from `addresses`. */
PUBLIC int cuMemAddressReserve(unsigned long long* address, size_t bytes, size_t alignment, unsigned long long hint,
                               unsigned long long flags) {
  if (alignment != 0 || hint != 0 || flags != 0) return INVALID;
  packing_lock();
  const int number = make(MAPPING, packing_device(), bytes);
  packing_unlock();
  *address = addresses + ((unsigned long long)number << 30);
  return number == 0 ? NO_MEMORY : OK;
}

PUBLIC int cuMemMap(unsigned long long address, size_t bytes, size_t offset, unsigned long long handle,
                    unsigned long long flags) {
  if (bytes == 0 || offset != 0 || flags != 0) return INVALID;
  packing_lock();
  struct record* const range = find(number_of(address), MAPPING);
  struct record* const memory = find(handle, MEMORY);
  if (range != NULL && memory != NULL) {
    range->of = (int)handle;
    memory->mappings++;
  }
  packing_unlock();
  return range == NULL || memory == NULL ? INVALID : OK;
}

/* The range ends with its mapping. */
PUBLIC int cuMemUnmap(unsigned long long address, size_t bytes) {
  packing_lock();
  struct record* const range = find(number_of(address), MAPPING);
  if (range != NULL) {
    struct record* const memory = find((unsigned long long)range->of, MEMORY);
    drop(range);
    if (memory != NULL) {
      memory->mappings--;
      drop_memory(memory);
    }
  }
  packing_unlock();
  packing_gone();
  return range == NULL || bytes == 0 ? INVALID : OK;
}

/* --- pools: growth in pieces of their own size, and sometimes despite free memory --- */

static int pool_of_device(int device) {
  if (pools_of_devices[device] == 0) pools_of_devices[device] = make(POOL, device, 0);
  return pools_of_devices[device];
}

PUBLIC int cuDeviceGetMemPool(void** pool, int device) {
  if (device < 0 || device >= DEVICES) return INVALID;
  packing_lock();
  *pool = (void*)(uintptr_t)pool_of_device(device);
  packing_unlock();
  return OK;
}

PUBLIC int cuDeviceGetDefaultMemPool(void** pool, int device) {
  return cuDeviceGetMemPool(pool, device);
}

PUBLIC int cuMemPoolCreate(void** pool, const struct properties* properties) {
  packing_lock();
  const int number = make(POOL, properties->location, 0);
  packing_unlock();
  *pool = (void*)(uintptr_t)number;
  return number == 0 ? NO_MEMORY : OK;
}

PUBLIC int cuMemPoolDestroy(void* pool) {
  packing_lock();
  struct record* const record = find((uintptr_t)pool, POOL);
  if (record != NULL) {
    if (record->references != 0) packing_misused("a pool that is in use is destroyed");
    grow(record, -(long long)record->units);
    drop(record);
  }
  packing_unlock();
  return record == NULL ? INVALID : OK;
}

PUBLIC int cuMemPoolGetAttribute(void* pool, int attribute, uint64_t* value) {
  packing_lock();
  const struct record* const record = attribute == 5 ? find((uintptr_t)pool, POOL) : NULL; /* reserved memory */
  if (record != NULL) *value = record->units * UNIT;
  packing_unlock();
  return record == NULL ? INVALID : OK;
}

PUBLIC int cuMemPoolTrimTo(void* pool, size_t bytes) {
  packing_lock();
  struct record* const record = find((uintptr_t)pool, POOL);
  if (record != NULL) {
    const unsigned long long in_use = units_of(record->bytes);
    const unsigned long long kept = units_of(bytes) > in_use ? units_of(bytes) : in_use;
    if (record->units > kept) grow(record, -(long long)(record->units - kept));
  }
  packing_unlock();
  return record == NULL ? INVALID : OK;
}

static int allocate_from(int pool, unsigned long long* address, size_t bytes) {
  static unsigned int calls;
  struct record* const record = find((unsigned long long)pool, POOL);
  if (record == NULL) return INVALID;
  const unsigned long long needed = (bytes + POOL_PLACE - 1) / POOL_PLACE * POOL_PLACE;
  unsigned long long units = 0;
  if (record->units * UNIT < record->bytes + needed || ++calls % FRAGMENTED == 0) {
    units = units_of(needed) > POOL_UNITS ? units_of(needed) : POOL_UNITS;
  }
  const int number = make(FROM_POOL, record->device, needed);
  if (number == 0) return NO_MEMORY;
  if (grow(record, (long long)units) != OK) {
    drop(&records[number]);
    return NO_MEMORY;
  }
  record->bytes += needed;
  record->references++;
  records[number].of = pool;
  *address = addresses + ((unsigned long long)number << 30);
  return OK;
}

PUBLIC int cuMemAllocFromPoolAsync(unsigned long long* address, size_t bytes, void* pool, void* stream) {
  (void)stream;
  packing_lock();
  const int error = allocate_from((int)(uintptr_t)pool, address, bytes);
  packing_unlock();
  return error;
}

PUBLIC int cuMemAllocAsync(unsigned long long* address, size_t bytes, void* stream) {
  (void)stream;
  packing_lock();
  const int error = allocate_from(pool_of_device(packing_device()), address, bytes);
  packing_unlock();
  return error;
}

PUBLIC int cuMemFreeAsync(unsigned long long address, void* stream) {
  (void)stream;
  packing_lock();
  struct record* const memory = find(number_of(address), FROM_POOL);
  struct record* const pool = memory == NULL ? NULL : find((unsigned long long)memory->of, POOL);
  if (pool != NULL) {
    have(memory, 0);
    pool->bytes -= memory->bytes;
    pool->references--;
    drop(memory);
  }
  packing_unlock();
  return pool == NULL ? INVALID : OK;
}

/* Calls invisible to the library: a driver may free memory of pools, or pools, with a context. */
PUBLIC int packing_free(unsigned long long address) {
  return cuMemFreeAsync(address, NULL);
}

PUBLIC int packing_destroy_pool(unsigned long long pool) {
  return cuMemPoolDestroy((void*)(uintptr_t)pool);
}

/* Gives back a pool's empty units, like a pool without a threshold. */
PUBLIC int cuStreamSynchronize(void* stream) {
  (void)stream;
  packing_lock();
  struct record* const pool = &records[pool_of_device(packing_device())];
  const unsigned long long in_use = units_of(pool->bytes);
  if (pool->units > in_use) grow(pool, -(long long)(pool->units - in_use));
  packing_unlock();
  return OK;
}

PUBLIC int cuStreamQuery(void* stream) {
  (void)stream;
  return OK;
}

/* --- allocating graphs --- */

struct allocation {
  struct properties properties;
  void* windows;
  size_t most;
  unsigned char rest[56];
  const void* access;
  size_t access_count, bytes;
  unsigned long long address;
};

PUBLIC int cuGraphCreate(void** graph, unsigned int flags) {
  packing_lock();
  const int number = make(GRAPH, packing_device(), 0);
  packing_unlock();
  *graph = (void*)(uintptr_t)number;
  return number == 0 || flags != 0 ? NO_MEMORY : OK;
}

PUBLIC int cuGraphAddMemAllocNode(void** node, void* graph, void* const* after, size_t count,
                                  struct allocation* parameters) {
  if (after != NULL || count != 0) return INVALID;
  packing_lock();
  struct record* const record = find((uintptr_t)graph, GRAPH);
  if (record != NULL) {
    record->device = parameters->properties.location;
    record->bytes = parameters->bytes;
  }
  packing_unlock();
  *node = graph;
  return record == NULL ? INVALID : OK;
}

/* The executable graph is the graph itself. */
PUBLIC int cuGraphInstantiateWithFlags(void** exec, void* graph, unsigned long long flags) {
  int error = INVALID;
  packing_lock();
  struct record* const record = flags == 0 ? find((uintptr_t)graph, GRAPH) : NULL;
  if (record != NULL) {
    const int device = record->device;
    const unsigned long long left = graph_units[device] - graphs_use[device];
    const unsigned long long wanted = units_of(record->bytes);
    const unsigned long long missing = wanted > left ? wanted - left : 0;
    error = packing_take(device, (long long)missing);
    if (error == OK) {
      graph_units[device] += missing;
      graphs_use[device] += wanted;
      record->units = wanted;
      *exec = graph;
    }
  }
  packing_unlock();
  return error;
}

PUBLIC int cuGraphExecDestroy(void* exec) {
  packing_lock();
  struct record* const record = find((uintptr_t)exec, GRAPH);
  if (record != NULL) {
    graphs_use[record->device] -= record->units;
    if (record->is_had) graphs_had[record->device] -= record->units;
    record->is_had = 0;
    record->units = 0;
  }
  packing_unlock();
  return record == NULL ? INVALID : OK;
}

PUBLIC int cuGraphDestroy(void* graph) {
  packing_lock();
  struct record* const record = find((uintptr_t)graph, GRAPH);
  if (record != NULL) drop(record);
  packing_unlock();
  return record == NULL ? INVALID : OK;
}

PUBLIC int cuDeviceGetGraphMemAttribute(int device, int attribute, uint64_t* value) {
  if (attribute != 2) return INVALID; /* reserved memory */
  packing_lock();
  *value = graph_units[device] * UNIT;
  packing_unlock();
  return OK;
}

/* The program makes graphs of the device reserve more memory, in a call invisible to the library. */
PUBLIC int packing_reserve_for_graphs(int device, int units) {
  packing_lock();
  const int error = packing_take(device, units);
  if (error == OK) graph_units[device] += (unsigned long long)units;
  packing_unlock();
  return error;
}

PUBLIC int cuDeviceGraphMemTrim(int device) {
  packing_lock();
  packing_take(device, -(long long)(graph_units[device] - graphs_use[device]));
  graph_units[device] = graphs_use[device];
  packing_unlock();
  return OK;
}
