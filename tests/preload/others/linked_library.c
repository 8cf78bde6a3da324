// SPDX-License-Identifier: Apache-2.0
//
// A library linked to the driver, like libcublas and libnccl. Programs load the library at run time.
#include <stddef.h>
#include <stdint.h>

#define FORWARD(name, parameters, arguments)                            \
  extern int name parameters;                                           \
  __attribute__((visibility("default"))) int linked_##name parameters { \
    return name arguments;                                              \
  }

FORWARD(cuInit, (unsigned int flags), (flags))
FORWARD(cuDevicePrimaryCtxRetain, (void** context, int device), (context, device))
FORWARD(cuCtxSetCurrent, (void* context), (context))
FORWARD(cuMemGetInfo_v2, (size_t * left, size_t* total), (left, total))
FORWARD(cuMemAlloc_v2, (uint64_t * address, size_t bytes), (address, bytes))
FORWARD(cuMemFree_v2, (uint64_t address), (address))
