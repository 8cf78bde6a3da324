// SPDX-License-Identifier: Apache-2.0
//
// Stream-ordered memory in the substitute of NVIDIA's driver: memory that pools and graphs reserve, keep and give back.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>

#include "tests/cuda_substitute/driver.h"
#include "tests/cuda_substitute/substitute.h"
#include "tests/unit/allocator/device/cuda_substitute_fixture.h"

namespace vrambroker::cuda_substitute {
namespace {

constexpr uint64_t kPoolBlock = uint64_t{32} << 20;

class CudaSubstitutePoolTest : public CudaSubstituteTest {
 protected:
  // Leaves out the context's memory.
  uint64_t Used() { return UsedBytes(machine_, 0) - kContext; }
};

CUmemoryPool DefaultPool() {
  CUmemoryPool pool = nullptr;
  if (cuDeviceGetDefaultMemPool(&pool, 0) != CUDA_SUCCESS) _exit(106);
  return pool;
}
uint64_t Get(CUmemoryPool pool, CUmemPool_attribute attribute) {
  uint64_t value = 0;
  if (cuMemPoolGetAttribute(pool, attribute, &value) != CUDA_SUCCESS) _exit(107);
  return value;
}
CUresult Set(CUmemoryPool pool, CUmemPool_attribute attribute, uint64_t value) {
  return cuMemPoolSetAttribute(pool, attribute, &value);
}
CUdeviceptr Take(uint64_t bytes, CUstream stream = nullptr) {
  CUdeviceptr memory = 0;
  if (cuMemAllocAsync(&memory, bytes, stream) != CUDA_SUCCESS) _exit(108);
  return memory;
}
CUmemoryPool NewPool(uint64_t max_bytes = 0, CUmemLocationType type = CU_MEM_LOCATION_TYPE_DEVICE) {
  CUmemPoolProps properties = {};
  properties.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location = {.type = type, .id = 0};
  properties.maxSize = max_bytes;
  CUmemoryPool pool = nullptr;
  if (cuMemPoolCreate(&pool, &properties) != CUDA_SUCCESS) _exit(109);
  return pool;
}
CUstream NewStream() {
  CUstream stream = nullptr;
  if (cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING) != CUDA_SUCCESS) _exit(110);
  return stream;
}

TEST_F(CudaSubstitutePoolTest, APoolReservesBlocksAndGivesThemBackWhenItIsWaitedFor) {
  const Process process([&] {
    const CUmemoryPool pool = DefaultPool();
    const CUdeviceptr first = Take(1000);
    const CUdeviceptr second = Take(kBytes);
    if (first == second || Used() != kPoolBlock) return 1;
    if (Get(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT) != kPoolBlock) return 2;
    if (Get(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT) != 1024 + kBytes) return 3;
    CUdeviceptr base = 0;
    size_t bytes = 0;
    if (cuMemGetAddressRange_v2(&base, &bytes, second + 5) != CUDA_SUCCESS || base != second || bytes != kBytes)
      return 4;
    char byte = 'p';
    if (cuMemcpyHtoD_v2(second, &byte, 1) != CUDA_SUCCESS) return 5;
    if (cuMemFreeAsync(first, nullptr) != CUDA_SUCCESS || cuMemFreeAsync(second, nullptr) != CUDA_SUCCESS) return 6;
    if (cuMemFreeAsync(second, nullptr) != CUDA_ERROR_INVALID_VALUE || Used() != kPoolBlock) return 7;
    if (Get(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT) != 0) return 8;
    if (cuStreamSynchronize(nullptr) != CUDA_SUCCESS || Used() != 0) return 9;
    if (Get(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH) != kPoolBlock) return 10;
    if (Set(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH, 1) != CUDA_ERROR_INVALID_VALUE) return 11;
    if (Set(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH, 0) != CUDA_SUCCESS) return 12;
    return Get(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH) == 0 ? 0 : 13;
  });
  EXPECT_EQ(process.Wait(), 0);
}

TEST_F(CudaSubstitutePoolTest, EverySynchronizationGivesBack) {
  const Process process([&] {
    CUevent event = nullptr;
    if (cuEventCreate(&event, CU_EVENT_DISABLE_TIMING) != CUDA_SUCCESS) return 1;
    for (int kind = 0; kind < 3; ++kind) {
      if (cuMemFreeAsync(Take(kBytes), nullptr) != CUDA_SUCCESS || Used() != kPoolBlock) return 2;
      if (cuEventRecord(event, nullptr) != CUDA_SUCCESS) return 3;
      const CUresult waited = kind == 0   ? cuStreamSynchronize(nullptr)
                              : kind == 1 ? cuEventSynchronize(event)
                                          : cuCtxSynchronize();
      if (waited != CUDA_SUCCESS || Used() != 0) return 4;
    }
    return 0;
  });
  EXPECT_EQ(process.Wait(), 0);
}

TEST_F(CudaSubstitutePoolTest, ItKeepsItsThresholdUntilItIsTrimmed) {
  const Process process([&] {
    const CUmemoryPool pool = DefaultPool();
    if (Set(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, kPoolBlock) != CUDA_SUCCESS) return 1;
    if (Get(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD) != kPoolBlock) return 2;
    const CUdeviceptr first = Take(kPoolBlock);
    const CUdeviceptr second = Take(kBytes);
    if (cuMemFreeAsync(first, nullptr) != CUDA_SUCCESS || cuMemFreeAsync(second, nullptr) != CUDA_SUCCESS) return 3;
    if (cuCtxSynchronize() != CUDA_SUCCESS) return 4;
    const uint64_t kept = Used();
    if (kept == 0 || kept > kPoolBlock) return 5;
    if (cuMemPoolTrimTo(pool, kept) != CUDA_SUCCESS || Used() != kept) return 6;
    const CUdeviceptr used = Take(kBytes);
    if (cuMemPoolTrimTo(pool, 0) != CUDA_SUCCESS || Used() == 0) return 7;
    if (cuMemFreeAsync(used, nullptr) != CUDA_SUCCESS || cuMemPoolTrimTo(pool, 0) != CUDA_SUCCESS) return 8;
    return Used() == 0 ? 0 : 9;
  });
  EXPECT_EQ(process.Wait(), 0);
}

TEST_F(CudaSubstitutePoolTest, WhereABlockHasNoRoomItReservesLess) {
  const Process process([&] {
    CUdeviceptr memory = 0;
    if (cuMemAlloc_v2(&memory, kAll - kContext - kBytes) != CUDA_SUCCESS) return 1;
    CUdeviceptr none = 0;
    if (cuMemAllocAsync(&none, kBytes + 1, nullptr) != CUDA_ERROR_OUT_OF_MEMORY) return 2;
    (void)Take(kBytes);
    if (Get(DefaultPool(), CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT) != kBytes) return 3;
    if (UsedBytes(machine_, 0) != kAll) return 4;
    return cuMemAllocAsync(&none, 1, nullptr) == CUDA_ERROR_OUT_OF_MEMORY ? 0 : 5;
  });
  EXPECT_EQ(process.Wait(), 0);
  EXPECT_EQ(UsedBytes(machine_, 0), 0u);
}

TEST_F(CudaSubstitutePoolTest, FreedMemoryIsUsedAgainInTheOrderOfItsStream) {
  const Process process([&] {
    const CUstream stream = NewStream();
    const CUdeviceptr memory = Take(kPoolBlock, stream);
    Launch(stream, std::chrono::hours(1));
    if (cuMemFreeAsync(memory, stream) != CUDA_SUCCESS) return 1;
    // The free is still pending: trimming returns no memory, and another stream gets other memory.
    if (cuMemPoolTrimTo(DefaultPool(), 0) != CUDA_SUCCESS || Used() != kPoolBlock) return 2;
    CUdeviceptr other = 0;
    if (cuMemAllocAsync(&other, kBytes, NewStream()) != CUDA_SUCCESS || Used() == kPoolBlock) return 3;
    if (Take(kPoolBlock, stream) != memory) return 4;
    return 0;
  });
  EXPECT_EQ(process.Wait(), 0);
}

TEST_F(CudaSubstitutePoolTest, OwnPoolsHaveLimitsAndGoWithTheirLastAllocation) {
  const Process process([&] {
    const CUmemoryPool pool = NewPool(kBytes);
    CUdeviceptr memory = 0;
    if (cuMemAllocFromPoolAsync(&memory, kBytes + 1, pool, nullptr) != CUDA_ERROR_OUT_OF_MEMORY) return 1;
    if (cuDeviceSetMemPool(0, pool) != CUDA_SUCCESS || cuDeviceSetMemPool(1, pool) != CUDA_ERROR_INVALID_VALUE)
      return 2;
    CUmemoryPool current = nullptr;
    memory = Take(kBytes);
    if (cuDeviceGetMemPool(&current, 0) != CUDA_SUCCESS || current != pool || Used() != kBytes) return 3;
    if (cuMemPoolDestroy(DefaultPool()) != CUDA_ERROR_INVALID_VALUE) return 4;
    if (cuMemPoolDestroy(pool) != CUDA_SUCCESS || Used() != kBytes) return 5;
    if (cuDeviceGetMemPool(&current, 0) != CUDA_SUCCESS || current != DefaultPool()) return 6;
    if (cuMemAllocFromPoolAsync(&memory, 1, pool, nullptr) != CUDA_ERROR_INVALID_VALUE) return 7;
    if (cuMemFree_v2(memory) != CUDA_SUCCESS || Used() != 0) return 8;
    const CUmemoryPool host = NewPool(0, CU_MEM_LOCATION_TYPE_HOST);
    return cuMemAllocFromPoolAsync(&memory, kAll, host, nullptr) == CUDA_SUCCESS && Used() == 0 ? 0 : 9;
  });
  EXPECT_EQ(process.Wait(), 0);
}

TEST_F(CudaSubstitutePoolTest, PoolsOutliveContextsAndFunctionsOfTheThreadsStreamUseIt) {
  const Process process([&] {
    CUdeviceptr memory = 0;
    Launch(CU_STREAM_PER_THREAD, std::chrono::hours(1));
    if (cuMemAllocAsync_ptsz(&memory, kBytes, nullptr) != CUDA_SUCCESS) return 1;
    if (cuMemFreeAsync_ptsz(memory, nullptr) != CUDA_SUCCESS) return 2;
    if (cuMemPoolTrimTo(DefaultPool(), 0) != CUDA_SUCCESS || Used() != kPoolBlock) return 3;
    if (cuMemAllocFromPoolAsync_ptsz(&memory, kBytes, DefaultPool(), nullptr) != CUDA_SUCCESS) return 4;
    if (cuDevicePrimaryCtxReset_v2(0) != CUDA_SUCCESS) return 5;
    return UsedBytes(machine_, 0) == kPoolBlock ? 0 : 6;
  });
  EXPECT_EQ(process.Wait(), 0);
  EXPECT_EQ(UsedBytes(machine_, 0), 0u);
}

TEST_F(CudaSubstitutePoolTest, MemoryOfCuMemAllocMayBeFreedInAStream) {
  const Process process([&] {
    CUdeviceptr memory = 0;
    if (cuMemAlloc_v2(&memory, kBytes) != CUDA_SUCCESS || cuMemFreeAsync(memory, nullptr) != CUDA_SUCCESS) return 1;
    return Used() == 0 ? 0 : 2;
  });
  EXPECT_EQ(process.Wait(), 0);
}

// ---- Graphs ----

uint64_t OfGraphs(CUgraphMem_attribute attribute) {
  uint64_t value = 0;
  if (cuDeviceGetGraphMemAttribute(0, attribute, &value) != CUDA_SUCCESS) _exit(111);
  return value;
}
CUdeviceptr AddAllocation(CUgraph graph, uint64_t bytes) {
  CUDA_MEM_ALLOC_NODE_PARAMS parameters = {};
  parameters.poolProps.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
  parameters.poolProps.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0};
  parameters.bytesize = bytes;
  CUgraphNode node = nullptr;
  if (cuGraphAddMemAllocNode(&node, graph, nullptr, 0, &parameters) != CUDA_SUCCESS) _exit(112);
  return parameters.dptr;
}
CUgraphExec Instantiate(CUgraph graph, unsigned long long flags = 0) {
  CUgraphExec exec = nullptr;
  if (cuGraphInstantiateWithFlags(&exec, graph, flags) != CUDA_SUCCESS) _exit(113);
  return exec;
}

