/* SPDX-License-Identifier: Apache-2.0 */
#include "client/preload/pools.h"

#include <string.h>
#include <sys/mman.h>

#include "client/preload/contexts.h"
#include "client/preload/driver.h"
#include "client/preload/grant.h"
#include "client/preload/graphs.h"
#include "client/preload/growth.h"
#include "client/preload/lock.h"
#include "client/preload/runtime.h"
#include "client/preload/table.h"

enum { MOST_TRIES = 8 };
static const uint64_t most_bytes = UINT64_C(1) << 50; /* cap of a request, for sums of several requests */

struct pool {
  struct reserve reserve; /* its lock guards the fields below, too */
  cu_pool handle;         /* NULL: destroyed */
  cu_device device;       /* -1: the host */
  uint64_t bytes;         /* bytes of allocations and of pending requests */
  uint64_t count;         /* number of allocations */
  unsigned readers;       /* threads scanning all pools, now asking the driver about the pool */
  int is_going;           /* a thread is destroying the pool: readers stay away */
  int is_own;             /* created by the program on a device */
  int is_doomed;          /* destroyed by the program; to be destroyed in the driver once empty */
  struct pool* next;      /* next in `all_pools`; entries stay, and are reused once without handle and allocations */
};

static struct lock places;    /* guards the tables. Held for moments; taken before a pool's lock. */
static struct table pools;    /* handle -> pool in `owner` */
static struct table pointers; /* address -> pool in `owner`, bytes */
static struct pool* all_pools;
static int may_have_shrunk; /* memory was freed since the last read, or was unused at the last read */

int is_capturing(cu_stream stream, int of_thread) {
  const struct driver* driver = real_driver();
  int (*ask)(cu_stream, int*) = of_thread ? driver->cuStreamIsCapturing_ptsz : driver->cuStreamIsCapturing;
  int status = 0;
  return ask != NULL && ask(stream, &status) == CU_OK && status != 0;
}

/* --- reserved memory --- */

/* The account of a pool's device may become known while other threads use the pool. */
static struct account* account_of_pool(const struct pool* pool) {
  return __atomic_load_n(&pool->reserve.account, __ATOMIC_ACQUIRE);
}

static int reserved_units(const void* owner, uint64_t* units) {
  const struct driver* driver = real_driver();
  const cu_pool handle = ((const struct pool*)owner)->handle;
  uint64_t bytes = 0;
  if (handle == NULL || driver->cuMemPoolGetAttribute == NULL) return -1;
  if (driver->cuMemPoolGetAttribute(handle, CU_POOL_RESERVED, &bytes) != CU_OK) return -1;
  *units = units_of(bytes);
  return 0;
}

/* Gives back units no longer reserved by the pool. A doomed pool, or a pool owing units, keeps no unused memory. */
static void read_pool(struct pool* pool) {
  const struct driver* driver = real_driver();
  struct reserve* const reserve = &pool->reserve;
  lock(&reserve->lock);
  const cu_pool handle = pool->handle;
  const uint64_t in_use = pool->bytes;
  const int keeps_nothing = reserve->owed != 0 || pool->is_doomed;
  const int is_asked = reserve->calls != 0; /* the driver may wait in an unfinished call */
  unlock(&reserve->lock);
  if (handle == NULL || account_of_pool(pool) == NULL) return;
  if (keeps_nothing && !is_asked && driver->cuMemPoolTrimTo != NULL) driver->cuMemPoolTrimTo(handle, in_use);
  growth_read(reserve);
  lock(&reserve->lock);
  const uint64_t bytes = reserve->known * VRAMBROKER_COUNT_UNIT_BYTES;
  /* A driver may free allocations with their context. */
  if (reserve->calls == 0 && pool->bytes > bytes) pool->bytes = bytes;
  const int may_shrink = bytes > pool->bytes || reserve->owed != 0;
  unlock(&reserve->lock);
  if (may_shrink) __atomic_store_n(&may_have_shrunk, 1, __ATOMIC_RELAXED);
}

static int reading(struct pool* pool) {
  lock(&pool->reserve.lock);
  const int may_read = pool->handle != NULL && !pool->is_going;
  if (may_read) pool->readers++;
  unlock(&pool->reserve.lock);
  return may_read;
}

