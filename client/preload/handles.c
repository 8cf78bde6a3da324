/* SPDX-License-Identifier: Apache-2.0
 *
 * Memory mapped by handle (cuMemCreate). The memory is back after the last reference of its handle and the last
 * mapping. Host memory is not counted, nor imported memory: the creating process is charged. Memory by handle belongs
 * to no context.
 */
#include "client/preload/handles.h"

#include <string.h>

#include "client/preload/arrays.h"
#include "client/preload/charge.h"
#include "client/preload/driver.h"
#include "client/preload/lock.h"
#include "client/preload/table.h"

static struct lock places;
static struct table handles;  /* handle -> account, bytes, references in `count`, mappings in `more` */
static struct table mappings; /* address -> handle in `more`, bytes */

static struct table tiles; /* part of a sparse array -> handle in `more`, array in `context` */

/* Units to give back for a handle after a lost reference or mapping. Callers of look_at() hold `places`. */
struct gone {
  struct account* account;
  uint64_t units;
};

static struct gone look_at(struct entry* handle) {
  struct gone gone = {0};
  if (handle->count == 0 && handle->more == 0) {
    gone.account = handle->owner;
    gone.units = units_of(handle->bytes);
    table_remove(&handles, handle);
  }
  return gone;
}

static void give(const struct gone* gone) {
  if (gone->account != NULL) ledger_give(gone->account, gone->units);
}

int cuMemCreate(cu_handle* handle, size_t bytes, const cu_allocation* allocation, unsigned long long flags) {
  REAL(cuMemCreate);
  struct account* account = NULL;
  if (allocation != NULL) {
    const int error = account_of_location(&allocation->location, allocation->type, 0, &account);
    if (error != CU_OK) return error;
  }
  if (account == NULL) return driver->cuMemCreate(handle, bytes, allocation, flags);
  struct charge charge;
  int error = charge_begin(&charge, account, "cuMemCreate", bytes, units_of(bytes), MAY_WAIT);
  if (error != CU_OK) return error;
  do {
    error = driver->cuMemCreate(handle, bytes, allocation, flags);
  } while (charge_again(&charge, error));
  if (error != CU_OK) {
    charge_settle(&charge, 0);
    return error;
  }
  const struct entry entry = {.key = *handle, .owner = account, .bytes = bytes, .count = 1};
  lock(&places);
  table_put(&handles, &entry); /* on failure the memory stays charged */
  unlock(&places);
  return CU_OK;
}

int cuMemRelease(cu_handle handle) {
  REAL(cuMemRelease);
  /* Drop the reference before the driver does: afterwards another thread may get the handle for new memory. */
  struct entry before = {0};
  struct gone gone = {0};
  lock(&places);
  struct entry* known = table_find(&handles, handle);
  if (known != NULL && known->count != 0) {
    before = *known;
    known->count--;
    gone = look_at(known);
  }
  unlock(&places);
  const int error = driver->cuMemRelease(handle);
  if (error == CU_OK) {
    give(&gone);
  } else if (before.key != 0) {
    lock(&places);
    known = table_find(&handles, handle);
    if (known != NULL) {
      known->count++;
    } else {
      before.count = 1;
      table_put(&handles, &before);
    }
    unlock(&places);
  }
  return error;
}

int cuMemRetainAllocationHandle(cu_handle* handle, void* address) {
  REAL(cuMemRetainAllocationHandle);
  const int error = driver->cuMemRetainAllocationHandle(handle, address);
  if (error != CU_OK) return error;
  lock(&places);
  struct entry* known = table_find(&handles, *handle);
  if (known != NULL) known->count++;
  unlock(&places);
  return error;
}

int cuMemMap(cu_address address, size_t bytes, size_t offset, cu_handle handle, unsigned long long flags) {
  REAL(cuMemMap);
  const int error = driver->cuMemMap(address, bytes, offset, handle, flags);
  if (error != CU_OK) return error;
  const struct entry mapping = {.key = address, .bytes = bytes, .more = handle};
  lock(&places);
  struct entry* known = table_find(&handles, handle);
  if (known != NULL && table_put(&mappings, &mapping) == 0) known->more++;
  unlock(&places);
  return error;
}

/* Returns a mapping within the range, or NULL. */
static struct entry* mapping_in(cu_address address, size_t bytes) {
  struct entry* first = table_find(&mappings, address);
  if (first != NULL) return first;
  for (size_t i = 0; i < mappings.size; i++) {
    struct entry* mapping = &mappings.places[i];
    if (mapping->key != 0 && mapping->key >= address && mapping->key - address < bytes) return mapping;
  }
  return NULL;
}

/* Removes a mapping before the driver ends it: afterwards another thread may get the handle for new memory. `taken`
 * gets the mapping, with account and bytes of a handle removed with it. Caller holds `places`. */
static void take_mapping(struct table* from, struct entry* mapping, struct table* taken) {
  struct entry* const handle = table_find(&handles, mapping->more);
  struct entry out = *mapping;
  out.owner = NULL;
  if (table_put(taken, &out) != 0) return; /* memory stays charged */
  table_remove(from, mapping);
  if (handle == NULL || handle->more == 0) return;
  handle->more--;
  if (handle->count != 0 || handle->more != 0) return;
  struct entry* const known = table_find(taken, out.key);
  known->owner = handle->owner;
  known->count = handle->bytes;
  table_remove(&handles, handle);
}

