// SPDX-License-Identifier: Apache-2.0
#include "client/heap/remote_heap.h"

#include <functional>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "allocator/device/device.h"
#include "allocator/wire/heap_convert.h"
#include "client/heap/give_up.h"
#include "client/heap/scope_stack.h"
#include "client/heap/snapshot_parts.h"
#include "client/heap/stream_waits.h"

namespace vrambroker::client_internal {

absl::StatusOr<Buffer> RemoteHeap::Allocate(uint64_t bytes, Stream stream) {
  if (bytes == 0) return absl::InvalidArgumentError("bytes: must be 1 or more");
  if (absl::Status status = session_.CheckUsable(); !status.ok()) return status;
  absl::StatusOr<SegmentOpener*> opener = session_.DeviceFor(ordinal());
  if (!opener.ok()) return opener.status();
  device_.store(*opener, std::memory_order_release);

  v1::AllocateRequest request;
  request.set_device(static_cast<uint32_t>(ordinal()));
  request.set_requested_bytes(bytes);
  request.set_stream(stream);
  request.set_wait_ms(session_.wait_ms());
  for (const Scope& scope : ScopesAround(CurrentScope())) {
    v1::MemoryScope* const within = request.add_scope();
    within->set_name(scope.name);
    within->set_file(scope.file);
    within->set_line(scope.line);
  }
  std::function<bool()> give_up;
  if (session_.wait_ms() > 0 && GiveUpScope::IsActive()) give_up = &GiveUpScope::GaveUp;
  if (give_up != nullptr && give_up()) return GiveUpScope::Error();
  const std::shared_ptr<Link> link = session_.link();
  session_.CountCall();
  const absl::StatusOr<v1::AllocateResponse> response =
      link->stream->Allocate(request, session_.options().call_timeout, give_up);
  if (absl::IsCancelled(response.status())) return GiveUpScope::Error();
  if (!response.ok()) return response.status();
  bool fetched = false;
  absl::StatusOr<void*> base = mappings_.Open(response->segment_id(), response->segment_bytes(), stream, *opener, [&] {
    absl::StatusOr<SegmentHandle> handle = session_.FetchHandle(response->handle());
    fetched = handle.ok();
    return handle;
  });
  if (fetched) base = link->Opened(**opener, ordinal(), std::move(base));
  if (!base.ok()) {
    link->stream->FreeLater(response->block_id());
    return base.status();
  }
  {
    MutexLock lock(mu_);
    blocks_[response->block_id()] = {.segment = response->segment_id(), .offset = response->offset_bytes()};
  }
  return MakeBuffer(response->block_id(), static_cast<char*>(*base) + response->offset_bytes(), bytes,
                    response->block_bytes());
}

void RemoteHeap::Free(uint64_t block) {
  if (session_.IsForked()) return;
  session_.CountCall();
  session_.link()->stream->FreeLater(block);
  MutexLock lock(mu_);
  blocks_.erase(block);
}

absl::Status RemoteHeap::FreeAndWait(uint64_t block) {
  if (absl::Status status = session_.CheckUsable(); !status.ok()) {
    Free(block);
    return status;
  }
  const absl::Duration patience = session_.Patience();
  if (patience == absl::ZeroDuration()) {  // without a waiting caller the answers would go unread
    Free(block);
    return absl::DeadlineExceededError("the daemon does not answer; it will have the block back when it does");
  }
  session_.CountCall();
  absl::Status status = session_.link()->stream->Free(block, patience);
  session_.NoteAnswer(status);
  MutexLock lock(mu_);
  blocks_.erase(block);
  return status;
}

absl::Status RemoteHeap::RecordStream(uint64_t /*block*/, Stream /*stream*/) {
  return absl::FailedPreconditionError(
      "RecordStream: the daemon knows nothing of this process's streams; use Placement::kLeased");
}

uint64_t RemoteHeap::SegmentOf(uint64_t block) const {
  MutexLock lock(mu_);
  return blocks_.at(block).segment;
}

uint64_t RemoteHeap::OffsetOf(uint64_t block) const {
  MutexLock lock(mu_);
  return blocks_.at(block).offset;
}

absl::StatusOr<void*> RemoteHeap::Malloc(uint64_t bytes, Stream stream) {
  absl::StatusOr<Buffer> buffer = Allocate(bytes, stream);
  if (!buffer.ok()) return buffer.status();
  void* const data = buffer->data();
  MutexLock lock(mu_);
  pointers_[data] = {.buffer = *std::move(buffer), .stream = stream};
  return data;
}

absl::Status RemoteHeap::FreePointer(void* pointer, std::optional<Stream> stream) {
  Owned owned;  // wait and give back without the lock
  {
    MutexLock lock(mu_);
    const auto it = pointers_.find(pointer);
    if (it == pointers_.end()) return absl::NotFoundError("no block begins there");
    owned = std::move(it->second);
    pointers_.erase(it);
  }
  if (!stream.has_value() || *stream == owned.stream) return absl::OkStatus();
  const absl::Status done = StreamWaits(device()).WaitFor(stream);
  if (done.ok()) return absl::OkStatus();
  MutexLock lock(mu_);
  pointers_[pointer] = std::move(owned);
  return absl::FailedPreconditionError(
      absl::StrCat("Free: nothing was freed, since the work on the stream cannot be waited for: ", done.message()));
}

absl::StatusOr<void*> RemoteHeap::LeaseSegment(uint64_t /*bytes*/, bool /*now*/) {
  return absl::FailedPreconditionError("LeaseSegment: this client allocates remotely; use Placement::kLeased");
}

std::optional<uint64_t> RemoteHeap::SizeOf(const void* pointer) const {
  MutexLock lock(mu_);
  const auto it = pointers_.find(const_cast<void*>(pointer));
  return it == pointers_.end() ? std::nullopt : std::optional<uint64_t>(it->second.buffer.size());
}

absl::StatusOr<uint64_t> RemoteHeap::EmptyCache() {
  v1::EmptyCacheRequest request;
  request.set_session_id(session_.session_id());
  v1::EmptyCacheResponse response;
  if (absl::Status status = session_.Call(&v1::Broker::Stub::EmptyCache, request, &response); !status.ok()) {
    return status;
  }
  return response.released_bytes();
}

absl::StatusOr<MemoryStats> RemoteHeap::GetMemoryStats() {
  v1::GetMemoryStatsRequest request;
  request.set_session_id(session_.session_id());
  request.set_device(static_cast<uint32_t>(ordinal()));
  v1::GetMemoryStatsResponse response;
  if (absl::Status status = session_.Call(&v1::Broker::Stub::GetMemoryStats, request, &response); !status.ok()) {
    return status;
  }
  return StatsFromProto(response.stats());
}

absl::Status RemoteHeap::ResetPeakStats(bool accumulated) {
  v1::ResetPeakStatsRequest request;
  request.set_session_id(session_.session_id());
  request.set_device(static_cast<uint32_t>(ordinal()));
  request.set_accumulated(accumulated);
  v1::ResetPeakStatsResponse response;
  return session_.Call(&v1::Broker::Stub::ResetPeakStats, request, &response);
}

absl::Status RemoteHeap::ResetTotals() {
  return absl::FailedPreconditionError(
      "of a remote session totals are reset together with the peaks; lease segments instead (placement)");
}

absl::Status RemoteHeap::SetMemoryFraction(double /*fraction*/) {
  return absl::FailedPreconditionError(
      "the daemon alone bounds a remote session: lease segments instead (placement), connect with a limit, or have an "
      "operator change it (vramctl limit)");
}

absl::StatusOr<HeapSnapshot> RemoteHeap::TakeSnapshot(bool with_history) {
  v1::GetSnapshotRequest request;
  request.mutable_session()->set_id(session_.session_id());
  request.set_device(static_cast<uint32_t>(ordinal()));
  request.set_without_history(!with_history);
  HeapSnapshot snapshot;
  absl::Status status = session_.CallOver([&](SessionStream& stream, grpc::ClientContext* context) {
    return ReadSnapshotParts(stream.admin().GetSnapshot(context, request).get(), context, &snapshot);
  });
  if (!status.ok()) return status;
  if (!with_history) snapshot.history.clear();  // a daemon that does not know the field sends history
  return snapshot;
}

bool RemoteHeap::InUse() {
  MutexLock lock(mu_);
  return !blocks_.empty();
}

}  // namespace vrambroker::client_internal
