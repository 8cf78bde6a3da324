/* SPDX-License-Identifier: Apache-2.0 */
#include "client/preload/runtime.h"

#include <dlfcn.h>
#include <elf.h>
#include <errno.h>
#include <fcntl.h>
#include <link.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* --- The C library's dlsym, found in its symbol table: lookups work only once dlsym is found. --- */

/* A sanitizer's runtime asks dlsym for functions intercepted by the sanitizer, strcmp and dl_iterate_phdr among them.
 * So the way of dlsym calls no function open to interception. */

int is_same_text(const char* left, const char* right) {
  while (*left != '\0' && *left == *right) {
    left++;
    right++;
  }
  return *left == *right;
}

static const char* file_of(const char* path) {
  const char* file = path;
  for (; *path != '\0'; path++) {
    if (*path == '/') file = path + 1;
  }
  return file;
}

static uint32_t gnu_hash(const char* name) {
  uint32_t hash = 5381;
  for (; *name != '\0'; name++) hash = hash * 33 + (unsigned char)*name;
  return hash;
}

static void* in_table(uintptr_t base, const ElfW(Dyn) * dynamic, const char* name) {
  const ElfW(Sym)* symbols = NULL;
  const char* strings = NULL;
  const uint32_t* hashes = NULL;
  for (; dynamic->d_tag != DT_NULL; dynamic++) {
    /* glibc has already added the base to these addresses. */
    const uintptr_t value = dynamic->d_un.d_ptr < base ? dynamic->d_un.d_ptr + base : dynamic->d_un.d_ptr;
    if (dynamic->d_tag == DT_SYMTAB) symbols = (const ElfW(Sym)*)value;
    if (dynamic->d_tag == DT_STRTAB) strings = (const char*)value;
    if (dynamic->d_tag == DT_GNU_HASH) hashes = (const uint32_t*)value;
  }
  if (symbols == NULL || strings == NULL || hashes == NULL) return NULL;
  const uint32_t buckets = hashes[0];
  const uint32_t first = hashes[1];
  const uint32_t* bucket = hashes + 4 + hashes[2] * (sizeof(ElfW(Addr)) / sizeof(uint32_t));
  const uint32_t* chain = bucket + buckets;
  const uint32_t hash = gnu_hash(name);
  uint32_t index = buckets == 0 ? 0 : bucket[hash % buckets];
  if (index < first) return NULL;
  for (;; index++) {
    const uint32_t each = chain[index - first];
    const ElfW(Sym)* symbol = &symbols[index];
    if ((each | 1) == (hash | 1) && symbol->st_shndx != SHN_UNDEF && is_same_text(strings + symbol->st_name, name)) {
      return (void*)(base + symbol->st_value);
    }
    if ((each & 1) != 0) return NULL;
  }
}

static void* in_c_library(const char* name) {
  for (const struct link_map* map = _r_debug.r_map; map != NULL; map = map->l_next) {
    const char* file = file_of(map->l_name);
    /* Before glibc 2.34 these functions were in libdl. */
    if (!is_same_text(file, "libc.so.6") && !is_same_text(file, "libdl.so.2")) continue;
    void* found = in_table(map->l_addr, map->l_ld, name);
    if (found != NULL) return found;
  }
  return NULL;
}

/* Several threads may find the function at once. */
#define FIND_ONCE(type, expression)                           \
  static type* found;                                         \
  type* function = __atomic_load_n(&found, __ATOMIC_RELAXED); \
  if (function == NULL) {                                     \
    function = (type*)(expression);                           \
    __atomic_store_n(&found, function, __ATOMIC_RELAXED);     \
  }                                                           \
  return function

static dlsym_function* c_library_dlsym(void) {
  FIND_ONCE(dlsym_function, in_c_library("dlsym"));
}

void* find_symbol(void* handle, const char* name) {
  dlsym_function* function = c_library_dlsym();
  return function == NULL ? NULL : function(handle, name);
}

void* find_next(const char* name) {
  return find_symbol(RTLD_NEXT, name);
}

dlsym_function* next_dlsym(void) {
  FIND_ONCE(dlsym_function, find_next("dlsym"));
}

dlvsym_function* next_dlvsym(void) {
  FIND_ONCE(dlvsym_function, find_next("dlvsym"));
}

/* --- Libraries --- */

void clear_dlerror(void) {
  char* (*function)(void) = find_next("dlerror");
  if (function != NULL) function();
}

