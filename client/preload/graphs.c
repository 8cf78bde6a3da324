/* SPDX-License-Identifier: Apache-2.0 */
#include "client/preload/graphs.h"

#include <stdio.h>
#include <string.h>

#include "client/preload/contexts.h"
#include "client/preload/driver.h"
#include "client/preload/growth.h"
#include "client/preload/lock.h"
#include "client/preload/settings.h"

enum { MOST_TRIES = 8 };

static int have_memory;
static struct lock growing; /* as of pools */
static uint64_t known[LEDGER_DEVICES];

void graphs_have_memory(void) {
  __atomic_store_n(&have_memory, 1, __ATOMIC_RELAXED);
}

static uint64_t reserved_units(cu_device device) {
  const struct driver* driver = real_driver();
  uint64_t bytes = 0;
  if (driver->cuDeviceGetGraphMemAttribute == NULL) return 0;
  return driver->cuDeviceGetGraphMemAttribute(device, CU_GRAPH_RESERVED, &bytes) == CU_OK ? units_of(bytes) : 0;
}

/* The device whose graphs are counted, or -1. */
static cu_device counted_device(struct growth* growth) {
  if (!__atomic_load_n(&have_memory, __ATOMIC_RELAXED) || real_driver()->cuDeviceGetGraphMemAttribute == NULL)
    return -1;
  const cu_device device = current_device(NULL);
  if (device < 0 || device >= LEDGER_DEVICES) return -1;
  if (account_of(device, 1, &growth->account) != CU_OK || growth->account == NULL) return -1;
  return device;
}

void graphs_read(cu_device device) {
  struct growth growth = {0};
  if (device < 0 || device >= LEDGER_DEVICES || known[device] == 0) return;
  if (account_of(device, 1, &growth.account) != CU_OK || growth.account == NULL) return;
  lock(&growing);
  growth_owe(&growth, &known[device], reserved_units(device));
  unlock(&growing);
}

void graphs_forget_all(void) {
  have_memory = 0;
  memset(&growing, 0, sizeof growing);
  memset(known, 0, sizeof known);
}

/* --- making nodes --- */

int cuGraphAddMemAllocNode(cu_node* node, cu_graph graph, const cu_node* after, size_t count, void* parameters) {
  REAL(cuGraphAddMemAllocNode);
  graphs_have_memory();
  return driver->cuGraphAddMemAllocNode(node, graph, after, count, parameters);
}

static void look_at(const void* parameters) {
  int type; /* comes first */
  if (parameters == NULL) return;
  memcpy(&type, parameters, sizeof type);
  if (type == CU_NODE_MEMORY) graphs_have_memory();
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

/* --- making graphs that can run --- */

/* Charges what the device's graphs have grown by. -1: that may not be, and the graph is destroyed. */
static int charge_or_undo(struct growth* growth, cu_device device, cu_exec* exec) {
  const struct driver* driver = real_driver();
  if (growth_charge(growth, &known[device], reserved_units(device)) == 0) return 0;
  if (driver->cuGraphExecDestroy != NULL) driver->cuGraphExecDestroy(*exec);
  if (driver->cuDeviceGraphMemTrim != NULL) driver->cuDeviceGraphMemTrim(device);
  *exec = NULL;
  growth_owe(growth, &known[device], reserved_units(device));
  return -1;
}

#define INSTANTIATE(call)                                                                           \
  struct growth growth = {0};                                                                       \
  const cu_device device = counted_device(&growth);                                                 \
  if (device < 0) return call;                                                                      \
  int error = CU_OK;                                                                                \
  for (int tries = 1;; tries++) {                                                                   \
    lock(&growing);                                                                                 \
    error = call;                                                                                   \
    const int refused = error == CU_OK && charge_or_undo(&growth, device, exec) != 0;               \
    unlock(&growing);                                                                               \
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

/* --- running them --- */

/* A launch cannot be undone. What its memory exceeds the limit by is owed: nothing more is granted until it is back. */
static int launch(int (*real)(cu_exec, cu_stream), cu_exec exec, cu_stream stream) {
  struct growth growth = {0};
  char why[MESSAGE_BYTES];
  char line[MESSAGE_BYTES + 128];
  int waited;
  const cu_device device = counted_device(&growth);
  if (device < 0) return real(exec, stream);
  lock(&growing);
  const int error = real(exec, stream);
  const int owes = growth_charge(&growth, &known[device], reserved_units(device)) != 0;
  if (owes) growth_owe(&growth, &known[device], reserved_units(device));
  unlock(&growing);
  /* Others are asked for it without the lock. */
  if (owes && ledger_take(growth.account, 0, AT_ONCE, &waited, why) != 0) {
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
  graphs_read(device);
  return error;
}
