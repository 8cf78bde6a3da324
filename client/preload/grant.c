/* SPDX-License-Identifier: Apache-2.0 */
#include "client/preload/grant.h"

#include <string.h>

#include "client/preload/driver.h"
#include "client/preload/lock.h"
#include "client/preload/table.h"

static const uint64_t unit = VRAMBROKER_COUNT_UNIT_BYTES;
static const uint64_t small = UINT64_C(1) << 20; /* larger allocations share no block */

/* Held for moments. */
static struct lock places;
static struct table allocations; /* address -> account, bytes, context */
/* number of a shareable block -> account, number and bytes of allocations; `more`: whether charged, and how many
 * threads ask for the charge. Each allocation entering an uncharged block asks: so a refusal leaves no allocation in an
 * unpaid block. */
static struct table blocks;
enum { PAID = 1, ASKS = 2 };

/* --- blocks. Callers hold `places`, except callers of may_have_room(). --- */

static uint64_t first_block(cu_address address) {
  return address / unit;
}

static uint64_t last_block(cu_address address, uint64_t bytes) {
  return (address + (bytes == 0 ? 0 : bytes - 1)) / unit;
}

/* Returns the allocation's bytes within a block. */
static uint64_t share(uint64_t block, cu_address address, uint64_t bytes) {
  const uint64_t from = block * unit > address ? block * unit : address;
  const uint64_t to = (block + 1) * unit < address + bytes ? (block + 1) * unit : address + bytes;
  return to - from;
}

/* Returns 0; -1: no memory for the table. */
static int join_block(struct account* account, uint64_t block, uint64_t bytes) {
  struct entry* known = table_find(&blocks, block);
  if (known != NULL) {
    known->count++;
    known->bytes += bytes;
    return 0;
  }
  const struct entry entry = {.key = block, .owner = account, .count = 1, .bytes = bytes};
  return table_put(&blocks, &entry);
}

/* Returns the block's units after its last allocation leaves. */
static uint64_t leave_block(uint64_t block, uint64_t bytes) {
  struct entry* known = table_find(&blocks, block);
  if (known == NULL) return 0;
  known->bytes -= bytes < known->bytes ? bytes : known->bytes;
  if (--known->count != 0) return 0;
  const uint64_t units = known->more & PAID;
  table_remove(&blocks, known);
  return units;
}

/* Counts the allocation's unshared blocks: only the first and the last block can be shared. */
static uint64_t inner_blocks(cu_address address, uint64_t bytes) {
  const uint64_t between = last_block(address, bytes) - first_block(address);
  return between > 1 ? between - 1 : 0;
}

static int join_ends(struct account* account, cu_address address, uint64_t bytes) {
  const uint64_t first = first_block(address);
  const uint64_t last = last_block(address, bytes);
  if (join_block(account, first, share(first, address, bytes)) != 0) return -1;
  if (last == first || join_block(account, last, share(last, address, bytes)) == 0) return 0;
  leave_block(first, share(first, address, bytes));
  return -1;
}

static uint64_t leave_ends(cu_address address, uint64_t bytes) {
  const uint64_t first = first_block(address);
  const uint64_t last = last_block(address, bytes);
  const uint64_t units = leave_block(first, share(first, address, bytes));
  return last == first ? units : units + leave_block(last, share(last, address, bytes));
}

/* Removes a recorded allocation from its blocks. Returns the freed units. */
static uint64_t leave_blocks(cu_address address, uint64_t bytes) {
  return inner_blocks(address, bytes) + leave_ends(address, bytes);
}

static uint64_t lacks(uint64_t block) {
  const struct entry* known = table_find(&blocks, block);
  return known == NULL || (known->more & PAID) == 0 ? 1 : 0;
}

/* Counts the allocation's uncharged blocks. */
static uint64_t unpaid_blocks(cu_address address, uint64_t bytes) {
  const uint64_t first = first_block(address);
  const uint64_t last = last_block(address, bytes);
  return inner_blocks(address, bytes) + lacks(first) + (last == first ? 0 : lacks(last));
}

