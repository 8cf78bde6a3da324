// SPDX-License-Identifier: Apache-2.0
#include "allocator/heap/allocator_options.h"

#include <algorithm>
#include <bit>
#include <charconv>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "allocator/base/nearest_word.h"
#include "allocator/heap/size_class.h"

namespace vrambroker {
namespace {

constexpr uint64_t kMaxMib = kMaxRequestBytes / 1_MiB - 1;
constexpr uint64_t kMaxDivisions = uint64_t{1} << 31;  // coarser than 512 bytes only for requests above 1 TiB
constexpr size_t kBuckets = std::tuple_size_v<decltype(AllocatorOptions::roundup_power2_divisions)>;

// Quotes `text` on one line, cut to a readable length.
std::string Quoted(absl::string_view text) {
  constexpr size_t kMaxShown = 80;
  return absl::StrCat("\"", absl::CHexEscape(text.substr(0, kMaxShown)), text.size() > kMaxShown ? "..." : "", "\"");
}

absl::Status NotA(absl::string_view key, absl::string_view value, absl::string_view accepted) {
  return absl::InvalidArgumentError(absl::StrCat(key, ": ", Quoted(value), " is not ", accepted));
}

// Reads the whole text as a number. Signs, nan and inf are refused: they begin with neither digit nor point.
template <typename Number>
bool ReadNumber(absl::string_view text, Number& number) {
  if (text.empty() || (!absl::ascii_isdigit(text.front()) && text.front() != '.')) return false;
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, number);
  return error == std::errc() && stop == end;
}

bool ReadDivisions(absl::string_view text, uint32_t& divisions) {
  uint64_t number = 0;
  if (!ReadNumber(text, number) || number > kMaxDivisions) return false;
  divisions = static_cast<uint32_t>(number);
  return number == 0 || std::has_single_bit(number);
}

// Splits "KEY : VALUE". Without a colon the value is empty; no setting accepts an empty value.
std::pair<absl::string_view, absl::string_view> SplitPair(absl::string_view pair) {
  const size_t colon = std::min(pair.find(':'), pair.size());
  return {absl::StripAsciiWhitespace(pair.substr(0, colon)),
          absl::StripAsciiWhitespace(pair.substr(std::min(colon + 1, pair.size())))};
}

// NotA() for a number of MiB. PyTorch reads "512mb" as 512, and "8gb" as 8.
absl::Status NotMib(absl::string_view key, absl::string_view value, absl::string_view accepted) {
  absl::Status refusal = NotA(key, value, absl::StrCat("a whole number ", accepted, " (MiB)"));
  const size_t digits = std::min(value.find_first_not_of("0123456789"), value.size());
  const std::string unit = absl::AsciiStrToLower(absl::StripAsciiWhitespace(value.substr(digits)));
  const bool is_gib = unit == "g" || unit == "gb" || unit == "gib";
  uint64_t mib = 0;
  if ((!is_gib && unit != "m" && unit != "mb" && unit != "mib") || !ReadNumber(value.substr(0, digits), mib) ||
      mib > kMaxMib / 1024) {
    return refusal;
  }
  return absl::InvalidArgumentError(
      absl::StrCat(refusal.message(), "; leave the unit out: ", key, ":", is_gib ? 1024 * mib : mib));
}

// Parsers, a function for each kind of value. large_segment_size_mb, if given, is parsed first.

absl::Status ParseLargeSegment(absl::string_view key, absl::string_view value, AllocConf& conf) {
  constexpr uint64_t kLeastMib = kOwnSegmentMinBytes / 1_MiB + 1;
  uint64_t mib = 0;
  if (!ReadNumber(value, mib) || mib < kLeastMib || mib >= kMaxMib) {
    return NotMib(key, value, absl::StrCat("from ", kLeastMib, " to ", kMaxMib - 1));
  }
  const uint64_t bytes = RoundUpTo(mib * 1_MiB, kSegmentGranuleBytes);
  if (bytes != mib * 1_MiB) {
    conf.warnings.push_back(
        absl::StrCat(key, ":", mib, " is taken as ", bytes / 1_MiB, ": vrambroker's segments are multiples of 2 MiB."));
  }
  conf.options.large_segment_bytes = bytes;
  conf.options.max_non_split_rounding_bytes = bytes;
  return absl::OkStatus();
}

template <uint64_t AllocatorOptions::*field>
absl::Status ParseMib(absl::string_view key, absl::string_view value, AllocConf& conf) {
  const uint64_t min_mib = conf.options.large_segment_bytes / 1_MiB;
  uint64_t mib = 0;
  if (!ReadNumber(value, mib) || mib < min_mib || mib > kMaxMib) {
    return NotMib(key, value, absl::StrCat("from ", min_mib, " (large_segment_size_mb) to ", kMaxMib));
  }
  conf.options.*field = mib * 1_MiB;
  return absl::OkStatus();
}

absl::Status ParseThreshold(absl::string_view key, absl::string_view value, AllocConf& conf) {
  double& threshold = conf.options.garbage_collection_threshold;
  if (ReadNumber(value, threshold) && threshold > 0 && threshold < 1) return absl::OkStatus();
  return NotA(key, value, "a number above 0 and below 1");
}

absl::Status ParseFraction(absl::string_view key, absl::string_view value, AllocConf& conf) {
  double& fraction = conf.options.per_process_memory_fraction;
  if (ReadNumber(value, fraction) && fraction >= 0 && fraction <= 1) return absl::OkStatus();
  return NotA(key, value, "a number from 0 to 1");
}

absl::Status ParseDivisions(absl::string_view key, absl::string_view value, AllocConf& conf) {
  auto& divisions = conf.options.roundup_power2_divisions;
  if (value.empty() || value.front() != '[') {
    uint32_t all = 0;
    if (!ReadDivisions(value, all) || all == 0) {
      return NotA(key, value,
                  absl::StrCat("a power of two from 1 to ", kMaxDivisions, " nor a list like [256:1,512:2,>:8]"));
    }
    divisions.fill(all);
    return absl::OkStatus();
  }
  if (value.find(']') != value.size() - 1) {
    return NotA(key, value, "a closed list with nothing after it; accepted: lists like [256:1,512:2,>:8]");
  }
  size_t next = 0;  // lowest bucket still open to the list; 0: no key read yet
  constexpr size_t kListIsOver = kBuckets + 1;
  for (const absl::string_view pair : absl::StrSplit(value.substr(1, value.size() - 2), ',')) {
    const auto [size, number] = SplitPair(pair);
    const bool is_rest = size == ">" && next < kListIsOver;
    uint64_t mib = 0;
    const bool is_size = ReadNumber(size, mib) && std::has_single_bit(mib);
    const auto bucket = static_cast<size_t>(std::countr_zero(mib));
    if (!is_rest && (!is_size || bucket < next || bucket >= kBuckets)) {
      return NotA(absl::StrCat(key, ": in ", Quoted(value)), size,
                  absl::StrCat("the next key: keys are powers of two from 1 to ", 1 << (kBuckets - 1),
                               " (MiB), ascending, and '>' as the last one"));
    }
    uint32_t count = 0;
    if (!ReadDivisions(number, count)) {
      return NotA(absl::StrCat(key, ": in ", Quoted(value), ", after ", Quoted(size)), number,
                  absl::StrCat("0 or a power of two from 1 to ", kMaxDivisions));
    }
    if (is_rest) {
      std::fill(divisions.begin() + std::max(next, size_t{1}), divisions.end(), count);  // alone: all but the first
      next = kListIsOver;
      continue;
    }
    if (next == 0) std::fill_n(divisions.begin(), bucket, count);
    divisions[bucket] = count;
    next = bucket + 1;
  }
  return absl::OkStatus();
}

absl::Status CheckBool(absl::string_view key, absl::string_view value) {
  return value == "True" || value == "False" ? absl::OkStatus() : NotA(key, value, "True or False");
}

absl::Status ParseReject(absl::string_view key, absl::string_view value, AllocConf& conf) {
  conf.options.reject_without_retry = value == "True";
  return CheckBool(key, value);
}

absl::Status ParseExpandable(absl::string_view key, absl::string_view value, AllocConf& conf) {
  if (value == "True") {
    conf.warnings.emplace_back("expandable_segments:True has no effect yet: vrambroker's segments have a fixed size.");
  }
  return CheckBool(key, value);
}

// PyTorch skips unreadable values here. Only the form is checked, so that no other setting is swallowed.
bool IsReserve(absl::string_view text) {
  return !text.empty() && text.find_first_of(":[],") == absl::string_view::npos;
}

absl::Status ParseReserve(absl::string_view key, absl::string_view value, AllocConf& conf) {
  if (absl::StartsWith(value, "[")) {
    bool good = absl::EndsWith(value, "]");
    for (const absl::string_view pair : absl::StrSplit(value.substr(1, value.size() - 2), ',')) {
      const auto [name, reserve] = SplitPair(pair);
      good = good && IsReserve(name) && IsReserve(reserve);
    }
    if (!good) return NotA(key, value, "a closed list like [serving:0.25,training:8G]");
  } else if (!IsReserve(value)) {
    return NotA(key, value, "a size like 0.5 or 40G nor a list like [serving:0.25,training:8G]");
  }
  conf.warnings.push_back(absl::StrCat(key, " has no effect: vrambroker's segments have a fixed size."));
  return absl::OkStatus();
}

absl::Status ParseReleaseLock(absl::string_view key, absl::string_view value, AllocConf& conf) {
  conf.warnings.push_back(
      absl::StrCat(key, " has no effect: vrambroker never holds a heap's lock while it asks the device for memory."));
  return CheckBool(key, value);
}

absl::Status ParseGraphCapture(absl::string_view key, absl::string_view value, AllocConf& conf) {
  conf.warnings.push_back(absl::StrCat(key, " has no effect: vrambroker does not track graph capture."));
  return CheckBool(key, value);
}

// Warns of cudaMallocAsync without refusing: settings pasted from a training job should still get memory.
absl::Status ParseBackend(absl::string_view key, absl::string_view value, AllocConf& conf) {
  if (value == "native") return absl::OkStatus();
  if (value != "cudaMallocAsync") return NotA(key, value, "native or cudaMallocAsync");
  conf.warnings.emplace_back("backend:cudaMallocAsync has no effect: vrambroker always uses its own allocator.");
  return absl::OkStatus();
}

// Accepts any single word. A longer value might hide another setting: "pinned_x:[1,max_split_size_mb:64".
absl::Status ParsePinned(absl::string_view key, absl::string_view value, AllocConf& conf) {
  if (value.empty() || value.find_first_of(":[]") != absl::string_view::npos) return NotA(key, value, "a single word");
  conf.warnings.push_back(absl::StrCat(key, " has no effect: vrambroker does not manage host memory."));
  return absl::OkStatus();
}

struct Setting {
  absl::string_view key;
  absl::Status (*parse)(absl::string_view key, absl::string_view value, AllocConf& conf);
  bool is_ignored = false;
};

constexpr absl::string_view kLargeSegmentKey = "large_segment_size_mb";
constexpr Setting kSettings[] = {
    {"max_split_size_mb", ParseMib<&AllocatorOptions::max_split_bytes>},
    {"max_non_split_rounding_mb", ParseMib<&AllocatorOptions::max_non_split_rounding_bytes>},
    {kLargeSegmentKey, ParseLargeSegment},
    {"garbage_collection_threshold", ParseThreshold},
    {"roundup_power2_divisions", ParseDivisions},
    {"per_process_memory_fraction", ParseFraction},
    {"throw_on_cudamalloc_oom", ParseReject},
    {"expandable_segments", ParseExpandable, /*is_ignored=*/true},
    {"expandable_segments_reserve", ParseReserve, /*is_ignored=*/true},
    {"expandable_segments_reserve_by_class", ParseReserve, /*is_ignored=*/true},
    {"release_lock_on_cudamalloc", ParseReleaseLock, /*is_ignored=*/true},
    {"release_lock_on_hipmalloc", ParseReleaseLock, /*is_ignored=*/true},  // PyTorch takes both names in every build
    {"graph_capture_record_stream_reuse", ParseGraphCapture, /*is_ignored=*/true},
    {"backend", ParseBackend, /*is_ignored=*/true},
};
constexpr Setting kPinned = {"pinned_", ParsePinned, /*is_ignored=*/true};  // for every key with the prefix "pinned_"

const Setting* FindSetting(absl::string_view key) {
  for (const Setting& setting : kSettings) {
    if (setting.key == key) return &setting;
  }
  const auto in_word = [](char c) { return absl::ascii_isalnum(c) || c == '_'; };
  return absl::StartsWith(key, kPinned.key) && std::all_of(key.begin(), key.end(), in_word) ? &kPinned : nullptr;
}

absl::Status UnknownKey(absl::string_view key, absl::string_view value) {
  // "max_split_size_mb=128" is meant for max_split_size_mb.
  const absl::string_view word = key.substr(0, std::min({key.find('='), key.find(' '), key.size(), size_t{64}}));
  std::vector<std::string> known;
  for (const Setting& setting : kSettings) known.emplace_back(setting.key);
  const std::string meant = NearestWord(word, known);
  return absl::InvalidArgumentError(
      absl::StrCat(key.empty() ? "missing key" : absl::StrCat("unknown key ", Quoted(key)), " with the value ",
                   Quoted(value), meant.empty() ? "" : absl::StrCat("; did you mean ", meant, ":VALUE?"),
                   "; known keys: ", absl::StrJoin(known, ", "), ", ", kPinned.key, "*"));
}

// Splits at commas outside of lists.
std::vector<absl::string_view> SplitPairs(absl::string_view text) {
  std::vector<absl::string_view> pairs;
  bool in_list = false;
  size_t begin = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '[') in_list = true;
    if (text[i] == ']') in_list = false;
    if (text[i] != ',' || in_list) continue;
    pairs.push_back(text.substr(begin, i - begin));
    begin = i + 1;
  }
  const absl::string_view last = absl::StripAsciiWhitespace(text.substr(begin));
  if (!last.empty()) pairs.push_back(last);  // else the text is empty, or ends with a comma
  return pairs;
}

