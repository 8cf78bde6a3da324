// SPDX-License-Identifier: Apache-2.0
//
// A program unaware of vrambroker. Reaches the driver by one of the routes, and follows the commands on its standard
// input. Usage: probe ROUTE. Answers each command with one line: "0" first, or the driver's error.
//
// Built twice: as `probe`, and linked to the driver as `probe_linked`.
#define _GNU_SOURCE
#include "tests/preload/probe.h"

#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#ifdef __x86_64__
#define OLDEST_VERSION "GLIBC_2.2.5"
#else
#define OLDEST_VERSION "GLIBC_2.17"
#endif

struct driver driver;

#define NAME(name, base, version, arguments) {#name, base, version, offsetof(struct driver, name)},
static const struct {
  const char* name;
  const char* base; /* name for cuGetProcAddress */
  int version;
  size_t slot;
} functions[] = {PROBE_FUNCTIONS(NAME)};
#undef NAME

static void set(size_t slot, void* function) {
  memcpy((char*)&driver + slot, &function, sizeof function);
}

static void* proc_address(void* library, int is_second, const char* base, int version, unsigned long long flags) {
  void* function = NULL;
  if (is_second) {
    int (*get)(const char*, void**, int, unsigned long long, int*) = dlsym(library, "cuGetProcAddress_v2");
    int status = -1;
    if (get == NULL || get(base, &function, version, flags, &status) != 0) return NULL;
    return function;
  }
  int (*get)(const char*, void**, int, unsigned long long) = dlsym(library, "cuGetProcAddress");
  return get == NULL || get(base, &function, version, flags) != 0 ? NULL : function;
}

/* Asks like a program for newer CUDA than the driver's: "proc_newer", "proc_newest" and "proc_both", also with "proc2".
 * Only functions with an unchanged interface are asked for in a newer version. */
static void* newer_address(void* library, const char* route, const char* base, int version) {
  const int is_same = version > 3019 && strcmp(base, "cuCtxCreate") != 0;
  const char* kind = strchr(route, '_');
  if (is_same && strcmp(kind, "_newer") == 0) version = 99990;
  if (is_same && strcmp(kind, "_newest") == 0) version = -1;
  const unsigned long long flags = version > 3019 && strcmp(kind, "_both") == 0 ? 3 : 0;
  if (flags != 0 && version < 11020) version = 11020; /* first version with functions for the thread's own stream */
  return proc_address(library, route[4] == '2', base, version, flags);
}

static void* driver_library;

/* "resolve NAME VERSION FLAGS": prints the functions found by both forms of cuGetProcAddress, and their files. */
static void resolve(const char* name, int version, unsigned long long flags) {
  printf("0");
  for (int form = 1; form <= 2; form++) {
    Dl_info info = {0};
    void* function = proc_address(driver_library, form == 2, name, version, flags);
    if (function == NULL || dladdr(function, &info) == 0) {
      printf(" none -");
      continue;
    }
    const char* slash = strrchr(info.dli_fname, '/');
    printf(" %s %s", slash == NULL ? info.dli_fname : slash + 1, info.dli_sname == NULL ? "-" : info.dli_sname);
  }
  printf("\n");
}

/* Asks the resolver for the resolver, like cudart. */
static void* through_itself(void* library, const char* base, int version) {
  void* function = NULL;
  int status = -1;
  int (*get)(const char*, void**, int, unsigned long long, int*) =
      proc_address(library, 1, "cuGetProcAddress", 12000, 0);
  return get == NULL || get(base, &function, version, 0, &status) != 0 ? NULL : function;
}

