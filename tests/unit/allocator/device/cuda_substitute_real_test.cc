// SPDX-License-Identifier: Apache-2.0
//
// The substitute answers like NVIDIA's own libcuda.so.1, for every question that needs no GPU.
#include <dlfcn.h>
#include <grp.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tests/cuda_substitute/driver.h"
#include "tests/cuda_substitute/substitute.h"
#include "tests/support/nvidia_driver.h"
#include "tests/support/util.h"
#include "tests/unit/allocator/device/cuda_substitute_fixture.h"

namespace vrambroker::cuda_substitute {
namespace {

constexpr auto kVersions = std::to_array<int>(
    {-2,    -1,    0,     1999,  2000,  2020,  3000,  3010,  3019,  3020,  4000,  4010,  5000,  6000,
     6050,  7000,  8000,  9000,  9020,  10000, 10010, 10020, 11000, 11010, 11020, 11030, 11040, 11041,
     11060, 11080, 12000, 12010, 12020, 12030, 12040, 12050, 12080, 13000, 13040, 14000, 99990});

// First versions that only the real driver has.
const std::set<std::string>& LackingFirst() {
  static const auto& names = *new std::set<std::string>{
      "cuCtxPopCurrent", "cuCtxPushCurrent",     "cuEventDestroy", "cuIpcOpenMemHandle", "cuStreamDestroy",
      "cuMemAllocHost",  "cuMemGetAddressRange", "cuMemcpyDtoH",   "cuMemcpyHtoD",       "cuStreamBeginCapture"};
  return names;
}

// Functions of the substitute, by name.
const std::map<std::string, void*>& Functions() {
  static const auto& functions = *[] {
    auto* const all = new std::map<std::string, void*>;
    void* const library = dlopen("libcuda.so.1", RTLD_NOW);
#define VRAMBROKER_NOTE(name, parameters) (*all)[#name] = dlsym(library, #name);
#define VRAMBROKER_NOTE_PER_THREAD(name, suffix, parameters, arguments) VRAMBROKER_NOTE(name##suffix, parameters)
    VRAMBROKER_CUDA_DRIVER_FUNCTIONS(VRAMBROKER_NOTE)
    VRAMBROKER_CUDA_APPLICATION_FUNCTIONS(VRAMBROKER_NOTE)
    VRAMBROKER_CUDA_FIRST_FUNCTIONS(VRAMBROKER_NOTE)
    VRAMBROKER_CUDA_PER_THREAD_FUNCTIONS(VRAMBROKER_NOTE_PER_THREAD)
#undef VRAMBROKER_NOTE_PER_THREAD
#undef VRAMBROKER_NOTE
    return all;
  }();
  return functions;
}

std::set<std::string> Bases() {
  std::set<std::string> bases = {"cuNoSuchFunction", "cuMemAlloc_v2", "cuMemAllocAsync_ptsz", ""};
  for (const auto& [name, function] : Functions()) {
    std::string base = name;
    if (const size_t suffix = base.rfind("_pt"); suffix != std::string::npos) base.resize(suffix);
    if (const size_t suffix = base.rfind("_v"); suffix != std::string::npos) base.resize(suffix);
    bases.insert(base);
  }
  return bases;
}

// A driver's answers to both forms of cuGetProcAddress. A pointer that the driver leaves alone stays `this`.
struct BothAnswers {
  CUresult error = CUDA_SUCCESS;
  CUresult error_of_first = CUDA_SUCCESS;
  void* function = this;
  void* function_of_first = this;
  CUdriverProcAddressQueryResult status = CU_GET_PROC_ADDRESS_SUCCESS;
};
void AskBoth(decltype(&::cuGetProcAddress) first, decltype(&::cuGetProcAddress_v2) second, const std::string& base,
             int version, cuuint64_t flags, BothAnswers& answer) {
  answer.error = second(base.c_str(), &answer.function, version, flags, &answer.status);
  answer.error_of_first = first(base.c_str(), &answer.function_of_first, version, flags);
}

class RealDriverTest : public CudaSubstituteTest {
 protected:
  void SetUp() override {
    CudaSubstituteTest::SetUp();
    NEEDS_REAL_CUDA_LIBRARY(file);
    if (testing_support::kSanitized) GTEST_SKIP() << "the real driver is built without sanitizers";
    library_ = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
    ASSERT_NE(library_, nullptr) << dlerror();
  }
  template <typename Function>
  Function Real(const char* name, Function /*like*/) const {
    return reinterpret_cast<Function>(dlsym(library_, name));
  }

