/* SPDX-License-Identifier: Apache-2.0
 *
 * The real driver and the real NVML: their functions, and which of them a hook stands before. A process has one of
 * each; a second copy of the driver in it, in a namespace of its own, is left alone.
 */
#ifndef VRAMBROKER_CLIENT_PRELOAD_DRIVER_H_
#define VRAMBROKER_CLIENT_PRELOAD_DRIVER_H_

#include "client/preload/driver_api.h"

/* Each function by its name; NULL: the driver lacks it. */
#define DECLARE_FUNCTION(name, arguments) int(*name) arguments;
struct driver {
  CUDA_HOOKS(DECLARE_FUNCTION)
  CUDA_CALLS(DECLARE_FUNCTION)
};
struct management {
  NVML_HOOKS(DECLARE_FUNCTION)
  NVML_CALLS(DECLARE_FUNCTION)
};
#undef DECLARE_FUNCTION

/* The ones that are loaded; NULL: none is. They are never loaded by this library. */
const struct driver* real_driver(void);
const struct management* real_management(void);

/* Of a hook by its name, -1: no hook has it. "cudnnCreate" is no hook's. */
int hook_named(const char* name);
/* The hook itself. */
void* hook_function(int hook);
/* What it stands before; NULL: no such library is loaded, or it lacks the function. */
void* hooked_function(int hook);
/* `function`, found as the hook's name; what a program is to get: the hook, where `function` is the driver's own. */
void* hook_for(int hook, void* function);
/* Of `function`, found in the driver by whatever name. */
void* hook_for_address(void* function);
/* Whether `function` is a hook of this library. */
int is_hook(int hook, const void* function);

#endif /* VRAMBROKER_CLIENT_PRELOAD_DRIVER_H_ */
