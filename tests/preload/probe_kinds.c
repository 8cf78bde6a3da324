// SPDX-License-Identifier: Apache-2.0
//
// "alloc KIND BYTES", "free NUMBER": allocations are numbered from 0, those that failed as well.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/preload/probe.h"

struct thing {
  char kind[16];
  unsigned long long address;
};

static struct thing things[4096];
static int count;

static unsigned long long size_of(const char* text) {
  char* end;
  const unsigned long long number = strtoull(text, &end, 10);
  return *end == 'M' ? number << 20 : *end == 'K' ? number << 10 : number;
}

static int allocate(const char* kind, unsigned long long bytes) {
  struct thing* thing = &things[count++];
  snprintf(thing->kind, sizeof thing->kind, "%s", kind);
  if (strcmp(kind, "plain") == 0) return driver.cuMemAlloc_v2(&thing->address, bytes);
  if (strcmp(kind, "managed") == 0) return driver.cuMemAllocManaged(&thing->address, bytes, 1);
  if (strcmp(kind, "pitch") == 0) {
    size_t pitch;
    return driver.cuMemAllocPitch_v2(&thing->address, &pitch, 4000, bytes / 4096, 16);
  }
  return -1;
}

static int release(const struct thing* thing) {
  return driver.cuMemFree_v2(thing->address);
}

void probe_kinds(const char* word, const char* first, const char* second) {
  int error = -1;
  if (strcmp(word, "alloc") == 0) {
    error = allocate(first, size_of(second));
  } else if (strcmp(word, "free") == 0) {
    error = release(&things[atoi(first)]);
  }
  printf("%d\n", error);
}
