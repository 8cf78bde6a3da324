// SPDX-License-Identifier: Apache-2.0
#include "allocator/heap/allocator_options.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"

namespace vrambroker {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

using Divisions = std::array<uint32_t, 16>;

std::string MessageOf(const absl::StatusOr<AllocConf>& conf) {
  return std::string(conf.status().message());
}

// The options that a settings string gives: the defaults with `change`. `format` is the shortest text for the options.
struct Accepted {
  const char* text;
  const char* format;
  void (*change)(AllocatorOptions& options);
};

void ExpectAccepted(const std::vector<Accepted>& cases) {
  for (const Accepted& c : cases) {
    SCOPED_TRACE(c.text);
    AllocatorOptions expected;
    c.change(expected);
    const absl::StatusOr<AllocConf> conf = ParseAllocConf(c.text);
    ASSERT_TRUE(conf.ok()) << conf.status();
    const AllocatorOptions& options = conf->options;
    EXPECT_EQ(options.max_split_bytes, expected.max_split_bytes);
    EXPECT_EQ(options.max_non_split_rounding_bytes, expected.max_non_split_rounding_bytes);
    EXPECT_EQ(options.large_segment_bytes, expected.large_segment_bytes);
    EXPECT_EQ(options.roundup_power2_divisions, expected.roundup_power2_divisions);
    EXPECT_EQ(options.garbage_collection_threshold, expected.garbage_collection_threshold);
    EXPECT_EQ(options.per_process_memory_fraction, expected.per_process_memory_fraction);
    EXPECT_EQ(options.reject_without_retry, expected.reject_without_retry);
    EXPECT_TRUE(options == expected) << "a field that is not looked at above";
    EXPECT_THAT(conf->warnings, IsEmpty());
    EXPECT_EQ(FormatAllocConf(options), c.format);
  }
}

void Nothing(AllocatorOptions& /*options*/) {}
void SplitBelow128(AllocatorOptions& options) {
  options.max_split_bytes = 128_MiB;
}
void Segments64(AllocatorOptions& options) {
  options.large_segment_bytes = 64_MiB;
  options.max_non_split_rounding_bytes = 64_MiB;
}
void Divisions4(AllocatorOptions& options) {
  options.roundup_power2_divisions.fill(4);
}

TEST(AllocConfTest, AcceptsSizes) {
  ExpectAccepted(
      {{"", "", Nothing},
       {" \t\n", "", Nothing},
       {"max_split_size_mb:128", "max_split_size_mb:128", SplitBelow128},
       {" max_split_size_mb\t:\n128 ", "max_split_size_mb:128", SplitBelow128},
       {"max_split_size_mb:0128", "max_split_size_mb:128", SplitBelow128},
       {"max_split_size_mb:128,", "max_split_size_mb:128", SplitBelow128},
       {"max_split_size_mb:128 , ", "max_split_size_mb:128", SplitBelow128},
       {"max_split_size_mb:20", "max_split_size_mb:20",
        [](AllocatorOptions& options) { options.max_split_bytes = 20_MiB; }},
       {"max_split_size_mb:1099511627775", "max_split_size_mb:1099511627775",
        [](AllocatorOptions& options) { options.max_split_bytes = (uint64_t{1} << 60) - 1_MiB; }},
       {"max_non_split_rounding_mb:20", "", Nothing},
       {"max_non_split_rounding_mb:64", "max_non_split_rounding_mb:64",
        [](AllocatorOptions& options) { options.max_non_split_rounding_bytes = 64_MiB; }},
       {"large_segment_size_mb:20", "", Nothing},
       {"large_segment_size_mb:64", "large_segment_size_mb:64", Segments64},
       {"large_segment_size_mb:12,max_split_size_mb:12", "max_split_size_mb:12,large_segment_size_mb:12",
        [](AllocatorOptions& options) {
          options.max_split_bytes = 12_MiB;
          options.large_segment_bytes = 12_MiB;
          options.max_non_split_rounding_bytes = 12_MiB;
        }},
       // The parser reads large_segment_size_mb first, at any place in the text.
       {"max_non_split_rounding_mb:15,large_segment_size_mb:12",
        "max_non_split_rounding_mb:15,large_segment_size_mb:12",
        [](AllocatorOptions& options) {
          options.max_non_split_rounding_bytes = 15_MiB;
          options.large_segment_bytes = 12_MiB;
        }},
       {"max_non_split_rounding_mb:64,large_segment_size_mb:64", "large_segment_size_mb:64", Segments64},
       {"large_segment_size_mb:1099511627774", "large_segment_size_mb:1099511627774", [](AllocatorOptions& options) {
          options.large_segment_bytes = (uint64_t{1} << 60) - 2_MiB;
          options.max_non_split_rounding_bytes = options.large_segment_bytes;
        }}});
}

TEST(AllocConfTest, AcceptsSharesAndSwitches) {
  ExpectAccepted(
      {{"garbage_collection_threshold:0.80", "garbage_collection_threshold:0.8",
        [](AllocatorOptions& options) { options.garbage_collection_threshold = 0.8; }},
       {"garbage_collection_threshold:.5", "garbage_collection_threshold:0.5",
        [](AllocatorOptions& options) { options.garbage_collection_threshold = 0.5; }},
       {"garbage_collection_threshold:1e-5", "garbage_collection_threshold:1e-05",
        [](AllocatorOptions& options) { options.garbage_collection_threshold = 1e-5; }},
       {"garbage_collection_threshold:0.30000000000000004", "garbage_collection_threshold:0.30000000000000004",
        [](AllocatorOptions& options) { options.garbage_collection_threshold = 0.1 + 0.2; }},
       {"per_process_memory_fraction:0", "per_process_memory_fraction:0",
        [](AllocatorOptions& options) { options.per_process_memory_fraction = 0; }},
       {"per_process_memory_fraction:0.25", "per_process_memory_fraction:0.25",
        [](AllocatorOptions& options) { options.per_process_memory_fraction = 0.25; }},
       {"per_process_memory_fraction:1", "", Nothing},
       {"per_process_memory_fraction:1.0", "", Nothing},
       {"throw_on_cudamalloc_oom:True", "throw_on_cudamalloc_oom:True",
        [](AllocatorOptions& options) { options.reject_without_retry = true; }},
       {"throw_on_cudamalloc_oom:False", "", Nothing},
       {"expandable_segments:False", "", Nothing},
       {"backend:native", "", Nothing},
       {"throw_on_cudamalloc_oom:True,per_process_memory_fraction:0.5,roundup_power2_divisions:4,"
        "garbage_collection_threshold:0.6,max_non_split_rounding_mb:70,max_split_size_mb:128,"
        "large_segment_size_mb:64",
        "max_split_size_mb:128,max_non_split_rounding_mb:70,large_segment_size_mb:64,"
        "garbage_collection_threshold:0.6,roundup_power2_divisions:4,per_process_memory_fraction:0.5,"
        "throw_on_cudamalloc_oom:True",
        [](AllocatorOptions& options) {
          options.max_split_bytes = 128_MiB;
          options.max_non_split_rounding_bytes = 70_MiB;
          options.large_segment_bytes = 64_MiB;
          options.roundup_power2_divisions.fill(4);
          options.garbage_collection_threshold = 0.6;
          options.per_process_memory_fraction = 0.5;
          options.reject_without_retry = true;
        }}});
}

TEST(AllocConfTest, AcceptsRoundupDivisions) {
  ExpectAccepted(
      {{"roundup_power2_divisions:4", "roundup_power2_divisions:4", Divisions4},
       {"roundup_power2_divisions:1", "roundup_power2_divisions:1",
        [](AllocatorOptions& options) { options.roundup_power2_divisions.fill(1); }},
       {"roundup_power2_divisions:2147483648", "roundup_power2_divisions:2147483648",
        [](AllocatorOptions& options) { options.roundup_power2_divisions.fill(uint32_t{1} << 31); }},
       // The first key also sets the buckets below the key. '>' sets the buckets above the last key.
       {"roundup_power2_divisions:[256:1,512:2,1024:4,>:8]", "roundup_power2_divisions:[256:1,512:2,1024:4,>:8]",
        [](AllocatorOptions& options) {
          options.roundup_power2_divisions = Divisions{1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 4, 8, 8, 8, 8, 8};
        }},
       {" roundup_power2_divisions : [ 256 : 1 , 512:2,1024 :4, > : 8 ] , max_split_size_mb:128 ",
        "max_split_size_mb:128,roundup_power2_divisions:[256:1,512:2,1024:4,>:8]",
        [](AllocatorOptions& options) {
          options.max_split_bytes = 128_MiB;
          options.roundup_power2_divisions = Divisions{1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 4, 8, 8, 8, 8, 8};
        }},
       // Unnamed buckets stay 0.
       {"roundup_power2_divisions:[2:4,64:8]", "roundup_power2_divisions:[2:4,64:8]",
        [](AllocatorOptions& options) { options.roundup_power2_divisions = Divisions{4, 4, 0, 0, 0, 0, 8}; }},
       {"roundup_power2_divisions:[1:0,64:8]", "roundup_power2_divisions:[32:0,64:8]",
        [](AllocatorOptions& options) { options.roundup_power2_divisions[6] = 8; }},
       {"roundup_power2_divisions:[1:2,32768:4]", "roundup_power2_divisions:[1:2,16384:0,>:4]",
        [](AllocatorOptions& options) {
          options.roundup_power2_divisions[0] = 2;
          options.roundup_power2_divisions[15] = 4;
        }},
       {"roundup_power2_divisions:[1:4,>:4]", "roundup_power2_divisions:4", Divisions4},
       {"roundup_power2_divisions:[32768:4,>:2]", "roundup_power2_divisions:4", Divisions4},
       {"roundup_power2_divisions:[64:0,>:0]", "", Nothing},
       // Without an earlier key, '>' sets the buckets above the first.
       {"roundup_power2_divisions:[>:2]", "roundup_power2_divisions:[1:0,>:2]",
        [](AllocatorOptions& options) {
          options.roundup_power2_divisions.fill(2);
          options.roundup_power2_divisions[0] = 0;
        }},
       {"roundup_power2_divisions:[16384:0,>:4]", "roundup_power2_divisions:[16384:0,>:4]",
        [](AllocatorOptions& options) { options.roundup_power2_divisions[15] = 4; }}});
}

// `parts`: required parts of the error message.
struct Refused {
  const char* text;
  std::vector<const char*> parts;
};

void ExpectRefused(const std::vector<Refused>& cases) {
  for (const Refused& c : cases) {
    SCOPED_TRACE(c.text);
    const absl::StatusOr<AllocConf> conf = ParseAllocConf(c.text);
    ASSERT_TRUE(absl::IsInvalidArgument(conf.status())) << conf.status();
    for (const char* part : c.parts) EXPECT_THAT(MessageOf(conf), HasSubstr(part));
  }
}

constexpr char kSplitRange[] = "is not a whole number from 20 (large_segment_size_mb) to 1099511627775 (MiB)";

TEST(AllocConfTest, RefusesSizes) {
  ExpectRefused({{"max_split_size_mb:128x", {"max_split_size_mb: \"128x\"", kSplitRange}},
                 {"max_split_size_mb:-1", {"max_split_size_mb: \"-1\"", kSplitRange}},
                 {"max_split_size_mb:+128", {"max_split_size_mb: \"+128\"", kSplitRange}},
                 {"max_split_size_mb:128.0", {"max_split_size_mb: \"128.0\"", kSplitRange}},
                 {"max_split_size_mb:1e3", {"max_split_size_mb: \"1e3\"", kSplitRange}},
                 {"max_split_size_mb:0x80", {"max_split_size_mb: \"0x80\"", kSplitRange}},
                 {"max_split_size_mb:1 28", {"max_split_size_mb: \"1 28\"", kSplitRange}},
                 {"max_split_size_mb:19", {"max_split_size_mb: \"19\"", kSplitRange}},
                 {"max_split_size_mb:1099511627776", {"max_split_size_mb: \"1099511627776\"", kSplitRange}},
                 {"max_split_size_mb:18446744073709551744", {"max_split_size_mb: \"184467440737", kSplitRange}},
                 {"max_split_size_mb:[128]", {"max_split_size_mb: \"[128]\"", kSplitRange}},
                 {"max_split_size_mb:128]", {"max_split_size_mb: \"128]\"", kSplitRange}},
                 {"max_split_size_mb:", {"max_split_size_mb: \"\"", kSplitRange}},
                 {"max_split_size_mb", {"max_split_size_mb: \"\"", kSplitRange}},
                 {"max_split_size_mb::128", {"max_split_size_mb: \":128\"", kSplitRange}},
                 {"max_split_size_mb:128:256", {"max_split_size_mb: \"128:256\"", kSplitRange}},
                 {"max_split_size_mb:63,large_segment_size_mb:64",
                  {"max_split_size_mb: \"63\" is not a whole number from 64 (large_segment_size_mb)"}},
                 {"max_non_split_rounding_mb:19", {"max_non_split_rounding_mb: \"19\"", kSplitRange}},
                 {"large_segment_size_mb:64,max_non_split_rounding_mb:20",
                  {"max_non_split_rounding_mb: \"20\"", "from 64 (large_segment_size_mb)"}},
                 {"large_segment_size_mb:10",
                  {"large_segment_size_mb: \"10\" is not a whole number from 11 to 1099511627774 (MiB)"}},
                 {"large_segment_size_mb:1099511627775", {"large_segment_size_mb: \"1099511627775\"", "from 11 to"}},
                 {"large_segment_size_mb:1099511627776", {"large_segment_size_mb: \"1099511627776\"", "from 11 to"}},
                 {"large_segment_size_mb:21,max_split_size_mb:21",
                  {"max_split_size_mb: \"21\" is not a whole number from 22 (large_segment_size_mb)"}}});
}

// PyTorch reads only the digits: "512mb" as 512, and "8gb" as 8.
TEST(AllocConfTest, RefusesUnitsAndSaysWhatToWrite) {
  ExpectRefused({{"max_split_size_mb:512mb", {"\"512mb\"", kSplitRange, "; leave the unit out: max_split_size_mb:512"}},
                 {"max_split_size_mb:512 MiB", {"; leave the unit out: max_split_size_mb:512"}},
                 {"max_split_size_mb:8gb", {"; leave the unit out: max_split_size_mb:8192"}},
                 {"max_non_split_rounding_mb:64M", {"; leave the unit out: max_non_split_rounding_mb:64"}},
                 {"large_segment_size_mb:20MiB", {"(MiB); leave the unit out: large_segment_size_mb:20"}}});
  for (const char* text : {"max_split_size_mb:512kb", "max_split_size_mb:mb", "max_split_size_mb:-512mb",
                           "max_split_size_mb:128x", "max_split_size_mb:18446744073709551615g"}) {
    EXPECT_THAT(MessageOf(ParseAllocConf(text)), Not(HasSubstr("unit"))) << text;
  }
}

TEST(AllocConfTest, RefusesShares) {
  ExpectRefused(
      {{"garbage_collection_threshold:0", {"garbage_collection_threshold: \"0\" is not a number above 0 and below 1"}},
       {"garbage_collection_threshold:1", {"\"1\" is not a number above 0"}},
       {"garbage_collection_threshold:-0.5", {"\"-0.5\" is not a number above 0"}},
       {"garbage_collection_threshold:+0.5", {"\"+0.5\" is not a number above 0"}},
       {"garbage_collection_threshold:0.5x", {"\"0.5x\" is not a number above 0"}},
       {"garbage_collection_threshold:0,5", {"unknown key \"5\""}},
       {"garbage_collection_threshold:0. 5", {"\"0. 5\" is not a number above 0"}},
       {"garbage_collection_threshold:nan", {"\"nan\" is not a number above 0"}},
       {"garbage_collection_threshold:1e-9999", {"\"1e-9999\" is not a number above 0"}},
       {"garbage_collection_threshold:.", {"\".\" is not a number above 0"}},
       {"per_process_memory_fraction:1.01", {"per_process_memory_fraction: \"1.01\" is not a number from 0 to 1"}},
       {"per_process_memory_fraction:1e9999", {"\"1e9999\" is not a number from 0"}},
       {"per_process_memory_fraction:inf", {"\"inf\" is not a number from 0"}},
       {"per_process_memory_fraction:nan", {"\"nan\" is not a number from 0"}},
       {"per_process_memory_fraction:-0", {"\"-0\" is not a number from 0"}},
       {"per_process_memory_fraction:0x1p-1", {"\"0x1p-1\" is not a number from 0"}},
       {"per_process_memory_fraction:", {"\"\" is not a number from 0"}}});
}

TEST(AllocConfTest, RefusesRoundupDivisions) {
  ExpectRefused(
      {{"roundup_power2_divisions:0",
        {"roundup_power2_divisions: \"0\" is not a power of two from 1 to 2147483648", "nor a list"}},
       {"roundup_power2_divisions:3", {"\"3\" is not a power of two"}},
       {"roundup_power2_divisions:-4", {"\"-4\" is not a power of two"}},
       {"roundup_power2_divisions:4x", {"\"4x\" is not a power of two"}},
       {"roundup_power2_divisions:4294967296", {"\"4294967296\" is not a power of two"}},
       {"roundup_power2_divisions:", {"\"\" is not a power of two"}},
       {"roundup_power2_divisions:256:1", {"\"256:1\" is not a power of two"}},
       {"roundup_power2_divisions:[256:1", {"\"[256:1\" is not a closed list", "[256:1,512:2,>:8]"}},
       {"roundup_power2_divisions:[", {"\"[\" is not a closed list"}},
       {"roundup_power2_divisions:[256:1,max_split_size_mb:128", {"is not a closed list"}},
       {"roundup_power2_divisions:[256:1]x", {"\"[256:1]x\" is not a closed list with nothing after it"}},
       {"roundup_power2_divisions:[256:1]]", {"\"[256:1]]\" is not a closed list"}},
       {"roundup_power2_divisions:[256:1] max_split_size_mb:128", {"is not a closed list"}},
       {"roundup_power2_divisions:x[256:1]", {"\"x[256:1]\" is not a power of two"}},
       {"roundup_power2_divisions:[]", {"in \"[]\": \"\" is not the next key"}},
       {"roundup_power2_divisions:[256]", {"after \"256\": \"\" is not 0 or a power of two from 1 to 21474"}},
       {"roundup_power2_divisions:[256:3]", {"in \"[256:3]\", after \"256\": \"3\" is not 0 or"}},
       {"roundup_power2_divisions:[256:1,>:6]", {"after \">\": \"6\" is not 0 or"}},
       {"roundup_power2_divisions:[256:1:2]", {"after \"256\": \"1:2\" is not 0 or"}},
       {"roundup_power2_divisions:[256:4294967296]", {"\"4294967296\" is not 0 or"}},
       {"roundup_power2_divisions:[256:1,]", {"\"\" is not the next key"}},
       {"roundup_power2_divisions:[256:1,,512:2]", {"\"\" is not the next key"}},
       {"roundup_power2_divisions:[:1]", {"\"\" is not the next key", "powers of two from 1 to 32768 (MiB)"}},
       {"roundup_power2_divisions:[300:1]", {"in \"[300:1]\": \"300\" is not the next key"}},
       {"roundup_power2_divisions:[0:1]", {"\"0\" is not the next key"}},
       {"roundup_power2_divisions:[-1:1]", {"\"-1\" is not the next key"}},
       {"roundup_power2_divisions:[65536:1]", {"\"65536\" is not the next key"}},
       {"roundup_power2_divisions:[512:1,256:2]", {"\"256\" is not the next key", "ascending, and '>' as the"}},
       {"roundup_power2_divisions:[256:1,256:2]", {"\"256\" is not the next key"}},
       {"roundup_power2_divisions:[>:8,256:1]", {"\"256\" is not the next key"}},
       {"roundup_power2_divisions:[>:8,>:8]", {"\">\" is not the next key"}},
       {"roundup_power2_divisions:[256:1,>:8,512:2]", {"\"512\" is not the next key"}},
       {"roundup_power2_divisions:[256:1,>:8,>:4]", {"\">\" is not the next key"}},
       {"roundup_power2_divisions:[[256:1]", {"\"[256\" is not the next key"}}});
}

TEST(AllocConfTest, RefusesKeysAndWords) {
  ExpectRefused({{"throw_on_cudamalloc_oom:true", {"throw_on_cudamalloc_oom: \"true\" is not True or False"}},
                 {"expandable_segments:1", {"expandable_segments: \"1\" is not True or False"}},
                 {"expandable_segments_reserve:", {"reserve: \"\" is not a size like 0.5 or 40G nor a list"}},
                 {"expandable_segments_reserve:0.5:1", {"reserve: \"0.5:1\" is not a size"}},
                 {"expandable_segments_reserve_by_class:[", {"by_class: \"[\" is not a closed list like [serving:0"}},
                 {"expandable_segments_reserve_by_class:[]", {"by_class: \"[]\" is not a closed list"}},
                 {"expandable_segments_reserve_by_class:[a:1,]", {"by_class: \"[a:1,]\" is not a closed list"}},
                 {"expandable_segments_reserve_by_class:[a:1]]", {"by_class: \"[a:1]]\" is not a closed list"}},
                 {"expandable_segments_reserve_by_class:[a]", {"by_class: \"[a]\" is not a closed list"}},
                 {"expandable_segments_reserve_by_class:[a:1,max_split_size_mb:128", {"is not a closed list"}},
                 {"release_lock_on_cudamalloc:", {"release_lock_on_cudamalloc: \"\" is not True or False"}},
                 {"graph_capture_record_stream_reuse:no", {"reuse: \"no\" is not True or False"}},
                 {"backend:cudaMalloc", {"backend: \"cudaMalloc\" is not native or cudaMallocAsync"}},
                 {"pinned_x:", {"pinned_x: \"\" is not a single word"}},
                 {"pinned_x:[1,max_split_size_mb:128", {"pinned_x: \"[1,max_split_size_mb:128\" is not a single word"}},
                 {"pinned_\nx:1", {"unknown key \"pinned_\\nx\""}},
                 {"no_such_key:3",
                  {"unknown key \"no_such_key\" with the value \"3\"; known keys: max_split_size_mb, ", "backend",
                   "roundup_power2_divisions", "pinned_*"}},
                 {"max_split_size:128", {"unknown key \"max_split_size\"", "did you mean max_split_size_mb:VALUE?"}},
                 {"backend=cudaMallocAsync", {"did you mean backend:VALUE?"}},
                 {"backend cudaMallocAsync", {"did you mean backend:VALUE?"}},
                 {"max_non_split_size_mb:128", {"did you mean max_split_size_mb:VALUE?"}},
                 {"Backend:native", {"did you mean backend:VALUE?"}},
                 {"max_split_size_mb:128;backend:native", {"max_split_size_mb: \"128;backend:native\""}},
                 {"backend:native max_split_size_mb:128", {"backend: \"native max_split_size_mb:128\""}},
                 {",", {"missing key with the value \"\"; known keys: "}},
                 {",backend:native", {"missing key with the value \"\""}},
                 {"backend:native,,", {"missing key with the value \"\""}},
                 {"backend:native,,max_split_size_mb:128", {"missing key with the value \"\""}},
                 {":128", {"missing key with the value \"128\""}},
                 // The parser checks each value, also a value that a later value replaces.
                 {"max_split_size_mb:19,max_split_size_mb:256", {"max_split_size_mb: \"19\"", kSplitRange}}});
}

TEST(AllocConfTest, NoGuessIsMadeForAKeyLikeNone) {
  const absl::StatusOr<AllocConf> conf = ParseAllocConf("no_such_key:3");
  ASSERT_FALSE(conf.ok());
  EXPECT_THAT(MessageOf(conf), Not(HasSubstr("did you mean")));
}

TEST(AllocConfTest, ErrorsAreShortAndOneLine) {
  const absl::StatusOr<AllocConf> conf =
      ParseAllocConf(std::string("max_split_size_mb:\n\x01") + std::string(5000, 'x'));
  ASSERT_FALSE(conf.ok());
  EXPECT_THAT(MessageOf(conf), AllOf(HasSubstr("\"\\x01xxx"), HasSubstr("xxx...\""), Not(HasSubstr("\n"))));
  EXPECT_LT(MessageOf(conf).size(), 300u);
}

struct Warned {
  const char* text;
  const char* part;
};

TEST(AllocConfTest, SettingsWithoutEffectWarn) {
  const std::vector<Warned> cases = {{"expandable_segments:True", "expandable_segments:True"},
                                     {"release_lock_on_cudamalloc:True", "release_lock_on_cudamalloc"},
                                     {"release_lock_on_cudamalloc:False", "release_lock_on_cudamalloc"},
                                     {"release_lock_on_hipmalloc:True", "release_lock_on_hipmalloc"},
                                     {"graph_capture_record_stream_reuse:True", "graph_capture_record_stream_reuse"},
                                     {"backend:cudaMallocAsync", "backend:cudaMallocAsync"},
                                     {"expandable_segments_reserve:0.5", "expandable_segments_reserve "},
                                     {"expandable_segments_reserve:40G", "expandable_segments_reserve "},
                                     {"expandable_segments_reserve:[serving:0.25]", "expandable_segments_reserve "},
                                     {"expandable_segments_reserve_by_class:[serving:0.25, ads_sparse : 8G ]",
                                      "expandable_segments_reserve_by_class "},
                                     {"pinned_use_cuda_host_register:True", "pinned_use_cuda_host_register"},
                                     {"pinned_num_register_threads:8", "pinned_num_register_threads"}};
  for (const Warned& c : cases) {
    SCOPED_TRACE(c.text);
    const absl::StatusOr<AllocConf> conf = ParseAllocConf(c.text);
    ASSERT_TRUE(conf.ok()) << conf.status();
    EXPECT_TRUE(conf->options == AllocatorOptions());
    EXPECT_THAT(conf->warnings, ElementsAre(AllOf(HasSubstr(c.part), HasSubstr("no effect"))));
  }
}

TEST(AllocConfTest, OneWarningForEachSettingAndTheOthersApply) {
  const absl::StatusOr<AllocConf> conf =
      ParseAllocConf("expandable_segments:True,max_split_size_mb:128,pinned_a:1,pinned_b:2");
  ASSERT_TRUE(conf.ok()) << conf.status();
  EXPECT_EQ(conf->options.max_split_bytes, 128_MiB);
  EXPECT_THAT(conf->warnings, ElementsAre(HasSubstr("expandable"), HasSubstr("pinned_a"), HasSubstr("pinned_b")));
  EXPECT_EQ(conf->ignored, "expandable_segments:True,pinned_a:1,pinned_b:2");
}

// PyTorch, too, applies the last value. The warning is about the value that does not apply.
TEST(AllocConfTest, TheLastValueOfAKeyApplies) {
  const auto parsed = [](const char* text) {
    const absl::StatusOr<AllocConf> conf = ParseAllocConf(text);
    EXPECT_TRUE(conf.ok()) << conf.status();
    return conf.value_or(AllocConf());
  };
  const AllocConf split = parsed("max_split_size_mb:256,backend:native,max_split_size_mb:512,max_split_size_mb:128");
  EXPECT_EQ(split.options.max_split_bytes, 128_MiB);
  EXPECT_THAT(split.warnings,
              ElementsAre("max_split_size_mb: \"256\" is not the last value given for it; the last one applies.",
                          "max_split_size_mb: \"512\" is not the last value given for it; the last one applies."));
  const AllocConf segments = parsed("large_segment_size_mb:64,max_split_size_mb:32,large_segment_size_mb:32");
  EXPECT_EQ(segments.options.large_segment_bytes, 32_MiB);
  EXPECT_EQ(segments.options.max_non_split_rounding_bytes, 32_MiB);
  // A second list changes the buckets of its keys, and the buckets below its first key.
  EXPECT_EQ(
      parsed("roundup_power2_divisions:[8:2,>:4],roundup_power2_divisions:[2:8]").options.roundup_power2_divisions,
      (Divisions{8, 8, 2, 2, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4}));
  EXPECT_THAT(parsed("expandable_segments:True,expandable_segments:False").warnings,
              ElementsAre(HasSubstr("\"True\" is not the last value")));
  EXPECT_THAT(parsed("pinned_x:1,pinned_x:2").warnings,
              ElementsAre(HasSubstr("\"1\" is not the last value"), HasSubstr("pinned_x has no effect")));
  EXPECT_EQ(parsed("pinned_x:1,max_split_size_mb:64,pinned_x:2").ignored, "pinned_x:2");
}

TEST(AllocConfTest, AnOddLargeSegmentIsRoundedUp) {
  const absl::StatusOr<AllocConf> conf = ParseAllocConf("large_segment_size_mb:11,max_split_size_mb:12");
  ASSERT_TRUE(conf.ok()) << conf.status();
  EXPECT_EQ(conf->options.large_segment_bytes, 12_MiB);
  EXPECT_EQ(conf->options.max_non_split_rounding_bytes, 12_MiB);
  EXPECT_THAT(conf->warnings,
              ElementsAre("large_segment_size_mb:11 is taken as 12: vrambroker's segments are multiples "
                          "of 2 MiB."));
}

// Leaves every field at its default now and then. Equal divisions form runs, as in a list.
AllocatorOptions RandomOptions(std::mt19937_64& random) {
  const auto below = [&random](uint64_t n) { return std::uniform_int_distribution<uint64_t>(0, n - 1)(random); };
  AllocatorOptions options;
  if (below(2) == 0) options.large_segment_bytes = (12 + 2 * below(100)) * 1_MiB;
  options.max_non_split_rounding_bytes = options.large_segment_bytes + below(3) * 1_MiB;
  if (below(2) == 0) options.max_split_bytes = options.large_segment_bytes + below(uint64_t{1} << 39) * 1_MiB;
  if (below(2) == 0) {
    uint32_t count = 0;
    for (uint32_t& division : options.roundup_power2_divisions) {
      if (below(3) == 0) count = below(3) == 0 ? 0 : uint32_t{1} << below(32);
      division = count;
    }
  }
  const auto share = [&] {
    return std::ldexp(static_cast<double>(1 + below((uint64_t{1} << 53) - 1)), -53 - static_cast<int>(below(40)));
  };
  if (below(2) == 0) options.garbage_collection_threshold = share();
  if (below(2) == 0) options.per_process_memory_fraction = below(5) == 0 ? 0 : share();
  options.reject_without_retry = below(2) == 0;
  return options;
}

TEST(AllocConfTest, WhatIsFormattedParsesToTheSame) {
  std::mt19937_64 random(20240611);
  std::set<std::string> texts;
  for (int i = 0; i < 500; ++i) {
    const AllocatorOptions options = RandomOptions(random);
    const std::string text = FormatAllocConf(options);
    SCOPED_TRACE(text);
    texts.insert(text);
    const absl::StatusOr<AllocConf> conf = ParseAllocConf(text);
    ASSERT_TRUE(conf.ok()) << conf.status();
    EXPECT_TRUE(conf->options == options);
    EXPECT_THAT(conf->warnings, IsEmpty());
    EXPECT_EQ(FormatAllocConf(conf->options), text);
  }
  EXPECT_GT(texts.size(), 450u) << "the options are hardly random";
}

}  // namespace
}  // namespace vrambroker
