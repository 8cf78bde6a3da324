// SPDX-License-Identifier: Apache-2.0
//
// libFuzzer: any sequence of messages, well-formed or not, on several session streams that open and break at any time.
// Other calls run in between, with leases and returns like the descriptor socket. The rules of rpc_fuzz.cc hold
// afterwards, and every call on a stream gets one answer.
#include <cstddef>
#include <cstdint>

#include "tests/fuzz/fuzz_run.h"

namespace {

constexpr int kMostOperations = 60;

// Opens a stream with an honest client's hello. Most sequences without a hello end soon.
void OpenWithHello(vrambroker::FuzzRun& run, size_t stream, bool leases) {
  run.OpenStream();
  vrambroker::v1::SessionRequest hello;
  hello.mutable_hello()->set_protocol_version(1);
  if (leases) hello.mutable_hello()->set_placement(vrambroker::v1::PLACEMENT_LEASED);
  run.Send(stream, hello);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  vrambroker::FuzzBytes bytes(data, size);
  vrambroker::FuzzRun run;
  size_t streams = 0;
  for (int i = 0; i < kMostOperations && !bytes.empty(); ++i) {
    const uint64_t kind = bytes.Next();
    if (kind < 24) {
      run.OpenStream();
      ++streams;
    } else if (kind < 64) {
      if (streams < vrambroker::FuzzRun::kMostStreams) OpenWithHello(run, streams++, kind % 2 == 0);
    } else if (kind < 216) {
      run.SendAny(bytes);
    } else if (kind < 232) {
      run.BreakStream(bytes);
    } else if (kind < 244) {
      run.CallAny(bytes);
    } else {
      run.MakeSegmentCall(bytes);
    }
  }
  run.End(bytes);
  return 0;
}
