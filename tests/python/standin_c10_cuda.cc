// SPDX-License-Identifier: Apache-2.0
//
// Stands in for libc10_cuda.so: calls the CUDA runtime like PyTorch's caching allocator, and catches an allocator's
// exceptions like PyTorch's Python bindings.
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>

#include "tests/python/standin_c10.h"

namespace {
thread_local void* current = nullptr;
}  // namespace

#ifndef STANDIN_NO_STREAMS
// Repeats c10/cuda/CUDAStream.h: the names, and 16 bytes that registers return.
namespace c10::cuda {

struct CUDAStream {
  void* stream() const;

  int8_t device_type;
  int8_t device_index;
  int64_t id;
};

CUDAStream getCurrentCUDAStream(signed char device_index);
CUDAStream getCurrentCUDAStream(signed char device_index) {
  return {.device_type = 1, .device_index = device_index, .id = reinterpret_cast<intptr_t>(current)};
}
void* CUDAStream::stream() const {
  return reinterpret_cast<void*>(id);
}

}  // namespace c10::cuda
#endif

extern "C" {

// Sets the calling thread's stream from now on.
void standin_set_stream(void* stream) {
  current = stream;
}

#ifndef STANDIN_NO_RUNTIME
int cudaMalloc(void** pointer, size_t bytes);
int cudaFree(void* pointer);
int cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes);

int standin_malloc(void** pointer, size_t bytes) {
  return cudaMalloc(pointer, bytes);
}
int standin_free(void* pointer) {
  return cudaFree(pointer);
}
// Allocates memory past cudaMalloc(), for PyTorch's other ways to get memory.
void* standin_outside(size_t bytes) {
  return std::malloc(bytes);
}
int standin_mem_get_info(size_t* free_bytes, size_t* total_bytes) {
  return cudaMemGetInfo(free_bytes, total_bytes);
}
#endif

using AllocFunction = void* (*)(ptrdiff_t size, int device, void* stream);

// Returns 0 if `alloc` returned `pointer`; 1 if `alloc` threw a std exception, with the text in `what`; 2 for
// c10::OutOfMemoryError; 3 if this library's C++ runtime counts an exception too many or too few.
int standin_call(AllocFunction alloc, ptrdiff_t size, void** pointer, char* what, size_t room) {
  *pointer = nullptr;
  int kind = 0;
  try {
    *pointer = alloc(size, 0, nullptr);
#ifndef STANDIN_OLD_STRINGS
  } catch (const c10::OutOfMemoryError& error) {
    std::snprintf(what, room, "%s", error.what());
    kind = 2;
#endif
  } catch (const std::exception& error) {
    std::snprintf(what, room, "%s", error.what());
    kind = 1;
  }
  return std::uncaught_exceptions() == 0 ? kind : 3;
}

#ifndef STANDIN_OLD_STRINGS
// PyTorch's allocator throws OutOfMemoryError, so the library has the type and its functions.
void standin_throw(const char* what) {
  throw c10::OutOfMemoryError({"standin_throw", __FILE__, __LINE__}, what);
}
#endif
}
