// SPDX-License-Identifier: Apache-2.0
//
// The substitute of NVIDIA's driver gives functions by name and version, like cuGetProcAddress.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <chrono>
#include <filesystem>
#include <initializer_list>
#include <string>
#include <tuple>
#include <utility>

#include "tests/cuda_substitute/driver.h"
#include "tests/cuda_substitute/substitute.h"
#include "tests/unit/allocator/device/cuda_substitute_fixture.h"

namespace vrambroker::cuda_substitute {
namespace {

constexpr cuuint64_t kPerThread = CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM;

void* Exported(const std::string& name) {
  static void* const library = dlopen("libcuda.so.1", RTLD_NOW);
  return dlsym(library, name.c_str());
}

// The driver's function, or the reason for a missing function.
struct Answer {
  CUresult error = CUDA_SUCCESS;
  void* function = nullptr;
  CUdriverProcAddressQueryResult status = CU_GET_PROC_ADDRESS_SUCCESS;
};
Answer Ask(const std::string& name, int version, cuuint64_t flags = CU_GET_PROC_ADDRESS_DEFAULT) {
  Answer answer;
  answer.error = cuGetProcAddress_v2(name.c_str(), &answer.function, version, flags, &answer.status);
  return answer;
}

TEST(CudaSubstituteSymbolsTest, ANameAndAVersionGiveTheNewestFunctionThatIsNotNewer) {
  for (const auto& [name, version, function] : std::initializer_list<std::tuple<const char*, int, const char*>>{
           {"cuMemAlloc", 3020, "cuMemAlloc_v2"},
           {"cuMemAlloc", 13000, "cuMemAlloc_v2"},
           {"cuMemAlloc", 2000, "cuMemAlloc"},
           {"cuMemAlloc", 3019, "cuMemAlloc"},
           {"cuMemAlloc", 99990, "cuMemAlloc_v2"},
           {"cuMemAlloc", -1, "cuMemAlloc_v2"},
           {"cuCtxCreate", 12000, "cuCtxCreate_v3"},
           {"cuCtxCreate", -1, "cuCtxCreate_v4"},
           {"cuGetProcAddress", 11030, "cuGetProcAddress"},
           {"cuGetProcAddress", 11080, "cuGetProcAddress"},
           {"cuGetProcAddress", 12000, "cuGetProcAddress_v2"},
           {"cuCtxGetDevice", 2000, "cuCtxGetDevice"}}) {
    SCOPED_TRACE(name);
    const Answer answer = Ask(name, version);
    EXPECT_EQ(answer.error, CUDA_SUCCESS);
    EXPECT_EQ(answer.status, CU_GET_PROC_ADDRESS_SUCCESS);
    EXPECT_NE(answer.function, nullptr);
    EXPECT_EQ(answer.function, Exported(function));
  }
}

TEST(CudaSubstituteSymbolsTest, WhatIsNotFoundIsNullAndSaysWhy) {
  EXPECT_EQ(Ask("cuNoSuchFunction", 13000).status, CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND);
  EXPECT_EQ(Ask("cuMemAlloc_v2", 13000).status, CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND) << "not a base name";
  EXPECT_EQ(Ask("cuGetProcAddress", 11020).status, CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT);
  for (const auto& [name, version] :
       std::initializer_list<std::pair<const char*, int>>{{"cuNoSuchFunction", 13000}, {"cuGetProcAddress", 11020}}) {
    EXPECT_EQ(Ask(name, version).error, CUDA_SUCCESS);
    EXPECT_EQ(Ask(name, version).function, nullptr);
    void* function = &function;
    EXPECT_EQ(cuGetProcAddress(name, &function, version, 0), CUDA_ERROR_NOT_FOUND) << "the form of CUDA 11";
    EXPECT_EQ(function, &function) << "left alone";
  }
  EXPECT_EQ(Ask("cuInit", 2000, 4).error, CUDA_ERROR_INVALID_VALUE);
}

TEST(CudaSubstituteSymbolsTest, WithItsFlagFunctionsUseTheThreadsOwnStream) {
  EXPECT_EQ(Ask("cuStreamSynchronize", 7000, kPerThread).function, Exported("cuStreamSynchronize_ptsz"));
  EXPECT_EQ(Ask("cuMemcpyHtoD", 13000, kPerThread).function, Exported("cuMemcpyHtoD_v2_ptds"));
  EXPECT_EQ(Ask("cuMemAlloc", 13000, kPerThread).function, Exported("cuMemAlloc_v2")) << "which has no stream";
  EXPECT_EQ(Ask("cuStreamSynchronize", 13000, 3).function, Exported("cuStreamSynchronize_ptsz")) << "both flags";
  EXPECT_EQ(Ask("cuStreamSynchronize", 6050, kPerThread).function, nullptr) << "older";
  EXPECT_EQ(Ask("cuStreamSynchronize", 6050, kPerThread).status, CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT);
  for (const cuuint64_t flags : {CU_GET_PROC_ADDRESS_DEFAULT, CU_GET_PROC_ADDRESS_LEGACY_STREAM}) {
    EXPECT_EQ(Ask("cuStreamSynchronize", 13000, flags).function, Exported("cuStreamSynchronize"));
  }
}

TEST(CudaSubstituteSymbolsTest, EveryExportedFunctionIsFoundByItsBaseName) {
  const auto check = [](std::string name, bool per_thread) {
    SCOPED_TRACE(name);
    void* const exported = Exported(name);
    ASSERT_NE(exported, nullptr);
    if (per_thread) name.resize(name.rfind('_'));
    if (const size_t suffix = name.rfind("_v"); suffix != std::string::npos) name.resize(suffix);
    bool found = false;
    for (int version = 2000; version <= 13000 && !found; version += 10) {
      found = Ask(name, version, per_thread ? kPerThread : 0).function == exported;
    }
    EXPECT_TRUE(found);
  };
#define VRAMBROKER_CHECK(name, parameters) check(#name, false);
#define VRAMBROKER_CHECK_PER_THREAD(name, suffix, parameters, arguments) check(#name #suffix, true);
  VRAMBROKER_CUDA_DRIVER_FUNCTIONS(VRAMBROKER_CHECK)
  VRAMBROKER_CUDA_APPLICATION_FUNCTIONS(VRAMBROKER_CHECK)
  VRAMBROKER_CUDA_FIRST_FUNCTIONS(VRAMBROKER_CHECK)
  VRAMBROKER_CUDA_PER_THREAD_FUNCTIONS(VRAMBROKER_CHECK_PER_THREAD)
#undef VRAMBROKER_CHECK_PER_THREAD
#undef VRAMBROKER_CHECK
}

TEST_F(CudaSubstituteTest, AnOlderDriverHasNoNewerFunctions) {
  const std::string folder = machine_ + "/old";
  ASSERT_TRUE(std::filesystem::create_directory(folder));
  MakeMachine(folder, {.driver_version = 11080});
  setenv(kMachineVariable, folder.c_str(), 1);
  EXPECT_EQ(Ask("cuGetProcAddress", 11080).function, Exported("cuGetProcAddress"));
  for (const int version : {12000, -1}) {
    EXPECT_EQ(Ask("cuGetProcAddress", version).function, Exported("cuGetProcAddress"));
    EXPECT_EQ(Ask("cuCtxCreate", version).function, Exported("cuCtxCreate_v3"));
    EXPECT_EQ(Ask("cuMemGetMemPool", version).status, CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND);
  }
}

TEST_F(CudaSubstituteTest, FunctionsOfTheThreadsOwnStreamUseIt) {
  const Process process([] {
    constexpr std::chrono::milliseconds kWork(200);
    CUevent event = nullptr;
    if (cuEventCreate(&event, CU_EVENT_DISABLE_TIMING) != CUDA_SUCCESS) return 2;
    const auto begin = std::chrono::steady_clock::now();
    Launch(CU_STREAM_PER_THREAD, kWork);
    if (cuEventRecord_ptsz(event, nullptr) != CUDA_SUCCESS || cuEventSynchronize(event) != CUDA_SUCCESS) return 3;
    return std::chrono::steady_clock::now() - begin >= kWork ? 0 : 4;
  });
  EXPECT_EQ(process.Wait(), 0);
}

TEST_F(CudaSubstituteTest, AProcessMayAskForFunctionsAndThenFork) {
  const Process process(
      [] {
        int version = 0;
        if (Ask("cuInit", 2000).function == nullptr || cuDriverGetVersion(&version) != CUDA_SUCCESS) return 1;
        return Process([] { return static_cast<int>(cuInit(0)); }, kNoGpu).Wait();
      },
      kNoGpu);
  EXPECT_EQ(process.Wait(), 0);
}

}  // namespace
}  // namespace vrambroker::cuda_substitute
