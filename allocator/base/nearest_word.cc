// SPDX-License-Identifier: Apache-2.0
#include "allocator/base/nearest_word.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "absl/strings/str_cat.h"

namespace vrambroker {
namespace {

constexpr size_t kMostCharacters = 64;

// Counts the characters to insert, remove or change to turn `a` into `b`.
size_t EditDistance(absl::string_view a, absl::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 0; i < a.size(); ++i) {
    size_t diagonal = std::exchange(row[0], i + 1);
    for (size_t j = 0; j < b.size(); ++j) {
      const size_t change = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = std::exchange(row[j + 1], std::min({change, row[j] + 1, row[j + 1] + 1}));
    }
  }
  return row.back();
}

}  // namespace

std::string NearestWord(absl::string_view word, const std::vector<std::string>& known) {
  if (word.size() > kMostCharacters) return "";
  std::string nearest;
  size_t least = word.size() / 3 + 1;
  for (const std::string& each : known) {
    const size_t distance = EditDistance(word, each);
    if (distance >= least) continue;
    least = distance;
    nearest = each;
  }
  return nearest;
}

std::string DidYouMean(absl::string_view word, const std::vector<std::string>& known, absl::string_view otherwise) {
  const std::string nearest = NearestWord(word, known);
  return nearest.empty() ? std::string(otherwise) : absl::StrCat("; did you mean ", nearest, "?");
}

}  // namespace vrambroker
