// SPDX-License-Identifier: Apache-2.0
//
// libFuzzer: any packets on several connections to the count socket. Connections open and break at any time, and the
// client reads answers late or never. Every call that waits for an answer gets an answer, or the end of its connection.
// The daemon charges a session exactly the bytes that the client knows of, as long as the client keeps to the protocol.
// For further rules see rpc_fuzz.cc.
#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "allocator/base/bytes.h"
#include "proto/vrambroker/v1/count_socket.h"
#include "tests/fuzz/fuzz_calls.h"
#include "tests/fuzz/fuzz_daemon.h"
#include "tests/support/unix_client.h"

namespace vrambroker {
namespace {

using Request = vrambroker_count_request;
using Answer = vrambroker_count_answer;

constexpr int kMostOperations = 80;
constexpr size_t kMostLines = 8;
constexpr int kPatienceMs = 5'000;
constexpr int kPatiences = 8;  // parts of the wait, because the clock may go on while machine and daemon stand still

// The client's knowledge of a session.
struct Known {
  uint64_t id = 0;
  std::array<uint8_t, 16> token = {};
  std::array<uint64_t, 2> charged = {};  // by device
  bool is_exact = true;                  // the client has kept to the protocol so far
  bool gave_up = false;                  // gave up a charge that the daemon may not have taken back yet
};

// A connection.
struct Line {
  UniqueFd socket;
  std::shared_ptr<Known> session;  // null without a session
  bool is_main = false;
  std::optional<Request> pending;  // sent, with the answer still unread
  bool is_broken = false;
};

class Run {
 public:
  // Opens a session, and a second connection of the session.
  explicit Run(FuzzBytes* bytes) : bytes_(*bytes), daemon_(FuzzDaemon::Get()) {
    Connect();
    Call(lines_[0], MakeRequest(VRAMBROKER_COUNT_HELLO));
    Connect();
    Call(lines_[1], JoinOf(lines_[0]));
  }

  void Step() {
    const uint64_t kind = bytes_.Next();
    if (lines_.empty() || kind < 24) {
      Connect();
    } else if (kind < 48) {
      Connect();
      Call(lines_.back(), ToOpen());
    } else if (kind < 140) {
      Call(AnyLine(), AnyRequest());
    } else if (kind < 180) {
      Line& line = AnyLine();
      if (!line.pending.has_value()) Send(line, AnyRequest());
    } else if (kind < 216) {
      Line& line = AnyLine();
      if (line.pending.has_value()) Receive(line);
    } else if (kind < 224) {
      Close(bytes_.Next() % lines_.size());
    } else if (kind < 236) {
      GiveUp(bytes_.Next() % lines_.size());
    } else if (kind < 246) {
      SendAnything(AnyLine());
    } else {
      daemon_.OperateOnCounted(bytes_.Next(), bytes_.Next());
    }
  }

  void End() {
    for (Line& line : lines_) {
      if (line.pending.has_value()) Receive(line);
    }
    std::vector<std::shared_ptr<Known>> sessions;
    for (const Line& line : lines_) {
      if (line.is_main && !line.is_broken && line.session->is_exact) sessions.push_back(line.session);
    }
    for (const auto& session : sessions) {
      const bool agrees = WaitFor(std::chrono::seconds(10), [&] {
        return daemon_.ChargedBytes(session->id, 0) == session->charged[0] &&
               daemon_.ChargedBytes(session->id, 1) == session->charged[1];
      });
      Require(agrees, "a session is charged what its client knows of");
    }
    lines_.clear();
    daemon_.CheckAndReset();
  }

 private:
  void Connect() {
    if (lines_.size() == kMostLines) Close(bytes_.Next() % lines_.size());
    lines_.push_back({.socket = testing_support::ConnectUnix(daemon_.count_socket(), SOCK_SEQPACKET)});
    Require(lines_.back().socket.valid(), "the count socket listens");
  }

  Line& AnyLine() { return lines_[bytes_.Next() % lines_.size()]; }

