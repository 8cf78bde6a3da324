/* SPDX-License-Identifier: Apache-2.0 */
#include "client/preload/graphs.h"

#include <stdio.h>
#include <string.h>

#include "client/preload/driver.h"
#include "client/preload/growth.h"
#include "client/preload/lock.h"
#include "client/preload/settings.h"

enum { MOST_TRIES = 8 };

/* Devices named by graph nodes and captured streams; may differ from the thread's current device. */
static uint64_t devices_with_memory; /* a bit per device */
static struct reserve reserves[LEDGER_DEVICES];
_Static_assert(LEDGER_DEVICES <= 64, "a bit for each device");

static uint64_t with_memory(void) {
  return __atomic_load_n(&devices_with_memory, __ATOMIC_RELAXED);
}

static cu_device take_first(uint64_t* devices) {
  const cu_device first = __builtin_ctzll(*devices);
  *devices &= *devices - 1;
  return first;
}

void graphs_have_memory(cu_device device) {
  if (device < 0 || device >= LEDGER_DEVICES) return;
  __atomic_or_fetch(&devices_with_memory, UINT64_C(1) << device, __ATOMIC_RELAXED);
}

static int reserved_units(const void* owner, uint64_t* units) {
  const cu_device device = (cu_device)((const struct reserve*)owner - reserves);
  uint64_t bytes = 0;
  if (real_driver()->cuDeviceGetGraphMemAttribute(device, CU_GRAPH_RESERVED, &bytes) != CU_OK) return -1;
  *units = units_of(bytes);
  return 0;
}

/* Returns the reserve of the device's graphs; NULL: not counted. */
static struct reserve* reserve_of(cu_device device) {
  struct account* account;
  struct reserve* const reserve = &reserves[device];
  if (real_driver()->cuDeviceGetGraphMemAttribute == NULL) return NULL;
  if (account_of(device, 1, &account) != CU_OK || account == NULL) return NULL;
  lock(&reserve->lock);
  reserve->account = account;
  reserve->read = reserved_units;
  reserve->owner = reserve;
  unlock(&reserve->lock);
  return reserve;
}

void graphs_read(void) {
  for (uint64_t left = with_memory(); left != 0;) {
    struct reserve* const reserve = reserve_of(take_first(&left));
    if (reserve != NULL) growth_read(reserve);
  }
}

void graphs_forget_all(void) {
  devices_with_memory = 0;
  memset(reserves, 0, sizeof reserves);
}

/* --- adding nodes --- */

static void look_at_memory(const cu_pool_properties* memory) {
  graphs_have_memory(device_of_location(&memory->location, memory->type));
}

int cuGraphAddMemAllocNode(cu_node* node, cu_graph graph, const cu_node* after, size_t count, void* parameters) {
  REAL(cuGraphAddMemAllocNode);
  if (parameters != NULL) look_at_memory(parameters); /* parameters begin with the properties */
  return driver->cuGraphAddMemAllocNode(node, graph, after, count, parameters);
}

static void look_at(const cu_node_parameters* parameters) {
  if (parameters != NULL && parameters->type == CU_NODE_MEMORY) look_at_memory(&parameters->memory);
}

int cuGraphAddNode(cu_node* node, cu_graph graph, const cu_node* after, size_t count, void* parameters) {
  REAL(cuGraphAddNode);
  look_at(parameters);
  return driver->cuGraphAddNode(node, graph, after, count, parameters);
}

int cuGraphAddNode_v2(cu_node* node, cu_graph graph, const cu_node* after, const void* edges, size_t count,
                      void* parameters) {
  REAL(cuGraphAddNode_v2);
  look_at(parameters);
  return driver->cuGraphAddNode_v2(node, graph, after, edges, count, parameters);
}

/* --- calls taking memory, on any device --- */

/* Returns the error for the program if a device needs the daemon and the daemon is missing. */
static int may_call(void) {
  struct account* account;
  int error = CU_OK;
  for (uint64_t left = with_memory(); left != 0 && error == CU_OK;) error = account_of(take_first(&left), 0, &account);
  return error;
}

/* Returns the watched devices, a bit per device. */
static uint64_t enter(struct growth* growth) {
  uint64_t entered = 0;
  for (uint64_t left = with_memory(); left != 0;) {
    const cu_device device = take_first(&left);
    struct reserve* const reserve = reserve_of(device);
    if (reserve == NULL) continue;
    growth_enter(growth, reserve);
    entered |= UINT64_C(1) << device;
  }
  return entered;
}

/* Returns the entered devices with refused growth. */
static uint64_t leave(struct growth* growth, uint64_t entered) {
  uint64_t refused = 0;
  for (uint64_t left = entered; left != 0;) {
    const cu_device device = take_first(&left);
    if (growth_leave(growth, &reserves[device]) != 0) refused |= UINT64_C(1) << device;
  }
  return refused;
}

static void undone(uint64_t refused) {
  for (uint64_t left = refused; left != 0;) growth_undone(&reserves[take_first(&left)]);
}

/* --- instantiating graphs --- */

