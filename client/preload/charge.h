/* SPDX-License-Identifier: Apache-2.0
 *
 * A request of the program: charged before the driver is called, given back when the driver fails. grant.h is for
 * memory with an address, growth.h for what the driver takes by its own decision.
 */
#ifndef VRAMBROKER_CLIENT_PRELOAD_CHARGE_H_
#define VRAMBROKER_CLIENT_PRELOAD_CHARGE_H_

#include "client/preload/ledger.h"

struct charge {
  struct account* account; /* NULL: not counted */
  const char* what;        /* the function, for messages */
  uint64_t bytes;          /* likewise */
  uint64_t units;          /* taken for it */
  int waited;              /* others had the memory: when they have just died, the driver has it a moment later */
  uint64_t until;          /* for how long that is believed */
};

/* Takes `units` for `bytes`. Returns 0, or the error for the program, which has been written about unless it was
 * AT_ONCE. */
int charge_begin(struct charge* charge, struct account* account, const char* what, uint64_t bytes, uint64_t units,
                 enum patience patience);
/* Whether the driver is to be asked again, because the memory may only just have come back. */
int charge_again(const struct charge* charge, int error);
/* More of the same, which the driver has given already. -1: that may not be; `message`, of MESSAGE_BYTES, says why. */
int charge_more(struct charge* charge, uint64_t units, enum patience patience, char* message);
/* Says whether to look again after a refusal, while another thread asks for the same unit. A moment passes. `since` is
 * when the unit was refused; 0 becomes now. */
int charge_look_again(uint64_t* since);
/* Only so many units are left. */
void charge_settle(struct charge* charge, uint64_t units);
/* The line of a refusal. Returns CU_OUT_OF_MEMORY. */
int charge_refuse(const char* what, uint64_t bytes, const char* why);

#endif /* VRAMBROKER_CLIENT_PRELOAD_CHARGE_H_ */
