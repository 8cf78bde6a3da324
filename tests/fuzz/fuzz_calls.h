// SPDX-License-Identifier: Apache-2.0
//
// Makes calls of the daemon from the bytes of an input: messages of any type, well-formed or not. Ids from earlier
// answers bring calls beyond "no such session".
#ifndef VRAMBROKER_TESTS_FUZZ_FUZZ_CALLS_H_
#define VRAMBROKER_TESTS_FUZZ_FUZZ_CALLS_H_

#include <google/protobuf/message.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include <chrono>
#include <cstdint>
#include <deque>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "allocator/base/mutex.h"

namespace vrambroker {

class FuzzBytes {
 public:
  FuzzBytes(const uint8_t* data, size_t size) : at_(data), end_(data + size) {}

  bool empty() const { return at_ == end_; }
  // The next byte; 0 at the end.
  uint64_t Next() { return empty() ? 0 : *at_++; }
  template <typename Choices>
  auto Pick(const Choices& choices) {
    return choices[Next() % std::size(choices)];
  }
  // The next `count` bytes, or fewer at the end.
  std::string Take(size_t count);

 private:
  const uint8_t* at_;
  const uint8_t* const end_;
};

// An input's knowledge of the daemon. Thread-safe, because answers come on gRPC's threads.
class Known {
 public:
  explicit Known(std::vector<uint64_t> ids) : ids_(std::move(ids)) {}
  // Learns every id and every byte string of a message.
  void LearnFrom(const google::protobuf::Message& message) ABSL_LOCKS_EXCLUDED(mu_);
  uint64_t Id(uint64_t which) const ABSL_LOCKS_EXCLUDED(mu_);
  std::string Token(uint64_t which) const ABSL_LOCKS_EXCLUDED(mu_);

 private:
  mutable Mutex mu_;
  std::vector<uint64_t> ids_ ABSL_GUARDED_BY(mu_);
  std::vector<std::string> tokens_ ABSL_GUARDED_BY(mu_);
};

// Sets fields of `message` from the bytes.
void FillMessage(FuzzBytes& bytes, const Known& known, google::protobuf::Message& message);

// A new message of a type that the program is linked with.
std::unique_ptr<google::protobuf::Message> NewMessage(const google::protobuf::Descriptor* type);

// A call of any method. The caller chooses the bytes of the messages. Safe to use from one thread.
class FuzzCall : public grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  // Answers have the type `answer`, and `known` learns from the answers.
  FuzzCall(grpc::GenericStub* stub, const std::string& method, const google::protobuf::Descriptor* answer,
           Known* known);
  // Waits for the end. REQUIRES: AwaitEnd() has returned true, or Cancel() was called.
  ~FuzzCall() override;

  void Write(const std::string& bytes) ABSL_LOCKS_EXCLUDED(mu_);
  void HalfClose() ABSL_LOCKS_EXCLUDED(mu_);
  void Cancel() { context_.TryCancel(); }

  // Numbers of answers so far: results of calls (and welcomes), and answers of every kind.
  size_t results() const ABSL_LOCKS_EXCLUDED(mu_);
  size_t answers() const ABSL_LOCKS_EXCLUDED(mu_);
  bool ended() const ABSL_LOCKS_EXCLUDED(mu_);
  // Returns false without an answer or an end within `patience`.
  bool AwaitFirst(std::chrono::milliseconds patience) ABSL_LOCKS_EXCLUDED(mu_);
  // Returns false without `count` results of calls or an end within `patience`.
  bool AwaitAnswers(size_t count, std::chrono::milliseconds patience) ABSL_LOCKS_EXCLUDED(mu_);
  bool AwaitEnd(std::chrono::milliseconds patience) ABSL_LOCKS_EXCLUDED(mu_);

 private:
  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnDone(const grpc::Status& status) override;
  void WriteNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const google::protobuf::Descriptor* const answer_type_;
  Known& known_;
  grpc::ClientContext context_;
  grpc::ByteBuffer incoming_;  // being read

  mutable Mutex mu_;
  CondVar changed_;
  std::deque<grpc::ByteBuffer> outgoing_ ABSL_GUARDED_BY(mu_);
  bool writing_ ABSL_GUARDED_BY(mu_) = false;
  bool broken_ ABSL_GUARDED_BY(mu_) = false;  // writes are impossible
  bool half_close_ ABSL_GUARDED_BY(mu_) = false;
  bool half_closed_ ABSL_GUARDED_BY(mu_) = false;
  size_t results_ ABSL_GUARDED_BY(mu_) = 0;
  size_t answers_ ABSL_GUARDED_BY(mu_) = 0;
  bool ended_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace vrambroker

#endif  // VRAMBROKER_TESTS_FUZZ_FUZZ_CALLS_H_
