// SPDX-License-Identifier: Apache-2.0
//
// What the checks do with memory. On a GPU by kernels (work_cuda.cu); in a rehearsal of the checks, without one, by
// threads (work_host.cc). Times are milliseconds. Everything throws Error.
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
// Of what only a GPU, or a newer driver, has.
struct NeedsGpu : Error {
  using Error::Error;
};

using Stream = void*;  // a cudaStream_t, or something of that kind; nullptr: the default one

// Word `index` of the pattern `seed`; never 0.
#ifdef __CUDACC__
__host__ __device__
#endif
    inline uint64_t
    Word(uint64_t seed, uint64_t index) {
  return ((seed * 0x9E3779B97F4A7C15u) ^ (index * 0xBF58476D1CE4E5B9u)) | 1;
}

// Uses the device with this UUID, as the broker writes it, from now on. Returns its ordinal in this process. Everything
// that could later wait for work under way, because it is done for the first time, has been done.
int UseDevice(const std::string& uuid);

Stream NewStream();  // neither waits for the default stream nor makes it wait
bool Done(Stream stream);
void Wait(Stream stream);

// Queued on `stream`:
void Fill(void* memory, size_t bytes, uint64_t seed, Stream stream);
void Spin(int ms, Stream stream);                       // nothing else follows on the stream until then
void Increment(uint64_t* word, int ms, Stream stream);  // adds 1 again and again, for so long
// These wait for their own result, on a stream of their own: they see what is there now, whatever is queued.
struct Content {
  uint64_t words = 0;
  uint64_t equal = 0;  // to the pattern
  uint64_t nonzero = 0;
};
Content Look(const void* memory, size_t bytes, uint64_t seed);
uint64_t ReadWord(const void* word);
double CopyGigabytesPerSecond(void* to, const void* from, size_t bytes, int times);  // read and written

// Memory past the broker: what cudaMalloc and cudaFree cost and give.
void* Allocate(size_t bytes);
void Release(void* memory);
std::pair<uint64_t, uint64_t> FreeAndTotalBytes();

// NeedsGpu:
std::string Crash();                                        // a kernel writes to nowhere; the error that follows
void BeginCapture(Stream stream, const std::string& mode);  // global, thread_local, relaxed
std::string EndCapture(Stream stream);                      // "ok" when the graph also runs; else what failed

}  // namespace work

#endif  // VRAMBROKER_TESTS_GPU_WORK_H_