std::string FormatDouble(double number) {
  char text[32];
  return {text, std::to_chars(std::begin(text), std::end(text), number).ptr};
}

std::string FormatDivisions(const std::array<uint32_t, kBuckets>& divisions) {
  const auto differs_from = [](uint32_t count) { return [count](uint32_t other) { return other != count; }; };
  const auto head = std::find_if(divisions.begin(), divisions.end(), differs_from(divisions.front()));
  if (head == divisions.end()) return absl::StrCat(divisions.front());
  const auto tail = std::find_if(divisions.rbegin(), divisions.rend(), differs_from(divisions.back())).base();
  // The first key names the last bucket of the head, and stands for the whole head. '>' stands for the tail, after the
  // key before the tail. Unnamed buckets are 0.
  std::vector<std::string> pairs;
  for (auto bucket = head - 1; bucket != tail; ++bucket) {
    const bool before_tail = bucket + 1 == tail && divisions.back() != 0;
    if (pairs.empty() || *bucket != 0 || before_tail) {
      pairs.push_back(absl::StrCat(1 << (bucket - divisions.begin()), ":", *bucket));
    }
  }
  if (divisions.back() != 0) pairs.push_back(absl::StrCat(">:", divisions.back()));
  return absl::StrCat("[", absl::StrJoin(pairs, ","), "]");
}

}  // namespace