static int find_functions(const char* route) {
#ifdef PROBE_LINKED
#define TAKE(name, base, version, arguments) driver.name = name;
  PROBE_FUNCTIONS(TAKE)
#undef TAKE
  if (strcmp(route, "linked") == 0) return 0;
#endif
  if (strcmp(route, "none") == 0) return 0;
  const int is_global = strcmp(route, "default") == 0;
  const int mode =
      RTLD_NOW | (strcmp(route, "deepbind") == 0 ? RTLD_DEEPBIND : 0) | (is_global ? RTLD_GLOBAL : RTLD_LOCAL);
  void* library =
      strcmp(route, "dlmopen") == 0 ? dlmopen(LM_ID_NEWLM, "libcuda.so.1", RTLD_NOW) : dlopen("libcuda.so.1", mode);
  if (library == NULL) {
    fprintf(stderr, "%s\n", dlerror());
    return -1;
  }
  driver_library = library;
  for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
    void* function;
    if (strcmp(route, "proc") == 0 || strcmp(route, "proc2") == 0) {
      function = proc_address(library, strcmp(route, "proc2") == 0, functions[i].base, functions[i].version, 0);
    } else if (strcmp(route, "proc_itself") == 0) {
      function = through_itself(library, functions[i].base, functions[i].version);
    } else if (strncmp(route, "proc", 4) == 0) {
      function = newer_address(library, route, functions[i].base, functions[i].version);
    } else if (strcmp(route, "dlvsym") == 0) {
      /* The driver's symbols have no versions, but dlsym itself has versions. */
      void* (*versioned)(void*, const char*) = dlvsym(RTLD_DEFAULT, "dlsym", OLDEST_VERSION);
      function = versioned(library, functions[i].name);
    } else {
      function = dlsym(is_global ? RTLD_DEFAULT : library, functions[i].name);
    }
    set(functions[i].slot, function);
  }
  return 0;
}

/* --- commands --- */

unsigned long long size_of(const char* text) {
  char* end = NULL;
  const unsigned long long number = text == NULL ? 0 : strtoull(text, &end, 10);
  if (end == NULL) return 0;
  return *end == 'M' ? number << 20 : *end == 'K' ? number << 10 : number;
}

static int use_gpu(void) {
  static int used_by;
  if (used_by == getpid()) return 0;
  void* context;
  int error = driver.cuInit(0);
  if (error == 0) error = driver.cuDevicePrimaryCtxRetain(&context, 0);
  if (error == 0) error = driver.cuCtxSetCurrent(context);
  if (error == 0) used_by = getpid();
  return error;
}

static __thread int own_device;

void use_device_here(int device) {
  own_device = device;
}

int device_here(void) {
  return own_device;
}

void* set_current(void) {
  void* context = NULL;
  driver.cuDevicePrimaryCtxRetain(&context, own_device);
  driver.cuCtxSetCurrent(context);
  return context;
}

struct race {
  unsigned long long bytes;
  int times;
  int done;
};

static void* run_race(void* argument) {
  struct race* race = argument;
  set_current();
  for (int i = 0; i < race->times; i++) {
    unsigned long long address;
    if (driver.cuMemAlloc_v2(&address, race->bytes) == 0) race->done++;
  }
  return NULL;
}

/* "race THREADS TIMES BYTES": prints the number of successful allocations. */
static void race(int threads, int times, unsigned long long bytes) {
  pthread_t thread[64];
  struct race races[64];
  int done = 0;
  for (int i = 0; i < threads; i++) {
    races[i] = (struct race){bytes, times, 0};
    pthread_create(&thread[i], NULL, run_race, &races[i]);
  }
  for (int i = 0; i < threads; i++) {
    pthread_join(thread[i], NULL);
    done += races[i].done;
  }
  printf("0 %d\n", done);
}

/* "pairs TIMES BYTES": prints the nanoseconds of one cuMemAlloc and its cuMemFree. */
static void pairs(int times, unsigned long long bytes) {
  struct timespec start;
  struct timespec end;
  int error = 0;
  clock_gettime(CLOCK_MONOTONIC, &start);
  for (int i = 0; i < times && error == 0; i++) {
    unsigned long long address;
    error = driver.cuMemAlloc_v2(&address, bytes);
    if (error == 0) error = driver.cuMemFree_v2(address);
  }
  clock_gettime(CLOCK_MONOTONIC, &end);
  const double ns = (double)(end.tv_sec - start.tv_sec) * 1e9 + (double)(end.tv_nsec - start.tv_nsec);
  printf("%d %.0f\n", error, ns / times);
}

