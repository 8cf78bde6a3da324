// SPDX-License-Identifier: Apache-2.0
//
// What the files of libvrambroker.so share. None of it is exported.
#ifndef VRAMBROKER_CLIENT_C_LIBRARY_H_
#define VRAMBROKER_CLIENT_C_LIBRARY_H_

#include <cstddef>
#include <cstring>

#include "client/c/core_api.h"

namespace vrambroker::c_library {

struct Error {
  int code;
  bool has_oom;
  vrambroker_out_of_memory oom;
  char message[2048];
};

// Remembers the error of this thread, and returns its code.
[[gnu::format(printf, 2, 3)]] int Fail(int code, const char* format, ...);
// The last one of this thread.
const Error& LastError();

// Loads the core at the first call. Null: an error is remembered.
const vrambroker_core* Core();

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
