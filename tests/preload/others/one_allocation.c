// SPDX-License-Identifier: Apache-2.0
//
// one_allocation DRIVER BYTES: loads the driver, allocates, and prints the driver's answer. Built as a normal program,
// with AddressSanitizer, with ThreadSanitizer, and as a static program. The static program contains the driver, because
// no dynamic linker loads a library.
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef STATIC_PROGRAM
int cuInit(unsigned int flags);
int cuDevicePrimaryCtxRetain(void** context, int device);
int cuCtxSetCurrent(void* context);
int cuMemAlloc_v2(unsigned long long* address, size_t bytes);
#define FIND(name) function = (void*)name
#else
#define FIND(name) function = dlsym(library, #name)
#endif

int main(int argc, char** argv) {
  void* library = NULL;
  void* function = NULL;
  void* context = NULL;
  unsigned long long address = 0;
  int (*init)(unsigned int);
  int (*retain)(void**, int);
  int (*set_current)(void*);
  int (*allocate)(unsigned long long*, size_t);
  if (argc != 3) return 1;
#ifndef STATIC_PROGRAM
  library = dlopen(argv[1], RTLD_NOW);
  if (library == NULL) return fprintf(stderr, "%s\n", dlerror()), 1;
#endif
  (void)library;
  FIND(cuInit);
  memcpy(&init, &function, sizeof function);
  FIND(cuDevicePrimaryCtxRetain);
  memcpy(&retain, &function, sizeof function);
  FIND(cuCtxSetCurrent);
  memcpy(&set_current, &function, sizeof function);
  FIND(cuMemAlloc_v2);
  memcpy(&allocate, &function, sizeof function);
  if (init(0) != 0 || retain(&context, 0) != 0 || set_current(context) != 0) return 1;
  printf("%d\n", allocate(&address, strtoull(argv[2], NULL, 10)));
  return 0;
}
