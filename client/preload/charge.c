/* SPDX-License-Identifier: Apache-2.0 */
#include "client/preload/charge.h"

#include <stdio.h>

#include "client/preload/connection.h"
#include "client/preload/pools.h"
#include "client/preload/runtime.h"

enum { RETRY_MS = 1000, PAUSE_MS = 10 };

int charge_refuse(const char* what, uint64_t bytes, const char* why) {
  char line[MESSAGE_BYTES + 96];
  snprintf(line, sizeof line, "%s of %.1f MiB refused: %s", what, (double)bytes / (1 << 20), why);
  return refuse(line);
}

int charge_begin(struct charge* charge, struct account* account, const char* what, uint64_t bytes, uint64_t units,
                 enum patience patience) {
  char message[MESSAGE_BYTES] = "";
  *charge = (struct charge){.account = account, .what = what, .bytes = bytes};
  if (charge_more(charge, units, patience, message) == 0) return CU_OK;
  return patience != MAY_WAIT ? CU_OUT_OF_MEMORY : charge_refuse(what, bytes, message);
}

static int again(uint64_t until, uint64_t pause_ms) {
  if (now_ms() >= until) return 0;
  const struct calm calm = calm_begin();
  sleep_ms(pause_ms);
  calm_end(calm);
  return 1;
}

int charge_again(const struct charge* charge, int error) {
  return error == CU_OUT_OF_MEMORY && charge->account != NULL && charge->waited && again(charge->until, PAUSE_MS);
}

int charge_look_again(uint64_t* since) {
  if (*since == 0) *since = now_ms();
  return again(*since + RETRY_MS, 1);
}

int charge_more(struct charge* charge, uint64_t units, enum patience patience, char* message) {
  int waited = 0;
  if (charge->account == NULL) return 0;
  if (patience == MAY_WAIT && units != 0) pools_read_if_freed(); /* pools may have given back more than they need */
  if (ledger_take(charge->account, units, patience, &waited, message) != 0) return -1;
  charge->units += units;
  charge->waited |= waited;
  if (waited) charge->until = now_ms() + RETRY_MS;
  return 0;
}

void charge_settle(struct charge* charge, uint64_t units) {
  if (charge->account == NULL || units >= charge->units) return;
  ledger_give(charge->account, charge->units - units);
  charge->units = units;
}
