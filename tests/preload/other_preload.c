// SPDX-License-Identifier: Apache-2.0
//
// Another library of LD_PRELOAD, of somebody else: it stands before dlsym and one function of the driver, as profilers
// do, and says on standard error that it was asked.
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

/* What it shares with nobody: a caller that asks for the next one gets the C library's. */
PUBLIC int getpid_of_other(void) {
  int (*next)(void) = dlsym(RTLD_NEXT, "getpid");
  return next();
}

/* Not the driver's: programs that look for this are not to get anything else. */
PUBLIC int cudnnCreate(void** handle) {
  *handle = NULL;
  return 77;
}
