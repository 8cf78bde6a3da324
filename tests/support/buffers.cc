// SPDX-License-Identifier: Apache-2.0
#include "tests/support/buffers.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "tests/support/test_device.h"
#include "tests/support/util.h"

namespace vrambroker::testing_support {
namespace {

void Check(const absl::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "copying to or from the device: %s\n", status.ToString().c_str());
  std::abort();
}

std::string Content(const Buffer& buffer, uint64_t bytes) {
  std::string content(bytes, '?');
  Check(buffer.Read(0, content.data(), bytes));
  return content;
}

}  // namespace

void Fill(Buffer& buffer, uint64_t bytes, uint64_t seed) {
  if (!OnCuda()) return Fill(buffer.data(), bytes, seed);
  std::string content(bytes, '?');
  Fill(content.data(), bytes, seed);
  Check(buffer.Write(0, content.data(), bytes));
}

void Fill(Buffer& buffer, uint64_t seed) {
  Fill(buffer, buffer.size(), seed);
}

bool Holds(const Buffer& buffer, uint64_t bytes, uint64_t seed) {
  return OnCuda() ? Holds(Content(buffer, bytes).data(), bytes, seed) : Holds(buffer.data(), bytes, seed);
}

bool Holds(const Buffer& buffer, uint64_t seed) {
  return Holds(buffer, buffer.size(), seed);
}

bool IsZero(const Buffer& buffer) {
  const std::string content = OnCuda() ? Content(buffer, buffer.size()) : "";
  const char* const bytes = OnCuda() ? content.data() : static_cast<const char*>(buffer.data());
  return std::all_of(bytes, bytes + buffer.size(), [](char c) { return c == 0; });
}

void Fill(Client& client, void* memory, uint64_t bytes, uint64_t seed) {
  if (!OnCuda()) return Fill(memory, bytes, seed);
  std::string content(bytes, '?');
  Fill(content.data(), bytes, seed);
  Check(client.Write(memory, 0, content.data(), bytes));
}

bool Holds(Client& client, const void* memory, uint64_t bytes, uint64_t seed) {
  if (!OnCuda()) return Holds(memory, bytes, seed);
  std::string content(bytes, '?');
  Check(client.Read(memory, 0, content.data(), bytes));
  return Holds(content.data(), bytes, seed);
}

}  // namespace vrambroker::testing_support
