// SPDX-License-Identifier: Apache-2.0
//
// vramctl trace: records a session for a while and writes its activity.
#include <grpcpp/grpcpp.h>
#include <poll.h>
#include <signal.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "allocator/base/unique_fd.h"
#include "allocator/heap/heap_snapshot.h"
#include "allocator/wire/admin_json.h"
#include "client/vramctl/commands/commands.h"
#include "client/vramctl/commands/snapshot_file.h"
#include "client/vramctl/daemon/daemon_calls.h"
#include "client/vramctl/options/refusal.h"
#include "client/vramctl/views/output.h"

namespace vrambroker::vramctl {
namespace {

constexpr uint32_t kMostEvents = 1'000'000;                  // kept by a session on each device
constexpr absl::Duration kPeriod = absl::Milliseconds(250);  // for checking the session and its refusals

// Holds Admin::HoldRecording open during its lifetime. Then, even if this process is killed, the session returns to
// keeping as many events as before.
class Hold {
 public:
  explicit Hold(Daemon* daemon) : daemon_(*daemon) {}
  ~Hold() {
    context_.TryCancel();
    queue_.Shutdown();
    void* tag = nullptr;
    for (bool ok = false; queue_.Next(&tag, &ok);) {
    }
  }
  Hold(const Hold&) = delete;
  Hold& operator=(const Hold&) = delete;

  // Call once. Waits until the session keeps `events` on each device.
  absl::Status Start(uint64_t session, uint32_t events);

 private:
  // Waits until the started operation is done. False: the daemon's timeout has passed.
  bool Wait(bool* ok) {
    void* tag = nullptr;
    return queue_.AsyncNext(&tag, ok, absl::ToChronoTime(absl::Now() + daemon_.timeout)) ==
           grpc::CompletionQueue::GOT_EVENT;
  }

  Daemon& daemon_;
  grpc::ClientContext context_;
  grpc::CompletionQueue queue_;
  std::unique_ptr<grpc::ClientAsyncReader<v1::HoldRecordingResponse>> call_;
  v1::HoldRecordingResponse response_;
  grpc::Status status_;  // set after the call has ended by itself
};

absl::Status Hold::Start(uint64_t session, uint32_t events) {
  std::optional<WaitingNotice> notice;
  if (daemon_.says_that_it_waits) notice.emplace(daemon_.timeout);
  v1::HoldRecordingRequest request;
  request.mutable_session()->set_id(session);
  request.set_events(events);
  call_ = daemon_.admin->PrepareAsyncHoldRecording(&context_, request, &queue_);
  call_->StartCall(nullptr);
  absl::Status late = StatusOfCall({grpc::StatusCode::DEADLINE_EXCEEDED, ""}, daemon_.timeout);
  bool ok = false;
  if (!Wait(&ok)) return late;
  call_->Read(&response_, nullptr);
  if (!Wait(&ok)) return late;
  if (ok) return absl::OkStatus();
  call_->Finish(&status_, nullptr);
  if (!Wait(&ok)) return late;
  return StatusOfCall(status_, daemon_.timeout);
}

// Makes a session keep many events for a while. Events kept so far remain; afterwards the session keeps as many as
// before.
class Recorder {
 public:
  // `session` must outlive the recorder.
  Recorder(Daemon* daemon, const v1::Session& session) : daemon_(*daemon), session_(session) {}

  absl::Status Start();
  // Returns the events since Start(), or the last of them: see is_complete().
  absl::StatusOr<std::vector<HeapSnapshot>> Read();
  // False: the events from Read() begin later than Start(). Either the session produced more events than it keeps, or
  // someone changed the number of events to keep.
  bool is_complete() const { return is_complete_; }
  // Removes events older than Start() from `heap`. False: its first events are later.
  bool DropEarlier(size_t device, HeapSnapshot* heap) const;
  void Stop() { hold_.reset(); }

 private:
  absl::StatusOr<uint64_t> Mark();