TEST_F(CudaSubstitutePoolTest, AGraphTakesMemoryWhenItIsLaunchedAndATrimGivesItBack) {
  const Process process([&] {
    CUgraph graph = nullptr;
    CUgraphNode node = nullptr;
    if (cuGraphCreate(&graph, 0) != CUDA_SUCCESS) return 1;
    const CUdeviceptr memory = AddAllocation(graph, kBytes);
    if (cuGraphAddMemFreeNode(&node, graph, nullptr, 0, memory) != CUDA_SUCCESS) return 2;
    if (cuGraphAddMemFreeNode(&node, graph, nullptr, 0, memory) != CUDA_ERROR_INVALID_VALUE) return 3;
    const CUgraphExec exec = Instantiate(graph);
    CUgraphExec second = nullptr;
    if (cuGraphInstantiateWithFlags(&second, graph, 0) != CUDA_ERROR_INVALID_VALUE || Used() != 0) return 4;
    for (int i = 0; i < 2; ++i) {
      if (cuGraphLaunch(exec, nullptr) != CUDA_SUCCESS || Used() != kBytes) return 5;
    }
    if (OfGraphs(CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT) != kBytes) return 6;
    if (cuGraphExecDestroy(exec) != CUDA_SUCCESS || cuGraphDestroy(graph) != CUDA_SUCCESS || Used() != kBytes) return 7;
    if (cuCtxSynchronize() != CUDA_SUCCESS || OfGraphs(CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT) != 0) return 8;
    if (Used() != kBytes || cuDeviceGraphMemTrim(0) != CUDA_SUCCESS || Used() != 0) return 9;
    return OfGraphs(CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH) == kBytes ? 0 : 10;
  });
  EXPECT_EQ(process.Wait(), 0);
}