static void* run_churn(void* argument) {
  struct race* churn = argument;
  unsigned long long held[8] = {0};
  unsigned int seed = (unsigned int)churn->done;
  churn->done = 0;
  set_current();
  for (int i = 0; i < churn->times; i++) {
    unsigned long long* const one = &held[rand_r(&seed) % 8];
    if (*one != 0) {
      churn->done += driver.cuMemFree_v2(*one) != 0;
      *one = 0;
    } else if (driver.cuMemAlloc_v2(one, 1 + rand_r(&seed) % churn->bytes) != 0) {
      *one = 0;
    }
  }
  for (int i = 0; i < 8; i++) {
    if (held[i] != 0) churn->done += driver.cuMemFree_v2(held[i]) != 0;
  }
  return NULL;
}

/* "churn THREADS TIMES BYTES": allocates and frees at random, and frees all memory in the end. Prints the number of
 * failed frees. */
static void churn(int threads, int times, unsigned long long bytes) {
  pthread_t thread[64];
  struct race churns[64];
  int failed = 0;
  for (int i = 0; i < threads; i++) {
    churns[i] = (struct race){bytes, times, i};
    pthread_create(&thread[i], NULL, run_churn, &churns[i]);
  }
  for (int i = 0; i < threads; i++) {
    pthread_join(thread[i], NULL);
    failed += churns[i].done;
  }
  printf("0 %d\n", failed);
}

static void* allocate_once(void* bytes) {
  unsigned long long address;
  set_current();
  driver.cuMemAlloc_v2(&address, *(unsigned long long*)bytes);
  return NULL;
}

/* "cancel BYTES": cancels a thread during its allocation. */
static void cancel(unsigned long long bytes) {
  pthread_t thread;
  pthread_create(&thread, NULL, allocate_once, &bytes);
  pthread_cancel(thread);
  pthread_join(thread, NULL);
  printf("0\n");
}

static int entries(const char* path) {
  int count = 0;
  DIR* folder = opendir(path);
  while (folder != NULL && readdir(folder) != NULL) count++;
  if (folder != NULL) closedir(folder);
  return count - 2;
}

enum { DESCRIPTORS = 1000 };

/* "close_all": closes every descriptor but the standard ones. Then sockets of the program take nearly all descriptor
 * numbers. */
static void close_all(void) {
  int pair[2];
  for (int i = 3; i < 4096; i++) close(i);
  do {
    if (socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair) != 0) break;
  } while (pair[1] < DESCRIPTORS);
  for (int i = 10; i < 20; i++) close(i);
  printf("0\n");
}

/* "heard": prints the number of sockets of "close_all" with received data. */
static void heard(void) {
  char byte;
  int count = 0;
  for (int i = 20; i < DESCRIPTORS; i++) count += recv(i, &byte, 1, MSG_DONTWAIT | MSG_PEEK) > 0;
  printf("0 %d\n", count);
}

static void command(char* line);

