// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime.h>

#include <cstdio>
#include <cstring>

#include "tests/gpu/work.h"

namespace work {
namespace {

void Check(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return;
  (void)cudaGetLastError();
  throw Error(std::string(call) + ": " + cudaGetErrorName(error));
}
#define CHECK(call) Check(call, #call)

cudaStream_t Of(Stream stream) { return static_cast<cudaStream_t>(stream); }

// Returns a stream apart from all streams of the checks.
cudaStream_t OwnStream() {
  static cudaStream_t stream = static_cast<cudaStream_t>(NewStream());
  return stream;
}

constexpr int kBlocks = 1024;
constexpr int kThreads = 256;

__device__ uint64_t Now() {  // nanoseconds
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

__global__ void FillKernel(uint64_t* memory, size_t words, uint64_t seed) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < words; i += size_t{gridDim.x} * blockDim.x) {
    memory[i] = Word(seed, i);
  }
}

__global__ void LookKernel(const uint64_t* memory, size_t words, uint64_t seed, unsigned long long* found) {
  unsigned long long equal = 0;
  unsigned long long nonzero = 0;
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < words; i += size_t{gridDim.x} * blockDim.x) {
    const uint64_t word = memory[i];
    equal += word == Word(seed, i);
    nonzero += word != 0;
  }
  atomicAdd(&found[0], equal);
  atomicAdd(&found[1], nonzero);
}

__global__ void CopyKernel(uint64_t* to, const uint64_t* from, size_t words) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < words; i += size_t{gridDim.x} * blockDim.x) {
    to[i] = from[i];
  }
}

__global__ void SpinKernel(uint64_t nanoseconds) {
  const uint64_t end = Now() + nanoseconds;
  while (Now() < end) {
  }
}

__global__ void IncrementKernel(volatile uint64_t* word, uint64_t nanoseconds) {
  const uint64_t end = Now() + nanoseconds;
  while (Now() < end) {
    *word = *word + 1;
    __threadfence_system();
  }
}

__global__ void CrashKernel(volatile uint64_t* nowhere) { *nowhere = 1; }

// Launches each kernel once: CUDA loads a kernel at its first launch, and may wait for running kernels then.
void WarmUp() {
  auto* const memory = static_cast<uint64_t*>(Allocate(4096));
  Fill(memory, 4096, 1, nullptr);
  Increment(memory, 0, nullptr);
  Spin(0, nullptr);
  Wait(nullptr);
  (void)Look(memory, 4096, 1);
  (void)CopyGigabytesPerSecond(memory, memory + 256, 2048, 1);
  Release(memory);
  cudaFuncAttributes attributes;
  CHECK(cudaFuncGetAttributes(&attributes, CrashKernel));
}

}  // namespace

int UseDevice(const std::string& uuid) {
  int count = 0;
  const cudaError_t counted = cudaGetDeviceCount(&count);
  if (counted == cudaErrorInsufficientDriver) {  // the broker has no CUDA runtime, and serves all the same
    throw NeedsGpu("a driver for CUDA " + std::to_string(CUDART_VERSION / 1000) +
                   " or newer, which this program's CUDA runtime was made for");
  }
  CHECK(counted);
  std::string seen;
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    cudaDeviceProp properties;
    CHECK(cudaGetDeviceProperties(&properties, ordinal));
    std::string text = "GPU-";
    for (int i = 0; i < 16; ++i) {
      char digits[4];
      std::snprintf(digits, sizeof digits, "%02x", static_cast<unsigned char>(properties.uuid.bytes[i]));
      if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
      text += digits;
    }
    if (text == uuid) {
      CHECK(cudaSetDevice(ordinal));
      WarmUp();
      return ordinal;
    }
    seen += " " + text;
  }
  throw Error("this process sees no GPU " + uuid + ", but:" + seen);
}

Stream NewStream() {
  cudaStream_t stream = nullptr;
  CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  return stream;
}

bool Done(Stream stream) {
  const cudaError_t error = cudaStreamQuery(Of(stream));
  if (error == cudaErrorNotReady) {
    (void)cudaGetLastError();
    return false;
  }
  Check(error, "cudaStreamQuery");
  return true;
}

void Wait(Stream stream) { CHECK(cudaStreamSynchronize(Of(stream))); }

void Fill(void* memory, size_t bytes, uint64_t seed, Stream stream) {
  FillKernel<<<kBlocks, kThreads, 0, Of(stream)>>>(static_cast<uint64_t*>(memory), bytes / 8, seed);
  CHECK(cudaGetLastError());
}

