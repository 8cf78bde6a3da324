// SPDX-License-Identifier: Apache-2.0
#include "allocator/device/nvml.h"

#include <dlfcn.h>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "allocator/base/mutex.h"

namespace vrambroker {
namespace {

constexpr char kNvmlLibrary[] = "libnvidia-ml.so.1";

template <typename Function>
bool FindFunction(void* library, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
  return *function != nullptr;
}

absl::StatusOr<Nvml> LoadNvml() {
  // Never closed: the library may have threads.
  void* const library = dlopen(kNvmlLibrary, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* const error = dlerror();
    return absl::UnimplementedError(
        absl::StrCat("NVIDIA's management library (NVML) cannot be loaded: ", error == nullptr ? kNvmlLibrary : error,
                     "; a container needs NVIDIA_DRIVER_CAPABILITIES=compute,utility"));
  }
  Nvml nvml;
  const bool is_whole = FindFunction(library, "nvmlInit_v2", &nvml.init) &&
                        FindFunction(library, "nvmlErrorString", &nvml.error_string) &&
                        FindFunction(library, "nvmlDeviceGetHandleByUUID", &nvml.get_handle);
  for (const char* const name : {"nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetGraphicsRunningProcesses_v3",
                                 "nvmlDeviceGetMPSComputeRunningProcesses_v3"}) {
    if (Nvml::ListProcesses list = nullptr; FindFunction(library, name, &list)) nvml.lists.emplace_back(name, list);
  }
  if (!is_whole || nvml.lists.empty()) {
    return absl::UnimplementedError(absl::StrCat("the driver is too old: its ", kNvmlLibrary,
                                                 " does not list processes; install driver 525 or later"));
  }
  (void)FindFunction(library, "nvmlDeviceGetDeviceHandleFromMigDeviceHandle", &nvml.get_gpu_of_instance);
  (void)FindFunction(library, "nvmlDeviceGetUtilizationRates", &nvml.get_utilization);
  (void)FindFunction(library, "nvmlDeviceGetTemperature", &nvml.get_temperature);
  (void)FindFunction(library, "nvmlDeviceGetPowerUsage", &nvml.get_power);
  return nvml;
}

}  // namespace

absl::Status NvmlError(const Nvml& nvml, const char* call, int error) {
  const std::string text = absl::StrCat(call, " failed: ", nvml.error_string(error), " (", error, ")");
  return error == kNvmlNotSupported ? absl::UnimplementedError(text) : absl::InternalError(text);
}

absl::StatusOr<const Nvml*> LoadedNvml() {
  static Mutex mu;
  static const Nvml* loaded ABSL_GUARDED_BY(mu) = nullptr;
  MutexLock lock(mu);
  if (loaded != nullptr) return loaded;
  const absl::StatusOr<Nvml> nvml = LoadNvml();
  if (!nvml.ok()) return nvml.status();
  if (const int error = nvml->init(); error != kNvmlSuccess) return NvmlError(*nvml, "nvmlInit_v2", error);
  loaded = new Nvml(*nvml);
  return loaded;
}

absl::StatusOr<NvmlDevice> FindNvmlDevice(const Nvml& nvml, const std::string& uuid) {
  NvmlDevice device{.is_instance = absl::StartsWith(uuid, "MIG-")};
  int error = nvml.get_handle(uuid.c_str(), &device.handle);
  if (absl::string_view number = uuid; error == kNvmlNotFound && absl::ConsumePrefix(&number, "GPU-")) {
    // CUDA does not say whether the id is of a GPU or of an instance.
    device.is_instance = true;
    error = nvml.get_handle(absl::StrCat("MIG-", number).c_str(), &device.handle);
  }
  if (error != kNvmlSuccess) return NvmlError(nvml, "nvmlDeviceGetHandleByUUID", error);
  return device;
}

}  // namespace vrambroker
