// SPDX-License-Identifier: Apache-2.0
#include "client/vrambroker/client.h"

#include <cstdlib>
#include <utility>

#include "absl/strings/cord.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "allocator/bytes.h"
#include "allocator/device.h"
#include "client/session_client.h"
#include "vrambroker/v1/types.pb.h"

namespace vrambroker {

absl::StatusOr<Limit> ParseLimit(absl::string_view text) {
  double fraction = 0;
  if (absl::StrContains(text, '.') && absl::SimpleAtod(text, &fraction)) {
    if (fraction >= 0 && fraction <= 1) return Limit(fraction);
    return absl::InvalidArgumentError(
        absl::StrCat("limit '", text, "': a fraction of the capacity must be within 0.0 and 1.0"));
  }
  if (text == "1") {
    return absl::InvalidArgumentError("limit '1' may mean all or one byte: write 1.0 for all of the capacity, or 1B");
  }
  absl::StatusOr<uint64_t> bytes = ParseBytes(text);
  if (!bytes.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat("limit '", text, "': write a fraction as 0.5, or a size as 512MiB or plain bytes"));
  }
  return Limit(*bytes);
}

std::string DefaultSocketDir() {
  const char* dir = std::getenv("VRAMBROKER_SOCKET_DIR");
  return dir != nullptr && *dir != '\0' ? dir : "/run/vrambroker";
}

const char* OutOfMemoryCauseName(OutOfMemory::Cause cause) {
  switch (cause) {
    case OutOfMemory::Cause::kUnknown:
      break;
    case OutOfMemory::Cause::kLimit:
      return "LIMIT";
    case OutOfMemory::Cause::kCapacity:
      return "CAPACITY";
    case OutOfMemory::Cause::kFragmentation:
      return "FRAGMENTATION";
    case OutOfMemory::Cause::kLargerThanDevice:
      return "LARGER_THAN_DEVICE";
  }
  return "UNKNOWN";
}

std::optional<OutOfMemory> GetOutOfMemory(const absl::Status& status) {
  const absl::optional<absl::Cord> payload = status.GetPayload("type.googleapis.com/vrambroker.v1.OutOfMemory");
  v1::OutOfMemory proto;
  if (!payload.has_value() || !proto.ParseFromString(std::string(*payload))) return std::nullopt;
  OutOfMemory oom;
  switch (proto.cause()) {
    case v1::OutOfMemory::CAUSE_LIMIT:
      oom.cause = OutOfMemory::Cause::kLimit;
      break;
    case v1::OutOfMemory::CAUSE_CAPACITY:
      oom.cause = OutOfMemory::Cause::kCapacity;
      break;
    case v1::OutOfMemory::CAUSE_FRAGMENTATION:
      oom.cause = OutOfMemory::Cause::kFragmentation;
      break;
    case v1::OutOfMemory::CAUSE_LARGER_THAN_DEVICE:
      oom.cause = OutOfMemory::Cause::kLargerThanDevice;
      break;
    default:
      break;
  }
  oom.device = static_cast<int>(proto.device());
  oom.requested_bytes = proto.requested_bytes();
  oom.segment_bytes = proto.segment_bytes();
  oom.limit_bytes = proto.limit_bytes();
  oom.reserved_bytes = proto.reserved_bytes();
  oom.allocated_bytes = proto.allocated_bytes();
  oom.idle_bytes = proto.idle_bytes();
  oom.largest_free_block_bytes = proto.largest_free_block_bytes();
  oom.device_capacity_bytes = proto.device_capacity_bytes();
  oom.device_available_bytes = proto.device_available_bytes();
  for (const v1::OutOfMemory::Holder& holder : proto.largest_holders()) {
    oom.largest_holders.push_back({.client = holder.client(),
                                   .reserved_bytes = holder.reserved_bytes(),
                                   .allocated_bytes = holder.allocated_bytes()});
  }
  oom.advice = proto.advice();
  return oom;
}

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  if (this == &other) return *this;
  Release();
  session_ = std::move(other.session_);
  opener_ = std::exchange(other.opener_, nullptr);
  data_ = std::exchange(other.data_, nullptr);
  size_ = std::exchange(other.size_, 0);
  block_bytes_ = std::exchange(other.block_bytes_, 0);
  block_id_ = std::exchange(other.block_id_, 0);
  segment_id_ = std::exchange(other.segment_id_, 0);
  offset_bytes_ = std::exchange(other.offset_bytes_, 0);
  device_ = std::exchange(other.device_, 0);
  return *this;
}

absl::Status Buffer::CheckRange(uint64_t offset, uint64_t bytes) const {
  if (offset <= size_ && bytes <= size_ - offset) return absl::OkStatus();
  return absl::OutOfRangeError(absl::StrCat("bytes [", offset, ", +", bytes, ") of a buffer of ", size_, " bytes"));
}

absl::Status Buffer::Write(uint64_t offset, const void* from, uint64_t bytes) {
  if (absl::Status status = CheckRange(offset, bytes); !status.ok() || bytes == 0) return status;
  return opener_->CopyIn(static_cast<char*>(data_) + offset, from, bytes);
}

absl::Status Buffer::Read(uint64_t offset, void* to, uint64_t bytes) const {
  if (absl::Status status = CheckRange(offset, bytes); !status.ok() || bytes == 0) return status;
  return opener_->CopyOut(to, static_cast<const char*>(data_) + offset, bytes);
}

void Buffer::Release() {
  if (session_ == nullptr) return;
  session_->FreeLater(block_id_);
  session_.reset();
}

absl::Status Buffer::Reset() {
  if (session_ == nullptr) return absl::OkStatus();
  const std::shared_ptr<client_internal::SessionClient> session = std::move(session_);
  data_ = nullptr;
  size_ = 0;
  return session->Free(std::exchange(block_id_, 0));
}

absl::StatusOr<Client> Client::Connect(const ClientOptions& options) {
  absl::StatusOr<std::shared_ptr<client_internal::SessionClient>> session =
      client_internal::SessionClient::Open(options);
  if (!session.ok()) return session.status();
  return Client(*std::move(session));
}

absl::StatusOr<Buffer> Client::Allocate(uint64_t bytes, int device, uint64_t stream) {
  return session_->Allocate(bytes, device, stream);
}
absl::StatusOr<uint64_t> Client::EmptyCache() {
  return session_->EmptyCache();
}
absl::StatusOr<MemoryStats> Client::GetMemoryStats(int device) {
  return session_->GetMemoryStats(device);
}
absl::Status Client::ResetPeakStats(int device) {
  return session_->ResetPeakStats(device, /*accumulated=*/false);
}
absl::Status Client::ResetStats(int device) {
  return session_->ResetPeakStats(device, /*accumulated=*/true);
}
uint64_t Client::session_id() const {
  return session_->session_id();
}
const std::string& Client::name() const {
  return session_->name();
}
const std::vector<DeviceInfo>& Client::devices() const {
  return session_->devices();
}
uint64_t Client::limit_bytes(int device) const {
  return session_->limit_bytes(device);
}
const std::vector<std::string>& Client::warnings() const {
  return session_->warnings();
}
absl::Status Client::status() const {
  return session_->status();
}

}  // namespace vrambroker
