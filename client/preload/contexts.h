/* SPDX-License-Identifier: Apache-2.0 */
#ifndef VRAMBROKER_CLIENT_PRELOAD_CONTEXTS_H_
#define VRAMBROKER_CLIENT_PRELOAD_CONTEXTS_H_

#include "client/preload/driver_api.h"

/* The device of the calling thread's context, and where `context` is not NULL, the context. -1: the thread has none. */
cu_device current_device(cu_context* context);

void contexts_forget_all(void);

#endif /* VRAMBROKER_CLIENT_PRELOAD_CONTEXTS_H_ */
