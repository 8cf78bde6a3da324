/* SPDX-License-Identifier: Apache-2.0 */
#include "client/preload/charge.h"

#include <stdio.h>

#include "client/preload/connection.h"
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
  if (account == NULL) return CU_OK;
  if (ledger_take(account, units, patience, &charge->waited, message) != 0) {
    return patience != MAY_WAIT ? CU_OUT_OF_MEMORY : charge_refuse(what, bytes, message);
  }
  charge->units = units;
  if (charge->waited) charge->until = now_ms() + RETRY_MS;
  return CU_OK;
}

int charge_again(const struct charge* charge, int error) {
  if (error != CU_OUT_OF_MEMORY || charge->account == NULL || !charge->waited || now_ms() >= charge->until) return 0;
  const struct calm calm = calm_begin();
  sleep_ms(PAUSE_MS);
  calm_end(calm);
  return 1;
}

int charge_more(struct charge* charge, uint64_t units, enum patience patience) {
  char message[MESSAGE_BYTES];
  int waited;
  if (charge->account == NULL) return 0;
  if (ledger_take(charge->account, units, patience, &waited, message) != 0) {
    if (patience == MAY_WAIT) charge_refuse(charge->what, charge->bytes, message);
    return -1;
  }
  charge->units += units;
  return 0;
}

void charge_settle(struct charge* charge, uint64_t units) {
  if (charge->account == NULL || units >= charge->units) return;
  ledger_give(charge->account, charge->units - units);
  charge->units = units;
}
