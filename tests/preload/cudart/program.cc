// SPDX-License-Identifier: Apache-2.0
//
// A program on the real CUDA runtime. The program's builds differ in the runtime's linking, static or dynamic, and in
// the default stream, legacy or per thread. Only the runtime's questions to the driver matter (witness.c), not the
// runtime's success on the substitute.
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <array>
#include <cstdio>

int main() {
  void* memory = nullptr;
  size_t left = 0;
  size_t total = 0;
  cudaStream_t stream = nullptr;
  std::printf("cudaMemGetInfo: %d\n", cudaMemGetInfo(&left, &total));
  std::printf("cudaMalloc: %d\n", cudaMalloc(&memory, 1 << 20));
  std::printf("cudaMallocManaged: %d\n", cudaMallocManaged(&memory, 1 << 20));
  std::printf("cudaStreamCreate: %d\n", cudaStreamCreate(&stream));
  std::printf("cudaMallocAsync: %d\n", cudaMallocAsync(&memory, 1 << 20, stream));
  // Asks the runtime for functions, as libraries do.
  for (const char* const name :
       {"cuMemAlloc", "cuMemFree", "cuMemGetInfo", "cuMemCreate", "cuMemAllocAsync", "cuGetProcAddress"}) {
    for (const unsigned int version : {11040U, 12000U, 13000U}) {
      void* function = nullptr;
      cudaDriverEntryPointQueryResult status = cudaDriverEntryPointSuccess;
      const cudaError_t error = cudaGetDriverEntryPointByVersion(name, &function, version, cudaEnableDefault, &status);
      Dl_info info = {};
      if (function != nullptr) dladdr(function, &info);
      std::printf("cudaGetDriverEntryPointByVersion(%s, %u): %d %s\n", name, version, error,
                  info.dli_sname == nullptr ? "-" : info.dli_sname);
    }
  }
  return 0;
}
