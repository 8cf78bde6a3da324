/* SPDX-License-Identifier: Apache-2.0 */
#include "client/preload/pools.h"

#include <string.h>

#include "client/preload/contexts.h"
#include "client/preload/driver.h"
#include "client/preload/grant.h"
#include "client/preload/graphs.h"
#include "client/preload/growth.h"
#include "client/preload/lock.h"
#include "client/preload/table.h"

enum { MOST_TRIES = 8, DESTROYED = 1 };

/* Held while a pool may grow, until that is charged: so growth has one cause. Taken before `places`. */
static struct lock growing;
static struct lock places;
/* pool -> account (NULL: not of a device), known units in `more`, allocations in `count`, and how much they have */
static struct table pools;
static struct table pointers; /* address -> its pool in `more`, and its bytes */
static uint64_t destroyed_pools;
static int may_have_shrunk; /* something was freed since the pools were read */

int is_capturing(cu_stream stream, int of_thread) {
  const struct driver* driver = real_driver();
  int (*ask)(cu_stream, int*) = of_thread ? driver->cuStreamIsCapturing_ptsz : driver->cuStreamIsCapturing;
  int status = 0;
  return ask != NULL && ask(stream, &status) == CU_OK && status != 0;
}

/* --- what pools have reserved --- */

static uint64_t reserved_units(cu_pool pool) {
  const struct driver* driver = real_driver();
  uint64_t bytes = 0;
  if (driver->cuMemPoolGetAttribute == NULL) return 0;
  return driver->cuMemPoolGetAttribute(pool, CU_POOL_RESERVED, &bytes) == CU_OK ? units_of(bytes) : 0;
}

/* With `growing`. Gives back what the pool has less than was known. */
static void read_again(uint64_t key) {
  struct growth growth = {0};
  uint64_t known = 0;
  lock(&places);
  const struct entry* pool = table_find(&pools, key);
  if (pool != NULL) {
    growth.account = pool->owner;
    known = pool->more;
  }
  unlock(&places);
  if (growth.account == NULL) return;
  const uint64_t before = known;
  growth_owe(&growth, &known, reserved_units((cu_pool)(uintptr_t)key));
  lock(&places);
  struct entry* same = table_find(&pools, key);
  if (same != NULL) {
    const uint64_t bytes = known * VRAMBROKER_COUNT_UNIT_BYTES;
    same->more = known;
    if (same->bytes > bytes) same->bytes = bytes; /* some went with their context */
  }
  unlock(&places);
  if (known < before) __atomic_store_n(&may_have_shrunk, 1, __ATOMIC_RELAXED); /* perhaps not all of it yet */
}

void pools_read(void) {
  /* A thread that holds it may be waiting for the daemon: this one goes on. */
  if (!try_lock(&growing)) {
    __atomic_store_n(&may_have_shrunk, 1, __ATOMIC_RELAXED);
    return;
  }
  __atomic_store_n(&may_have_shrunk, 0, __ATOMIC_RELAXED);
  for (size_t i = 0;; i++) {
    lock(&places);
    const int is_last = i >= pools.size;
    const uint64_t key = is_last ? 0 : pools.places[i].key;
    unlock(&places);
    if (is_last) break;
    if (key != 0 && (key & DESTROYED) == 0) read_again(key);
  }
  unlock(&growing);
}

void pools_read_if_freed(void) {
  if (__atomic_load_n(&may_have_shrunk, __ATOMIC_RELAXED)) pools_read();
}

/* --- which pool --- */

static cu_device device_of(cu_stream stream) {
  const struct driver* driver = real_driver();
  cu_context own = NULL;
  cu_context current = NULL;
  /* 0, 1 and 2 are the thread's default streams. */
  if ((uintptr_t)stream > 2 && driver->cuStreamGetCtx != NULL && driver->cuStreamGetCtx(stream, &own) == CU_OK &&
      driver->cuCtxGetCurrent(&current) == CU_OK && own != current && driver->cuCtxPushCurrent_v2(own) == CU_OK) {
    const cu_device device = current_device(NULL);
    driver->cuCtxPopCurrent_v2(&own);
    return device;
  }
  return current_device(NULL);
}

