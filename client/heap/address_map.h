// SPDX-License-Identifier: Apache-2.0
//
// AddressMap: what a plain pointer belongs to. For freeing by address.
//
// A table by pages of 2 MiB, in two levels since the address space is large and mostly empty. A page says which
// registered ranges it has a part of, two at most: one that covers its start, and one that begins inside it and goes on
// beyond its end. A range has a slot for each granule, in which at most one block starts.
#ifndef VRAMBROKER_CLIENT_HEAP_ADDRESS_MAP_H_
#define VRAMBROKER_CLIENT_HEAP_ADDRESS_MAP_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>

#include "allocator/base/mutex.h"

namespace vrambroker::client_internal {

// Thread-safe: any calls at a time, but one. While a range is removed, no other call may concern an address inside it,
// whether a block starts there or not; with addresses elsewhere all goes on. Put(), Find() and Take() take no lock and
// never wait. Where there is no value they answer so, whatever the pointer: wild, stale, to the inside of a block.
class AddressMap {
 public:
  static constexpr uint64_t kUnitBytes = 512;         // ranges, granules and blocks are multiples of this
  static constexpr uint64_t kPageBytes = 2ull << 20;  // the least size of a range

  struct Entry {
    void* owner = nullptr;  // of the range
    void* value = nullptr;  // nullptr: nothing was found
  };

  AddressMap() = default;
  ~AddressMap();
  AddressMap(const AddressMap&) = delete;
  AddressMap& operator=(const AddressMap&) = delete;

  // From now on [base, base + bytes) belongs to `owner`, and has no values yet. `granule`: a power of two of 512 bytes
  // to 32 MiB. False, and nothing changes, for sizes or an address that the map cannot hold and for a range that
  // overlaps another.
  bool AddRange(void* base, uint64_t bytes, uint64_t granule, void* owner) ABSL_LOCKS_EXCLUDED(mu_);
  // Forgets the range that begins at `base`, and all its values. False: there is none.
  bool RemoveRange(void* base) ABSL_LOCKS_EXCLUDED(mu_);

  // Gives `address` a value, a pointer, in place of what its granule held. False, and nothing changes, when the address
  // is in no range or no multiple of 512 bytes, and for nullptr.
  bool Put(void* address, void* value);
  Entry Find(const void* address) const;
  // The same, and the value is gone: of several calls with one address, one gets it.
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
    // Each a value, and above it where in the granule it is, in units; 0: none.
    std::unique_ptr<std::atomic<uint64_t>[]> slots;
  };
  // Words of a pointer to a Range and, above it, where in the page its part ends or begins, in units. A range is
  // therefore looked at for its own addresses only, which is why it can be removed while others are looked up.
  struct Page {
    std::atomic<uint64_t> covers_start{0};   // with the end
    std::atomic<uint64_t> begins_inside{0};  // with the beginning
  };
  using Leaf = std::array<Page, size_t{1} << kLeafBits>;
  // Where the value of an address is, if anywhere.
  struct Place {
    const Range* range = nullptr;
    std::atomic<uint64_t>* slot = nullptr;
    uint64_t unit = 0;  // in the granule, in the slot's upper bits
  };

  Place PlaceOf(const void* address) const;
  void SetPages(const Range& range, bool present) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  std::array<std::atomic<Leaf*>, size_t{1} << kRootBits> root_{};  // leaves are made when first needed, and stay
  Mutex mu_;
  std::map<uintptr_t, std::unique_ptr<Range>> ranges_ ABSL_GUARDED_BY(mu_);  // by base
};

}  // namespace vrambroker::client_internal

#endif  // VRAMBROKER_CLIENT_HEAP_ADDRESS_MAP_H_
