// SPDX-License-Identifier: Apache-2.0
//
// Stands in for libc10.so.
#include "tests/python/standin_c10.h"

#include <utility>

namespace c10 {

#ifndef STANDIN_OLD_STRINGS  // a build with another std::string has no constructor of this name
Error::Error(SourceLocation where, std::string what)
    : message_(std::move(what) + " (" + where.function + ")"), backtrace_(std::make_shared<std::string>("none")) {}
#endif

namespace detail {
#ifdef STANDIN_OLD_STRINGS
struct Other : std::exception {
  explicit Other(const char* text) : message(text) {}
  const char* what() const noexcept override { return message.c_str(); }
  std::string message;
};
void torchCheckFail(const char*, const char*, uint32_t, const char* what) {
  throw Other(what);
}
#else
void torchCheckFail(const char* function, const char* file, uint32_t line, const char* what) {
  throw Error({function, file, line}, what);
}
#endif
}  // namespace detail

}  // namespace c10
