// SPDX-License-Identifier: Apache-2.0
#include "client/session/session_client.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "allocator/base/bytes.h"
#include "allocator/base/names.h"
#include "allocator/base/room_to_start.h"
#include "allocator/base/segment_call_bounds.h"
#include "client/session/environment.h"
#include "client/session/open_device.h"

namespace vrambroker::client_internal {
namespace {

constexpr absl::Duration kGoodbyePause = absl::Milliseconds(20);
constexpr absl::Duration kLastGoodbyePause = absl::Seconds(5);

// The options without callbacks, kept in callbacks_.
ClientOptions Kept(ClientOptions options) {
  options.on_lost = nullptr;
  options.log = nullptr;
  for (absl::Duration* duration : {&options.idle_decay, &options.connect_timeout, &options.call_timeout}) {
    *duration = ClampDuration(*duration);
  }
  return options;
}

// Returned memory stays charged until the daemon hears of the return. ResourceExhausted: the daemon is refusing
// frequent calls or connections.
bool IsWorthAnotherTry(const absl::Status& status) {
  return absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status) || absl::IsResourceExhausted(status);
}

// Returns a thread that is not joinable when none can be started; its work is then left undone until the process ends.
std::thread StartThread(const std::function<void()>& body) {
  try {
    return std::thread(body);
  } catch (const std::system_error&) {
    return {};
  }
}

// All sessions of a process share a mark: a child forked before a session also inherits the GPU's descriptors. A
// child's own sessions use a new mark; the parent's mark stays open in the child. `forks`: number of forks that led to
// this process.
int ProcessMark(int forks) {
  static std::atomic<uint64_t> made{0};  // forks + 1, and the descriptor; lock-free: fork() could leave a lock taken
  const uint64_t generation = static_cast<uint64_t>(forks) + 1;
  uint64_t now = made.load();
  if (now >> 32 == generation) return static_cast<int>(now & 0xffffffff);
  UniqueFd mark = MakeSessionMark();
  if (!mark.valid()) return -1;
  if (made.compare_exchange_strong(now, generation << 32 | static_cast<uint64_t>(mark.get()))) return mark.Release();
  return static_cast<int>(now & 0xffffffff);
}

}  // namespace

SessionClient::SessionClient(const ClientOptions& options)
    : HeapHost(Kept(options)),
      descriptors_(options.socket_dir),
      mark_(ProcessMark(forks())),
      logs_to_stderr_(options.log == nullptr),
      trims_([this] {
        MutexLock lock(mu_);
        trims_changed_ = true;
        changed_.NotifyAll();
      }) {
  callbacks_->on_lost = options.on_lost;
  callbacks_->log = options.log;
}

absl::StatusOr<std::unique_ptr<SessionClient>> SessionClient::Open(const ClientOptions& asked) {
  absl::StatusOr<ClientOptions> with_environment = WithEnvironment(asked);
  if (!with_environment.ok()) return with_environment.status();
  ClientOptions& options = *with_environment;
  const CleanedName name = CleanName(options.name);
  options.name = name.name;
  if (options.wait < absl::ZeroDuration() || options.wait > absl::Hours(1)) {
    return absl::InvalidArgumentError(
        absl::StrCat("wait: ", absl::FormatDuration(options.wait), " is not within [0, 1h]"));
  }
  absl::StatusOr<AllocConfText> conf = FindAllocConf(options.alloc_conf);
  if (!conf.ok()) return conf.status();
  std::unique_ptr<SessionClient> self(new SessionClient(options));
  self->conf_ = *std::move(conf);
  self->warnings_ = self->conf_.warnings;
  self->named_devices_ = self->options().devices;
  self->devices_source_ = asked.devices.empty() ? kDevicesVariable : "devices";
  if (!name.note.empty()) self->Log(name.note);
  absl::StatusOr<std::shared_ptr<Link>> link = self->Connect(nullptr, self->options().connect_timeout);
  if (!link.ok()) return link.status();
  {
    MutexLock lock(self->mu_);
    self->link_ = *std::move(link);
    self->lost_ = !self->link_->stream->status().ok();
  }
  if (!self->leases()) return self;
  self->background_thread_ = StartThread([raw = self.get()] { raw->Keep(); });
  if (self->background_thread_.joinable()) return self;
  End(std::move(self));
  return NoThreadError();
}

