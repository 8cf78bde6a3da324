// SPDX-License-Identifier: Apache-2.0
//
// A driver in plain C with calls of no cost. Replaces the substitute where older C libraries cannot load the
// substitute, and measures the cost of the code in front of a driver. Has one GPU with the UUID of the substitute's
// first GPU. Counts no memory, and refuses none. Places addresses like the real driver: in blocks of 2 MiB, with small
// allocations together. Supports one thread only.
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define EXPORTED __attribute__((visibility("default")))

enum { OK = 0, INVALID_VALUE = 1, INVALID_CONTEXT = 201, NOT_FOUND = 500 };

static const uint64_t block = UINT64_C(2) << 20;
static uint64_t next_block = UINT64_C(0x7f0000000000);
static uint64_t small_block; /* block of small allocations; 0: none yet */
static uint64_t small_used;
static uint64_t small_live;
static int has_context;

EXPORTED int cuInit(unsigned int flags) {
  return flags == 0 ? OK : INVALID_VALUE;
}

EXPORTED int cuDriverGetVersion(int* version) {
  *version = 13000;
  return OK;
}

EXPORTED int cuDeviceGetCount(int* count) {
  *count = 1;
  return OK;
}

EXPORTED int cuDeviceGet(int* device, int ordinal) {
  *device = 0;
  return ordinal == 0 ? OK : INVALID_VALUE;
}

EXPORTED int cuDeviceGetUuid_v2(void* uuid, int device) {
  memcpy(uuid, "substitute GPU 0", 16);
  return device == 0 ? OK : INVALID_VALUE;
}

EXPORTED int cuDeviceTotalMem_v2(size_t* bytes, int device) {
  *bytes = (size_t)256 << 30;
  return device == 0 ? OK : INVALID_VALUE;
}

EXPORTED int cuDevicePrimaryCtxRetain(void** context, int device) {
  *context = &has_context;
  return device == 0 ? OK : INVALID_VALUE;
}

EXPORTED int cuCtxSetCurrent(void* context) {
  has_context = context != NULL;
  return OK;
}

EXPORTED int cuCtxGetCurrent(void** context) {
  *context = has_context ? &has_context : NULL;
  return OK;
}

EXPORTED int cuCtxGetDevice(int* device) {
  *device = 0;
  return has_context ? OK : INVALID_CONTEXT;
}

EXPORTED int cuMemGetInfo_v2(size_t* left, size_t* total) {
  *left = *total = (size_t)256 << 30;
  return has_context ? OK : INVALID_CONTEXT;
}

static uint64_t small_address(uint64_t bytes) {
  if (small_block == 0 || small_used + bytes > block) {
    small_block = next_block;
    small_used = 0;
    next_block += block;
  }
  const uint64_t address = small_block + small_used;
  small_used += bytes;
  small_live++;
  return address;
}

EXPORTED int cuMemAlloc_v2(uint64_t* address, size_t bytes) {
  if (!has_context) return INVALID_CONTEXT;
  if (bytes == 0) return INVALID_VALUE;
  if (bytes < (1 << 20)) {
    *address = small_address((bytes + 511) / 512 * 512);
  } else {
    *address = next_block;
    next_block += (bytes + block - 1) / block * block;
  }
  return OK;
}

EXPORTED int cuMemFree_v2(uint64_t address) {
  if (address / block == small_block / block && --small_live == 0) small_used = 0;
  return has_context ? OK : INVALID_CONTEXT;
}

/* The first functions have 32 bits, and a different interface under the base name. */
EXPORTED int cuMemAlloc(uint32_t* address, unsigned int bytes) {
  *address = 0;
  return bytes == 0 ? INVALID_VALUE : NOT_FOUND;
}

EXPORTED int cuMemFree(uint32_t address) {
  return address == 0 ? OK : INVALID_VALUE;
}

EXPORTED int cuGetProcAddress_v2(const char* symbol, void** function, int version, uint64_t flags, int* status);

EXPORTED int cuGetProcAddress(const char* symbol, void** function, int version, uint64_t flags) {
  void* found = NULL;
  const int error = cuGetProcAddress_v2(symbol, &found, version, flags, NULL);
  if (error == OK && found != NULL) *function = found;
  return error == OK && found == NULL ? NOT_FOUND : error;
}

EXPORTED int cuGetProcAddress_v2(const char* symbol, void** function, int version, uint64_t flags, int* status) {
  static const struct {
    const char* base;
    int version;
    void* function;
  } symbols[] = {
      /* newest version first */
      {"cuInit", 2000, (void*)cuInit},
      {"cuDriverGetVersion", 2020, (void*)cuDriverGetVersion},
      {"cuDeviceGetCount", 2000, (void*)cuDeviceGetCount},
      {"cuDeviceGet", 2000, (void*)cuDeviceGet},
      {"cuDeviceGetUuid", 11040, (void*)cuDeviceGetUuid_v2},
      {"cuDeviceTotalMem", 3020, (void*)cuDeviceTotalMem_v2},
      {"cuDevicePrimaryCtxRetain", 7000, (void*)cuDevicePrimaryCtxRetain},
      {"cuCtxSetCurrent", 4000, (void*)cuCtxSetCurrent},
      {"cuCtxGetCurrent", 4000, (void*)cuCtxGetCurrent},
      {"cuCtxGetDevice", 2000, (void*)cuCtxGetDevice},
      {"cuMemGetInfo", 3020, (void*)cuMemGetInfo_v2},
      {"cuMemAlloc", 3020, (void*)cuMemAlloc_v2},
      {"cuMemAlloc", 2000, (void*)cuMemAlloc},
      {"cuMemFree", 3020, (void*)cuMemFree_v2},
      {"cuMemFree", 2000, (void*)cuMemFree},
      {"cuGetProcAddress", 12000, (void*)cuGetProcAddress_v2},
      {"cuGetProcAddress", 11030, (void*)cuGetProcAddress},
  };
  int found = 1; /* CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND */
  *function = NULL;
  for (size_t i = 0; i < sizeof symbols / sizeof *symbols && *function == NULL; i++) {
    if (strcmp(symbol, symbols[i].base) != 0) continue;
    found = version < 0 || symbols[i].version <= version ? 0 : 2 /* CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT */;
    if (found == 0) *function = symbols[i].function;
  }
  if (status != NULL) *status = found;
  return flags <= 3 ? OK : INVALID_VALUE;
}
