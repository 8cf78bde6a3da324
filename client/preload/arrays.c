/* SPDX-License-Identifier: Apache-2.0
 *
 * Plain and mipmapped arrays. Arrays have no address, and the driver does not report their size. So we charge the size
 * computed from the descriptor. Small arrays share units.
 */
#include "client/preload/arrays.h"

#include <string.h>

#include "client/preload/charge.h"
#include "client/preload/contexts.h"
#include "client/preload/driver.h"
#include "client/preload/formats.h"
#include "client/preload/handles.h"
#include "client/preload/lock.h"
#include "client/preload/table.h"

static const uint64_t small = UINT64_C(1) << 20;

static struct lock places;
static struct table arrays; /* array -> account, bytes, context; `more`: whether mapping is deferred */
/* Small arrays of an account, and the units charged for all of them. An array counts as soon as the units have room,
 * even while another thread asks for a unit and may be refused. */
static struct shared {
  struct account* account;
  uint64_t bytes;
  uint64_t units;
  unsigned askers; /* threads asking for more units */
} shared[LEDGER_DEVICES];

/* --- sizes --- */

static uint64_t extent(size_t of_first, unsigned int level) {
  const size_t size = level < 64 ? of_first >> level : 0;
  return size == 0 ? 1 : size;
}

static double squares(uint64_t size, unsigned int edge) {
  return (double)((size + edge - 1) / edge * edge);
}

static uint64_t bytes_of(const cu_array3d_descriptor* descriptor, unsigned int levels) {
  if ((descriptor->flags & (CU_ARRAY_SPARSE | CU_ARRAY_DEFERRED)) != 0) return 0; /* the program maps memory later */
  const int layers = (descriptor->flags & (CU_ARRAY_LAYERED | CU_ARRAY_CUBEMAP)) != 0;
  const struct element element = element_of(descriptor->format, descriptor->channels);
  double elements = 0;
  for (unsigned int level = 0; level < levels && level < 64; level++) {
    elements += squares(extent(descriptor->width, level), element.edge) *
                squares(extent(descriptor->height, level), element.edge) *
                (double)extent(descriptor->depth, layers ? 0 : level);
  }
  const double bytes = elements * element.bits / 8;
  return bytes > 1e18 ? UINT64_C(1) << 60 : (uint64_t)bytes;
}

/* Caller holds `places`. */
static struct shared* shared_of(struct account* account) {
  struct shared* each = shared;
  while (each->account != account && each->account != NULL) each++;
  each->account = account;
  return each;
}

/* Adds a small array if the units have room. Caller holds `places`. */
static int join(struct shared* all, uint64_t bytes) {
  if (units_of(all->bytes + bytes) > all->units) return 0;
  all->bytes += bytes;
  return 1;
}

/* Takes out the units not needed by any array. Caller holds `places`. */
static uint64_t spare(struct shared* all) {
  const uint64_t units = all->units - units_of(all->bytes);
  all->units -= units;
  return units;
}

/* Adds a small array; `has_unit`: a unit was charged for the array. Gives back surplus units brought by other
 * threads. */
static int add(struct shared* all, const struct charge* charge, int has_unit) {
  lock(&places);
  all->units += (uint64_t)has_unit;
  const int is_paid = join(all, charge->bytes);
  const uint64_t units = spare(all);
  unlock(&places);
  ledger_give(charge->account, units);
  return is_paid;
}

/* Charges an array before its creation. -1: refused, and `message` says why. */
static int take(struct charge* charge, char* message) {
  uint64_t refused_at = 0;
  if (charge->bytes >= small) return charge_more(charge, units_of(charge->bytes), MAY_WAIT, message);
  lock(&places);
  struct shared* const all = shared_of(charge->account);
  int is_paid = join(all, charge->bytes);
  if (!is_paid) all->askers++;
  unlock(&places);
  if (is_paid) return 0;
  is_paid = add(all, charge, charge_more(charge, 1, MAY_WAIT, message) == 0); /* any small array fits into a unit */
  lock(&places);
  unsigned others = --all->askers; /* only now: the asking threads can use units given back above */
  if (!is_paid) is_paid = join(all, charge->bytes);
  unlock(&places);
  /* After a refusal, another thread may bring a unit with room, or a surplus unit. */
  while (!is_paid && others != 0 && charge_look_again(&refused_at)) {
    lock(&places);
    others = all->askers;
    unlock(&places);
    is_paid = add(all, charge, charge_more(charge, 1, FROM_SLACK, message) == 0);
  }
  return is_paid ? 0 : -1;
}

static void give_back(struct account* account, uint64_t bytes) {
  if (bytes >= small) return ledger_give(account, units_of(bytes));
  lock(&places);
  struct shared* const all = shared_of(account);
  all->bytes -= bytes;
  const uint64_t units = spare(all);
  unlock(&places);
  ledger_give(account, units);
}

/* --- creating and destroying --- */

static int begin(struct charge* charge, const char* what, const cu_array3d_descriptor* descriptor,
                 unsigned int levels) {
  struct account* account;
  char message[MESSAGE_BYTES];
  memset(charge, 0, sizeof *charge);
  const int error = current_account(&account, NULL);
  if (error != CU_OK || account == NULL || descriptor == NULL) return error;
  *charge = (struct charge){.account = account, .what = what, .bytes = bytes_of(descriptor, levels)};
  return take(charge, message) == 0 ? CU_OK : charge_refuse(what, charge->bytes, message);
}