/* Makes the pool known. Returns an error for the program, or 0; the account is NULL where it is not counted. */
static int account_of_pool(cu_pool pool, cu_stream stream, struct account** account) {
  const struct driver* driver = real_driver();
  const uint64_t key = (uint64_t)(uintptr_t)pool;
  *account = NULL;
  lock(&places);
  const struct entry* known = table_find(&pools, key);
  if (known != NULL) *account = known->owner;
  unlock(&places);
  if (known != NULL || pool == NULL) return CU_OK;
  /* The pool was neither made here nor asked for by its location: it is a device's own. */
  cu_device device = device_of(stream);
  for (cu_device each = 0; each < LEDGER_DEVICES && driver->cuDeviceGetDefaultMemPool != NULL; each++) {
    cu_pool of_device;
    if (driver->cuDeviceGetDefaultMemPool(&of_device, each) != CU_OK) break;
    if (of_device == pool) device = each;
  }
  const int error = account_of(device, 0, account);
  if (error != CU_OK) return error;
  const struct entry entry = {.key = key, .owner = *account};
  lock(&places);
  if (table_find(&pools, key) == NULL) table_put(&pools, &entry);
  unlock(&places);
  return CU_OK;
}

/* --- allocating --- */

/* One of the driver's four functions, with its arguments. */
struct request {
  const char* what;
  cu_address* address;
  size_t bytes;
  cu_pool pool; /* NULL: the current one of the stream's device */
  cu_stream stream;
  int of_thread; /* the default stream is the thread's own */
};

static int ask_driver(const struct request* request, int from_pool) {
  const struct driver* driver = real_driver();
  if (from_pool) {
    return (request->of_thread ? driver->cuMemAllocFromPoolAsync_ptsz : driver->cuMemAllocFromPoolAsync)(
        request->address, request->bytes, request->pool, request->stream);
  }
  return (request->of_thread ? driver->cuMemAllocAsync_ptsz : driver->cuMemAllocAsync)(request->address, request->bytes,
                                                                                       request->stream);
}

static void undo(const struct request* request, uint64_t units) {
  const struct driver* driver = real_driver();
  (request->of_thread ? driver->cuMemFreeAsync_ptsz : driver->cuMemFreeAsync)(*request->address, request->stream);
  (request->of_thread ? driver->cuStreamSynchronize_ptsz : driver->cuStreamSynchronize)(request->stream);
  driver->cuMemPoolTrimTo(request->pool, units * VRAMBROKER_COUNT_UNIT_BYTES);
  *request->address = 0;
}

/* With `places`. Returns what is known of its pool. */
static struct entry* leaves_pool(const struct entry* pointer) {
  struct entry* pool = table_find(&pools, pointer->more);
  if (pool == NULL) return NULL;
  if (pool->count != 0) pool->count--;
  pool->bytes -= pointer->bytes < pool->bytes ? pointer->bytes : pool->bytes;
  return pool;
}

static void note_pointer(const struct request* request) {
  const uint64_t key = (uint64_t)(uintptr_t)request->pool;
  const struct entry entry = {.key = *request->address, .more = key, .bytes = request->bytes};
  lock(&places);
  const struct entry* before = table_find(&pointers, entry.key);
  if (before != NULL) leaves_pool(before); /* it went with its context */
  struct entry* known = table_find(&pools, key);
  if (known != NULL && table_put(&pointers, &entry) == 0) {
    known->count++;
    known->bytes += request->bytes;
  }
  unlock(&places);
}

/* With `growing`. How much the pool grows at least: even if all that the program does not have can be used for it. */
static uint64_t least_growth(const struct request* request) {
  lock(&places);
  const struct entry* pool = table_find(&pools, (uint64_t)(uintptr_t)request->pool);
  const uint64_t reserved = pool == NULL ? 0 : pool->more * VRAMBROKER_COUNT_UNIT_BYTES;
  const uint64_t in_use = pool == NULL ? 0 : pool->bytes;
  unlock(&places);
  const uint64_t unused = reserved > in_use ? reserved - in_use : 0;
  return request->bytes > unused ? units_of(request->bytes - unused) : 0;
}

/* Asks the driver, and charges what its pool grew by. -1: that may not be, and was not done, or is undone. */
static int try_once(const struct request* request, int from_pool, struct growth* growth, int* error) {
  const uint64_t key = (uint64_t)(uintptr_t)request->pool;
  int result = 0;
  lock(&growing);
  read_again(key);
  if (growth_prepare(growth, least_growth(request)) != 0) {
    unlock(&growing);
    return -1;
  }
  *error = ask_driver(request, from_pool);
  lock(&places);
  const struct entry* pool = table_find(&pools, key);
  uint64_t known = pool == NULL ? 0 : pool->more;
  unlock(&places);
  if (growth_charge(growth, &known, reserved_units(request->pool)) != 0) {
    if (*error == CU_OK) undo(request, known);
    growth_owe(growth, &known, reserved_units(request->pool));
    result = -1;
  } else if (*error == CU_OK) {
    note_pointer(request);
  }
  lock(&places);
  struct entry* same = table_find(&pools, key);
  if (same != NULL) same->more = known;
  unlock(&places);
  unlock(&growing);
  return result;
}

