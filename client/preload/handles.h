/* SPDX-License-Identifier: Apache-2.0 */
#ifndef VRAMBROKER_CLIENT_PRELOAD_HANDLES_H_
#define VRAMBROKER_CLIENT_PRELOAD_HANDLES_H_

#include "client/preload/table.h"

/* Call before and after an array, mipmapped or not, is destroyed. `taken` gets the memory mappings ended with the
 * array. `error`: the driver's result; CU_OK: destroyed. */
void handles_take_array(const void* array, struct table* taken);
void handles_array_taken(struct table* taken, int error);
void handles_forget_all(void);

#endif /* VRAMBROKER_CLIENT_PRELOAD_HANDLES_H_ */
