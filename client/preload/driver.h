/* SPDX-License-Identifier: Apache-2.0
 *
 * Functions of the real driver and the real NVML, and the hooks before them. A process has a single copy of each; a
 * second copy of the driver, in its own namespace, is left alone.
 */
#ifndef VRAMBROKER_CLIENT_PRELOAD_DRIVER_H_
#define VRAMBROKER_CLIENT_PRELOAD_DRIVER_H_

#include "client/preload/driver_api.h"

/* Pointers named after their functions; NULL: the driver lacks the function. */
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

/* Return the functions of the loaded library; NULL: not loaded. Never load a library. */
const struct driver* real_driver(void);
const struct management* real_management(void);

/* Returns the number of a hook by name; -1: no hook has the name. "cudnnCreate" has no hook. */
int hook_named(const char* name);
/* Returns the hook itself. */
void* hook_function(int hook);
/* Returns the real function behind the hook; NULL: the library is not loaded, or lacks the function. */
void* hooked_function(int hook);
/* Returns the hook if `function`, found by the hook's name, is the driver's own; otherwise `function`. */
void* hook_for(int hook, void* function);
/* Like hook_for(), for a `function` of the driver found by any name. */
void* hook_for_address(void* function);
/* Returns whether `function` is the hook itself. */
int is_hook(int hook, const void* function);

#endif /* VRAMBROKER_CLIENT_PRELOAD_DRIVER_H_ */
