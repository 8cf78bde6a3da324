// SPDX-License-Identifier: Apache-2.0
//
// "crowd KIND THREADS TIMES BYTES": threads allocate and free at random, and keep their memory until the next crowd.
// TIMES 0 frees all memory. After the threads' end, prints "0", the held bytes, and the number of failed frees.
//
// "pack THREADS TIMES UNITS": threads do the same with memory of every kind, on both devices of the packing driver. The
// driver checks at each operation whether a device has more than UNITS taken units. Prints "0", the number of failed
// checks, the most taken units of each device, and the number of failed frees.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/preload/probe.h"

enum { THREADS = 64, HELD = 8 };

static struct member {
  const char* kind; /* NULL: any kind */
  int device;
  int times;
  unsigned long long bytes;
  unsigned int seed;
  int failed;
  struct thing held[HELD];
  int holds[HELD];
} members[THREADS];

static void drop(struct member* member, int which) {
  if (!member->holds[which]) return;
  member->failed += free_thing(&member->held[which]) != 0;
  member->holds[which] = 0;
}

/* Functions of the packing driver, called before and after each allocation. */
static void (*begin)(const char* kind);
static void (*done)(unsigned long long number);

static const char* any_kind(struct member* member, size_t* bytes) {
  static const char* const kinds[] = {"plain",  "managed", "pitch", "array",    "array3d", "mipmapped",
                                      "handle", "mapped",  "async", "own_pool", "graph"};
  if (rand_r(&member->seed) % 3 == 0) *bytes *= 8;
  if (rand_r(&member->seed) % 3 == 0) return "plain";
  return kinds[rand_r(&member->seed) % (sizeof kinds / sizeof *kinds)];
}

static int allocate(struct member* member, struct thing* thing, size_t bytes) {
  const char* kind = member->kind;
  if (kind == NULL) kind = any_kind(member, &bytes);
  memset(thing, 0, sizeof *thing);
  if (begin != NULL) begin(kind);
  const int error = allocate_thing(thing, kind, bytes);
  if (done != NULL) {
    done(error != 0 ? 0 : strcmp(kind, "graph") == 0 ? (unsigned long long)(size_t)thing->exec : thing->address);
  }
  return error;
}

static void* run_member(void* argument) {
  struct member* member = argument;
  use_device_here(member->device);
  set_current();
  for (int i = 0; i < member->times; i++) {
    const int which = (int)(rand_r(&member->seed) % HELD);
    const size_t bytes = 4096 + rand_r(&member->seed) % member->bytes / 4096 * 4096;
    if (member->holds[which]) {
      drop(member, which);
    } else {
      member->holds[which] = allocate(member, &member->held[which], bytes) == 0;
    }
  }
  for (int i = 0; i < HELD && member->times == 0; i++) drop(member, i);
  return NULL;
}

/* Returns the number of failed frees. */
static int run(const char* kind, int threads, int times, unsigned long long bytes, int devices) {
  pthread_t thread[THREADS];
  int failed = 0;
  for (int i = 0; i < threads; i++) {
    struct member* const member = &members[i];
    member->kind = kind;
    member->device = i % devices;
    member->times = times;
    member->bytes = bytes;
    member->failed = 0;
    if (member->seed == 0) member->seed = (unsigned int)i + 1;
    pthread_create(&thread[i], NULL, run_member, member);
  }
  for (int i = 0; i < threads; i++) {
    pthread_join(thread[i], NULL);
    failed += members[i].failed;
  }
  return failed;
}

void crowd(const char* kind, int threads, int times, unsigned long long bytes) {
  unsigned long long held = 0;
  const int failed = run(kind, threads, times, bytes, 1);
  for (int i = 0; i < threads; i++) {
    for (int j = 0; j < HELD; j++) held += members[i].holds[j] ? members[i].held[j].bytes : 0;
  }
  printf("0 %llu %d\n", held, failed);
}

void pack(void* packing_driver, int threads, int times, int limit) {
  void (*set_limit)(long long) = dlsym(packing_driver, "packing_limit");
  int (*most)(int) = dlsym(packing_driver, "packing_most");
  int (*faults)(void) = dlsym(packing_driver, "packing_faults");
  begin = dlsym(packing_driver, "packing_begin");
  done = dlsym(packing_driver, "packing_done");
  set_limit(limit);
  const int failed = run(NULL, threads, times, 700 << 10, 2);
  printf("0 %d %d %d %d\n", faults(), most(0), most(1), failed);
}
