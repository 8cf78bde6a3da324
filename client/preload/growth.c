/* SPDX-License-Identifier: Apache-2.0 */
#include "client/preload/growth.h"

int growth_prepare(struct growth* growth, uint64_t units) {
  char message[MESSAGE_BYTES];
  int waited;
  if (units <= growth->in_hand) return 0;
  if (ledger_take(growth->account, units - growth->in_hand, NOW, &waited, message) != 0) {
    growth->missing = units;
    return -1;
  }
  growth->in_hand = units;
  return 0;
}

int growth_charge(struct growth* growth, uint64_t* known, uint64_t now) {
  char message[MESSAGE_BYTES];
  int waited;
  if (now <= *known) {
    ledger_give(growth->account, *known - now);
    *known = now;
    return 0;
  }
  const uint64_t grown = now - *known;
  const uint64_t at_hand = grown < growth->in_hand ? grown : growth->in_hand;
  if (grown > at_hand && ledger_take(growth->account, grown - at_hand, NOW, &waited, message) != 0) {
    growth->missing = grown;
    return -1;
  }
  growth->in_hand -= at_hand;
  *known = now;
  return 0;
}

void growth_owe(struct growth* growth, uint64_t* known, uint64_t now) {
  if (now > *known) {
    ledger_owe(growth->account, now - *known);
  } else {
    ledger_give(growth->account, *known - now);
  }
  *known = now;
}

int growth_again(struct growth* growth, const char* what, uint64_t bytes) {
  growth_end(growth);
  if (charge_begin(&growth->waited, growth->account, what, bytes, growth->missing, MAY_WAIT) != CU_OK) return 0;
  growth->in_hand = growth->missing;
  return 1;
}

void growth_end(struct growth* growth) {
  ledger_give(growth->account, growth->in_hand);
  growth->in_hand = 0;
}