static void destroy(cu_exec* exec, uint64_t devices) {
  const struct driver* driver = real_driver();
  if (driver->cuGraphExecDestroy != NULL) driver->cuGraphExecDestroy(*exec);
  *exec = NULL;
  for (uint64_t left = devices; left != 0 && driver->cuDeviceGraphMemTrim != NULL;) {
    driver->cuDeviceGraphMemTrim(take_first(&left));
  }
}

/* Ends an instantiation. Returns whether memory was refused; then the graph is destroyed. Refused memory may belong to
 * another device and to other threads. */
static int made(struct growth* growth, uint64_t entered, int error, cu_exec* exec) {
  const uint64_t refused = leave(growth, entered);
  const int is_destroyed = refused != 0 && error == CU_OK;
  if (is_destroyed) destroy(exec, entered);
  undone(refused);
  if (is_destroyed) graphs_read();
  return is_destroyed;
}

#define INSTANTIATE(call)                                                                           \
  struct growth growth = {0};                                                                       \
  int error = may_call();                                                                           \
  if (error != CU_OK) return error;                                                                 \
  for (int tries = 1;; tries++) {                                                                   \
    const uint64_t entered = enter(&growth);                                                        \
    error = call;                                                                                   \
    const int refused = made(&growth, entered, error, exec);                                        \
    if (!refused && charge_again(&growth.waited, error)) continue;                                  \
    if (!refused) break;                                                                            \
    error = CU_OUT_OF_MEMORY;                                                                       \
    if (tries == MOST_TRIES ||                                                                      \
        !growth_again(&growth, "a graph's memory", growth.missing * VRAMBROKER_COUNT_UNIT_BYTES)) { \
      break;                                                                                        \
    }                                                                                               \
  }                                                                                                 \
  growth_end(&growth);                                                                              \
  return error

int cuGraphInstantiate(cu_exec* exec, cu_graph graph, cu_node* wrong, char* log, size_t bytes) {
  REAL(cuGraphInstantiate);
  INSTANTIATE(driver->cuGraphInstantiate(exec, graph, wrong, log, bytes));
}

int cuGraphInstantiate_v2(cu_exec* exec, cu_graph graph, cu_node* wrong, char* log, size_t bytes) {
  REAL(cuGraphInstantiate_v2);
  INSTANTIATE(driver->cuGraphInstantiate_v2(exec, graph, wrong, log, bytes));
}

int cuGraphInstantiateWithFlags(cu_exec* exec, cu_graph graph, unsigned long long flags) {
  REAL(cuGraphInstantiateWithFlags);
  INSTANTIATE(driver->cuGraphInstantiateWithFlags(exec, graph, flags));
}

int cuGraphInstantiateWithParams(cu_exec* exec, cu_graph graph, void* parameters) {
  REAL(cuGraphInstantiateWithParams);
  INSTANTIATE(driver->cuGraphInstantiateWithParams(exec, graph, parameters));
}

int cuGraphInstantiateWithParams_ptsz(cu_exec* exec, cu_graph graph, void* parameters) {
  REAL(cuGraphInstantiateWithParams_ptsz);
  INSTANTIATE(driver->cuGraphInstantiateWithParams_ptsz(exec, graph, parameters));
}

/* --- launching graphs --- */

/* A launch cannot be undone. Memory above the limit is owed: further requests are refused until the memory is back. */
static int launch(int (*real)(cu_exec, cu_stream), cu_exec exec, cu_stream stream) {
  struct growth growth = {0};
  char why[MESSAGE_BYTES];
  char line[MESSAGE_BYTES + 128];
  int waited;
  const uint64_t entered = enter(&growth);
  const int error = real(exec, stream);
  const uint64_t refused = leave(&growth, entered);
  undone(refused);
  if (refused != 0 && ledger_take(growth.reserve->account, 0, AT_ONCE, &waited, why) != 0) {
    snprintf(line, sizeof line,
             "a graph that runs took %.1f MiB that are not granted, and nothing more is until they are: %s",
             (double)(growth.missing * VRAMBROKER_COUNT_UNIT_BYTES) / (1 << 20), why);
    refuse(line);
  }
  return error;
}

int cuGraphUpload(cu_exec exec, cu_stream stream) {
  REAL(cuGraphUpload);
  return launch(driver->cuGraphUpload, exec, stream);
}

int cuGraphUpload_ptsz(cu_exec exec, cu_stream stream) {
  REAL(cuGraphUpload_ptsz);
  return launch(driver->cuGraphUpload_ptsz, exec, stream);
}

int cuGraphLaunch(cu_exec exec, cu_stream stream) {
  REAL(cuGraphLaunch);
  return launch(driver->cuGraphLaunch, exec, stream);
}

int cuGraphLaunch_ptsz(cu_exec exec, cu_stream stream) {
  REAL(cuGraphLaunch_ptsz);
  return launch(driver->cuGraphLaunch_ptsz, exec, stream);
}

int cuDeviceGraphMemTrim(cu_device device) {
  REAL(cuDeviceGraphMemTrim);
  const int error = driver->cuDeviceGraphMemTrim(device);
  graphs_read();
  return error;
}
