/* SPDX-License-Identifier: Apache-2.0
 *
 * Memory that the driver takes by its own decision: what a pool, or a device's graphs, have reserved. How much is known
 * only after a call. What is certain is charged before, the rest then, and the caller undoes its call where that may
 * not be.
 *
 * The driver may wait for the GPU in such a call, and another thread may be what the GPU waits for. So no lock is held
 * over a call of the driver, and several threads may make the same reserve grow at once: each makes sure that all of it
 * is paid when its own call is done. Only growth_again() waits for memory, or for a daemon that is away.
 *
 *     do {
 *       growth_enter(&growth, reserve);
 *       error = driver->...;
 *       if (growth_leave(&growth, reserve) == 0) break;
 *       ... undoes it, if error is CU_OK
 *       growth_undone(reserve);
 *     } while (growth_again(&growth, what, bytes));
 *     growth_end(&growth);
 */
#ifndef VRAMBROKER_CLIENT_PRELOAD_GROWTH_H_
#define VRAMBROKER_CLIENT_PRELOAD_GROWTH_H_

#include "client/preload/charge.h"
#include "client/preload/lock.h"

/* Holds what a pool or a device's graphs have. A reserve stays where it is: threads look at it with its own lock alone.
 */
struct reserve {
  struct lock paying;                              /* held while the daemon is asked; taken before `lock` */
  struct lock lock;                                /* held for moments */
  struct account* account;                         /* NULL: not counted */
  int (*read)(const void* owner, uint64_t* units); /* asks the driver; else than 0: it does not say */
  const void* owner;
  uint64_t known;   /* units that are charged, also for calls that are not done */
  uint64_t owed;    /* units of these that may not have been had */
  uint64_t changes; /* counts what makes an earlier answer of the driver doubtful */
  unsigned calls;   /* of the driver that may make it grow, and are not done */
};

struct growth {
  struct reserve* reserve; /* that the rest is for */
  uint64_t prepared;       /* units that were charged before the call */
  uint64_t missing;        /* units that the call needs, and may not have */
  uint64_t in_hand;        /* units that were waited for */
  struct charge waited;    /* of growth_again(), for charge_again() */
};

/* Before the call, and after it. -1: what it has grown by may not be had; the call is to be undone, and then done with
 * growth_undone(). */
void growth_enter(struct growth* growth, struct reserve* reserve);
int growth_leave(struct growth* growth, struct reserve* reserve);
/* Owes what could not be undone. */
void growth_undone(struct reserve* reserve);
/* Between growth_enter() and the call, which takes `units` at least. -1: so much may not be had, and the call is not to
 * be made. */
int growth_prepare(struct growth* growth, uint64_t units);
/* Reads again what the driver has, unless a call is not done: its thread does so then. */
void growth_read(struct reserve* reserve);
/* Whether to make the call again: others had the memory, and it was waited for. Otherwise the program's refusal is
 * written. */
int growth_again(struct growth* growth, const char* what, uint64_t bytes);
/* What was in hand and was not needed. */
void growth_end(struct growth* growth);

#endif /* VRAMBROKER_CLIENT_PRELOAD_GROWTH_H_ */
