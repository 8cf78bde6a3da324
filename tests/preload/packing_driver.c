// SPDX-License-Identifier: Apache-2.0
//
// A libcuda.so.1 that puts small allocations together, as NVIDIA's does: into blocks of 2 MiB, first fit, and gives a
// block back when nothing is in it. It has little else, and one device.
#include <pthread.h>
#include <string.h>

#define PUBLIC __attribute__((visibility("default")))

enum { UNIT = 2 << 20, PLACES = UNIT / 512, BLOCKS = 64, LARGE = 1 << 20 };

static struct {
  int is_large;
  unsigned int bytes[PLACES]; /* of what begins there */
  unsigned char taken[PLACES];
  unsigned long long large_bytes;
} blocks[BLOCKS];

static const unsigned long long base = 0x7f0000000000;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

PUBLIC int cuInit(unsigned int flags) {
  return (int)flags;
}

PUBLIC int cuDevicePrimaryCtxRetain(void** context, int device) {
  *context = &blocks;
  return device;
}

PUBLIC int cuCtxSetCurrent(void* context) {
  return context == NULL;
}

PUBLIC int cuCtxGetCurrent(void** context) {
  *context = &blocks;
  return 0;
}

PUBLIC int cuCtxGetDevice(int* device) {
  *device = 0;
  return 0;
}

PUBLIC int cuDeviceGetUuid_v2(char* uuid, int device) {
  memset(uuid, 0x11, 16); /* GPU-11111111-... */
  return device;
}

static int is_empty(int block) {
  if (blocks[block].is_large) return 0;
  for (int i = 0; i < PLACES; i++) {
    if (blocks[block].taken[i]) return 0;
  }
  return 1;
}

/* How many blocks it has taken. */
PUBLIC int packing_blocks(void) {
  int used = 0;
  pthread_mutex_lock(&mutex);
  for (int i = 0; i < BLOCKS; i++) used += !is_empty(i);
  pthread_mutex_unlock(&mutex);
  return used;
}

PUBLIC int cuMemGetInfo_v2(size_t* left, size_t* total) {
  *total = (size_t)BLOCKS * UNIT;
  *left = *total - (size_t)packing_blocks() * UNIT;
  return 0;
}

PUBLIC int cuDeviceTotalMem_v2(size_t* bytes, int device) {
  *bytes = (size_t)BLOCKS * UNIT;
  return device;
}

static int take_large(unsigned long long* address, size_t bytes) {
  const int wanted = (int)((bytes + UNIT - 1) / UNIT);
  for (int first = 0; first + wanted <= BLOCKS; first++) {
    int free_blocks = 0;
    while (free_blocks < wanted && is_empty(first + free_blocks)) free_blocks++;
    if (free_blocks < wanted) continue;
    for (int i = 0; i < wanted; i++) blocks[first + i].is_large = 1;
    blocks[first].large_bytes = bytes;
    *address = base + (unsigned long long)first * UNIT;
    return 0;
  }
  return 2;
}

static int take_small(unsigned long long* address, size_t bytes) {
  const int wanted = (int)((bytes + 511) / 512);
  for (int block = 0; block < BLOCKS; block++) {
    if (blocks[block].is_large) continue;
    for (int first = 0; first + wanted <= PLACES; first++) {
      int free_places = 0;
      while (free_places < wanted && !blocks[block].taken[first + free_places]) free_places++;
      if (free_places < wanted) {
        first += free_places;
        continue;
      }
      memset(&blocks[block].taken[first], 1, (size_t)wanted);
      blocks[block].bytes[first] = (unsigned int)bytes;
      *address = base + (unsigned long long)block * UNIT + (unsigned long long)first * 512;
      return 0;
    }
  }
  return 2;
}

PUBLIC int cuMemAlloc_v2(unsigned long long* address, size_t bytes) {
  if (bytes == 0) return 1;
  pthread_mutex_lock(&mutex);
  const int error = bytes >= LARGE ? take_large(address, bytes) : take_small(address, bytes);
  pthread_mutex_unlock(&mutex);
  return error;
}

static int give(unsigned long long address) {
  const int block = (int)((address - base) / UNIT);
  const int first = (int)((address - base) % UNIT / 512);
  if (address < base || block >= BLOCKS) return 1;
  if (blocks[block].is_large) {
    const int count = (int)((blocks[block].large_bytes + UNIT - 1) / UNIT);
    for (int i = 0; i < count; i++) blocks[block + i].is_large = 0;
    return 0;
  }
  memset(&blocks[block].taken[first], 0, (blocks[block].bytes[first] + 511) / 512);
  return 0;
}

PUBLIC int cuMemFree_v2(unsigned long long address) {
  pthread_mutex_lock(&mutex);
  const int error = give(address);
  pthread_mutex_unlock(&mutex);
  return error;
}
