// SPDX-License-Identifier: Apache-2.0
//
// Checks PyTorch's real caching allocator over segments of a real daemon with host memory. See run.sh.
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/util/Exception.h>
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>

#include "client/vrambroker/vrambroker.h"

extern "C" int standin_mallocs(void);
extern "C" int standin_frees(void);

namespace {

namespace torch_allocator = c10::cuda::CUDACachingAllocator;
constexpr size_t kMiB = 1 << 20;

void Check(bool condition, const char* text) {
  std::printf("%-5s %s\n", condition ? "ok" : "FAIL", text);
  if (!condition) std::exit(1);
}

template <typename Function>
Function* Load(void* library, const char* name) {
  void* const found = dlsym(library, name);
  Check(found != nullptr, name);
  return reinterpret_cast<Function*>(found);
}

size_t Reserved() {
  return static_cast<size_t>(torch_allocator::getDeviceStats(0).reserved_bytes[0].current) / kMiB;
}

}  // namespace

#define LOAD(name) const auto name = Load<decltype(::name)>(library, #name)

int main(int, char** argv) {
  void* const library = dlopen(argv[1], RTLD_NOW);
  if (library == nullptr) std::printf("%s\n", dlerror());
  Check(library != nullptr, "the C library is loaded");
  LOAD(vrambroker_torch_connect);
  LOAD(vrambroker_torch_client);
  LOAD(vrambroker_torch_serve);
  LOAD(vrambroker_torch_unserve);
  LOAD(vrambroker_torch_cached_malloc);
  LOAD(vrambroker_torch_last_refusal);
  LOAD(vrambroker_get_memory_stats);
  vrambroker_options options = VRAMBROKER_OPTIONS_INIT;
  options.limit = "256MiB";
  Check(vrambroker_torch_connect(&options) == VRAMBROKER_OK, "connected, with a limit of 256 MiB");
  vrambroker_client* client = nullptr;
  Check(vrambroker_torch_client(&client) == VRAMBROKER_OK, "the client for PyTorch");
  const auto daemon = [&] {
    vrambroker_memory_stats stats = {};
    stats.struct_size = sizeof stats;
    vrambroker_get_memory_stats(client, 0, &stats);
    return stats.reserved_bytes / kMiB;
  };

  torch_allocator::init(1);
  void* const before = torch_allocator::raw_alloc(1000);
  Check(Reserved() == 2 && daemon() == 0 && standin_mallocs() == 1, "before: PyTorch's memory is CUDA's");
  Check(vrambroker_torch_serve(nullptr) == VRAMBROKER_OK, "libc10_cuda.so is served");
  void* large = torch_allocator::raw_alloc(30 * kMiB);
  std::memset(large, 1, 30 * kMiB);
  Check(Reserved() == 32 && daemon() == 30 && standin_mallocs() == 1, "a tensor of 30 MiB is the daemon's");
  void* other = nullptr;
  std::thread([&] { other = torch_allocator::raw_alloc(5 * kMiB); }).join();
  Check(Reserved() == 52 && daemon() == 50, "another thread's, too: its segment is 20 MiB");
  torch_allocator::raw_delete(large);
  Check(Reserved() == 52 && daemon() == 50, "freed memory stays in PyTorch's cache");
  torch_allocator::emptyCache();
  Check(Reserved() == 22 && daemon() == 20, "emptyCache() gives it to the daemon");

  void* parts[5];
  for (void*& part : parts) part = torch_allocator::raw_alloc(40 * kMiB);
  for (void* const part : parts) torch_allocator::raw_delete(part);
  Check(daemon() == 220, "200 MiB cached in pieces");
  large = torch_allocator::raw_alloc(200 * kMiB);
  Check(daemon() == 220 && torch_allocator::getDeviceStats(0).num_alloc_retries == 1,
        "PyTorch flushes its cache for a request, and gets it");
  std::string text;
  try {
    torch_allocator::raw_alloc(90 * kMiB);
  } catch (const c10::OutOfMemoryError& error) {
    text = error.what_without_backtrace();
  }
  std::printf("      %s\n", text.c_str());
  Check(text.find("Tried to allocate 90.00 MiB. ") != std::string::npos,
        "its error has the size by which vrambroker.torch finds the reason");
  Check(text.find("a total capacity of 256.00 MiB of which 36.00 MiB is free") != std::string::npos,
        "its error tells of the broker's limit");
  vrambroker_torch_refusal refusal = {};
  refusal.struct_size = sizeof refusal;
  Check(vrambroker_torch_last_refusal(0, &refusal) == VRAMBROKER_OK && refusal.requested_bytes == 90 * kMiB &&
            refusal.out_of_memory.cause == VRAMBROKER_CAUSE_LIMIT,
        "the reason is known");

  text.clear();
  try {
    (void)vrambroker_torch_cached_malloc(ssize_t{1} << 40, 0, nullptr);
  } catch (const c10::OutOfMemoryError& error) {
    text = error.what_without_backtrace();
  }
  std::printf("      %s\n", text.c_str());
  Check(text.find("out of memory (larger_than_device) on device 0") != std::string::npos,
        "a refused block is PyTorch's exception, with the reason");

  torch_allocator::raw_delete(large);
  torch_allocator::raw_delete(other);
  torch_allocator::raw_delete(before);
  vrambroker_torch_unserve();
  torch_allocator::emptyCache();
  Check(Reserved() == 0 && daemon() == 0 && standin_frees() == 1, "all went back to where it came from");
  void* const after = torch_allocator::raw_alloc(30 * kMiB);
  Check(daemon() == 0 && standin_mallocs() == 2, "afterwards memory is CUDA's again");
  torch_allocator::raw_delete(after);
}
