/* SPDX-License-Identifier: Apache-2.0
 *
 * Arrays, plain and mipmapped. They have no address, and only once one is made does the driver say what it takes. So
 * what the descriptor comes to is charged first; afterwards it becomes what the driver says. Small ones share units.
 */
#include "client/preload/arrays.h"

#include <string.h>

#include "client/preload/charge.h"
#include "client/preload/contexts.h"
#include "client/preload/driver.h"
#include "client/preload/lock.h"
#include "client/preload/table.h"

static const uint64_t small = UINT64_C(1) << 20;

static struct lock places;
static struct table arrays; /* array -> account, bytes, context */
static struct table shared; /* account -> bytes of its small arrays */

/* --- what they take --- */

/* 0: no format that is known here. */
static uint64_t channel_bytes(int format) {
  switch (format) {
    case 0x01: /* 8 bits, unsigned and signed */
    case 0x08:
      return 1;
    case 0x02: /* 16 bits, and half */
    case 0x09:
    case 0x10:
      return 2;
    case 0x03: /* 32 bits, and float */
    case 0x0a:
    case 0x20:
      return 4;
    default:
      return 0;
  }
}

static uint64_t extent(size_t of_first, unsigned int level) {
  const size_t size = level < 64 ? of_first >> level : 0;
  return size == 0 ? 1 : size;
}

static uint64_t bytes_of(const cu_array3d_descriptor* descriptor, unsigned int levels) {
  if ((descriptor->flags & (CU_ARRAY_SPARSE | CU_ARRAY_DEFERRED)) != 0) return 0; /* memory is mapped into it later */
  const int layers = (descriptor->flags & (CU_ARRAY_LAYERED | CU_ARRAY_CUBEMAP)) != 0;
  double bytes = 0;
  for (unsigned int level = 0; level < levels && level < 64; level++) {
    bytes += (double)extent(descriptor->width, level) * (double)extent(descriptor->height, level) *
             (double)extent(descriptor->depth, layers ? 0 : level);
  }
  bytes *= descriptor->channels * (double)channel_bytes(descriptor->format);
  return bytes > 1e18 ? UINT64_C(1) << 60 : (uint64_t)bytes;
}

/* Both return by how many units the account's need changes. */
static uint64_t add(struct account* account, uint64_t bytes) {
  if (bytes >= small) return units_of(bytes);
  lock(&places);
  const struct entry* known = table_find(&shared, (uint64_t)(uintptr_t)account);
  struct entry entry = {.key = (uint64_t)(uintptr_t)account, .bytes = known == NULL ? 0 : known->bytes};
  const uint64_t before = units_of(entry.bytes);
  entry.bytes += bytes;
  table_put(&shared, &entry);
  unlock(&places);
  return units_of(entry.bytes) - before;
}

static uint64_t drop(struct account* account, uint64_t bytes) {
  uint64_t units = 0;
  if (bytes >= small) return units_of(bytes);
  lock(&places);
  struct entry* known = table_find(&shared, (uint64_t)(uintptr_t)account);
  if (known != NULL && known->bytes >= bytes) {
    units = units_of(known->bytes) - units_of(known->bytes - bytes);
    known->bytes -= bytes;
  }
  unlock(&places);
  return units;
}

/* --- making them --- */

static int is_mapped_later(const cu_array3d_descriptor* descriptor) {
  return (descriptor->flags & (CU_ARRAY_SPARSE | CU_ARRAY_DEFERRED)) != 0;
}

static void give_back(struct charge* charge) {
  ledger_give(charge->account, drop(charge->account, charge->bytes));
}

static int begin(struct charge* charge, const char* what, const cu_array3d_descriptor* descriptor,
                 unsigned int levels) {
  struct account* account;
  memset(charge, 0, sizeof *charge);
  const int error = current_account(&account, NULL);
  if (error != CU_OK || account == NULL || descriptor == NULL) return error;
  const uint64_t bytes = bytes_of(descriptor, levels);
  const uint64_t units = add(account, bytes);
  const int refused = charge_begin(charge, account, what, bytes, units, MAY_WAIT);
  if (refused != CU_OK) {
    ledger_owe(account, units); /* another small array may count on the unit by now */
    ledger_give(account, drop(account, bytes));
  }
  return refused;
}

/* It is made, and takes `bytes`. Returns 0 where that may not be; it is to be destroyed then. */
static int keep(struct charge* charge, uint64_t array, uint64_t bytes) {
  const uint64_t more = add(charge->account, bytes);
  const uint64_t less = drop(charge->account, charge->bytes);
  charge->bytes = bytes;
  if (more > less && charge_more(charge, more - less, MAY_WAIT) != 0) {
    ledger_owe(charge->account, more - less);
    give_back(charge);
    return 0;
  }
  if (less > more) ledger_give(charge->account, less - more);
  cu_context context = NULL;
  current_device(&context);
  const struct entry entry = {.key = array, .owner = charge->account, .bytes = bytes, .context = context};
  lock(&places);
  const int failed = table_put(&arrays, &entry);
  unlock(&places);
  if (failed) give_back(charge);
  return !failed;
}

