// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/count_calls.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "server/identity/policy.h"
#include "server/identity/process_info.h"
#include "server/requests/charges.h"
#include "server/sessions/counted_session.h"
#include "server/sessions/named_devices.h"

namespace vrambroker {
namespace {

// Discards events: a counted session's client polls instead.
class Silent : public SessionEvents {
 public:
  void CloseSegments(absl::Span<const SegmentId> /*segments*/) override {}
  void LimitChanged(int /*device*/, uint64_t /*limit_bytes*/) override {}
  void Draining(const std::string& /*reason*/) override {}
  void Ended(const std::string& /*reason*/) override {}
  void Ask(uint64_t /*question_id*/, const ClientQuestion& /*question*/) override {}
};

// Never splits a character. The array is zeroed, and its last byte stays 0.
template <size_t kSize>
void PutText(absl::string_view text, char (&array)[kSize]) {
  size_t size = std::min(text.size(), kSize - 1);
  while (size < text.size() && size > 0 && (static_cast<unsigned char>(text[size]) & 0xC0) == 0x80) --size;
  std::copy_n(text.data(), size, array);  // an empty text may have no address
}

// The limit or guarantee `field` of a packet.
absl::StatusOr<std::optional<Limit>> LimitOf(absl::string_view field, uint32_t kind, uint64_t bytes, double fraction) {
  switch (kind) {
    case VRAMBROKER_COUNT_LIMIT_NONE:
      return std::nullopt;
    case VRAMBROKER_COUNT_LIMIT_BYTES:
      return bytes;
    case VRAMBROKER_COUNT_LIMIT_FRACTION:
      return fraction;
    default:
      return absl::InvalidArgumentError(absl::StrCat(field, "_kind: ", kind, " is not a kind of ", field));
  }
}

absl::StatusOr<std::vector<uint32_t>> DevicesOf(const CountRequest& request, absl::Span<SegmentPool* const> pools) {
  const absl::string_view text(request.devices, strnlen(request.devices, sizeof request.devices));
  if (text.size() == sizeof request.devices) return absl::InvalidArgumentError("devices: does not end with a NUL");
  std::vector<std::string> names;
  if (!text.empty()) names = absl::StrSplit(text, ',');
  for (std::string& name : names) absl::StripAsciiWhitespace(&name);
  return NamedDevices(names, pools);
}

absl::StatusOr<OpenOptions> OptionsOf(const CountRequest& request, absl::Span<SegmentPool* const> pools) {
  const size_t length = strnlen(request.name, sizeof request.name);
  if (length == sizeof request.name) return absl::InvalidArgumentError("name: does not end with a NUL");
  OpenOptions options{.name = std::string(request.name, length), .placement = Placement::kCounted};
  const absl::StatusOr<std::optional<Limit>> limit =
      LimitOf("limit", request.limit_kind, request.limit_bytes, request.limit_fraction);
  if (!limit.ok()) return limit.status();
  options.limit = *limit;
  absl::StatusOr<std::vector<uint32_t>> devices = DevicesOf(request, pools);
  if (!devices.ok()) return devices.status();
  options.devices = *std::move(devices);
  return options;
}

absl::Status EndedByOperator() {
  return absl::AbortedError("an operator has ended the session of this process: it gets no other one");
}

RandomToken TokenOf(const CountRequest& request) {
  RandomToken token;
  static_assert(sizeof token == sizeof request.token);
  std::memcpy(token.data(), request.token, sizeof request.token);
  return token;
}

// Ignores the users at the time of connecting: a process may change its own user.
bool IsOfProcess(const Session& session, const Caller& caller) {
  return session.caller().pid == caller.pid && !HasEnded(*session.caller().pidfd);
}

const char* MethodOf(uint32_t call) {
  switch (call) {
    case VRAMBROKER_COUNT_HELLO:
      return "Count.Hello";
    case VRAMBROKER_COUNT_JOIN:
      return "Count.Join";
    case VRAMBROKER_COUNT_HOLD:
      return "Count.Hold";
    case VRAMBROKER_COUNT_CHARGE:
      return "Count.Charge";
    case VRAMBROKER_COUNT_WAIT:
      return "Count.Wait";
    case VRAMBROKER_COUNT_UNCHARGE:
      return "Count.Uncharge";
    case VRAMBROKER_COUNT_INFO:
      return "Count.Info";
    default:
      return nullptr;
  }
}

}  // namespace

CountAnswer CountAnswerOf(uint32_t call, const absl::Status& status) {
  CountAnswer answer = {};
  answer.version = VRAMBROKER_COUNT_VERSION;
  answer.call = call;
  answer.code = static_cast<uint32_t>(status.code());
  PutText(status.message(), answer.message);
  return answer;
}

class CountCalls::Answer {
 public:
  Answer(const CountCalls* owner, SessionPtr session, const CountRequest& request, Send send)
      : owner_(*owner),
        session_(std::move(session)),
        call_(request.call),
        device_(request.device),
        rpc_(RpcMeter::Start(owner->rpcs_.Find(MethodOf(request.call)))),
        send_(std::move(send)) {}

