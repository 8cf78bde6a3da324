// SPDX-License-Identifier: Apache-2.0
//
// "crowd KIND THREADS TIMES BYTES": so many threads allocate and free at random, and keep what they have until the next
// crowd. TIMES 0 frees it all. "0", how many bytes are held, and how many frees failed: nothing runs then.
//
// "pack THREADS TIMES UNITS": the same with memory of every kind, on both devices of the packing driver, which looks at
// each operation whether more than UNITS of a device is taken. "0", the looks that saw more, the most that was taken of
// each device, and the frees that failed.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/preload/probe.h"

enum { THREADS = 64, HELD = 8 };

static struct member {
  const char* kind; /* NULL: any */
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

/* The packing driver is told of each call. */
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

/* Returns how many frees failed. */
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
