// SPDX-License-Identifier: Apache-2.0
//
// "crowd KIND THREADS TIMES BYTES": so many threads allocate and free at random, and keep what they have until the next
// crowd. TIMES 0 frees it all. "0", how many bytes are held, and how many frees failed: nothing runs then.
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "tests/preload/probe.h"

enum { THREADS = 64, HELD = 8 };

static struct member {
  const char* kind;
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

static void* run_member(void* argument) {
  struct member* member = argument;
  set_current();
  for (int i = 0; i < member->times; i++) {
    const int which = (int)(rand_r(&member->seed) % HELD);
    const size_t bytes = 4096 + rand_r(&member->seed) % member->bytes / 4096 * 4096;
    if (member->holds[which]) {
      drop(member, which);
    } else {
      member->holds[which] = allocate_thing(&member->held[which], member->kind, bytes) == 0;
    }
  }
  for (int i = 0; i < HELD && member->times == 0; i++) drop(member, i);
  return NULL;
}

void crowd(const char* kind, int threads, int times, unsigned long long bytes) {
  pthread_t thread[THREADS];
  unsigned long long held = 0;
  int failed = 0;
  for (int i = 0; i < threads; i++) {
    struct member* const member = &members[i];
    member->kind = kind;
    member->times = times;
    member->bytes = bytes;
    member->failed = 0;
    if (member->seed == 0) member->seed = (unsigned int)i + 1;
    pthread_create(&thread[i], NULL, run_member, member);
  }
  for (int i = 0; i < threads; i++) {
    pthread_join(thread[i], NULL);
    failed += members[i].failed;
    for (int j = 0; j < HELD; j++) held += members[i].holds[j] ? members[i].held[j].bytes : 0;
  }
  printf("0 %llu %d\n", held, failed);
}
