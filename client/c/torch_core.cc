// SPDX-License-Identifier: Apache-2.0
//
// The core's part for PyTorch: a shared client for the process, and PyTorch's out-of-memory exception.
#include <dlfcn.h>
#include <link.h>
#include <pthread.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "allocator/base/mutex.h"
#include "allocator/device/cuda_device.h"
#include "client/c/core.h"
#include "client/vrambroker/client.h"

namespace vrambroker::client_internal {
namespace {

// Never destroyed: PyTorch may call until the very end.
struct TorchClient {
  CoreClient core;
  std::vector<int> ordinals;  // the daemon's ordinals, by CUDA ordinal in this process; empty on the host device: equal
};

// NOLINTNEXTLINE(bugprone-throwing-static-initialization): without memory for it nothing else works either
Mutex& mu = *new Mutex(lock_level::kConnect);
TorchClient* shared = nullptr;  // guarded by mu

// A child able to use the core comes from a process without a client; another thread may have been connecting there.
[[gnu::constructor]] void RenewLockInChildren() {
  pthread_atfork(nullptr, nullptr, [] { new (&mu) Mutex(lock_level::kConnect); });
}

absl::StatusOr<std::vector<int>> OrdinalsByCuda(const std::vector<DeviceInfo>& devices) {
  std::vector<int> ordinals;
  if (std::none_of(devices.begin(), devices.end(), [](const DeviceInfo& info) { return info.kind == "cuda"; })) {
    return ordinals;
  }
  const absl::StatusOr<std::vector<std::unique_ptr<Device>>> visible = MakeCudaDevices();
  if (!visible.ok()) return visible.status();
  for (const std::unique_ptr<Device>& device : *visible) {
    const auto it = std::find_if(devices.begin(), devices.end(),
                                 [&](const DeviceInfo& info) { return info.uuid == device->properties().uuid; });
    ordinals.push_back(it == devices.end() ? -1 : it->ordinal);
  }
  return ordinals;
}

// REQUIRES: mu is held.
absl::StatusOr<TorchClient*> Connect(const ClientOptions& options) {
  absl::StatusOr<Client> client = Client::Connect(options);
  if (!client.ok()) return client.status();
  // PyTorch returns many segments in a row, holding its allocator's lock: a stopped daemon must not stop PyTorch.
  client->BeginEnd();
  absl::StatusOr<std::vector<int>> ordinals = OrdinalsByCuda(client->devices());
  if (!ordinals.ok()) return ordinals.status();
  shared = new TorchClient{.core = CoreClient(*std::move(client)), .ordinals = *std::move(ordinals)};
  return shared;
}

// Connects from the environment at first use, unless CoreTorchConnect() has connected.
absl::StatusOr<TorchClient*> Torch() {
  MutexLock lock(mu);
  if (shared != nullptr) return shared;
  return Connect(ClientOptions());
}

absl::StatusOr<int> Ordinal(const TorchClient& torch, int cuda_device) {
  const std::vector<int>& ordinals = torch.ordinals;
  const std::vector<DeviceInfo>& devices = torch.core.client.devices();
  const size_t known = ordinals.empty() ? devices.size() : ordinals.size();
  if (cuda_device < 0 || static_cast<size_t>(cuda_device) >= known) {
    return absl::NotFoundError(
        absl::StrCat("no CUDA device ", cuda_device, "; there ", known == 1 ? "is 1" : absl::StrCat("are ", known)));
  }
  if (ordinals.empty()) return cuda_device;
  const int ordinal = ordinals[static_cast<size_t>(cuda_device)];
  if (ordinal >= 0) return ordinal;
  return absl::NotFoundError(absl::StrCat(
      "the daemon does not serve CUDA device ", cuda_device, " of this process; it serves ",
      absl::StrJoin(devices, ", ", [](std::string* out, const DeviceInfo& info) { absl::StrAppend(out, info.uuid); })));
}

// ---- c10::OutOfMemoryError, without PyTorch's headers ----

// As in c10/util/Exception.h, in all versions from 2.0 to 2.11.
struct SourceLocation {
  const char* function;
  const char* file;
  uint32_t line;
};

constexpr char kThrower[] = "vrambroker_torch_cached_malloc";
constexpr char kThrowerFile[] = "libvrambroker.so";

// More than the size of any c10::Error (about 200 bytes).
constexpr size_t kErrorBytes = 1024;

// The path of a loaded library with file name `library`, or with a suffix: distributions add versions. Empty: not
// loaded.
std::string LoadedPath(const std::string& library) {
  std::pair<std::string, std::string> search(library, "");
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t /*size*/, void* argument) {
        auto& [wanted, path] = *static_cast<std::pair<std::string, std::string>*>(argument);
        const std::string loaded = info->dlpi_name == nullptr ? "" : info->dlpi_name;
        const std::string file = loaded.substr(loaded.rfind('/') + 1);
        if (file != wanted && file.rfind(wanted + ".", 0) != 0) return 0;
        path = loaded;
        return 1;
      },
      &search);
  return search.second;
}

void* Symbol(const char* library, const char* name) {
  const std::string path = LoadedPath(library);
  void* const handle = path.empty() ? nullptr : dlopen(path.c_str(), RTLD_LAZY | RTLD_NOLOAD);
  if (handle == nullptr) return nullptr;
  void* const found = dlsym(handle, name);  // also searches the libraries that it needs
  dlclose(handle);
  return found;
}