/* Removes the handle before the driver destroys the pool: a new pool may get the handle at once. */
static struct pool* forget_pool(cu_pool handle) {
  struct pool* pool = NULL;
  lock(&places);
  struct entry* const known = table_find(&pools, (uint64_t)(uintptr_t)handle);
  if (known != NULL) {
    pool = known->owner;
    table_remove(&pools, known);
  }
  unlock(&places);
  return pool;
}

/* Ends a read. The last reader of a doomed pool destroys it once empty. */
static void has_read(struct pool* pool) {
  cu_pool handle = NULL;
  lock(&pool->reserve.lock);
  pool->readers--;
  if (pool->is_doomed && pool->readers == 0 && pool->reserve.known == 0) {
    handle = pool->handle;
    pool->handle = NULL;
    pool->is_doomed = 0;
  }
  unlock(&pool->reserve.lock);
  if (handle == NULL) return;
  forget_pool(handle);
  real_driver()->cuMemPoolDestroy(handle);
}

/* Keeps handlers from leaving by siglongjmp(): the thread destroying a pool waits for the pool's readers. */
void pools_read(void) {
  const struct calm calm = calm_begin();
  __atomic_store_n(&may_have_shrunk, 0, __ATOMIC_RELAXED);
  for (struct pool* pool = __atomic_load_n(&all_pools, __ATOMIC_ACQUIRE); pool != NULL; pool = pool->next) {
    if (!reading(pool)) continue;
    read_pool(pool);
    has_read(pool);
  }
  calm_end(calm);
}

void pools_read_if_freed(void) {
  if (__atomic_load_n(&may_have_shrunk, __ATOMIC_RELAXED)) pools_read();
}

/* --- finding pools --- */

static cu_device device_of(cu_stream stream) {
  const struct driver* driver = real_driver();
  cu_context own = NULL;
  cu_context current = NULL;
  /* Streams 0, 1 and 2 are the thread's default streams. */
  if ((uintptr_t)stream > 2 && driver->cuStreamGetCtx != NULL && driver->cuStreamGetCtx(stream, &own) == CU_OK &&
      driver->cuCtxGetCurrent(&current) == CU_OK && own != current && driver->cuCtxPushCurrent_v2(own) == CU_OK) {
    const cu_device device = current_device(NULL);
    driver->cuCtxPopCurrent_v2(&own);
    return device;
  }
  return current_device(NULL);
}

