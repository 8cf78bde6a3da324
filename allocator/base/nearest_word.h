// SPDX-License-Identifier: Apache-2.0
//
// Suggestions for unknown words: commands, options, fields, settings.
#ifndef VRAMBROKER_ALLOCATOR_BASE_NEAREST_WORD_H_
#define VRAMBROKER_ALLOCATOR_BASE_NEAREST_WORD_H_

#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace vrambroker {

// The word of `known` probably meant by `word`: at most a third of the characters differ. Empty: none.
std::string NearestWord(absl::string_view word, const std::vector<std::string>& known);

// "; did you mean --capacity?", or `otherwise`: where to read more.
std::string DidYouMean(absl::string_view word, const std::vector<std::string>& known, absl::string_view otherwise = "");

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_BASE_NEAREST_WORD_H_
