// SPDX-License-Identifier: Apache-2.0
//
// The GPUs of a machine by UUID. The driver and NVML use the same names.
#ifndef VRAMBROKER_TESTS_CUDA_SUBSTITUTE_DEVICES_H_
#define VRAMBROKER_TESTS_CUDA_SUBSTITUTE_DEVICES_H_

#include <cuda.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <string>
#include <vector>

namespace vrambroker::cuda_substitute {

inline std::string FormatUuid(const CUuuid& uuid) {
  std::string text = "GPU-";
  for (size_t i = 0; i < sizeof uuid.bytes; ++i) {
    std::array<char, 4> hex{};
    std::snprintf(hex.data(), hex.size(), "%02x", static_cast<unsigned char>(uuid.bytes[i]));
    text += std::string(i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "") + hex.data();
  }
  return text;
}

inline CUuuid UuidOf(int physical) {
  CUuuid uuid = {};
  std::memcpy(uuid.bytes, "substitute GPU ", 15);
  uuid.bytes[15] = static_cast<char>('0' + physical);
  return uuid;
}

// Returns the GPUs that CUDA_VISIBLE_DEVICES leaves, in the variable's order. Entries are numbers or beginnings of
// UUIDs; the first entry that matches no GPU ends the list.
inline std::vector<int> VisibleDevices(int count) {
  std::vector<int> all;
  for (int i = 0; i < count; ++i) all.push_back(i);
  const char* const variable = std::getenv("CUDA_VISIBLE_DEVICES");
  if (variable == nullptr) return all;
  std::vector<int> visible;
  std::istringstream stream(variable);
  for (std::string entry; std::getline(stream, entry, ',');) {
    const auto it = std::find_if(all.begin(), all.end(), [&](int physical) {
      return entry == std::to_string(physical) ||
             (entry.size() > 4 && FormatUuid(UuidOf(physical)).rfind(entry, 0) == 0);
    });
    if (it == all.end()) break;
    visible.push_back(*it);
  }
  return visible;
}

}  // namespace vrambroker::cuda_substitute

#endif  // VRAMBROKER_TESTS_CUDA_SUBSTITUTE_DEVICES_H_
