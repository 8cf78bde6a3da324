// SPDX-License-Identifier: Apache-2.0
//
// A libcuda.so.1 packing small allocations, like NVIDIA's driver. Places allocations first fit into blocks of 2 MiB,
// and gives an empty block back. Has two devices. Checks the limits after each operation.
#include "tests/preload/packing.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

enum { PLACE = 512, PLACES = UNIT / PLACE, BLOCKS = 64 };

static struct block {
  unsigned long long large_bytes; /* size of the large allocation beginning here */
  int is_large;
  int is_longer; /* allocation is longer than a program can know */
  const void* context;
  int count;                  /* small allocations in the block */
  int had;                    /* allocations of the block already given to the program */
  unsigned int bytes[PLACES]; /* size of the allocation beginning at each place */
  unsigned char taken[PLACES];
  unsigned char is_had[PLACES];
} blocks[DEVICES][BLOCKS];

static const unsigned long long base = 0x7f0000000000;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

static __thread int current;
static __thread const void* context; /* NULL: the device's primary context */
static void (*when_gone)(void);

static struct device {
  long long taken; /* units of the blocks and of all other memory */
  long long limit; /* 0: no check */
  long long most;
} devices[DEVICES];
static int faults;

/* --- checks of the limits --- */

int packing_device(void) {
  return current;
}

const void* packing_context(void) {
  return context;
}

void packing_lock(void) {
  pthread_mutex_lock(&mutex);
}

static void fault(const char* what, int device) {
  if (faults++ < 8) {
    fprintf(stderr, "packing: %s: %lld units of device %d are taken, %lld by calls that are not done\n", what,
            devices[device].taken, device, packing_growth(device));
  }
}

void packing_misused(const char* what) {
  fault(what, current);
}

/* Returns the units of blocks without an allocation given to the program. A small allocation may take a block before
 * the charge, and the driver reports a pitch only after the call. The check ignores such a block until the end of the
 * call, or until another allocation of the block is given to the program. */
static long long blocks_that_nobody_has(int device) {
  long long units = 0;
  for (int i = 0; i < BLOCKS; i++) {
    const struct block* block = &blocks[device][i];
    if (block->had != 0) continue;
    if (block->count != 0) units++;
    if (block->is_longer) units += (long long)units_of(block->large_bytes);
  }
  return units;
}

static void look(int device) {
  const struct device* each = &devices[device];
  if (each->taken > devices[device].most) devices[device].most = each->taken;
  if (each->limit == 0 || each->taken <= each->limit) return;
  if (each->taken - packing_growth(device) - blocks_that_nobody_has(device) > each->limit)
    fault("the limit is passed", device);
}

void packing_unlock(void) {
  for (int i = 0; i < DEVICES; i++) look(i);
  pthread_mutex_unlock(&mutex);
}

int packing_take(int device, long long units) {
  struct device* each = &devices[device];
  if (units > 0 && each->taken + units > BLOCKS) return NO_MEMORY;
  each->taken += units;
  return OK;
}

/* The program sets the limit of each device. */
PUBLIC void packing_limit(long long units) {
  for (int i = 0; i < DEVICES; i++) devices[i].limit = units;
}

/* Returns the taken units of the first device. */
PUBLIC int packing_blocks(void) {
  packing_lock();
  const int units = (int)devices[0].taken;
  packing_unlock();
  return units;
}

PUBLIC int packing_taken(int device) {
  packing_lock();
  const int units = (int)devices[device].taken;
  packing_unlock();
  return units;
}

PUBLIC int packing_most(int device) {
  return (int)devices[device].most;
}

PUBLIC int packing_faults(void) {
  return faults;
}

static struct block* block_of(unsigned long long address, int* device, int* place) {
  const unsigned long long number = (address - base) / UNIT;
  if (address < base || number >= (unsigned long long)DEVICES * BLOCKS) return NULL;
  *device = (int)(number / BLOCKS);
  *place = (int)((address - base) % UNIT / PLACE);
  return &blocks[*device][number % BLOCKS];
}

/* Marks the beginning of the thread's call, or its end with the address given to the program; 0: none. */
PUBLIC void packing_begin(const char* kind) {
  packing_lock();
  packing_call_begins(kind);
  packing_unlock();
}

PUBLIC void packing_done(unsigned long long address) {
  int device;
  int place;
  packing_lock();
  struct block* block = block_of(address, &device, &place);
  if (block != NULL) {
    block->is_had[place] = 1;
    block->had++;
  }
  packing_call_is_done(block != NULL ? 0 : address);
  packing_unlock();
}

/* --- devices --- */

PUBLIC int cuInit(unsigned int flags) {
  return (int)flags;
}

PUBLIC int cuDevicePrimaryCtxRetain(void** primary, int device) {
  if (device < 0 || device >= DEVICES) return INVALID;
  *primary = &devices[device];
  return OK;
}

PUBLIC int cuCtxSetCurrent(void* primary) {
  if (primary == NULL) return INVALID;
  current = (int)((struct device*)primary - devices);
  context = NULL;
  return OK;
}

PUBLIC int cuCtxGetCurrent(const void** of_thread) {
  *of_thread = context != NULL ? context : &devices[current];
  return OK;
}

PUBLIC int cuCtxGetDevice(int* device) {
  *device = current;
  return OK;
}