void Spin(int ms, Stream stream) {
  SpinKernel<<<1, 1, 0, Of(stream)>>>(uint64_t(ms) * 1000000);
  CHECK(cudaGetLastError());
}

void Increment(uint64_t* word, int ms, Stream stream) {
  IncrementKernel<<<1, 1, 0, Of(stream)>>>(word, uint64_t(ms) * 1000000);
  CHECK(cudaGetLastError());
}

Content Look(const void* memory, size_t bytes, uint64_t seed) {
  static unsigned long long* found = nullptr;
  if (found == nullptr) CHECK(cudaMalloc(&found, 2 * sizeof *found));
  CHECK(cudaMemsetAsync(found, 0, 2 * sizeof *found, OwnStream()));
  LookKernel<<<kBlocks, kThreads, 0, OwnStream()>>>(static_cast<const uint64_t*>(memory), bytes / 8, seed, found);
  CHECK(cudaGetLastError());
  unsigned long long host[2];
  CHECK(cudaMemcpyAsync(host, found, sizeof host, cudaMemcpyDeviceToHost, OwnStream()));
  CHECK(cudaStreamSynchronize(OwnStream()));
  return {bytes / 8, host[0], host[1]};
}

uint64_t ReadWord(const void* word) {
  uint64_t value = 0;
  CHECK(cudaMemcpyAsync(&value, word, sizeof value, cudaMemcpyDeviceToHost, OwnStream()));
  CHECK(cudaStreamSynchronize(OwnStream()));
  return value;
}

double CopyGigabytesPerSecond(void* to, const void* from, size_t bytes, int times) {
  cudaEvent_t start = nullptr;
  cudaEvent_t stop = nullptr;
  CHECK(cudaEventCreate(&start));
  CHECK(cudaEventCreate(&stop));
  for (int i = -3; i < times; ++i) {  // the first three rounds warm up
    if (i == 0) CHECK(cudaEventRecord(start, OwnStream()));
    CopyKernel<<<8 * kBlocks, kThreads, 0, OwnStream()>>>(static_cast<uint64_t*>(to), static_cast<const uint64_t*>(from),
                                                          bytes / 8);
  }
  CHECK(cudaGetLastError());
  CHECK(cudaEventRecord(stop, OwnStream()));
  CHECK(cudaEventSynchronize(stop));
  float ms = 0;
  CHECK(cudaEventElapsedTime(&ms, start, stop));
  CHECK(cudaEventDestroy(start));
  CHECK(cudaEventDestroy(stop));
  return 2.0 * bytes * times / (ms * 1e6);
}

void* Allocate(size_t bytes) {
  void* memory = nullptr;
  CHECK(cudaMalloc(&memory, bytes));
  return memory;
}

void Release(void* memory) { CHECK(cudaFree(memory)); }

std::pair<uint64_t, uint64_t> FreeAndTotalBytes() {
  size_t free_bytes = 0;
  size_t total_bytes = 0;
  CHECK(cudaMemGetInfo(&free_bytes, &total_bytes));
  return {free_bytes, total_bytes};
}

std::string Crash() {
  CrashKernel<<<1, 1, 0, OwnStream()>>>(reinterpret_cast<uint64_t*>(uintptr_t{8}));
  return cudaGetErrorName(cudaStreamSynchronize(OwnStream()));
}

void BeginCapture(Stream stream, const std::string& mode) {
  CHECK(cudaStreamBeginCapture(Of(stream), mode == "global"         ? cudaStreamCaptureModeGlobal
                                           : mode == "thread_local" ? cudaStreamCaptureModeThreadLocal
                                                                    : cudaStreamCaptureModeRelaxed));
  SpinKernel<<<1, 1, 0, Of(stream)>>>(1000);
  CHECK(cudaGetLastError());
}

std::string EndCapture(Stream stream) {
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  try {
    CHECK(cudaStreamEndCapture(Of(stream), &graph));
    CHECK(cudaGraphInstantiate(&executable, graph, 0));
    CHECK(cudaGraphLaunch(executable, Of(stream)));
    CHECK(cudaStreamSynchronize(Of(stream)));
  } catch (const Error& error) {
    return error.what();
  }
  (void)cudaGraphExecDestroy(executable);
  (void)cudaGraphDestroy(graph);
  return "ok";
}

}  // namespace work
