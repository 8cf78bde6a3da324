// SPDX-License-Identifier: Apache-2.0
#include "allocator/replay/pickle.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/support/hex.h"
#include "tests/support/status_macros.h"

namespace vrambroker {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

using PickleKind = PickleValue::Kind;
using Items = PickleValue::Items;
using Pairs = PickleValue::Pairs;

constexpr int64_t kMin = std::numeric_limits<int64_t>::min();
constexpr int64_t kMaxInteger = std::numeric_limits<int64_t>::max();
constexpr uint64_t kUnsignedMax = std::numeric_limits<uint64_t>::max();

PickleValue Text(absl::string_view text) {
  return PickleValue::String(text);
}

// Bytes of a literal, with NUL bytes inside, and without the NUL byte at the end.
template <size_t kSize>
std::string Bytes(const char (&literal)[kSize]) {
  return std::string(literal, kSize - 1);
}

// Python's pickle.dumps(value, protocol).hex() of the value
//
//   shared = [1, {"filename": "train.py", "line": 7}]
//   {"none": None, "bools": [True, False],
//    "ints": [0, 255, 256, 65535, 65536, -1, 2**31-1, -2**31, 2**31, -2**31-1, 2**53+1, 2**63-1, -2**63, 2**63,
//    2**64-1], "floats": [0.0, -0.5, 1e300, float("inf")], "text": ["", "caf\u00e9", "text"], "tuples": [(), (1,), (1,
//    2), (1, 2, 3), (1, 2, 3, 4)], "shared": [shared, shared], "dict": {}, "list": [], 5: "five", (0, 0): "pair"}
struct PickleSample {
  int protocol;
  const char* hex;
};
const std::vector<PickleSample>& Samples() {
  static const auto& samples = *new std::vector<PickleSample>{
      {2,
       "80027d71002858040000006e6f6e6571014e5805000000626f6f6c7371025d7103288889655804000000696e747371045d7105284b00"
       "4bff4d00014dffff4a000001004affffffff4affffff7f4a000000808a0500000080008a05ffffff7fff8a07010000000000208a08ff"
       "ffffffffffff7f8a0800000000000000808a090000000000000080008a09ffffffffffffffff00655806000000666c6f61747371065d"
       "71072847000000000000000047bfe0000000000000477e37e43c8800759c477ff00000000000006558040000007465787471085d7109"
       "285800000000710a5805000000636166c3a9710b68086558060000007475706c6573710c5d710d28294b0185710e4b014b0286710f4b"
       "014b024b03877110284b014b024b034b0474711165580600000073686172656471125d7113285d7114284b017d711528580800000066"
       "696c656e616d6571165808000000747261696e2e7079711758040000006c696e6571184b07756568146558040000006469637471197d"
       "711a58040000006c697374711b5d711c4b05580400000066697665711d4b004b0086711e580400000070616972711f752e"},
      {3,
       "80037d71002858040000006e6f6e6571014e5805000000626f6f6c7371025d7103288889655804000000696e747371045d7105284b00"
       "4bff4d00014dffff4a000001004affffffff4affffff7f4a000000808a0500000080008a05ffffff7fff8a07010000000000208a08ff"
       "ffffffffffff7f8a0800000000000000808a090000000000000080008a09ffffffffffffffff00655806000000666c6f61747371065d"
       "71072847000000000000000047bfe0000000000000477e37e43c8800759c477ff00000000000006558040000007465787471085d7109"
       "285800000000710a5805000000636166c3a9710b68086558060000007475706c6573710c5d710d28294b0185710e4b014b0286710f4b"
       "014b024b03877110284b014b024b034b0474711165580600000073686172656471125d7113285d7114284b017d711528580800000066"
       "696c656e616d6571165808000000747261696e2e7079711758040000006c696e6571184b07756568146558040000006469637471197d"
       "711a58040000006c697374711b5d711c4b05580400000066697665711d4b004b0086711e580400000070616972711f752e"},
      {4,
       "80049559010000000000007d94288c046e6f6e65944e8c05626f6f6c73945d94288889658c04696e7473945d94284b004bff4d00014d"
       "ffff4a000001004affffffff4affffff7f4a000000808a0500000080008a05ffffff7fff8a07010000000000208a08ffffffffffffff"
       "7f8a0800000000000000808a090000000000000080008a09ffffffffffffffff00658c06666c6f617473945d94284700000000000000"
       "0047bfe0000000000000477e37e43c8800759c477ff0000000000000658c0474657874945d94288c00948c05636166c3a9946808658c"
       "067475706c6573945d9428294b0185944b014b0286944b014b024b038794284b014b024b034b047494658c06736861726564945d9428"
       "5d94284b017d94288c0866696c656e616d65948c08747261696e2e7079948c046c696e65944b0775656814658c0464696374947d948c"
       "046c697374945d944b058c0466697665944b004b0086948c047061697294752e"},
      {5,
       "80059559010000000000007d94288c046e6f6e65944e8c05626f6f6c73945d94288889658c04696e7473945d94284b004bff4d00014d"
       "ffff4a000001004affffffff4affffff7f4a000000808a0500000080008a05ffffff7fff8a07010000000000208a08ffffffffffffff"
       "7f8a0800000000000000808a090000000000000080008a09ffffffffffffffff00658c06666c6f617473945d94284700000000000000"
       "0047bfe0000000000000477e37e43c8800759c477ff0000000000000658c0474657874945d94288c00948c05636166c3a9946808658c"
       "067475706c6573945d9428294b0185944b014b0286944b014b024b038794284b014b024b034b047494658c06736861726564945d9428"
       "5d94284b017d94288c0866696c656e616d65948c08747261696e2e7079948c046c696e65944b0775656814658c0464696374947d948c"
       "046c697374945d944b058c0466697665944b004b0086948c047061697294752e"},
  };
  return samples;
}

PickleValue SampleValue() {
  const auto ints = [](const std::vector<int64_t>& numbers) {
    Items items;
    for (const int64_t number : numbers) items.push_back(PickleValue::Int(number));
    return items;
  };
  Items integers = ints({0, 255, 256, 65535, 65536, -1, 2147483647, -2147483648LL, 2147483648LL, -2147483649LL,
                         9007199254740993LL, kMaxInteger, kMin});
  integers.push_back(PickleValue::Uint(uint64_t{1} << 63));
  integers.push_back(PickleValue::Uint(kUnsignedMax));
  const PickleValue shared = PickleValue::List(
      {PickleValue::Int(1),
       PickleValue::Dict({{Text("filename"), Text("train.py")}, {Text("line"), PickleValue::Int(7)}})});
  return PickleValue::Dict({
      {Text("none"), PickleValue()},
      {Text("bools"), PickleValue::List({PickleValue::Bool(true), PickleValue::Bool(false)})},
      {Text("ints"), PickleValue::List(std::move(integers))},
      {Text("floats"), PickleValue::List({PickleValue::Double(0), PickleValue::Double(-0.5), PickleValue::Double(1e300),
                                          PickleValue::Double(std::numeric_limits<double>::infinity())})},
      {Text("text"), PickleValue::List({Text(""), Text("caf\xc3\xa9"), Text("text")})},
      {Text("tuples"),
       PickleValue::List({PickleValue::Tuple({}), PickleValue::Tuple(ints({1})), PickleValue::Tuple(ints({1, 2})),
                          PickleValue::Tuple(ints({1, 2, 3})), PickleValue::Tuple(ints({1, 2, 3, 4}))})},
      {Text("shared"), PickleValue::List({shared, shared})},
      {Text("dict"), PickleValue::Dict({})},
      {Text("list"), PickleValue::List({})},
      {PickleValue::Int(5), Text("five")},
      {PickleValue::Tuple(ints({0, 0})), Text("pair")},
  });
}

TEST(PickleTest, ReadsWhatPythonWritesWithEachProtocol) {
  for (const PickleSample& sample : Samples()) {
    SCOPED_TRACE(sample.protocol);
    ASSERT_OK_AND_ASSIGN(const PickleValue value, ReadPickle(testing_support::HexToBytes(sample.hex)));
    EXPECT_EQ(WriteJson(value), WriteJson(SampleValue()));  // shows the difference
    EXPECT_TRUE(value == SampleValue());
    const PickleValue* shared = value.Find("shared");
    ASSERT_NE(shared, nullptr);
    EXPECT_EQ(&shared->AsItems()[0].AsItems(), &shared->AsItems()[1].AsItems()) << "what is shared is held once";
  }
}

TEST(PickleTest, ReadsTheRarerSpellings) {
  const std::string long_text(300, 'x');
  const std::vector<std::pair<std::string, PickleValue>> cases = {
      {"N.", PickleValue()},  // no PROTO
      {Bytes("\x80\x00N."), PickleValue()},
      {Bytes("\x8d\x02\0\0\0\0\0\0\0hi."), Text("hi")},  // BINUNICODE8
      {Bytes("X\x2c\x01\0\0") + long_text + ".", Text(long_text)},
      {Bytes("U\x02hi."), Text("hi")},  // str of Python 2
      {Bytes("T\x02\0\0\0hi."), Text("hi")},
      {Bytes("C\x02\x00\xff."), Text(Bytes("\x00\xff"))},  // bytes
      {Bytes("B\x01\0\0\0\xff."), Text("\xff")},
      {Bytes("\x8e\x01\0\0\0\0\0\0\0\xff."), Text("\xff")},
      {Bytes("\x96\x01\0\0\0\0\0\0\0\xff."), Text("\xff")},
      {Bytes("\x8a\x00."), PickleValue::Int(0)},  // LONG1 without digits
      {Bytes("\x8a\x01\x80."), PickleValue::Int(-128)},
      {Bytes("\x8a\x02\x80\0."), PickleValue::Int(128)},
      {Bytes("\x8b\x02\0\0\0\xfe\xff."), PickleValue::Int(-2)},         // LONG4
      {Bytes("\x8a\x0a\x05\0\0\0\0\0\0\0\0\0."), PickleValue::Int(5)},  // longer than needed
      {Bytes("\x8a\x0a\xfb\xff\xff\xff\xff\xff\xff\xff\xff\xff."), PickleValue::Int(-5)},
      {"(K\x01K\x02l.", PickleValue::List({PickleValue::Int(1), PickleValue::Int(2)})},
      {"(K\x01K\x02"
       "d.",
       PickleValue::Dict({{PickleValue::Int(1), PickleValue::Int(2)}})},
      {"(t.", PickleValue::Tuple({})},
      {Bytes("K\x01r\xff\xff\xff\xffj\xff\xff\xff\xff\x86."),  // LONG_BINPUT, LONG_BINGET of the largest index
       PickleValue::Tuple({PickleValue::Int(1), PickleValue::Int(1)})},
      // Memo entries 1, then 0, then by MEMOIZE 2, then 1 again.
      {Bytes("(K\x01q\x01K\x02q\x00K\x03\x94K\x04q\x01h\x00h\x01h\x02t."),
       PickleValue::Tuple({PickleValue::Int(1), PickleValue::Int(2), PickleValue::Int(3), PickleValue::Int(4),
                           PickleValue::Int(2), PickleValue::Int(4), PickleValue::Int(3)})},
      {"].garbage", PickleValue::List({})},  // Python, too, ignores the rest
  };
  for (const auto& [bytes, expected] : cases) {
    SCOPED_TRACE(absl::CHexEscape(bytes));
    const absl::StatusOr<PickleValue> value = ReadPickle(bytes);
    ASSERT_OK(value);
    EXPECT_TRUE(*value == expected) << WriteJson(*value);
  }
}

TEST(PickleTest, RefusesObjectsAndNamesTheByte) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      // cos\nsystem\n(S'true'\ntR.
      {"\x80\x02"
       "cos\nsystem\n(X\x04\0\0\0truetR.",
       "byte 2: GLOBAL (0x63): only plain data is read, no objects"},
      {Bytes("\x80\x04\x8c\x02os\x8c\x06system\x93."), "byte 14: STACK_GLOBAL (0x93): only plain data"},
      {"]]R.", "byte 2: REDUCE (0x52): only plain data"},
      {"]}b.", "byte 2: BUILD (0x62): only plain data"},
      {"(ios\nsystem\n.", "byte 1: INST (0x69): only plain data"},
      {"(]o.", "byte 2: OBJ (0x6f): only plain data"},
      {"])\x81.", "byte 2: NEWOBJ (0x81): only plain data"},
      {"])}\x92.", "byte 3: NEWOBJ_EX (0x92): only plain data"},
      {"\x82\x01.", "byte 0: EXT1 (0x82): only plain data"},
      {"\x83\x01\x01.", "byte 0: EXT2 (0x83): only plain data"},
      {"\x84\x01\x01\x01\x01.", "byte 0: EXT4 (0x84): only plain data"},
      {"P1\n.", "byte 0: PERSID (0x50): only plain data"},
      {"]Q.", "byte 1: BINPERSID (0x51): only plain data"},
      {"\x8f.", "byte 0: EMPTY_SET (0x8f): sets are not read"},
      {"\x8f(K\x01\x90.", "byte 0: EMPTY_SET (0x8f): sets are not read"},
      {"(K\x01\x91.", "byte 3: FROZENSET (0x91): sets are not read"},
      {"\x97.", "byte 0: NEXT_BUFFER (0x97): buffers"},
      {"I01\n.", "byte 0: INT (0x49): the text form of protocol 0 is not read"},
      {"(lp0\n.", "byte 2: PUT (0x70): the text form"},
      {"K\x01"
       "0.",
       "byte 2: POP (0x30): only plain data"},
      {"{\"segments\": []}", "byte 0: 0x7b is not a pickle opcode"},
      {"\x80\x06N.", "byte 0: PROTO (0x80): protocol 6; 0 to 5 are read"},
  };
  for (const auto& [bytes, message] : cases) {
    SCOPED_TRACE(absl::CHexEscape(bytes));
    const absl::StatusOr<PickleValue> value = ReadPickle(bytes);
    ASSERT_TRUE(absl::IsInvalidArgument(value.status())) << value.status();
    EXPECT_THAT(std::string(value.status().message()), StartsWith(message));
  }
}

