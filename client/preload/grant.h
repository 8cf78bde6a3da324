/* SPDX-License-Identifier: Apache-2.0
 *
 * Charge for an allocation of memory with an address: taken before the driver is called, and settled by the address.
 *
 * The driver hands out memory in blocks of 2 MiB, aligned to 2 MiB, and puts several small allocations into a block. So
 * a block counts once, from its first allocation until its last free.
 *
 *     struct grant grant;
 *     int error = grant_begin(&grant, "cuMemAlloc", bytes);
 *     if (error != CU_OK) return error;
 *     do {
 *       error = driver->cuMemAlloc_v2(address, bytes);
 *     } while (grant_again(&grant, error, *address, bytes));
 *     return grant_end(&grant, error);
 */
#ifndef VRAMBROKER_CLIENT_PRELOAD_GRANT_H_
#define VRAMBROKER_CLIENT_PRELOAD_GRANT_H_

#include "client/preload/charge.h"

struct grant {
  struct charge charge;
  cu_context context; /* context of the allocation */
  int hopes;          /* no units were charged: we expect the driver to use a block already charged */
  int refused;        /* the driver gave memory, but the charge was refused */
};

int grant_begin(struct grant* grant, const char* what, uint64_t bytes);
/* Returns whether to call the driver again. Charges the memory at `address`; `bytes` is the size really requested. */
int grant_again(struct grant* grant, int error, cu_address address, uint64_t bytes);
/* Returns the program's result. */
int grant_end(struct grant* grant, int error);

/* Record of an address; NULL account: unknown address. */
struct freed {
  struct account* account;
  uint64_t bytes;
  cu_context context;
  cu_address address;
};
/* Removes the record before the driver frees the address: another thread may get the address at once. */
struct freed grant_forget(cu_address address);
/* Gives the units back if the driver has freed the address (`error` is CU_OK); otherwise restores the record. */
void grant_freed(const struct freed* freed, int error);
/* Rename a context before its destruction, and forget everything allocated in a destroyed context. */
void grant_rename_context(cu_context context, cu_context name);
void grant_forget_context(cu_context context);

void grant_forget_all(void);

#endif /* VRAMBROKER_CLIENT_PRELOAD_GRANT_H_ */