static int allocate(struct request* request) {
  const struct driver* driver = real_driver();
  const int from_pool = request->pool != NULL;
  struct growth growth = {0};
  int error = CU_OK;
  if (is_capturing(request->stream, request->of_thread)) { /* it becomes a node of a graph */
    graphs_have_memory();
    return ask_driver(request, from_pool);
  }
  if (!from_pool && (driver->cuDeviceGetMemPool == NULL ||
                     driver->cuDeviceGetMemPool(&request->pool, device_of(request->stream)) != CU_OK)) {
    return ask_driver(request, from_pool);
  }
  const int refused = account_of_pool(request->pool, request->stream, &growth.account);
  if (refused != CU_OK) return refused;
  if (growth.account == NULL) return ask_driver(request, from_pool);
  for (int tries = 1;;) {
    const int result = try_once(request, from_pool, &growth, &error);
    if (result == 0 && charge_again(&growth.waited, error)) continue;
    if (result == 0) break;
    if (tries++ == MOST_TRIES || !growth_again(&growth, request->what, request->bytes)) {
      error = CU_OUT_OF_MEMORY;
      break;
    }
  }
  growth_end(&growth);
  return error;
}

int cuMemAllocAsync(cu_address* address, size_t bytes, cu_stream stream) {
  REAL(cuMemAllocAsync);
  struct request request = {"cuMemAllocAsync", address, bytes, NULL, stream, 0};
  return allocate(&request);
}

int cuMemAllocAsync_ptsz(cu_address* address, size_t bytes, cu_stream stream) {
  REAL(cuMemAllocAsync_ptsz);
  struct request request = {"cuMemAllocAsync", address, bytes, NULL, stream, 1};
  return allocate(&request);
}

int cuMemAllocFromPoolAsync(cu_address* address, size_t bytes, cu_pool pool, cu_stream stream) {
  REAL(cuMemAllocFromPoolAsync);
  struct request request = {"cuMemAllocFromPoolAsync", address, bytes, pool, stream, 0};
  return pool == NULL ? driver->cuMemAllocFromPoolAsync(address, bytes, pool, stream) : allocate(&request);
}

int cuMemAllocFromPoolAsync_ptsz(cu_address* address, size_t bytes, cu_pool pool, cu_stream stream) {
  REAL(cuMemAllocFromPoolAsync_ptsz);
  struct request request = {"cuMemAllocFromPoolAsync", address, bytes, pool, stream, 1};
  return pool == NULL ? driver->cuMemAllocFromPoolAsync_ptsz(address, bytes, pool, stream) : allocate(&request);
}

/* --- freeing --- */

struct entry pools_forget(cu_address address) {
  struct entry forgotten = {.key = address};
  lock(&places);
  struct entry* pointer = table_find(&pointers, address);
  if (pointer != NULL) {
    forgotten = *pointer;
    table_remove(&pointers, pointer);
  }
  unlock(&places);
  return forgotten;
}

void pools_freed(const struct entry* pointer, int error) {
  struct account* account = NULL;
  const uint64_t key = pointer->more;
  uint64_t units = 0;
  if (key == 0) return;
  lock(&places);
  struct entry* pool = error == CU_OK ? leaves_pool(pointer) : NULL;
  if (error != CU_OK) table_put(&pointers, pointer);                /* there is room: it was just removed */
  if (pool != NULL && (key & DESTROYED) != 0 && pool->count == 0) { /* the last of a destroyed pool */
    account = pool->owner;
    units = pool->more;
    table_remove(&pools, pool);
  }
  unlock(&places);
  if (account != NULL) ledger_give(account, units);
  if (error == CU_OK) __atomic_store_n(&may_have_shrunk, 1, __ATOMIC_RELAXED);
}

static int free_async(int (*real)(cu_address, cu_stream), cu_address address, cu_stream stream, int of_thread) {
  if (is_capturing(stream, of_thread)) return real(address, stream);
  const struct freed freed = grant_forget(address); /* memory of cuMemAlloc may be freed like this, too */
  const struct entry pointer = pools_forget(address);
  const int error = real(address, stream);
  grant_freed(&freed, error);
  pools_freed(&pointer, error);
  return error;
}

int cuMemFreeAsync(cu_address address, cu_stream stream) {
  REAL(cuMemFreeAsync);
  return free_async(driver->cuMemFreeAsync, address, stream, 0);
}

int cuMemFreeAsync_ptsz(cu_address address, cu_stream stream) {
  REAL(cuMemFreeAsync_ptsz);
  return free_async(driver->cuMemFreeAsync_ptsz, address, stream, 1);
}

/* --- pools themselves --- */

