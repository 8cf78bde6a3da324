// SPDX-License-Identifier: Apache-2.0
#include <cstdio>

#include "vrambroker/client.h"

int main() {
  const absl::StatusOr<vrambroker::Buffer> buffer = [] {
    absl::StatusOr<vrambroker::Client> client = vrambroker::Client::Connect();
    return client.ok() ? client->Allocate(1 << 20) : client.status();
  }();
  std::puts(buffer.ok() ? "1 MiB, in C++" : buffer.status().ToString().c_str());
  return static_cast<int>(buffer.status().code());
}
