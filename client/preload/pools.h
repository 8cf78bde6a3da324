/* SPDX-License-Identifier: Apache-2.0
 *
 * Stream-ordered memory. A pool reserves device memory as it likes, and keeps freed memory. So we count the pool's
 * reserve, not its allocations.
 */
#ifndef VRAMBROKER_CLIENT_PRELOAD_POOLS_H_
#define VRAMBROKER_CLIENT_PRELOAD_POOLS_H_

#include "client/preload/driver_api.h"
#include "client/preload/table.h"

/* Removes the record of a pool's address before the driver frees it: another thread may get the address at once. */
struct entry pools_forget(cu_address address);
/* Counts the free if `error` is CU_OK; otherwise restores the record. */
void pools_freed(const struct entry* forgotten, int error);
/* Reads again the reserves of all pools. */
void pools_read(void);
/* Calls pools_read() if memory was freed since the last read. */
void pools_read_if_freed(void);
void pools_forget_all(void);

/* Returns whether calls on the stream are captured into a graph. `of_thread`: the default stream is the thread's
 * own. */
int is_capturing(cu_stream stream, int of_thread);

#endif /* VRAMBROKER_CLIENT_PRELOAD_POOLS_H_ */