void* loaded_library(const char* name) {
  void* (*function)(const char*, int) = find_next("dlopen");
  if (function == NULL) return NULL;
  void* handle = function(name, RTLD_LAZY | RTLD_NOLOAD);
  if (handle == NULL) clear_dlerror();
  return handle;
}

void* library_at(const void* address, const char* name) {
  int (*dladdr1_function)(const void*, Dl_info*, void**, int) = find_next("dladdr1");
  int (*dlinfo_function)(void*, int, void*) = find_next("dlinfo");
  void* (*dlmopen_function)(Lmid_t, const char*, int) = find_next("dlmopen");
  Dl_info info;
  void* map = NULL;
  if (dladdr1_function == NULL || dlinfo_function == NULL || dlmopen_function == NULL) return NULL;
  if (dladdr1_function(address, &info, &map, RTLD_DL_LINKMAP) == 0 || map == NULL || info.dli_fname == NULL)
    return NULL;
  if (strncmp(file_of(info.dli_fname), name, strlen(name)) != 0) return NULL;
  Lmid_t space = LM_ID_BASE;
  void* handle = NULL;
  if (dlinfo_function(map, RTLD_DI_LMID, &space) == 0)
    handle = dlmopen_function(space, info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
  if (handle == NULL) clear_dlerror();
  return handle;
}

/* --- Threads --- */

enum { LOOK_MS = 100, AGAIN_MS = 1000 };

/* State of a thread. The TLS model suits libraries loaded before the program starts. */
static __thread __attribute__((tls_model("initial-exec"))) struct calm_of_thread {
  int depth;               /* nesting of calm_begin(); 0 again while the program's handlers may run */
  sigset_t signals;        /* signals blocked by the program */
  uint64_t interrupted_at; /* when wait_calmly() was last interrupted; 0: never */
} calm_of_thread;

static sigset_t programs_signals; /* mask of the thread calling start_thread() */

int start_thread(void* (*function)(void*)) {
  int (*create)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*) = find_next("pthread_create");
  int (*detach)(pthread_t) = find_next("pthread_detach");
  int (*set_stack)(pthread_attr_t*, size_t) = find_next("pthread_attr_setstacksize");
  int (*init)(pthread_attr_t*) = find_next("pthread_attr_init");
  if (create == NULL || detach == NULL || set_stack == NULL || init == NULL) {
    clear_dlerror();
    return -1;
  }
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  sigprocmask(SIG_SETMASK, &all, &before);
  programs_signals = calm_of_thread.depth == 0 ? before : calm_of_thread.signals;
  pthread_t thread;
  pthread_attr_t attributes;
  init(&attributes);
  set_stack(&attributes, 256 << 10);
  int error = create(&thread, &attributes, function, NULL);
  if (error != 0)
    error = create(&thread, NULL, function, NULL); /* the thread-local variables of the program need a larger stack */
  if (error == 0) detach(thread);
  sigprocmask(SIG_SETMASK, &before, NULL);
  return error == 0 ? 0 : -1;
}

void unblock_signals(void) {
  sigprocmask(SIG_SETMASK, &programs_signals, NULL);
}

int is_last_thread(void) {
  char text[1024];
  const int descriptor = open("/proc/self/stat", O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) return 0;
  const ssize_t bytes = read(descriptor, text, sizeof text - 1);
  close(descriptor);
  if (bytes <= 0) return 0;
  text[bytes] = '\0';
  /* The command's name may contain any characters. The main thread's state is the third field, the number of threads
   * the 20th; an ended main thread counts. */
  const char* field = strrchr(text, ')');
  if (field == NULL || field[1] != ' ' || field[2] != 'Z') return 0;
  for (int i = 2; i < 20 && field != NULL; i++) field = strchr(field + 1, ' ');
  return field != NULL && strtol(field, NULL, 10) == 2;
}

/* --- Signals --- */

static sigset_t but_faults(void) {
  static const int faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS, SIGABRT};
  sigset_t signals;
  sigfillset(&signals);
  for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) sigdelset(&signals, faults[i]);
  return signals;
}

/* The kernel keeps even ignored signals (as by nohup) while they are blocked. */
static int is_ignored(int signal) {
  struct sigaction action;
  return sigaction(signal, NULL, &action) == 0 && action.sa_handler == SIG_IGN;
}

