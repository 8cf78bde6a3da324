// SPDX-License-Identifier: Apache-2.0
//
// AddressMap: finds the owner of a plain pointer, for freeing by address.
//
// A table of 2 MiB pages, in two levels since the address space is large and mostly empty. A page names the registered
// ranges overlapping the page, two at most: a range covering the page's start, and a range beginning inside the page
// and ending beyond it. A range has a slot per granule; at most one block starts in a granule.
#ifndef VRAMBROKER_CLIENT_HEAP_ADDRESS_MAP_H_
#define VRAMBROKER_CLIENT_HEAP_ADDRESS_MAP_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>

#include "allocator/base/mutex.h"

namespace vrambroker::client_internal {

// Thread-safe for any concurrent calls, with one exception: while a range is removed, no other call may concern an
// address inside the range, whether a block starts there or not; calls for other addresses may go on. Put(), Find() and
// Take() take no lock and never wait. Pointers without a value yield an empty entry: wild, stale, or inside a block.
class AddressMap {
 public:
  static constexpr uint64_t kUnitBytes = 512;         // ranges, granules and blocks are multiples
  static constexpr uint64_t kPageBytes = 2ull << 20;  // the minimum size of a range

  struct Entry {
    void* owner = nullptr;  // of the range
    void* value = nullptr;  // nullptr: not found
  };

  AddressMap() = default;
  ~AddressMap();
  AddressMap(const AddressMap&) = delete;
  AddressMap& operator=(const AddressMap&) = delete;

  // From now on [base, base + bytes) belongs to `owner`, without values yet. `granule`: a power of two from 512 bytes
  // to 32 MiB. False, without effect, for sizes or addresses outside the map's bounds and for overlapping ranges.
  bool AddRange(void* base, uint64_t bytes, uint64_t granule, void* owner) ABSL_LOCKS_EXCLUDED(mu_);
  // Forgets the range beginning at `base`, and all of its values. False: no such range.
  bool RemoveRange(void* base) ABSL_LOCKS_EXCLUDED(mu_);

  // Sets the value, a pointer, of `address`, replacing any value of the granule. False, without effect, when the
  // address is in no range or not a multiple of 512 bytes, and for nullptr.
  bool Put(void* address, void* value);
  Entry Find(const void* address) const;
  // Like Find(), but removes the value: of concurrent calls with the same address, a single call gets the value.
  Entry Take(void* address);

 private:
  static constexpr int kAddressBits = 48;
  static constexpr int kPageBits = 21;
  static constexpr int kLeafBits = 13;  // a leaf is 128 KiB and covers 16 GiB
  static constexpr int kRootBits = kAddressBits - kPageBits - kLeafBits;

  struct Range {
    uintptr_t base = 0;
    uint64_t bytes = 0;
    int granule_bits = 0;
    void* owner = nullptr;
    // Each a value, and above the value its position in the granule, in units; 0: none.
    std::unique_ptr<std::atomic<uint64_t>[]> slots;
  };
  // Words with a pointer to a Range and, above the pointer, where in the page the range's part ends or begins, in
  // units. So lookups read a range only for the range's own addresses, and a range can be removed during lookups of
  // others.
  struct Page {
    std::atomic<uint64_t> covers_start{0};   // with the end
    std::atomic<uint64_t> begins_inside{0};  // with the beginning
  };
  using Leaf = std::array<Page, size_t{1} << kLeafBits>;
  // The place of an address's value, if any.
  struct Place {
    const Range* range = nullptr;
    std::atomic<uint64_t>* slot = nullptr;
    uint64_t unit = 0;  // in the granule, in the slot's upper bits
  };

  Place PlaceOf(const void* address) const;
  void SetPages(const Range& range, bool present) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  std::array<std::atomic<Leaf*>, size_t{1} << kRootBits> root_{};  // leaves are made on demand, and stay
  Mutex mu_;
  std::map<uintptr_t, std::unique_ptr<Range>> ranges_ ABSL_GUARDED_BY(mu_);  // by base
};

}  // namespace vrambroker::client_internal

#endif  // VRAMBROKER_CLIENT_HEAP_ADDRESS_MAP_H_
