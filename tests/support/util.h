// SPDX-License-Identifier: Apache-2.0
//
// Waits, patterns, and paths for tests with real processes.
#ifndef VRAMBROKER_TESTS_SUPPORT_UTIL_H_
#define VRAMBROKER_TESTS_SUPPORT_UTIL_H_

#include <cstdint>
#include <functional>
#include <string>

#include "absl/time/time.h"

namespace vrambroker::testing_support {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitized = true;
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif
#else
inline constexpr bool kSanitized = false;
#endif

// Returns a factor for waiting times: $VRAMBROKER_TEST_PATIENCE, or 1 without the variable. tests/gpu sets the variable
// where a process needs many seconds before its first use of the GPU.
double PatienceFactor();

// Tests wait this long for an event that must happen: long enough for a sanitizer build on a loaded machine.
inline const absl::Duration kPatience = absl::Seconds(180) * PatienceFactor();

// Polls until `condition` holds. Returns false when `condition` did not hold within `timeout`.
bool WaitFor(const std::function<bool()>& condition, absl::Duration timeout = kPatience);

// Fill() writes a sequence of bytes that differs between seeds and between places; Holds() tells whether memory has the
// sequence. The memory begins `start` bytes after the start of the sequence, a multiple of 8.
void Fill(void* memory, uint64_t bytes, uint64_t seed, uint64_t start = 0);
bool Holds(const void* memory, uint64_t bytes, uint64_t seed, uint64_t start = 0);

// Makes a fresh directory that every user may enter. The process removes the directory and its content at the process's
// end.
std::string MakeTempDir();

// Return the programs of this build, or the programs of the same names in the folder that $VRAMBROKER_TEST_BIN names.
const char* DaemonProgram();
const char* VramctlProgram();
const char* TestClientProgram();

}  // namespace vrambroker::testing_support

#endif  // VRAMBROKER_TESTS_SUPPORT_UTIL_H_
