// SPDX-License-Identifier: Apache-2.0
//
// Interface between the two halves of the C library: libvrambroker.so, linked by programs, and libvrambroker-core.so,
// loaded by libvrambroker.so. Only the core uses gRPC, so that no symbols of gRPC reach the program.
#ifndef VRAMBROKER_CLIENT_C_CORE_API_H_
#define VRAMBROKER_CLIENT_C_CORE_API_H_

#include <cstdint>

#include "client/vrambroker/vrambroker.h"

// Changes with anything in this file, and with the structs passed: both halves must come from the same build.
inline constexpr uint32_t kVrambrokerCoreVersion = 11;

struct vrambroker_core;

// PyTorch's use of memory.
enum vrambroker_torch_memory {
  VRAMBROKER_TORCH_BLOCK,       // vrambroker_torch_cached_malloc()
  VRAMBROKER_TORCH_SEGMENT,     // vrambroker_torch_malloc()
  VRAMBROKER_TORCH_SEGMENT_NOW  // a segment from free memory only: PyTorch will ask again
};

// Start of a client: a call reaches the core with one load and one jump.
struct vrambroker_client {
  const vrambroker_core* core;
};

// Has no type with a destructor: PyTorch calls during process exit, after destructors have run.
struct vrambroker_core_error {
  int code;
  bool has_oom;
  vrambroker_out_of_memory oom;
  const char* oom_json;  // the core's, until this thread's next error; null: no refusal, or no memory for the report
  char message[2048];
};

// Arguments are checked for null pointers, output pointers are null, and only torch_throw throws.
struct vrambroker_core {
  uint32_t version;
  // The error of this thread's last failed call. The library keeps the error: a core may serve several libraries, and
  // the error belongs to the calling library.
  const vrambroker_core_error* (*last_error)();
  // gRPC is in use, and does not survive a fork(). A failed connect() may not have started gRPC.
  bool (*uses_grpc)();
  // True in a process forked while gRPC was in use.
  bool (*is_forked)();
  int (*connect)(const vrambroker_options* options, vrambroker_client** client);
  int (*disconnect)(vrambroker_client* client);
  int (*begin_disconnect)(vrambroker_client* client);
  int (*status)(vrambroker_client* client);
  int (*get_session)(vrambroker_client* client, vrambroker_session* out);
  const char* (*warning)(vrambroker_client* client, size_t index);
  int (*device_count)(vrambroker_client* client);
  int (*get_device)(vrambroker_client* client, int device, vrambroker_device* out);
  int (*malloc)(vrambroker_client* client, uint64_t bytes, int device, uint64_t stream, void** pointer);
  int (*free)(vrambroker_client* client, void* pointer);
  int (*free_stream)(vrambroker_client* client, void* pointer, uint64_t stream);
  int (*record_stream)(vrambroker_client* client, void* pointer, uint64_t stream);
  // `give_up` as in vrambroker_malloc_until(); null: never.
  int (*malloc_until)(vrambroker_client* client, uint64_t bytes, int device, uint64_t stream, const int* give_up,
                      void** pointer);
  int (*lease_segment)(vrambroker_client* client, uint64_t bytes, int device, const int* give_up, void** pointer);
  int (*try_lease_segment)(vrambroker_client* client, uint64_t bytes, int device, void** pointer);
  // `stream` null: waits for the whole device.
  int (*return_segment)(vrambroker_client* client, void* pointer, const uint64_t* stream);
  int (*report_segment_use)(vrambroker_client* client, int device, const vrambroker_segment_use* use);
  int (*serve_trims)(vrambroker_client* client, bool on);
  int (*wait_for_trim)(vrambroker_client* client, int64_t timeout_ms, vrambroker_trim* out);
  int (*end_trim)(vrambroker_client* client, uint64_t number);
  int (*write)(vrambroker_client* client, void* pointer, uint64_t offset, const void* from, uint64_t bytes);
  int (*read)(vrambroker_client* client, const void* pointer, uint64_t offset, void* to, uint64_t bytes);
  int (*empty_cache)(vrambroker_client* client, uint64_t* released_bytes);
  int (*memory_info)(vrambroker_client* client, int device, uint64_t* free_bytes, uint64_t* total_bytes);
  int (*get_memory_stats)(vrambroker_client* client, int device, vrambroker_memory_stats* out);
  int (*memory_stats_json)(vrambroker_client* client, int device, char* buffer, size_t size, size_t* needed);
  int (*reset_memory_stats)(vrambroker_client* client, int device, bool accumulated);
  int (*reset_accumulated_memory_stats)(vrambroker_client* client, int device);
  int (*memory_summary)(vrambroker_client* client, int device, bool abbreviated, char* buffer, size_t size,
                        size_t* needed);
  int (*set_memory_fraction)(vrambroker_client* client, double fraction, int device);
  int (*set_recording)(vrambroker_client* client, uint64_t max_events);
  int (*dump_snapshot)(vrambroker_client* client, const char* path);
  int (*snapshot_json)(vrambroker_client* client, bool with_history, char* buffer, size_t size, size_t* needed);
  uint32_t (*scope_begin)(const char* name, const char* file, int line);
  void (*scope_end)(uint32_t outer);
  // For the client shared by PyTorch's functions.
  int (*torch_connect)(const vrambroker_options* options);
  int (*torch_client)(vrambroker_client** client);
  int (*torch_device)(int cuda_device, int* device);
  int (*torch_malloc)(uint64_t bytes, int device, uint64_t stream, vrambroker_torch_memory what, void** pointer);
  int (*torch_free)(void* pointer);                                    // a block
  int (*torch_return_segment)(void* pointer, const uint64_t* stream);  // null: the whole device
  int (*torch_record_stream)(void* pointer, uint64_t stream);
  // Throws PyTorch's OutOfMemoryError; returns without PyTorch, or with an unsupported PyTorch.
  void (*torch_throw)(const char* message);
};

extern "C" {
// The core's function table. Null: not of `version`.
VRAMBROKER_API const vrambroker_core* vrambroker_core_v1(uint32_t version);
// The core's release, such as "0.1.0"; present in every version. For error messages.
VRAMBROKER_API const char* vrambroker_core_release(void);
}
using VrambrokerCoreV1 = const vrambroker_core* (*)(uint32_t version);
using VrambrokerCoreRelease = const char* (*)();

#endif  // VRAMBROKER_CLIENT_C_CORE_API_H_