absl::StatusOr<AllocConf> ParseAllocConf(absl::string_view text) {
  struct Item {
    absl::string_view key;
    absl::string_view value;
    const Setting* setting;
    bool is_repeated = false;  // a later item has the same key
  };
  std::vector<Item> items;
  absl::flat_hash_map<absl::string_view, size_t> places;  // last place of each key
  for (const absl::string_view pair : SplitPairs(text)) {
    const auto [key, value] = SplitPair(pair);
    const Setting* const setting = FindSetting(key);
    if (setting == nullptr) return UnknownKey(key, value);
    const auto [place, is_new] = places.try_emplace(key, items.size());
    if (!is_new) items[std::exchange(place->second, items.size())].is_repeated = true;
    items.push_back({key, value, setting});
  }
  // large_segment_size_mb goes first: other settings are checked against it, or take a default from it.
  std::stable_partition(items.begin(), items.end(), [](const Item& item) { return item.key == kLargeSegmentKey; });

  AllocConf conf;
  for (const Item& item : items) {
    const size_t warnings = conf.warnings.size();
    if (absl::Status status = item.setting->parse(item.key, item.value, conf); !status.ok()) return status;
    if (!item.is_repeated) {
      if (item.setting->is_ignored)
        absl::StrAppend(&conf.ignored, conf.ignored.empty() ? "" : ",", item.key, ":", item.value);
      continue;
    }
    conf.warnings.resize(warnings);
    conf.warnings.push_back(
        absl::StrCat(item.key, ": ", Quoted(item.value), " is not the last value given for it; the last one applies."));
  }
  return conf;
}

