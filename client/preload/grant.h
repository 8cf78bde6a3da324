/* SPDX-License-Identifier: Apache-2.0
 *
 * One allocation of memory with an address: charged before the driver is called, and settled by where the driver put
 * it.
 *
 * The driver gives memory out in blocks of 2 MiB, at addresses that are multiples of 2 MiB, and puts small allocations
 * together into one. So a block counts once, from the first allocation in it until the last one is freed.
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
  cu_context context; /* that it is allocated in */
  int hopes;   /* nothing is taken for it: a block that is counted already has room, if the driver sees it so, too */
  int refused; /* the driver gave memory, but may not have */
};

int grant_begin(struct grant* grant, const char* what, uint64_t bytes);
/* Whether the driver is to be asked again. Counts what it gave at `address`; `bytes` is what it really was asked for.
 */
int grant_again(struct grant* grant, int error, cu_address address, uint64_t bytes);
/* What the program is told. */
int grant_end(struct grant* grant, int error);

/* What is known of an address; NULL account: nothing. */
struct freed {
  struct account* account;
  uint64_t bytes;
  cu_context context;
  cu_address address;
};
/* Before the driver frees it: another thread may get the same address at once. */
struct freed grant_forget(cu_address address);
/* The driver has freed it (`error` is CU_OK), or not. */
void grant_freed(const struct freed* freed, int error);
/* Everything that was allocated in a context that is no more, and may have got another name before. */
void grant_rename_context(cu_context context, cu_context name);
void grant_forget_context(cu_context context);

void grant_forget_all(void);

#endif /* VRAMBROKER_CLIENT_PRELOAD_GRANT_H_ */
