// SPDX-License-Identifier: Apache-2.0
//
// The packing driver's memory: the units taken from each of its two devices, and the check of a program's limits.
#ifndef VRAMBROKER_TESTS_PRELOAD_PACKING_H_
#define VRAMBROKER_TESTS_PRELOAD_PACKING_H_

#include <stddef.h>

#define PUBLIC __attribute__((visibility("default")))

enum { DEVICES = 2, UNIT = 2 << 20, SMALL = 1 << 20 };

enum { OK = 0, INVALID = 1, NO_MEMORY = 2 };

/* Returns the device of the calling thread's context. */
int packing_device(void);
/* Returns the calling thread's context; NULL: the device's primary context. */
const void* packing_context(void);

/* Functions under the lock. packing_take() takes units, or gives back negative units. NO_MEMORY: the device has too few
 * units. */
void packing_lock(void);
void packing_unlock(void); /* checks the limits */
int packing_take(int device, long long units);
void packing_misused(const char* what);

/* Frees the arrays of a destroyed context. Needs the lock. */
void packing_free_arrays(const void* gone);

/* Call without the lock, after an unmapping or a context's destruction. */
void packing_gone(void);

/* Returns the units taken by unfinished calls: a program knows a reserve's growth only after the call. A call begins
 * with `kind`, and ends with the number of its result for the program (packing_kinds.c). */
long long packing_growth(int device);
void packing_call_begins(const char* kind);
void packing_call_is_done(unsigned long long number);

static inline unsigned long long units_of(unsigned long long bytes) {
  return (bytes + UNIT - 1) / UNIT;
}

#endif  // VRAMBROKER_TESTS_PRELOAD_PACKING_H_
