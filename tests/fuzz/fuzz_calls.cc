// SPDX-License-Identifier: Apache-2.0
#include "tests/fuzz/fuzz_calls.h"

#include <google/protobuf/descriptor.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/match.h"
#include "allocator/base/bytes.h"
#include "vrambroker/v1/broker.pb.h"

namespace vrambroker {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;

constexpr size_t kMostKnown = 200;
constexpr int kDeepest = 6;

uint64_t Number(FuzzBytes& bytes, const Known& known) {
  static constexpr uint64_t kInteresting[] = {0,
                                              1,
                                              2,
                                              3,
                                              512,
                                              1000,
                                              2_MiB,
                                              4_MiB,
                                              20_MiB,
                                              1_MiB + 1,
                                              64_MiB,
                                              66_MiB,
                                              1_GiB,
                                              ~uint64_t{0},
                                              uint64_t{1} << 63,
                                              ~uint64_t{0} - (2_MiB - 1)};
  const uint64_t kind = bytes.Next();
  if (kind < 128) return known.Id(kind);
  return kInteresting[kind % std::size(kInteresting)];
}

std::string Text(FuzzBytes& bytes, const Known& known) {
  static const std::string kTexts[] = {"",
                                       "control",
                                       "control-remote",
                                       "fuzz",
                                       "max_split_size_mb:64",
                                       "a b",
                                       "roundup_power2_divisions:[256:1,>:4],garbage_collection_threshold:0.5",
                                       std::string(64, 'n'),
                                       std::string(5000, 'x'),
                                       std::string(16, '\0')};
  const uint64_t kind = bytes.Next();
  if (kind < 64) return bytes.Pick(kTexts);
  if (kind < 192) return known.Token(kind);
  return bytes.Take(kind % 32);
}

void Fill(FuzzBytes& bytes, const Known& known, int depth, Message& message);

// Sets `field`, or adds to a repeated field.
void FillField(FuzzBytes& bytes, const Known& known, int depth, const FieldDescriptor* field, Message& message) {
  const Reflection& reflection = *message.GetReflection();
  const bool many = field->is_repeated();
  switch (field->cpp_type()) {
    case FieldDescriptor::CPPTYPE_MESSAGE:
      if (depth < kDeepest) {
        Fill(bytes, known, depth + 1,
             many ? *reflection.AddMessage(&message, field) : *reflection.MutableMessage(&message, field));
      }
      return;
    case FieldDescriptor::CPPTYPE_UINT64: {
      const uint64_t value = Number(bytes, known);
      return many ? reflection.AddUInt64(&message, field, value) : reflection.SetUInt64(&message, field, value);
    }
    case FieldDescriptor::CPPTYPE_UINT32: {
      // Mostly device ordinals; the daemon has two devices.
      const auto value = static_cast<uint32_t>(bytes.Next() % 4 < 3 ? bytes.Next() % 2 : Number(bytes, known));
      return many ? reflection.AddUInt32(&message, field, value) : reflection.SetUInt32(&message, field, value);
    }
    case FieldDescriptor::CPPTYPE_INT64:
      return reflection.SetInt64(&message, field, static_cast<int64_t>(Number(bytes, known)));
    case FieldDescriptor::CPPTYPE_INT32:
      return reflection.SetInt32(&message, field, static_cast<int32_t>(Number(bytes, known)));
    case FieldDescriptor::CPPTYPE_BOOL:
      return reflection.SetBool(&message, field, bytes.Next() % 2 == 0);
    case FieldDescriptor::CPPTYPE_ENUM:
      return reflection.SetEnumValue(&message, field, static_cast<int>(bytes.Next() % 7) - 1);
    case FieldDescriptor::CPPTYPE_DOUBLE: {
      static constexpr double kDoubles[] = {
          0, 0.5, 1, -1, 2, 1e300, std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()};
      return reflection.SetDouble(&message, field, bytes.Pick(kDoubles));
    }
    case FieldDescriptor::CPPTYPE_STRING: {
      const std::string value = Text(bytes, known);
      return many ? reflection.AddString(&message, field, value) : reflection.SetString(&message, field, value);
    }
    default:
      return;
  }
}

void Fill(FuzzBytes& bytes, const Known& known, int depth, Message& message) {
  const auto* type = message.GetDescriptor();
  for (int i = 0; i < type->oneof_decl_count(); ++i) {
    const auto* oneof = type->oneof_decl(i);
    const uint64_t member = bytes.Next();
    if (member == 255) continue;
    FillField(bytes, known, depth, oneof->field(static_cast<int>(member) % oneof->field_count()), message);
  }
  for (int i = 0; i < type->field_count() && !bytes.empty(); ++i) {
    const FieldDescriptor* field = type->field(i);
    if (field->real_containing_oneof() != nullptr) continue;
    const uint64_t kind = bytes.Next();
    if (kind < 64) continue;
    size_t count = 1;
    if (field->is_repeated()) count = kind < 224 ? kind % 4 : kind < 252 ? 65 : 5000;
    for (size_t k = 0; k < count; ++k) FillField(bytes, known, depth, field, message);
  }
}

grpc::ByteBuffer ToBuffer(const std::string& bytes) {
  const grpc::Slice slice(bytes);
  return {&slice, 1};
}

std::string ToString(const grpc::ByteBuffer& buffer) {
  std::vector<grpc::Slice> slices;
  std::string bytes;
  if (!buffer.Valid() || !buffer.Dump(&slices).ok()) return bytes;
  for (const grpc::Slice& slice : slices) bytes.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  return bytes;
}

}  // namespace

