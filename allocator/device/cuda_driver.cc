// SPDX-License-Identifier: Apache-2.0
#include "allocator/device/cuda_driver.h"

#include <dlfcn.h>

#include <atomic>
#include <string>
#include <type_traits>

#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "allocator/base/mutex.h"
#include "allocator/device/cuda_status.h"

namespace vrambroker {
namespace {

constexpr char kLibrary[] = "libcuda.so.1";  // NVIDIA's name; the library belongs to the driver, not to the toolkit

#ifdef __cuda_cuda_h__  // the toolkit's cuda.h declares the functions, too: compare
#define VRAMBROKER_COMPARE(name, parameters) \
  static_assert(std::is_same_v<decltype(CudaDriver::name), decltype(&::name)>);
VRAMBROKER_CUDA_DRIVER_FUNCTIONS(VRAMBROKER_COMPARE)
#undef VRAMBROKER_COMPARE
#endif

std::atomic<const CudaDriver*> loaded{nullptr};

absl::Status WhyNotLoaded(const std::string& error) {
  // dlerror() begins with the library's name, or with a path if the file exists. The rest may be translated.
  if (absl::StartsWith(error, kLibrary)) {
    return absl::UnavailableError(absl::StrCat("no NVIDIA driver is installed (", kLibrary,
                                               " not found); a container needs the host's driver (docker: --gpus)"));
  }
  return absl::UnavailableError(absl::StrCat("the NVIDIA driver's library cannot be loaded: ", error));
}

// Finds a function; null when the driver has none of the name.
template <typename Function>
void Find(void* library, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
}

absl::StatusOr<const CudaDriver*> Load() {
  // Shares the library with any program in the process that uses CUDA. Never closed: the driver has threads.
  void* const library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* const error = dlerror();
    return WhyNotLoaded(error == nullptr ? "" : error);
  }
  CudaDriver driver;
  std::string missing;
#define VRAMBROKER_FIND(name, parameters) \
  Find(library, #name, &driver.name);     \
  if (driver.name == nullptr) missing = #name;
  VRAMBROKER_CUDA_DRIVER_FUNCTIONS(VRAMBROKER_FIND)
#undef VRAMBROKER_FIND
  if (missing.empty()) return new CudaDriver(driver);
  int version = 0;
  if (driver.cuDriverGetVersion != nullptr) (void)driver.cuDriverGetVersion(&version);
  Dl_info info;
  const char* const file = dladdr(reinterpret_cast<const void*>(driver.cuInit), &info) != 0 ? info.dli_fname : kLibrary;
  return absl::UnavailableError(
      absl::StrCat("the NVIDIA driver is too old: ", file,
                   version == 0 ? "" : absl::StrCat(", for CUDA ", FormatCudaVersion(version), ","), " has no ",
                   missing, "; install driver 525 or later"));
}

}  // namespace

absl::Status FindCudaDriver() {
  static Mutex mu;
  MutexLock lock(mu);
  if (loaded.load(std::memory_order_relaxed) == nullptr) {
    const absl::StatusOr<const CudaDriver*> driver = Load();
    if (!driver.ok()) return driver.status();
    loaded.store(*driver, std::memory_order_release);
  }
  return absl::OkStatus();
}

absl::Status LoadCudaDriver() {
  const absl::Status found = FindCudaDriver();
  return found.ok() ? CudaStatus("cuInit", Driver().cuInit(0)) : found;
}

std::string FormatCudaVersion(int version) {
  return absl::StrCat(version / 1000, ".", version % 1000 / 10);
}

const CudaDriver& Driver() {
  return *loaded.load(std::memory_order_acquire);
}

}  // namespace vrambroker