int cuMemPoolCreate(cu_pool* pool, const cu_pool_properties* properties) {
  REAL(cuMemPoolCreate);
  struct account* account = NULL;
  if (properties != NULL) {
    int refused = properties->type == CU_MANAGED ? refuse_managed() : CU_OK;
    if (refused == CU_OK) refused = account_of_location(&properties->location, properties->type, 0, &account);
    if (refused != CU_OK) return refused;
  }
  const int error = driver->cuMemPoolCreate(pool, properties);
  if (error != CU_OK) return error;
  const struct entry entry = {.key = (uint64_t)(uintptr_t)*pool, .owner = account};
  lock(&places);
  table_put(&pools, &entry);
  unlock(&places);
  return error;
}

/* A location's own pool, by one of the driver's two functions. Asking for it takes no memory, so it needs no daemon:
 * where there is none, an allocation says so. */
static int get(int (*real)(cu_pool*, cu_location*, int), cu_pool* pool, cu_location* location, int type) {
  const int refused = type == CU_MANAGED ? refuse_managed() : CU_OK;
  if (refused != CU_OK) return refused;
  const int error = real(pool, location, type);
  struct account* account;
  if (error != CU_OK || account_of_location(location, type, 1, &account) != CU_OK) return error;
  const struct entry entry = {.key = (uint64_t)(uintptr_t)*pool, .owner = account};
  lock(&places);
  if (table_find(&pools, entry.key) == NULL) table_put(&pools, &entry);
  unlock(&places);
  return error;
}

int cuMemGetDefaultMemPool(cu_pool* pool, cu_location* location, int type) {
  REAL(cuMemGetDefaultMemPool);
  return get(driver->cuMemGetDefaultMemPool, pool, location, type);
}

int cuMemGetMemPool(cu_pool* pool, cu_location* location, int type) {
  REAL(cuMemGetMemPool);
  return get(driver->cuMemGetMemPool, pool, location, type);
}

/* What is still allocated from the pool stays charged, as a pool without a handle, until it is freed. */
static void destroyed(uint64_t key) {
  struct account* account = NULL;
  uint64_t units = 0;
  lock(&places);
  struct entry* known = table_find(&pools, key);
  if (known != NULL) {
    struct entry pool = *known;
    table_remove(&pools, known);
    if (pool.count == 0) {
      account = pool.owner;
      units = pool.more;
    } else {
      pool.key = ++destroyed_pools << 1 | DESTROYED;
      table_put(&pools, &pool);
      for (size_t i = 0; i < pointers.size; i++) {
        if (pointers.places[i].key != 0 && pointers.places[i].more == key) pointers.places[i].more = pool.key;
      }
    }
  }
  unlock(&places);
  if (account != NULL) ledger_give(account, units);
}

int cuMemPoolDestroy(cu_pool pool) {
  REAL(cuMemPoolDestroy);
  const uint64_t key = (uint64_t)(uintptr_t)pool;
  lock(&growing);
  driver->cuMemPoolTrimTo(pool, 0); /* so that what is known afterwards is what is in use */
  read_again(key);
  const int error = driver->cuMemPoolDestroy(pool);
  if (error == CU_OK) destroyed(key);
  unlock(&growing);
  return error;
}

int cuMemPoolTrimTo(cu_pool pool, size_t bytes) {
  REAL(cuMemPoolTrimTo);
  lock(&growing);
  const int error = driver->cuMemPoolTrimTo(pool, bytes);
  read_again((uint64_t)(uintptr_t)pool);
  unlock(&growing);
  return error;
}

/* --- what shrinks pools --- */

int cuStreamSynchronize(cu_stream stream) {
  REAL(cuStreamSynchronize);
  const int error = driver->cuStreamSynchronize(stream);
  pools_read_if_freed();
  return error;
}

int cuStreamSynchronize_ptsz(cu_stream stream) {
  REAL(cuStreamSynchronize_ptsz);
  const int error = driver->cuStreamSynchronize_ptsz(stream);
  pools_read_if_freed();
  return error;
}

int cuEventSynchronize(cu_event event) {
  REAL(cuEventSynchronize);
  const int error = driver->cuEventSynchronize(event);
  pools_read_if_freed();
  return error;
}

int cuCtxSynchronize(void) {
  REAL(cuCtxSynchronize);
  const int error = driver->cuCtxSynchronize();
  pools_read_if_freed();
  return error;
}

int cuCtxSynchronize_v2(cu_context context) {
  REAL(cuCtxSynchronize_v2);
  const int error = driver->cuCtxSynchronize_v2(context);
  pools_read_if_freed();
  return error;
}

void pools_forget_all(void) {
  memset(&growing, 0, sizeof growing);
  memset(&places, 0, sizeof places);
  table_clear(&pools);
  table_clear(&pointers);
}
