// SPDX-License-Identifier: Apache-2.0
//
// Waiting, patterns, and paths for tests with real processes.
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

// How many times as long as usual to wait for what must happen: $VRAMBROKER_TEST_PATIENCE, 1 without it. tests/gpu sets
// it where a process needs many seconds before it can use the GPU.
double PatienceFactor();

// How long to wait for what must happen: long enough for a sanitizer build on a loaded machine.
inline const absl::Duration kPatience = absl::Seconds(180) * PatienceFactor();

// Polls until `condition` holds; false when it did not within `timeout`.
bool WaitFor(const std::function<bool()>& condition, absl::Duration timeout = kPatience);

// A sequence of bytes that differs between seeds and between places; Holds() says whether memory has it.
void Fill(void* memory, uint64_t bytes, uint64_t seed);
bool Holds(const void* memory, uint64_t bytes, uint64_t seed);

// A fresh directory that everyone may enter. Removed, with what is in it, at the end of the process.
std::string MakeTempDir();

// The programs of this build, or those of these names in the folder that $VRAMBROKER_TEST_BIN names.
const char* DaemonProgram();
const char* VramctlProgram();
const char* TestClientProgram();

}  // namespace vrambroker::testing_support

#endif  // VRAMBROKER_TESTS_SUPPORT_UTIL_H_
