/* SPDX-License-Identifier: Apache-2.0 */
#include "client/preload/table.h"

#include <string.h>
#include <sys/mman.h>

enum { FIRST_SIZE = 256 };

static size_t place_of(const struct table* table, uint64_t key) {
  key *= UINT64_C(0x9E3779B97F4A7C15);
  return (size_t)(key >> 32) & (table->size - 1);
}

/* Returns the key's place, or the free place for the key. */
static struct entry* look(const struct table* table, uint64_t key) {
  size_t place = place_of(table, key);
  while (table->places[place].key != 0 && table->places[place].key != key) place = (place + 1) & (table->size - 1);
  return &table->places[place];
}

struct entry* table_find(const struct table* table, uint64_t key) {
  if (table->size == 0 || key == 0) return NULL;
  struct entry* entry = look(table, key);
  return entry->key == 0 ? NULL : entry;
}

static int grow(struct table* table) {
  struct table larger = {.size = table->size == 0 ? FIRST_SIZE : table->size * 2, .used = table->used};
  larger.places =
      mmap(NULL, larger.size * sizeof *larger.places, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (larger.places == MAP_FAILED) return -1;
  for (size_t i = 0; i < table->size; i++) {
    if (table->places[i].key != 0) *look(&larger, table->places[i].key) = table->places[i];
  }
  /* A child forked in between finds an empty table, and clears nothing. */
  table_clear(table);
  table->places = larger.places;
  table->used = larger.used;
  __atomic_store_n(&table->size, larger.size, __ATOMIC_RELEASE);
  return 0;
}

int table_put(struct table* table, const struct entry* entry) {
  if (table->used * 4 >= table->size * 3 && grow(table) != 0) return -1;
  struct entry* place = look(table, entry->key);
  if (place->key == 0) table->used++;
  *place = *entry;
  return 0;
}

void table_remove(struct table* table, struct entry* entry) {
  const size_t mask = table->size - 1;
  size_t hole = (size_t)(entry - table->places);
  /* Entries after the hole move up if their home is the hole or before. */
  for (size_t next = (hole + 1) & mask; table->places[next].key != 0; next = (next + 1) & mask) {
    const size_t home = place_of(table, table->places[next].key);
    if (((next - home) & mask) >= ((next - hole) & mask)) {
      table->places[hole] = table->places[next];
      hole = next;
    }
  }
  memset(&table->places[hole], 0, sizeof *table->places);
  table->used--;
}

void table_clear(struct table* table) {
  const struct table before = *table;
  memset(table, 0, sizeof *table);
  if (before.size != 0) munmap(before.places, before.size * sizeof *before.places);
}