TEST(PickleTest, RefusesWhatIsMalformed) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"", "byte 0: the pickle ends before its STOP"},
      {"\x80\x04", "byte 2: the pickle ends before its STOP"},
      {".", "byte 0: STOP (0x2e): 0 values and 0 marks are left"},
      {"NN.", "byte 2: STOP (0x2e): 2 values and 0 marks are left"},
      {"(N.", "byte 2: STOP (0x2e): 1 values and 1 marks are left"},
      {Bytes("X\xff\xff\xff\xffhi."), "byte 0: BINUNICODE (0x58): needs 4294967295 more bytes, 3 are left"},
      {Bytes("N\x8d\xff\xff\xff\xff\xff\xff\xff\xffhi."),
       "byte 1: BINUNICODE8 (0x8d): needs 18446744073709551615 more"},
      {Bytes("\x8b\xff\xff\xff\x7f."), "byte 0: LONG4 (0x8b): needs 2147483647 more bytes, 1 are left"},
      {Bytes("\x95\xff\0\0\0\0\0\0\0N."), "byte 0: FRAME (0x95): says 255 bytes follow, 2 are left"},
      {"K", "byte 0: BININT1 (0x4b): needs 1 more bytes, 0 are left"},
      {Bytes("\x8a\x09\0\0\0\0\0\0\0\0\x01."), "byte 0: LONG1 (0x8a): the integer does not fit in 64 bits"},  // 2^64
      {Bytes("\x8a\x09\xff\xff\xff\xff\xff\xff\xff\x7f\xff."), "byte 0: LONG1 (0x8a): the integer does not fit"},
      {"h\x07.", "byte 0: BINGET (0x68): memo entry 7 was never set"},
      {Bytes("N\x94h\x01."), "byte 2: BINGET (0x68): memo entry 1 was never set"},
      {"\x94.", "byte 0: MEMOIZE (0x94): there are not enough values"},
      {"N(q\x01.", "byte 2: BINPUT (0x71): there are not enough values"},  // no value above the mark
      {"Na.", "byte 1: APPEND (0x61): there are not enough values"},
      {"](Na.", "byte 3: APPEND (0x61): there are not enough values"},
      {"NNa.", "byte 2: APPEND (0x61): adds to None, not to a list"},
      {"}Na.", "byte 2: APPEND (0x61): adds to a dict, not to a list"},
      {")Na.", "byte 2: APPEND (0x61): adds to a tuple, not to a list"},
      {"]Ne.", "byte 2: APPENDS (0x65): there is no mark before it"},
      {"(Ne.", "byte 2: APPENDS (0x65): there are not enough values"},
      {"]((Ne.", "byte 4: APPENDS (0x65): there are not enough values"},
      {"}Ns.", "byte 2: SETITEM (0x73): there are not enough values"},
      {"]NNs.", "byte 3: SETITEM (0x73): adds to a list, not to a dict"},
      {"}(NNNu.", "byte 5: SETITEMS (0x75): a key has no value"},
      {"(Nd.", "byte 2: DICT (0x64): a key has no value"},
      {"}]Ns.", "byte 3: SETITEM (0x73): a list cannot be a key"},
      {"}}Ns.", "byte 3: SETITEM (0x73): a dict cannot be a key"},
      {"l.", "byte 0: LIST (0x6c): there is no mark before it"},
      {"N\x86.", "byte 1: TUPLE2 (0x86): there are not enough values"},
      {"N(N\x86.", "byte 3: TUPLE2 (0x86): there are not enough values"},
  };
  for (const auto& [bytes, message] : cases) {
    SCOPED_TRACE(absl::CHexEscape(bytes));
    const absl::StatusOr<PickleValue> value = ReadPickle(bytes);
    ASSERT_TRUE(absl::IsInvalidArgument(value.status())) << value.status();
    EXPECT_THAT(std::string(value.status().message()), StartsWith(message));
  }
}

