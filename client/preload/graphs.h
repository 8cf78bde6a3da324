/* SPDX-License-Identifier: Apache-2.0
 *
 * Memory that graphs allocate when they run. The driver keeps it for all graphs of a device together.
 */
#ifndef VRAMBROKER_CLIENT_PRELOAD_GRAPHS_H_
#define VRAMBROKER_CLIENT_PRELOAD_GRAPHS_H_

#include "client/preload/driver_api.h"

/* A graph with a node that allocates is being made, whose memory is the device's; -1: the host's. Before that launches
 * are not looked at. */
void graphs_have_memory(cu_device device);
/* Reads again what the graphs of all devices have reserved. */
void graphs_read(void);
void graphs_forget_all(void);

#endif /* VRAMBROKER_CLIENT_PRELOAD_GRAPHS_H_ */
