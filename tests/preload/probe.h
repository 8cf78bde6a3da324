// SPDX-License-Identifier: Apache-2.0
//
// The driver as a program sees it: not by the declarations of what is tested.
#ifndef VRAMBROKER_TESTS_PRELOAD_PROBE_H_
#define VRAMBROKER_TESTS_PRELOAD_PROBE_H_

#include <stddef.h>

/* F(function, as cuGetProcAddress has it, of which version, its arguments) */
#define PROBE_FUNCTIONS(F)                                                                                         \
  F(cuInit, "cuInit", 2000, (unsigned int flags))                                                                  \
  F(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain", 7000, (void** context, int device))                      \
  F(cuCtxSetCurrent, "cuCtxSetCurrent", 4000, (void* context))                                                     \
  F(cuMemGetInfo_v2, "cuMemGetInfo", 3020, (size_t * left, size_t * total))                                        \
  F(cuDeviceTotalMem_v2, "cuDeviceTotalMem", 3020, (size_t * bytes, int device))                                   \
  F(cuMemAlloc_v2, "cuMemAlloc", 3020, (unsigned long long* address, size_t bytes))                                \
  F(cuMemAllocPitch_v2, "cuMemAllocPitch", 3020,                                                                   \
    (unsigned long long* address, size_t* pitch, size_t width, size_t height, unsigned int element))               \
  F(cuMemAllocManaged, "cuMemAllocManaged", 6000, (unsigned long long* address, size_t bytes, unsigned int flags)) \
  F(cuMemFree_v2, "cuMemFree", 3020, (unsigned long long address))

#define FUNCTION(name, base, version, arguments) int(*name) arguments;
struct driver {
  PROBE_FUNCTIONS(FUNCTION)
};
#undef FUNCTION
#ifdef PROBE_LINKED
#define FUNCTION(name, base, version, arguments) extern int name arguments;
PROBE_FUNCTIONS(FUNCTION)
#undef FUNCTION
#endif

extern struct driver driver;

/* Allocates and frees by kind (probe_kinds.c), and prints the error. */
void probe_kinds(const char* word, const char* first, const char* second);

#endif  // VRAMBROKER_TESTS_PRELOAD_PROBE_H_
