/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Stands in for libcudart.so.12, for PyTorch's real libc10_cuda.so: a GPU of 8 GiB whose memory is ordinary memory.
 * Calls whose effect the caching allocator does not need only return success.
 */
#include <stdlib.h>
#include <string.h>

static int mallocs;
static int frees;

int standin_mallocs(void) {
  return mallocs;
}
int standin_frees(void) {
  return frees;
}

int cudaMalloc(void** pointer, size_t bytes) {
  ++mallocs;
  *pointer = malloc(bytes);
  return 0;
}
int cudaFree(void* pointer) {
  ++frees;
  free(pointer);
  return 0;
}
int cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  *free_bytes = 4ul << 30;
  *total_bytes = 8ul << 30;
  return 0;
}
int cudaGetDevice(int* device) {
  *device = 0;
  return 0;
}
int cudaGetDeviceCount(int* count) {
  *count = 1;
  return 0;
}
int cudaDriverGetVersion(int* version) {
  *version = 12040;
  return 0;
}
/* struct cudaDeviceProp of CUDA 12: a name of 256 bytes, a UUID of 16, a LUID of 8 and its mask of 4; totalGlobalMem.
 */
int cudaGetDeviceProperties_v2(void* properties, int device) {
  (void)device;
  const size_t total = 8ul << 30;
  memset(properties, 0, 1008);
  strcpy(properties, "stand-in");
  memcpy((char*)properties + 288, &total, sizeof total);
  return 0;
}
const char* cudaGetErrorString(int error) {
  (void)error;
  return "an error";
}
int cudaStreamIsCapturing(void* stream, int* status) {
  (void)stream;
  *status = 0;
  return 0;
}
int cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -3;
  return 0;
}

#define SUCCEEDS(name) \
  int name(void) {     \
    return 0;          \
  }
SUCCEEDS(cudaDeviceEnablePeerAccess)
SUCCEEDS(cudaDeviceGetDefaultMemPool)
SUCCEEDS(cudaDeviceSynchronize)
SUCCEEDS(cudaEventCreateWithFlags)
SUCCEEDS(cudaEventDestroy)
SUCCEEDS(cudaEventElapsedTime)
SUCCEEDS(cudaEventQuery)
SUCCEEDS(cudaEventRecord)
SUCCEEDS(cudaEventSynchronize)
SUCCEEDS(cudaFreeAsync)
SUCCEEDS(cudaGetLastError)
SUCCEEDS(cudaIpcCloseMemHandle)
SUCCEEDS(cudaIpcGetMemHandle)
SUCCEEDS(cudaIpcOpenMemHandle)
SUCCEEDS(cudaMallocAsync)
SUCCEEDS(cudaMemPoolGetAttribute)
SUCCEEDS(cudaMemPoolSetAccess)
SUCCEEDS(cudaMemPoolSetAttribute)
SUCCEEDS(cudaMemPoolTrimTo)
SUCCEEDS(cudaMemcpy)
SUCCEEDS(cudaMemcpyAsync)
SUCCEEDS(cudaMemcpyPeerAsync)
SUCCEEDS(cudaSetDevice)
SUCCEEDS(cudaStreamCreateWithPriority)
SUCCEEDS(cudaStreamQuery)
SUCCEEDS(cudaStreamSynchronize)
SUCCEEDS(cudaStreamWaitEvent)
SUCCEEDS(cudaThreadExchangeStreamCaptureMode)
