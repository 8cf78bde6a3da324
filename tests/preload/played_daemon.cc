// SPDX-License-Identifier: Apache-2.0
#include "tests/preload/played_daemon.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "tests/support/util.h"

namespace vrambroker::testing_support {

namespace {

constexpr uint8_t kToken[sizeof(PlayedDaemon::Request::token)] = {'t', 'o', 'k', 'e', 'n'};

}  // namespace

PlayedDaemon::PlayedDaemon(const std::string& uuid, uint64_t limit_bytes)
    : PlayedDaemon(std::vector<std::string>{uuid}, limit_bytes) {}

PlayedDaemon::PlayedDaemon(const std::vector<std::string>& uuids, uint64_t limit_bytes)
    : uuids_(uuids),
      limit_(limit_bytes),
      folder_(MakeTempDir()),
      listener_(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)),
      wake_(eventfd(0, EFD_CLOEXEC)),
      charged_(uuids.size()) {
  sockaddr_un address = {.sun_family = AF_UNIX, .sun_path = {}};
  std::snprintf(address.sun_path, sizeof address.sun_path, "%s/%s", folder_.c_str(), VRAMBROKER_COUNT_SOCKET);
  if (bind(listener_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0 ||
      listen(listener_.get(), 64) != 0) {
    std::perror("a played daemon's socket");
    std::abort();
  }
  thread_ = std::thread([this] { Run(); });
}

PlayedDaemon::~PlayedDaemon() {
  {
    const std::lock_guard<std::mutex> lock(mu_);
    ends_ = true;
  }
  Wake();
  thread_.join();
}

void PlayedDaemon::Wake() {
  const uint64_t one = 1;
  (void)!write(wake_.get(), &one, sizeof one);
}

void PlayedDaemon::set_distort(const Distort& distort) {
  const std::lock_guard<std::mutex> lock(mu_);
  distort_ = distort;
}

void PlayedDaemon::set_hang_up(bool hang_up) {
  const std::lock_guard<std::mutex> lock(mu_);
  hang_up_ = hang_up;
}

void PlayedDaemon::HangUpAfter(uint32_t call) {
  const std::lock_guard<std::mutex> lock(mu_);
  hang_up_after_ = call;
}

void PlayedDaemon::HoldBack(uint32_t call) {
  const std::lock_guard<std::mutex> lock(mu_);
  held_back_call_ = call;
}

void PlayedDaemon::SendHeldBack() {
  const std::lock_guard<std::mutex> lock(mu_);
  (void)send(held_back_connection_.get(), held_back_.data(), held_back_.size(), MSG_NOSIGNAL);
  held_back_connection_.Reset();
}

void PlayedDaemon::HangUp() {
  {
    const std::lock_guard<std::mutex> lock(mu_);
    hangs_up_ = true;
  }
  Wake();
}

void PlayedDaemon::SetBusy(uint32_t call, int times) {
  const std::lock_guard<std::mutex> lock(mu_);
  busy_[call] = times;
}

void PlayedDaemon::Forget() {
  const std::lock_guard<std::mutex> lock(mu_);
  charged_.assign(uuids_.size(), 0);
}

int PlayedDaemon::Calls(uint32_t call) const {
  const std::lock_guard<std::mutex> lock(mu_);
  const auto it = calls_.find(call);
  return it == calls_.end() ? 0 : it->second;
}

uint64_t PlayedDaemon::charged(size_t device) const {
  const std::lock_guard<std::mutex> lock(mu_);
  return charged_[device];
}

std::string PlayedDaemon::Bytes(const Answer& answer) {
  return {reinterpret_cast<const char*>(&answer), sizeof answer};
}

void PlayedDaemon::Run() {
  for (;;) {
    std::vector<pollfd> watched = {{wake_.get(), POLLIN, 0}, {listener_.get(), POLLIN, 0}};
    for (const UniqueFd& connection : connections_) watched.push_back({connection.get(), POLLIN, 0});
    if (poll(watched.data(), watched.size(), -1) < 0) continue;
    if (watched[0].revents != 0) {
      uint64_t times = 0;
      (void)!read(wake_.get(), &times, sizeof times);
      const std::lock_guard<std::mutex> lock(mu_);
      if (ends_) return;
      if (std::exchange(hangs_up_, false)) connections_.clear();
      continue;
    }
    if (watched[1].revents != 0) {
      if (UniqueFd connection(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC)); connection.valid()) {
        connections_.push_back(std::move(connection));
      }
    }
    for (size_t i = 2; i < watched.size(); ++i) {
      if (watched[i].revents != 0) Serve(watched[i].fd);
    }
  }
}

