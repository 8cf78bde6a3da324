/* SPDX-License-Identifier: Apache-2.0 */
#ifndef VRAMBROKER_CLIENT_PRELOAD_CONTEXTS_H_
#define VRAMBROKER_CLIENT_PRELOAD_CONTEXTS_H_

#include "client/preload/driver_api.h"

/* Returns the device of the calling thread's context; -1: no context. Stores the context unless `context` is NULL. */
cu_device current_device(cu_context* context);

void contexts_forget_all(void);

#endif /* VRAMBROKER_CLIENT_PRELOAD_CONTEXTS_H_ */
