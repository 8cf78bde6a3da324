/* SPDX-License-Identifier: Apache-2.0 */
/* A libcuda.so.1 of a driver that is too old: the library lacks most functions. */
#include <cuda.h>

CUresult cuInit(unsigned int flags);
CUresult cuDriverGetVersion(int* version);

CUresult cuInit(unsigned int flags) {
  return flags == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuDriverGetVersion(int* version) {
  *version = 11020;
  return CUDA_SUCCESS;
}