std::string FuzzBytes::Take(size_t count) {
  const size_t taken = std::min(count, static_cast<size_t>(end_ - at_));
  std::string text(reinterpret_cast<const char*>(at_), taken);
  at_ += taken;
  return text;
}

void Known::LearnFrom(const Message& message) {
  const Reflection& reflection = *message.GetReflection();
  std::vector<const FieldDescriptor*> fields;
  reflection.ListFields(message, &fields);
  for (const FieldDescriptor* field : fields) {
    const int count = field->is_repeated() ? reflection.FieldSize(message, field) : 1;
    for (int i = 0; i < count && i < 64; ++i) {
      if (field->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE) {
        LearnFrom(field->is_repeated() ? reflection.GetRepeatedMessage(message, field, i)
                                       : reflection.GetMessage(message, field));
        continue;
      }
      MutexLock lock(mu_);
      const bool is_id = absl::EndsWith(field->name(), "id") || absl::EndsWith(field->name(), "ids");
      if (is_id && field->cpp_type() == FieldDescriptor::CPPTYPE_UINT64 && ids_.size() < kMostKnown) {
        ids_.push_back(field->is_repeated() ? reflection.GetRepeatedUInt64(message, field, i)
                                            : reflection.GetUInt64(message, field));
      } else if (field->cpp_type() == FieldDescriptor::CPPTYPE_STRING && !field->is_repeated() &&
                 tokens_.size() < kMostKnown) {
        tokens_.push_back(reflection.GetString(message, field));
      }
    }
  }
}

uint64_t Known::Id(uint64_t which) const {
  MutexLock lock(mu_);
  return ids_[which % ids_.size()];
}

std::string Known::Token(uint64_t which) const {
  MutexLock lock(mu_);
  return tokens_.empty() ? std::string() : tokens_[which % tokens_.size()];
}

void FillMessage(FuzzBytes& bytes, const Known& known, Message& message) {
  Fill(bytes, known, 0, message);
}

std::unique_ptr<Message> NewMessage(const google::protobuf::Descriptor* type) {
  return std::unique_ptr<Message>(google::protobuf::MessageFactory::generated_factory()->GetPrototype(type)->New());
}

FuzzCall::FuzzCall(grpc::GenericStub* stub, const std::string& method, const google::protobuf::Descriptor* answer,
                   Known* known)
    : answer_type_(answer), known_(*known) {
  stub->PrepareBidiStreamingCall(&context_, method, {}, this);
  AddHold();  // for writes, which start at the input's steps
  StartRead(&incoming_);
  StartCall();
}

FuzzCall::~FuzzCall() {
  MutexLock lock(mu_);
  while (!ended_) changed_.Wait(mu_);
}

void FuzzCall::Write(const std::string& bytes) {
  MutexLock lock(mu_);
  if (half_close_ || broken_) return;
  outgoing_.push_back(ToBuffer(bytes));
  WriteNext();
}

void FuzzCall::HalfClose() {
  MutexLock lock(mu_);
  half_close_ = true;
  WriteNext();
}

void FuzzCall::WriteNext() {
  if (writing_ || broken_) return;
  if (!outgoing_.empty()) {
    writing_ = true;
    StartWrite(&outgoing_.front());
  } else if (half_close_ && !half_closed_) {
    half_closed_ = true;
    StartWritesDone();
  }
}

void FuzzCall::OnWriteDone(bool ok) {
  MutexLock lock(mu_);
  writing_ = false;
  outgoing_.pop_front();
  if (!ok) broken_ = true;
  WriteNext();
}

void FuzzCall::OnReadDone(bool ok) {
  if (!ok) {
    // The call or the reading is over, so no more writes follow.
    MutexLock lock(mu_);
    broken_ = true;
    RemoveHold();
    return;
  }
  const std::unique_ptr<Message> answer = NewMessage(answer_type_);
  const bool readable = answer->ParseFromString(ToString(incoming_));
  if (readable) known_.LearnFrom(*answer);
  const auto* response = dynamic_cast<const v1::SessionResponse*>(answer.get());
  incoming_.Clear();
  {
    MutexLock lock(mu_);
    ++answers_;
    if (response != nullptr && (response->has_result() || response->has_welcome())) ++results_;
    changed_.NotifyAll();
  }
  StartRead(&incoming_);
}

void FuzzCall::OnDone(const grpc::Status& /*status*/) {
  MutexLock lock(mu_);
  ended_ = true;
  changed_.NotifyAll();
}

size_t FuzzCall::results() const {
  MutexLock lock(mu_);
  return results_;
}

size_t FuzzCall::answers() const {
  MutexLock lock(mu_);
  return answers_;
}

bool FuzzCall::ended() const {
  MutexLock lock(mu_);
  return ended_;
}

bool FuzzCall::AwaitFirst(std::chrono::milliseconds patience) {
  const auto deadline = std::chrono::steady_clock::now() + patience;
  MutexLock lock(mu_);
  while (answers_ == 0 && !ended_) {
    if (!changed_.WaitUntil(mu_, deadline)) return false;
  }
  return true;
}

bool FuzzCall::AwaitAnswers(size_t count, std::chrono::milliseconds patience) {
  const auto deadline = std::chrono::steady_clock::now() + patience;
  MutexLock lock(mu_);
  while (results_ < count && !ended_) {
    if (!changed_.WaitUntil(mu_, deadline)) return false;
  }
  return true;
}

bool FuzzCall::AwaitEnd(std::chrono::milliseconds patience) {
  const auto deadline = std::chrono::steady_clock::now() + patience;
  MutexLock lock(mu_);
  while (!ended_) {
    if (!changed_.WaitUntil(mu_, deadline)) return false;
  }
  return true;
}

}  // namespace vrambroker