  Daemon& daemon_;
  const v1::Session& session_;
  std::unique_ptr<Hold> hold_;
  bool is_complete_ = true;
  std::vector<int64_t> started_;  // per device: time of our first snapshot event; 0: nothing recorded
};

// Takes the snapshot marking the beginning. Returns the number of events kept.
absl::StatusOr<uint64_t> Recorder::Mark() {
  const absl::StatusOr<std::vector<HeapSnapshot>> heaps = ReadSnapshots(daemon_, session_.id());
  if (!heaps.ok()) return heaps.status();
  if (absl::Status status = CheckHasBlocks(*heaps, session_.name()); !status.ok()) return status;
  started_.clear();
  uint64_t kept = 0;
  for (const HeapSnapshot& heap : *heaps) {
    started_.push_back(heap.history.empty() ? 0 : heap.history.back().time_us);
    kept = std::max(kept, heap.max_events);
  }
  return kept;
}

absl::Status Recorder::Start() {
  const absl::StatusOr<uint64_t> kept = Mark();
  if (!kept.ok()) return kept.status();
  absl::Status status;
  for (uint32_t events = kMostEvents; events >= 1000; events /= 2) {
    hold_ = std::make_unique<Hold>(&daemon_);
    status = hold_->Start(session_.id(), events);
    if (!absl::IsResourceExhausted(status) || events <= *kept) break;
    // The daemon limits the recording of all sessions of a user.
  }
  if (!status.ok()) hold_.reset();
  // The events kept by the session anyway are enough.
  if (absl::IsResourceExhausted(status) && *kept > 0) status = absl::OkStatus();
  // A session without events so far has no mark yet.
  if (status.ok() && *kept == 0) status = Mark().status();
  if (!status.ok()) Stop();
  return status;
}

absl::StatusOr<std::vector<HeapSnapshot>> Recorder::Read() {
  absl::StatusOr<std::vector<HeapSnapshot>> heaps = ReadSnapshots(daemon_, session_.id());
  if (!heaps.ok()) return heaps.status();
  is_complete_ = true;
  for (size_t i = 0; i < heaps->size(); ++i) is_complete_ = DropEarlier(i, &(*heaps)[i]) && is_complete_;
  return heaps;
}

bool Recorder::DropEarlier(size_t device, HeapSnapshot* heap) const {
  if (device >= started_.size()) return true;
  std::vector<HistoryEvent>& history = heap->history;
  const auto ours = std::find_if(history.begin(), history.end(), [&](const HistoryEvent& event) {
    return event.action == HistoryAction::kSnapshot && event.time_us == started_[device];
  });
  if (ours == history.end()) return false;
  history.erase(history.begin(), ours + 1);
  return true;
}

// Returns the newest recorded refusal of the session since `start`; without any, the newest refusal. A program may try
// again and be refused again, without a recording by the daemon.
absl::StatusOr<std::optional<v1::OutOfMemoryEvent>> RefusalSince(Daemon& daemon, uint64_t session, absl::Time start) {
  v1::ListOutOfMemoryRequest request;
  request.mutable_session()->set_id(session);
  v1::ListOutOfMemoryResponse response;
  if (absl::Status status = Call(daemon, &v1::Admin::Stub::ListOutOfMemory, request, &response); !status.ok()) {
    return status;
  }
  std::optional<v1::OutOfMemoryEvent> newest;
  for (const v1::OutOfMemoryEvent& event : response.events()) {
    if (TimeOf(event.time()) <= start) break;
    if (event.recorded()) return event;
    if (!newest.has_value()) newest = event;
  }
  return newest;
}

// Counts the session's events, without the snapshot events caused by reading.
size_t CountEvents(const std::vector<HeapSnapshot>& heaps) {
  size_t events = 0;
  for (const HeapSnapshot& heap : heaps) {
    events +=
        static_cast<size_t>(std::count_if(heap.history.begin(), heap.history.end(), [](const HistoryEvent& event) {
          return event.action != HistoryAction::kSnapshot;
        }));
  }
  return events;
}

// Overwrites a single line on stderr, if stderr is a terminal.
class ProgressLine {
 public:
  explicit ProgressLine(bool shown) : shown_(shown && isatty(STDERR_FILENO) != 0) {}
  ~ProgressLine() {
    if (shown_) std::fputs("\r\x1b[K", stderr);
  }
  ProgressLine(const ProgressLine&) = delete;
  ProgressLine& operator=(const ProgressLine&) = delete;

  void Show(const std::string& text) const {
    if (shown_) std::fprintf(stderr, "\r\x1b[K%s", text.c_str());
  }

