// SPDX-License-Identifier: Apache-2.0
//
// FuzzRun: an input's streams and calls on the FuzzDaemon, and the rules at the end.
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

  // Makes a call with one message, of any method that takes one message. The message is well-formed, or has a few
  // changed bytes, or is any bytes. Makes no call after kMostCalls calls.
  void CallAny(FuzzBytes& bytes);

  // Makes a lease or a return like the descriptor socket, mostly for an open session. Some clients do not take the
  // answer.
  void MakeSegmentCall(FuzzBytes& bytes);

  // Opens a silent stream. Opens no stream after kMostStreams streams.
  void OpenStream();
  // Sends a message on any stream, as in CallAny().
  void SendAny(FuzzBytes& bytes);
  void Send(size_t stream, const v1::SessionRequest& request);
  // Ends a stream without a goodbye: half-closes or cancels the stream.
  void BreakStream(FuzzBytes& bytes);

  // Requires an answer to every call of an open stream, and ends all streams. Requires an answer to every other call,
  // and the earlier state of the daemon.
  void End(FuzzBytes& bytes);

 private:
  struct Stream {
    std::unique_ptr<FuzzCall> call;
    size_t expected = 0;  // answers to hello and calls
    bool broken = false;  // by the client side
  };

  struct Call {
    std::unique_ptr<FuzzCall> call;
    bool lasts = false;  // until the client side ends the call
  };

  // The bytes of a message of `type`.
  std::string AnyMessage(FuzzBytes& bytes, const google::protobuf::Descriptor* type);
  void SendBytes(Stream& stream, const std::string& message);

  FuzzDaemon& daemon_;
  grpc::GenericStub stub_;
  Known known_;
  std::vector<const google::protobuf::MethodDescriptor*> methods_;  // methods that take one message
  std::vector<Stream> streams_;
  std::vector<Call> calls_;
  std::atomic<int> unanswered_{0};  // segment calls
};

}  // namespace vrambroker

#endif  // VRAMBROKER_TESTS_FUZZ_FUZZ_RUN_H_
