/* SPDX-License-Identifier: Apache-2.0 */
#ifndef VRAMBROKER_CLIENT_PRELOAD_HANDLES_H_
#define VRAMBROKER_CLIENT_PRELOAD_HANDLES_H_

#include "client/preload/table.h"

/* An array, mipmapped or not, is about to go: with it go the mappings of memory into it, which `taken` gets. The driver
 * has destroyed it then (`error` is CU_OK), or not. */
void handles_take_array(const void* array, struct table* taken);
void handles_array_taken(struct table* taken, int error);
void handles_forget_all(void);

#endif /* VRAMBROKER_CLIENT_PRELOAD_HANDLES_H_ */
