// SPDX-License-Identifier: Apache-2.0
#ifndef VRAMBROKER_TESTS_SUPPORT_STATUS_MACROS_H_
#define VRAMBROKER_TESTS_SUPPORT_STATUS_MACROS_H_

#include <gtest/gtest.h>

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"

namespace vrambroker::testing_support {

inline const absl::Status& StatusOf(const absl::Status& status) {
  return status;
}
template <typename T>
const absl::Status& StatusOf(const absl::StatusOr<T>& result) {
  return result.status();
}

template <typename T>
::testing::AssertionResult IsOk(const char* text, const T& result) {
  if (result.ok()) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << text << "\n  gave " << StatusOf(result);
}

template <typename T>
::testing::AssertionResult HasStatus(const char* text, const char* /*code_text*/, const char* /*part_text*/,
                                     const T& result, absl::StatusCode code, absl::string_view part) {
  const absl::Status& status = StatusOf(result);
  if (status.code() == code && absl::StrContains(status.message(), part)) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << text << "\n  gave " << status << "\n  expected "
                                       << absl::StatusCodeToString(code) << " with \"" << part << '"';
}

}  // namespace vrambroker::testing_support

// ASSERT_OK and EXPECT_OK take an absl::Status or an absl::StatusOr.
#define ASSERT_OK(expression) ASSERT_PRED_FORMAT1(::vrambroker::testing_support::IsOk, expression)
#define EXPECT_OK(expression) EXPECT_PRED_FORMAT1(::vrambroker::testing_support::IsOk, expression)
// EXPECT_STATUS compares the code, and a part of the message.
#define EXPECT_STATUS(expression, code, part) \
  EXPECT_PRED_FORMAT3(::vrambroker::testing_support::HasStatus, expression, code, part)

#define STATUS_MACROS_CONCAT_INNER(x, y) x##y
#define STATUS_MACROS_CONCAT(x, y) STATUS_MACROS_CONCAT_INNER(x, y)
#define ASSERT_OK_AND_ASSIGN(lhs, expression)                  \
  auto STATUS_MACROS_CONCAT(result_, __LINE__) = (expression); \
  ASSERT_OK(STATUS_MACROS_CONCAT(result_, __LINE__));          \
  lhs = *std::move(STATUS_MACROS_CONCAT(result_, __LINE__))

#endif  // VRAMBROKER_TESTS_SUPPORT_STATUS_MACROS_H_
