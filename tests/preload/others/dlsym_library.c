// SPDX-License-Identifier: Apache-2.0
//
// A foreign LD_PRELOAD library in front of dlsym, like an overlay or a profiler. Asks dlvsym for the oldest version of
// the next dlsym, and counts the calls. Reports the number at the program's end, if DLSYM_LIBRARY_REPORT is set.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

#ifdef __x86_64__
#define OLDEST "GLIBC_2.2.5"
#else
#define OLDEST "GLIBC_2.17"
#endif
/* Every later C library still has the oldest version. */
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
