// SPDX-License-Identifier: Apache-2.0
#include "tests/support/buffers.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "absl/functional/function_ref.h"
#include "tests/support/test_device.h"
#include "tests/support/util.h"

namespace vrambroker::testing_support {
namespace {

void Check(const absl::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "copying to or from the device: %s\n", status.ToString().c_str());
  std::abort();
}

// Calls `each` with the pieces of a copy's memory: a pointer, the piece's first byte in the buffer, and its bytes. Ends
// with the first piece for which `each` returns false, and returns false then. Small pieces keep the copy in the cache.
bool InPieces(uint64_t bytes, absl::FunctionRef<bool(char* piece, uint64_t start, uint64_t bytes)> each) {
  std::string piece(std::min<uint64_t>(bytes, 256 << 10), '?');
  for (uint64_t start = 0; start < bytes; start += piece.size()) {
    if (!each(piece.data(), start, std::min<uint64_t>(piece.size(), bytes - start))) return false;
  }
  return true;
}

}  // namespace

void Fill(Buffer& buffer, uint64_t bytes, uint64_t seed) {
  if (!OnCuda()) return Fill(buffer.data(), bytes, seed);
  InPieces(bytes, [&](char* piece, uint64_t start, uint64_t size) {
    Fill(piece, size, seed, start);
    Check(buffer.Write(start, piece, size));
    return true;
  });
}

void Fill(Buffer& buffer, uint64_t seed) {
  Fill(buffer, buffer.size(), seed);
}

bool Holds(const Buffer& buffer, uint64_t bytes, uint64_t seed) {
  if (!OnCuda()) return Holds(buffer.data(), bytes, seed);
  return InPieces(bytes, [&](char* piece, uint64_t start, uint64_t size) {
    Check(buffer.Read(start, piece, size));
    return Holds(piece, size, seed, start);
  });
}

bool Holds(const Buffer& buffer, uint64_t seed) {
  return Holds(buffer, buffer.size(), seed);
}

bool IsZero(const Buffer& buffer) {
  const auto is_zero = [](const char* bytes, uint64_t size) {
    return std::all_of(bytes, bytes + size, [](char c) { return c == 0; });
  };
  if (!OnCuda()) return is_zero(static_cast<const char*>(buffer.data()), buffer.size());
  return InPieces(buffer.size(), [&](char* piece, uint64_t start, uint64_t size) {
    Check(buffer.Read(start, piece, size));
    return is_zero(piece, size);
  });
}

void Fill(Client& client, void* memory, uint64_t bytes, uint64_t seed) {
  if (!OnCuda()) return Fill(memory, bytes, seed);
  InPieces(bytes, [&](char* piece, uint64_t start, uint64_t size) {
    Fill(piece, size, seed, start);
    Check(client.Write(memory, start, piece, size));
    return true;
  });
}

bool Holds(Client& client, const void* memory, uint64_t bytes, uint64_t seed) {
  if (!OnCuda()) return Holds(memory, bytes, seed);
  return InPieces(bytes, [&](char* piece, uint64_t start, uint64_t size) {
    Check(client.Read(memory, start, piece, size));
    return Holds(piece, size, seed, start);
  });
}

}  // namespace vrambroker::testing_support
