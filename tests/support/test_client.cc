// SPDX-License-Identifier: Apache-2.0
//
// A client that obeys standard input, with a command per line, and answers each command with a line:
//   ok [WORD]...   or   error CODE MESSAGE [TYPE_URL VALUE]...   (texts in hexadecimal digits, '-' when empty)
// The program ends at the end of the input, or when the test ends the program.
//
//   connect NAME LIMIT [remote] [wait_ms=N]   '-': no name or no limit -> SESSION NAME LIMIT_BYTES
//   alloc BYTES [SCOPE]                                 -> INDEX SEGMENT OFFSET BLOCK_BYTES
//   write INDEX SEED | verify INDEX SEED | zeros INDEX (expects only zeros) | free INDEX
//   fill COUNT BYTES SEED    allocate, write and verify COUNT buffers
//   check SEED               verify the buffers of `fill`
//   churn THREADS BYTES      allocate, write, verify and free in a loop, in the background, until the process ends
//   race FILE SLOT BYTES LIMIT       like churn, with random sizes up to BYTES, counted in a slot of FILE; a client
//                                    aborts when all slots together exceed LIMIT
//   empty | status | goodbye (ends the session and all buffers)
//   fork                             a child with all mappings, until the test closes this process's input  -> PID
//   fork_exec                        a child that runs another program, with the same end               -> PID
//   setuid UID [GID]...      become this user with these further groups
//   fetch TICKET             exchange a ticket (hexadecimal) for a descriptor
//   allocate_raw SESSION BYTES | free_raw SESSION BLOCK | empty_raw SESSION | stats_raw SESSION | reset_raw SESSION
//   set_limit NAME BYTES | trim NAME | end NAME | record NAME EVENTS | snapshot NAME | refusal ID | ooms | list |
//   get NAME | snapshot_of_number NUMBER (a name or an id) | reload | release     all by the Admin service
//   explain [PID]            the rule, by the Admin service; '-': no rule
//   count_hello NAME LIMIT [TOKEN] | count_join TOKEN | count_token     on the count socket; TOKEN in hexadecimal
//   count_close              close the session's main connection
//   charge BYTES | uncharge BYTES | hold BYTES | wait BYTES MS | info    of the counted session -> CHARGED FREE LIMIT
//   take_gpu GPU BYTES       take memory of the driver, past the broker
//   exec                     start this program anew: the new program is not connected
//   in_child COMMAND         a child does and answers the command, and lives until the test closes this process's input
#include <dlfcn.h>
#include <grp.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <iostream>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/cord.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "allocator/base/bytes.h"
#include "client/connection/descriptor_channel.h"
#include "client/vrambroker/client.h"
#include "tests/support/buffers.h"
#include "tests/support/count_client.h"
#include "tests/support/hex.h"
#include "tests/support/raw_client.h"
#include "tests/support/shared_counters.h"
#include "tests/support/util.h"

namespace vrambroker::testing_support {
namespace {

using Words = std::vector<std::string>;

uint64_t Number(const std::string& word) {
  return std::strtoull(word.c_str(), nullptr, 10);
}

std::string Hex(absl::string_view text) {
  return text.empty() ? "-" : absl::BytesToHexString(text);
}

class TestClient {
 public:
  explicit TestClient(std::string socket_dir) : socket_dir_(std::move(socket_dir)) {}

