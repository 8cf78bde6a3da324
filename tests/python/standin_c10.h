// SPDX-License-Identifier: Apache-2.0
//
// Stands in for PyTorch's c10/util/Exception.h: the names, and the layout that another library sees. Only tests/gpu
// uses real PyTorch.
#ifndef VRAMBROKER_TESTS_PYTHON_STANDIN_C10_H_
#define VRAMBROKER_TESTS_PYTHON_STANDIN_C10_H_

#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <vector>

namespace c10 {

struct SourceLocation {
  const char* function;
  const char* file;
  uint32_t line;
};

class Error : public std::exception {
 public:
  Error(SourceLocation where, std::string what);
  const char* what() const noexcept override { return message_.c_str(); }

 private:
  std::string message_;
  std::vector<std::string> context_;
  std::shared_ptr<std::string> backtrace_;
};

class OutOfMemoryError : public Error {
  using Error::Error;
};

namespace detail {
[[noreturn]] void torchCheckFail(const char* function, const char* file, uint32_t line, const char* what);
}  // namespace detail

}  // namespace c10

#endif  // VRAMBROKER_TESTS_PYTHON_STANDIN_C10_H_
