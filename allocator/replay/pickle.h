// SPDX-License-Identifier: Apache-2.0
//
// Python pickles of plain data, read and written. Nothing is ever executed: whatever would need a class or a function
// is refused.
#ifndef VRAMBROKER_ALLOCATOR_REPLAY_PICKLE_H_
#define VRAMBROKER_ALLOCATOR_REPLAY_PICKLE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace vrambroker {

// A value that does not change any more. Copies are cheap and share what they contain, so that a stack trace that a
// thousand entries point to is held once. Safe to read from any thread.
class PickleValue {
 public:
  enum class Kind : uint8_t {
    kNone,
    kBool,
    kInt,
    kUint,  // only what an int64_t cannot hold
    kDouble,
    kString,
    kList,
    kTuple,
    kDict,
  };
  using Items = std::vector<PickleValue>;
  using Pairs = std::vector<std::pair<PickleValue, PickleValue>>;

  PickleValue() = default;  // None
  static PickleValue Bool(bool value);
  static PickleValue Int(int64_t value);
  static PickleValue Uint(uint64_t value);  // kInt when it fits
  static PickleValue Double(double value);
  static PickleValue String(absl::string_view value);  // UTF-8, for Python to read it
  static PickleValue List(Items items);
  static PickleValue Tuple(Items items);
  static PickleValue Dict(Pairs pairs);  // keys are neither lists nor dicts

  Kind kind() const { return static_cast<Kind>(data_.index()); }

  // REQUIRES of each: the value is of that kind.
  bool AsBool() const { return std::get<bool>(data_); }
  int64_t AsInt() const { return std::get<int64_t>(data_); }
  uint64_t AsUint() const { return std::get<uint64_t>(data_); }
  double AsDouble() const { return std::get<double>(data_); }
  const std::string& AsString() const { return *std::get<std::shared_ptr<const std::string>>(data_); }
  const Items& AsItems() const;                                                      // kList or kTuple
  const Pairs& AsPairs() const { return *std::get<std::shared_ptr<Pairs>>(data_); }  // in the order of insertion

  // The value of a string key; nullptr when there is none, or when this is no dict. A key that was set more than once
  // has the value that was set last.
  const PickleValue* Find(absl::string_view key) const;

  // Compares everything down to the leaves, floats by their bits. What is shared is compared as often as it is met.
  bool operator==(const PickleValue& other) const;

 private:
  friend class PickleReader;
  friend class PickleWriter;

  template <Kind kKind>
  const auto& Get() const {
    return std::get<static_cast<size_t>(kKind)>(data_);
  }

  // In the order of Kind.
  std::variant<std::monostate, bool, int64_t, uint64_t, double, std::shared_ptr<const std::string>,
               std::shared_ptr<Items>, std::shared_ptr<Items>, std::shared_ptr<Pairs>>
      data_;
};

// "a list", "an integer", "None": for messages.
absl::string_view PickleKindName(PickleValue::Kind kind);

// Reads what Python's pickle.dump makes of None, bools, integers of 64 bits, floats, strings, bytes (read as strings),
// lists, tuples and dicts with protocols 2 to 5. What follows the end of the pickle is ignored, as Python does.
// InvalidArgument names the byte: for objects, sets, larger integers, values that contain themselves, nesting deeper
// than 1000 and anything malformed; and when it builds more values than a pickle of that size has use for, or more than
// 2^28 (pickle_reader.cc). So it takes at most 60 bytes of memory for each of the input and 100 MiB, and 16 GiB in all;
// a snapshot of PyTorch takes about ten for each. Safe to call from any thread.
absl::StatusOr<PickleValue> ReadPickle(absl::string_view bytes);

// Protocol 4 with only the opcodes that PyTorch's memory viewer reads (strings of 4 GiB and more apart). What is
// shared is written once. Never fails. Recurses as deep as the value is nested. Safe to call from any thread.
std::string WritePickle(const PickleValue& value);

// The same value as JSON on one line. Tuples become arrays, keys strings, infinities and NaN null; bytes that are not
// UTF-8 become U+FFFD. What is shared is written as often as it is met: of a hostile pickle that can be more than fits
// in memory. Never fails otherwise. Safe to call from any thread.
std::string WriteJson(const PickleValue& value);

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_REPLAY_PICKLE_H_
