// SPDX-License-Identifier: Apache-2.0
//
// Converts the flags of a claim to messages. Errors are InvalidArgument and name the flag.
#ifndef VRAMBROKER_CLIENT_VRAMCTL_VIEWS_CLAIM_TERMS_H_
#define VRAMBROKER_CLIENT_VRAMCTL_VIEWS_CLAIM_TERMS_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "vrambroker/v1/admin.pb.h"

namespace vrambroker::vramctl {

// Sets nothing if the flag is not given.
absl::Status SetLimitOf(const char* flag, const std::string& text, const std::function<v1::Limit*()>& mutable_limit);

// Returns milliseconds.
absl::StatusOr<uint32_t> ParseWait(const char* flag, const std::string& text);

absl::Status SetDevices(const std::vector<int>& devices, v1::ClaimTerms* terms);

}  // namespace vrambroker::vramctl

#endif  // VRAMBROKER_CLIENT_VRAMCTL_VIEWS_CLAIM_TERMS_H_
