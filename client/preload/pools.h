/* SPDX-License-Identifier: Apache-2.0
 *
 * Memory in the order of a stream. A pool reserves memory of the device as it likes, and keeps what was freed: so what
 * is counted is what it has reserved, not what was allocated from it.
 */
#ifndef VRAMBROKER_CLIENT_PRELOAD_POOLS_H_
#define VRAMBROKER_CLIENT_PRELOAD_POOLS_H_

#include "client/preload/driver_api.h"
#include "client/preload/table.h"

/* Before the driver frees an address, which may be of a pool: another thread may get the same one at once. */
struct entry pools_forget(cu_address address);
/* The driver has freed it (`error` is CU_OK), or not. */
void pools_freed(const struct entry* forgotten, int error);
/* Reads again what all pools have reserved. */
void pools_read(void);
/* The same if anything was freed since. */
void pools_read_if_freed(void);
void pools_forget_all(void);

/* Whether what is called on the stream goes into a graph. */
int is_capturing(cu_stream stream, int of_thread);

#endif /* VRAMBROKER_CLIENT_PRELOAD_POOLS_H_ */
