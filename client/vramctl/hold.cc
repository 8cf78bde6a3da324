// SPDX-License-Identifier: Apache-2.0
#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "allocator/bytes.h"
#include "allocator/device.h"
#include "client/vramctl/commands.h"
#include "client/vrambroker/client.h"

namespace vrambroker::vramctl {
namespace {

// A pattern that differs between sessions and between words of one buffer.
uint64_t Word(uint64_t session, uint64_t index) { return (session << 48) ^ (index * 0x9E3779B97F4A7C15u); }

void WritePattern(const Buffer& buffer, uint64_t session) {
  auto* words = static_cast<uint64_t*>(buffer.data());
  for (uint64_t i = 0; i < buffer.size() / sizeof(uint64_t); ++i) words[i] = Word(session, i);
}

absl::Status VerifyPattern(const Buffer& buffer, uint64_t session) {
  const auto* words = static_cast<const uint64_t*>(buffer.data());
  for (uint64_t i = 0; i < buffer.size() / sizeof(uint64_t); ++i) {
    if (words[i] != Word(session, i)) {
      return absl::DataLossError(absl::StrCat("other bytes than were written, at offset ", i * sizeof(uint64_t)));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status Hold(const Context& context, const std::string& bytes_text) {
  const absl::StatusOr<uint64_t> bytes = ParseBytes(bytes_text);
  if (!bytes.ok()) return bytes.status();
  ClientOptions options{.socket_dir = context.socket_dir, .name = context.name};
  if (!context.limit.empty()) {
    const absl::StatusOr<Limit> limit = ParseLimit(context.limit);
    if (!limit.ok()) return limit.status();
    options.limit = *limit;
  }

  // Blocked before the library starts its threads, so that every thread inherits it.
  sigset_t mask;
  sigemptyset(&mask);
  for (const int signal : {SIGINT, SIGTERM}) sigaddset(&mask, signal);
  pthread_sigmask(SIG_BLOCK, &mask, nullptr);
  const UniqueFd signals(signalfd(-1, &mask, SFD_CLOEXEC));
  const UniqueFd lost(eventfd(0, EFD_CLOEXEC));
  options.on_lost = [&lost](const absl::Status&) {
    const uint64_t one = 1;
    (void)!write(lost.get(), &one, sizeof one);
  };

  absl::StatusOr<Client> client = Client::Connect(options);
  if (!client.ok()) return client.status();
  absl::StatusOr<Buffer> buffer = client->Allocate(*bytes, context.device);
  if (!buffer.ok()) return buffer.status();
  // A pattern can be written where the processor reaches the memory.
  const bool reachable = client->devices()[context.device].kind == "host";
  if (reachable) WritePattern(*buffer, client->session_id());

  if (context.json) {
    std::printf("%s\n", nlohmann::ordered_json({{"session", client->session_id()},
                                                {"name", client->name()},
                                                {"pid", getpid()},
                                                {"device", buffer->device()},
                                                {"bytes", buffer->size()},
                                                {"block_bytes", buffer->block_bytes()},
                                                {"segment", buffer->segment_id()},
                                                {"offset", buffer->offset_bytes()},
                                                {"address", absl::StrCat(absl::Hex(reinterpret_cast<uintptr_t>(buffer->data())))},
                                                {"limit_bytes", client->limit_bytes(context.device)}})
                            .dump()
                            .c_str());
  } else {
    std::printf("holding %s as session %llu (%s), pid %d: segment %llu offset %llu, mapped at %p, limit %s%s\n"
                "until interrupted (Ctrl-C)\n",
                FormatBytes(buffer->size()).c_str(), static_cast<unsigned long long>(client->session_id()),
                client->name().c_str(), getpid(), static_cast<unsigned long long>(buffer->segment_id()),
                static_cast<unsigned long long>(buffer->offset_bytes()), buffer->data(),
                FormatBytes(client->limit_bytes(context.device)).c_str(),
                reachable ? ", pattern written" : "");
  }
  std::fflush(stdout);

  pollfd wait[] = {{.fd = signals.get(), .events = POLLIN, .revents = 0}, {.fd = lost.get(), .events = POLLIN, .revents = 0}};
  while (poll(wait, 2, -1) < 0 && errno == EINTR) {
  }
  if (reachable) {
    if (absl::Status status = VerifyPattern(*buffer, client->session_id()); !status.ok()) return status;
  }
  if (absl::Status status = client->status(); !status.ok()) return status;
  absl::Status status = buffer->Reset();
  if (status.ok() && !context.json) std::printf("gave %s back\n", FormatBytes(*bytes).c_str());
  return status;
}

}  // namespace vrambroker::vramctl