  absl::StatusOr<std::string> Do(const Words& words) {
    const std::string& command = words[0];
    if (command == "connect") return Connect(words);
    if (command == "setuid") {
      std::vector<gid_t> groups;
      for (size_t i = 2; i < words.size(); ++i) groups.push_back(static_cast<gid_t>(Number(words[i])));
      if (setgroups(groups.size(), groups.data()) != 0) return absl::ErrnoToStatus(errno, "setgroups failed");
      if (setuid(static_cast<uid_t>(Number(words[1]))) != 0) return absl::ErrnoToStatus(errno, "setuid failed");
      return "";
    }
    if (command == "fetch") {
      return Say(client_internal::DescriptorChannel(socket_dir_).Fetch(HexToBytes(words[1]), kPatience).status());
    }
    if (absl::EndsWith(command, "_raw")) return Raw(words);
    if (command == "exec") {
      execl("/proc/self/exe", "test_client", socket_dir_.c_str(), "answers", nullptr);
      return absl::ErrnoToStatus(errno, "exec failed");
    }
    for (const char* each :
         {"count_hello", "count_join", "count_token", "count_close", "charge", "uncharge", "hold", "wait", "info"}) {
      if (command == each) return Count(words);
    }
    if (command == "take_gpu") return Say(TakeGpu(static_cast<int>(Number(words.at(1))), Number(words.at(2))));
    if (command == "fork") return Fork();
    if (command == "fork_exec") return ForkExec();
    for (const char* each : {"set_limit", "trim", "end", "record", "snapshot", "snapshot_of_number", "refusal", "ooms",
                             "list", "get", "explain", "reload", "release"}) {
      if (command == each) return Operate(words);
    }
    if (!client_.has_value()) return absl::FailedPreconditionError("test_client: not connected");
    if (command == "alloc") {
      std::optional<MemoryScope> scope;
      if (words.size() > 2) scope.emplace(words[2]);
      return Allocate(Number(words[1]));
    }
    if (command == "fill") return FillMany(Number(words[1]), Number(words[2]), Number(words[3]));
    if (command == "check") return CheckAll(Number(words[1]));
    if (command == "churn") return Churn(Number(words[1]), Number(words[2]));
    if (command == "race") {
      return Race(MapCounters<RaceCounters>(words[1]), Number(words[2]), Number(words[3]), Number(words[4]));
    }
    if (command == "status") return Say(client_->status());
    if (command == "empty") {
      const absl::StatusOr<uint64_t> bytes = client_->EmptyCache();
      if (!bytes.ok()) return bytes.status();
      return absl::StrCat(*bytes);
    }
    if (command == "goodbye") {
      buffers_.clear();
      filled_.clear();
      client_.reset();
      return "";
    }
    const auto it = buffers_.find(Number(words.at(1)));
    if (it == buffers_.end()) return absl::NotFoundError("test_client: no such buffer");
    Buffer& buffer = it->second;
    if (command == "write") {
      Fill(buffer, Number(words.at(2)));
      return "";
    }
    if (command == "verify") return Verify(buffer, Number(words.at(2)));
    if (command == "zeros") {
      if (IsZero(buffer)) return "";
      return absl::DataLossError("not all zeros");
    }
    if (command == "free") {
      absl::Status status = buffer.Reset();
      buffers_.erase(it);
      return Say(std::move(status));
    }
    return absl::UnimplementedError(absl::StrCat("test_client: no command ", command));
  }

 private:
  static absl::StatusOr<std::string> Say(absl::Status status) {
    if (!status.ok()) return status;
    return "";
  }

  static absl::StatusOr<std::string> Verify(const Buffer& buffer, uint64_t seed) {
    if (Holds(buffer, seed)) return "";
    return absl::DataLossError("other bytes than were written");
  }

  static absl::Status TakeGpu(int gpu, uint64_t bytes) {
    void* const driver = dlopen("libcuda.so.1", RTLD_NOW);
    if (driver == nullptr) return absl::UnavailableError(dlerror());
    const auto call = [&](const char* function, auto... arguments) {
      return reinterpret_cast<int (*)(decltype(arguments)...)>(dlsym(driver, function))(arguments...);
    };
    void* context = nullptr;
    uint64_t memory = 0;
    for (const int error : {call("cuInit", 0U), call("cuDevicePrimaryCtxRetain", &context, gpu),
                            call("cuCtxPushCurrent_v2", context), call("cuMemAlloc_v2", &memory, bytes)}) {
      if (error != 0) return absl::InternalError(absl::StrCat("test_client: the driver says ", error));
    }
    return absl::OkStatus();
  }

