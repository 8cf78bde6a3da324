// SPDX-License-Identifier: Apache-2.0
//
// Decides which calls of the substitute fail, and how long calls take. See substitute.h for the syntax.
#ifndef VRAMBROKER_TESTS_CUDA_SUBSTITUTE_FAULTS_H_
#define VRAMBROKER_TESTS_CUDA_SUBSTITUTE_FAULTS_H_

#include <cuda.h>

#include <chrono>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace vrambroker::cuda_substitute {

// The class is thread-safe.
class Faults {
 public:
  // Reads the environment. Aborts when the constructor cannot parse a variable: a test without an injected fault proves
  // nothing.
  Faults();

  void Set(const std::string& faults);
  // Counts a call, waits for the call's delay, and returns the call's error.
  CUresult Count(const std::string& function);
  uint64_t calls(const std::string& function);

 private:
  struct Fault {
    std::string function;
    uint64_t from = 0;  // the first failing call, counted from 1
    uint64_t to = 0;
    CUresult error = CUDA_SUCCESS;
    bool sticky = false;
  };

  static std::vector<Fault> Parse(const std::string& text);

  std::mutex mu_;
  std::vector<Fault> faults_;
  std::map<std::string, std::chrono::milliseconds> delays_;
  std::map<std::string, std::string> until_;     // the file that a function's calls wait for
  std::map<std::string, uint64_t> calls_;        // all calls
  std::map<std::string, uint64_t> calls_since_;  // calls since the faults were set
  CUresult sticky_ = CUDA_SUCCESS;
};

}  // namespace vrambroker::cuda_substitute

#endif  // VRAMBROKER_TESTS_CUDA_SUBSTITUTE_FAULTS_H_