void PlayedDaemon::Serve(int connection) {
  Request request = {};
  std::optional<std::string> reply;
  bool hang_up = false;
  const ssize_t size = recv(connection, &request, sizeof request, MSG_DONTWAIT);
  const bool is_known = size == static_cast<ssize_t>(sizeof request) ||
                        size == VRAMBROKER_COUNT_NO_DEVICES_REQUEST_BYTES ||
                        size == VRAMBROKER_COUNT_SHORT_REQUEST_BYTES;
  if (!is_known || size > most_request_bytes_) {
    hang_up = true;
  } else {
    const std::lock_guard<std::mutex> lock(mu_);
    ++calls_[request.call];
    const Answer answer = AnswerTo(request);
    reply = distort_ ? distort_(request, answer) : Bytes(answer);
    hang_up = hang_up_ && request.call != VRAMBROKER_COUNT_HELLO && request.call != VRAMBROKER_COUNT_INFO;
    if (held_back_call_ == request.call) {
      held_back_call_.reset();
      held_back_ = Bytes(answer);
      held_back_connection_ = UniqueFd(dup(connection));
      reply.reset();
    }
    if (hang_up_after_ == request.call) {
      hang_up = true;
      hang_up_after_.reset();
    }
  }
  if (!hang_up && reply.has_value()) (void)send(connection, reply->data(), reply->size(), MSG_NOSIGNAL);
  if (!hang_up) return;
  std::erase_if(connections_, [&](const UniqueFd& each) { return each.get() == connection; });
}

PlayedDaemon::Answer PlayedDaemon::AnswerTo(const Request& request) {
  Answer answer = {};
  answer.version = VRAMBROKER_COUNT_VERSION;
  answer.call = request.call;
  answer.devices = static_cast<uint32_t>(uuids_.size());
  if (int& left = busy_[request.call]; left > 0) {
    --left;
    answer.code = 14;
    return answer;
  }
  const size_t device = std::min<size_t>(request.device, uuids_.size() - 1);
  uint64_t& charged = charged_[device];
  switch (request.call) {
    case VRAMBROKER_COUNT_HELLO:
      if (std::memcmp(request.token, kToken, sizeof kToken) != 0) charged_.assign(uuids_.size(), 0);
      std::memcpy(answer.token, kToken, sizeof kToken);
      break;
    case VRAMBROKER_COUNT_CHARGE:
    case VRAMBROKER_COUNT_WAIT:
    case VRAMBROKER_COUNT_HOLD:
      if (request.bytes > limit_ - charged) {
        answer.code = 8;
        std::snprintf(answer.message, sizeof answer.message, "the played daemon has no more");
      } else {
        charged += request.bytes;
      }
      break;
    case VRAMBROKER_COUNT_UNCHARGE:
      charged -= request.bytes;
      break;
    default:
      break;
  }
  answer.limit_bytes = limit_;
  answer.charged_bytes = charged;
  answer.free_bytes = limit_ - charged;
  std::snprintf(answer.uuid, sizeof answer.uuid, "%s", uuids_[device].c_str());
  return answer;
}

}  // namespace vrambroker::testing_support
