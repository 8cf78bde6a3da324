/* SPDX-License-Identifier: Apache-2.0
 *
 * Charge for a request of the program: taken before the driver is called, given back if the driver fails. grant.h
 * serves memory with an address, growth.h memory taken by the driver on its own decision.
 */
#ifndef VRAMBROKER_CLIENT_PRELOAD_CHARGE_H_
#define VRAMBROKER_CLIENT_PRELOAD_CHARGE_H_

#include "client/preload/ledger.h"

struct charge {
  struct account* account; /* NULL: not counted */
  const char* what;        /* the function, for messages */
  uint64_t bytes;          /* size, for messages */
  uint64_t units;          /* charged units */
  int waited;              /* waited for memory; after the owners' exit the driver may have it back a moment later */
  uint64_t until;          /* deadline for retrying the driver after a wait */
};

/* Takes `units` for `bytes`. Returns 0, or the error for the program. Prints the refusal if `patience` is MAY_WAIT. */
int charge_begin(struct charge* charge, struct account* account, const char* what, uint64_t bytes, uint64_t units,
                 enum patience patience);
/* Returns whether to call the driver again: after a wait, the memory may come back a moment later. */
int charge_again(const struct charge* charge, int error);
/* Charges more units for the request. -1: refused; `message`, of MESSAGE_BYTES, says why. */
int charge_more(struct charge* charge, uint64_t units, enum patience patience, char* message);
/* Returns whether to look again after a refusal, while another thread asks for the same unit. Sleeps for a moment.
 * `since`: when the unit was refused; 0 becomes now. */
int charge_look_again(uint64_t* since);
/* Keeps `units` charged, and gives the rest back. */
void charge_settle(struct charge* charge, uint64_t units);
/* Prints the line of a refusal. Returns CU_OUT_OF_MEMORY. */
int charge_refuse(const char* what, uint64_t bytes, const char* why);

#endif /* VRAMBROKER_CLIENT_PRELOAD_CHARGE_H_ */