/* Before the driver destroys it: another may get the same handle at once. */
static struct entry forget(uint64_t array) {
  struct entry forgotten = {.key = array};
  lock(&places);
  struct entry* known = table_find(&arrays, array);
  if (known != NULL) {
    forgotten = *known;
    table_remove(&arrays, known);
  }
  unlock(&places);
  return forgotten;
}

static int destroyed(const struct entry* forgotten, int error) {
  if (forgotten->owner == NULL) return error;
  if (error == CU_OK) {
    ledger_give(forgotten->owner, drop(forgotten->owner, forgotten->bytes));
  } else {
    lock(&places);
    table_put(&arrays, forgotten);
    unlock(&places);
  }
  return error;
}

/* --- hooks --- */

/* What a program is told of an array that the driver has made, or has not. The driver's functions are those for its
 * kind of array. */
static int made(struct charge* charge, int error, cu_array array, const cu_array3d_descriptor* descriptor,
                int (*requirements_of)(cu_array_requirements*, cu_array, cu_device), int (*destroy)(cu_array)) {
  if (charge->account == NULL) return error;
  if (error != CU_OK) {
    give_back(charge);
    return error;
  }
  cu_array_requirements requirements;
  uint64_t bytes = charge->bytes;
  if (requirements_of != NULL && !is_mapped_later(descriptor) &&
      requirements_of(&requirements, array, current_device(NULL)) == CU_OK) {
    bytes = requirements.size;
  }
  if (keep(charge, (uint64_t)(uintptr_t)array, bytes)) return CU_OK;
  destroy(array);
  return charge_refuse(charge->what, bytes, "it takes more than its size says, and that much is not left");
}

/* Is a hook's body: makes an array that is not mipmapped. The driver's functions differ in their descriptors. */
#define CREATE(function, what, with_depth, with_flags)                                                     \
  REAL(function);                                                                                          \
  struct charge charge;                                                                                    \
  cu_array3d_descriptor wide = {0};                                                                        \
  if (descriptor != NULL) {                                                                                \
    wide = (cu_array3d_descriptor){descriptor->width,  descriptor->height,   with_depth,                   \
                                   descriptor->format, descriptor->channels, with_flags};                  \
  }                                                                                                        \
  int error = begin(&charge, what, &wide, 1);                                                              \
  if (error != CU_OK) return error;                                                                        \
  do {                                                                                                     \
    error = driver->function(array, descriptor);                                                           \
  } while (charge_again(&charge, error));                                                                  \
  return made(&charge, error, error == CU_OK ? *array : NULL, &wide, driver->cuArrayGetMemoryRequirements, \
              driver->cuArrayDestroy)

int cuArrayCreate(cu_array* array, const cu_array_descriptor32* descriptor) {
  CREATE(cuArrayCreate, "cuArrayCreate", 0, 0);
}

int cuArrayCreate_v2(cu_array* array, const cu_array_descriptor* descriptor) {
  CREATE(cuArrayCreate_v2, "cuArrayCreate", 0, 0);
}

int cuArray3DCreate(cu_array* array, const cu_array3d_descriptor32* descriptor) {
  CREATE(cuArray3DCreate, "cuArray3DCreate", descriptor->depth, descriptor->flags);
}

int cuArray3DCreate_v2(cu_array* array, const cu_array3d_descriptor* descriptor) {
  CREATE(cuArray3DCreate_v2, "cuArray3DCreate", descriptor->depth, descriptor->flags);
}

int cuArrayDestroy(cu_array array) {
  REAL(cuArrayDestroy);
  const struct entry forgotten = forget((uint64_t)(uintptr_t)array);
  return destroyed(&forgotten, driver->cuArrayDestroy(array));
}

int cuMipmappedArrayCreate(cu_mipmapped* array, const cu_array3d_descriptor* descriptor, unsigned int levels) {
  REAL(cuMipmappedArrayCreate);
  struct charge charge;
  int error = begin(&charge, "cuMipmappedArrayCreate", descriptor, levels);
  if (error != CU_OK) return error;
  do {
    error = driver->cuMipmappedArrayCreate(array, descriptor, levels);
  } while (charge_again(&charge, error));
  return made(&charge, error, error == CU_OK ? *array : NULL, descriptor, driver->cuMipmappedArrayGetMemoryRequirements,
              driver->cuMipmappedArrayDestroy);
}

int cuMipmappedArrayDestroy(cu_mipmapped array) {
  REAL(cuMipmappedArrayDestroy);
  const struct entry forgotten = forget((uint64_t)(uintptr_t)array);
  return destroyed(&forgotten, driver->cuMipmappedArrayDestroy(array));
}

void arrays_forget_context(cu_context context) {
  for (;;) {
    struct entry found = {0};
    lock(&places);
    for (size_t i = 0; i < arrays.size && found.key == 0; i++) {
      struct entry* entry = &arrays.places[i];
      if (entry->key == 0 || entry->context != context) continue;
      found = *entry;
      table_remove(&arrays, entry);
    }
    unlock(&places);
    if (found.key == 0) return;
    ledger_give(found.owner, drop(found.owner, found.bytes));
  }
}

void arrays_forget_all(void) {
  memset(&places, 0, sizeof places);
  table_clear(&arrays);
  table_clear(&shared);
}
