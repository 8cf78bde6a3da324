// SPDX-License-Identifier: Apache-2.0
#include "server/http/http_api.h"

#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "absl/time/time.h"
#include "allocator/base/version.h"
#include "allocator/replay/pickle.h"
#include "allocator/replay/torch_snapshot.h"
#include "allocator/wire/admin_json.h"
#include "allocator/wire/session_ref.h"
#include "server/http/web_files.h"
#include "server/wire/convert.h"

namespace vrambroker {
namespace {

using Json = nlohmann::ordered_json;

constexpr char kApi[] = "/api/v1/";
constexpr uint64_t kOomsShown = 20;
// For the snapshot of a single device. ClientQuestions gives up earlier.
constexpr std::chrono::seconds kSnapshotPatience(8);

HttpResponse JsonAnswer(const Json& json) {
  return {.content_type = "application/json", .body = absl::StrCat(JsonText(json), "\n")};
}

std::string TimeText(std::chrono::system_clock::time_point time) {
  return absl::FormatTime("%Y-%m-%d%ET%H:%M:%E3SZ", absl::FromChrono(time), absl::UTCTimeZone());
}

int64_t ToMilliseconds(std::chrono::system_clock::time_point time) {
  return std::chrono::duration_cast<std::chrono::milliseconds>(time.time_since_epoch()).count();
}

const char* StateName(SegmentView::State state) {
  switch (state) {
    case SegmentView::State::kLeased:
      return "leased";
    case SegmentView::State::kReturning:
      return "returning";
    case SegmentView::State::kQuarantined:
      return "quarantined";
    case SegmentView::State::kIdle:
      return "idle";
  }
  return "unknown";
}

const char* AnswerName(MappedSession::Answer answer) {
  switch (answer) {
    case MappedSession::Answer::kBlocks:
      return "blocks";
    case MappedSession::Answer::kNone:
      return "none";
    case MappedSession::Answer::kTooManyBlocks:
      return "too_many_blocks";
  }
  return "unknown";
}

Json SegmentJson(const MappedSegment& segment) {
  Json json = {{"id", segment.info.id}, {"bytes", segment.info.bytes}, {"state", StateName(segment.info.state)}};
  if (segment.info.holder != SessionId{}) json["session_id"] = Raw(segment.info.holder);
  if (!segment.info.client.empty()) json["client"] = segment.info.client;
  if (segment.blocks == nullptr) return json;
  json["address"] = segment.blocks->address;
  json["pool"] = segment.blocks->pool == PoolKind::kSmall ? "small" : "large";
  json["stream"] = segment.blocks->stream;
  Json::array_t blocks;
  blocks.reserve(3 * segment.blocks->blocks.size());
  for (const BlockSnapshot& block : segment.blocks->blocks) {
    blocks.emplace_back(block.bytes);
    blocks.emplace_back(block.requested_bytes);
    blocks.emplace_back(static_cast<uint64_t>(block.state));
  }
  json["blocks"] = std::move(blocks);
  const std::vector<BlockSnapshot>& all = segment.blocks->blocks;
  if (std::any_of(all.begin(), all.end(), [](const BlockSnapshot& block) { return block.scope != 0; })) {
    Json::array_t scopes;  // places in the session's list, by block
    for (const BlockSnapshot& block : all) scopes.emplace_back(block.scope);
    json["block_scopes"] = std::move(scopes);
  }
  return json;
}

// Same format as `vramctl --format=json map`.
Json ScopeUseJson(const ScopeUse& use) {
  return {{"scope", use.scope},
          {"allocated_bytes", use.allocated_bytes},
          {"bytes_at_peak", use.bytes_at_peak},
          {"blocks", use.blocks},
          {"pinned_hole_bytes", use.pinned_hole_bytes}};
}

// Answer to a question to a client, for a waiting thread.
struct PendingSnapshot {
  Mutex mu;
  CondVar answered;
  std::optional<absl::StatusOr<HeapSnapshot>> snapshot ABSL_GUARDED_BY(mu);
};

absl::StatusOr<HeapSnapshot> WaitForSnapshot(const SessionPtr& session, int device) {
  auto pending = std::make_shared<PendingSnapshot>();
  const auto receive = [pending](absl::StatusOr<HeapSnapshot> snapshot) {
    MutexLock lock(pending->mu);
    pending->snapshot = std::move(snapshot);
    pending->answered.NotifyAll();
  };
  // Excludes recorded events: a recording may be large, and vramctl snapshot serves callers with the right to it.
  session->Snapshot(device, receive, /*with_history=*/false);
  const auto deadline = std::chrono::steady_clock::now() + kSnapshotPatience;
  MutexLock lock(pending->mu);
  while (!pending->snapshot.has_value()) {
    if (!pending->answered.WaitUntil(pending->mu, deadline)) {
      return absl::DeadlineExceededError(absl::StrCat("session ", session->name(), " does not answer"));
    }
  }
  return *std::move(pending->snapshot);
}

}  // namespace

const char* DaemonStateName(DaemonState state) {
  switch (state) {
    case DaemonState::kStarting:
      return "starting";
    case DaemonState::kServing:
      return "serving";
    case DaemonState::kDraining:
      return "draining";
    case DaemonState::kStopping:
      return "stopping";
  }
  return "unknown";
}

HttpApi::HttpApi(Broker* broker, const Timeline* timeline, HttpSources sources)
    : broker_(*broker), timeline_(*timeline), sources_(std::move(sources)), map_(broker) {}

std::vector<HttpPage> HttpApi::Pages() {
  std::vector<HttpPage> pages = {{.path = "/metrics",
                                  .parameters = {},
                                  .answer =
                                      [this](const HttpParameters&) {
                                        return HttpResponse{.content_type = "text/plain; version=0.0.4; charset=utf-8",
                                                            .body = sources_.metrics()};
                                      }},
                                 {.path = "/healthz", .parameters = {}, .answer = [this](const HttpParameters&) {
                                    const absl::Status health = sources_.health();
                                    return health.ok() ? HttpText(200, "ok\n")
                                                       : HttpText(503, absl::StrCat(health.message(), "\n"));
                                  }}};
  const auto add = [&](const std::string& path, std::vector<std::string> parameters,
                       std::function<HttpResponse(const HttpParameters&)> answer, PageCost cost = PageCost::kCostly) {
    pages.push_back({.path = path,
                     .parameters = std::move(parameters),
                     .answer = std::move(answer),
                     .cost = cost,
                     .compress = true});
    // Path used before the interface had a version.
    if (absl::StartsWith(path, kApi)) {
      pages.push_back(pages.back());
      pages.back().path = absl::StrCat("/api/", absl::StripPrefix(path, kApi));
    }
  };
  add(absl::StrCat(kApi, "state"), {}, [this](const HttpParameters&) { return State(); });
  add(absl::StrCat(kApi, "sessions"), {}, [this](const HttpParameters&) { return Sessions(); });
  add(absl::StrCat(kApi, "ooms"), {"last", "session"},
      [this](const HttpParameters& parameters) { return Ooms(parameters); });
  add(absl::StrCat(kApi, "map"), {"device"}, [this](const HttpParameters& parameters) { return Map(parameters); });
  add(absl::StrCat(kApi, "timeline"), {"device", "session"},
      [this](const HttpParameters& parameters) { return TimelineOf(parameters); });
  add(
      "/snapshot.json", {"session", "device"},
      [this](const HttpParameters& parameters) { return Snapshot(parameters); }, PageCost::kLarge);
  for (const WebFile& file : WebFiles()) {
    pages.push_back({.path = std::string(file.path),
                     .parameters = {},
                     .answer =
                         [&file](const HttpParameters&) {
                           return HttpResponse{.content_type = std::string(file.content_type),
                                               .body = std::string(file.content)};
                         },
                     .compress = true});
  }
  return pages;
}

absl::StatusOr<int> HttpApi::DeviceOf(const HttpParameters& parameters, int otherwise) const {
  const auto it = parameters.find("device");
  if (it == parameters.end()) return otherwise;
  int device = -1;
  const int devices = static_cast<int>(broker_.pools().size());
  if (!absl::SimpleAtoi(it->second, &device) || device < 0 || device >= devices) {
    return absl::InvalidArgumentError(
        absl::StrCat("device: no such device; ",
                     devices == 1 ? "the only device is 0" : absl::StrCat("the devices are 0 to ", devices - 1)));
  }
  return device;
}

HttpResponse HttpApi::State() const {
  const BrokerView view = broker_.operator_view().Look();
  const absl::Status health = sources_.health();
  Json devices = Json::array();
  for (size_t i = 0; i < view.devices.size(); ++i) {
    const PoolStats& stats = view.devices[i].pool;
    v1::Device device = ToProto(*broker_.pools()[i]);
    device.set_reserved_bytes(stats.reserved_bytes);  // from the same moment as the sessions
    device.set_idle_bytes(stats.idle_bytes);
    device.set_free_bytes(stats.free_bytes);
    device.set_kept_free_bytes(stats.kept_free_bytes());
    device.set_carried_over_bytes(stats.carried_over_bytes);
    const DeviceView& info = view.devices[i];
    if (info.properties.has_contexts) AddProcesses(*info.processes, device);
    AddSensors(info.sensors, device);
    Json json = ToJson(device, {.allocated_bytes = info.stats.allocated_bytes.all.current,
                                .leased_bytes = info.leased_bytes,
                                .reclaimable_bytes = info.reclaimable_bytes,
                                .inactive_split_bytes = info.stats.inactive_split_bytes.all.current,
                                .quarantined_bytes = info.quarantined_bytes,
                                .left_behind_bytes = info.left_behind_bytes,
                                .unknown_bytes = info.unknown_bytes});
    json["held_back_bytes"] = stats.held_back_bytes;
    json["guaranteed_bytes"] = stats.guaranteed_bytes;
    json["committed_bytes"] = stats.committed_bytes;
    json["segments"] = stats.segments;
    Json refusals = Json::object();
    for (const OomCause cause : kOomCauses) refusals[OomCauseName(cause)] = info.ooms[static_cast<size_t>(cause)];
    json["refusals"] = std::move(refusals);
    devices.push_back(std::move(json));
  }
  Json sessions = Json::array();
  for (const SessionView& session : view.sessions) sessions.push_back(ToJson(ToProto(session)));
  Json claims = Json::array();
  for (const ClaimView& claim : view.claims) claims.push_back(ToJson(ToProto(claim, sources_.socket_dir)));
  return JsonAnswer(Json{{"time", TimeText(std::chrono::system_clock::now())},
                         {"daemon_version", std::string(kVersion)},
                         {"run_id", broker_.run_id()},
                         {"state", DaemonStateName(sources_.state())},
                         {"health", health.ok() ? std::string("ok") : std::string(health.message())},
                         {"total_ooms", broker_.refusals().log().total()},
                         {"devices", std::move(devices)},
                         {"sessions", std::move(sessions)},
                         {"claims", std::move(claims)}});
}

HttpResponse HttpApi::Sessions() const {
  Json sessions = Json::array();
  for (const SessionView& session : broker_.operator_view().Look().sessions)
    sessions.push_back(ToJson(ToProto(session)));
  return JsonAnswer(Json{{"run_id", broker_.run_id()}, {"sessions", std::move(sessions)}});
}

HttpResponse HttpApi::Ooms(const HttpParameters& parameters) const {
  uint64_t last = kOomsShown;
  if (const auto it = parameters.find("last"); it != parameters.end() && !absl::SimpleAtoi(it->second, &last)) {
    return HttpError(absl::InvalidArgumentError("last: not a whole number; 0 shows all"));
  }
  absl::StatusOr<std::vector<std::shared_ptr<const OomEvent>>> matching = broker_.refusals().log().NewestFirst();
  if (const auto it = parameters.find("session"); it != parameters.end()) {
    const absl::StatusOr<SessionRef> wanted = FromProto(ParseSessionRef(it->second));
    matching = wanted.ok() ? broker_.refusals().LastOf(*wanted) : wanted.status();
    if (!matching.ok()) return HttpError(matching.status());
  }
  Json events = Json::array();
  for (const std::shared_ptr<const OomEvent>& event : *matching) {
    if (last > 0 && events.size() == last) break;
    events.push_back(ToJson(ToProto(*event, broker_.refusals().recordings())));
  }
  return JsonAnswer(Json{{"run_id", broker_.run_id()},
                         {"total_events", broker_.refusals().log().total()},
                         {"matching_events", matching->size()},
                         {"events", std::move(events)}});
}

HttpResponse HttpApi::TimelineOf(const HttpParameters& parameters) const {
  const absl::StatusOr<int> device = DeviceOf(parameters, 0);
  if (!device.ok()) return HttpError(device.status());
  if (const auto name = parameters.find("session"); name != parameters.end()) {
    const absl::StatusOr<SessionRef> wanted = FromProto(ParseSessionRef(name->second));
    return wanted.ok() ? TimelineOfSession(*wanted, *device) : HttpError(wanted.status());
  }
  Json times, allocated, leased, fragmented, reclaimable, idle, left_behind, refusals, waiting;
  for (Json* column :
       {&times, &allocated, &leased, &fragmented, &reclaimable, &idle, &left_behind, &refusals, &waiting})
    *column = Json::array();
  for (const TimelineSample& sample : timeline_.Get(static_cast<size_t>(*device))) {
    times.push_back(ToMilliseconds(sample.time));
    allocated.push_back(sample.allocated_bytes);
    leased.push_back(sample.leased_bytes);
    fragmented.push_back(sample.inactive_split_bytes);
    reclaimable.push_back(sample.reclaimable_bytes);
    idle.push_back(sample.idle_bytes);
    left_behind.push_back(sample.left_behind_bytes);
    refusals.push_back(sample.refusals);
    waiting.push_back(sample.waiting);
  }
  return JsonAnswer(Json{{"run_id", broker_.run_id()},
                         {"device", *device},
                         {"capacity_bytes", broker_.pools()[static_cast<size_t>(*device)]->capacity_bytes()},
                         {"time_ms", std::move(times)},
                         {"allocated_bytes", std::move(allocated)},
                         {"leased_bytes", std::move(leased)},
                         {"inactive_split_bytes", std::move(fragmented)},
                         {"reclaimable_bytes", std::move(reclaimable)},
                         {"idle_bytes", std::move(idle)},
                         {"left_behind_bytes", std::move(left_behind)},
                         {"refusals", std::move(refusals)},
                         {"waiting", std::move(waiting)}});
}

HttpResponse HttpApi::TimelineOfSession(const SessionRef& wanted, int device) const {
  const absl::StatusOr<SessionPtr> session = broker_.sessions().Find(wanted);
  if (!session.ok()) return HttpError(session.status());
  const SessionId id = (*session)->id();
  const SegmentPool& pool = *broker_.pools()[static_cast<size_t>(device)];
  Json times, reserved, allocated;
  for (Json* column : {&times, &reserved, &allocated}) *column = Json::array();
  for (const SessionSample& sample : timeline_.GetOfSession(id, static_cast<size_t>(device))) {
    times.push_back(ToMilliseconds(sample.time));
    reserved.push_back(sample.reserved_bytes);
    allocated.push_back(sample.allocated_bytes);
  }
  return JsonAnswer(Json{{"run_id", broker_.run_id()},
                         {"device", device},
                         {"session_id", Raw(id)},
                         {"name", (*session)->name()},
                         {"limit_bytes", pool.GetAccount(id).value_or(AccountState()).effective_limit_bytes()},
                         {"time_ms", std::move(times)},
                         {"reserved_bytes", std::move(reserved)},
                         {"allocated_bytes", std::move(allocated)}});
}

HttpResponse HttpApi::Map(const HttpParameters& parameters) {
  const absl::StatusOr<int> device = DeviceOf(parameters, 0);
  if (!device.ok()) return HttpError(device.status());
  const DeviceMap map = map_.Get(*device);
  Json sessions = Json::array();
  for (const MappedSession& session : map.sessions) {
    sessions.push_back({{"id", Raw(session.id)}, {"name", session.name}, {"answer", AnswerName(session.answer)}});
    if (session.answer == MappedSession::Answer::kBlocks) sessions.back()["age_ms"] = session.age.count();
    if (!session.scopes.empty()) sessions.back()["scopes"] = session.scopes;
    if (session.scope_uses.empty()) continue;
    Json::array_t uses;
    for (const ScopeUse& use : session.scope_uses) uses.push_back(ScopeUseJson(use));
    sessions.back()["scope_uses"] = std::move(uses);
    if (session.more_scope_uses > 0) sessions.back()["more_scope_uses"] = session.more_scope_uses;
  }
  Json segments = Json::array();
  for (const MappedSegment& segment : map.segments) segments.push_back(SegmentJson(segment));
  return JsonAnswer(Json{{"run_id", broker_.run_id()},
                         {"device", *device},
                         {"sessions", std::move(sessions)},
                         {"segments", std::move(segments)}});
}

HttpResponse HttpApi::Snapshot(const HttpParameters& parameters) {
  const auto name = parameters.find("session");
  if (name == parameters.end()) {
    return HttpError(absl::InvalidArgumentError("session: missing; ask for /snapshot.json?session=NAME_OR_ID"));
  }
  const absl::StatusOr<int> only = DeviceOf(parameters, -1);
  if (!only.ok()) return HttpError(only.status());
  const absl::StatusOr<SessionRef> wanted = FromProto(ParseSessionRef(name->second));
  if (!wanted.ok()) return HttpError(wanted.status());
  const absl::StatusOr<SessionPtr> session = broker_.sessions().Find(*wanted);
  if (!session.ok()) return HttpError(session.status());
  std::vector<HeapSnapshot> heaps;
  for (int device = 0; device < static_cast<int>(broker_.pools().size()); ++device) {
    heaps.emplace_back();  // for an unwanted device: an empty heap, so that indexes are ordinals
    if (*only >= 0 && device != *only) continue;
    absl::StatusOr<HeapSnapshot> heap = WaitForSnapshot(*session, device);
    if (!heap.ok()) return HttpError(heap.status());
    heaps.back() = *std::move(heap);
    // Each block names its scope in full: with a stack of frames each, a large heap would carry gigabytes of scopes.
    heaps.back().scopes = WithoutNesting(heaps.back().scopes);
  }
  return {.content_type = "application/json", .body = absl::StrCat(WriteJson(TorchSnapshot(heaps)), "\n")};
}

}  // namespace vrambroker
