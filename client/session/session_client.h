// SPDX-License-Identifier: Apache-2.0
#ifndef VRAMBROKER_CLIENT_SESSION_SESSION_CLIENT_H_
#define VRAMBROKER_CLIENT_SESSION_SESSION_CLIENT_H_

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "allocator/base/mutex.h"
#include "allocator/device/device.h"
#include "allocator/device/session_mark.h"
#include "allocator/heap/memory_stats.h"
#include "client/connection/call_gate.h"
#include "client/connection/connection.h"
#include "client/connection/deadline.h"
#include "client/connection/descriptor_channel.h"
#include "client/connection/link.h"
#include "client/connection/session_stream.h"
#include "client/heap/address_map.h"
#include "client/heap/heap.h"
#include "client/heap/heap_host.h"
#include "client/heap/leased_heap.h"
#include "client/heap/mappings.h"
#include "client/heap/remote_heap.h"
#include "client/heap/trim_requests.h"
#include "client/session/alloc_conf_text.h"
#include "client/vrambroker/client.h"
#include "vrambroker/v1/broker.grpc.pb.h"

namespace vrambroker::client_internal {

inline constexpr int kMaxIdsInMessage = 4096;  // segment ids
inline constexpr absl::Duration kGoodbyeTimeout = absl::Seconds(2);

// SessionClient is a session: the connection to the daemon, the heaps, and the background thread for both. Thread-safe.
//
// A leasing session survives a broken connection: the background thread reconnects and resumes the session, or opens a
// new session for later leases when the daemon is a different process.
class SessionClient final : public HeapHost {
 public:
  static absl::StatusOr<std::unique_ptr<SessionClient>> Open(const ClientOptions& options);
  // Ends the session when nothing uses it any more: now, or on a separate thread, also when the daemon is silent.
  // After End() returns, no callback of this session runs.
  static void End(std::unique_ptr<SessionClient> session);
  ~SessionClient() override;

  // From now on, returning memory waits at most 2 s for a silent daemon, then not again until the daemon has answered;
  // the daemon is told later.
  void BeginEnd() { ending_.store(true, std::memory_order_relaxed); }

  // NotFound: no such device. FailedPrecondition: after fork().
  absl::StatusOr<Heap*> heap(int device);
  // Like heap(), but returns nullptr on errors; for hot paths where a status would cost too much.
  Heap* FindHeap(int device) const {
    const auto index = static_cast<size_t>(device);  // a negative index is beyond the end
    return !IsForked() && index < heaps_.size() ? heaps_[index].get() : nullptr;
  }
  absl::Status FreePointer(void* pointer, std::optional<Stream> stream);
  absl::Status RecordStream(void* pointer, Stream stream);
  absl::Status ReturnSegment(void* pointer, std::optional<Stream> stream);
  // The device of memory from Malloc() or LeaseSegment(). OutOfRange unless [offset, offset + bytes) lies within the
  // memory.
  absl::StatusOr<SegmentOpener*> DeviceOf(const void* pointer, uint64_t offset, uint64_t bytes) const;
  absl::StatusOr<uint64_t> EmptyCache();
  absl::Status ReportSegmentUse(int device, const SegmentUse& use) ABSL_LOCKS_EXCLUDED(mu_);
  // FailedPrecondition: this session has no whole segments.
  absl::StatusOr<TrimRequests*> trims();
  absl::Status SetRecording(size_t max_events);
  // By device, each from a single moment.
  absl::StatusOr<std::vector<HeapSnapshot>> Snapshots(bool with_history);

  uint64_t session_id() const override { return link()->session_id; }
  std::string name() const { return link()->name; }
  const std::vector<DeviceInfo>& devices() const { return *devices_.load(std::memory_order_acquire); }
  uint64_t limit_bytes(int device) const override;
  const std::vector<std::string>& warnings() const { return warnings_; }
  absl::Status status() const;

  // ---- For the heaps ----

