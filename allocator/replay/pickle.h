// SPDX-License-Identifier: Apache-2.0
//
// Reader and writer for Python pickles of plain data. Never executes anything: values in need of a class or a function
// are refused.
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

// An immutable value. Copies are cheap and share their contents, so a stack trace referenced by a thousand entries is
// held once. Safe to read from any thread.
class PickleValue {
 public:
  enum class Kind : uint8_t {
    kNone,
    kBool,
    kInt,
    kUint,  // only values too large for int64_t
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
  static PickleValue Uint(uint64_t value);  // kInt if small enough
  static PickleValue Double(double value);
  static PickleValue String(absl::string_view value);  // UTF-8, or Python cannot read the value
  static PickleValue List(Items items);
  static PickleValue Tuple(Items items);
  static PickleValue Dict(Pairs pairs);  // keys are neither lists nor dicts

  Kind kind() const { return static_cast<Kind>(data_.index()); }

  // REQUIRES of each: the value has the kind named.
  bool AsBool() const { return std::get<bool>(data_); }
  int64_t AsInt() const { return std::get<int64_t>(data_); }
  uint64_t AsUint() const { return std::get<uint64_t>(data_); }
  double AsDouble() const { return std::get<double>(data_); }
  const std::string& AsString() const { return *std::get<std::shared_ptr<const std::string>>(data_); }
  const Items& AsItems() const;                                                      // kList or kTuple
  const Pairs& AsPairs() const { return *std::get<std::shared_ptr<Pairs>>(data_); }  // in the order of insertion

  // Returns the value of a string key; nullptr when absent, or when the receiver is no dict. A key set repeatedly has
  // the last value set.
  const PickleValue* Find(absl::string_view key) const;

  // Compares everything down to the leaves, floats by their bits. Shared parts are compared as often as met.
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

// Names a kind in messages: "a list", "an integer", "None".
absl::string_view PickleKindName(PickleValue::Kind kind);

// Reads the output of Python's pickle.dump for None, bools, integers of 64 bits, floats, strings, bytes (read as
// strings), lists, tuples and dicts with protocols 2 to 5. Bytes after the end of the pickle are ignored, as in Python.
// InvalidArgument names the byte: for objects, sets, larger integers, values containing themselves, nesting deeper than
// 1000 and malformed input; for more values than a pickle of equal size has use for; and for more than 2^28 values
// (pickle_reader.cc). Limits memory to 60 bytes per byte of input plus 100 MiB, and to 16 GiB in all; a snapshot of
// PyTorch takes about ten per byte. Thread-safe.
absl::StatusOr<PickleValue> ReadPickle(absl::string_view bytes);

// Writes protocol 4 with only the opcodes read by PyTorch's memory viewer (strings of 4 GiB and more apart). Shared
// parts are written once. Never fails. Recurses as deep as the value is nested. Thread-safe.
std::string WritePickle(const PickleValue& value);

// Writes the value as JSON on one line. Tuples become arrays, keys strings, infinities and NaN null; bytes other than
// UTF-8 become U+FFFD. Shared parts are written as often as met: for a hostile pickle the text may exceed memory. Never
// fails otherwise. Thread-safe.
std::string WriteJson(const PickleValue& value);

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_REPLAY_PICKLE_H_