  SteadyTime began() const { return began_; }
  // False: the client can no longer get the answer.
  bool Give(const absl::Status& status) const {
    CountAnswer answer = CountAnswerOf(call_, status);
    const absl::StatusOr<Charges::Room> room = owner_.broker_.charges().GetRoom(session_, device_);
    if (room.ok()) {
      answer.limit_bytes = room->limit;
      answer.free_bytes = room->free;
      answer.charged_bytes = room->charged;
      PutText(owner_.broker_.pools()[device_]->properties().uuid, answer.uuid);
    }
    const auto waited = std::chrono::steady_clock::now() - began_;
    answer.waited_ms = static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::milliseconds>(waited).count());
    const bool sent = send_(answer);
    rpc_.Done(sent ? status.code() : absl::StatusCode::kCancelled);
    return sent;
  }

 private:
  const CountCalls& owner_;
  const SessionPtr session_;
  const uint32_t call_;
  const uint32_t device_;
  const SteadyTime began_ = std::chrono::steady_clock::now();
  const RpcMeter::Call rpc_;
  const Send send_;
};

CountCalls::CountCalls(Broker* broker, const SessionCalls* calls, const RpcMeter* rpcs, Returning* returning)
    : broker_(*broker), calls_(*calls), rpcs_(*rpcs), returning_(*returning) {}

// ---- Sessions ----

void CountCalls::Hello(const Caller& caller, const CountRequest& request, const Opened& opened) const {
  const RpcMeter::Call rpc = RpcMeter::Start(rpcs_.Find(MethodOf(VRAMBROKER_COUNT_HELLO)));
  const Opened done = [opened, rpc](absl::StatusOr<SessionPtr> session) {
    rpc.Done(session.status().code());
    opened(std::move(session));
  };
  if (const absl::Status admitted = calls_.Admit(caller.user()).status; !admitted.ok()) {
    return done(absl::UnavailableError(admitted.message()));
  }
  const absl::StatusOr<OpenOptions> options = OptionsOf(request, broker_.pools());
  if (!options.ok()) return done(options.status());
  const absl::StatusOr<std::optional<Limit>> guarantee =
      LimitOf("guarantee", request.guarantee_kind, request.guarantee_bytes, request.guarantee_fraction);
  if (!guarantee.ok()) return done(guarantee.status());
  const RandomToken token = TokenOf(request);
  std::vector<SessionPtr> lost;
  SessionPtr goes_on;
  for (const SessionPtr& session : broker_.sessions().GetAll()) {
    if (session->counted() == nullptr || !IsOfProcess(*session, caller)) continue;
    if (session->state() == SessionState::kEnded) {
      return done(EndedByOperator());
    }
    if (token != RandomToken{} && session->counted()->IsOf(token)) goes_on = session;
    if (session->state() == SessionState::kDisconnected) lost.push_back(session);
  }
  if (goes_on != nullptr) return broker_.ResumeCounted(goes_on, done);
  if (broker_.settings().HasEnded(caller.pid, PlacementName(Placement::kCounted))) return done(EndedByOperator());
  const auto open = [&] { return broker_.OpenSession(caller, *options, std::make_shared<Silent>()); };
  absl::StatusOr<SessionPtr> session = open();
  // Closes the lost sessions only once a new session is open: until then their charges stay counted. However, the lost
  // sessions may be the reason for exceeding a limit.
  const bool are_in_the_way = absl::IsResourceExhausted(session.status()) && !lost.empty();
  if (!session.ok() && !are_in_the_way) return done(session.status());
  for (const SessionPtr& gone : lost) {
    broker_.Close(gone, "its process has begun another one", CloseReason::kGoodbye);
  }
  if (are_in_the_way) session = open();
  if (!session.ok()) return done(session.status());
  broker_.limits().KeepGuarantee(*session, *guarantee, /*goes_on=*/token != RandomToken{},
                                 [&broker = broker_, session = *session, done](const absl::Status& kept) {
                                   if (kept.ok()) return done(session);
                                   broker.Close(session, std::string(kept.message()), CloseReason::kNotOpened);
                                   done(kept);
                                 });
}

