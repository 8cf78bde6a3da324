// SPDX-License-Identifier: Apache-2.0
#include "server/reset_guard.h"

#include <grpc/grpc.h>
#include <grpc/support/alloc.h>

#include <algorithm>
#include <chrono>
#include <memory>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace vrambroker {
namespace {

// Books that gRPC opens for something else than connections: one for the server, and room for more.
constexpr intptr_t kOtherBooks = 64;

struct FreeText {
  void operator()(char* text) const { gpr_free(text); }
};
using GrpcText = std::unique_ptr<char, FreeText>;

// The number after `before` in channelz' JSON; nullopt when there is none. 64-bit numbers are strings there, and 0 is
// left out.
std::optional<uint64_t> NumberAfter(absl::string_view json, absl::string_view before) {
  const size_t place = json.find(before);
  if (place == absl::string_view::npos) return std::nullopt;
  const absl::string_view rest = json.substr(place + before.size());
  uint64_t number = 0;
  if (!absl::SimpleAtoi(rest.substr(0, rest.find('"')), &number)) return std::nullopt;
  return number;
}

uint64_t NumberOf(absl::string_view json, absl::string_view field) {
  return NumberAfter(json, absl::StrCat("\"", field, "\":\"")).value_or(0);
}

int DescriptorOf(absl::string_view json) {
  const std::optional<uint64_t> number = NumberAfter(json, "\"name\":\"fd:");
  return number.has_value() ? static_cast<int>(*number) : -1;
}

}  // namespace

std::optional<StreamBooks::Found> StreamBooks::Next(intptr_t handed_over) {
  for (intptr_t id = last_ + 1; id <= handed_over + kOtherBooks; ++id) {
    const GrpcText json(grpc_channelz_get_socket(id));
    if (json == nullptr) continue;
    last_ = id;
    return Found{.books = id, .fd = DescriptorOf(json.get())};
  }
  return std::nullopt;
}

std::optional<StreamCounts> StreamBooks::CountsOf(intptr_t books) {
  const GrpcText json(grpc_channelz_get_socket(books));
  if (json == nullptr) return std::nullopt;
  return StreamCounts{.started = NumberOf(json.get(), "streamsStarted"),
                      .completed = NumberOf(json.get(), "streamsSucceeded"),
                      .reset = NumberOf(json.get(), "streamsFailed")};
}

absl::Status StreamConduct::Judge(const StreamCounts& counts, SteadyTime now) {
  if (forgave_ == SteadyTime::min()) forgave_ = now;
  // A client that gives its calls up one by one, for years, attacks nobody.
  const uint64_t forgiven =
      kForgiven * static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::seconds>(now - forgave_).count());
  if (forgiven > 0) forgave_ = now;
  owed_ -= std::min(owed_, forgiven);
  const uint64_t owed = owed_ + (counts.reset - last_.reset);
  const uint64_t completed = counts.completed - last_.completed;
  owed_ = owed > completed ? owed - completed : 0;
  last_ = counts;
  if (owed_ > kMaxResets) {
    return absl::ResourceExhaustedError(
        absl::StrCat("it reset ", counts.reset, " streams and completed ", counts.completed));
  }
  // The figures are not of one moment.
  const uint64_t ended = counts.completed + counts.reset;
  if (const uint64_t open = counts.started > ended ? counts.started - ended : 0; open > max_open_) {
    return absl::ResourceExhaustedError(absl::StrCat("it has ", open, " streams open"));
  }
  return absl::OkStatus();
}

void Banned::Add(pid_t pid, uid_t uid, SteadyTime now) {
  absl::erase_if(processes_, [now](const auto& entry) { return entry.second.until <= now; });
  processes_[pid] = {.uid = uid, .until = now + kTime};
}

absl::Status Banned::Check(pid_t pid, uid_t uid, SteadyTime now) const {
  size_t of_user = 0;
  for (const auto& [banned, entry] : processes_) {
    if (entry.until <= now) continue;
    if (banned == pid && entry.uid == uid) return absl::ResourceExhaustedError("it attacked the daemon a moment ago");
    if (entry.uid == uid) ++of_user;
  }
  if (of_user < kMaxProcesses) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat(of_user, " processes of its user attacked the daemon a moment ago"));
}

}  // namespace vrambroker
