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
/* Whether all of the program's threads have ended, the main one included. The thread that start_thread() has started
   leaves then, or the process would never end; with the signals that the program has. */
int is_last_thread(void);
void unblock_signals(void);

/* Between the two the thread cannot be cancelled, no signal handler runs in it, and errno is the program's again
 * afterwards. A handler could leave by siglongjmp(), and a lock would stay. */
struct calm {
  int error;
  int cancelling;
};
struct calm calm_begin(void);
void calm_end(struct calm calm);

enum { INTERRUPTED = -3 };
enum holding { NO_LOCK, A_LOCK };
/* Waits for something to read, or for the other end to go; -1 is no descriptor. 1: there is something. 0: the time is
 * over. INTERRUPTED: the thread gets a signal that asks a program to end, as Ctrl-C does. With NO_LOCK the program's
 * handlers run meanwhile. With A_LOCK they run afterwards; a signal that another thread takes is not noticed. */
int wait_calmly(int descriptor, uint64_t milliseconds, enum holding holding);
/* This thread's wait has been interrupted just now. A program that tries again at once need not wait again. */
int was_interrupted(void);

uint64_t now_ms(void); /* by the clock that nobody sets */
void sleep_ms(uint64_t milliseconds);
/* Of a file, as fstat() says. 0: it is open. */
struct file {
  uint64_t device;
  uint64_t inode;
  uint32_t mode;
};
int file_of_descriptor(int descriptor, struct file* file);
int is_same_file(const struct file* one, const struct file* other);

#endif /* VRAMBROKER_CLIENT_PRELOAD_RUNTIME_H_ */
