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
#include "client/preload/formats.h"
#include "client/preload/handles.h"
#include "client/preload/lock.h"
#include "client/preload/table.h"

static const uint64_t small = UINT64_C(1) << 20;

static struct lock places;
static struct table arrays; /* array -> account, bytes, context */
/* The small arrays of an account, those that are just made among them, and the units that are charged for them all.
   Each array that needs more than that asks: so a refusal leaves none in a unit that nobody paid. */
static struct shared {
  struct account* account;
  uint64_t bytes;
  uint64_t units;
  unsigned askers; /* threads that ask for more units */
} shared[LEDGER_DEVICES];

/* --- what they take --- */

static uint64_t extent(size_t of_first, unsigned int level) {
  const size_t size = level < 64 ? of_first >> level : 0;
  return size == 0 ? 1 : size;
}

static double squares(uint64_t size, unsigned int edge) {
  return (double)((size + edge - 1) / edge * edge);
}

static uint64_t bytes_of(const cu_array3d_descriptor* descriptor, unsigned int levels) {
  if ((descriptor->flags & (CU_ARRAY_SPARSE | CU_ARRAY_DEFERRED)) != 0) return 0; /* memory is mapped into it later */
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

static uint64_t own_units(uint64_t bytes) {
  return bytes < small ? 0 : units_of(bytes);
}

static uint64_t shared_bytes(uint64_t bytes) {
  return bytes < small ? bytes : 0;
}

/* With the lock. */
static struct shared* shared_of(struct account* account) {
  struct shared* each = shared;
  while (each->account != account && each->account != NULL) each++;
  each->account = account;
  return each;
}

/* With the lock: an array is to have `to` bytes, and has so many units in hand, which it takes. 0: they do not suffice.
 */
static int pay(struct shared* all, uint64_t to, uint64_t* at_hand) {
  const uint64_t own = own_units(to);
  if (*at_hand < own) return 0;
  if (shared_bytes(to) != 0 && all->units + *at_hand < units_of(all->bytes)) return 0;
  all->units += *at_hand - own;
  *at_hand = 0;
  return 1;
}

/* An array that has `from` bytes is to have `to`. -1: that may not be, it has none now, and `message` says why. */
static int change(struct charge* charge, uint64_t from, uint64_t to, char* message) {
  uint64_t at_hand = own_units(from);
  uint64_t wanted = own_units(to);
  uint64_t refused_at = 0;
  lock(&places);
  struct shared* const all = shared_of(charge->account);
  all->bytes += shared_bytes(to) - shared_bytes(from);
  if (shared_bytes(to) != 0 && units_of(all->bytes) > all->units) wanted = units_of(all->bytes) - all->units;
  const int asks = wanted > at_hand && shared_bytes(to) != 0;
  if (asks) all->askers++;
  unlock(&places);
  if (wanted > at_hand && charge_more(charge, wanted - at_hand, MAY_WAIT, message) == 0) at_hand = wanted;
  lock(&places);
  if (asks) all->askers--;
  int is_paid = pay(all, to, &at_hand);
  /* Where it was refused, others may pay. */
  while (!is_paid && shared_bytes(to) != 0 && all->askers != 0) {
    unlock(&places);
    const int looks_again = charge_look_again(&refused_at);
    lock(&places);
    is_paid = pay(all, to, &at_hand);
    if (!looks_again) break;
  }
  if (!is_paid) all->bytes -= shared_bytes(to);
  if (all->units > units_of(all->bytes)) {
    at_hand += all->units - units_of(all->bytes);
    all->units = units_of(all->bytes);
  }
  unlock(&places);
  ledger_give(charge->account, at_hand);
  return is_paid ? 0 : -1;
}

static void give_back(struct account* account, uint64_t bytes) {
  struct charge charge = {.account = account};
  change(&charge, bytes, 0, NULL);
}

/* --- making them --- */

static int is_mapped_later(const cu_array3d_descriptor* descriptor) {
  return (descriptor->flags & (CU_ARRAY_SPARSE | CU_ARRAY_DEFERRED)) != 0;
}

static int begin(struct charge* charge, const char* what, const cu_array3d_descriptor* descriptor,
                 unsigned int levels) {
  struct account* account;
  char message[MESSAGE_BYTES];
  memset(charge, 0, sizeof *charge);
  const int error = current_account(&account, NULL);
  if (error != CU_OK || account == NULL || descriptor == NULL) return error;
  *charge = (struct charge){.account = account, .what = what, .bytes = bytes_of(descriptor, levels)};
  return change(charge, 0, charge->bytes, message) == 0 ? CU_OK : charge_refuse(what, charge->bytes, message);
}

/* It is made, and takes `bytes`. Returns 0 where that may not be; it is to be destroyed then. */
static int keep(struct charge* charge, uint64_t array, uint64_t bytes) {
  char message[MESSAGE_BYTES];
  cu_context context = NULL;
  current_device(&context);
  const struct entry entry = {.key = array, .owner = charge->account, .bytes = bytes, .context = context};
  if (bytes != charge->bytes && change(charge, charge->bytes, bytes, message) != 0) return 0;
  lock(&places);
  const struct entry* const known = table_find(&arrays, array);
  const struct entry stale = known == NULL ? (struct entry){0} : *known; /* it went with its context */
  const int failed = table_put(&arrays, &entry);
  unlock(&places);
  if (stale.owner != NULL) give_back(stale.owner, stale.bytes);
  if (failed) give_back(charge->account, bytes);
  return !failed;
}

/* Before the driver destroys it: another may get the same handle at once. */
static struct entry forget(uint64_t array) {
  struct entry forgotten = {.key = array};
  handles_forget_array((const void*)(uintptr_t)array);
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
    give_back(forgotten->owner, forgotten->bytes);
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
    give_back(charge->account, charge->bytes);
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
      found = *entry;
      table_remove(&arrays, entry);
    }
    unlock(&places);
    if (found.key == 0) return;
    handles_forget_array((const void*)(uintptr_t)found.key);
    give_back(found.owner, found.bytes);
  }
}

void arrays_forget_all(void) {
  memset(&places, 0, sizeof places);
  table_clear(&arrays);
  memset(shared, 0, sizeof shared);
}
