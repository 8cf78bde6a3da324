// SPDX-License-Identifier: Apache-2.0
//
// Somebody else's LD_PRELOAD library that puts itself before dlsym, as overlays and profilers do: it asks dlvsym for
// the next dlsym by its oldest version, counts what it passes on, and says so when the program ends.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

#ifdef __x86_64__
#define OLDEST "GLIBC_2.2.5"
#else
#define OLDEST "GLIBC_2.17"
#endif
/* Of every C library since. */
__asm__(".symver dlvsym,dlvsym@" OLDEST);

static int calls;

__attribute__((visibility("default"))) void* dlsym(void* handle, const char* name) {
  static void* (*next)(void*, const char*);
  if (next == NULL) next = (void* (*)(void*, const char*))dlvsym(RTLD_NEXT, "dlsym", OLDEST);
  calls++;
  return next(handle, name);
}

__attribute__((destructor)) static void report(void) {
  if (getenv("DLSYM_LIBRARY_REPORT") != NULL) fprintf(stderr, "dlsym_library: %d calls\n", calls);
}