// ---- Ending ----

void SessionClient::End(std::unique_ptr<SessionClient> session) {
  if (session->IsForked()) {
    (void)session.release();  // belongs to the parent
    return;
  }
  const std::shared_ptr<Callbacks> callbacks = session->callbacks_;
  callbacks->gate.Close();
  callbacks->on_lost = nullptr;
  callbacks->log = nullptr;
  if (session->InUse()) {
    SessionClient* const orphan = session.release();
    MutexLock lock(orphan->mu_);
    orphan->orphaned_ = true;
    if (!orphan->background_thread_.joinable()) orphan->background_thread_ = StartThread([orphan] { orphan->Keep(); });
    orphan->changed_.NotifyAll();
    return;
  }
  // A callback cannot wait for its own thread. Memory closed here stays charged until the daemon hears of the close,
  // but the application does not wait.
  if (!callbacks->gate.IsInside()) {
    session->StopBackgroundThread();
    if (session->SayGoodbye(kGoodbyeTimeout)) return;
  }
  std::thread rest = StartThread([raw = session.release()] {
    const std::unique_ptr<SessionClient> ending(raw);
    ending->StopBackgroundThread();
    ending->SayGoodbyeForSure();
  });
  if (rest.joinable()) rest.detach();
}

SessionClient::~SessionClient() {
  StopBackgroundThread();
  if (const std::shared_ptr<Link> last = link()) last->stream->Abort();  // while everything used by the handlers exists
}

void SessionClient::StopBackgroundThread() {
  {
    MutexLock lock(mu_);
    stopping_ = true;
    changed_.NotifyAll();
    if (link_ != nullptr) link_->stream->StopWaiting();
    descriptors_.StopWaiting();
    if (connecting_ != nullptr) connecting_->StopWaiting();
  }
  if (background_thread_.joinable()) background_thread_.join();
  MutexLock lock(mu_);
  stopping_ = false;  // Connect() may wait again
}

bool SessionClient::SayGoodbye(absl::Duration timeout) {
  const Deadline deadline = DeadlineAfter(timeout);
  bool closed = true;
  for (size_t device = 0; leases() && device < heaps_.size(); ++device) closed = leased(device).CloseAll() && closed;
  closed = mappings_.CloseAll() && closed;
  std::shared_ptr<Link> link = this->link();
  if (link == nullptr) return true;
  if (!closed) {
    link->stream->Abort();  // without a goodbye the daemon waits for the process and its children to end
    return true;
  }
  // When the connection has broken, use a new connection: a live daemon would otherwise keep the memory until the
  // process ends. The daemon may not have noticed the break yet.
  bool all = false;
  while (true) {
    if (leases()) ReportStats(std::exchange(all, true));  // final: the daemon logs how the session ended
    const absl::Status taken = link->stream->Close(TimeUntil(deadline));
    if (absl::IsDeadlineExceeded(taken)) return false;
    if (taken.ok() || !leases()) return true;
    const absl::StatusOr<std::shared_ptr<Link>> resumed = Connect(link.get(), TimeUntil(deadline));
    if (resumed.ok()) {
      const std::shared_ptr<Link> broken = std::exchange(link, *resumed);  // destroyed without the lock
      MutexLock lock(mu_);
      link_ = link;
    } else if (IsWorthAnotherTry(resumed.status()) && !IsNoDaemon(resumed.status())) {
      if (TimeUntil(deadline) == absl::ZeroDuration()) return false;
      absl::SleepFor(kGoodbyePause);
    } else {
      return true;  // the daemon is gone, or does not know the session
    }
  }
}

void SessionClient::SayGoodbyeForSure() {
  for (absl::Duration pause = kGoodbyePause; !SayGoodbye(kGoodbyeTimeout);
       pause = std::min(2 * pause, kLastGoodbyePause)) {
    absl::SleepFor(pause);
  }
}

