// SPDX-License-Identifier: Apache-2.0
//
// Stands in for libcudart.so.12, for tests without a GPU: only the functions that vrambroker_torch_serve() touches.
#include <atomic>
#include <cstdlib>

namespace {
constexpr size_t kTotal = size_t{8} << 30;
std::atomic<int> mallocs{0};
std::atomic<int> frees{0};
std::atomic<int> devices_set{0};
std::atomic<int> capturing{0};
thread_local int last_error = 0;
thread_local int current_device = 0;
}  // namespace

extern "C" {
int cudaMalloc(void** pointer, size_t bytes) {
  ++mallocs;
  *pointer = bytes == 0 ? nullptr : std::malloc(bytes);
  return 0;
}
int cudaFree(void* pointer) {
  ++frees;
  std::free(pointer);
  return 0;
}
int cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  *free_bytes = kTotal / 2;
  *total_bytes = kTotal;
  return 0;
}
int cudaGetDevice(int* device) {
  *device = current_device;
  return 0;
}
int cudaSetDevice(int device) {
  ++devices_set;
  current_device = device;
  return 0;
}
int cudaStreamIsCapturing(void* /*stream*/, int* status) {
  *status = capturing == 1 ? 1 : 0;
  if (capturing > 1) last_error = capturing;
  return capturing > 1 ? last_error : 0;
}
int cudaGetLastError() {
  const int error = last_error;
  last_error = 0;
  return error;
}
int standin_mallocs(void) {
  return mallocs;
}
int standin_frees(void) {
  return frees;
}
// Counts the calls that select a device; each call makes a context on its device.
int standin_devices_set(void) {
  return devices_set;
}
// Sets the capture state: 0 for no, 1 for yes, else the error of cudaStreamIsCapturing().
void standin_set_capturing(int is_capturing) {
  capturing = is_capturing;
}
}
