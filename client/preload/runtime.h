/* SPDX-License-Identifier: Apache-2.0
 *
 * The C library's functions for dynamic linking and threads, found at run time: their place and version changed with
 * glibc 2.34, and this library has names of some of them itself. All return NULL or fail where the process has no such
 * function.
 */
#ifndef VRAMBROKER_CLIENT_PRELOAD_RUNTIME_H_
#define VRAMBROKER_CLIENT_PRELOAD_RUNTIME_H_

#include <stdint.h>

typedef void* dlsym_function(void* handle, const char* name);
typedef void* dlvsym_function(void* handle, const char* name, const char* version);

/* As strcmp() == 0, for the way of dlsym. */
int is_same_text(const char* left, const char* right);

/* The next ones after this library's own: another preloaded library's, or the C library's. */
dlsym_function* next_dlsym(void);
dlvsym_function* next_dlvsym(void);

/* The C library's dlsym, as called from here. */
void* find_symbol(void* handle, const char* name);
/* A function of the C library, or what stands before it behind this library. */
void* find_next(const char* name);
/* A handle of the loaded library of this name, which keeps it loaded. NULL: it is not in the main namespace. */
void* loaded_library(const char* name);
/* The loaded file that `address` is in, whatever its namespace: its name without the folder begins with `name`. A
   handle, which keeps it loaded, or NULL. */
void* library_at(const void* address, const char* name);
/* Of what dlerror() would say next: nothing. */
void clear_dlerror(void);

/* A detached thread without signals. 0: it runs. */
int start_thread(void* (*function)(void*));

/* Between the two the thread cannot be cancelled, and errno is the program's again afterwards. */
struct calm {
  int error;
  int cancelling;
};
struct calm calm_begin(void);
void calm_end(struct calm calm);

#endif /* VRAMBROKER_CLIENT_PRELOAD_RUNTIME_H_ */