/* "fork COMMAND", "clone COMMAND": runs the command in a child. "fork": a child follows all further commands. */
static void in_child(char* line, int by_clone) {
  fflush(stdout);
  const pid_t child = by_clone ? (pid_t)syscall(SYS_clone, 17 /* SIGCHLD */, 0, 0, 0, 0) : fork();
  if (child == 0 && *line == '\0') {
    printf("0\n");
    return;
  }
  if (child == 0) {
    command(line);
    fflush(stdout);
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  if (status != 0) printf("child ended with %d\n", status);
}

static char** own_arguments;

static void command(char* line) {
  char* rest = NULL;
  const char* word = strtok_r(line, " ", &rest);
  if (word == NULL) return;
  if (strcmp(word, "fork") == 0) return in_child(rest, 0);
  if (strcmp(word, "clone") == 0) return in_child(rest, 1);
  const char* first = strtok_r(NULL, " ", &rest);
  const char* second = strtok_r(NULL, " ", &rest);
  const char* third = strtok_r(NULL, " ", &rest);
  const char* fourth = strtok_r(NULL, " ", &rest);
  if (probe_signals(word, first == NULL ? "" : first, second == NULL ? "" : second)) return;
  if (strcmp(word, "exec") == 0) { /* executes itself, or another program with one argument */
    char* const others[] = {(char*)first, (char*)second, NULL};
    execv(first == NULL ? "/proc/self/exe" : first, first == NULL ? own_arguments : others);
    printf("%d\n", errno);
  } else if (strcmp(word, "getpid") == 0) {
    printf("0 %d\n", getpid());
  } else if (strcmp(word, "missing") == 0) { /* counts the functions not found by this route */
    int count = 0;
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
      void* function;
      memcpy(&function, (char*)&driver + functions[i].slot, sizeof function);
      count += function == NULL;
    }
    printf("0 %d\n", count);
  } else if (strcmp(word, "resolve") == 0) {
    resolve(first, atoi(second), strtoull(third, NULL, 10));
  } else if (strcmp(word, "find") == 0) { /* looks up a symbol of the global scope */
    dlerror();
    void* found = dlsym(RTLD_DEFAULT, first);
    const char* error = dlerror();
    printf("0 %s %s\n", found == NULL ? "no" : "yes", error == NULL ? "no error" : "error");
  } else if (strcmp(word, "next") == 0) {
    printf("0 %s\n", dlsym(RTLD_NEXT, first) == NULL ? "no" : "yes");
  } else if (strcmp(word, "call") == 0) {
    void* handle;
    int (*function)(void**) = dlsym(RTLD_DEFAULT, first);
    printf("0 %d\n", function(&handle));
  } else if (strcmp(word, "census") == 0) {
    printf("0 %d %d\n", entries("/proc/self/task"), entries("/proc/self/fd") - 1);
  } else if (strcmp(word, "close_all") == 0) {
    close_all();
  } else if (strcmp(word, "heard") == 0) {
    heard();
  } else if (strcmp(word, "own_context") == 0) { /* creates the first context */
    void* context;
    const int error = driver.cuInit(0);
    printf("%d\n", error != 0 ? error : driver.cuCtxCreate_v2(&context, 0, 0));
  } else if (strcmp(word, "nvml") == 0) {
    probe_kinds(word, first, "");
  } else {
    int error = use_gpu();
    if (error != 0) {
      printf("%d\n", error);
    } else if (strcmp(word, "race") == 0) {
      race(atoi(first), atoi(second), size_of(third));
    } else if (strcmp(word, "churn") == 0) {
      churn(atoi(first), atoi(second), size_of(third));
    } else if (strcmp(word, "crowd") == 0) {
      crowd(first, atoi(second), atoi(third), size_of(fourth));
    } else if (strcmp(word, "pack") == 0) {
      pack(driver_library, atoi(first), atoi(second), atoi(third));
    } else if (strcmp(word, "blocks") == 0) { /* asks the packing driver, without a hook in front */
      int (*blocks)(void) = dlsym(driver_library, "packing_blocks");
      printf("0 %d\n", blocks());
    } else if (strcmp(word, "taken") == 0) { /* asks the packing driver about a device */
      int (*taken)(int) = dlsym(driver_library, "packing_taken");
      printf("0 %d\n", taken(atoi(first)));
    } else if (strcmp(word, "reserve_for_graphs") == 0) {
      int (*reserve)(int, int) = dlsym(driver_library, "packing_reserve_for_graphs");
      printf("%d\n", reserve(atoi(first), atoi(second)));
    } else if (strcmp(word, "cancel") == 0) {
      cancel(size_of(first));
    } else if (strcmp(word, "errno") == 0) {
      unsigned long long address;
      errno = 7;
      error = driver.cuMemAlloc_v2(&address, 1ull << 40); /* refused allocation */
      printf("%d %d\n", error == 2 ? 0 : error, errno);
    } else if (strcmp(word, "pairs") == 0) {
      pairs(atoi(first), size_of(second));
    } else if (strcmp(word, "info") == 0) {
      size_t left = 0;
      size_t total = 0;
      error = driver.cuMemGetInfo_v2(&left, &total);
      printf("%d %zu %zu\n", error, left, total);
    } else if (strcmp(word, "total") == 0) {
      size_t total = 0;
      error = driver.cuDeviceTotalMem_v2(&total, 0);
      printf("%d %zu\n", error, total);
    } else {
      probe_kinds(word, first == NULL ? "" : first, second == NULL ? "" : second);
    }
  }
}

int main(int count, char** arguments) {
  static char line[4096];
  if (count < 2 || find_functions(arguments[1]) != 0) return 2;
  own_arguments = arguments;
  setvbuf(stdin, NULL, _IONBF, 0); /* leaves unread input to exec */
  while (fgets(line, sizeof line, stdin) != NULL) {
    line[strcspn(line, "\n")] = '\0';
    command(line);
    fflush(stdout);
  }
  return 0;
}