  static absl::StatusOr<std::string> Fork() {
    const pid_t child = fork();
    if (child < 0) return absl::ErrnoToStatus(errno, "fork failed");
    if (child == 0) {
      // The child lives on when the parent is killed. The loop takes no lock: another thread may have held locks at the
      // fork.
      pollfd input = {.fd = STDIN_FILENO, .events = 0, .revents = 0};
      while ((input.revents & POLLHUP) == 0) (void)poll(&input, 1, -1);
      _exit(0);
    }
    return absl::StrCat(child);
  }

  static absl::StatusOr<std::string> ForkExec() {
    const pid_t child = fork();
    if (child < 0) return absl::ErrnoToStatus(errno, "fork failed");
    if (child == 0) {
      execlp("cat", "cat", nullptr);
      _exit(1);
    }
    return absl::StrCat(child);
  }

  static CountToken TokenOf(const std::string& digits) {
    CountToken token = {};
    const std::string bytes = HexToBytes(digits);
    std::copy_n(bytes.begin(), std::min(bytes.size(), token.size()), token.begin());
    return token;
  }

  absl::StatusOr<std::string> Count(const Words& words) {
    const std::string& command = words[0];
    if (command == "count_hello") {
      CountRequest hello = CountHello(words[1]);
      if (words[2] != "-") hello = CountHello(words[1], Number(words[2]));
      if (words.size() > 3) std::memcpy(hello.token, TokenOf(words[3]).data(), sizeof hello.token);
      absl::StatusOr<CountClient> opened = CountClient::Open(socket_dir_, hello);
      if (!opened.ok()) return opened.status();
      counted_.emplace(*std::move(opened));
      return absl::StrCat(counted_->session());
    }
    if (command == "count_join") {
      return Say(CountClient::Open(socket_dir_, CountJoin(TokenOf(words[1]))).status());
    }
    if (!counted_.has_value()) return absl::FailedPreconditionError("test_client: no counted session");
    if (command == "count_token") {
      return absl::BytesToHexString({reinterpret_cast<const char*>(counted_->token().data()), sizeof(CountToken)});
    }
    if (command == "count_close") {
      counted_->Close();
      return "";
    }
    const uint64_t bytes = words.size() > 1 ? Number(words[1]) : 0;
    absl::StatusOr<CountAnswer> answer;
    if (command == "wait") {
      absl::StatusOr<CountClient> joined = counted_->Join();
      if (!joined.ok()) return joined.status();
      answer = joined->Call(CountWait(0, bytes, Number(words.at(2))));
    } else {
      const vrambroker_count_call call = command == "charge"     ? VRAMBROKER_COUNT_CHARGE
                                         : command == "uncharge" ? VRAMBROKER_COUNT_UNCHARGE
                                         : command == "hold"     ? VRAMBROKER_COUNT_HOLD
                                                                 : VRAMBROKER_COUNT_INFO;
      answer = counted_->Call(MakeCountRequest(call, 0, bytes));
    }
    if (!answer.ok()) return answer.status();
    if (answer->code != 0) return StatusOfAnswer(*answer);
    return absl::StrCat(answer->charged_bytes, " ", answer->free_bytes, " ", answer->limit_bytes);
  }

  absl::StatusOr<std::string> Connect(const Words& words) {
    ClientOptions options;
    options.socket_dir = socket_dir_;
    options.name = words[1] == "-" ? "" : words[1];
    options.connect_timeout = kPatience;
    options.call_timeout = kPatience;
    if (words[2] != "-") {
      const absl::StatusOr<Limit> limit = ParseLimit(words[2]);
      if (!limit.ok()) return limit.status();
      options.limit = *limit;
    }
    for (size_t i = 3; i < words.size(); ++i) {
      absl::string_view word = words[i];
      if (word == "remote") {
        options.placement = Placement::kRemote;
      } else if (absl::ConsumePrefix(&word, "wait_ms=")) {
        options.wait = absl::Milliseconds(static_cast<int64_t>(Number(std::string(word))));
      }
    }
    absl::StatusOr<Client> client = Client::Connect(options);
    if (!client.ok()) return client.status();
    client_.emplace(*std::move(client));
    return absl::StrCat(client_->session_id(), " ", client_->name(), " ", client_->limit_bytes());
  }