TEST_F(CudaSubstitutePoolTest, WhatAGraphTookAndDidNotFreeStays) {
  const Process process([&] {
    CUgraph graph = nullptr;
    if (cuGraphCreate(&graph, 0) != CUDA_SUCCESS) return 1;
    const CUdeviceptr memory = AddAllocation(graph, kBytes);
    const CUgraphExec exec = Instantiate(graph);
    if (cuGraphLaunch(exec, nullptr) != CUDA_SUCCESS) return 2;
    char byte = 'g';
    if (cuMemcpyHtoD_v2(memory, &byte, 1) != CUDA_SUCCESS) return 3;
    if (cuDeviceGraphMemTrim(0) != CUDA_SUCCESS || Used() != kBytes) return 4;
    if (cuGraphLaunch(exec, nullptr) != CUDA_ERROR_INVALID_VALUE) return 5;
    if (cuMemFreeAsync(memory, nullptr) != CUDA_SUCCESS || cuGraphLaunch(exec, nullptr) != CUDA_SUCCESS) return 6;
    if (cuMemFree_v2(memory) != CUDA_SUCCESS || cuMemFree_v2(memory) != CUDA_ERROR_INVALID_VALUE) return 7;
    if (cuDeviceGraphMemTrim(0) != CUDA_SUCCESS || Used() != 0) return 8;
    if (cuGraphExecDestroy(exec) != CUDA_SUCCESS) return 9;
    const CUgraphExec frees = Instantiate(graph, CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH);
    for (int i = 0; i < 2; ++i) {
      if (cuGraphLaunch(frees, nullptr) != CUDA_SUCCESS || Used() != kBytes) return 10;
    }
    return 0;
  });
  EXPECT_EQ(process.Wait(), 0);
}

