// SPDX-License-Identifier: Apache-2.0
//
// Shared by the files of libvrambroker.so; not exported.
#ifndef VRAMBROKER_CLIENT_C_LIBRARY_H_
#define VRAMBROKER_CLIENT_C_LIBRARY_H_

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "client/c/core_api.h"

namespace vrambroker::c_library {

using Error = vrambroker_core_error;

// Remembers the error for this thread, and returns its code.
[[gnu::format(printf, 2, 3)]] int Fail(int code, const char* format, ...);
// Remembers the error just returned by a call of `core` on this thread, and returns its code.
[[gnu::cold]] int KeepError(const vrambroker_core* core);
// Passes on the code returned by a call of `core`; remembers an error.
inline int Kept(const vrambroker_core* core, int code) {
  return code == VRAMBROKER_OK ? code : KeepError(core);
}
// The last error of this thread. LastReport() has the report.
const Error& LastError();
// The whole report of this thread's last error, as JSON; null: no report. Valid until the thread's next error.
const char* LastReport();
// Copies `text` (null: NOT_FOUND) with a terminating NUL, and sets `needed` (may be null) to the bytes including the
// NUL. OUT_OF_RANGE when `size` is smaller. Remembers neither error.
int FillText(const char* text, char* buffer, size_t size, size_t* needed);

// Finds or loads the core at the first call. Null: an error is remembered.
const vrambroker_core* Core();

// OK, or FAILED_PRECONDITION, with its error, in a child made by fork() that cannot use the core.
int CheckNotForked(bool is_forked = false);

// The file of this library, or "".
const char* OwnPath();

// A whole segment from free memory only, otherwise as vrambroker_torch_malloc(). Null: an error is remembered, but not
// logged as a refusal: PyTorch will ask again. `bytes` is at most PTRDIFF_MAX.
void* TorchSegmentNow(size_t bytes, int device);
// Returns a whole segment after the work on `*stream`; null: after all work on the device. `function`: the name called
// by the program.
void TorchReturnSegment(const char* function, void* pointer, const uint64_t* stream);

// True when `path` names a file `name`, or `name` with a version.
inline bool IsFileNamed(const char* path, const char* name) {
  const char* const slash = std::strrchr(path, '/');
  const char* const base = slash == nullptr ? path : slash + 1;
  const size_t length = std::strlen(name);
  return std::strncmp(base, name, length) == 0 && (base[length] == '\0' || base[length] == '.');
}

// Copies `options` (null: all defaults); options unknown to the program get their default. False: an error is
// remembered.
bool ReadOptions(const char* function, const vrambroker_options* options, vrambroker_options* known);

// Fills `out`, a struct with possibly fewer or more fields in the program than `from`.
template <typename Struct>
int CopyOut(const Struct& from, Struct* out) {
  const size_t size = out->struct_size;
  const size_t known = size < sizeof from ? size : sizeof from;
  std::memset(static_cast<void*>(out), 0, size);
  std::memcpy(static_cast<void*>(out), &from, known);
  out->struct_size = size;
  return VRAMBROKER_OK;
}

}  // namespace vrambroker::c_library

#endif  // VRAMBROKER_CLIENT_C_LIBRARY_H_
