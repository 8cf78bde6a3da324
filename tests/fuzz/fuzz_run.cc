// SPDX-License-Identifier: Apache-2.0
#include "tests/fuzz/fuzz_run.h"

#include <google/protobuf/descriptor.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <iostream>
#include <utility>

#include "absl/strings/str_cat.h"
#include "vrambroker/v1/admin.pb.h"

namespace vrambroker {
namespace {

using google::protobuf::Descriptor;
using std::chrono::milliseconds;

constexpr milliseconds kSoon(5);  // wait before the next step, so that an input repeats its order
constexpr milliseconds kPatience(15'000);

bool Shows() {
  static const bool shows = std::getenv("SHOW_OPERATIONS") != nullptr;  // for a look into a crash
  return shows;
}

bool IsAnswered(const v1::SessionRequest& request) {
  using Request = v1::SessionRequest;
  switch (request.message_case()) {
    case Request::kHello:
    case Request::kAllocate:
    case Request::kFree:
    case Request::kLease:
    case Request::kReturnSegments:
    case Request::kExplain:
      return true;
    default:
      return false;
  }
}

}  // namespace

FuzzRun::FuzzRun() : daemon_(FuzzDaemon::Get()), stub_(daemon_.channel()), known_(daemon_.control_ids()) {
  for (const char* name : {"vrambroker.v1.Broker", "vrambroker.v1.Admin"}) {
    const auto* service = google::protobuf::DescriptorPool::generated_pool()->FindServiceByName(name);
    for (int i = 0; i < service->method_count(); ++i) {
      if (!service->method(i)->client_streaming()) methods_.push_back(service->method(i));
    }
  }
}

std::string FuzzRun::AnyMessage(FuzzBytes& bytes, const Descriptor* type) {
  const uint64_t kind = bytes.Next();
  if (kind >= 240) return bytes.Take(bytes.Next());
  const std::unique_ptr<google::protobuf::Message> message = NewMessage(type);
  FillMessage(bytes, known_, *message);
  std::string text = message->SerializePartialAsString();
  if (Shows()) std::cerr << type->name() << " {" << message->ShortDebugString() << "}\n";
  for (uint64_t changes = kind < 200 ? 0 : kind % 4; changes > 0 && !text.empty(); --changes) {
    text[bytes.Next() % text.size()] = static_cast<char>(bytes.Next());
  }
  return text;
}

void FuzzRun::CallAny(FuzzBytes& bytes) {
  if (calls_.size() >= kMostCalls) return;
  const auto* method = bytes.Pick(methods_);
  const std::string message = AnyMessage(bytes, method->input_type());
  if (Shows()) std::cerr << "  to " << method->full_name() << '\n';
  calls_.push_back({.call = std::make_unique<FuzzCall>(
                        &stub_, absl::StrCat("/", method->service()->full_name(), "/", method->name()),
                        method->output_type(), &known_),
                    .lasts = method->output_type() == v1::HoldRecordingResponse::descriptor()});
  FuzzCall& call = *calls_.back().call;
  call.Write(message);
  call.HalfClose();
  (void)(calls_.back().lasts ? call.AwaitFirst(kSoon) : call.AwaitEnd(kSoon));  // questions take longer
}

void FuzzRun::MakeSegmentCall(FuzzBytes& bytes) {
  const uint64_t kind = bytes.Next();
  v1::SegmentCall call;
  if (!call.ParseFromString(AnyMessage(bytes, v1::SegmentCall::descriptor())) ||
      call.call_case() == v1::SegmentCall::CALL_NOT_SET) {
    return;
  }
  if (kind < 200) daemon_.NameSession(kind, &call);
  const bool takes_answer = kind % 4 != 0;
  ++unanswered_;
  auto is_answered = std::make_shared<std::atomic<bool>>(false);
  const Caller caller = {.pid = getpid(), .uid = geteuid(), .gid = getegid(), .pidfd = std::make_shared<UniqueFd>()};
  daemon_.segment_calls().Make(
      caller, call,
      [this, takes_answer, is_answered](const v1::CallResult& result, const std::vector<UniqueFd>& /*descriptors*/) {
        if (takes_answer) known_.LearnFrom(result);
        Require(!is_answered->exchange(true), "no segment call is answered twice");
        --unanswered_;
        return takes_answer;
      });
}

void FuzzRun::OpenStream() {
  if (streams_.size() >= kMostStreams) return;
  if (Shows()) std::cerr << "stream " << streams_.size() << " opens\n";
  streams_.push_back({.call = std::make_unique<FuzzCall>(&stub_, "/vrambroker.v1.Broker/Session",
                                                         v1::SessionResponse::descriptor(), &known_)});
}

void FuzzRun::SendAny(FuzzBytes& bytes) {
  if (streams_.empty()) return;
  const uint64_t which = bytes.Next() % streams_.size();
  const std::string message = AnyMessage(bytes, v1::SessionRequest::descriptor());
  if (Shows()) std::cerr << "  on stream " << which << '\n';
  SendBytes(streams_[which], message);
}

void FuzzRun::Send(size_t stream, const v1::SessionRequest& request) {
  SendBytes(streams_.at(stream), request.SerializeAsString());
}

void FuzzRun::SendBytes(Stream& stream, const std::string& message) {
  if (stream.broken) return;
  stream.call->Write(message);
  v1::SessionRequest request;
  if (!request.ParseFromString(message) || !IsAnswered(request)) return;  // the message may end the stream
  ++stream.expected;
  (void)stream.call->AwaitAnswers(stream.expected, kSoon);
}

void FuzzRun::BreakStream(FuzzBytes& bytes) {
  if (streams_.empty()) return;
  Stream& stream = streams_[bytes.Next() % streams_.size()];
  stream.broken = true;
  if (bytes.Next() % 2 == 0) {
    stream.call->Cancel();
  } else {
    stream.call->HalfClose();
  }
}

void FuzzRun::End(FuzzBytes& bytes) {
  for (Stream& stream : streams_) {
    if (stream.broken) continue;
    Require(stream.call->AwaitAnswers(stream.expected, kPatience), "every call on a stream is answered");
    Require(stream.call->results() <= stream.expected, "no call is answered twice");
  }
  for (Stream& stream : streams_) {
    if (stream.broken) continue;
    switch (bytes.Next() % 4) {
      case 0:
        stream.call->Cancel();
        break;
      case 1:
        stream.call->HalfClose();
        break;
      default:
        v1::SessionRequest goodbye;
        goodbye.mutable_goodbye();
        stream.call->Write(goodbye.SerializeAsString());
        break;
    }
  }
  for (Stream& stream : streams_) Require(stream.call->AwaitEnd(kPatience), "a stream ends");
  for (const auto& [call, lasts] : calls_) {
    if (lasts) {
      Require(call->AwaitFirst(kPatience), "every call that lasts is answered");
      call->Cancel();
    }
    Require(call->AwaitEnd(kPatience), "every call is answered");
  }
  Require(WaitFor(kPatience, [&] { return unanswered_ == 0; }), "every segment call is answered");
  streams_.clear();
  calls_.clear();
  daemon_.CheckAndReset();
}

}  // namespace vrambroker
