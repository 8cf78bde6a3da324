/* SPDX-License-Identifier: Apache-2.0
 *
 * Memory figures for this program: the total is its limit, free is the memory still available under the limit. Memory
 * of other programs changes neither, so two programs sizing themselves at once both get it right.
 */
#include "client/preload/contexts.h"
#include "client/preload/driver.h"
#include "client/preload/ledger.h"

static uint64_t least(uint64_t one, uint64_t other) {
  return one < other ? one : other;
}

/* Changes the driver's figures of a device. Without the daemon, no memory is free. */
static void adjust(cu_device device, uint64_t* left, uint64_t* total) {
  struct account* account;
  uint64_t limit;
  uint64_t free_bytes;
  if (account_of(device, 0, &account) != CU_OK) {
    *left = 0;
  } else if (account != NULL && ledger_figures(account, &limit, &free_bytes) == 0) {
    *total = least(limit, *total);
    *left = least(free_bytes, *total);
  }
}

int cuMemGetInfo_v2(size_t* free_bytes, size_t* total_bytes) {
  REAL(cuMemGetInfo_v2);
  const int error = driver->cuMemGetInfo_v2(free_bytes, total_bytes);
  if (error != CU_OK) return error;
  uint64_t left = *free_bytes;
  uint64_t total = *total_bytes;
  adjust(current_device(NULL), &left, &total);
  *free_bytes = left;
  *total_bytes = total;
  return error;
}

int cuMemGetInfo(unsigned int* free_bytes, unsigned int* total_bytes) {
  REAL(cuMemGetInfo);
  const int error = driver->cuMemGetInfo(free_bytes, total_bytes);
  if (error != CU_OK) return error;
  uint64_t left = *free_bytes;
  uint64_t total = *total_bytes;
  adjust(current_device(NULL), &left, &total);
  *free_bytes = (unsigned int)left;
  *total_bytes = (unsigned int)total;
  return error;
}

int cuDeviceTotalMem_v2(size_t* bytes, cu_device device) {
  REAL(cuDeviceTotalMem_v2);
  const int error = driver->cuDeviceTotalMem_v2(bytes, device);
  if (error != CU_OK) return error;
  uint64_t left = 0;
  uint64_t total = *bytes;
  adjust(device, &left, &total);
  *bytes = total;
  return error;
}

int cuDeviceTotalMem(unsigned int* bytes, cu_device device) {
  REAL(cuDeviceTotalMem);
  const int error = driver->cuDeviceTotalMem(bytes, device);
  if (error != CU_OK) return error;
  uint64_t left = 0;
  uint64_t total = *bytes;
  adjust(device, &left, &total);
  *bytes = (unsigned int)total;
  return error;
}

/* --- NVML --- */

static int figures_of(const struct management* management, nvml_device device, uint64_t* limit, uint64_t* left) {
  char uuid[96];
  if (management->nvmlDeviceGetUUID == NULL || management->nvmlDeviceGetUUID(device, uuid, sizeof uuid) != 0) return -1;
  return ledger_figures_by_uuid(uuid, limit, left);
}

int nvmlDeviceGetMemoryInfo(nvml_device device, nvml_memory* memory) {
  enum { FUNCTION_NOT_FOUND = 13 };
  const struct management* management = real_management();
  if (management == NULL || management->nvmlDeviceGetMemoryInfo == NULL) return FUNCTION_NOT_FOUND;
  const int error = management->nvmlDeviceGetMemoryInfo(device, memory);
  uint64_t limit;
  uint64_t left;
  if (error != 0 || figures_of(management, device, &limit, &left) != 0) return error;
  memory->total = least(limit, memory->total);
  memory->free = least(left, memory->total);
  memory->used = memory->total - memory->free;
  return error;
}

int nvmlDeviceGetMemoryInfo_v2(nvml_device device, nvml_memory_v2* memory) {
  enum { FUNCTION_NOT_FOUND = 13, VERSION_2 = sizeof(nvml_memory_v2) | 2 << 24 };
  const struct management* management = real_management();
  if (management == NULL || management->nvmlDeviceGetMemoryInfo_v2 == NULL) return FUNCTION_NOT_FOUND;
  const int error = management->nvmlDeviceGetMemoryInfo_v2(device, memory);
  uint64_t limit;
  uint64_t left;
  if (error != 0 || memory->version != VERSION_2 || figures_of(management, device, &limit, &left) != 0) return error;
  memory->total = least(limit, memory->total);
  memory->reserved = 0; /* driver's reserve, not available to the program */
  memory->free = least(left, memory->total);
  memory->used = memory->total - memory->free;
  return error;
}
