/* SPDX-License-Identifier: Apache-2.0
 *
 * Plain memory: cuMemAlloc, cuMemAllocPitch, cuMemAllocManaged, cuMemFree.
 */
#include "client/preload/driver.h"
#include "client/preload/grant.h"
#include "client/preload/pools.h"

int cuMemAlloc_v2(cu_address* address, size_t bytes) {
  REAL(cuMemAlloc_v2);
  struct grant grant;
  int error = grant_begin(&grant, "cuMemAlloc", bytes);
  if (error != CU_OK) return error;
  do {
    error = driver->cuMemAlloc_v2(address, bytes);
  } while (grant_again(&grant, error, error == CU_OK ? *address : 0, bytes));
  return grant_end(&grant, error);
}

int cuMemAlloc(cu_address32* address, unsigned int bytes) {
  REAL(cuMemAlloc);
  struct grant grant;
  int error = grant_begin(&grant, "cuMemAlloc", bytes);
  if (error != CU_OK) return error;
  do {
    error = driver->cuMemAlloc(address, bytes);
  } while (grant_again(&grant, error, error == CU_OK ? *address : 0, bytes));
  return grant_end(&grant, error);
}

/* Returns the least size of rows of `width` bytes: the driver chooses the pitch, known only afterwards. */
static uint64_t pitched(uint64_t width, uint64_t height) {
  const uint64_t pitch = (width + 511) / 512 * 512;
  uint64_t bytes;
  return __builtin_mul_overflow(pitch, height, &bytes) ? UINT64_MAX : bytes;
}

int cuMemAllocPitch_v2(cu_address* address, size_t* pitch, size_t width, size_t height, unsigned int element) {
  REAL(cuMemAllocPitch_v2);
  struct grant grant;
  int error = grant_begin(&grant, "cuMemAllocPitch", pitched(width, height));
  if (error != CU_OK) return error;
  do {
    error = driver->cuMemAllocPitch_v2(address, pitch, width, height, element);
  } while (grant_again(&grant, error, error == CU_OK ? *address : 0, error == CU_OK ? *pitch * height : 0));
  return grant_end(&grant, error);
}

int cuMemAllocPitch(cu_address32* address, unsigned int* pitch, unsigned int width, unsigned int height,
                    unsigned int element) {
  REAL(cuMemAllocPitch);
  struct grant grant;
  int error = grant_begin(&grant, "cuMemAllocPitch", pitched(width, height));
  if (error != CU_OK) return error;
  do {
    error = driver->cuMemAllocPitch(address, pitch, width, height, element);
  } while (grant_again(&grant, error, error == CU_OK ? *address : 0, error == CU_OK ? (uint64_t)*pitch * height : 0));
  return grant_end(&grant, error);
}

/* Managed memory is counted in full, wherever its pages are. */
int cuMemAllocManaged(cu_address* address, size_t bytes, unsigned int flags) {
  REAL(cuMemAllocManaged);
  struct grant grant;
  int error = refuse_managed();
  if (error != CU_OK) return error;
  error = grant_begin(&grant, "cuMemAllocManaged", bytes);
  if (error != CU_OK) return error;
  do {
    error = driver->cuMemAllocManaged(address, bytes, flags);
  } while (grant_again(&grant, error, error == CU_OK ? *address : 0, bytes));
  return grant_end(&grant, error);
}

int cuMemFree_v2(cu_address address) {
  REAL(cuMemFree_v2);
  const struct freed freed = grant_forget(address);
  const struct entry pointer = pools_forget(address);
  const int error = driver->cuMemFree_v2(address);
  grant_freed(&freed, error);
  pools_freed(&pointer, error);
  if (freed.account == NULL) pools_read_if_freed();
  return error;
}

int cuMemFree(cu_address32 address) {
  REAL(cuMemFree);
  const struct freed freed = grant_forget(address);
  const int error = driver->cuMemFree(address);
  grant_freed(&freed, error);
  return error;
}
