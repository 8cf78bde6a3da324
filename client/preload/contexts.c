/* SPDX-License-Identifier: Apache-2.0
 *
 * A process begins its session with its first context, so that the daemon knows the context's memory as this program's
 * even before an allocation. Destroying a context frees plain memory and arrays allocated in the context. Pools and
 * graphs are asked for their remaining memory.
 */
#include "client/preload/contexts.h"

#include "client/preload/arrays.h"
#include "client/preload/driver.h"
#include "client/preload/grant.h"
#include "client/preload/graphs.h"
#include "client/preload/ledger.h"
#include "client/preload/pools.h"
#include "client/preload/session.h"

cu_device current_device(cu_context* context) {
  const struct driver* driver = real_driver();
  cu_device device = -1;
  if (context != NULL && driver->cuCtxGetCurrent != NULL) driver->cuCtxGetCurrent(context);
  return driver->cuCtxGetDevice != NULL && driver->cuCtxGetDevice(&device) == CU_OK ? device : -1;
}

static int have_begun;

/* Creating a context never fails because the daemon is missing; later allocations do, with a message. So we try to
 * connect only once. */
static int begun(cu_device device, int error) {
  struct account* account;
  if (error != CU_OK || __atomic_exchange_n(&have_begun, 1, __ATOMIC_RELAXED)) return error;
  if (account_of(device, 1, &account) == CU_OK && account != NULL) session_keep();
  return error;
}

int cuCtxCreate(cu_context* context, unsigned int flags, cu_device device) {
  REAL(cuCtxCreate);
  return begun(device, driver->cuCtxCreate(context, flags, device));
}

int cuCtxCreate_v2(cu_context* context, unsigned int flags, cu_device device) {
  REAL(cuCtxCreate_v2);
  return begun(device, driver->cuCtxCreate_v2(context, flags, device));
}

int cuCtxCreate_v3(cu_context* context, void* affinity, int count, unsigned int flags, cu_device device) {
  REAL(cuCtxCreate_v3);
  return begun(device, driver->cuCtxCreate_v3(context, affinity, count, flags, device));
}

int cuCtxCreate_v4(cu_context* context, void* parameters, unsigned int flags, cu_device device) {
  REAL(cuCtxCreate_v4);
  return begun(device, driver->cuCtxCreate_v4(context, parameters, flags, device));
}

int cuDevicePrimaryCtxRetain(cu_context* context, cu_device device) {
  REAL(cuDevicePrimaryCtxRetain);
  return begun(device, driver->cuDevicePrimaryCtxRetain(context, device));
}

static void rename_context(cu_context context, cu_context name) {
  grant_rename_context(context, name);
  arrays_rename_context(context, name);
}

static void gone(cu_context context) {
  if (context != NULL) {
    grant_forget_context(context);
    arrays_forget_context(context);
  }
  pools_read();
  graphs_read();
}

/* Another thread may get the handle for a new context right after the destruction. So allocations of the context first
 * get a unique name: the address of a local variable. */
static int destroy(int (*real)(cu_context), cu_context context) {
  int error = CU_OK;
  const cu_context name = (cu_context)(void*)&error;
  rename_context(context, name);
  error = real(context);
  if (error == CU_OK) {
    gone(name);
  } else {
    rename_context(name, context);
  }
  return error;
}

int cuCtxDestroy(cu_context context) {
  REAL(cuCtxDestroy);
  return destroy(driver->cuCtxDestroy, context);
}

int cuCtxDestroy_v2(cu_context context) {
  REAL(cuCtxDestroy_v2);
  return destroy(driver->cuCtxDestroy_v2, context);
}

static int is_active(cu_device device) {
  const struct driver* driver = real_driver();
  unsigned int flags;
  int active = 0;
  return driver->cuDevicePrimaryCtxGetState != NULL &&
         driver->cuDevicePrimaryCtxGetState(device, &flags, &active) == CU_OK && active;
}

/* Returns a device's active primary context, or NULL. Retains the context for a moment, and never creates one. */
static cu_context primary(cu_device device, int (*release)(cu_device)) {
  const struct driver* driver = real_driver();
  cu_context context = NULL;
  if (!is_active(device) || driver->cuDevicePrimaryCtxRetain == NULL || release == NULL) return NULL;
  if (driver->cuDevicePrimaryCtxRetain(&context, device) != CU_OK) return NULL;
  release(device);
  return context;
}

/* Like destroy(), if the call ends the context. */
static int end(int (*real)(cu_device), cu_device device, cu_context context, int is_reset) {
  int error = CU_OK;
  const cu_context name = (cu_context)(void*)&error;
  if (context != NULL) rename_context(context, name);
  error = real(device);
  if (error == CU_OK && (is_reset || !is_active(device))) {
    gone(context == NULL ? NULL : name);
  } else if (context != NULL) {
    rename_context(name, context);
  }
  return error;
}

static int reset(int (*real)(cu_device), int (*release)(cu_device), cu_device device) {
  return end(real, device, primary(device, release), 1);
}

int cuDevicePrimaryCtxReset(cu_device device) {
  REAL(cuDevicePrimaryCtxReset);
  return reset(driver->cuDevicePrimaryCtxReset, driver->cuDevicePrimaryCtxRelease, device);
}

int cuDevicePrimaryCtxReset_v2(cu_device device) {
  REAL(cuDevicePrimaryCtxReset_v2);
  return reset(driver->cuDevicePrimaryCtxReset_v2, driver->cuDevicePrimaryCtxRelease_v2, device);
}

/* Only the last release ends the context. */
static int release(int (*real)(cu_device), cu_device device) {
  return end(real, device, primary(device, real), 0);
}

int cuDevicePrimaryCtxRelease(cu_device device) {
  REAL(cuDevicePrimaryCtxRelease);
  return release(driver->cuDevicePrimaryCtxRelease, device);
}

int cuDevicePrimaryCtxRelease_v2(cu_device device) {
  REAL(cuDevicePrimaryCtxRelease_v2);
  return release(driver->cuDevicePrimaryCtxRelease_v2, device);
}

void contexts_forget_all(void) {
  have_begun = 0;
}
