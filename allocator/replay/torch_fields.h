// SPDX-License-Identifier: Apache-2.0
//
// Checked fields of PyTorch's snapshots. InvalidArgument names the path of a field missing or of the wrong type:
// "device_traces[0][17].action: missing". Thread-safe.
#ifndef VRAMBROKER_ALLOCATOR_REPLAY_TORCH_FIELDS_H_
#define VRAMBROKER_ALLOCATOR_REPLAY_TORCH_FIELDS_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "allocator/replay/pickle.h"

namespace vrambroker {

absl::Status WrongType(absl::string_view path, const PickleValue& value, absl::string_view expected);

absl::StatusOr<const PickleValue*> Field(const PickleValue& dict, absl::string_view path, absl::string_view key);
absl::StatusOr<absl::string_view> TextField(const PickleValue& dict, absl::string_view path, absl::string_view key);
// Reads a handle or an address.
absl::StatusOr<uint64_t> HandleField(const PickleValue& dict, absl::string_view path, absl::string_view key);
// Reads a size below kMaxRequestBytes.
absl::StatusOr<uint64_t> SizeField(const PickleValue& dict, absl::string_view path, absl::string_view key);
absl::StatusOr<const PickleValue::Items*> ItemsField(const PickleValue& dict, absl::string_view path,
                                                     absl::string_view key);

}  // namespace vrambroker

#endif  // VRAMBROKER_ALLOCATOR_REPLAY_TORCH_FIELDS_H_
