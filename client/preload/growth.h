/* SPDX-License-Identifier: Apache-2.0
 *
 * Memory that the driver takes by its own decision: what a pool, or a device's graphs, have reserved. How much is known
 * only after the call. What is certain is charged before, the rest then, and the caller undoes its call where that may
 * not be. Only growth_again() waits for memory, or for a daemon that is away: callers of the others may hold a lock.
 */
#ifndef VRAMBROKER_CLIENT_PRELOAD_GROWTH_H_
#define VRAMBROKER_CLIENT_PRELOAD_GROWTH_H_

#include "client/preload/charge.h"

struct growth {
  struct account* account;
  uint64_t in_hand;     /* units that were charged before the call */
  uint64_t missing;     /* units that were refused */
  struct charge waited; /* of growth_again(), for charge_again() */
};

/* Before the call, which takes `units` more at least: without them it is not to be made. -1: so much may not be had. */
int growth_prepare(struct growth* growth, uint64_t units);
/* `known` becomes `now`, in units. -1: so much may not be had; `known` is as it was, and the call is to be undone. */
int growth_charge(struct growth* growth, uint64_t* known, uint64_t now);
/* After the undoing: what could not be undone is owed. */
void growth_owe(struct growth* growth, uint64_t* known, uint64_t now);
/* Whether to make the call again: others had the memory, and it was waited for. Otherwise the program's refusal is
 * written. */
int growth_again(struct growth* growth, const char* what, uint64_t bytes);
/* What was in hand and was not needed. */
void growth_end(struct growth* growth);

#endif /* VRAMBROKER_CLIENT_PRELOAD_GROWTH_H_ */
