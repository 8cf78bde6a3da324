// SPDX-License-Identifier: Apache-2.0
#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "allocator/base/bytes.h"
#include "allocator/base/names.h"
#include "allocator/base/unique_fd.h"
#include "allocator/heap/allocator_options.h"
#include "allocator/wire/admin_json.h"
#include "client/session/environment.h"
#include "client/vrambroker/client.h"
#include "client/vramctl/commands/commands.h"
#include "client/vramctl/daemon/daemon_calls.h"
#include "client/vramctl/options/refusal.h"
#include "client/vramctl/views/session_output.h"

namespace vrambroker::vramctl {
namespace {

// Words per piece: the pattern is written and verified in pieces.
constexpr uint64_t kPieceWords = 1 << 17;

// Fills `piece` with the pattern from word `first` on. Patterns differ between sessions and between the words of a
// buffer.
void MakePattern(uint64_t session, uint64_t first, std::vector<uint64_t>& piece) {
  for (uint64_t i = 0; i < piece.size(); ++i) piece[i] = (session << 48) ^ ((first + i) * 0x9E3779B97F4A7C15u);
}

// Calls `visit(offset, piece, bytes)` for each piece of the pattern of a buffer.
absl::Status ForEachPiece(const Buffer& buffer, uint64_t session,
                          const std::function<absl::Status(uint64_t, std::vector<uint64_t>&, uint64_t)>& visit) {
  std::vector<uint64_t> piece(kPieceWords);
  const uint64_t piece_bytes = kPieceWords * sizeof(uint64_t);
  for (uint64_t offset = 0; offset < buffer.size(); offset += piece_bytes) {
    MakePattern(session, offset / sizeof(uint64_t), piece);
    absl::Status status = visit(offset, piece, std::min(piece_bytes, buffer.size() - offset));
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status WritePattern(Buffer& buffer, uint64_t session) {
  return ForEachPiece(buffer, session, [&](uint64_t offset, std::vector<uint64_t>& piece, uint64_t bytes) {
    return buffer.Write(offset, piece.data(), bytes);
  });
}

absl::Status VerifyPattern(const Buffer& buffer, uint64_t session) {
  std::vector<uint64_t> found(kPieceWords);
  return ForEachPiece(buffer, session, [&](uint64_t offset, std::vector<uint64_t>& piece, uint64_t bytes) {
    absl::Status status = buffer.Read(offset, found.data(), bytes);
    if (status.ok() && std::memcmp(found.data(), piece.data(), bytes) != 0) {
      status = absl::DataLossError(absl::StrCat("other bytes than were written, near offset ", offset));
    }
    return status;
  });
}

// During its lifetime a signal ends the process at once, since no cleanup is needed yet.
class EndOnSignal {
 public:
  explicit EndOnSignal(int signals)
      : done_(eventfd(0, EFD_CLOEXEC)), thread_([this, signals] {
          pollfd wait[] = {{.fd = signals, .events = POLLIN, .revents = 0},
                           {.fd = done_.get(), .events = POLLIN, .revents = 0}};
          while (poll(wait, 2, -1) < 0 && errno == EINTR) {
          }
          signalfd_siginfo info = {};
          if (wait[1].revents != 0 || read(signals, &info, sizeof info) != sizeof info) return;
          _exit(128 + static_cast<int>(info.ssi_signo));
        }) {}
  ~EndOnSignal() {
    const uint64_t one = 1;
    (void)!write(done_.get(), &one, sizeof one);
    thread_.join();
  }
  EndOnSignal(const EndOnSignal&) = delete;
  EndOnSignal& operator=(const EndOnSignal&) = delete;

 private:
  const UniqueFd done_;
  std::thread thread_;
};

}  // namespace

absl::Status Hold(const Context& context, const std::string& bytes_text) {
  const absl::StatusOr<uint64_t> bytes = ParseBytes(bytes_text);
  if (!bytes.ok()) return bytes.status();
  if (*bytes == 0) return absl::InvalidArgumentError("BYTES: must be at least 1");
  if (const absl::StatusOr<AllocConf> conf = ParseAllocConf(context.replay.alloc_conf); !conf.ok()) {
    return absl::InvalidArgumentError(absl::StrCat("--alloc-conf: ", conf.status().message()));
  }
  ClientOptions options{.socket_dir = context.socket_dir,
                        .name = context.name,
                        .connect_timeout = context.timeout,
                        .call_timeout = context.timeout};
  if (!context.limit.empty()) {
    const absl::StatusOr<Limit> limit = ParseLimit(context.limit);
    if (!limit.ok()) return absl::InvalidArgumentError(absl::StrCat("--limit: ", limit.status().message()));
    options.limit = *limit;
  }
  if (!context.replay.alloc_conf.empty()) options.alloc_conf = context.replay.alloc_conf;
  absl::StatusOr<ClientOptions> complete = client_internal::WithEnvironment(std::move(options));
  if (!complete.ok()) return complete.status();
  options = *std::move(complete);

  // Block signals before the library starts its threads, so that every thread inherits the mask.
  sigset_t mask;
  sigemptyset(&mask);
  for (const int signal : {SIGINT, SIGTERM}) sigaddset(&mask, signal);
  pthread_sigmask(SIG_BLOCK, &mask, nullptr);
  const UniqueFd signals(signalfd(-1, &mask, SFD_CLOEXEC));
  // The library reconnects to a restarted daemon and logs both events. Only an operator ends the session for good.
  const UniqueFd ended(eventfd(0, EFD_CLOEXEC));
  options.on_lost = [&ended](const absl::Status& why) {
    const uint64_t one = 1;
    if (absl::IsAborted(why)) (void)!write(ended.get(), &one, sizeof one);
  };
  options.log = [](const std::string& line) {
    // Hold() returns the end of the session as its status.
    if (!absl::StrContains(line, "the session has ended")) std::fprintf(stderr, "vramctl: %s\n", line.c_str());
  };

  std::optional<WaitingNotice> notice;
  if (!context.json) notice.emplace(context.timeout);
  std::optional<EndOnSignal> end_on_signal(signals.get());
  absl::StatusOr<Client> client = Client::Connect(options);
  if (!client.ok()) return ConnectRefusal(client.status());
  for (const std::string& warning : client->warnings()) std::fprintf(stderr, "vramctl: %s\n", warning.c_str());
  absl::StatusOr<Buffer> buffer = client->Allocate(*bytes, context.device);
  if (!buffer.ok()) return Refusal(buffer.status());
  notice.reset();
  const uint64_t session = client->session_id();  // a restarted daemon assigns another id
  if (absl::Status status = WritePattern(*buffer, session); !status.ok()) return status;
  end_on_signal.reset();
  const std::string name = CleanName(context.name).name;
  if (!name.empty() && client->name() != name) {
    std::fprintf(stderr, "vramctl: the name %s is taken; this session is called %s\n", name.c_str(),
                 client->name().c_str());
  }

  const uint64_t limit = client->limit_bytes(context.device);
  const uint64_t capacity = client->devices()[static_cast<size_t>(context.device)].capacity_bytes;
  if (context.json) {
    const nlohmann::ordered_json json = {
        {"session", session},
        {"name", client->name()},
        {"pid", getpid()},
        {"device", buffer->device()},
        {"bytes", buffer->size()},
        {"block_bytes", buffer->block_bytes()},
        {"segment", buffer->segment_id()},
        {"offset", buffer->offset_bytes()},
        {"address", absl::StrCat(absl::Hex(reinterpret_cast<uintptr_t>(buffer->data())))},
        {"limit_bytes", limit}};
    std::printf("%s\n", JsonText(json).c_str());
  } else {
    std::printf(
        "holding %s as session %llu (%s), pid %d: segment %llu offset %llu, mapped at %p, limit %s%s; pattern "
        "written\n"
        "until %s\n",
        FormatBytes(buffer->size()).c_str(), static_cast<unsigned long long>(session), client->name().c_str(), getpid(),
        static_cast<unsigned long long>(buffer->segment_id()), static_cast<unsigned long long>(buffer->offset_bytes()),
        buffer->data(), FormatBytes(limit).c_str(),
        AskedFor(options.limit.value_or(uint64_t{0}), limit, capacity).c_str(),
        tcgetpgrp(STDIN_FILENO) == getpgrp() ? "interrupted (Ctrl-C)"
                                             : absl::StrCat("ended (kill ", getpid(), ")").c_str());
  }
  if (std::fflush(stdout) != 0)
    return absl::DataLossError(absl::StrCat("the output was not written: ", std::strerror(errno)));

  pollfd wait[] = {{.fd = signals.get(), .events = POLLIN, .revents = 0},
                   {.fd = ended.get(), .events = POLLIN, .revents = 0}};
  while (poll(wait, 2, -1) < 0 && errno == EINTR) {
  }
  if (absl::Status status = VerifyPattern(*buffer, session); !status.ok()) return status;
  if (absl::Status status = client->status(); absl::IsUnavailable(status)) {
    return absl::UnavailableError(
        absl::StrCat("the pattern is intact, and the memory ends with this process: ", status.message()));
  } else if (!status.ok()) {
    return status;
  }
  absl::Status status = buffer->Reset();
  if (status.ok() && !context.json) std::printf("gave %s back\n", FormatBytes(*bytes).c_str());
  return status;
}

}  // namespace vrambroker::vramctl
