// SPDX-License-Identifier: Apache-2.0
//
// In place of libc10_cuda.so: it calls the CUDA runtime as PyTorch's caching allocator does, and catches what an
// allocator throws as PyTorch's Python bindings do.
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
// As c10/cuda/CUDAStream.h has them: the names, and 16 bytes that are returned in registers.
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

// Of this thread, from now on.
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
// Memory that PyTorch gets in a way of its own, past cudaMalloc().
void* standin_outside(size_t bytes) {
  return std::malloc(bytes);
}
int standin_mem_get_info(size_t* free_bytes, size_t* total_bytes) {
  return cudaMemGetInfo(free_bytes, total_bytes);
}
#endif

using AllocFunction = void* (*)(ptrdiff_t size, int device, void* stream);

// 0: `pointer` is what `alloc` returned; 1: it threw something of std, with its text in `what`; 2:
// c10::OutOfMemoryError; 3: the C++ runtime of this library counts an exception too many or too few.
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
// PyTorch's allocator throws it, and so its type and its functions are in the library.
void standin_throw(const char* what) {
  throw c10::OutOfMemoryError({"standin_throw", __FILE__, __LINE__}, what);
}
#endif
}
