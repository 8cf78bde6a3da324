/* SPDX-License-Identifier: Apache-2.0
 *
 * Memory allocated by running graphs. The driver keeps the memory for all graphs of a device together.
 */
#ifndef VRAMBROKER_CLIENT_PRELOAD_GRAPHS_H_
#define VRAMBROKER_CLIENT_PRELOAD_GRAPHS_H_

#include "client/preload/driver_api.h"

/* Notes a new graph node allocating on the device; -1: on the host. Launches are not watched before the first note. */
void graphs_have_memory(cu_device device);
/* Reads again the reserved memory of all devices' graphs. */
void graphs_read(void);
void graphs_forget_all(void);

#endif /* VRAMBROKER_CLIENT_PRELOAD_GRAPHS_H_ */