PUBLIC int cuDeviceGetUuid_v2(char* uuid, int device) {
  memset(uuid, 0x11 * (device + 1), 16); /* GPU-11111111-..., GPU-22222222-... */
  return OK;
}

PUBLIC int cuMemGetInfo_v2(size_t* left, size_t* total) {
  *total = (size_t)BLOCKS * UNIT;
  *left = *total - (size_t)packing_taken(current) * UNIT;
  return OK;
}

PUBLIC int cuDeviceTotalMem_v2(size_t* bytes, int device) {
  *bytes = (size_t)BLOCKS * UNIT;
  return device < 0 || device >= DEVICES ? INVALID : OK;
}

/* Sets the program's stand-in for another thread: called after an unmapping or a context's destruction. */
PUBLIC void packing_when_gone(void (*function)(void)) {
  when_gone = function;
}

void packing_gone(void) {
  if (when_gone != NULL) when_gone();
}

/* --- memory with an address; helpers need the lock --- */

static unsigned long long address_at(int device, int block, int place) {
  return base + ((unsigned long long)device * BLOCKS + (unsigned long long)block) * UNIT +
         (unsigned long long)place * PLACE;
}

static int take_large(unsigned long long* address, size_t bytes, int is_longer) {
  const unsigned long long wanted = units_of(bytes);
  struct block* const all = blocks[current];
  for (int first = 0; first + (long long)wanted <= BLOCKS; first++) {
    unsigned long long found = 0;
    while (found < wanted && !all[first + (int)found].is_large && all[first + (int)found].count == 0) found++;
    if (found < wanted) continue;
    if (packing_take(current, (long long)wanted) != OK) return NO_MEMORY;
    for (unsigned long long i = 0; i < wanted; i++) all[first + (int)i].is_large = 1;
    all[first].large_bytes = bytes;
    all[first].is_longer = is_longer;
    all[first].context = context;
    *address = address_at(current, first, 0);
    return OK;
  }
  return NO_MEMORY;
}

static int take_small(unsigned long long* address, size_t bytes) {
  const int wanted = (int)((bytes + PLACE - 1) / PLACE);
  for (int i = 0; i < BLOCKS; i++) {
    struct block* const block = &blocks[current][i];
    if (block->is_large) continue;
    for (int first = 0; first + wanted <= PLACES; first++) {
      int found = 0;
      while (found < wanted && !block->taken[first + found]) found++;
      if (found < wanted) {
        first += found;
        continue;
      }
      if (block->count == 0 && packing_take(current, 1) != OK) return NO_MEMORY;
      block->count++;
      memset(&block->taken[first], 1, (size_t)wanted);
      block->bytes[first] = (unsigned int)bytes;
      *address = address_at(current, i, first);
      return OK;
    }
  }
  return NO_MEMORY;
}

static int take(unsigned long long* address, size_t bytes, int is_longer) {
  if (bytes == 0) return INVALID;
  packing_lock();
  const int error = bytes >= SMALL ? take_large(address, bytes, is_longer) : take_small(address, bytes);
  packing_unlock();
  return error;
}

static int give(unsigned long long address) {
  int device;
  int place;
  struct block* const block = block_of(address, &device, &place);
  if (block == NULL) return INVALID;
  if (block->is_large) {
    const unsigned long long units = units_of(block->large_bytes);
    packing_take(device, -(long long)units);
    for (unsigned long long i = 0; i < units; i++) block[i].is_large = 0;
    block->large_bytes = 0;
    block->is_longer = 0;
  } else if (block->taken[place]) {
    memset(&block->taken[place], 0, (block->bytes[place] + PLACE - 1) / PLACE);
    if (--block->count == 0) packing_take(device, -1);
  } else {
    return INVALID;
  }
  block->had -= block->is_had[place];
  block->is_had[place] = 0;
  return OK;
}

PUBLIC int cuMemAlloc_v2(unsigned long long* address, size_t bytes) {
  return take(address, bytes, 0);
}

PUBLIC int cuMemAllocManaged(unsigned long long* address, size_t bytes, unsigned int flags) {
  return flags == 0 ? INVALID : take(address, bytes, 0);
}

/* Rows are longer than a program can know. */
PUBLIC int cuMemAllocPitch_v2(unsigned long long* address, size_t* pitch, size_t width, size_t height,
                              unsigned int element) {
  *pitch = (width + PLACE - 1) / PLACE * PLACE + PLACE;
  return element == 0 ? INVALID : take(address, *pitch * height, 1);
}

PUBLIC int cuMemFree_v2(unsigned long long address) {
  packing_lock();
  const int error = give(address);
  packing_unlock();
  return error;
}

/* --- contexts: one reused context for each device beside the primary one. Its end frees large memory and arrays --- */

PUBLIC int cuCtxCreate_v2(const void** made, unsigned int flags, int device) {
  if (device < 0 || device >= DEVICES || flags != 0) return INVALID;
  current = device;
  context = *made = blocks[device];
  return OK;
}

PUBLIC int cuCtxDestroy_v2(const void* gone) {
  packing_lock();
  for (int i = 0; i < DEVICES * BLOCKS; i++) {
    const struct block* const block = &blocks[i / BLOCKS][i % BLOCKS];
    if (block->large_bytes != 0 && block->context == gone) give(address_at(i / BLOCKS, i % BLOCKS, 0));
  }
  packing_free_arrays(gone);
  packing_unlock();
  packing_gone();
  return OK;
}
