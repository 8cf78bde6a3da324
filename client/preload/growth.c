/* SPDX-License-Identifier: Apache-2.0 */
#include "client/preload/growth.h"

#include "client/preload/runtime.h"

/* Pays for the driver's `units` not yet paid. Threads pay one at a time: two threads would both be charged for the
 * growth of both, and a thread could be refused memory already paid. -1: `grown` is refused. */
static int pay(struct reserve* reserve, uint64_t units, uint64_t* grown, uint64_t* changes) {
  char message[MESSAGE_BYTES];
  int waited;
  const struct calm calm = calm_begin(); /* a handler could jump out, leaving the lock held */
  lock(&reserve->paying);
  lock(&reserve->lock);
  *grown = units > reserve->known ? units - reserve->known : 0;
  unlock(&reserve->lock);
  const int error = *grown == 0 ? 0 : ledger_take(reserve->account, *grown, NOW, &waited, message);
  lock(&reserve->lock);
  if (error == 0 && *grown != 0) {
    reserve->known += *grown;
    reserve->changes++;
    *changes += 1; /* made by the calling thread */
  }
  unlock(&reserve->lock);
  unlock(&reserve->paying);
  calm_end(calm);
  return error;
}

/* Records the driver's reserve. `own`: unfinished calls of this thread, finished here once all memory is paid. -1:
 * refused; only `grown` is changed. */
static int look(struct reserve* reserve, unsigned own, uint64_t* grown) {
  for (;;) {
    lock(&reserve->lock);
    const uint64_t known = reserve->known;
    uint64_t changes = reserve->changes;
    const int is_left_to_others = own == 0 && reserve->calls != 0;
    unlock(&reserve->lock);
    if (is_left_to_others) return 0;
    uint64_t now = known;
    if (reserve->read(reserve->owner, &now) != 0) now = known;
    *grown = now > known ? now - known : 0;
    uint64_t shrunk = known > now ? known - now : 0;
    const int is_refused = own != 0 && *grown != 0 && pay(reserve, now, grown, &changes) != 0;
    lock(&reserve->lock);
    const int is_last = reserve->calls == own;
    const int is_doubtful = reserve->changes != changes;
    if (is_refused) {
      unlock(&reserve->lock);
      if (is_doubtful) continue; /* another thread may have paid */
      return -1;
    }
    /* Only the last thread to finish gives back the surplus and owes the rest. Earlier threads only pay. */
    const uint64_t owed = own == 0 && is_last && !is_doubtful ? *grown : 0;
    if (!is_last || is_doubtful) shrunk = 0;
    reserve->known += owed;
    reserve->owed += owed;
    reserve->known -= shrunk;
    reserve->owed -= shrunk < reserve->owed ? shrunk : reserve->owed;
    if (own != 0 || *grown != 0 || shrunk != 0) reserve->changes++;
    const int is_done = !is_last || !is_doubtful;
    if (is_done) reserve->calls -= own;
    unlock(&reserve->lock);
    ledger_owe(reserve->account, owed);
    ledger_give(reserve->account, shrunk);
    if (is_done) return 0;
  }
}

void growth_enter(struct growth* growth, struct reserve* reserve) {
  lock(&reserve->lock);
  reserve->calls++;
  reserve->changes++;
  if (growth->reserve == reserve) {
    reserve->known += growth->in_hand;
    growth->prepared = growth->in_hand;
    growth->in_hand = 0;
  }
  unlock(&reserve->lock);
}

int growth_leave(struct growth* growth, struct reserve* reserve) {
  uint64_t grown;
  if (look(reserve, 1, &grown) == 0) return 0;
  growth->missing = (growth->reserve == reserve ? growth->prepared : 0) + grown;
  growth->reserve = reserve;
  return -1;
}

void growth_undone(struct reserve* reserve) {
  lock(&reserve->lock);
  reserve->calls--;
  reserve->changes++;
  unlock(&reserve->lock);
  growth_read(reserve);
}

int growth_prepare(struct growth* growth, uint64_t units) {
  char message[MESSAGE_BYTES];
  int waited;
  struct reserve* const reserve = growth->reserve;
  lock(&reserve->lock);
  const int owes = reserve->owed != 0; /* a debt blocks further requests */
  unlock(&reserve->lock);
  if (units == 0 && !owes) return 0;
  if (ledger_take(reserve->account, units, NOW, &waited, message) != 0) {
    growth->missing = growth->prepared + units;
    return -1;
  }
  lock(&reserve->lock);
  reserve->known += units;
  reserve->changes++;
  unlock(&reserve->lock);
  growth->prepared += units;
  return 0;
}

void growth_read(struct reserve* reserve) {
  uint64_t grown;
  look(reserve, 0, &grown);
}

int growth_again(struct growth* growth, const char* what, uint64_t bytes) {
  if (charge_begin(&growth->waited, growth->reserve->account, what, bytes, growth->missing, MAY_WAIT) != CU_OK) {
    return 0;
  }
  growth->in_hand = growth->missing;
  return 1;
}

void growth_end(struct growth* growth) {
  if (growth->in_hand != 0) ledger_give(growth->reserve->account, growth->in_hand);
  growth->in_hand = 0;
}