TEST_F(CudaSubstitutePoolTest, ARunningGraphIsNotTrimmedAndALaunchWithoutRoomFails) {
  const Process process([&] {
    CUgraph graph = nullptr;
    CUgraphNode node = nullptr;
    if (cuGraphCreate(&graph, 0) != CUDA_SUCCESS) return 1;
    const CUdeviceptr small = AddAllocation(graph, kBytes);
    const CUdeviceptr large = AddAllocation(graph, kAll - kContext - kBytes);
    for (const CUdeviceptr memory : {small, large}) {
      if (cuGraphAddMemFreeNode(&node, graph, nullptr, 0, memory) != CUDA_SUCCESS) return 2;
    }
    const CUgraphExec exec = Instantiate(graph);
    CUdeviceptr other = 0;
    if (cuMemAlloc_v2(&other, 1) != CUDA_SUCCESS) return 3;
    if (cuGraphLaunch(exec, nullptr) != CUDA_ERROR_OUT_OF_MEMORY) return 4;
    if (cuDeviceGraphMemTrim(0) != CUDA_SUCCESS || cuMemFree_v2(other) != CUDA_SUCCESS || Used() != 0) return 5;
    const CUstream stream = NewStream();
    Launch(stream, std::chrono::hours(1));
    if (cuGraphLaunch(exec, stream) != CUDA_SUCCESS || UsedBytes(machine_, 0) != kAll) return 6;
    if (cuDeviceGraphMemTrim(0) != CUDA_SUCCESS || UsedBytes(machine_, 0) != kAll) return 7;
    return cuMemAlloc_v2(&other, 1) == CUDA_ERROR_OUT_OF_MEMORY ? 0 : 8;
  });
  EXPECT_EQ(process.Wait(), 0);
  EXPECT_EQ(UsedBytes(machine_, 0), 0u);
}

