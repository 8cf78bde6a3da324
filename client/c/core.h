// SPDX-License-Identifier: Apache-2.0
//
// Shared by the files of libvrambroker-core.so.
#ifndef VRAMBROKER_CLIENT_C_CORE_H_
#define VRAMBROKER_CLIENT_C_CORE_H_

#include <cstdint>
#include <exception>
#include <new>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/c/core_api.h"
#include "client/vrambroker/client.h"

namespace vrambroker::client_internal {

struct CoreClient : vrambroker_client {
  explicit CoreClient(Client connected);
  Client client;
};

// Remembers the error for this thread's caller, and returns the error's code.
int Fail(int code, const char* message);
// The code of `status`; remembers an error.
int Report(const absl::Status& status);
// Copies the result into `pointer`; remembers an error.
int Take(const absl::StatusOr<void*>& from, void** pointer);

absl::StatusOr<ClientOptions> OptionsFromC(const vrambroker_options& from);
// `pointer` null: does nothing. `stream` null: waits for the whole device.
absl::Status ReturnSegment(Client& client, void* pointer, const uint64_t* stream);

// Runs `body`, a function returning a code. Lets no exception out: the caller may be C.
template <typename Body>
int Guarded(const Body& body) noexcept {
  try {
    return body();
  } catch (const std::bad_alloc&) {
    return Fail(VRAMBROKER_RESOURCE_EXHAUSTED, "this process is out of ordinary memory (std::bad_alloc)");
  } catch (const std::exception& error) {
    return Fail(VRAMBROKER_INTERNAL, error.what());
  } catch (...) {
    return Fail(VRAMBROKER_INTERNAL, "an exception of unknown type");
  }
}

// For PyTorch; see core_api.h.
int CoreTorchConnect(const vrambroker_options* options);
int CoreTorchClient(vrambroker_client** client);
int CoreTorchDevice(int cuda_device, int* device);
int CoreTorchMalloc(uint64_t bytes, int device, uint64_t stream, vrambroker_torch_memory what, void** pointer);
int CoreTorchFree(void* pointer);
int CoreTorchReturnSegment(void* pointer, const uint64_t* stream);
int CoreTorchRecordStream(void* pointer, uint64_t stream);
void CoreTorchThrow(const char* message);

}  // namespace vrambroker::client_internal

#endif  // VRAMBROKER_CLIENT_C_CORE_H_
