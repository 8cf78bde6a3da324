// SPDX-License-Identifier: Apache-2.0
//
// libFuzzer: any messages to every method of both services that takes one message, from a process with a remote and a
// leased session. No call crashes the daemon, every call gets an answer, all memory comes back, and the memory of
// another process stays untouched.
#include <cstddef>
#include <cstdint>

#include "allocator/base/bytes.h"
#include "tests/fuzz/fuzz_run.h"

using vrambroker::operator""_MiB;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  vrambroker::FuzzBytes bytes(data, size);
  vrambroker::FuzzRun run;
  vrambroker::v1::SessionRequest hello;
  hello.mutable_hello()->set_protocol_version(1);
  hello.mutable_hello()->set_name("fuzz");
  run.OpenStream();
  run.Send(0, hello);
  hello.mutable_hello()->set_placement(vrambroker::v1::PLACEMENT_LEASED);
  run.OpenStream();
  run.Send(1, hello);
  vrambroker::v1::SessionRequest allocate;
  allocate.mutable_allocate()->mutable_request()->set_requested_bytes(1000);
  run.Send(0, allocate);
  vrambroker::v1::SessionRequest lease;
  lease.mutable_lease()->mutable_request()->add_segment_bytes(2_MiB);
  run.Send(1, lease);
  for (size_t i = 0; i < vrambroker::FuzzRun::kMostCalls && !bytes.empty(); ++i) run.CallAny(bytes);
  run.End(bytes);
  return 0;
}