// The symbol bound by `library` itself for `name`: the program's own symbols come first.
void* BoundSymbol(const char* library, const char* name) {
  void* const program = dlopen(nullptr, RTLD_LAZY);
  void* const found = program == nullptr ? nullptr : dlsym(program, name);
  if (program != nullptr) dlclose(program);
  return found != nullptr ? found : Symbol(library, name);
}

}  // namespace

int CoreTorchConnect(const vrambroker_options* options) {
  return Guarded([&] {
    const absl::StatusOr<ClientOptions> converted = OptionsFromC(*options);
    if (!converted.ok()) return Report(converted.status());
    MutexLock lock(mu);
    if (shared != nullptr) {
      return Report(absl::FailedPreconditionError(
          "PyTorch's client of this process is connected already: set the options before its first allocation"));
    }
    return Report(Connect(*converted).status());
  });
}

int CoreTorchClient(vrambroker_client** client) {
  return Guarded([&] {
    const absl::StatusOr<TorchClient*> torch = Torch();
    if (!torch.ok()) return Report(torch.status());
    *client = &(*torch)->core;
    return Report(absl::OkStatus());
  });
}

int CoreTorchDevice(int cuda_device, int* device) {
  return Guarded([&] {
    const absl::StatusOr<TorchClient*> torch = Torch();
    if (!torch.ok()) return Report(torch.status());
    const absl::StatusOr<int> ordinal = Ordinal(**torch, cuda_device);
    if (ordinal.ok()) *device = *ordinal;
    return Report(ordinal.status());
  });
}

int CoreTorchMalloc(uint64_t bytes, int device, uint64_t stream, vrambroker_torch_memory what, void** pointer) {
  return Guarded([&] {
    const absl::StatusOr<TorchClient*> torch = Torch();
    if (!torch.ok()) return Report(torch.status());
    const absl::StatusOr<int> ordinal = Ordinal(**torch, device);
    if (!ordinal.ok()) return Report(ordinal.status());
    Client& client = (*torch)->core.client;
    switch (what) {
      case VRAMBROKER_TORCH_BLOCK:
        return Take(client.Malloc(bytes, *ordinal, stream), pointer);
      case VRAMBROKER_TORCH_SEGMENT_NOW:
        return Take(client.TryLeaseSegment(bytes, *ordinal), pointer);
      case VRAMBROKER_TORCH_SEGMENT:
        break;
    }
    return Take(client.LeaseSegment(bytes, *ordinal), pointer);
  });
}

int CoreTorchFree(void* pointer) {
  return Guarded([&] {
    const absl::StatusOr<TorchClient*> torch = Torch();
    if (!torch.ok()) return Report(torch.status());
    return Report((*torch)->core.client.Free(pointer));
  });
}

int CoreTorchReturnSegment(void* pointer, const uint64_t* stream) {
  return Guarded([&] {
    const absl::StatusOr<TorchClient*> torch = Torch();
    if (!torch.ok()) return Report(torch.status());
    return Report(ReturnSegment((*torch)->core.client, pointer, stream));
  });
}

int CoreTorchRecordStream(void* pointer, uint64_t stream) {
  return Guarded([&] {
    const absl::StatusOr<TorchClient*> torch = Torch();
    if (!torch.ok()) return Report(torch.status());
    return Report((*torch)->core.client.RecordStream(pointer, stream));
  });
}

// Builds the exception from parts exported by PyTorch's libraries: the constructor of its base class, from libc10.so,
// and the exception's type and function table, present in every library that throws the exception. Throws with
// PyTorch's C++ runtime, since the same runtime must count and free the exception: in a bundle the core has a separate
// runtime. When a part is missing (builds with the C++ library's old strings), throws the base class, a RuntimeError in
// Python. Without PyTorch, does nothing.
void CoreTorchThrow(const char* message) {
  using Construct = void (*)(void* self, SourceLocation where, std::string what);
  using Allocate = void* (*)(size_t bytes);
  using Release = void (*)(void* error);
  using Throw = void (*)(void* error, void* type, void (*destroy)(void*));
  const auto construct = reinterpret_cast<Construct>(
      Symbol("libc10.so", "_ZN3c105ErrorC1ENS_14SourceLocationENSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"));
  void* const type = Symbol("libc10_cuda.so", "_ZTIN3c1016OutOfMemoryErrorE");
  void** const table = static_cast<void**>(Symbol("libc10_cuda.so", "_ZTVN3c1016OutOfMemoryErrorE"));
  const auto allocate = reinterpret_cast<Allocate>(BoundSymbol("libc10.so", "__cxa_allocate_exception"));
  const auto release = reinterpret_cast<Release>(BoundSymbol("libc10.so", "__cxa_free_exception"));
  const auto throw_it = reinterpret_cast<Throw>(BoundSymbol("libc10.so", "__cxa_throw"));
  if (construct == nullptr || type == nullptr || table == nullptr || allocate == nullptr || release == nullptr ||
      throw_it == nullptr) {
    using Fail = void (*)(const char* function, const char* file, uint32_t line, const char* what);
    const auto fail = reinterpret_cast<Fail>(Symbol("libc10.so", "_ZN3c106detail14torchCheckFailEPKcS2_jS2_"));
    if (fail != nullptr) fail(kThrower, kThrowerFile, 0, message);
    return;
  }
  std::unique_ptr<void, Release> error(allocate(kErrorBytes), release);
  construct(error.get(), {.function = kThrower, .file = kThrowerFile, .line = 0}, message);
  // Two words precede the functions: the offset to the top, and the type. The first function is the destructor.
  *static_cast<void***>(error.get()) = table + 2;
  throw_it(error.release(), type, reinterpret_cast<void (*)(void*)>(table[2]));
}

}  // namespace vrambroker::client_internal