TEST(PickleTest, EveryByteIsReadAsAnOpcodeOrRefused) {
  std::set<std::string> names;
  for (int opcode = 0; opcode < 256; ++opcode) {
    const std::string bytes(1, static_cast<char>(opcode));
    const std::string message(ReadPickle(bytes).status().message());
    EXPECT_THAT(message, StartsWith("byte ")) << opcode;
    if (!absl::StrContains(message, "is not a pickle opcode")) names.insert(bytes);
  }
  EXPECT_EQ(names.size(), 68u) << "pickletools.opcodes of Python 3.11 has as many";
}

TEST(PickleTest, EveryTruncationIsAnError) {
  for (const PickleSample& sample : Samples()) {
    const std::string bytes = testing_support::HexToBytes(sample.hex);
    for (size_t size = 0; size < bytes.size(); ++size) {
      // A copy of the exact size lets AddressSanitizer see a read behind the end.
      const std::vector<char> cut(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(size));
      EXPECT_FALSE(ReadPickle(absl::string_view(cut.data(), cut.size())).ok()) << sample.protocol << " " << size;
    }
  }
}

TEST(PickleTest, ValuesThatContainThemselvesAreRefused) {
  const std::vector<std::string> cases = {
      Bytes("]q\x00h\x00"
            "a."),                // x = []; x.append(x)
      Bytes("]q\x00(Nh\x00Ne."),  // x = [None, x, None]
      Bytes("}q\x00Nh\x00s."),    // x = {None: x}
      Bytes("]q\x00]q\x01h\x00"
            "ah\x01"
            "a."),  // through a second list: y = [x], then x.append(y)
      Bytes("]q\x00(h\x00th\x00\x86"
            "a."),                     // through a tuple
      Bytes("]q\x00}q\x01Nh\x00sa."),  // through a dict
      Bytes("]q\x00h\x00\x85q\x01"
            "0h\x01."),  // pickle.dumps of t = ([t],), shortened
  };
  for (const std::string& bytes : cases) {
    SCOPED_TRACE(absl::CHexEscape(bytes));
    EXPECT_STATUS(ReadPickle(bytes), absl::StatusCode::kInvalidArgument, "contain");  // "itself" or "themselves"
  }
  // A finished list that is used twice does not contain itself.
  EXPECT_OK(ReadPickle(Bytes("]q\x00Nah\x00\x86.")));
}