/* Returns the signals asking the program to end and taken by the thread. */
static sigset_t ends(void) {
  static const int signals[] = {SIGINT, SIGTERM, SIGHUP, SIGQUIT};
  sigset_t taken;
  sigemptyset(&taken);
  for (size_t i = 0; i < sizeof signals / sizeof *signals; i++) {
    if (sigismember(&calm_of_thread.signals, signals[i]) || is_ignored(signals[i])) continue;
    sigaddset(&taken, signals[i]);
  }
  return taken;
}

struct calm calm_begin(void) {
  struct calm calm = {errno, PTHREAD_CANCEL_ENABLE};
  pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &calm.cancelling);
  if (calm_of_thread.depth == 0) {
    const sigset_t signals = but_faults();
    sigprocmask(SIG_BLOCK, &signals, &calm_of_thread.signals);
  }
  calm_of_thread.depth++; /* only now: a handler may have run before */
  return calm;
}

void calm_end(struct calm calm) {
  if (--calm_of_thread.depth == 0) {
    const sigset_t signals = calm_of_thread.signals; /* a copy: a handler running now may change the original */
    sigprocmask(SIG_SETMASK, &signals, NULL);
  }
  pthread_setcancelstate(calm.cancelling, NULL);
  errno = calm.error;
}

/* Looks once, for up to `milliseconds`, like wait_calmly(). */
static int look(int descriptor, int milliseconds, enum holding holding) {
  struct pollfd readable = {descriptor, POLLIN, 0};
  const struct timespec time = {milliseconds / 1000, (long)(milliseconds % 1000) * 1000000};
  if (holding == A_LOCK && poll(&readable, 1, milliseconds) > 0) return 1;
  const sigset_t awaited = ends();
  if (holding == A_LOCK) {
    sigset_t pending;
    sigpending(&pending);
    for (int signal = 1; signal < SIGRTMIN; signal++) {
      if (sigismember(&pending, signal) && sigismember(&awaited, signal)) return INTERRUPTED;
    }
    return 0;
  }
  sigset_t for_ends = but_faults();
  sigset_t for_others = calm_of_thread.signals;
  for (int signal = 1; signal < SIGRTMIN; signal++) {
    if (!sigismember(&awaited, signal)) continue;
    sigdelset(&for_ends, signal);
    sigaddset(&for_others, signal);
  }
  /* A handler may allocate, or never return. */
  const struct calm_of_thread before = calm_of_thread;
  calm_of_thread.depth = 0;
  const int found = ppoll(&readable, 1, &time, &for_ends);
  const int error = errno;
  sigset_t calm;
  sigprocmask(SIG_SETMASK, &for_others, &calm);
  sigprocmask(SIG_SETMASK, &calm, NULL);
  calm_of_thread = before;
  if (found > 0) return 1;
  return found < 0 && error == EINTR ? INTERRUPTED : 0;
}

int wait_calmly(int descriptor, uint64_t milliseconds, enum holding holding) {
  const uint64_t until = now_ms() + milliseconds;
  for (;;) {
    const uint64_t now = now_ms();
    const uint64_t left = now < until ? until - now : 0;
    if (calm_of_thread.depth == 0) { /* a thread of this library */
      struct pollfd readable = {descriptor, POLLIN, 0};
      return poll(&readable, 1, (int)left) > 0;
    }
    const int found = look(descriptor, left > LOOK_MS ? LOOK_MS : (int)left, holding);
    if (found == INTERRUPTED) calm_of_thread.interrupted_at = now_ms();
    if (found != 0 || left == 0) return found;
  }
}

int was_interrupted(void) {
  return calm_of_thread.interrupted_at != 0 && now_ms() - calm_of_thread.interrupted_at < AGAIN_MS;
}

/* --- Time and files --- */

uint64_t now_ms(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
}

void sleep_ms(uint64_t milliseconds) {
  const struct timespec pause = {(time_t)(milliseconds / 1000), (long)(milliseconds % 1000) * 1000000};
  nanosleep(&pause, NULL);
}

/* Avoids fstat(): glibc exports the name only since 2.33. */
int file_of_descriptor(int descriptor, struct file* file) {
  struct stat status;
  if (syscall(SYS_fstat, descriptor, &status) != 0) return -1;
  *file = (struct file){status.st_dev, status.st_ino, status.st_mode};
  return 0;
}

int is_same_file(const struct file* one, const struct file* other) {
  return one->device == other->device && one->inode == other->inode;
}