/* Returns a pool without handle and allocations, or a new pool; NULL: no memory. Caller holds `places`. */
static struct pool* unused_pool(void) {
  for (struct pool* pool = all_pools; pool != NULL; pool = pool->next) {
    lock(&pool->reserve.lock);
    const int is_unused = pool->handle == NULL && pool->count == 0 && pool->reserve.calls == 0;
    unlock(&pool->reserve.lock);
    if (is_unused) return pool;
  }
  struct pool* const pool = mmap(NULL, sizeof *pool, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (pool == MAP_FAILED) return NULL;
  pool->reserve.read = reserved_units;
  pool->reserve.owner = pool;
  pool->next = all_pools;
  __atomic_store_n(&all_pools, pool, __ATOMIC_RELEASE);
  return pool;
}

static struct pool* find_pool(cu_pool handle) {
  lock(&places);
  const struct entry* known = table_find(&pools, (uint64_t)(uintptr_t)handle);
  struct pool* const pool = known == NULL ? NULL : known->owner;
  unlock(&places);
  return pool;
}

/* Returns the pool known by the handle, or adds the pool. NULL: no memory. `account` counts from now on; NULL: the
 * device is not counted, or its account is not known yet. */
static struct pool* know_pool(cu_pool handle, cu_device device, struct account* account) {
  lock(&places);
  const struct entry* known = table_find(&pools, (uint64_t)(uintptr_t)handle);
  struct pool* pool = known == NULL ? unused_pool() : known->owner;
  if (known == NULL && pool != NULL) {
    const struct entry entry = {.key = (uint64_t)(uintptr_t)handle, .owner = pool};
    if (table_put(&pools, &entry) != 0) {
      pool = NULL;
    } else {
      lock(&pool->reserve.lock);
      pool->handle = handle;
      pool->device = device;
      pool->is_own = 0;
      __atomic_store_n(&pool->reserve.account, NULL, __ATOMIC_RELEASE);
      unlock(&pool->reserve.lock);
    }
  }
  if (pool != NULL && account != NULL) {
    lock(&pool->reserve.lock);
    __atomic_store_n(&pool->reserve.account, account, __ATOMIC_RELEASE);
    unlock(&pool->reserve.lock);
  }
  unlock(&places);
  return pool;
}

/* Finds a pool's device. Pools neither created here nor asked for by location are a device's own. */
static cu_device device_of_pool(cu_pool handle, cu_stream stream) {
  const struct driver* driver = real_driver();
  const struct pool* const known = find_pool(handle);
  if (known != NULL) return known->device;
  for (cu_device each = 0; each < LEDGER_DEVICES && driver->cuDeviceGetDefaultMemPool != NULL; each++) {
    cu_pool of_device;
    if (driver->cuDeviceGetDefaultMemPool(&of_device, each) != CU_OK) break;
    if (of_device == handle) return each;
  }
  return device_of(stream);
}

/* Finds a pool, or adds the pool. Returns 0 or an error for the program. A pool may have been known before the daemon
 * serving its device. */
static int pool_of(cu_pool handle, cu_stream stream, struct pool** pool) {
  struct account* account;
  *pool = find_pool(handle);
  if (*pool != NULL && account_of_pool(*pool) != NULL) return CU_OK;
  const cu_device device = device_of_pool(handle, stream);
  const int error = account_of(device, 0, &account);
  if (error != CU_OK) return error;
  *pool = know_pool(handle, device, account);
  return *pool != NULL ? CU_OK : refuse("there is no memory for the list of this program's pools");
}

/* --- allocating --- */

/* Call of one of the driver's four functions, with arguments. */
struct request {
  const char* what;
  cu_address* address;
  size_t bytes;
  cu_pool pool; /* NULL: the current pool of the stream's device */
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

/* Never waits for the program's work, which may wait for another thread. A busy stream keeps the memory until its work
 * is done. */
static void undo(const struct request* request, struct pool* pool, const struct growth* growth) {
  const struct driver* driver = real_driver();
  int (*query)(cu_stream) = request->of_thread ? driver->cuStreamQuery_ptsz : driver->cuStreamQuery;
  const int is_idle = query != NULL && query(request->stream) == CU_OK;
  (request->of_thread ? driver->cuMemFreeAsync_ptsz : driver->cuMemFreeAsync)(*request->address, request->stream);
  if (is_idle) (request->of_thread ? driver->cuStreamSynchronize_ptsz : driver->cuStreamSynchronize)(request->stream);
  lock(&pool->reserve.lock);
  const uint64_t before = pool->reserve.known - growth->prepared;
  unlock(&pool->reserve.lock);
  driver->cuMemPoolTrimTo(pool->handle, before * VRAMBROKER_COUNT_UNIT_BYTES);
  *request->address = 0;
}

static uint64_t bytes_to_add(const struct request* request) {
  return request->bytes < most_bytes ? request->bytes : most_bytes;
}

/* Adds a request to the pool's allocations. Returns the pool's least growth, in units: as if all unused memory could
 * serve the request. */
static uint64_t join(struct pool* pool, const struct request* request) {
  lock(&pool->reserve.lock);
  const uint64_t reserved = pool->reserve.known * VRAMBROKER_COUNT_UNIT_BYTES;
  const uint64_t unused = reserved > pool->bytes ? reserved - pool->bytes : 0;
  pool->bytes += bytes_to_add(request);
  unlock(&pool->reserve.lock);
  return request->bytes > unused ? units_of(request->bytes - unused) : 0;
}

/* Removes an allocation (`count` is 1), or a mere request (0). */
static void leave(struct pool* pool, uint64_t bytes, unsigned count) {
  uint64_t units = 0;
  lock(&pool->reserve.lock);
  pool->count -= count < pool->count ? count : pool->count;
  pool->bytes -= bytes < pool->bytes ? bytes : pool->bytes;
  struct account* const account = account_of_pool(pool);
  if (pool->handle == NULL && pool->count == 0) { /* last allocation of a destroyed pool */
    units = pool->reserve.known;
    pool->reserve.known = pool->reserve.owed = pool->bytes = 0;
  }
  unlock(&pool->reserve.lock);
  if (units != 0) ledger_give(account, units);
}

static void note_pointer(const struct request* request, struct pool* pool) {
  const struct entry entry = {.key = *request->address, .owner = pool, .bytes = bytes_to_add(request)};
  lock(&places);
  const struct entry* known = table_find(&pointers, entry.key);
  const struct entry before = known == NULL ? (struct entry){0} : *known; /* freed with its context */
  const int failed = table_put(&pointers, &entry);
  unlock(&places);
  if (before.owner != NULL) leave(before.owner, before.bytes, 1);
  if (failed) return leave(pool, entry.bytes, 0);
  lock(&pool->reserve.lock);
  pool->count++;
  unlock(&pool->reserve.lock);
}

/* Calls the driver, and charges the pool's growth. -1: refused; the call was skipped or undone. */
static int try_once(const struct request* request, struct pool* pool, int from_pool, struct growth* growth,
                    int* error) {
  struct reserve* const reserve = &pool->reserve;
  read_pool(pool);
  growth_enter(growth, reserve);
  const uint64_t least = join(pool, request);
  if (growth_prepare(growth, least) == 0) {
    *error = ask_driver(request, from_pool);
    if (growth_leave(growth, reserve) == 0) {
      if (*error == CU_OK) {
        note_pointer(request, pool);
      } else {
        leave(pool, bytes_to_add(request), 0);
      }
      return 0;
    }
    if (*error == CU_OK) undo(request, pool, growth);
  }
  leave(pool, bytes_to_add(request), 0);
  growth_undone(reserve);
  __atomic_store_n(&may_have_shrunk, 1, __ATOMIC_RELAXED);
  return -1;
}

static int allocate(struct request* request) {
  const struct driver* driver = real_driver();
  const int from_pool = request->pool != NULL;
  int error = CU_OK;
  if (is_capturing(request->stream, request->of_thread)) { /* the call becomes a graph node */
    graphs_have_memory(device_of(request->stream));
    if (from_pool) graphs_have_memory(device_of_pool(request->pool, request->stream));
    return ask_driver(request, from_pool);
  }
  if (!from_pool && (driver->cuDeviceGetMemPool == NULL ||
                     driver->cuDeviceGetMemPool(&request->pool, device_of(request->stream)) != CU_OK)) {
    return ask_driver(request, from_pool);
  }
  struct pool* pool;
  const int refused = pool_of(request->pool, request->stream, &pool);
  if (refused != CU_OK) return refused;
  if (account_of_pool(pool) == NULL) return ask_driver(request, from_pool);
  struct growth growth = {.reserve = &pool->reserve};
  for (int tries = 1;;) {
    const int result = try_once(request, pool, from_pool, &growth, &error);
    if (result == 0 && charge_again(&growth.waited, error)) continue;
    if (result == 0) break;
    pools_read_if_freed();
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
  if (pointer->owner == NULL) return;
  if (error == CU_OK) {
    leave(pointer->owner, pointer->bytes, 1);
    __atomic_store_n(&may_have_shrunk, 1, __ATOMIC_RELAXED);
    return;
  }
  lock(&places);
  table_put(&pointers, pointer); /* has room: the entry was just removed */
  unlock(&places);
}

static int free_async(int (*real)(cu_address, cu_stream), cu_address address, cu_stream stream, int of_thread) {
  if (is_capturing(stream, of_thread)) return real(address, stream);
  const struct freed freed = grant_forget(address); /* may also come from cuMemAlloc */
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

/* --- creating and destroying pools --- */

/* Notes the destruction in the driver. Remaining allocations stay charged until freed. */
static void destroyed(struct pool* pool) {
  lock(&pool->reserve.lock);
  pool->handle = NULL;
  pool->is_going = 0;
  pool->reserve.changes++;
  unlock(&pool->reserve.lock);
  leave(pool, 0, 0);
}

/* Waits for the pool's readers: no thread may ask about a handle forgotten by the driver. */
static void send_readers_away(struct pool* pool) {
  const struct calm calm = calm_begin();
  lock(&pool->reserve.lock);
  pool->is_going = 1;
  while (pool->readers != 0) {
    unlock(&pool->reserve.lock);
    sleep_ms(1);
    lock(&pool->reserve.lock);
  }
  unlock(&pool->reserve.lock);
  calm_end(calm);
}

/* Makes the default pool a device's current pool in place of `pool`, as the driver does for a destroyed pool. Returns 1
 * if `pool` is not current any more. */
static int replace_current(const struct pool* pool) {
  const struct driver* driver = real_driver();
  cu_pool other;
  if (driver->cuDeviceGetMemPool == NULL || driver->cuDeviceGetMemPool(&other, pool->device) != CU_OK) return 0;
  if (other != pool->handle) return 1;
  return driver->cuDeviceGetDefaultMemPool != NULL && driver->cuDeviceSetMemPool != NULL &&
         driver->cuDeviceGetDefaultMemPool(&other, pool->device) == CU_OK &&
         driver->cuDeviceSetMemPool(pool->device, other) == CU_OK;
}

/* Delays the destruction of a pool until empty; then returns 1. The driver keeps a destroyed pool's memory in use, or
 * freed on a stream lagging behind, and reports the memory no longer. A doomed pool stays in the table: a thread may
 * still allocate from the pool that was current. */
static int doom(struct pool* pool) {
  if (!pool->is_own || account_of_pool(pool) == NULL) return 0;
  lock(&pool->reserve.lock);
  const int is_empty = pool->reserve.known == 0;
  unlock(&pool->reserve.lock);
  if (is_empty || !replace_current(pool)) return 0;
  lock(&pool->reserve.lock);
  pool->is_doomed = pool->reserve.known != 0;
  const int is_doomed = pool->is_doomed;
  unlock(&pool->reserve.lock);
  return is_doomed;
}

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
  struct pool* const before = forget_pool(*pool); /* earlier pool, destroyed unseen */
  if (before != NULL) destroyed(before);
  const cu_device device = properties == NULL ? -1 : device_of_location(&properties->location, properties->type);
  struct pool* const made = know_pool(*pool, device, account);
  if (made != NULL && properties != NULL)
    made->is_own = properties->type != CU_MANAGED && properties->location.type == CU_LOCATION_DEVICE;
  return error;
}

/* Gets a location's own pool by one of the driver's two functions. Needs no daemon, since no memory is taken: an
 * allocation reports a missing daemon. */
static int get(int (*real)(cu_pool*, cu_location*, int), cu_pool* pool, cu_location* location, int type) {
  const int refused = type == CU_MANAGED ? refuse_managed() : CU_OK;
  if (refused != CU_OK) return refused;
  const int error = real(pool, location, type);
  if (error == CU_OK) know_pool(*pool, device_of_location(location, type), NULL);
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

int cuMemPoolDestroy(cu_pool handle) {
  REAL(cuMemPoolDestroy);
  struct pool* const pool = find_pool(handle);
  if (pool == NULL) return driver->cuMemPoolDestroy(handle);
  driver->cuMemPoolTrimTo(handle, 0); /* afterwards, reserved memory is memory in use */
  read_pool(pool);
  if (doom(pool)) return CU_OK;
  forget_pool(handle);
  send_readers_away(pool);
  const int error = driver->cuMemPoolDestroy(handle);
  if (error == CU_OK) {
    destroyed(pool);
    return error;
  }
  const struct entry entry = {.key = (uint64_t)(uintptr_t)handle, .owner = pool};
  lock(&places);
  table_put(&pools, &entry); /* has room: the entry was just removed */
  lock(&pool->reserve.lock);
  pool->is_going = 0;
  unlock(&pool->reserve.lock);
  unlock(&places);
  return error;
}

int cuMemPoolTrimTo(cu_pool handle, size_t bytes) {
  REAL(cuMemPoolTrimTo);
  const int error = driver->cuMemPoolTrimTo(handle, bytes);
  struct pool* const pool = find_pool(handle);
  if (pool != NULL) read_pool(pool);
  return error;
}

/* --- calls shrinking pools --- */

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
  memset(&places, 0, sizeof places);
  table_clear(&pools);
  table_clear(&pointers);
  while (all_pools != NULL) {
    struct pool* const pool = all_pools;
    all_pools = pool->next;
    munmap(pool, sizeof *pool);
  }
}
