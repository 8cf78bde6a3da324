// SPDX-License-Identifier: Apache-2.0
//
// SessionClient: connecting to the daemon, for a new or an existing session.
#include <algorithm>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "allocator/base/bytes.h"
#include "allocator/wire/device_kind.h"
#include "client/session/session_client.h"
#include "client/session/visible_devices.h"

namespace vrambroker::client_internal {
namespace {

constexpr uint32_t kProtocolVersion = 1;

v1::Limit ToProto(const Limit& limit) {
  v1::Limit proto;
  if (const uint64_t* bytes = std::get_if<uint64_t>(&limit)) {
    proto.set_bytes(*bytes);
  } else {
    proto.set_fraction(std::get<double>(limit));
  }
  return proto;
}

}  // namespace

v1::Hello SessionClient::MakeHello() const {
  v1::Hello hello;
  hello.set_protocol_version(kProtocolVersion);
  hello.set_name(options().name);
  if (options().limit.has_value()) *hello.mutable_limit() = ToProto(*options().limit);
  if (options().guarantee.has_value()) *hello.mutable_guarantee() = ToProto(*options().guarantee);
  hello.set_alloc_conf(conf_.text);
  if (mark_ >= 0) hello.mutable_mark()->set_fd(static_cast<uint32_t>(mark_));
  hello.mutable_devices()->Add(named_devices_.begin(), named_devices_.end());
  hello.set_placement(leases() ? v1::PLACEMENT_LEASED : v1::PLACEMENT_REMOTE);
  return hello;
}

std::vector<v1::SessionRequest> SessionClient::ResumeMessages(const Link& resume) {
  std::vector<v1::SessionRequest> messages(1);
  *messages[0].mutable_hello() = MakeHello();
  v1::Resume& first = *messages[0].mutable_hello()->mutable_resume();
  first.set_token(resume.resume_token);
  // The daemon takes back every segment missing from the list, and may lease it to others. So an unfinished lease must
  // not be used (Adopt() ensures that), and a segment being returned is listed until closed.
  google::protobuf::RepeatedField<uint64_t>* ids = first.mutable_segment_ids();
  for (size_t device = 0; device < heaps_.size(); ++device) {
    for (const uint64_t id : leased(device).HeldSegments(resume.session)) {
      if (resume.takes_resume_in_parts && ids->size() == kMaxIdsInMessage) {
        ids = messages.emplace_back().mutable_resume_more()->mutable_segment_ids();
      }
      ids->Add(id);
    }
  }
  for (size_t i = 0; i + 1 < messages.size(); ++i) {
    i == 0 ? first.set_more(true) : messages[i].mutable_resume_more()->set_more(true);
  }
  return messages;
}

absl::StatusOr<std::shared_ptr<Link>> SessionClient::Connect(const Link* resume, absl::Duration timeout,
                                                             const std::string& earlier_token) {
  const Deadline deadline = DeadlineAfter(timeout);
  absl::StatusOr<std::shared_ptr<grpc::Channel>> channel = ConnectChannel(options().socket_dir, timeout, [this] {
    MutexLock lock(mu_);
    return stopping_;
  });
  if (!channel.ok()) return channel.status();
  if (heaps_.empty() && named_devices_.empty()) {
    absl::StatusOr<std::vector<std::string>> visible = VisibleDevices(*channel, TimeUntil(deadline));
    if (!visible.ok()) return visible.status();
    named_devices_ = *std::move(visible);
    devices_source_ = "CUDA_VISIBLE_DEVICES";
  }
  auto link = std::make_shared<Link>();
  // Filled while this thread waits for the stream. The stream's thread takes the welcome, since a limit change may
  // follow immediately.
  v1::Welcome welcome;
  absl::Status taken;
  std::vector<v1::SessionRequest> messages(1);
  if (resume == nullptr) {
    *messages[0].mutable_hello() = MakeHello();
    messages[0].mutable_hello()->set_earlier_token(earlier_token);
  } else {
    messages = ResumeMessages(*resume);
  }
  link->stream = SessionStream::Start(
      *std::move(channel), std::move(messages),
      SessionStream::Handlers{
          .welcomed =
              [this, &welcome, &taken](const v1::Welcome& message) {
                welcome = message;
                taken = TakeWelcome(message);
              },
          .close_segments = [this, raw = link.get()](const v1::CloseSegments& message) { CloseSegments(message, raw); },
          .limit_changed =
              [this](const v1::LimitChanged& message) { SetLimit(message.device(), message.limit_bytes()); },
          .question =
              [this](const v1::Question& question) {
                MutexLock lock(mu_);
                questions_.push_back(question);
                changed_.NotifyAll();
              },
          .lost = [this, raw = link.get()](const absl::Status& why) { Lost(raw, why); }});
  {
    MutexLock lock(mu_);
    connecting_ = link->stream;
    if (stopping_) link->stream->StopWaiting();
  }
  const absl::Status welcomed = link->stream->WaitForWelcome(timeout);
  {
    MutexLock lock(mu_);
    connecting_ = nullptr;
  }
  if (absl::IsUnimplemented(welcomed)) {
    return absl::FailedPreconditionError("the daemon has a different version: it does not know Broker.Session");
  }
  if (!welcomed.ok() || !taken.ok()) {
    // Say no goodbye for a session to be resumed: a goodbye would give held memory away. A new session may be open by
    // now. Abort() can overtake a goodbye, so Close() waits for the answer, except in Open(), bound by its own timeout.
    if (resume == nullptr) (void)link->stream->Close(earlier_token.empty() ? absl::ZeroDuration() : kGoodbyeTimeout);
    link->stream->Abort();
    if (welcomed.ok()) return taken;
    absl::string_view what = welcomed.message();
    if (absl::ConsumePrefix(&what, "devices:")) {
      return absl::Status(welcomed.code(), absl::StrCat(devices_source_, ":", what));
    }
    return conf_.NameSource(welcomed);
  }
  link->session_id = welcome.session_id();
  link->name = welcome.name();
  link->resume_token = welcome.resume_token();
  link->takes_carried_over = welcome.takes_carried_over();
  link->takes_resume_in_parts = welcome.takes_resume_in_parts();
  link->takes_segment_calls = welcome.takes_segment_calls();
  link->record_events = welcome.record_events();
  if (welcome.has_users()) link->users = welcome.users();
  return link;
}

// Learns the devices from the first session's welcome; later sessions must have the same devices.
absl::Status SessionClient::TakeWelcome(const v1::Welcome& welcome) {
  if (!options().devices.empty() && !welcome.takes_devices()) {
    return absl::FailedPreconditionError(
        absl::StrCat(devices_source_, ": the daemon is too old for sessions that name devices: update the daemon"));
  }
  const std::vector<DeviceInfo>& known = devices();
  const bool first = known.empty();
  if (!first && static_cast<size_t>(welcome.devices_size()) != known.size()) {
    return absl::FailedPreconditionError(absl::StrCat("the daemon's number of devices changed from ", known.size(),
                                                      " to ", welcome.devices_size(),
                                                      ": connect again with a new client"));
  }
  if (!first) {
    for (const v1::Welcome::DeviceGrant& grant : welcome.devices()) {
      const DeviceInfo& info = known[grant.device().ordinal()];
      if (info.uuid != grant.device().uuid()) {
        return absl::FailedPreconditionError(absl::StrCat("the daemon's device ", info.ordinal, " changed from ",
                                                          info.uuid, " to ", grant.device().uuid(),
                                                          ": connect again with a new client"));
      }
      if (leases()) leased(grant.device().ordinal()).SetCapacity(grant.device().capacity_bytes());
      SetLimit(grant.device().ordinal(), grant.limit_bytes());
      // The request for events came over the old stream, or from a daemon now gone; the daemon asks again if needed.
      if (leases()) leased(grant.device().ordinal()).HoldRecording(0);
    }
    TakeDevices(welcome);
    return absl::OkStatus();
  }
  for (const std::string& warning : welcome.warnings()) warnings_.push_back(absl::StrCat(conf_.source, ": ", warning));
  AllocatorOptions options;
  if (leases()) {
    absl::StatusOr<AllocConf> conf = ParseAllocConf(welcome.alloc_conf());
    if (!conf.ok()) {
      return absl::FailedPreconditionError(
          absl::StrCat("the daemon has a different version: alloc_conf: ", conf.status().message()));
    }
    options = conf->options;
  }
  limits_ = std::make_unique<std::atomic<uint64_t>[]>(static_cast<size_t>(welcome.devices_size()));
  for (const v1::Welcome::DeviceGrant& grant : welcome.devices()) {
    const int ordinal = static_cast<int>(heaps_.size());
    if (leases()) {
      auto heap = std::make_unique<LeasedHeap>(this, &addresses_, ordinal, options, grant.device().capacity_bytes());
      heap->SetRecording(welcome.record_events(), /*exact_times=*/false);
      heaps_.push_back(std::move(heap));
    } else {
      heaps_.push_back(std::make_unique<RemoteHeap>(this, &mappings_, ordinal));
    }
    SetLimit(static_cast<uint32_t>(ordinal), grant.limit_bytes());
  }
  {
    MutexLock lock(reports_mu_);
    reported_.resize(heaps_.size());
  }
  MutexLock lock(devices_mu_);
  opened_.resize(heaps_.size());
  TakeDevices(welcome);
  return absl::OkStatus();
}

void SessionClient::TakeDevices(const v1::Welcome& welcome) {
  std::vector<DeviceInfo> said;
  for (const v1::Welcome::DeviceGrant& grant : welcome.devices()) {
    said.push_back({.ordinal = static_cast<int>(said.size()),
                    .uuid = grant.device().uuid(),
                    .name = grant.device().name(),
                    .kind = KindName(grant.device().kind()),
                    .total_bytes = grant.device().total_bytes(),
                    .capacity_bytes = grant.device().capacity_bytes()});
  }
  const auto same = [](const DeviceInfo& a, const DeviceInfo& b) { return a.capacity_bytes == b.capacity_bytes; };
  if (absl::c_equal(said, devices(), same)) return;
  devices_.store(&device_lists_.emplace_back(std::move(said)), std::memory_order_release);
}

void SessionClient::SetLimit(uint32_t device, uint64_t bytes) {
  if (device >= heaps_.size()) return;
  limits_[device] = bytes;
  if (leases()) leased(device).SetLimit(bytes);
}

}  // namespace vrambroker::client_internal
