// SPDX-License-Identifier: Apache-2.0
//
// The packing driver's memory: what is taken of each of its two devices, and whether a program may have so much.
#ifndef VRAMBROKER_TESTS_PRELOAD_PACKING_H_
#define VRAMBROKER_TESTS_PRELOAD_PACKING_H_

#include <stddef.h>

#define PUBLIC __attribute__((visibility("default")))

enum { DEVICES = 2, UNIT = 2 << 20, SMALL = 1 << 20 };

enum { OK = 0, INVALID = 1, NO_MEMORY = 2 };

/* Of the calling thread's context. */
int packing_device(void);

/* All with the lock. Units that are taken, or given back if they are negative. NO_MEMORY: the device has not so many.
 */
void packing_lock(void);
void packing_unlock(void); /* looks whether a limit is passed */
int packing_take(int device, long long units);
void packing_misused(const char* what);

/* Without the lock: memory was unmapped, or a context destroyed. */
void packing_gone(void);

/* Units that calls have taken that are not done: how much a reserve grows, a program knows only afterwards. The call of
 * the thread begins, or is done and has given the program what has this number (packing_kinds.c). */
long long packing_growth(int device);
void packing_call_begins(const char* kind);
void packing_call_is_done(unsigned long long number);

static inline unsigned long long units_of(unsigned long long bytes) {
  return (bytes + UNIT - 1) / UNIT;
}

#endif  // VRAMBROKER_TESTS_PRELOAD_PACKING_H_
