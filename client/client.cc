// SPDX-License-Identifier: Apache-2.0
#include "client/vrambroker/client.h"

#include <cstdlib>
#include <utility>

#include "absl/strings/str_cat.h"
#include "allocator/base/amounts.h"
#include "allocator/device/device.h"
#include "allocator/heap/memory_summary.h"
#include "allocator/replay/pickle.h"
#include "allocator/replay/torch_snapshot.h"
#include "client/session/session_client.h"
#include "client/session/snapshot_file.h"

namespace vrambroker {

absl::StatusOr<Limit> ParseLimit(absl::string_view text) {
  return ParseSizeOrShare(text);
}

std::string DefaultSocketDir() {
  const char* dir = std::getenv("VRAMBROKER_SOCKET_DIR");
  return dir != nullptr && *dir != '\0' ? dir : "/run/vrambroker";
}

uint64_t Buffer::segment_id() const {
  return heap_ == nullptr ? 0 : heap_->SegmentOf(block_);
}

uint64_t Buffer::offset_bytes() const {
  return heap_ == nullptr ? 0 : heap_->OffsetOf(block_);
}

absl::Status Buffer::CheckRange(uint64_t offset, uint64_t bytes) const {
  if (offset <= size_ && bytes <= size_ - offset) return absl::OkStatus();
  return absl::OutOfRangeError(
      absl::StrCat("bytes [", offset, ", +", bytes, ") are outside the buffer of ", size_, " bytes"));
}

absl::Status Buffer::Write(uint64_t offset, const void* from, uint64_t bytes) {
  if (absl::Status status = CheckRange(offset, bytes); !status.ok() || bytes == 0) return status;
  return heap_->device()->CopyIn(static_cast<char*>(data_) + offset, from, bytes);
}

absl::Status Buffer::Read(uint64_t offset, void* to, uint64_t bytes) const {
  if (absl::Status status = CheckRange(offset, bytes); !status.ok() || bytes == 0) return status;
  return heap_->device()->CopyOut(to, static_cast<const char*>(data_) + offset, bytes);
}

absl::Status Buffer::RecordStream(uint64_t stream) {
  return heap_ == nullptr ? absl::OkStatus() : heap_->RecordStream(block_, stream);
}

void Buffer::GiveBack() {
  heap_->Free(block_);
}

absl::Status Buffer::Reset() {
  if (heap_ == nullptr) return absl::OkStatus();
  data_ = nullptr;
  size_ = 0;
  block_bytes_ = 0;
  return std::exchange(heap_, nullptr)->FreeAndWait(std::exchange(block_, 0));
}

void Client::EndSession::operator()(client_internal::SessionClient* session) const {
  client_internal::SessionClient::End(std::unique_ptr<client_internal::SessionClient>(session));
}

absl::StatusOr<Client> Client::Connect(const ClientOptions& options) {
  absl::StatusOr<std::unique_ptr<client_internal::SessionClient>> session =
      client_internal::SessionClient::Open(options);
  if (!session.ok()) return session.status();
  return Client(std::unique_ptr<client_internal::SessionClient, EndSession>(session->release()));
}

absl::StatusOr<Buffer> Client::Allocate(uint64_t bytes, int device, uint64_t stream) {
  if (client_internal::Heap* heap = session_->FindHeap(device)) return heap->Allocate(bytes, stream);
  return session_->heap(device).status();
}
absl::StatusOr<void*> Client::Malloc(uint64_t bytes, int device, uint64_t stream) {
  if (client_internal::Heap* heap = session_->FindHeap(device)) return heap->Malloc(bytes, stream);
  return session_->heap(device).status();
}
absl::Status Client::Free(void* pointer) {
  return session_->FreePointer(pointer, std::nullopt);
}
absl::Status Client::Free(void* pointer, uint64_t stream) {
  return session_->FreePointer(pointer, stream);
}
absl::Status Client::RecordStream(void* pointer, uint64_t stream) {
  return session_->RecordStream(pointer, stream);
}
absl::StatusOr<void*> Client::LeaseSegment(uint64_t bytes, int device) {
  const absl::StatusOr<client_internal::Heap*> heap = session_->heap(device);
  return heap.ok() ? (*heap)->LeaseSegment(bytes, /*now=*/false) : heap.status();
}
absl::StatusOr<void*> Client::TryLeaseSegment(uint64_t bytes, int device) {
  const absl::StatusOr<client_internal::Heap*> heap = session_->heap(device);
  return heap.ok() ? (*heap)->LeaseSegment(bytes, /*now=*/true) : heap.status();
}
absl::Status Client::ReportSegmentUse(const SegmentUse& use, int device) {
  return session_->ReportSegmentUse(device, use);
}
absl::Status Client::ServeTrims(bool on) {
  const absl::StatusOr<client_internal::TrimRequests*> trims = session_->trims();
  if (trims.ok()) (*trims)->Serve(on);
  return trims.status();
}
absl::StatusOr<TrimRequest> Client::WaitForTrim(absl::Duration timeout) {
  const absl::StatusOr<client_internal::TrimRequests*> trims = session_->trims();
  if (!trims.ok()) return trims.status();
  return (*trims)->Wait(timeout);
}
absl::Status Client::EndTrim(uint64_t number) {
  const absl::StatusOr<client_internal::TrimRequests*> trims = session_->trims();
  return trims.ok() ? (*trims)->End(number) : trims.status();
}
void Client::BeginEnd() {
  session_->BeginEnd();
}
absl::Status Client::ReturnSegment(void* pointer) {
  return session_->ReturnSegment(pointer, std::nullopt);
}
absl::Status Client::ReturnSegment(void* pointer, uint64_t stream) {
  return session_->ReturnSegment(pointer, stream);
}
absl::Status Client::Write(void* pointer, uint64_t offset, const void* from, uint64_t bytes) {
  const absl::StatusOr<SegmentOpener*> device = session_->DeviceOf(pointer, offset, bytes);
  if (!device.ok() || bytes == 0) return device.status();
  return (*device)->CopyIn(static_cast<char*>(pointer) + offset, from, bytes);
}
absl::Status Client::Read(const void* pointer, uint64_t offset, void* to, uint64_t bytes) const {
  const absl::StatusOr<SegmentOpener*> device = session_->DeviceOf(pointer, offset, bytes);
  if (!device.ok() || bytes == 0) return device.status();
  return (*device)->CopyOut(to, static_cast<const char*>(pointer) + offset, bytes);
}
absl::StatusOr<uint64_t> Client::EmptyCache() {
  return session_->EmptyCache();
}
absl::StatusOr<MemoryStats> Client::GetMemoryStats(int device) {
  const absl::StatusOr<client_internal::Heap*> heap = session_->heap(device);
  return heap.ok() ? (*heap)->GetMemoryStats() : heap.status();
}
absl::Status Client::ResetPeakStats(int device) {
  const absl::StatusOr<client_internal::Heap*> heap = session_->heap(device);
  return heap.ok() ? (*heap)->ResetPeakStats(/*accumulated=*/false) : heap.status();
}
absl::Status Client::ResetStats(int device) {
  const absl::StatusOr<client_internal::Heap*> heap = session_->heap(device);
  return heap.ok() ? (*heap)->ResetPeakStats(/*accumulated=*/true) : heap.status();
}
absl::Status Client::ResetTotals(int device) {
  const absl::StatusOr<client_internal::Heap*> heap = session_->heap(device);
  return heap.ok() ? (*heap)->ResetTotals() : heap.status();
}
absl::StatusOr<std::string> Client::MemorySummary(int device, bool abbreviated) {
  const absl::StatusOr<MemoryStats> stats = GetMemoryStats(device);
  if (!stats.ok()) return stats.status();
  return vrambroker::MemorySummary(name(), device, *stats, abbreviated);
}
absl::Status Client::SetMemoryFraction(double fraction, int device) {
  const absl::StatusOr<client_internal::Heap*> heap = session_->heap(device);
  return heap.ok() ? (*heap)->SetMemoryFraction(fraction) : heap.status();
}
absl::Status Client::SetRecording(size_t max_events) {
  return session_->SetRecording(max_events);
}
absl::Status Client::DumpSnapshot(const std::string& path) {
  if (absl::Status status = client_internal::CheckFilePath(path); !status.ok()) return status;
  const absl::StatusOr<std::vector<HeapSnapshot>> heaps = session_->Snapshots(/*with_history=*/true);
  return heaps.ok() ? client_internal::WriteSnapshotFile(*heaps, path) : heaps.status();
}
absl::StatusOr<std::string> Client::SnapshotJson(bool with_history) {
  const absl::StatusOr<std::vector<HeapSnapshot>> heaps = session_->Snapshots(with_history);
  if (!heaps.ok()) return heaps.status();
  return WriteJson(TorchSnapshot(*heaps));
}
uint64_t Client::session_id() const {
  return session_->session_id();
}
std::string Client::name() const {
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
uint64_t Client::calls() const {
  return session_->calls();
}

}  // namespace vrambroker