  absl::StatusOr<std::string> Allocate(uint64_t bytes) {
    absl::StatusOr<Buffer> buffer = client_->Allocate(bytes);
    if (!buffer.ok()) return buffer.status();
    const uint64_t index = next_++;
    std::string answer =
        absl::StrCat(index, " ", buffer->segment_id(), " ", buffer->offset_bytes(), " ", buffer->block_bytes());
    buffers_[index] = *std::move(buffer);
    return answer;
  }

  absl::StatusOr<std::string> FillMany(uint64_t count, uint64_t bytes, uint64_t seed) {
    for (uint64_t i = 0; i < count; ++i) {
      absl::StatusOr<Buffer> buffer = client_->Allocate(bytes + i);
      if (!buffer.ok()) return buffer.status();
      Fill(*buffer, seed + i);
      filled_.push_back(*std::move(buffer));
    }
    return CheckAll(seed);
  }

  absl::StatusOr<std::string> CheckAll(uint64_t seed) {
    for (size_t i = 0; i < filled_.size(); ++i) {
      if (absl::StatusOr<std::string> found = Verify(filled_[i], seed + i); !found.ok()) return found;
    }
    return absl::StrCat(filled_.size());
  }

  absl::StatusOr<std::string> Race(RaceCounters* counters, uint64_t slot, uint64_t most_bytes, uint64_t limit_bytes) {
    std::thread([this, counters, slot, most_bytes, limit_bytes] {
      std::minstd_rand random(static_cast<unsigned>(getpid()));
      for (;;) {
        const uint64_t bytes = (1 + random() % (most_bytes / 2_MiB)) * 2_MiB;
        {
          const absl::StatusOr<Buffer> buffer = client_->Allocate(bytes);
          if (!buffer.ok()) continue;
          // The slot counts no more than the client holds, at any time.
          counters->held[slot] = bytes;
          uint64_t sum = 0;
          for (const std::atomic<uint64_t>& held : counters->held) sum += held;
          if (sum > limit_bytes) std::abort();
          ++counters->rounds;
          counters->held[slot] = 0;
        }
        if (random() % 2 == 0) (void)client_->EmptyCache();
      }
    }).detach();
    return "";
  }

  absl::StatusOr<std::string> Churn(uint64_t threads, uint64_t bytes) {
    std::atomic<uint64_t> started{0};
    for (uint64_t t = 0; t < threads; ++t) {
      std::thread([this, t, bytes, &started] {
        for (uint64_t i = 0;; ++i) {
          absl::StatusOr<Buffer> buffer = client_->Allocate(bytes);
          if (!buffer.ok()) continue;
          Fill(*buffer, 64, t + i);
          if (!Holds(*buffer, 64, t + i)) std::abort();
          if (i == 0) ++started;  // the answer ends `started`
        }
      }).detach();
    }
    WaitFor([&] { return started == threads; });
    return "";
  }

  absl::StatusOr<std::string> Raw(const Words& words) {
    absl::StatusOr<RawClient> raw = RawClient::Connect(socket_dir_);
    if (!raw.ok()) return raw.status();
    const uint64_t session = Number(words[1]);
    if (words[0] == "allocate_raw") return Say(raw->Allocate(session, Number(words[2])).status());
    if (words[0] == "free_raw") return Say(raw->Free(session, {Number(words[2])}));
    if (words[0] == "empty_raw") return Say(raw->EmptyCache(session).status());
    if (words[0] == "stats_raw") return Say(raw->GetMemoryStats(session).status());
    if (words[0] == "reset_raw") return Say(raw->ResetPeakStats(session));
    return absl::UnimplementedError(absl::StrCat("test_client: no command ", words[0]));
  }

