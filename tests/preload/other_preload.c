// SPDX-License-Identifier: Apache-2.0
//
// A foreign LD_PRELOAD library in front of dlsym, like a profiler. Reports a question for cuInit on standard error.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#ifdef __x86_64__
#define OLDEST_VERSION "GLIBC_2.2.5"
#else
#define OLDEST_VERSION "GLIBC_2.17"
#endif

#define PUBLIC __attribute__((visibility("default")))

PUBLIC void* dlsym(void* handle, const char* name) {
  static void* (*next)(void*, const char*);
  if (next == NULL) next = dlvsym(RTLD_NEXT, "dlsym", OLDEST_VERSION);
  if (strcmp(name, "cuInit") == 0) (void)!write(STDERR_FILENO, "other library: dlsym\n", 21);
  return next(handle, name);
}

/* A function of this library alone. The function's question for the next getpid gets the C library's getpid. */
PUBLIC int getpid_of_other(void) {
  int (*next)(void) = dlsym(RTLD_NEXT, "getpid");
  return next();
}

/* A function outside the driver. Programs must get this library's function. */
PUBLIC int cudnnCreate(void** handle) {
  *handle = NULL;
  return 77;
}
