// SPDX-License-Identifier: Apache-2.0
//
// FuzzRun: one input's streams and calls on the FuzzDaemon, and what must hold when they are over.
#ifndef VRAMBROKER_TESTS_FUZZ_FUZZ_RUN_H_
#define VRAMBROKER_TESTS_FUZZ_FUZZ_RUN_H_

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "tests/fuzz/fuzz_calls.h"
#include "tests/fuzz/fuzz_daemon.h"
#include "vrambroker/v1/broker.pb.h"

namespace vrambroker {

class FuzzRun {
 public:
  static constexpr size_t kMostStreams = 5;
  static constexpr size_t kMostCalls = 40;

  FuzzRun();

  // A call with one message of any method that takes one: a well-formed message, one with a few bytes changed, or any
  // bytes at all. Does nothing when there were many.
  void CallAny(FuzzBytes& bytes);

  // A lease or a return as over the descriptor socket, mostly of an open session. Some clients do not take the answer.
  void MakeSegmentCall(FuzzBytes& bytes);

  // Opens a stream, on which nothing has been said. Does nothing when there are many.
  void OpenStream();
  // A message on one of the streams, as in CallAny().
  void SendAny(FuzzBytes& bytes);
  void Send(size_t stream, const v1::SessionRequest& request);
  // A stream ends without a goodbye: by half-closing or by cancelling it.
  void BreakStream(FuzzBytes& bytes);

  // Requires that every call of an open stream was answered once, ends all streams, requires that every other call
  // was answered, and that the daemon is as it was before.
  void End(FuzzBytes& bytes);

 private:
  struct Stream {
    std::unique_ptr<FuzzCall> call;
    size_t expected = 0;  // answers to hello and calls
    bool broken = false;  // by this side
  };

  struct Call {
    std::unique_ptr<FuzzCall> call;
    bool lasts = false;  // until this side ends it
  };

  // The bytes of a message of this type.
  std::string AnyMessage(FuzzBytes& bytes, const google::protobuf::Descriptor* type);
  void SendBytes(Stream& stream, const std::string& message);

  FuzzDaemon& daemon_;
  grpc::GenericStub stub_;
  Known known_;
  std::vector<const google::protobuf::MethodDescriptor*> methods_;  // that take one message
  std::vector<Stream> streams_;
  std::vector<Call> calls_;
  std::atomic<int> unanswered_{0};  // segment calls
};

}  // namespace vrambroker

#endif  // VRAMBROKER_TESTS_FUZZ_FUZZ_RUN_H_