  static Request MakeRequest(uint32_t call) {
    Request request = {};
    request.version = VRAMBROKER_COUNT_VERSION;
    request.call = call;
    return request;
  }
  static Request JoinOf(const Line& line) {
    Request request = MakeRequest(VRAMBROKER_COUNT_JOIN);
    if (line.session != nullptr) std::memcpy(request.token, line.session->token.data(), sizeof request.token);
    return request;
  }
  Request ToOpen() {
    const uint64_t which = bytes_.Next();
    return which % 2 == 0 ? MakeRequest(VRAMBROKER_COUNT_HELLO) : JoinOf(lines_[which / 2 % lines_.size()]);
  }

  // Makes a mostly well-formed request.
  Request AnyRequest() {
    static constexpr uint32_t kCalls[] = {4, 4, 4, 4, 5, 5, 6, 6, 6, 7, 3, 1, 2, 0, 8};
    static constexpr uint64_t kBytes[] = {2_MiB,  2_MiB, 4_MiB, 16_MiB, 32_MiB,       64_MiB,
                                          66_MiB, 0,     1,     3_MiB,  ~uint64_t{0}, ~uint64_t{0} - 2_MiB + 1};
    static constexpr uint64_t kWaits[] = {0, 0, 1, 5, ~uint64_t{0}};
    static constexpr const char* kDevices[] = {"", "0", "1", "0, 1", "2", "HOST-1", ",", "\xff"};
    const uint64_t form = bytes_.Next();
    Request request = ToOpen();
    request.call = bytes_.Pick(kCalls);
    request.device = form % 8 == 7 ? static_cast<uint32_t>(bytes_.Next() * 0x1000001) : form % 2;
    request.bytes = bytes_.Pick(kBytes);
    request.wait_ms = bytes_.Pick(kWaits);
    if (form >= 200) {
      request.limit_kind = static_cast<uint32_t>(bytes_.Next() % 4);
      request.limit_bytes = bytes_.Pick(kBytes);
      const std::string rest = bytes_.Take(16);
      std::memcpy(&request.limit_fraction, rest.data(), std::min(rest.size(), sizeof request.limit_fraction));
      std::memcpy(request.name, rest.data(), rest.size());
      std::strcpy(request.devices, bytes_.Pick(kDevices));
    }
    if (form >= 250) {  // changes a byte at any place
      auto* const raw = reinterpret_cast<uint8_t*>(&request);
      raw[bytes_.Next() % sizeof request] = static_cast<uint8_t>(bytes_.Next());
    }
    return request;
  }

  void Call(Line& line, const Request& request) {
    if (line.pending.has_value()) Receive(line);
    Send(line, request);
    if (line.pending.has_value()) Receive(line);
  }

  void Send(Line& line, const Request& request) {
    if (line.is_broken) return;
    if (line.session != nullptr) CheckHold(line, request);
    if (send(line.socket.get(), &request, sizeof request, MSG_NOSIGNAL) != sizeof request) return Break(line);
    line.pending = request;
  }

  // The answer to HOLD contains the charge of that moment, so no other call of the session may be under way.
  void CheckHold(const Line& line, const Request& request) {
    Known& session = *line.session;
    const bool holds = request.call == VRAMBROKER_COUNT_HOLD;
    if (holds && session.gave_up) session.is_exact = false;
    for (const Line& other : lines_) {
      if (other.session != line.session || !other.pending.has_value()) continue;
      if (holds || other.pending->call == VRAMBROKER_COUNT_HOLD) session.is_exact = false;
    }
  }

  void Receive(Line& line) {
    const Request request = *line.pending;
    line.pending.reset();
    pollfd readable = {.fd = line.socket.get(), .events = POLLIN, .revents = 0};
    int answered = 0;
    for (int part = 0; part < kPatiences && answered == 0; ++part) answered = poll(&readable, 1, kPatienceMs);
    Require(answered == 1, "every call is answered");
    Answer answer = {};
    const ssize_t size = recv(line.socket.get(), &answer, sizeof answer, MSG_TRUNC);
    if (size <= 0) {
      Lost(line, request);
      return Break(line);
    }
    Require(size == sizeof answer && answer.version == VRAMBROKER_COUNT_VERSION, "an answer is whole");
    Require(answer.call == request.call, "an answer is to the call");
    Require(answer.message[sizeof answer.message - 1] == '\0' && answer.uuid[sizeof answer.uuid - 1] == '\0',
            "texts end");
    Require((answer.code == 0) == (answer.message[0] == '\0'), "an error has a message, and nothing else has");
    if (answer.code == 0) Learn(line, request, answer);
  }