bool SessionClient::InUse() {
  return std::any_of(heaps_.begin(), heaps_.end(), [](const auto& heap) { return heap->InUse(); });
}

// ---- Calls ----

absl::Status SessionClient::CallOver(const std::function<grpc::Status(SessionStream&, grpc::ClientContext*)>& call) {
  if (absl::Status status = CheckUsable(); !status.ok()) return status;
  const std::shared_ptr<Link> link = this->link();
  const absl::Duration timeout = Patience();
  const Deadline deadline = DeadlineAfter(timeout);
  link->stream->WaitForFrees(timeout);  // these calls show or depend on free memory
  grpc::ClientContext context;
  SetTimeout(context, ending_ ? TimeUntil(deadline) : timeout);
  CountCall();
  absl::Status status = FromGrpc(call(*link->stream, &context));
  if (absl::IsUnavailable(status) || absl::IsCancelled(status)) {
    const absl::Status lost = link->stream->status();
    return lost.ok() ? absl::UnavailableError(absl::StrCat("the daemon went away: ", status.message())) : lost;
  }
  return status;
}

std::shared_ptr<Link> SessionClient::link() const {
  MutexLock lock(mu_);
  return link_;
}

absl::Status SessionClient::CheckUsable() const {
  if (IsForked()) {
    return absl::FailedPreconditionError(
        "this session belongs to the parent process: a child made by fork() cannot use it");
  }
  return link()->stream->status();
}

absl::Status SessionClient::status() const {
  return CheckUsable();
}

absl::StatusOr<Heap*> SessionClient::heap(int device) {
  if (IsForked()) return CheckUsable();
  if (device < 0 || static_cast<size_t>(device) >= heaps_.size()) {
    return absl::NotFoundError(absl::StrCat("no device ", device, "; the daemon has ", heaps_.size(),
                                            heaps_.size() == 1 ? " device" : " devices"));
  }
  return heaps_[static_cast<size_t>(device)].get();
}

absl::Status SessionClient::FreePointer(void* pointer, std::optional<Stream> stream) {
  if (pointer == nullptr) return absl::OkStatus();
  if (IsForked()) return CheckUsable();
  if (leases()) {
    if (const AddressMap::Entry found = addresses_.Take(pointer); found.value != nullptr) {
      auto& heap = *static_cast<LeasedHeap*>(found.owner);
      auto* block = static_cast<Block*>(found.value);
      if (stream.has_value()) heap.RecordStream(block, *stream);
      heap.FreeBlock(block);
      return absl::OkStatus();
    }
  } else {
    for (size_t device = 0; device < heaps_.size(); ++device) {
      absl::Status status = remote(device).FreePointer(pointer, stream);
      if (!absl::IsNotFound(status)) return status;
    }
  }
  return absl::InvalidArgumentError("pointer: not from this client's Malloc(), or already freed");
}

absl::Status SessionClient::RecordStream(void* pointer, Stream stream) {
  if (IsForked()) return CheckUsable();
  if (!leases()) return heaps_.front()->RecordStream(0, stream);
  const AddressMap::Entry found = addresses_.Find(pointer);
  if (found.value == nullptr) {
    return absl::InvalidArgumentError("pointer: not from this client's Malloc(), or already freed");
  }
  static_cast<LeasedHeap*>(found.owner)->RecordStream(static_cast<Block*>(found.value), stream);
  return absl::OkStatus();
}

absl::Status SessionClient::ReturnSegment(void* pointer, std::optional<Stream> stream) {
  if (IsForked()) return CheckUsable();
  for (size_t device = 0; leases() && device < heaps_.size(); ++device) {
    absl::Status status = leased(device).ReturnSegment(pointer, stream);
    if (!absl::IsNotFound(status)) return status;
  }
  return absl::InvalidArgumentError("pointer: not from this client's LeaseSegment(), or already returned");
}

