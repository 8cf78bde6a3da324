/* SPDX-License-Identifier: Apache-2.0 */
#include "client/preload/grant.h"

#include <string.h>

#include "client/preload/driver.h"
#include "client/preload/lock.h"
#include "client/preload/table.h"

static const uint64_t unit = VRAMBROKER_COUNT_UNIT_BYTES;
static const uint64_t small = UINT64_C(1) << 20; /* larger ones share no block */

/* Held for moments. */
static struct lock places;
static struct table allocations; /* address -> account, bytes, context */
static struct table blocks; /* number of a block that is not one allocation's alone -> account, how many, their bytes */

/* --- blocks. With the lock. --- */

static uint64_t first_block(cu_address address) {
  return address / unit;
}

static uint64_t last_block(cu_address address, uint64_t bytes) {
  return (address + (bytes == 0 ? 0 : bytes - 1)) / unit;
}

/* How much of a block the allocation has. */
static uint64_t share(uint64_t block, cu_address address, uint64_t bytes) {
  const uint64_t from = block * unit > address ? block * unit : address;
  const uint64_t to = (block + 1) * unit < address + bytes ? (block + 1) * unit : address + bytes;
  return to - from;
}

/* 1: nobody had the block. -1: no memory for the table. */
static int add_to_block(struct account* account, uint64_t block, uint64_t bytes) {
  struct entry* known = table_find(&blocks, block);
  if (known != NULL) {
    known->count++;
    known->bytes += bytes;
    return 0;
  }
  const struct entry entry = {.key = block, .owner = account, .count = 1, .bytes = bytes};
  return table_put(&blocks, &entry) != 0 ? -1 : 1;
}

/* 1: nobody has the block any more. */
static int remove_from_block(uint64_t block, uint64_t bytes) {
  struct entry* known = table_find(&blocks, block);
  if (known == NULL) return 0;
  known->bytes -= bytes < known->bytes ? bytes : known->bytes;
  if (--known->count != 0) return 0;
  table_remove(&blocks, known);
  return 1;
}

/* Both return the number of blocks that it is the first in, or was the last in. Only the first and the last block of an
   allocation can have others in them. */
static int64_t add_blocks(struct account* account, cu_address address, uint64_t bytes) {
  const uint64_t first = first_block(address);
  const uint64_t last = last_block(address, bytes);
  int64_t added = last - first > 1 ? (int64_t)(last - first - 1) : 0;
  const int result = add_to_block(account, first, share(first, address, bytes));
  if (result < 0) return -1;
  added += result;
  if (last == first) return added;
  const int result_of_last = add_to_block(account, last, share(last, address, bytes));
  if (result_of_last >= 0) return added + result_of_last;
  remove_from_block(first, share(first, address, bytes));
  return -1;
}

static uint64_t remove_blocks(cu_address address, uint64_t bytes) {
  const uint64_t first = first_block(address);
  const uint64_t last = last_block(address, bytes);
  uint64_t removed = last - first > 1 ? last - first - 1 : 0;
  removed += (uint64_t)remove_from_block(first, share(first, address, bytes));
  if (last != first) removed += (uint64_t)remove_from_block(last, share(last, address, bytes));
  return removed;
}

static int has_room(const struct entry* block, const struct account* account, uint64_t bytes) {
  return block != NULL && block->key != 0 && block->owner == account && block->bytes + bytes <= unit;
}

/* Whether a block of the account may have room; the driver decides. The one that had it last is looked at first, all of
   them only if `thoroughly`. */
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

/* Writes down what the driver gave; gives it back where it may not be kept. */
static int keep(struct grant* grant, cu_address address, uint64_t bytes) {
  const struct driver* driver = real_driver();
  struct account* account = grant->charge.account;
  const struct entry entry = {.key = address, .owner = account, .bytes = bytes, .context = grant->context};
  lock(&places);
  int64_t added = add_blocks(account, address, bytes);
  if (added >= 0 && table_put(&allocations, &entry) != 0) {
    remove_blocks(address, bytes);
    added = -1;
  }
  unlock(&places);
  const uint64_t units = added < 0 ? 0 : (uint64_t)added;
  const enum patience patience = grant->hopes ? NOW : MAY_WAIT; /* where it hoped it tries again */
  if (added >= 0 &&
      (units <= grant->charge.units || charge_more(&grant->charge, units - grant->charge.units, patience) == 0)) {
    charge_settle(&grant->charge, units);
    return 1;
  }
  if (added >= 0) {
    lock(&places);
    struct entry* known = table_find(&allocations, address);
    if (known != NULL) table_remove(&allocations, known);
    remove_blocks(address, bytes);
    unlock(&places);
  }
  driver->cuMemFree_v2(address);
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
  /* There was no room after all. */
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
    units = remove_blocks(freed->address, freed->bytes);
  } else {
    const struct entry entry = {
        .key = freed->address, .owner = freed->account, .bytes = freed->bytes, .context = freed->context};
    table_put(&allocations, &entry); /* there is room: it was just removed */
  }
  unlock(&places);
  ledger_give(freed->account, units);
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
      units += remove_blocks(entry->key, entry->bytes);
      table_remove(&allocations, entry); /* another may be in its place now */
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
