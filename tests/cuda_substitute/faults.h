// SPDX-License-Identifier: Apache-2.0
//
// Which calls of the substitute fail, and how long they take. See substitute.h for the syntax.
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

// Thread-safe.
class Faults {
 public:
  // From the environment. Aborts when that cannot be understood: a test that injects nothing proves nothing.
  Faults();

  void Set(const std::string& faults);
  // Counts a call. Waits for its delay, and returns how it is to fail.
  CUresult Count(const std::string& function);
  uint64_t calls(const std::string& function);

 private:
  struct Fault {
    std::string function;
    uint64_t from = 0;  // call, from 1
    uint64_t to = 0;
    CUresult error = CUDA_SUCCESS;
    bool sticky = false;
  };

  static std::vector<Fault> Parse(const std::string& text);

  std::mutex mu_;
  std::vector<Fault> faults_;
  std::map<std::string, std::chrono::milliseconds> delays_;
  std::map<std::string, std::string> until_;     // the file that a function's calls wait for
  std::map<std::string, uint64_t> calls_;        // in all
  std::map<std::string, uint64_t> calls_since_;  // since the faults were set
  CUresult sticky_ = CUDA_SUCCESS;
};

}  // namespace vrambroker::cuda_substitute

#endif  // VRAMBROKER_TESTS_CUDA_SUBSTITUTE_FAULTS_H_
