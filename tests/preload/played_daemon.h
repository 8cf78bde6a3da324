// SPDX-License-Identifier: Apache-2.0
//
// A played daemon on the count socket. Counts its devices correctly, unless told otherwise.
#ifndef VRAMBROKER_TESTS_PRELOAD_PLAYED_DAEMON_H_
#define VRAMBROKER_TESTS_PRELOAD_PLAYED_DAEMON_H_

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "allocator/base/unique_fd.h"
#include "proto/vrambroker/v1/count_socket.h"

namespace vrambroker::testing_support {

class PlayedDaemon {
 public:
  using Request = vrambroker_count_request;
  using Answer = vrambroker_count_answer;
  // Returns the bytes sent in place of `answer`; nullopt: no answer. Bytes of another length than an answer's are sent
  // unchanged.
  using Distort = std::function<std::optional<std::string>(const Request& request, const Answer& answer)>;

  // `limit_bytes` is the limit of each device.
  PlayedDaemon(const std::string& uuid, uint64_t limit_bytes);
  PlayedDaemon(const std::vector<std::string>& uuids, uint64_t limit_bytes);
  ~PlayedDaemon();

  const std::string& socket_dir() const { return folder_; }
  // Refuses longer packets, like an older daemon.
  void set_most_request_bytes(ssize_t bytes) { most_request_bytes_ = bytes; }
  void set_distort(const Distort& distort);
  // Ends the connection instead of an answer to all calls but HELLO and INFO.
  void set_hang_up(bool hang_up);
  // Ends the connection instead of the answer to the next `call` alone. The call still takes effect.
  void HangUpAfter(uint32_t call);
  // Answers the next `times` of `call` with UNAVAILABLE, and without an effect.
  void SetBusy(uint32_t call, int times);
  // Keeps the answer to the next `call` until SendHeldBack(), even after HangUp().
  void HoldBack(uint32_t call);
  void SendHeldBack();
  // Ends all connections, except a connection with a held-back answer.
  void HangUp();
  // Forgets all charges, like a restarted daemon.
  void Forget();

  int Calls(uint32_t call) const;
  uint64_t charged(size_t device = 0) const;

  static std::string Bytes(const Answer& answer);

 private:
  void Wake();
  void Run();
  void Serve(int connection);
  // REQUIRES: mu_ is held.
  Answer AnswerTo(const Request& request);

  const std::vector<std::string> uuids_;
  const uint64_t limit_;
  const std::string folder_;
  UniqueFd listener_;
  UniqueFd wake_;  // wakes the thread to end, or to hang up
  mutable std::mutex mu_;
  Distort distort_;
  std::atomic<ssize_t> most_request_bytes_ = sizeof(Request);
  bool hang_up_ = false;
  std::optional<uint32_t> hang_up_after_;
  std::optional<uint32_t> held_back_call_;
  UniqueFd held_back_connection_;
  std::string held_back_;
  bool ends_ = false;
  bool hangs_up_ = false;
  std::map<uint32_t, int> busy_;
  std::vector<uint64_t> charged_;  // bytes of each device
  std::map<uint32_t, int> calls_;
  std::vector<UniqueFd> connections_;
  std::thread thread_;
};

}  // namespace vrambroker::testing_support

#endif  // VRAMBROKER_TESTS_PRELOAD_PLAYED_DAEMON_H_