  std::shared_ptr<Link> link() const override ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status CheckUsable() const override;
  void Grown() override ABSL_LOCKS_EXCLUDED(mu_);
  bool ReportStatsOf(size_t device, bool always = false) override ABSL_LOCKS_EXCLUDED(reports_mu_);
  absl::StatusOr<SegmentOpener*> DeviceFor(int ordinal) override ABSL_LOCKS_EXCLUDED(devices_mu_);
  bool Adopt(const std::shared_ptr<Link>& link, const std::function<void()>& record) override ABSL_LOCKS_EXCLUDED(mu_);
  absl::StatusOr<LeaseAnswer> Lease(Link& link, const v1::LeaseSegmentsRequest& request,
                                    const std::function<bool()>& give_up) override;
  absl::StatusOr<SegmentHandle> FetchHandle(const v1::SegmentHandle& handle) override;
  bool ReturnSegments(int device, uint64_t session, const std::vector<uint64_t>& segments) override
      ABSL_LOCKS_EXCLUDED(mu_);
  void WholeReturned(int device, uint64_t bytes) override { trims_.Returned(device, bytes); }
  absl::Duration Patience() const override;
  void NoteAnswer(const absl::Status& status) override {
    is_silent_.store(absl::IsDeadlineExceeded(status), std::memory_order_relaxed);
  }
  absl::Status CallOver(const std::function<grpc::Status(SessionStream&, grpc::ClientContext*)>& call) override;

 private:
  struct Returned {
    int device = 0;
    uint64_t session = 0;
    std::vector<uint64_t> segments;
  };

  explicit SessionClient(const ClientOptions& options);

  // Returns segments left over while the daemon could not be told; stops at the first without an answer.
  void ReturnAgain() ABSL_LOCKS_EXCLUDED(mu_);
  bool ReturnWithin(absl::Duration timeout, int device, uint64_t session, const std::vector<uint64_t>& segments)
      ABSL_LOCKS_EXCLUDED(mu_);
  // Makes a call over the descriptor socket. nullopt: make the call over the stream instead; the stream's
  // status explains failures.
  std::optional<absl::StatusOr<DescriptorChannel::Answer>> CallDirectly(const Link& link, v1::SegmentCall call,
                                                                        absl::Duration timeout);
  absl::Status Return(Link& link, const v1::ReturnSegmentsRequest& request, absl::Duration timeout);
  bool leases() const { return options().placement == Placement::kLeased; }
  bool InUse();
  // Connects and opens a session: the session of an earlier link, or a new session.
  absl::StatusOr<std::shared_ptr<Link>> Connect(const Link* resume, absl::Duration timeout,
                                                const std::string& earlier_token = "") ABSL_LOCKS_EXCLUDED(mu_);
  v1::Hello MakeHello() const;
  // The messages that resume the session of `resume`, with its segments: the first message, then the others.
  std::vector<v1::SessionRequest> ResumeMessages(const Link& resume);
  absl::Status TakeWelcome(const v1::Welcome& welcome);
  void TakeDevices(const v1::Welcome& welcome);
  LeasedHeap& leased(size_t device) { return static_cast<LeasedHeap&>(*heaps_[device]); }
  RemoteHeap& remote(size_t device) { return static_cast<RemoteHeap&>(*heaps_[device]); }
  void CloseSegments(const v1::CloseSegments& message, Link* link);
  void SetLimit(uint32_t device, uint64_t bytes);
  void Lost(const Link* link, const absl::Status& why) ABSL_LOCKS_EXCLUDED(mu_);
  void Log(const std::string& line) const;

  // ---- The end; nothing is in use any more ----

  // Returns when the background thread has ended, however long it waits.
  void StopBackgroundThread() ABSL_LOCKS_EXCLUDED(mu_);
  // Closes everything and says goodbye. False: no answer from the daemon within `timeout`; worth another try.
  bool SayGoodbye(absl::Duration timeout) ABSL_LOCKS_EXCLUDED(mu_);
  // Tries until the daemon has taken the goodbye, or is gone.
  void SayGoodbyeForSure() ABSL_LOCKS_EXCLUDED(mu_);

  // ---- The background thread ----

