// SPDX-License-Identifier: Apache-2.0
#include "client/heap/leased_heap.h"

#include <sys/stat.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "allocator/base/bytes.h"
#include "allocator/device/device.h"
#include "allocator/heap/size_class.h"
#include "allocator/wire/heap_convert.h"
#include "client/heap/give_up.h"
#include "client/heap/out_of_memory.h"
#include "client/heap/stream_waits.h"

namespace vrambroker::client_internal {
namespace {

// Whole segments have separate labels, below the labels of the allocator.
constexpr uint64_t kFirstWholeAddress = 0x5F00'0000'0000;
// Every block of the large pool is larger.
constexpr uint64_t kLargePoolGranule = 1 << 20;

v1::OutOfMemory::Cause CauseOf(const absl::Status& refusal) {
  const std::optional<OutOfMemory> oom = GetOutOfMemory(refusal);
  if (!oom.has_value()) return v1::OutOfMemory::CAUSE_LIMIT;
  switch (oom->cause) {
    case OutOfMemory::Cause::kCapacity:
      return v1::OutOfMemory::CAUSE_CAPACITY;
    case OutOfMemory::Cause::kFragmentation:
      return v1::OutOfMemory::CAUSE_FRAGMENTATION;
    case OutOfMemory::Cause::kLargerThanDevice:
      return v1::OutOfMemory::CAUSE_LARGER_THAN_DEVICE;
    case OutOfMemory::Cause::kLimit:
    case OutOfMemory::Cause::kUnknown:
      break;
  }
  return v1::OutOfMemory::CAUSE_LIMIT;
}

// Marks a refusal of BeginGrowth().
constexpr absl::string_view kOwnLimit = "vrambroker.own_limit";

absl::Status CheckBytes(uint64_t bytes) {
  return bytes > 0 ? absl::OkStatus() : absl::InvalidArgumentError("bytes: must be 1 or more");
}

}  // namespace

LeasedHeap::LeasedHeap(HeapHost* session, AddressMap* addresses, int ordinal, const AllocatorOptions& options,
                       uint64_t capacity_bytes)
    : Heap(ordinal),
      session_(*session),
      addresses_(*addresses),
      capacity_bytes_(capacity_bytes),
      allocator_(this, options, capacity_bytes),
      session_limit_bytes_(capacity_bytes),
      next_whole_address_(kFirstWholeAddress) {
  // per_process_memory_fraction counts as a session limit: SetLimit() applies it.
  allocator_.SetLimit(CachingAllocator::kNoLimit);
}

bool LeasedHeap::CloseAll() {
  absl::flat_hash_map<SegmentId, Mapped> mapped;
  {
    MutexLock lock(mu_);
    mapped.swap(mapped_);
    refused_.clear();
  }
  if (mapped.empty()) return true;
  // Segments still in the allocator were never given back: take their streams from the allocator's snapshot. Streams
  // of other segments are known.
  for (const SegmentSnapshot& segment : allocator_.Snapshot(/*with_history=*/false).segments) {
    if (const auto it = mapped.find(segment.id); it != mapped.end()) it->second.stream = segment.stream;
  }
  StreamWaits waits(device());
  bool closed = true;
  for (const auto& [id, segment] : mapped) {
    addresses_.RemoveRange(segment.base);
    closed = waits.WaitFor(segment.stream).ok() && device()->CloseHandle(segment.base, segment.bytes).ok() && closed;
  }
  return closed;
}

// ---- Blocks ----

absl::StatusOr<Block*> LeasedHeap::AllocateSlowly(uint64_t bytes, Stream stream) {
  if (absl::Status status = CheckBytes(bytes); !status.ok()) return status;
  const Deadline until = DeadlineAfter(session_.options().wait);
  BlockRequest request(&allocator_, bytes, stream, CurrentScope());
  const auto release = [this](absl::Span<const ReleasedSegment> segments) { ReleaseSegments(segments); };
  while (request.Advance(release) == BlockRequest::Next::kSegment) {
    AnswerRequest(request, until);
  }
  absl::StatusOr<Block*> block = request.result();
  if (!absl::IsResourceExhausted(block.status())) return block;
  if (bytes >= kMaxRequestBytes) allocator_.CountOutOfMemory();  // the request has not counted this
  return ExplainRefusal(block.status(), bytes, ExplainFit(bytes, stream));
}

void LeasedHeap::AnswerRequest(BlockRequest& request, Deadline until) {
  LeaseTerms terms{.may_reclaim = request.has_flushed()};
  bool gave_up = false;
  if (terms.may_reclaim && session_.wait_ms() > 0) {
    terms.wait_ms =
        static_cast<uint32_t>(absl::ToInt64Milliseconds(absl::Ceil(TimeUntil(until), absl::Milliseconds(1))));
    // While the daemon makes the request wait, other threads may free enough memory.
    terms.give_up = [&] { return gave_up = request.IsInCache() || GiveUpScope::GaveUp(); };
  }
  const absl::StatusOr<AcquiredSegment> segment = GetSegment(request.segment_bytes(), terms);
  if (segment.ok()) return request.Supply(*segment);
  // A caller who does not wait gets no segment even after a flush: keep the cache for callers who wait.
  const bool is_last = absl::IsCancelled(segment.status()) || absl::IsResourceExhausted(segment.status());
  if (session_.wait_ms() > 0 && is_last && GiveUpScope::GaveUp()) return request.Deny(GiveUpScope::Error());
  if (!absl::IsCancelled(segment.status()) || !gave_up) return request.Deny(segment.status());
  if (request.SearchAgain()) return;
  // Another thread was faster. The request waits again if time remains; otherwise repeat the earlier refusal.
  if (TimeUntil(until) > absl::ZeroDuration()) return request.FlushAgain();
  request.Deny(request.refusal());
}

FitReport LeasedHeap::ExplainFit(uint64_t bytes, Stream stream) {
  return allocator_.ExplainFit(bytes, stream, CurrentScope(), [] { return AllScopes(); });
}

// The daemon does not know this process's own limit, and would name another limit.
absl::Status LeasedHeap::ExplainRefusal(const absl::Status& refusal, uint64_t requested, const FitReport& fit) {
  if (!refusal.GetPayload(kOwnLimit).has_value() || fit.segment_bytes > capacity_bytes_) {
    return Explain(refusal, requested, fit);
  }
  v1::OutOfMemory oom;
  oom.set_cause(v1::OutOfMemory::CAUSE_LIMIT);
  oom.set_device(static_cast<uint32_t>(ordinal()));
  oom.set_requested_bytes(requested);
  oom.set_segment_bytes(fit.segment_bytes);
  oom.set_block_bytes(fit.block_bytes);
  oom.set_limit_bytes(own_limit_bytes());
  oom.set_device_capacity_bytes(capacity_bytes_);
  *oom.mutable_holes() = HolesToProto(fit.holes);
  oom.set_scope(fit.scope);
  ScopeUsesToProto(fit.scopes, oom.mutable_scopes());
  if (const absl::StatusOr<MemoryStats> stats = GetMemoryStats(); stats.ok()) {
    oom.set_allocated_bytes(stats->allocated_bytes.all.current);
    oom.set_inactive_split_bytes(stats->inactive_split_bytes.all.current);
    oom.set_largest_free_block_bytes(stats->free.largest_bytes);
  }
  uint64_t growing = 0;
  {
    MutexLock lock(mu_);
    growing = growing_bytes_;
    oom.set_reserved_bytes(HeldBytes() - growing);
  }
  const uint64_t room = oom.limit_bytes() - std::min(oom.limit_bytes(), oom.reserved_bytes() + growing);
  oom.set_room_bytes(room);
  oom.set_explanation(absl::StrCat(
      "the memory fraction that this process has set allows it ", FormatBytesExactly(oom.limit_bytes()),
      " of the device: of this ", FormatBytes(room), " is left",
      growing > 0 ? absl::StrCat(" beside ", FormatBytes(growing), " that other threads are waiting for") : "",
      ", and the request needs a segment of ", FormatBytes(fit.segment_bytes)));
  oom.set_advice("Set a larger memory fraction, or free some of this session's memory.");
  return OutOfMemoryError(oom);
}

absl::Status LeasedHeap::Explain(const absl::Status& refusal, uint64_t requested, const FitReport& fit) {
  v1::ExplainRequest request;
  request.set_device(static_cast<uint32_t>(ordinal()));
  request.set_cause(fit.segment_bytes > capacity_bytes_ ? v1::OutOfMemory::CAUSE_LARGER_THAN_DEVICE : CauseOf(refusal));
  request.set_requested_bytes(requested);
  request.set_segment_bytes(fit.segment_bytes);
  request.set_block_bytes(fit.block_bytes);
  request.set_pool_free_bytes(fit.pool_free_bytes);
  request.set_pool_largest_bytes(fit.pool_largest_bytes);
  request.set_max_events(fit.max_events);
  *request.mutable_holes() = HolesToProto(fit.holes);
  request.set_scope(fit.scope);
  ScopeUsesToProto(fit.scopes, request.mutable_scopes());
  if (const absl::StatusOr<MemoryStats> stats = GetMemoryStats(); stats.ok()) {
    request.set_allocated_bytes(stats->allocated_bytes.all.current);
    // When all holes are in the application's whole segments, the application's figures give the bytes of the holes.
    if (fit.holes.count == 0) request.mutable_holes()->set_hole_bytes(stats->inactive_split_bytes.all.current);
  }
  // First, over the same stream: a process ended by this refusal may have no time for another report.
  session_.ReportStatsOf(static_cast<size_t>(ordinal()));
  const std::shared_ptr<Link> link = session_.link();
  session_.CountCall();
  absl::Status explained = link->stream->Explain(request, session_.options().call_timeout);
  // A daemon just gone cannot explain; the request was refused all the same.
  return absl::IsResourceExhausted(explained) ? explained : refusal;
}

absl::StatusOr<Buffer> LeasedHeap::Allocate(uint64_t bytes, Stream stream) {
  Block* block = TryAllocate(bytes, stream);
  if (block == nullptr) {
    const absl::StatusOr<Block*> slow = AllocateSlowly(bytes, stream);
    if (!slow.ok()) return slow.status();
    block = *slow;
  }
  return MakeBuffer(reinterpret_cast<uint64_t>(block), block->data(), bytes, block->bytes);
}

void LeasedHeap::Free(uint64_t block) {
  if (!session_.IsForked()) allocator_.Free(BlockAt(block));
}

absl::Status LeasedHeap::FreeAndWait(uint64_t block) {
  if (session_.IsForked()) return session_.CheckUsable();
  Free(block);
  return absl::OkStatus();
}

absl::Status LeasedHeap::RecordStream(uint64_t block, Stream stream) {
  if (session_.IsForked()) return session_.CheckUsable();
  allocator_.RecordStream(BlockAt(block), stream);
  return absl::OkStatus();
}

absl::StatusOr<void*> LeasedHeap::Malloc(uint64_t bytes, Stream stream) {
  Block* block = TryAllocate(bytes, stream);
  if (block == nullptr) {
    const absl::StatusOr<Block*> slow = AllocateSlowly(bytes, stream);
    if (!slow.ok()) return slow.status();
    block = *slow;
  }
  void* const data = block->data();
  addresses_.Put(data, block);
  return data;
}

void LeasedHeap::FreeBlock(Block* block) {
  allocator_.Free(block);
}

void LeasedHeap::RecordStream(Block* block, Stream stream) {
  allocator_.RecordStream(block, stream);
}

// ---- Segments ----

absl::StatusOr<SegmentOpener*> LeasedHeap::OpenDevice() {
  if (SegmentOpener* opened = device()) return opened;
  absl::StatusOr<SegmentOpener*> opened = session_.DeviceFor(ordinal());
  if (opened.ok()) device_.store(*opened, std::memory_order_release);
  return opened;
}

absl::StatusOr<std::unique_ptr<Event>> LeasedHeap::RecordEvent(Stream stream) {
  const absl::StatusOr<SegmentOpener*> opened = OpenDevice();
  if (!opened.ok()) return opened.status();
  return (*opened)->RecordEvent(stream);
}

absl::Status LeasedHeap::BeginGrowth(uint64_t bytes) {
  const uint64_t limit = own_limit_bytes();
  MutexLock lock(mu_);
  // Adds up held bytes only under a limit.
  if (limit != CachingAllocator::kNoLimit) {
    const uint64_t held = HeldBytes();
    if (held > limit || bytes > limit - held) {
      absl::Status refusal =
          absl::ResourceExhaustedError(absl::StrCat("the memory fraction that this process has set allows it ",
                                                    FormatBytes(limit), ": it holds ", FormatBytes(held)));
      refusal.SetPayload(kOwnLimit, absl::Cord());
      return refusal;
    }
  }
  growing_bytes_ += bytes;
  return absl::OkStatus();
}

absl::StatusOr<AcquiredSegment> LeasedHeap::GetSegment(uint64_t bytes, const LeaseTerms& terms) {
  if (absl::Status status = BeginGrowth(bytes); !status.ok()) return status;
  bool arrived = false;
  absl::StatusOr<AcquiredSegment> segment = LeaseAndMap(bytes, terms, &arrived);
  if (arrived) return segment;
  MutexLock lock(mu_);
  growing_bytes_ -= bytes;
  return segment;
}

absl::StatusOr<AcquiredSegment> LeasedHeap::LeaseAndMap(uint64_t bytes, const LeaseTerms& terms, bool* arrived) {
  const absl::StatusOr<SegmentOpener*> opened = OpenDevice();
  if (!opened.ok()) return opened.status();
  const std::shared_ptr<Link> link = session_.link();
  if (absl::Status status = CheckCarriedOver(link->session, bytes); !status.ok()) return status;
  v1::LeaseSegmentsRequest request;
  request.set_device(static_cast<uint32_t>(ordinal()));
  request.add_segment_bytes(bytes);
  request.set_last_resort(terms.may_reclaim);
  if (terms.give_up != nullptr && GiveUpScope::GaveUp()) return GiveUpScope::Error();
  request.set_wait_ms(terms.wait_ms);
  absl::StatusOr<HeapHost::LeaseAnswer> answer = session_.Lease(*link, request, terms.give_up);
  if (absl::IsResourceExhausted(answer.status()) && !GetOutOfMemory(answer.status()).has_value()) {
    return absl::UnavailableError(answer.status().message());  // no lack of memory: flushing would not help
  }
  if (!answer.ok()) return answer.status();
  if (answer->leased.segments_size() != 1 || answer->leased.segments(0).segment_bytes() != bytes) {
    return absl::InternalError("the daemon leased a different segment than requested");
  }
  const v1::LeaseSegmentsResponse::Segment& segment = answer->leased.segments(0);
  const SegmentId id{CarriedId(link->session, segment.segment_id())};
  const bool adopted = session_.Adopt(link, [&] {
    MutexLock lock(mu_);
    mapped_.emplace(id, Mapped{.session = link->session, .daemon_id = segment.segment_id(), .bytes = bytes});
    growing_bytes_ -= bytes;
    *arrived = true;
  });
  if (!adopted) {
    // The segment may have been leased after the session was resumed without it.
    session_.ReturnSegments(ordinal(), link->session, {segment.segment_id()});
    return absl::UnavailableError("the connection to the daemon broke; try again");
  }

  absl::StatusOr<SegmentHandle> handle = answer->descriptors.empty() ? session_.FetchHandle(segment.handle())
                                                                     : SegmentHandle(std::move(answer->descriptors[0]));
  absl::StatusOr<void*> base =
      handle.ok() ? link->Opened(**opened, ordinal(), (*opened)->OpenHandle(*handle, bytes)) : handle.status();
  struct stat file = {};
  if (handle.ok() && std::holds_alternative<UniqueFd>(*handle)) (void)fstat(std::get<UniqueFd>(*handle).get(), &file);
  // The pools differ by size: see SegmentBytesFor().
  const uint64_t granule = bytes == kSmallSegmentBytes ? kMinBlockBytes : kLargePoolGranule;
  if (base.ok() && !addresses_.AddRange(*base, bytes, granule, this)) {
    if (!(*opened)->CloseHandle(*base, bytes).ok()) {
      MutexLock lock(mu_);
      Mapped& mapped = mapped_.at(id);
      mapped.base = *base;
      mapped.stream = Stream{0};  // never used: any stream will do
      refused_.push_back(id);
      return absl::InternalError("an unusable segment cannot be closed now either; the client will try again");
    }
    base = absl::InternalError("a segment was mapped at an address where its pointers cannot be looked up");
  }
  if (!base.ok()) {
    {
      MutexLock lock(mu_);
      mapped_.erase(id);
    }
    session_.ReturnSegments(ordinal(), link->session, {segment.segment_id()});
    // No lack of memory: returning other segments would not help.
    return absl::IsResourceExhausted(base.status()) ? absl::InternalError(base.status().message()) : base.status();
  }
  session_.Grown();
  MutexLock lock(mu_);
  Mapped& mapped = mapped_.at(id);
  mapped.base = *base;
  mapped.file_device = file.st_dev;
  mapped.file_inode = file.st_ino;
  return AcquiredSegment{.id = id, .base = *base};
}

uint64_t LeasedHeap::ReleaseSegments(absl::Span<const ReleasedSegment> segments) {
  std::vector<SegmentId> ids;
  ids.reserve(segments.size());
  std::vector<void*> bases;
  bases.reserve(segments.size());
  {
    MutexLock lock(mu_);
    for (const ReleasedSegment& segment : segments) {
      Mapped& mapped = mapped_.at(segment.id);
      mapped.stream = segment.stream;
      ids.push_back(segment.id);
      bases.push_back(mapped.base);
    }
  }
  for (void* base : bases) addresses_.RemoveRange(base);
  return CloseAndReturn(ids);
}

uint64_t LeasedHeap::CloseAndReturn(absl::Span<const SegmentId> segments) {
  std::vector<Mapped> closed;
  closed.reserve(segments.size());
  {
    MutexLock lock(mu_);
    for (const SegmentId id : segments) closed.push_back(mapped_.at(id));
  }
  // Blocks may be freed while their stream still works on the memory, and the next owner does not know the stream. Hold
  // the segment until the work is done, whatever happens to the connection: see Connect().
  StreamWaits waits(device());
  absl::flat_hash_map<uint64_t, std::vector<uint64_t>> by_session;
  absl::flat_hash_map<uint64_t, uint64_t> bytes_by_session;
  std::vector<SegmentId> gone;
  std::vector<SegmentId> refused;
  for (size_t i = 0; i < segments.size(); ++i) {
    const Mapped& mapped = closed[i];
    if (!waits.WaitFor(mapped.stream).ok() || !device()->CloseHandle(mapped.base, mapped.bytes).ok()) {
      refused.push_back(segments[i]);
      continue;
    }
    gone.push_back(segments[i]);
    by_session[mapped.session].push_back(mapped.daemon_id);
    bytes_by_session[mapped.session] += mapped.bytes;
  }
  {
    MutexLock lock(mu_);
    for (const SegmentId id : gone) mapped_.erase(id);
    refused_.insert(refused_.end(), refused.begin(), refused.end());
  }
  session_.Grown();
  uint64_t bytes = 0;
  for (const auto& [session, ids] : by_session) {
    if (session_.ReturnSegments(ordinal(), session, ids)) bytes += bytes_by_session[session];
  }
  return bytes;
}

void LeasedHeap::RetryClosing() {
  allocator_.WaitForLostStreams();
  std::vector<SegmentId> refused;
  {
    MutexLock lock(mu_);
    refused.swap(refused_);
  }
  if (!refused.empty()) CloseAndReturn(refused);
}

absl::StatusOr<void*> LeasedHeap::LeaseSegment(uint64_t bytes, bool now) {
  if (absl::Status status = CheckBytes(bytes); !status.ok()) return status;
  const bool too_large = bytes >= kMaxRequestBytes;  // too large to round
  const uint64_t segment_bytes = too_large ? bytes : RoundUpTo(bytes, kSegmentGranuleBytes);
  const auto explain = [&](const absl::Status& refusal) {
    FitReport heap = ExplainFit(bytes, Stream{0});
    return ExplainRefusal(refusal, bytes,
                          {.block_bytes = bytes,
                           .segment_bytes = segment_bytes,
                           .holes = std::move(heap.holes),
                           .scope = std::move(heap.scope),
                           .scopes = std::move(heap.scopes)});
  };
  if (too_large) {
    allocator_.CountOutOfMemory();
    return explain(absl::ResourceExhaustedError("more than any device has"));
  }
  absl::StatusOr<AcquiredSegment> segment = GetSegment(segment_bytes, {});
  if (absl::IsResourceExhausted(segment.status()) && now) {
    return segment.status().GetPayload(kOwnLimit).has_value() ? explain(segment.status()) : segment.status();
  }
  if (absl::IsResourceExhausted(segment.status())) {
    if (session_.wait_ms() > 0 && GiveUpScope::GaveUp()) return GiveUpScope::Error();  // as in AnswerRequest()
    Flush();
    LeaseTerms terms{.may_reclaim = true, .wait_ms = session_.wait_ms()};
    if (terms.wait_ms > 0 && GiveUpScope::IsActive()) terms.give_up = &GiveUpScope::GaveUp;
    segment = GetSegment(segment_bytes, terms);
    if (absl::IsCancelled(segment.status()) && GiveUpScope::GaveUp()) return GiveUpScope::Error();
  }
  if (absl::IsResourceExhausted(segment.status())) {
    allocator_.CountOutOfMemory();
    return explain(segment.status());
  }
  if (!segment.ok()) return segment.status();
  MutexLock lock(mu_);
  whole_.emplace(
      segment->base,
      WholeSegment{.id = segment->id, .requested = bytes, .bytes = segment_bytes, .address = next_whole_address_});
  next_whole_address_ += segment_bytes;
  for (PoolStat* count : {&whole_stats_.allocation, &whole_stats_.segment, &whole_stats_.active}) {
    count->Up(PoolKind::kLarge, 1);
  }
  for (PoolStat* sum : {&whole_stats_.allocated_bytes, &whole_stats_.reserved_bytes, &whole_stats_.active_bytes}) {
    sum->Up(PoolKind::kLarge, segment_bytes);
  }
  whole_stats_.requested_bytes.Up(PoolKind::kLarge, bytes);
  if (use_.has_value()) {
    use_->allocated_bytes += segment_bytes;
    use_->requested_bytes += bytes;
  }
  ++whole_stats_.num_device_alloc;
  return segment->base;
}

absl::Status LeasedHeap::ReturnSegment(void* pointer, std::optional<Stream> stream) {
  WholeSegment whole;
  {
    MutexLock lock(mu_);
    const auto it = whole_.find(pointer);
    if (it == whole_.end()) return absl::NotFoundError("no leased segment begins there");
    whole = it->second;
    whole_.erase(it);
    for (PoolStat* count : {&whole_stats_.allocation, &whole_stats_.segment, &whole_stats_.active}) {
      count->Down(PoolKind::kLarge, 1);
    }
    for (PoolStat* sum : {&whole_stats_.allocated_bytes, &whole_stats_.reserved_bytes, &whole_stats_.active_bytes}) {
      sum->Down(PoolKind::kLarge, whole.bytes);
    }
    whole_stats_.requested_bytes.Down(PoolKind::kLarge, whole.requested);
    ++whole_stats_.num_device_free;
    if (use_.has_value()) use_->idle_bytes -= std::min(use_->idle_bytes, whole.bytes);
  }
  if (ReleaseSegments({{.id = whole.id, .bytes = whole.bytes, .stream = stream}}) > 0) {
    session_.WholeReturned(ordinal(), whole.bytes);
    return absl::OkStatus();
  }
  {
    MutexLock lock(mu_);
    if (mapped_.contains(whole.id)) return absl::OkStatus();  // the device closes the segment later: see RetryClosing()
  }
  return absl::UnavailableError("the daemon cannot take the segment back now: it is gone or cannot be reached");
}

std::optional<uint64_t> LeasedHeap::SizeOf(const void* pointer) const {
  MutexLock lock(mu_);
  const auto it = whole_.find(const_cast<void*>(pointer));
  return it == whole_.end() ? std::nullopt : std::optional<uint64_t>(it->second.bytes);
}

absl::StatusOr<uint64_t> LeasedHeap::EmptyCache() {
  RetryClosing();
  return Flush();
}

uint64_t LeasedHeap::Flush() {
  allocator_.WaitForStreams();
  const SegmentsToRelease free = allocator_.TakeFreeSegments();
  return free.empty() ? 0 : ReleaseSegments(free.segments());
}

uint64_t LeasedHeap::Trim(uint64_t wanted_bytes, uint64_t min_idle_ticks) {
  TrimOptions options{.wanted_bytes = wanted_bytes, .min_idle_ticks = min_idle_ticks};
  uint64_t bytes = 0;
  while (true) {
    const SegmentsToRelease idle = allocator_.TakeIdleSegments(&options);
    if (idle.empty()) return bytes;
    bytes += ReleaseSegments(idle.segments());
  }
}

}  // namespace vrambroker::client_internal