absl::StatusOr<SegmentOpener*> SessionClient::DeviceOf(const void* pointer, uint64_t offset, uint64_t bytes) const {
  if (IsForked()) return CheckUsable();
  Heap* heap = nullptr;
  std::optional<uint64_t> size;
  if (const AddressMap::Entry found = addresses_.Find(pointer); found.value != nullptr) {
    heap = static_cast<LeasedHeap*>(found.owner);
    size = static_cast<const Block*>(found.value)->bytes;
  }
  for (size_t device = 0; device < heaps_.size() && !size.has_value(); ++device) {
    heap = heaps_[device].get();
    size = heap->SizeOf(pointer);
  }
  if (!size.has_value()) {
    return absl::InvalidArgumentError(
        "pointer: not from this client's Malloc() or LeaseSegment(), or already given back");
  }
  if (offset > *size || bytes > *size - offset) {
    return absl::OutOfRangeError(
        absl::StrCat("bytes [", offset, ", +", bytes, ") are outside the ", *size, " bytes at the pointer"));
  }
  return heap->device();
}

absl::StatusOr<uint64_t> SessionClient::EmptyCache() {
  if (IsForked()) return CheckUsable();
  if (!leases()) return heaps_.front()->EmptyCache();  // the daemon empties the caches of all devices
  uint64_t bytes = 0;
  for (const std::unique_ptr<Heap>& heap : heaps_) bytes += heap->EmptyCache().value_or(0);
  return bytes;
}

absl::Status SessionClient::ReportSegmentUse(int device, const SegmentUse& use) {
  const absl::StatusOr<Heap*> found = heap(device);
  if (!found.ok()) return found.status();
  if (!leases()) return absl::FailedPreconditionError("a remote session has no whole segments");
  static_cast<LeasedHeap*>(*found)->ReportUse(use);
  MutexLock lock(mu_);
  use_reported_ = true;
  changed_.NotifyAll();
  return absl::OkStatus();
}

absl::Status SessionClient::SetRecording(size_t max_events) {
  if (IsForked()) return CheckUsable();
  if (max_events > Client::kMaxRecordedEvents) {
    return absl::InvalidArgumentError(
        absl::StrCat("max_events: ", max_events, " is above ", Client::kMaxRecordedEvents, ", the most that is kept"));
  }
  const size_t kept = max_events > 0 ? max_events : link()->record_events;
  if (leases()) {
    for (size_t device = 0; device < heaps_.size(); ++device) Record(device, kept);
    return absl::OkStatus();
  }
  v1::SetRecordingRequest request;
  request.mutable_session()->set_id(session_id());
  request.set_max_events(static_cast<uint32_t>(kept));
  v1::SetRecordingResponse response;
  return CallOver([&](SessionStream& stream, grpc::ClientContext* context) {
    return stream.admin().SetRecording(context, request, &response);
  });
}

void SessionClient::Record(size_t device, size_t max_events) {
  // Exact times cost more than the default: record them only for requests for more events.
  leased(device).SetRecording(max_events, /*exact_times=*/max_events > link()->record_events);
}

absl::StatusOr<std::vector<HeapSnapshot>> SessionClient::Snapshots(bool with_history) {
  if (IsForked()) return CheckUsable();
  std::vector<HeapSnapshot> heaps;
  for (const std::unique_ptr<Heap>& heap : heaps_) {
    absl::StatusOr<HeapSnapshot> snapshot = heap->TakeSnapshot(with_history);
    if (!snapshot.ok()) return snapshot.status();
    heaps.push_back(*std::move(snapshot));
  }
  return heaps;
}

absl::StatusOr<TrimRequests*> SessionClient::trims() {
  if (IsForked()) return CheckUsable();
  if (!leases()) return absl::FailedPreconditionError("a remote session has no whole segments");
  return &trims_;
}

uint64_t SessionClient::limit_bytes(int device) const {
  const auto index = static_cast<size_t>(device);  // a negative index is beyond the end
  if (index >= devices().size()) return 0;
  const uint64_t limit = limits_[index].load();
  return leases() ? std::min(limit, static_cast<const LeasedHeap&>(*heaps_[index]).own_limit_bytes()) : limit;
}

