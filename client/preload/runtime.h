/* SPDX-License-Identifier: Apache-2.0
 *
 * C library functions for dynamic linking and threads, found at run time: their place and version changed with glibc
 * 2.34, and this library exports some of the names itself. All return NULL or fail if the process lacks the function.
 */
#ifndef VRAMBROKER_CLIENT_PRELOAD_RUNTIME_H_
#define VRAMBROKER_CLIENT_PRELOAD_RUNTIME_H_

#include <stdint.h>

typedef void* dlsym_function(void* handle, const char* name);
typedef void* dlvsym_function(void* handle, const char* name, const char* version);

/* Like strcmp() == 0, for the way of dlsym. */
int is_same_text(const char* left, const char* right);

/* Return the functions after this library's own: from another preloaded library, or from the C library. */
dlsym_function* next_dlsym(void);
dlvsym_function* next_dlvsym(void);

/* Calls the C library's dlsym from this library. */
void* find_symbol(void* handle, const char* name);
/* Finds a function of the C library, or of an interposer behind this library. */
void* find_next(const char* name);
/* Returns a handle keeping the named library loaded. NULL: not loaded in the main namespace. */
void* loaded_library(const char* name);
/* Returns a handle keeping loaded the file at `address`, in any namespace, or NULL. The file's name without the folder
 * must begin with `name`. */
void* library_at(const void* address, const char* name);
/* Clears the pending dlerror() message. */
void clear_dlerror(void);

/* Starts a detached thread with signals blocked. 0: it runs. */
int start_thread(void* (*function)(void*));
/* Returns whether all of the program's threads have ended, including the main thread. The thread of start_thread() then
 * exits, or the process would never end; unblock_signals() first sets the program's signal mask. */
int is_last_thread(void);
void unblock_signals(void);

/* Between calm_begin() and calm_end() the thread cannot be cancelled and runs no signal handler. calm_end() restores
 * the program's errno. A handler could leave by siglongjmp(), and a lock would stay held. */
struct calm {
  int error;
  int cancelling;
};
struct calm calm_begin(void);
void calm_end(struct calm calm);

enum { INTERRUPTED = -3 };
enum holding { NO_LOCK, A_LOCK };
/* Waits for readable data, or for the peer to close; descriptor -1: none. 1: readable. 0: timeout. INTERRUPTED: the
 * thread gets a signal asking a program to end, such as Ctrl-C. With NO_LOCK the program's handlers run during the
 * wait. With A_LOCK handlers run afterwards; a signal taken by another thread is not noticed. */
int wait_calmly(int descriptor, uint64_t milliseconds, enum holding holding);
/* Returns whether this thread's wait was interrupted just now. A program trying again at once need not wait again. */
int was_interrupted(void);

uint64_t now_ms(void); /* by the monotonic clock */
void sleep_ms(uint64_t milliseconds);
/* Identity of a file, as from fstat(). file_of_descriptor() returns 0 for an open descriptor. */
struct file {
  uint64_t device;
  uint64_t inode;
  uint32_t mode;
};
int file_of_descriptor(int descriptor, struct file* file);
int is_same_file(const struct file* one, const struct file* other);

#endif /* VRAMBROKER_CLIENT_PRELOAD_RUNTIME_H_ */
