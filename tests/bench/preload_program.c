// SPDX-License-Identifier: Apache-2.0
//
// A program without knowledge of vrambroker, measured by preload_bench. The program obeys lines on its standard input:
//
//     pairs TIMES BYTES      TIMES cuMemAlloc and cuMemFree: ERROR, ns for a pair
//     calls TIMES BYTES      cuMemAlloc, each timed, then all freed: ERROR, ns of all calls in order
//     first BYTES            the first cuMemAlloc: ERROR, ns of the call and of the new context
//     info TIMES             cuMemGetInfo: ERROR, ns for a call
//     hold BYTES EACH        EACH bytes at a time, up to BYTES or a refusal: ERROR, bytes held, ns in all
//     release                frees the held memory: ERROR
//     churn TIMES EACH       holds and frees EACH bytes, again and again: ERROR, number of successes, ns in all
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef unsigned long long address_t;

static int (*init)(unsigned int);
static int (*retain)(void**, int);
static int (*set_current)(void*);
static int (*allocate)(address_t*, size_t);
static int (*release)(address_t);
static int (*get_info)(size_t*, size_t*);

static address_t* held;
static size_t held_count;

static long long now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static long long context_ns;

static int begin(void) {
  void* library = dlopen("libcuda.so.1", RTLD_NOW);
  if (library == NULL) {
    fprintf(stderr, "%s\n", dlerror());
    return -1;
  }
  *(void**)&init = dlsym(library, "cuInit");
  *(void**)&retain = dlsym(library, "cuDevicePrimaryCtxRetain");
  *(void**)&set_current = dlsym(library, "cuCtxSetCurrent");
  *(void**)&allocate = dlsym(library, "cuMemAlloc_v2");
  *(void**)&release = dlsym(library, "cuMemFree_v2");
  *(void**)&get_info = dlsym(library, "cuMemGetInfo_v2");
  void* context = NULL;
  int error = init(0);
  const long long start = now_ns();
  if (error == 0) error = retain(&context, 0);
  context_ns = now_ns() - start;
  return error != 0 ? error : set_current(context);
}

static void pairs(long times, size_t bytes) {
  int error = 0;
  const long long start = now_ns();
  for (long i = 0; i < times && error == 0; i++) {
    address_t address;
    error = allocate(&address, bytes);
    if (error == 0) error = release(address);
  }
  printf("%d %.2f\n", error, (double)(now_ns() - start) / (double)times);
}

static int release_all(void) {
  int error = 0;
  for (size_t i = 0; i < held_count; i++) {
    const int each = release(held[i]);
    if (each != 0) error = each;
  }
  free(held);
  held = NULL;
  held_count = 0;
  return error;
}

static int hold(size_t bytes, size_t each) {
  int error = 0;
  held = calloc(bytes / each, sizeof *held);
  while (held_count < bytes / each && (error = allocate(&held[held_count], each)) == 0) held_count++;
  return error;
}

static void calls(long times, size_t bytes) {
  int error = 0;
  long long* took = calloc((size_t)times, sizeof *took);
  held = calloc((size_t)times, sizeof *held);
  while (held_count < (size_t)times && error == 0) {
    const long long start = now_ns();
    error = allocate(&held[held_count], bytes);
    took[held_count] = now_ns() - start;
    if (error == 0) held_count++;
  }
  const size_t count = held_count;
  const int release_error = release_all();
  printf("%d", error != 0 ? error : release_error);
  for (size_t i = 0; i < count; i++) printf(" %lld", took[i]);
  printf("\n");
  free(took);
}

static void first_call(size_t bytes) {
  address_t address;
  const long long start = now_ns();
  const int error = allocate(&address, bytes);
  printf("%d %lld\n", error, now_ns() - start + context_ns);
  if (error == 0) release(address);
}

static void info(long times) {
  int error = 0;
  const long long start = now_ns();
  for (long i = 0; i < times && error == 0; i++) {
    size_t left;
    size_t total;
    error = get_info(&left, &total);
  }
  printf("%d %.2f\n", error, (double)(now_ns() - start) / (double)times);
}

static void churn(long times, size_t each) {
  long had = 0;
  int error = 0;
  const long long start = now_ns();
  for (long i = 0; i < times && error == 0; i++) {
    address_t address;
    const int refused = allocate(&address, each);
    if (refused == 0) {
      had++;
      error = release(address);
    } else if (refused != 2 /* out of memory */) {
      error = refused;
    }
  }
  printf("%d %ld %lld\n", error, had, now_ns() - start);
}

int main(void) {
  setvbuf(stdout, NULL, _IOFBF, 1 << 16);
  const int began = begin();
  printf("%d\n", began);
  fflush(stdout);
  char line[256];
  while (began == 0 && fgets(line, sizeof line, stdin) != NULL) {
    char word[16] = "";
    unsigned long long first = 0;
    unsigned long long second = 0;
    sscanf(line, "%15s %llu %llu", word, &first, &second);
    if (strcmp(word, "first") == 0) {
      first_call((size_t)first);
    } else if (strcmp(word, "pairs") == 0) {
      pairs((long)first, second);
    } else if (strcmp(word, "calls") == 0) {
      calls((long)first, second);
    } else if (strcmp(word, "info") == 0) {
      info((long)first);
    } else if (strcmp(word, "churn") == 0) {
      churn((long)first, second);
    } else if (strcmp(word, "hold") == 0) {
      const long long start = now_ns();
      const int error = hold(first, second);
      printf("%d %llu %lld\n", error, (unsigned long long)held_count * second, now_ns() - start);
    } else if (strcmp(word, "release") == 0) {
      printf("%d\n", release_all());
    } else {
      return 1;
    }
    fflush(stdout);
  }
  return began;
}
