/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Stand-in functions of NVIDIA's other libraries. PyTorch needs more from these functions than a return value of 0.
 * run.sh compiles this file once for each library, with the macro of the library's name, and adds the remaining
 * functions, each returning 0 (success).
 */
#include <stddef.h>

#if defined(libcublasLt)
/* Finds exactly 1 algorithm. */
int cublasLtMatmulAlgoGetHeuristic(void* handle, void* operation, void* a, void* b, void* c, void* d, void* preference,
                                   int asked, void* results, int* found) {
  (void)handle, (void)operation, (void)a, (void)b, (void)c, (void)d, (void)preference, (void)asked, (void)results;
  *found = 1;
  return 0;
}
#elif defined(libcudnn)
size_t cudnnGetVersion(void) {
  return 90300;
}
size_t cudnnGetCudartVersion(void) {
  return 12040;
}
const char* cudnnGetErrorString(int status) {
  (void)status;
  return "stand-in of cuDNN";
}
#elif defined(libcuda)
static char context;
int cuCtxGetCurrent(void** current) {
  *current = &context;
  return 0;
}
int cuDevicePrimaryCtxRetain(void** retained, int device) {
  (void)device;
  *retained = &context;
  return 0;
}
int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* active) {
  (void)device;
  *flags = 0;
  *active = 1;
  return 0;
}
int cuGetErrorString(int error, const char** text) {
  (void)error;
  *text = "stand-in of the driver";
  return 0;
}
#elif defined(libnccl)
int ncclGetVersion(int* version) {
  *version = 22203;
  return 0;
}
const char* ncclGetErrorString(int status) {
  (void)status;
  return "stand-in of NCCL";
}
#elif defined(libnvrtc)
int nvrtcVersion(int* major, int* minor) {
  *major = 12;
  *minor = 4;
  return 0;
}
const char* nvrtcGetErrorString(int status) {
  (void)status;
  return "stand-in of NVRTC";
}
#endif