  void Keep() ABSL_LOCKS_EXCLUDED(mu_);
  void Answer(const v1::Question& question);
  // Makes a leased heap keep up to `max_events` events.
  void Record(size_t device, size_t max_events);
  // True: the application, knowing the free whole segments, answers instead.
  bool PassOn(const v1::Question& question, uint64_t wanted, uint64_t released);
  void AnswerEndedTrims();
  // Sends the changed figures, or all figures. False: nothing had changed.
  bool ReportStats(bool all) ABSL_LOCKS_EXCLUDED(reports_mu_);
  static void SendStats(const Link& link, size_t device, const MemoryStats& stats);
  // Aborted: an operator has ended the session.
  absl::Status Reconnect() ABSL_LOCKS_EXCLUDED(mu_);
  void GiveBackIdle();
  // Declares all held memory to a daemon that did not lease the memory, before any other request. Declarations over an
  // earlier connection may have been lost.
  void DeclareCarriedOver(Link& link);

  // Constant after Open().
  DescriptorChannel descriptors_;
  AllocConfText conf_;
  const int mark_;  // a descriptor; -1 when the kernel made none
  // The application's callbacks, until its client ends. Shared, since a callback may run while the client ends.
  struct Callbacks {
    CallGate gate;
    std::function<void(const absl::Status&)> on_lost;
    std::function<void(const std::string&)> log;
  };
  const std::shared_ptr<Callbacks> callbacks_ = std::make_shared<Callbacks>();
  const bool logs_to_stderr_;
  std::vector<std::string> named_devices_;  // see ClientOptions::devices
  std::string devices_source_;              // of named_devices_, for messages
  std::vector<std::string> warnings_;
  std::unique_ptr<std::atomic<uint64_t>[]> limits_;  // by device

  // The daemons' device lists, newest last. The application may be reading any list.
  std::deque<std::vector<DeviceInfo>> device_lists_{1};
  std::atomic<const std::vector<DeviceInfo>*> devices_{&device_lists_.back()};

  std::atomic<bool> ending_{false};
  std::atomic<bool> is_silent_{false};  // the daemon did not answer the last return

  Mutex devices_mu_ ABSL_ACQUIRED_AFTER(lock_level::kDevice)
      ABSL_ACQUIRED_BEFORE(lock_level::kLeaf){lock_level::kDevice};
  std::vector<std::unique_ptr<SegmentOpener>> opened_ ABSL_GUARDED_BY(devices_mu_);  // by ordinal; null until used
  Mappings mappings_;                         // of remote heaps; after the devices: closed first
  AddressMap addresses_;                      // of leased heaps
  std::vector<std::unique_ptr<Heap>> heaps_;  // by ordinal
  TrimRequests trims_;

  std::thread background_thread_;

  // Held from reading figures until they are sent, so that the daemon never receives older figures after newer figures.
  // Acquired before any other lock.
  Mutex reports_mu_ ABSL_ACQUIRED_AFTER(lock_level::kReports)
      ABSL_ACQUIRED_BEFORE(lock_level::kLimits){lock_level::kReports};
  std::vector<MemoryStats> reported_ ABSL_GUARDED_BY(reports_mu_);  // the daemon's last figures, by device

  mutable Mutex mu_ ABSL_ACQUIRED_AFTER(lock_level::kClient)
      ABSL_ACQUIRED_BEFORE(lock_level::kStream){lock_level::kClient};
  CondVar changed_;
  std::shared_ptr<Link> link_ ABSL_GUARDED_BY(mu_);
  std::shared_ptr<SessionStream> connecting_ ABSL_GUARDED_BY(mu_);  // of Connect(), while waiting
  bool lost_ ABSL_GUARDED_BY(mu_) = false;                          // link_ has broken
  bool grown_ ABSL_GUARDED_BY(mu_) = false;                         // since the last report
  bool use_reported_ ABSL_GUARDED_BY(mu_) = false;                  // by the application, since the last report
  bool trims_changed_ ABSL_GUARDED_BY(mu_) = false;                 // since the background thread's last look
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  bool orphaned_ ABSL_GUARDED_BY(mu_) = false;  // the background thread deletes this object when nothing is in use
  std::deque<v1::Question> questions_ ABSL_GUARDED_BY(mu_);
  std::vector<Returned> unreturned_ ABSL_GUARDED_BY(mu_);  // while the daemon is unreachable
};

}  // namespace vrambroker::client_internal

#endif  // VRAMBROKER_CLIENT_SESSION_SESSION_CLIENT_H_
