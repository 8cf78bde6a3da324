/* SPDX-License-Identifier: Apache-2.0
 *
 * Memory taken by the driver on its own decision, and reserved by a pool or by a device's graphs. The amount is known
 * only after a call. The certain part is charged before the call, the rest afterwards. After a refusal the caller
 * undoes the call.
 *
 * The driver may wait for the GPU in a call, and the GPU may wait for another thread. So no lock is held during a call
 * of the driver, and several threads may grow a reserve at once. Each thread makes sure that all growth is paid before
 * its own call ends. Only growth_again() waits for memory, or for a missing daemon.
 *
 *     do {
 *       growth_enter(&growth, reserve);
 *       error = driver->...;
 *       if (growth_leave(&growth, reserve) == 0) break;
 *       ... undo the call if error is CU_OK
 *       growth_undone(reserve);
 *     } while (growth_again(&growth, what, bytes));
 *     growth_end(&growth);
 */
#ifndef VRAMBROKER_CLIENT_PRELOAD_GROWTH_H_
#define VRAMBROKER_CLIENT_PRELOAD_GROWTH_H_

#include "client/preload/charge.h"
#include "client/preload/lock.h"

/* Memory reserved by a pool or a device's graphs. A reserve never moves: threads read it under its own lock alone. */
struct reserve {
  struct lock paying;                              /* held while the daemon is asked; taken before `lock` */
  struct lock lock;                                /* held for moments */
  struct account* account;                         /* NULL: not counted */
  int (*read)(const void* owner, uint64_t* units); /* asks the driver; nonzero: no answer */
  const void* owner;
  uint64_t known;   /* counted units, also for unfinished calls */
  uint64_t owed;    /* units of `known` without a grant */
  uint64_t changes; /* counts events casting doubt on the driver's earlier answers */
  unsigned calls;   /* unfinished driver calls with possible growth */
};

struct growth {
  struct reserve* reserve; /* reserve of the fields below */
  uint64_t prepared;       /* units charged before the call */
  uint64_t missing;        /* units needed by the call and refused */
  uint64_t in_hand;        /* units charged after a wait */
  struct charge waited;    /* charge by growth_again(), for charge_again() */
};

/* Call before and after the driver's call. -1: the growth is refused; undo the call, and then call growth_undone(). */
void growth_enter(struct growth* growth, struct reserve* reserve);
int growth_leave(struct growth* growth, struct reserve* reserve);
/* Owes the memory left after the undo. */
void growth_undone(struct reserve* reserve);
/* Call between growth_enter() and a driver's call taking at least `units`. -1: refused; do not make the call. */
int growth_prepare(struct growth* growth, uint64_t units);
/* Reads the driver's reserve again. A thread with an unfinished call does the reading instead. */
void growth_read(struct reserve* reserve);
/* Waits for the missing memory. Returns whether to repeat the call; otherwise prints the program's refusal. */
int growth_again(struct growth* growth, const char* what, uint64_t bytes);
/* Gives back the units in hand and not needed. */
void growth_end(struct growth* growth);

#endif /* VRAMBROKER_CLIENT_PRELOAD_GROWTH_H_ */
