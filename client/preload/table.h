/* SPDX-License-Identifier: Apache-2.0
 *
 * A table from numbers other than 0 (addresses, handles) to what is known of them. Its memory is the kernel's: the
 * program's malloc is not called. Not thread-safe. All zeroes is an empty table.
 */
#ifndef VRAMBROKER_CLIENT_PRELOAD_TABLE_H_
#define VRAMBROKER_CLIENT_PRELOAD_TABLE_H_

#include <stddef.h>
#include <stdint.h>

struct entry {
  uint64_t key; /* 0: a free place */
  uint64_t bytes;
  uint64_t count;
  uint64_t more;
  void* owner;   /* what it belongs to */
  void* context; /* likewise */
};

struct table {
  struct entry* places;
  size_t size; /* a power of two */
  size_t used;
};

/* NULL: there is none. Entries move when others are added or removed. */
struct entry* table_find(const struct table* table, uint64_t key);
/* Adds or replaces. -1: no memory. */
int table_put(struct table* table, const struct entry* entry);
void table_remove(struct table* table, struct entry* entry);
void table_clear(struct table* table);

#endif /* VRAMBROKER_CLIENT_PRELOAD_TABLE_H_ */
