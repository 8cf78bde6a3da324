// SPDX-License-Identifier: Apache-2.0
//
// The core's part for PyTorch: one client for the process, and its exception for want of memory.
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
  std::vector<int> ordinals;  // the daemon's, by CUDA's in this process; empty on the host device: the same
};

// NOLINTNEXTLINE(bugprone-throwing-static-initialization): without memory for it nothing else works either
Mutex& mu = *new Mutex(lock_level::kConnect);
TorchClient* shared = nullptr;  // guarded by mu

// A child that may use the core is one of a process without a client, in which another thread may have been connecting.
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
  // PyTorch gives many segments back in a row, with its allocator locked: a daemon that is stopped must not stop it.
  client->BeginEnd();
  absl::StatusOr<std::vector<int>> ordinals = OrdinalsByCuda(client->devices());
  if (!ordinals.ok()) return ordinals.status();
  shared = new TorchClient{.core = CoreClient(*std::move(client)), .ordinals = *std::move(ordinals)};
  return shared;
}

// Connects from the environment at first use, when CoreTorchConnect() has not.
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

// As c10/util/Exception.h has it, in all versions from 2.0 to 2.11.
struct SourceLocation {
  const char* function;
  const char* file;
  uint32_t line;
};

constexpr char kThrower[] = "vrambroker_torch_cached_malloc";
constexpr char kThrowerFile[] = "libvrambroker.so";

// More than any c10::Error takes (about 200 bytes).
constexpr size_t kErrorBytes = 1024;

// The path of a loaded library whose file name begins so: distributions add versions. Empty when there is none.
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
  void* const found = dlsym(handle, name);  // also in the libraries that it needs
  dlclose(handle);
  return found;
}

// What `library` itself calls by that name: the program's own come first.
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

// The exception is made of parts that PyTorch's libraries export: the constructor of its base, from libc10.so, and its
// own type and table of functions, which every library that throws it has. PyTorch's C++ runtime throws it, as it
// counts and frees what PyTorch catches: in a bundle the core has another one. Where a part is missing (builds with the
// C++ library's old strings), what is thrown is its base, a RuntimeError in Python. Without PyTorch: nothing.
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
  // Two words before the functions: the offset to the top, and the type. The first function is the destructor.
  *static_cast<void***>(error.get()) = table + 2;
  throw_it(error.release(), type, reinterpret_cast<void (*)(void*)>(table[2]));
}

}  // namespace vrambroker::client_internal