/* Pays for the uncharged blocks if `units` suffice. Returns the units used, or -1. */
static int64_t pay(cu_address address, uint64_t bytes, uint64_t units) {
  const uint64_t needed = unpaid_blocks(address, bytes);
  if (needed > units) return -1;
  struct entry* const first = table_find(&blocks, first_block(address));
  struct entry* const last = table_find(&blocks, last_block(address, bytes));
  if (first != NULL) first->more |= PAID;
  if (last != NULL) last->more |= PAID;
  return (int64_t)needed;
}

/* Adds `threads` (or removes, if negative) to the threads asking for the end blocks. Returns whether any thread still
 * asks for an unpaid block. */
static int ask_for(cu_address address, uint64_t bytes, int threads) {
  struct entry* const first = table_find(&blocks, first_block(address));
  struct entry* const last = table_find(&blocks, last_block(address, bytes));
  struct entry* const ends[] = {first, last == first ? NULL : last};
  int any = 0;
  for (size_t i = 0; i < 2; i++) {
    if (ends[i] == NULL) continue;
    ends[i]->more += (uint64_t)threads * ASKS;
    any |= (ends[i]->more & PAID) == 0 && ends[i]->more >= ASKS;
  }
  return any;
}

static int has_room(const struct entry* block, const struct account* account, uint64_t bytes) {
  return block != NULL && block->key != 0 && (block->more & PAID) != 0 && block->owner == account &&
         block->bytes + bytes <= unit;
}

/* Returns whether a block of the account may have room; the driver decides. Checks the block last found, and all blocks
 * only if `thoroughly`. */
static int may_have_room(const struct account* account, uint64_t bytes, int thoroughly) {
  static uint64_t roomy;
  lock(&places);
  int found = has_room(table_find(&blocks, roomy), account, bytes);
  for (size_t i = 0; i < blocks.size && thoroughly && !found; i++) {
    found = has_room(&blocks.places[i], account, bytes);
    if (found) roomy = blocks.places[i].key;
  }
  unlock(&places);
  return found;
}

/* --- allocations --- */

int grant_begin(struct grant* grant, const char* what, uint64_t bytes) {
  struct account* account;
  memset(grant, 0, sizeof *grant);
  const int error = current_account(&account, &grant->context);
  if (error != CU_OK || account == NULL) return error;
  grant->charge = (struct charge){.account = account, .what = what, .bytes = bytes};
  if (bytes < small) {
    grant->hopes = may_have_room(account, bytes, 0);
    if (grant->hopes || charge_begin(&grant->charge, account, what, bytes, units_of(bytes), FROM_SLACK) == CU_OK)
      return CU_OK;
    grant->hopes = may_have_room(account, bytes, 1);
    if (grant->hopes) return CU_OK;
  }
  return charge_begin(&grant->charge, account, what, bytes, units_of(bytes), MAY_WAIT);
}

/* Asks for `missing` units of an allocation's blocks. Returns as pay(): after a refusal, another thread may still
 * pay. */
static int64_t ask(struct charge* charge, cu_address address, uint64_t bytes, uint64_t missing, enum patience patience,
                   char* message) {
  uint64_t refused_at = 0;
  const int refused = charge_more(charge, missing, patience, message);
  lock(&places);
  int others = ask_for(address, bytes, -1);
  int64_t paid = pay(address, bytes, charge->units);
  unlock(&places);
  while (paid < 0 && refused && others && charge_look_again(&refused_at)) {
    lock(&places);
    others = ask_for(address, bytes, 0);
    paid = pay(address, bytes, charge->units);
    unlock(&places);
  }
  return paid;
}

/* Removes an earlier allocation at the address, freed with its context just now by another thread. Returns the freed
 * units. Caller holds `places`. */
static uint64_t forget_stale(cu_address address, struct account** account) {
  struct entry* const stale = table_find(&allocations, address);
  if (stale == NULL) return 0;
  const uint64_t bytes = stale->bytes;
  *account = stale->owner;
  table_remove(&allocations, stale);
  return leave_blocks(address, bytes);
}

