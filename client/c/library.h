// SPDX-License-Identifier: Apache-2.0
//
// What the files of libvrambroker.so share. None of it is exported.
#ifndef VRAMBROKER_CLIENT_C_LIBRARY_H_
#define VRAMBROKER_CLIENT_C_LIBRARY_H_

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "client/c/core_api.h"

namespace vrambroker::c_library {

using Error = vrambroker_core_error;

// Remembers the error of this thread, and returns its code.
[[gnu::format(printf, 2, 3)]] int Fail(int code, const char* format, ...);
// Remembers the error that a call of `core` has just returned on this thread, and returns its code.
[[gnu::cold]] int KeepError(const vrambroker_core* core);
// What a call of `core` has returned; an error is remembered.
inline int Kept(const vrambroker_core* core, int code) {
  return code == VRAMBROKER_OK ? code : KeepError(core);
}
// The last one of this thread. Its report is LastReport()'s.
const Error& LastError();
// The whole report of this thread's last error, as JSON; null where there is none. Until the thread's next error.
const char* LastReport();
// `text` (null: NOT_FOUND) with a NUL at its end, and in `needed` (may be null) its bytes with that. OUT_OF_RANGE when
// `size` is less. Neither is remembered.
int FillText(const char* text, char* buffer, size_t size, size_t* needed);

// Finds or loads the core at the first call. Null: an error is remembered.
const vrambroker_core* Core();

// OK, or FAILED_PRECONDITION, with its error, in a child made by fork() that cannot use the core.
int CheckNotForked(bool is_forked = false);

// The file of this library, or "".
const char* OwnPath();

// A whole segment of what is free now, as vrambroker_torch_malloc() gives it. Null: an error is remembered, but no
// refusal: PyTorch will ask again. `bytes` is at most PTRDIFF_MAX.
void* TorchSegmentNow(size_t bytes, int device);
// Gives a whole segment back, when the work on `*stream` is done; null: all work on the device. `function` is called so
// by the program.
void TorchReturnSegment(const char* function, void* pointer, const uint64_t* stream);

// `path` is of a file called `name`, or that and a version.
inline bool IsFileNamed(const char* path, const char* name) {
  const char* const slash = std::strrchr(path, '/');
  const char* const base = slash == nullptr ? path : slash + 1;
  const size_t length = std::strlen(name);
  return std::strncmp(base, name, length) == 0 && (base[length] == '\0' || base[length] == '.');
}

// `options` (null: all defaults) with what its program does not know at its default. False: an error is remembered.
bool ReadOptions(const char* function, const vrambroker_options* options, vrambroker_options* known);

// Fills `out`, which the program compiled with maybe fewer or more fields than `from` has.
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