  void Learn(Line& line, const Request& request, const Answer& answer) {
    switch (request.call) {
      case VRAMBROKER_COUNT_HELLO:
        line.session = SessionOf(answer);  // a new session, or a resumed session with its charge
        std::memcpy(line.session->token.data(), answer.token, sizeof answer.token);
        line.is_main = true;
        return;
      case VRAMBROKER_COUNT_JOIN:
        line.session = SessionOf(answer);
        return;
      case VRAMBROKER_COUNT_CHARGE:
      case VRAMBROKER_COUNT_WAIT:
        line.session->charged.at(request.device) += request.bytes;
        return;
      case VRAMBROKER_COUNT_UNCHARGE:
        // A return beyond the client's known bytes: the answer to a charge is on its way.
        if (request.bytes > line.session->charged.at(request.device)) line.session->is_exact = false;
        line.session->charged.at(request.device) -= request.bytes;
        return;
      case VRAMBROKER_COUNT_HOLD:
        line.session->charged.at(request.device) = answer.charged_bytes;
        return;
      default:
        return;
    }
  }

  std::shared_ptr<Known> SessionOf(const Answer& answer) {
    std::shared_ptr<Known>& session = sessions_[answer.session];
    if (session == nullptr) session = std::make_shared<Known>(Known{.id = answer.session});
    return session;
  }

  // The answer is lost for ever. The daemon takes a lost charge back.
  static void Lost(Line& line, const Request& request) {
    const bool is_taken_back = request.call != VRAMBROKER_COUNT_UNCHARGE && request.call != VRAMBROKER_COUNT_HOLD;
    if (line.session == nullptr) return;
    if (is_taken_back) {
      line.session->gave_up = true;
    } else {
      line.session->is_exact = false;
    }
  }

  static void Break(Line& line) { line.is_broken = true; }

  void Close(size_t which) {
    Line& line = lines_[which];
    if (line.pending.has_value()) Lost(line, *line.pending);
    lines_.erase(lines_.begin() + static_cast<ptrdiff_t>(which));
  }

  // Sends a charge, whose answer may be ready when the connection closes.
  void GiveUp(size_t which) {
    Line& line = lines_[which];
    if (line.pending.has_value()) return;
    Request request = AnyRequest();
    request.call = line.is_main ? VRAMBROKER_COUNT_CHARGE : VRAMBROKER_COUNT_WAIT;
    Send(line, request);
    pollfd readable = {.fd = line.socket.get(), .events = POLLIN, .revents = 0};
    if (bytes_.Next() % 2 == 0) (void)poll(&readable, 1, kPatienceMs);
    Close(which);
  }

  // Sends a packet that no honest client sends.
  void SendAnything(Line& line) {
    if (line.session != nullptr) line.session->is_exact = false;
    const Request request = AnyRequest();
    std::string packet(reinterpret_cast<const char*>(&request), sizeof request);
    const uint64_t form = bytes_.Next();
    if (form % 4 == 0) packet.resize(bytes_.Next());
    if (form % 4 == 1) packet = bytes_.Take(bytes_.Next());
    (void)send(line.socket.get(), packet.data(), packet.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    // The client cannot match the packet's answer to a call, so later calls must not use the connection.
    line.is_broken = true;
    line.pending.reset();
  }

  FuzzBytes& bytes_;
  FuzzDaemon& daemon_;
  std::vector<Line> lines_;
  std::map<uint64_t, std::shared_ptr<Known>> sessions_;  // by id
};

}  // namespace
}  // namespace vrambroker

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  vrambroker::FuzzBytes bytes(data, size);
  vrambroker::Run run(&bytes);
  for (int i = 0; i < vrambroker::kMostOperations && !bytes.empty(); ++i) run.Step();
  run.End();
  return 0;
}