 private:
  const bool shown_;
};

struct Recorded {
  std::vector<HeapSnapshot> heaps;  // the last heaps read
  absl::Time read_at;
  bool is_complete = true;  // the heaps have all events since the beginning
  const char* ended_by = "time";
  absl::Status status;  // why recording ended early
};

// True if the session will never answer again. False: the session, or the daemon, may only be busy.
bool IsGone(const absl::Status& status) {
  return absl::IsNotFound(status) || absl::IsAborted(status) || absl::IsUnavailable(status) ||
         absl::IsPermissionDenied(status);
}

// Waits until the time is over, a request is refused, a signal arrives, or the session is gone.
Recorded Wait(const Context& context, Daemon& daemon, const v1::Session& session, Recorder& recorder, int signals,
              absl::Time start) {
  Recorded recorded;
  const absl::Time end =
      context.trace.until_oom ? absl::InfiniteFuture() : start + absl::Seconds(context.trace.seconds);
  const ProgressLine progress(!context.json);
  // After the session has ended, only the data read before remains. Slow reads are done less often.
  absl::Time next_read = start + absl::Seconds(1);
  const auto read = [&] {
    const absl::Time before = absl::Now();
    absl::StatusOr<std::vector<HeapSnapshot>> heaps = recorder.Read();
    if (!heaps.ok()) return heaps.status();
    recorded.heaps = *std::move(heaps);
    recorded.is_complete = recorder.is_complete();
    recorded.read_at = absl::Now();
    next_read = recorded.read_at + std::max(absl::Seconds(1), 10 * (recorded.read_at - before));
    return absl::OkStatus();
  };
  recorded.status = read();
  bool ended = false;
  while (recorded.status.ok() && !ended) {
    const std::string until = context.trace.until_oom
                                  ? "until a request is refused"
                                  : absl::StrFormat("%.0f s left", absl::ToDoubleSeconds(end - absl::Now()));
    progress.Show(absl::StrCat("recording ", session.name(), ": ", Counted(CountEvents(recorded.heaps), "event"),
                               " so far, ", until, " (Ctrl-C ends and writes)"));
    const absl::Duration left = std::max(absl::ZeroDuration(), std::min(kPeriod, end - absl::Now()));
    pollfd wait = {.fd = signals, .events = POLLIN, .revents = 0};
    if (poll(&wait, 1, static_cast<int>(absl::ToInt64Milliseconds(left)) + 1) > 0) {
      recorded.ended_by = "signal";
      ended = true;
    } else if (context.trace.until_oom) {
      const absl::StatusOr<std::optional<v1::OutOfMemoryEvent>> refused = RefusalSince(daemon, session.id(), start);
      if (IsGone(refused.status())) recorded.status = refused.status();
      if (refused.ok() && refused->has_value()) {
        recorded.ended_by = "refusal";
        ended = true;
      }
    } else {
      ended = absl::Now() >= end;
    }
    if (!recorded.status.ok()) break;
    absl::Status looked;
    if (ended) {
      constexpr int kTries = 5;
      looked = read();
      for (int i = 1; i < kTries && !looked.ok() && !IsGone(looked); ++i) {
        absl::SleepFor(kPeriod);
        looked = read();
      }
      recorded.status = looked;
    } else if (absl::Now() >= next_read) {
      looked = read();
      if (!looked.ok()) next_read = absl::Now() + absl::Seconds(1);
    } else {
      looked = GetSession(daemon, SessionRefOf(session.id())).status();
    }
    if (IsGone(looked)) recorded.status = looked;
  }
  if (recorded.status.ok() || !context.trace.until_oom) return recorded;
  // A process ending because of the refusal takes its events along; the daemon has fetched the events before answering.
  const absl::StatusOr<std::optional<v1::OutOfMemoryEvent>> refused = RefusalSince(daemon, session.id(), start);
  if (!refused.ok() || !refused->has_value()) return recorded;
  const v1::OutOfMemory& report = (*refused)->out_of_memory();
  absl::StatusOr<HeapSnapshot> heap = ReadRefusalSnapshot(daemon, report.refusal());
  if (!heap.ok()) {
    recorded.status = {recorded.status.code(),
                       absl::StrCat("a request was refused, and the session ended before it could be read again (",
                                    recorded.status.message(), "; ", heap.status().message(), ")")};
    return recorded;
  }
  if (recorded.heaps.size() <= report.device()) recorded.heaps.resize(report.device() + 1);
  recorded.is_complete = recorder.DropEarlier(report.device(), &*heap);
  recorded.heaps[report.device()] = *std::move(heap);
  recorded.read_at = TimeOf((*refused)->time());
  recorded.ended_by = "refusal";
  recorded.status = absl::OkStatus();
  return recorded;
}

}  // namespace

absl::Status RunTrace(const Context& context, const std::string& name) {
  const std::string& path = context.output;
  if (absl::Status status = CheckSnapshotPath(path); !status.ok()) return status;
  // Block signals before gRPC starts its threads, so that every thread inherits the mask.
  sigset_t mask;
  sigemptyset(&mask);
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) sigaddset(&mask, signal);
  pthread_sigmask(SIG_BLOCK, &mask, nullptr);
  const UniqueFd signals(signalfd(-1, &mask, SFD_CLOEXEC));
  if (!signals.valid()) return absl::ErrnoToStatus(errno, "signalfd");

