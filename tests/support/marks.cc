// SPDX-License-Identifier: Apache-2.0
#include "tests/support/marks.h"

#include <vector>

#include "tests/support/util.h"

namespace vrambroker::testing_support {
namespace {

struct Place {
  uint64_t offset = 0;
  uint64_t bytes = 0;
};

std::vector<Place> PlacesOf(const void* block, uint64_t bytes) {
  constexpr uint64_t kWhole = 4096;
  constexpr uint64_t kEnd = 256;
  constexpr uint64_t kSpot = 64;
  if (bytes <= kWhole) return {{0, bytes}};
  std::vector<Place> places = {{0, kEnd}, {bytes - kEnd, kEnd}};
  uint64_t grid = kWhole;
  while (grid < bytes / 4) grid *= 2;
  const uint64_t base = reinterpret_cast<uintptr_t>(block);
  for (uint64_t address = (base + kEnd + grid - 1) / grid * grid; address + kSpot <= base + bytes - kEnd;
       address += grid) {
    places.push_back({address - base, kSpot});
  }
  return places;
}

}  // namespace

uint64_t Mark(void* block, uint64_t bytes, uint64_t key) {
  uint64_t written = 0;
  for (const Place& place : PlacesOf(block, bytes)) {
    Fill(static_cast<char*>(block) + place.offset, place.bytes, key + place.offset);
    written += place.bytes;
  }
  return written;
}

std::optional<uint64_t> FindOtherBytes(const void* block, uint64_t bytes, uint64_t key) {
  for (const Place& place : PlacesOf(block, bytes)) {
    if (!Holds(static_cast<const char*>(block) + place.offset, place.bytes, key + place.offset)) return place.offset;
  }
  return std::nullopt;
}

}  // namespace vrambroker::testing_support