std::string FormatAllocConf(const AllocatorOptions& options) {
  const AllocatorOptions defaults;
  std::vector<std::string> pairs;
  const auto add = [&pairs](bool needed, absl::string_view key, absl::string_view value) {
    if (needed) pairs.push_back(absl::StrCat(key, ":", value));
  };
  const auto mib = [](uint64_t bytes) { return absl::StrCat(bytes / 1_MiB); };
  add(options.max_split_bytes != defaults.max_split_bytes, "max_split_size_mb", mib(options.max_split_bytes));
  add(options.max_non_split_rounding_bytes != options.large_segment_bytes, "max_non_split_rounding_mb",
      mib(options.max_non_split_rounding_bytes));
  add(options.large_segment_bytes != defaults.large_segment_bytes, kLargeSegmentKey, mib(options.large_segment_bytes));
  add(options.garbage_collection_threshold != defaults.garbage_collection_threshold, "garbage_collection_threshold",
      FormatDouble(options.garbage_collection_threshold));
  add(options.roundup_power2_divisions != defaults.roundup_power2_divisions, "roundup_power2_divisions",
      FormatDivisions(options.roundup_power2_divisions));
  add(options.per_process_memory_fraction != defaults.per_process_memory_fraction, "per_process_memory_fraction",
      FormatDouble(options.per_process_memory_fraction));
  add(options.reject_without_retry, "throw_on_cudamalloc_oom", "True");
  return absl::StrJoin(pairs, ",");
}

}  // namespace vrambroker