absl::StatusOr<CountCalls::Joined> CountCalls::Join(const Caller& caller, const CountRequest& request) const {
  const RpcMeter::Call rpc = RpcMeter::Start(rpcs_.Find(MethodOf(VRAMBROKER_COUNT_JOIN)));
  absl::StatusOr<Joined> found = absl::NotFoundError("token: no session of this process has it");
  if (const absl::Status admitted = calls_.Admit(caller.user()).status; !admitted.ok()) {
    found = absl::UnavailableError(admitted.message());
  } else {
    for (const SessionPtr& session : broker_.sessions().GetAll()) {
      const CountedSession* const counted = session->counted();
      if (counted == nullptr || !IsOfProcess(*session, caller)) continue;
      const std::optional<uint64_t> resumes = counted->FindResumes(TokenOf(request));
      if (resumes.has_value()) found = Joined{.session = session, .resumes = *resumes};
    }
  }
  rpc.Done(found.status().code());
  return found;
}

CountAnswer CountCalls::Welcome(uint32_t call, const Session& session) const {
  CountAnswer answer = CountAnswerOf(call, absl::OkStatus());
  answer.devices = static_cast<uint32_t>(broker_.pools().size());
  answer.session = Raw(session.id());
  return answer;
}

// ---- Calls of a session ----

absl::Status CountCalls::Admit(const Session& session) const {
  const absl::Status admitted = calls_.Admit(session.caller().user()).status;
  return admitted.ok() ? admitted : absl::UnavailableError(admitted.message());
}

void CountCalls::Make(const SessionPtr& session, const CountRequest& request, const CountOrigin& origin,
                      const Send& send) const {
  if (MethodOf(request.call) == nullptr) {
    (void)send(CountAnswerOf(request.call, absl::InvalidArgumentError(absl::StrCat(
                                               "call: ", request.call, " is not a call, or one of a newer protocol"))));
    return;
  }
  const Answer answer(this, session, request, send);
  const absl::Status admitted = Admit(*session);
  const bool asks = request.call == VRAMBROKER_COUNT_CHARGE || request.call == VRAMBROKER_COUNT_WAIT;
  if (asks || request.call == VRAMBROKER_COUNT_UNCHARGE) session->NoteUse(answer.began());
  if (request.call == VRAMBROKER_COUNT_UNCHARGE) {
    // Made at any rate: a client must not stay charged for memory already freed. The user owes the call.
    const absl::Status status = broker_.charges().Uncharge(session, request.device, request.bytes);
    if (!admitted.ok()) calls_.Owe(session->caller().user());
    answer.Give(status);
    return;
  }
  if (!admitted.ok()) {
    answer.Give(admitted);
    return;
  }
  const pid_t process = session->caller().pid;
  if (asks && returning_.AreAwaited(request.device, process, std::chrono::steady_clock::now())) {
    answer.Give(
        absl::UnavailableError("the daemon has just started, and waits until the programs that were in claims before "
                               "have said what they hold; "
                               "try again a little later"));
    return;
  }
  constexpr uint64_t kMostMilliseconds = std::chrono::milliseconds(kMaxWait).count();
  switch (request.call) {
    case VRAMBROKER_COUNT_HOLD: {
      const absl::Status held = broker_.charges().Declare(session, request.device, request.bytes, origin.resumes);
      if (held.ok()) returning_.HasSaid(process, request.device);
      answer.Give(held);
      return;
    }
    case VRAMBROKER_COUNT_CHARGE:
      return Charge(session, request, {.resumes = origin.resumes}, answer);
    case VRAMBROKER_COUNT_WAIT:
      return Charge(session, request,
                    {.may_reclaim = true,
                     .wait = std::chrono::milliseconds(std::min(request.wait_ms, kMostMilliseconds)),
                     .cancel_key = origin.cancel_key,
                     .resumes = origin.resumes},
                    answer);
    case VRAMBROKER_COUNT_INFO:
      answer.Give(broker_.charges().GetRoom(session, request.device).status());
      return;
    default:
      answer.Give(absl::FailedPreconditionError("call: this connection has its session already"));
  }
}

void CountCalls::Charge(const SessionPtr& session, const CountRequest& request, const RequestOptions& options,
                        const Answer& answer) const {
  broker_.charges().Charge(
      session, request.device, request.bytes,
      [&broker = broker_, session, device = request.device, bytes = request.bytes, answer](const absl::Status& status) {
        // Tells the client to retry unless an operator ended the session, which is final.
        const SessionState state = session->state();
        const bool stops =
            absl::IsAborted(status) && (state == SessionState::kActive || state == SessionState::kClosed);
        if (stops) return (void)answer.Give(absl::UnavailableError("the daemon is stopping; try again a little later"));
        if (!answer.Give(status) && status.ok()) (void)broker.charges().Uncharge(session, device, bytes);
      },
      options);
}

}  // namespace vrambroker