/* Records the driver's allocation, or frees the memory if the charge is refused. */
static int keep(struct grant* grant, cu_address address, uint64_t bytes) {
  char message[MESSAGE_BYTES] = "there is no memory for the list of its allocations";
  struct charge* const charge = &grant->charge;
  const enum patience patience = grant->hopes ? NOW : MAY_WAIT; /* grant_again() retries after a hope */
  const struct entry entry = {.key = address, .owner = charge->account, .bytes = bytes, .context = grant->context};
  int64_t paid = -1;
  uint64_t missing = 0;
  struct account* stale = NULL;
  lock(&places);
  const uint64_t stale_units = forget_stale(address, &stale);
  int is_written = join_ends(charge->account, address, bytes) == 0;
  if (is_written && table_put(&allocations, &entry) != 0) {
    leave_ends(address, bytes);
    is_written = 0;
  }
  if (is_written) paid = pay(address, bytes, charge->units);
  if (is_written && paid < 0) {
    missing = unpaid_blocks(address, bytes) - charge->units;
    ask_for(address, bytes, 1);
  }
  unlock(&places);
  if (stale != NULL) ledger_give(stale, stale_units);
  if (missing != 0) paid = ask(charge, address, bytes, missing, patience, message);
  if (paid >= 0) {
    charge_settle(charge, (uint64_t)paid);
    return 1;
  }
  if (is_written) {
    lock(&places);
    struct entry* const known = table_find(&allocations, address);
    if (known != NULL) table_remove(&allocations, known);
    unlock(&places);
  }
  real_driver()->cuMemFree_v2(address);
  if (is_written) {
    lock(&places);
    const uint64_t units = leave_ends(address, bytes);
    unlock(&places);
    ledger_give(charge->account, units);
  }
  if (patience == MAY_WAIT) charge_refuse(charge->what, charge->bytes, message);
  return 0;
}

int grant_again(struct grant* grant, int error, cu_address address, uint64_t bytes) {
  if (grant->charge.account == NULL) return 0;
  if (error == CU_OK) {
    if (keep(grant, address, bytes)) return 0;
    grant->refused = 1;
    if (!grant->hopes) return 0;
  }
  if (!grant->hopes) return charge_again(&grant->charge, error);
  /* The block had no room after all. */
  grant->hopes = 0;
  if (error != CU_OK && error != CU_OUT_OF_MEMORY) return 0;
  const struct charge hoped = grant->charge;
  grant->refused =
      charge_begin(&grant->charge, hoped.account, hoped.what, hoped.bytes, units_of(hoped.bytes), MAY_WAIT) != CU_OK;
  return !grant->refused;
}

int grant_end(struct grant* grant, int error) {
  if (error == CU_OK && !grant->refused) return CU_OK;
  charge_settle(&grant->charge, 0);
  return grant->refused ? CU_OUT_OF_MEMORY : error;
}

struct freed grant_forget(cu_address address) {
  struct freed freed = {.address = address};
  lock(&places);
  struct entry* entry = table_find(&allocations, address);
  if (entry != NULL) {
    freed.account = entry->owner;
    freed.bytes = entry->bytes;
    freed.context = entry->context;
    table_remove(&allocations, entry);
  }
  unlock(&places);
  return freed;
}

void grant_freed(const struct freed* freed, int error) {
  if (freed->account == NULL) return;
  uint64_t units = 0;
  lock(&places);
  if (error == CU_OK) {
    units = leave_blocks(freed->address, freed->bytes);
  } else {
    const struct entry entry = {
        .key = freed->address, .owner = freed->account, .bytes = freed->bytes, .context = freed->context};
    table_put(&allocations, &entry); /* has room: the entry was just removed */
  }
  unlock(&places);
  ledger_give(freed->account, units);
}

void grant_rename_context(cu_context context, cu_context name) {
  lock(&places);
  for (size_t i = 0; i < allocations.size; i++) {
    if (allocations.places[i].key != 0 && allocations.places[i].context == context)
      allocations.places[i].context = name;
  }
  unlock(&places);
}

void grant_forget_context(cu_context context) {
  for (;;) {
    struct account* account = NULL;
    uint64_t units = 0;
    lock(&places);
    for (size_t i = 0; i < allocations.size;) {
      struct entry* entry = &allocations.places[i];
      if (entry->key == 0 || entry->context != context || (account != NULL && entry->owner != account)) {
        i++;
        continue;
      }
      account = entry->owner;
      units += leave_blocks(entry->key, entry->bytes);
      table_remove(&allocations, entry); /* another entry may move here */
    }
    unlock(&places);
    if (account == NULL) return;
    ledger_give(account, units);
  }
}

void grant_forget_all(void) {
  memset(&places, 0, sizeof places);
  table_clear(&allocations);
  table_clear(&blocks);
}