  absl::StatusOr<Daemon> daemon = Daemon::Connect(context);
  if (!daemon.ok()) return daemon.status();
  const absl::StatusOr<v1::Session> session = GetSession(*daemon, ParseSessionRef(name));
  if (!session.ok()) return session.status();
  if (session->state() == v1::SESSION_STATE_ENDED) {
    return Refusal(absl::FailedPreconditionError(
        absl::StrCat(session->name(), " has ended (id ", session->id(), "): it does nothing any more to record")));
  }
  Recorder recorder(&*daemon, *session);
  if (absl::Status status = recorder.Start(); !status.ok()) return status;
  const absl::Time start = absl::Now();
  const Recorded recorded = Wait(context, *daemon, *session, recorder, signals.get(), start);
  recorder.Stop();
  // Unblocking lets signals end the program. First drain the signal already handled by Wait().
  pollfd heard = {.fd = signals.get(), .events = POLLIN, .revents = 0};
  for (signalfd_siginfo info; poll(&heard, 1, 0) > 0 && read(signals.get(), &info, sizeof info) == sizeof info;) {
  }
  pthread_sigmask(SIG_UNBLOCK, &mask, nullptr);

  const size_t events = CountEvents(recorded.heaps);
  if (!recorded.status.ok()) {
    const std::string why =
        absl::StrCat(session->name(), " could not be recorded to the end: ", recorded.status.message());
    if (events == 0)
      return Refusal({recorded.status.code(), absl::StrCat(why, "; nothing was recorded, and no file written")});
    if (absl::Status status = WriteSnapshot(recorded.heaps, path); !status.ok()) {
      return {status.code(), absl::StrCat(why, "; ", status.message())};
    }
    return Refusal({recorded.status.code(),
                    absl::StrFormat("%s; %s has its %s of the first %.1f seconds", why, path, Counted(events, "event"),
                                    absl::ToDoubleSeconds(recorded.read_at - start))});
  }
  if (events == 0) {  // the session may have leased its first segment meanwhile
    if (absl::Status status = CheckHasBlocks(recorded.heaps, session->name()); !status.ok()) return status;
  }
  if (absl::Status status = WriteSnapshot(recorded.heaps, path); !status.ok()) return status;
  const double seconds = absl::ToDoubleSeconds(recorded.read_at - start);
  if (path == "-") return absl::OkStatus();
  size_t segments = 0;
  size_t blocks = 0;
  for (const HeapSnapshot& heap : recorded.heaps) {
    segments += heap.segments.size();
    for (const SegmentSnapshot& segment : heap.segments) blocks += segment.blocks.size();
  }
  if (context.json) {
    Print({{"session", session->name()},
           {"file", path},
           {"seconds", seconds},
           {"ended_by", recorded.ended_by},
           {"complete", recorded.is_complete},
           {"segments", segments},
           {"blocks", blocks},
           {"events", events}});
  } else {
    std::printf("%s: wrote %s of %.1f seconds%s, %s and %s to %s\n", session->name().c_str(),
                Counted(events, "event").c_str(), seconds,
                recorded.is_complete ? "" : " (the first are lost: the session keeps no more)",
                Counted(segments, "segment").c_str(), Counted(blocks, "block").c_str(), path.c_str());
  }
  return absl::OkStatus();
}

}  // namespace vrambroker::vramctl
