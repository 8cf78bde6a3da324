/* SPDX-License-Identifier: Apache-2.0
 *
 * A table from nonzero numbers (addresses, handles) to records. Memory comes from the kernel, never from the program's
 * malloc. Not thread-safe. A zeroed table is empty.
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
  void* owner;   /* account or pool of the entry */
  void* context; /* context or array of the entry */
};

struct table {
  struct entry* places;
  size_t size; /* a power of two */
  size_t used;
};

/* Returns NULL without an entry. Entries move when entries are added or removed. */
struct entry* table_find(const struct table* table, uint64_t key);
/* Adds or replaces an entry. -1: no memory. */
int table_put(struct table* table, const struct entry* entry);
void table_remove(struct table* table, struct entry* entry);
void table_clear(struct table* table);

#endif /* VRAMBROKER_CLIENT_PRELOAD_TABLE_H_ */