/* Gives back the units of mappings ended by the driver. Restores the mappings in `from` if `error` is not CU_OK. */
static void mappings_taken(struct table* taken, struct table* from, int error) {
  lock(&places);
  /* Restore handles first: several taken mappings may share a handle, removed with only one of them. */
  for (size_t i = 0; i < taken->size && error != CU_OK; i++) {
    const struct entry* const mapping = &taken->places[i];
    const struct entry handle = {.key = mapping->more, .owner = mapping->owner, .bytes = mapping->count};
    if (handle.owner != NULL) table_put(&handles, &handle);
  }
  for (size_t i = 0; i < taken->size && error != CU_OK; i++) {
    struct entry mapping = taken->places[i];
    struct entry* const handle = table_find(&handles, mapping.more);
    mapping.owner = NULL;
    mapping.count = 0;
    if (handle != NULL && table_put(from, &mapping) == 0) handle->more++;
  }
  unlock(&places);
  for (size_t i = 0; i < taken->size && error == CU_OK; i++) {
    const struct entry* const mapping = &taken->places[i];
    if (mapping->owner != NULL) ledger_give(mapping->owner, units_of(mapping->count));
  }
  table_clear(taken);
}

int cuMemUnmap(cu_address address, size_t bytes) {
  REAL(cuMemUnmap);
  struct table taken = {0};
  uint64_t left = bytes;
  lock(&places);
  while (left != 0) {
    struct entry* const mapping = mapping_in(address, bytes);
    const uint64_t found = mapping == NULL ? left : mapping->bytes;
    const size_t before = mappings.used;
    if (mapping != NULL) take_mapping(&mappings, mapping, &taken);
    left = found >= left || mappings.used == before ? 0 : left - found;
  }
  unlock(&places);
  const int error = driver->cuMemUnmap(address, bytes);
  mappings_taken(&taken, &mappings, error);
  return error;
}

/* --- sparse arrays --- */

/* Hashes the place and size of a part. Unmapping some of a part leaves the memory charged until the array is
 * destroyed. */
static uint64_t key_of(const cu_tile* tile) {
  const int is_tail = tile->part_type == CU_PART_TAIL;
  const uint64_t tail[8] = {tile->tail.layer, tile->tail.offset, tile->tail.size};
  uint64_t key = UINT64_C(0xcbf29ce484222325) ^ (uintptr_t)tile->array;
  if (arrays_is_deferred(tile->array)) return key | 1; /* the driver ignores the part */
  for (size_t i = 0; i < sizeof tail / sizeof *tail; i++) {
    key = (key ^ (is_tail ? tail[i] : tile->level[i])) * UINT64_C(0x9E3779B97F4A7C15);
    key ^= key >> 29;
  }
  return (is_tail ? ~key : key) | 1;
}

/* Takes the mappings ended by the driver's next call. */
static void take_tiles(const cu_tile* list, unsigned int count, struct table* taken) {
  lock(&places);
  for (unsigned int i = 0; i < count && list != NULL; i++) {
    struct entry* const before = table_find(&tiles, key_of(&list[i]));
    if (before != NULL) take_mapping(&tiles, before, taken);
  }
  unlock(&places);
}

static int map_tiles(int error, const cu_tile* list, unsigned int count, struct table* taken) {
  lock(&places);
  for (unsigned int i = 0; i < count && error == CU_OK; i++) {
    const struct entry tile = {.key = key_of(&list[i]), .more = list[i].handle, .context = list[i].array};
    struct entry* const again = table_find(&tiles, tile.key); /* mapped earlier in the same call */
    struct entry* const earlier = again == NULL ? NULL : table_find(&handles, again->more);
    if (earlier != NULL && earlier->more != 0) earlier->more--;
    if (again != NULL) table_remove(&tiles, again);
    struct entry* const known = list[i].operation == CU_TILE_MAP ? table_find(&handles, tile.more) : NULL;
    if (known != NULL && table_put(&tiles, &tile) == 0) known->more++;
  }
  unlock(&places);
  mappings_taken(taken, &tiles, error);
  return error;
}

int cuMemMapArrayAsync(const cu_tile* list, unsigned int count, cu_stream stream) {
  REAL(cuMemMapArrayAsync);
  struct table taken = {0};
  take_tiles(list, count, &taken);
  return map_tiles(driver->cuMemMapArrayAsync(list, count, stream), list, count, &taken);
}

int cuMemMapArrayAsync_ptsz(const cu_tile* list, unsigned int count, cu_stream stream) {
  REAL(cuMemMapArrayAsync_ptsz);
  struct table taken = {0};
  take_tiles(list, count, &taken);
  return map_tiles(driver->cuMemMapArrayAsync_ptsz(list, count, stream), list, count, &taken);
}

void handles_take_array(const void* array, struct table* taken) {
  lock(&places);
  for (size_t i = 0; i < tiles.size;) {
    struct entry* const tile = &tiles.places[i];
    const size_t before = tiles.used;
    if (tile->key != 0 && tile->context == array) take_mapping(&tiles, tile, taken);
    if (tiles.used == before) i++; /* else another entry may have moved here */
  }
  unlock(&places);
}

void handles_array_taken(struct table* taken, int error) {
  mappings_taken(taken, &tiles, error);
}

void handles_forget_all(void) {
  memset(&places, 0, sizeof places);
  table_clear(&handles);
  table_clear(&mappings);
  table_clear(&tiles);
}
