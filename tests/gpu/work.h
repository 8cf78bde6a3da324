// SPDX-License-Identifier: Apache-2.0
//
// The checks' work on memory. On a GPU kernels do the work (work_cuda.cu); in a rehearsal, without a GPU, threads do
// the work (work_host.cc). Times are milliseconds. Every function throws Error.
#ifndef VRAMBROKER_TESTS_GPU_WORK_H_
#define VRAMBROKER_TESTS_GPU_WORK_H_

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

namespace work {

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};
// Tells that a function needs a GPU, or a newer driver.
struct NeedsGpu : Error {
  using Error::Error;
};

using Stream = void*;  // a cudaStream_t, or the rehearsal's stream; nullptr: the default stream

// Returns word `index` of the pattern `seed`; never 0.
#ifdef __CUDACC__
__host__ __device__
#endif
    inline uint64_t
    Word(uint64_t seed, uint64_t index) {
  return ((seed * 0x9E3779B97F4A7C15u) ^ (index * 0xBF58476D1CE4E5B9u)) | 1;
}

// Uses the device with this UUID, in the broker's notation, from now on. Returns the device's ordinal in this process.
// Also does every action whose first time could wait for running work.
int UseDevice(const std::string& uuid);

Stream NewStream();  // no wait in either direction with the default stream
bool Done(Stream stream);
void Wait(Stream stream);

// Functions that queue work on `stream`:
void Fill(void* memory, size_t bytes, uint64_t seed, Stream stream);
void Spin(int ms, Stream stream);                       // the stream is busy until then
void Increment(uint64_t* word, int ms, Stream stream);  // adds 1 again and again, for `ms`
// Functions that wait for their own result, on a stream of their own, and see the memory as it is, whatever is queued.
struct Content {
  uint64_t words = 0;
  uint64_t equal = 0;  // words equal to the pattern
  uint64_t nonzero = 0;
};
Content Look(const void* memory, size_t bytes, uint64_t seed);
uint64_t ReadWord(const void* word);
double CopyGigabytesPerSecond(void* to, const void* from, size_t bytes, int times);  // bytes read and written

// Functions for memory past the broker, to learn the cost and the effect of cudaMalloc and cudaFree.
void* Allocate(size_t bytes);
void Release(void* memory);
std::pair<uint64_t, uint64_t> FreeAndTotalBytes();

// Functions that throw NeedsGpu in a rehearsal:
std::string Crash();                                        // a kernel writes to an illegal address; returns the error
void BeginCapture(Stream stream, const std::string& mode);  // global, thread_local, relaxed
std::string EndCapture(Stream stream);                      // "ok" if the graph also runs; else the failed call

}  // namespace work

#endif  // VRAMBROKER_TESTS_GPU_WORK_H_
