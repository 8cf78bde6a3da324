// SPDX-License-Identifier: Apache-2.0
#include "client/heap/address_map.h"

#include <algorithm>
#include <bit>
#include <iterator>
#include <tuple>
#include <utility>

namespace vrambroker::client_internal {
namespace {

// Words with a pointer and a small number above the pointer.
constexpr int kPointerBits = 48;
constexpr uint64_t kPointerMask = (uint64_t{1} << kPointerBits) - 1;
constexpr uint64_t kMostGranuleBytes = AddressMap::kUnitBytes << (64 - kPointerBits);

uint64_t Pack(const void* pointer, uint64_t number) {
  return reinterpret_cast<uintptr_t>(pointer) | number << kPointerBits;
}
uint64_t NumberIn(uint64_t word) {
  return word >> kPointerBits;
}
void* PointerIn(uint64_t word) {
  return reinterpret_cast<void*>(word & kPointerMask);  // NOLINT(performance-no-int-to-ptr): made from a pointer
}

}  // namespace

AddressMap::~AddressMap() {
  for (std::atomic<Leaf*>& leaf : root_) delete leaf.load(std::memory_order_relaxed);
}

bool AddressMap::AddRange(void* base, uint64_t bytes, uint64_t granule, void* owner) {
  const auto begin = reinterpret_cast<uintptr_t>(base);
  constexpr uint64_t kEnd = uint64_t{1} << kAddressBits;
  if (begin % kUnitBytes != 0 || begin >= kEnd) return false;
  if (bytes % kUnitBytes != 0 || bytes < kPageBytes || bytes > kEnd - begin) return false;
  if (!std::has_single_bit(granule) || granule < kUnitBytes || granule > kMostGranuleBytes) return false;
  const int granule_bits = std::countr_zero(granule);
  const uint64_t slots = ((bytes - 1) >> granule_bits) + 1;
  MutexLock lock(mu_);
  const auto next = ranges_.lower_bound(begin);
  if (next != ranges_.end() && next->first - begin < bytes) return false;
  if (next != ranges_.begin() && begin - std::prev(next)->first < std::prev(next)->second->bytes) return false;
  auto range = std::make_unique<Range>(Range{.base = begin,
                                             .bytes = bytes,
                                             .granule_bits = granule_bits,
                                             .owner = owner,
                                             .slots = std::make_unique<std::atomic<uint64_t>[]>(slots)});
  SetPages(*range, /*present=*/true);
  ranges_.emplace_hint(next, begin, std::move(range));
  return true;
}

bool AddressMap::RemoveRange(void* base) {
  MutexLock lock(mu_);
  const auto it = ranges_.find(reinterpret_cast<uintptr_t>(base));
  if (it == ranges_.end()) return false;
  SetPages(*it->second, /*present=*/false);
  ranges_.erase(it);
  return true;
}

void AddressMap::SetPages(const Range& range, bool present) {
  const uintptr_t end = range.base + range.bytes;
  for (uintptr_t page = range.base >> kPageBits; page <= (end - 1) >> kPageBits; ++page) {
    std::atomic<Leaf*>& leaf = root_[page >> kLeafBits];
    if (leaf.load(std::memory_order_relaxed) == nullptr) leaf.store(new Leaf(), std::memory_order_release);
    Page& entry = (*leaf.load(std::memory_order_relaxed))[page % std::tuple_size_v<Leaf>];
    const uintptr_t start = page << kPageBits;
    if (start >= range.base) {
      const uint64_t part_end = std::min<uint64_t>(end - start, kPageBytes) / kUnitBytes;
      entry.covers_start.store(present ? Pack(&range, part_end) : 0, std::memory_order_release);
    } else {
      const uint64_t part_begin = (range.base - start) / kUnitBytes;
      entry.begins_inside.store(present ? Pack(&range, part_begin) : 0, std::memory_order_release);
    }
  }
}

AddressMap::Place AddressMap::PlaceOf(const void* address) const {
  const auto number = reinterpret_cast<uintptr_t>(address);
  const uintptr_t page = number >> kPageBits;
  if (page >> (kAddressBits - kPageBits) != 0) return {};
  const Leaf* leaf = root_[page >> kLeafBits].load(std::memory_order_acquire);
  if (leaf == nullptr) return {};
  const Page& entry = (*leaf)[page % std::tuple_size_v<Leaf>];
  const uint64_t unit = number % kPageBytes / kUnitBytes;
  uint64_t word = entry.covers_start.load(std::memory_order_acquire);
  if (unit >= NumberIn(word)) {
    word = entry.begins_inside.load(std::memory_order_acquire);
    if (word == 0 || unit < NumberIn(word)) return {};
  }
  const auto* range = static_cast<const Range*>(PointerIn(word));
  const uint64_t offset = number - range->base;
  if (offset % kUnitBytes != 0) return {};
  return {.range = range,
          .slot = &range->slots[offset >> range->granule_bits],
          .unit = (offset & ((uint64_t{1} << range->granule_bits) - 1)) / kUnitBytes};
}

bool AddressMap::Put(void* address, void* value) {
  const Place place = PlaceOf(address);
  if (place.slot == nullptr || value == nullptr || Pack(value, 0) > kPointerMask) return false;
  place.slot->store(Pack(value, place.unit), std::memory_order_release);
  return true;
}

AddressMap::Entry AddressMap::Find(const void* address) const {
  const Place place = PlaceOf(address);
  if (place.slot == nullptr) return {};
  const uint64_t word = place.slot->load(std::memory_order_acquire);
  if (word == 0 || NumberIn(word) != place.unit) return {};
  return {.owner = place.range->owner, .value = PointerIn(word)};
}

AddressMap::Entry AddressMap::Take(void* address) {
  const Place place = PlaceOf(address);
  if (place.slot == nullptr) return {};
  uint64_t word = place.slot->load(std::memory_order_acquire);
  if (word == 0 || NumberIn(word) != place.unit) return {};
  // Failed: another call has taken the value.
  if (!place.slot->compare_exchange_strong(word, 0, std::memory_order_acq_rel, std::memory_order_relaxed)) return {};
  return {.owner = place.range->owner, .value = PointerIn(word)};
}

}  // namespace vrambroker::client_internal