TEST(PickleTest, NestingIsLimited) {
  // Lists nested n deep.
  const auto nested = [](size_t n) { return std::string(n, ']') + std::string(n - 1, 'a') + "."; };
  ASSERT_OK_AND_ASSIGN(const PickleValue deepest, ReadPickle(nested(1000)));
  EXPECT_TRUE(*ReadPickle(WritePickle(deepest)) == deepest);
  EXPECT_EQ(WriteJson(deepest), std::string(1000, '[') + std::string(1000, ']'));
  EXPECT_STATUS(ReadPickle(nested(1001)), absl::StatusCode::kInvalidArgument,
                "byte 2000: APPEND (0x61): nested more than 1000 deep");
  EXPECT_STATUS(ReadPickle(nested(1'000'000)), absl::StatusCode::kInvalidArgument, "nested more than 1000 deep");
  // Tuples and dicts nest too deep, also through the memo.
  EXPECT_STATUS(ReadPickle(absl::StrCat(")", std::string(1000, '\x85'), ".")), absl::StatusCode::kInvalidArgument,
                "byte 1000: TUPLE1 (0x85): nested more than 1000 deep");
  std::string dicts = Bytes("}q\x00");
  for (int i = 0; i < 1000; ++i) dicts += Bytes("}Nh\x00sq\x00");
  EXPECT_STATUS(ReadPickle(dicts + "."), absl::StatusCode::kInvalidArgument, "nested more than 1000 deep");
}