  absl::StatusOr<std::string> Operate(const Words& words) {
    absl::StatusOr<RawClient> raw = RawClient::Connect(socket_dir_);
    if (!raw.ok()) return raw.status();
    if (words[0] == "set_limit") return Say(raw->SetLimit(Ref(words[1]), BytesLimit(Number(words[2]))).status());
    if (words[0] == "trim") return Say(raw->TrimSession(Ref(words[1])).status());
    if (words[0] == "end") return Say(raw->EndSession(Ref(words[1])).status());
    if (words[0] == "record") {
      return Say(raw->SetRecording(Ref(words[1]), static_cast<uint32_t>(Number(words[2]))));
    }
    if (words[0] == "snapshot") return Say(raw->GetSnapshot(Ref(words[1]), 0).status());
    if (words[0] == "snapshot_of_number") {
      v1::SessionRef ref = Ref(Number(words[1]));
      ref.set_or_name(words[1]);
      return Say(raw->GetSnapshot(ref, 0).status());
    }
    if (words[0] == "refusal") return Say(raw->GetRefusalSnapshot(Number(words[1])).status());
    if (words[0] == "ooms") {
      v1::ListOutOfMemoryResponse response;
      absl::Status status =
          RawClient::Call(raw->admin(), &v1::Admin::Stub::ListOutOfMemory, v1::ListOutOfMemoryRequest(), &response);
      if (!status.ok()) return status;
      std::string answer = absl::StrCat(response.total_events(), " ", response.matching_events());
      for (const v1::OutOfMemoryEvent& event : response.events()) {
        absl::StrAppend(&answer, " ", event.out_of_memory().refusal());
      }
      return answer;
    }
    if (words[0] == "get") return Say(raw->GetSession(Ref(words[1])).status());
    if (words[0] == "explain") {
      v1::ExplainPolicyRequest request;
      if (words.size() > 1) request.set_pid(static_cast<int32_t>(Number(words[1])));
      v1::ExplainPolicyResponse response;
      absl::Status status = RawClient::Call(raw->admin(), &v1::Admin::Stub::ExplainPolicy, request, &response);
      if (!status.ok()) return status;
      return response.rule().empty() ? "-" : response.rule();
    }
    if (words[0] == "reload") {
      v1::ReloadConfigResponse response;
      return Say(RawClient::Call(raw->admin(), &v1::Admin::Stub::ReloadConfig, v1::ReloadConfigRequest(), &response));
    }
    if (words[0] == "release") {
      v1::ReleaseIdleResponse response;
      return Say(RawClient::Call(raw->admin(), &v1::Admin::Stub::ReleaseIdle, v1::ReleaseIdleRequest(), &response));
    }
    const absl::StatusOr<v1::ListSessionsResponse> sessions = raw->ListSessions();
    if (!sessions.ok()) return sessions.status();
    return absl::StrCat(sessions->sessions_size());
  }

  const std::string socket_dir_;
  std::optional<Client> client_;
  std::optional<CountClient> counted_;
  std::map<uint64_t, Buffer> buffers_;
  std::vector<Buffer> filled_;
  uint64_t next_ = 0;
};

std::string Answer(const absl::StatusOr<std::string>& result) {
  if (result.ok()) return absl::StrCat("ok ", *result);
  const absl::Status& status = result.status();
  std::string line = absl::StrCat("error ", status.raw_code(), " ", Hex(status.message()));
  status.ForEachPayload([&](absl::string_view url, const absl::Cord& value) {
    absl::StrAppend(&line, " ", Hex(url), " ", Hex(std::string(value)));
  });
  return line;
}

}  // namespace
}  // namespace vrambroker::testing_support

int main(int argc, char** argv) {
  if (argc < 2) return 2;
  if (argc > 2) std::cout << "ok " << std::endl;  // answers the "exec" command
  vrambroker::testing_support::TestClient client(argv[1]);
  std::string line;
  while (std::getline(std::cin, line)) {
    std::vector<std::string> words = absl::StrSplit(line, ' ', absl::SkipEmpty());
    if (words.empty()) continue;
    if (words[0] == "in_child") {
      words.erase(words.begin());
      if (fork() != 0) continue;
      std::cout << vrambroker::testing_support::Answer(client.Do(words)) << std::endl;
      pollfd input = {.fd = STDIN_FILENO, .events = 0, .revents = 0};
      while ((input.revents & POLLHUP) == 0) (void)poll(&input, 1, -1);
      _exit(0);
    }
    std::cout << vrambroker::testing_support::Answer(client.Do(words)) << std::endl;
  }
  return 0;
}