/* Returns the program's result, and records the array if the driver has created one. */
static int made(const struct charge* charge, int error, cu_array array, const cu_array3d_descriptor* descriptor) {
  if (charge->account == NULL) return error;
  if (error != CU_OK) {
    give_back(charge->account, charge->bytes);
    return error;
  }
  cu_context context = NULL;
  current_device(&context);
  const struct entry entry = {.key = (uint64_t)(uintptr_t)array,
                              .owner = charge->account,
                              .bytes = charge->bytes,
                              .context = context,
                              .more = descriptor->flags & CU_ARRAY_DEFERRED};
  lock(&places);
  const struct entry* const known = table_find(&arrays, entry.key);
  const struct entry stale = known == NULL ? (struct entry){0} : *known; /* earlier array, destroyed with its context */
  const int failed = table_put(&arrays, &entry);                         /* on failure the array stays charged */
  unlock(&places);
  if (stale.owner != NULL && !failed) give_back(stale.owner, stale.bytes);
  return CU_OK;
}

/* Removes an entry. Caller holds `places`. */
static struct entry remove_array(struct entry* known) {
  const struct entry array = *known;
  table_remove(&arrays, known);
  return array;
}

/* Ends the mappings into the array, too. Removes the entry before the driver destroys the array: another thread may get
 * the handle at once. */
static int destroy(int (*real)(cu_array), cu_array array) {
  struct entry forgotten = {0};
  struct table tiles = {0};
  lock(&places);
  struct entry* const known = table_find(&arrays, (uint64_t)(uintptr_t)array);
  if (known != NULL) forgotten = remove_array(known);
  unlock(&places);
  handles_take_array(array, &tiles);
  const int error = real(array);
  handles_array_taken(&tiles, error);
  if (forgotten.owner == NULL) return error;
  if (error == CU_OK) {
    give_back(forgotten.owner, forgotten.bytes);
  } else {
    lock(&places);
    table_put(&arrays, &forgotten); /* has room: the entry was just removed */
    unlock(&places);
  }
  return error;
}

/* --- hooks --- */

/* Body of a hook: creates an array without mipmaps. The driver's functions differ in their descriptors. */
#define CREATE(function, what, with_depth, with_flags)                                    \
  REAL(function);                                                                         \
  struct charge charge;                                                                   \
  cu_array3d_descriptor wide = {0};                                                       \
  if (descriptor != NULL) {                                                               \
    wide = (cu_array3d_descriptor){descriptor->width,  descriptor->height,   with_depth,  \
                                   descriptor->format, descriptor->channels, with_flags}; \
  }                                                                                       \
  int error = begin(&charge, what, &wide, 1);                                             \
  if (error != CU_OK) return error;                                                       \
  do {                                                                                    \
    error = driver->function(array, descriptor);                                          \
  } while (charge_again(&charge, error));                                                 \
  return made(&charge, error, error == CU_OK ? *array : NULL, &wide)

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
  return destroy(driver->cuArrayDestroy, array);
}

int cuMipmappedArrayCreate(cu_mipmapped* array, const cu_array3d_descriptor* descriptor, unsigned int levels) {
  REAL(cuMipmappedArrayCreate);
  struct charge charge;
  int error = begin(&charge, "cuMipmappedArrayCreate", descriptor, levels);
  if (error != CU_OK) return error;
  do {
    error = driver->cuMipmappedArrayCreate(array, descriptor, levels);
  } while (charge_again(&charge, error));
  return made(&charge, error, error == CU_OK ? *array : NULL, descriptor);
}

int cuMipmappedArrayDestroy(cu_mipmapped array) {
  REAL(cuMipmappedArrayDestroy);
  return destroy(driver->cuMipmappedArrayDestroy, array);
}

int arrays_is_deferred(const void* array) {
  lock(&places);
  const struct entry* const known = table_find(&arrays, (uint64_t)(uintptr_t)array);
  const int is_deferred = known != NULL && known->more != 0;
  unlock(&places);
  return is_deferred;
}

void arrays_rename_context(cu_context context, cu_context name) {
  lock(&places);
  for (size_t i = 0; i < arrays.size; i++) {
    if (arrays.places[i].key != 0 && arrays.places[i].context == context) arrays.places[i].context = name;
  }
  unlock(&places);
}

void arrays_forget_context(cu_context context) {
  for (;;) {
    struct entry found = {0};
    lock(&places);
    for (size_t i = 0; i < arrays.size && found.key == 0; i++) {
      struct entry* entry = &arrays.places[i];
      if (entry->key == 0 || entry->context != context) continue;
      found = remove_array(entry);
    }
    unlock(&places);
    if (found.key == 0) return;
    struct table tiles = {0};
    handles_take_array((const void*)(uintptr_t)found.key, &tiles);
    handles_array_taken(&tiles, CU_OK);
    give_back(found.owner, found.bytes);
  }
}

void arrays_forget_all(void) {
  memset(&places, 0, sizeof places);
  table_clear(&arrays);
  memset(shared, 0, sizeof shared);
}