absl::StatusOr<SegmentOpener*> SessionClient::DeviceFor(int ordinal) {
  const DeviceInfo& info = devices()[static_cast<size_t>(ordinal)];
  MutexLock lock(devices_mu_);
  std::unique_ptr<SegmentOpener>& device = opened_[static_cast<size_t>(ordinal)];
  if (device == nullptr) {
    absl::StatusOr<std::unique_ptr<SegmentOpener>> opened = OpenDevice(info);
    if (!opened.ok()) return opened.status();
    device = *std::move(opened);
  }
  return device.get();
}

std::optional<absl::StatusOr<DescriptorChannel::Answer>> SessionClient::CallDirectly(const Link& link,
                                                                                     v1::SegmentCall call,
                                                                                     absl::Duration timeout) {
  // When the session is lost, the stream has the reason.
  if (!link.takes_segment_calls || link.carried_over_read != link.carried_over_sent || !link.stream->status().ok()) {
    return std::nullopt;
  }
  call.set_session_id(link.session_id);
  call.set_resume_token(link.resume_token);
  absl::StatusOr<DescriptorChannel::Answer> answer = descriptors_.Call(call, timeout);
  if (absl::IsDeadlineExceeded(answer.status()) || absl::IsInternal(answer.status())) return answer;
  if (!answer.ok() || answer->result.no_session()) return std::nullopt;
  if (!answer->result.has_error()) return answer;
  absl::Status error = FromProto(answer->result.error());
  // Disconnected or ended: the stream has the reason.
  if (absl::IsAborted(error)) return std::nullopt;
  return error;
}

absl::StatusOr<HeapHost::LeaseAnswer> SessionClient::Lease(Link& link, const v1::LeaseSegmentsRequest& request,
                                                           const std::function<bool()>& give_up) {
  CountCall();
  if (!request.last_resort()) {
    v1::SegmentCall call;
    *call.mutable_lease() = request;
    if (auto answer = CallDirectly(link, std::move(call), options().call_timeout); answer.has_value()) {
      if (!answer->ok()) return answer->status();
      return LeaseAnswer{.leased = std::move(*(*answer)->result.mutable_leased()),
                         .descriptors = std::move((*answer)->descriptors)};
    }
  }
  const uint64_t sent = link.carried_over_sent;
  absl::StatusOr<v1::LeaseSegmentsResponse> leased = link.stream->Lease(request, options().call_timeout, give_up);
  if (!leased.ok()) return leased.status();
  link.carried_over_read = sent;
  return LeaseAnswer{.leased = *std::move(leased), .descriptors = {}};
}

absl::Status SessionClient::Return(Link& link, const v1::ReturnSegmentsRequest& request, absl::Duration timeout) {
  CountCall();
  if (request.segment_ids_size() <= kMaxSegmentCallIds) {
    v1::SegmentCall call;
    *call.mutable_return_segments() = request;
    if (const auto answer = CallDirectly(link, std::move(call), timeout); answer.has_value()) return answer->status();
  }
  const uint64_t sent = link.carried_over_sent;
  absl::Status status = link.stream->Return(request, timeout);
  if (status.ok()) link.carried_over_read = sent;
  return status;
}

absl::StatusOr<SegmentHandle> SessionClient::FetchHandle(const v1::SegmentHandle& handle) {
  if (const std::string& ipc = handle.cuda_ipc(); ipc.size() == sizeof(CudaIpcHandle)) {
    CudaIpcHandle opened;
    std::memcpy(opened.data(), ipc.data(), ipc.size());
    return SegmentHandle(opened);
  }
  if (handle.descriptor_attached()) return DescriptorChannel::NoDescriptor();
  absl::StatusOr<UniqueFd> fd = descriptors_.Fetch(handle.descriptor_ticket(), options().call_timeout);
  if (!fd.ok()) return fd.status();
  return SegmentHandle(*std::move(fd));
}

bool SessionClient::Adopt(const std::shared_ptr<Link>& link, const std::function<void()>& record) {
  MutexLock lock(mu_);
  if (link_ != link || lost_) return false;
  record();
  return true;
}