  void* library_ = nullptr;
};

TEST_F(RealDriverTest, FunctionsByNameAndVersionAreTheSame) {
  int version = 0;
  ASSERT_EQ(Real("cuDriverGetVersion", &cuDriverGetVersion)(&version), CUDA_SUCCESS);
  ASSERT_GE(version, 12000);
  const std::string folder = machine_ + "/as_old";
  ASSERT_TRUE(std::filesystem::create_directory(folder));
  MakeMachine(folder, {.driver_version = version});
  setenv(kMachineVariable, folder.c_str(), 1);
  const auto first = Real("cuGetProcAddress", &cuGetProcAddress);
  const auto second = Real("cuGetProcAddress_v2", &cuGetProcAddress_v2);
  std::map<void*, std::string> names;
  for (const auto& [name, function] : Functions()) names[function] = name;
  int same = 0;
  for (const std::string& base : Bases()) {
    for (const int asked : kVersions) {
      for (cuuint64_t flags = 0; flags <= 5; ++flags) {
        BothAnswers real;
        BothAnswers ours;
        AskBoth(first, second, base, asked, flags, real);
        AskBoth(&cuGetProcAddress, &cuGetProcAddress_v2, base, asked, flags, ours);
        if (ours.status == CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT && LackingFirst().count(base) > 0) continue;
        SCOPED_TRACE(base + " " + std::to_string(asked) + " flags " + std::to_string(flags));
        EXPECT_EQ(ours.error, real.error);
        EXPECT_EQ(ours.error_of_first, real.error_of_first);
        EXPECT_EQ(ours.status, real.status);
        const auto expect_same = [&](const void* left_alone, void* our, const void* its_left_alone, void* its) {
          EXPECT_EQ(our == left_alone, its == its_left_alone);
          EXPECT_EQ(our == nullptr, its == nullptr);
          if (const auto name = names.find(our); name != names.end()) {
            EXPECT_EQ(its, dlsym(library_, name->second.c_str())) << name->second;
            ++same;
          }
        };
        expect_same(&ours, ours.function, &real, real.function);
        expect_same(&ours, ours.function_of_first, &real, real.function_of_first);
      }
    }
  }
  EXPECT_GT(same, 10000);
}

// Answers of a driver in a process that finds no GPU.
using Results = std::vector<std::pair<std::string, int64_t>>;
template <typename Find>
Results WithoutAGpu(const Find& find) {
  Results results;
  const auto note = [&results](const std::string& what, auto value) {
    results.emplace_back(what, static_cast<int64_t>(value));
  };
  constexpr int kBefore = 7;
  int number = kBefore;
  size_t left = kBefore;
  size_t total = kBefore;
  unsigned int left32 = kBefore;
  unsigned int total32 = kBefore;
  CUdeviceptr address = kBefore;
  CUcontext context = nullptr;
  CUmemoryPool pool = nullptr;
  const char* text = "";
  const void* table = &number;
  const CUuuid id = {};
  note("cuDeviceGetCount before cuInit", find("cuDeviceGetCount", &cuDeviceGetCount)(&number));
  for (int i = 0; i < 3; ++i) note("cuInit", find("cuInit", &cuInit)(0));
  note("cuInit with flags", find("cuInit", &cuInit)(1));
  note("cuDriverGetVersion", find("cuDriverGetVersion", &cuDriverGetVersion)(&number));
  number = kBefore;
  note("cuDeviceGetCount", find("cuDeviceGetCount", &cuDeviceGetCount)(&number));
  note("cuDeviceGet", find("cuDeviceGet", &cuDeviceGet)(&number, 0));
  note("cuCtxGetDevice", find("cuCtxGetDevice", &cuCtxGetDevice)(&number));
  note("the number", number);
  note("cuMemGetInfo_v2", find("cuMemGetInfo_v2", &cuMemGetInfo_v2)(&left, &total));
  note("left", left);
  note("total", total);
  note("cuMemGetInfo", find("cuMemGetInfo", &cuMemGetInfo)(&left32, &total32));
  note("left", left32);
  note("total", total32);
  total = kBefore;
  note("cuDeviceTotalMem_v2", find("cuDeviceTotalMem_v2", &cuDeviceTotalMem_v2)(&total, 0));
  note("total", total);
  note("cuMemAlloc_v2", find("cuMemAlloc_v2", &cuMemAlloc_v2)(&address, kBytes));
  note("address", address);
  address = kBefore;
  note("cuMemAllocManaged", find("cuMemAllocManaged", &cuMemAllocManaged)(&address, kBytes, CU_MEM_ATTACH_GLOBAL));
  note("address", address);
  address = kBefore;
  note("cuMemAllocAsync", find("cuMemAllocAsync", &cuMemAllocAsync)(&address, kBytes, nullptr));
  note("address", address);
  address = kBefore;
  left = kBefore;
  note("cuMemAllocPitch_v2", find("cuMemAllocPitch_v2", &cuMemAllocPitch_v2)(&address, &left, kBytes, 1, 4));
  note("address", address);
  note("pitch", left);
  left32 = kBefore;
  note("cuMemAlloc", find("cuMemAlloc", &cuMemAlloc)(&left32, kBytes));
  note("address", left32);
  note("cuCtxGetCurrent", find("cuCtxGetCurrent", &cuCtxGetCurrent)(&context));
  note("cuCtxPopCurrent_v2", find("cuCtxPopCurrent_v2", &cuCtxPopCurrent_v2)(&context));
  note("cuCtxSynchronize", find("cuCtxSynchronize", &cuCtxSynchronize)());
  note("cuDeviceGetDefaultMemPool", find("cuDeviceGetDefaultMemPool", &cuDeviceGetDefaultMemPool)(&pool, 0));
  note("cuGetErrorName", find("cuGetErrorName", &cuGetErrorName)(CUDA_ERROR_NO_DEVICE, &text));
  note("the name", std::string(text) == "CUDA_ERROR_NO_DEVICE");
  note("cuGetErrorName", find("cuGetErrorName", &cuGetErrorName)(static_cast<CUresult>(54321), &text));
  note("the name", text == nullptr);
  note("cuGetExportTable", find("cuGetExportTable", &cuGetExportTable)(&table, &id));
  note("the table", table == nullptr);
  return results;
}

std::string TextOf(const Results& results) {
  std::string text;
  for (const auto& [what, value] : results) text += what + ": " + std::to_string(value) + "\n";
  return text;
}

TEST_F(RealDriverTest, WithoutAGpuBothSayTheSame) {
  if (testing_support::HasNvidiaDriver()) GTEST_SKIP() << "this machine has NVIDIA's driver";
  unsetenv(kMachineVariable);
  const auto said_by = [this](bool real) {
    int ends[2];
    EXPECT_EQ(pipe(ends), 0);
    const Process process(
        [&] {
          // For root, the real library makes a device file (/dev/nvidiactl), which stays.
          if (geteuid() == 0 && (setgroups(0, nullptr) != 0 || setgid(65534) != 0 || setuid(65534) != 0)) return 1;
          const std::string text =
              TextOf(WithoutAGpu([&](const char* name, auto ours) { return real ? Real(name, ours) : ours; }));
          return write(ends[1], text.data(), text.size()) == static_cast<ssize_t>(text.size()) ? 0 : 1;
        },
        kNoGpu);
    close(ends[1]);
    EXPECT_EQ(process.Wait(), 0);
    std::string text(4096, '\0');
    const ssize_t bytes = read(ends[0], text.data(), text.size());
    close(ends[0]);
    text.resize(bytes < 0 ? 0 : static_cast<size_t>(bytes));
    return text;
  };
  const std::string ours = said_by(/*real=*/false);
  EXPECT_NE(ours, "");
  EXPECT_EQ(ours, said_by(/*real=*/true));
}

}  // namespace
}  // namespace vrambroker::cuda_substitute