// Each list holds the previous list twice: 200 lists, but 2^200 values in writing.
TEST(PickleTest, SharedValuesAreNotMultiplied) {
  std::string bytes = Bytes("\x80\x02]Na");
  for (int i = 0; i < 200; ++i)
    bytes += Bytes(
        "q\x00](h\x00h\x00"
        "e");
  // Each previous list stays below on the stack. A tuple takes all lists.
  bytes = Bytes("(") + bytes + "t.";
  ASSERT_OK_AND_ASSIGN(const PickleValue value, ReadPickle(bytes));
  const std::string written = WritePickle(value);
  EXPECT_LT(written.size(), 4000u);
  ASSERT_OK_AND_ASSIGN(const PickleValue again, ReadPickle(written));
  EXPECT_EQ(WritePickle(again), written);
  ASSERT_EQ(again.AsItems().size(), 201u);
  const PickleValue& last = again.AsItems()[200];
  EXPECT_EQ(&last.AsItems()[0].AsItems(), &last.AsItems()[1].AsItems());
}

// The reader allows only few bytes of input that each take ten or a hundred bytes in memory.
TEST(PickleTest, WhatIsBuiltIsLimitedByTheSize) {
  const auto repeated = [](size_t times, const std::string& bytes) {
    std::string all = "(";
    for (size_t i = 0; i < times; ++i) all += bytes;
    return all + "t.";
  };
  const std::string lists = repeated(600'000, "]");
  // Each list takes 3 units. The reader has 2^20 units, and one unit for each byte of input. The mark takes one unit.
  const size_t last = ((size_t{1} << 20) + lists.size() - 1) / 3 + 1;
  EXPECT_STATUS(ReadPickle(lists), absl::StatusCode::kInvalidArgument,
                absl::StrCat("byte ", last, ": EMPTY_LIST (0x5d): builds more values than are read from 600003 bytes"));
  EXPECT_STATUS(ReadPickle(repeated(600'000, ")")), absl::StatusCode::kInvalidArgument,
                "EMPTY_TUPLE (0x29): builds more");
  EXPECT_STATUS(ReadPickle(repeated(600'000, "}\x94")), absl::StatusCode::kInvalidArgument, "builds more");
  EXPECT_STATUS(ReadPickle(repeated(1'100'000, Bytes("U\0"))), absl::StatusCode::kInvalidArgument, "builds more");
  // Each byte makes one small value.
  ASSERT_OK_AND_ASSIGN(const PickleValue nones, ReadPickle(repeated(1'100'000, "N")));
  EXPECT_EQ(nones.AsItems().size(), 1'100'000u);
}

TEST(PickleTest, ALaterValueOfAKeyWins) {
  ASSERT_OK_AND_ASSIGN(const PickleValue dict, ReadPickle(Bytes("}(X\x01\0\0\0aK\x01X\x01\0\0\0aK\x02u.")));
  ASSERT_NE(dict.Find("a"), nullptr);
  EXPECT_EQ(dict.Find("a")->AsInt(), 2);
  EXPECT_EQ(dict.Find("b"), nullptr);
  EXPECT_EQ(PickleValue::List({}).Find("a"), nullptr);
}

TEST(PickleTest, BoolsAreNoIntegersAndKindsAreKept) {
  EXPECT_FALSE(PickleValue::Bool(true) == PickleValue::Int(1));
  EXPECT_FALSE(PickleValue::Double(1) == PickleValue::Int(1));
  EXPECT_FALSE(PickleValue::List({}) == PickleValue::Tuple({}));
  EXPECT_FALSE(PickleValue::List({PickleValue()}) == PickleValue::List({}));
  EXPECT_FALSE(PickleValue::Dict({{Text("a"), Text("b")}}) == PickleValue::Dict({{Text("a"), Text("c")}}));
  EXPECT_FALSE(PickleValue::Double(0.0) == PickleValue::Double(-0.0));
  EXPECT_EQ(PickleValue::Uint(static_cast<uint64_t>(kMaxInteger)).kind(), PickleKind::kInt);
  EXPECT_EQ(PickleValue::Uint(static_cast<uint64_t>(kMaxInteger) + 1).kind(), PickleKind::kUint);
  EXPECT_EQ(PickleKindName(PickleKind::kBool), "a bool");
  EXPECT_EQ(PickleKindName(PickleKind::kUint), "an integer");
}

// Expects only opcodes that PyTorch's viewer knows. Skips arguments, to take no text for opcodes.
void ExpectOnlyTheViewersOpcodes(const std::string& bytes, size_t max_batch) {
  const std::string plain = std::string("(.N\x88\x89]})ate\x85\x86\x87usld") + '\x94';
  size_t next = 0;
  std::vector<size_t> counts = {0};  // values since each mark
  const auto number = [&](size_t size) {
    uint64_t value = 0;
    for (size_t i = 0; i < size; ++i) value |= static_cast<uint64_t>(static_cast<uint8_t>(bytes[next + i])) << (8 * i);
    next += size;
    return value;
  };
  while (next < bytes.size()) {
    const char opcode = bytes[next++];
    switch (opcode) {
      case '\x80':
        EXPECT_EQ(number(1), 4u);
        break;
      case 'K':
        number(1);
        ++counts.back();
        break;
      case 'M':
        number(2);
        ++counts.back();
        break;
      case 'J':
        number(4);
        ++counts.back();
        break;
      case 'G':
        number(8);
        ++counts.back();
        break;
      case 'h':
        number(1);
        ++counts.back();
        break;
      case 'j':
        number(4);
        ++counts.back();
        break;
      case '\x8a':
      case '\x8c':
        next += number(1);
        ++counts.back();
        break;
      case 'X':
        next += number(4);
        ++counts.back();
        break;
      case '(':
        counts.push_back(0);
        break;
      case 'e':
      case 'u':
        EXPECT_LE(counts.back(), opcode == 'e' ? max_batch : 2 * max_batch);
        EXPECT_GT(counts.back(), 1u);
        counts.pop_back();
        break;
      case 't':
        counts.pop_back();
        ++counts.back();
        break;
      case 'N':
      case '\x88':
      case '\x89':
      case ']':
      case '}':
      case ')':
        ++counts.back();
        break;
      case 'a':
      case '\x86':
        --counts.back();
        break;
      case 's':
      case '\x87':
        counts.back() -= 2;
        break;
      case '\x85':
      case '\x94':
      case '.':
        break;
      default:
        ADD_FAILURE() << "opcode " << absl::CHexEscape(std::string(1, opcode)) << " at byte " << next - 1;
        return;
    }
  }
  EXPECT_EQ(next, bytes.size());
}

TEST(PickleTest, WritesIntegersAsPythonDoes) {
  const std::vector<std::pair<PickleValue, std::string>> cases = {
      {PickleValue::Int(0), Bytes("K\0")},
      {PickleValue::Int(255), "K\xff"},
      {PickleValue::Int(256), Bytes("M\0\x01")},
      {PickleValue::Int(65535), "M\xff\xff"},
      {PickleValue::Int(65536), Bytes("J\0\0\x01\0")},
      {PickleValue::Int(-1), "J\xff\xff\xff\xff"},
      {PickleValue::Int(-2147483648LL), Bytes("J\0\0\0\x80")},
      {PickleValue::Int(2147483648LL), Bytes("\x8a\x05\0\0\0\x80\0")},
      {PickleValue::Int(-2147483649LL), Bytes("\x8a\x05\xff\xff\xff\x7f\xff")},
      {PickleValue::Int(int64_t{1} << 46), Bytes("\x8a\x06\0\0\0\0\0\x40")},
      {PickleValue::Int(kMaxInteger), "\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7f"},
      {PickleValue::Int(kMin), Bytes("\x8a\x08\0\0\0\0\0\0\0\x80")},
      {PickleValue::Uint(kUnsignedMax), Bytes("\x8a\x09\xff\xff\xff\xff\xff\xff\xff\xff\0")},
  };
  for (const auto& [value, bytes] : cases) {
    EXPECT_EQ(absl::CHexEscape(WritePickle(value)), absl::CHexEscape("\x80\x04" + bytes + "."));
    ASSERT_OK_AND_ASSIGN(const PickleValue again, ReadPickle(WritePickle(value)));
    EXPECT_TRUE(again == value) << WriteJson(again);
  }
}

TEST(PickleTest, WritesLongListsInBatches) {
  for (const size_t size : {1u, 2u, 999u, 1000u, 1001u, 2000u, 2001u}) {
    SCOPED_TRACE(size);
    Items items;
    Pairs pairs;
    for (size_t i = 0; i < size; ++i) {
      items.push_back(PickleValue::Uint(i));
      pairs.emplace_back(PickleValue::Uint(i), PickleValue());
    }
    for (const PickleValue& value : {PickleValue::List(items), PickleValue::Dict(pairs), PickleValue::Tuple(items)}) {
      const std::string bytes = WritePickle(value);
      ExpectOnlyTheViewersOpcodes(bytes, 1000);
      ASSERT_OK_AND_ASSIGN(const PickleValue again, ReadPickle(bytes));
      EXPECT_TRUE(again == value);
    }
  }
}

TEST(PickleTest, WritesRepeatedTextAndSharedListsOnce) {
  Items entries;
  const PickleValue frames = PickleValue::List({Text("frame number one"), Text("frame number two")});
  for (int i = 0; i < 500; ++i) {
    entries.push_back(
        PickleValue::Dict({{Text("a rather long key"), Text(absl::StrCat("text ", i))}, {Text("f"), frames}}));
  }
  const PickleValue value = PickleValue::List(std::move(entries));
  const std::string bytes = WritePickle(value);
  ExpectOnlyTheViewersOpcodes(bytes, 1000);
  EXPECT_EQ(bytes.find("a rather long key"), bytes.rfind("a rather long key"));
  EXPECT_EQ(bytes.find("frame number one"), bytes.rfind("frame number one"));
  ASSERT_OK_AND_ASSIGN(const PickleValue again, ReadPickle(bytes));
  EXPECT_TRUE(again == value);
  EXPECT_EQ(&again.AsItems()[0].Find("f")->AsItems(), &again.AsItems()[499].Find("f")->AsItems());
}

TEST(PickleTest, WritesSharedEmptyListsAsSuch) {
  const PickleValue empty = PickleValue::List({});
  EXPECT_EQ(absl::CHexEscape(WritePickle(PickleValue::Tuple({empty, empty}))), absl::CHexEscape("\x80\x04]]\x86."))
      << "a reference is longer";
}

class RandomValues {
 public:
  explicit RandomValues(uint32_t seed) : random_(seed) {}

  PickleValue Make(int depth) {
    // Sometimes reuses an earlier value, so that values are shared.
    if (!made_.empty() && Number(6) == 0) return made_[Number(made_.size())];
    PickleValue value = MakeNew(depth);
    made_.push_back(value);
    return value;
  }

 private:
  size_t Number(size_t below) { return std::uniform_int_distribution<size_t>(0, below - 1)(random_); }

  PickleValue MakeNew(int depth) {
    switch (Number(depth > 0 ? 10 : 6)) {
      case 0:
        return PickleValue();
      case 1:
        return PickleValue::Bool(Number(2) == 0);
      case 2:
        return PickleValue::Int(static_cast<int64_t>(random_()) >> Number(64));
      case 3:
        return PickleValue::Uint(random_() >> (Number(2) == 0 ? 0 : Number(64)));
      case 4:
        return PickleValue::Double(static_cast<double>(random_()) / 3);
      case 5: {
        std::string text(Number(8) == 0 ? 200 + Number(200) : Number(10), '\0');
        for (char& c : text) c = static_cast<char>(Number(256));
        return Text(text);
      }
      case 6:
      case 7:
      case 8: {
        Items items(Number(6));
        for (PickleValue& item : items) item = Make(depth - 1);
        return Number(2) == 0 ? PickleValue::List(std::move(items)) : PickleValue::Tuple(std::move(items));
      }
      default: {
        Pairs pairs(Number(6));
        for (auto& [key, value] : pairs) {
          do {
            key = Make(0);
          } while (key.kind() == PickleKind::kList || key.kind() == PickleKind::kDict);
          value = Make(depth - 1);
        }
        return PickleValue::Dict(std::move(pairs));
      }
    }
  }

  std::mt19937_64 random_;
  std::vector<PickleValue> made_;
};

TEST(PickleTest, RandomValuesComeBackAsTheyWere) {
  std::set<PickleKind> kinds;
  for (uint32_t seed = 0; seed < 2000; ++seed) {
    SCOPED_TRACE(seed);
    const PickleValue value = RandomValues(seed).Make(6);
    kinds.insert(value.kind());
    const std::string bytes = WritePickle(value);
    ExpectOnlyTheViewersOpcodes(bytes, 1000);
    ASSERT_OK_AND_ASSIGN(const PickleValue again, ReadPickle(bytes));
    ASSERT_TRUE(again == value) << WriteJson(value) << "\n" << WriteJson(again);
    ASSERT_EQ(WritePickle(again), bytes);
  }
  EXPECT_EQ(kinds.size(), 9u) << "not every kind was tried";
}

TEST(PickleTest, WritesJson) {
  EXPECT_EQ(
      WriteJson(SampleValue()),
      "{\"none\":null,\"bools\":[true,false],\"ints\":[0,255,256,65535,65536,-1,2147483647,-2147483648,2147483648,"
      "-2147483649,9007199254740993,9223372036854775807,-9223372036854775808,9223372036854775808,"
      "18446744073709551615],\"floats\":[0.0,-0.5,1e+300,null],\"text\":[\"\",\"caf\xc3\xa9\",\"text\"],"
      "\"tuples\":[[],[1],[1,2],[1,2,3],[1,2,3,4]],"
      "\"shared\":[[1,{\"filename\":\"train.py\",\"line\":7}],[1,{\"filename\":\"train.py\",\"line\":7}]],"
      "\"dict\":{},\"list\":[],\"5\":\"five\",\"[0,0]\":\"pair\"}");
  EXPECT_EQ(WriteJson(Text("a\"b\\c\n\x01/\x7f")), "\"a\\\"b\\\\c\\u000a\\u0001/\x7f\"");
  EXPECT_EQ(WriteJson(PickleValue::Double(0.1)), "0.1");
  EXPECT_EQ(WriteJson(PickleValue::Double(std::numeric_limits<double>::quiet_NaN())), "null");
}

TEST(PickleTest, JsonIsAlwaysUtf8) {
  const std::string replacement = "\xef\xbf\xbd";
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"\xc3\xa9", "\xc3\xa9"},                  // two bytes
      {"\xe2\x82\xac", "\xe2\x82\xac"},          // three bytes
      {"\xed\x9f\xbf", "\xed\x9f\xbf"},          // the last character below the UTF-16 halves
      {"\xf0\x9f\x98\x80", "\xf0\x9f\x98\x80"},  // four bytes
      {"\xf4\x8f\xbf\xbf", "\xf4\x8f\xbf\xbf"},  // the last character
      {"a\xff"
       "b",
       "a" + replacement + "b"},
      {"\x80", replacement},
      {"\xc3", replacement},  // cut short
      {"\xc3(", replacement + "("},
      {"\xc0\xaf", replacement + replacement},  // '/' in two bytes
      {"\xe0\x80\xaf", replacement + replacement + replacement},
      {"\xed\xa0\x80", replacement + replacement + replacement},  // half of a UTF-16 pair
      {"\xf4\x90\x80\x80", replacement + replacement + replacement + replacement},
      {"\xf5\x80\x80\x80", replacement + replacement + replacement + replacement},
      {"\xe2\x82", replacement + replacement},
  };
  for (const auto& [text, expected] : cases) {
    EXPECT_EQ(WriteJson(Text(text)), "\"" + expected + "\"") << absl::CHexEscape(text);
  }
  EXPECT_THAT(WriteJson(PickleValue::Dict({{Text("\xff"), Text("")}})), HasSubstr(replacement));
}

}  // namespace
}  // namespace vrambroker