TEST_F(CudaSubstitutePoolTest, ACaptureMakesNodesOfWhatIsTakenAndFreed) {
  const Process process([&] {
    const CUstream stream = NewStream();
    CUgraph graph = nullptr;
    if (cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_GLOBAL) != CUDA_SUCCESS) return 1;
    const CUdeviceptr memory = Take(kBytes, stream);
    if (cuMemFreeAsync(memory, stream) != CUDA_SUCCESS) return 2;
    if (cuMemFreeAsync(memory, stream) != CUDA_ERROR_INVALID_VALUE) return 3;
    if (cuStreamEndCapture(stream, &graph) != CUDA_SUCCESS || Used() != 0) return 4;
    const CUgraphExec exec = Instantiate(graph);
    if (cuGraphLaunch_ptsz(exec, nullptr) != CUDA_SUCCESS || Used() != kBytes) return 5;
    return OfGraphs(CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT) == kBytes &&
                   Get(DefaultPool(), CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT) == 0
               ? 0
               : 6;
  });
  EXPECT_EQ(process.Wait(), 0);
}

TEST_F(CudaSubstitutePoolTest, GraphsUseEachOthersIdleMemory) {
  const Process process([&] {
    for (int i = 0; i < 2; ++i) {
      CUgraph graph = nullptr;
      CUgraphNode node = nullptr;
      if (cuGraphCreate(&graph, 0) != CUDA_SUCCESS) return 1;
      const CUdeviceptr memory = AddAllocation(graph, kBytes);
      if (cuGraphAddMemFreeNode(&node, graph, nullptr, 0, memory) != CUDA_SUCCESS) return 2;
      if (cuGraphLaunch(Instantiate(graph), nullptr) != CUDA_SUCCESS) return 3;
      if (cuCtxSynchronize() != CUDA_SUCCESS || Used() != kBytes) return 4;
    }
    return 0;
  });
  EXPECT_EQ(process.Wait(), 0);
}

}  // namespace
}  // namespace vrambroker::cuda_substitute