absl::Duration SessionClient::Patience() const {
  if (!ending_.load(std::memory_order_relaxed)) return options().call_timeout;
  return is_silent_.load(std::memory_order_relaxed) ? absl::ZeroDuration()
                                                    : std::min(options().call_timeout, kGoodbyeTimeout);
}

bool SessionClient::ReturnSegments(int device, uint64_t session, const std::vector<uint64_t>& segments) {
  return ReturnWithin(Patience(), device, session, segments);
}

bool SessionClient::ReturnWithin(absl::Duration timeout, int device, uint64_t session,
                                 const std::vector<uint64_t>& segments) {
  while (true) {
    const std::shared_ptr<Link> link = this->link();
    if (link->session != session) {  // the leasing daemon is gone; the new daemon counts the lease
      if (!link->takes_carried_over) return false;
      v1::SessionRequest freed;
      for (const uint64_t id : segments) {
        freed.mutable_carried_over_freed()->add_ids(LeasedHeap::CarriedId(session, id));
        if (freed.carried_over_freed().ids_size() == kMaxIdsInMessage) link->stream->Send(std::exchange(freed, {}));
      }
      if (freed.carried_over_freed().ids_size() > 0) link->stream->Send(std::move(freed));
      ++link->carried_over_sent;
      if (link->stream->status().ok()) return true;
      MutexLock lock(mu_);
      if (link_ != link) continue;  // reconnected meanwhile
      unreturned_.push_back({.device = device, .session = session, .segments = segments});
      return false;
    }
    absl::Status status;
    if (timeout == absl::ZeroDuration()) status = absl::DeadlineExceededError("the daemon does not answer");
    for (size_t begin = 0; begin < segments.size() && status.ok(); begin += kMaxIdsInMessage) {
      const size_t end = std::min(segments.size(), begin + kMaxIdsInMessage);
      v1::ReturnSegmentsRequest request;
      request.set_device(static_cast<uint32_t>(device));
      request.mutable_segment_ids()->Add(segments.begin() + static_cast<std::ptrdiff_t>(begin),
                                         segments.begin() + static_cast<std::ptrdiff_t>(end));
      status = Return(*link, request, timeout);
      NoteAnswer(status);
    }
    if (status.ok() || !IsWorthAnotherTry(status)) return status.ok();
    MutexLock lock(mu_);
    if (link_ != link) continue;  // reconnected meanwhile
    unreturned_.push_back({.device = device, .session = session, .segments = segments});
    return false;
  }
}

void SessionClient::ReturnAgain() {
  std::vector<Returned> unreturned;
  {
    MutexLock lock(mu_);
    if (!lost_) unreturned.swap(unreturned_);
  }
  // Return segments singly: the daemon may have taken some already.
  const absl::Duration timeout = ending_ ? std::min(options().call_timeout, kGoodbyeTimeout) : options().call_timeout;
  bool is_first = true;
  for (const Returned& returned : unreturned) {
    for (const uint64_t id : returned.segments) {
      const bool waits = std::exchange(is_first, false) || !is_silent_;
      ReturnWithin(waits ? timeout : absl::ZeroDuration(), returned.device, returned.session, {id});
    }
  }
}

// For remote heaps.
void SessionClient::CloseSegments(const v1::CloseSegments& message, Link* link) {
  v1::SessionRequest answer;
  // Segments still open stay charged.
  std::vector<uint64_t> closed = mappings_.CloseRefused();
  const std::vector<uint64_t> more = mappings_.Close({message.segment_ids().begin(), message.segment_ids().end()});
  closed.insert(closed.end(), more.begin(), more.end());
  for (const uint64_t id : closed) {
    answer.mutable_segments_closed()->add_segment_ids(id);
    if (answer.segments_closed().segment_ids_size() == kMaxIdsInMessage) link->stream->Send(std::exchange(answer, {}));
  }
  if (answer.segments_closed().segment_ids_size() > 0) link->stream->Send(std::move(answer));
}

}  // namespace vrambroker::client_internal
