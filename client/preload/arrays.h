/* SPDX-License-Identifier: Apache-2.0 */
#ifndef VRAMBROKER_CLIENT_PRELOAD_ARRAYS_H_
#define VRAMBROKER_CLIENT_PRELOAD_ARRAYS_H_

#include "client/preload/driver_api.h"

/* Whether memory is mapped into the whole array alone (CUDA_ARRAY3D_DEFERRED_MAPPING). */
int arrays_is_deferred(const void* array);
void arrays_rename_context(cu_context context, cu_context name);
void arrays_forget_context(cu_context context);
void arrays_forget_all(void);

#endif /* VRAMBROKER_CLIENT_PRELOAD_ARRAYS_H_ */
