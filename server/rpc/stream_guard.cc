// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/stream_guard.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace vrambroker {
namespace {

void End(size_t& open, size_t streams) {
  open -= std::min(open, streams);
}

// A bucket accepts a request beyond its capacity for all of its tokens.
bool TakeResets(TokenBucket& resets, const StreamGuard::Bounds& bounds, size_t streams, SteadyTime now) {
  const auto tokens = static_cast<double>(streams);
  return resets.Take(now, tokens) && tokens <= bounds.resets;
}

}  // namespace

absl::StatusOr<StreamEvent> StreamBook::FromClient(const Http2Frame& frame) {
  switch (frame.type) {
    case Http2FrameType::kHeaders:
    case Http2FrameType::kContinuation:
      header_bytes_ = frame.bytes + (frame.type == Http2FrameType::kHeaders ? 0 : header_bytes_);
      if (header_bytes_ > kMaxHeaderBytes) {
        return absl::InvalidArgumentError(absl::StrCat("a call's headers take more than ", kMaxHeaderBytes, " bytes"));
      }
      // gRPC ignores streams with even numbers, the server's: a high even number would make all later streams look
      // begun.
      if (frame.stream % 2 == 0) {
        return absl::InvalidArgumentError(
            absl::StrCat("stream ", frame.stream, ": a client's streams have odd numbers"));
      }
      // A client numbers its streams upwards.
      if (frame.stream <= last_) return StreamEvent::kNone;
      last_ = frame.stream;
      open_.insert(frame.stream);
      return StreamEvent::kBegan;
    case Http2FrameType::kRstStream:
      return open_.erase(frame.stream) > 0 ? StreamEvent::kReset : StreamEvent::kNone;
    default:
      return StreamEvent::kNone;
  }
}

StreamEvent StreamBook::FromServer(const Http2Frame& frame) {
  switch (frame.type) {
    case Http2FrameType::kData:
    case Http2FrameType::kHeaders:
      if ((frame.flags & Http2Frame::kEndStream) == 0) return StreamEvent::kNone;
      return open_.erase(frame.stream) > 0 ? StreamEvent::kCompleted : StreamEvent::kNone;
    case Http2FrameType::kRstStream:
      // The server may be made to reset streams (CVE-2025-8671).
      return open_.erase(frame.stream) > 0 ? StreamEvent::kReset : StreamEvent::kNone;
    default:
      return StreamEvent::kNone;
  }
}

StreamGuard::Conduct& StreamGuard::OfProcess(Who who, SteadyTime now) {
  if (remembered() >= forget_at_) EvictIdle(now);
  return processes_.try_emplace(ProcessKey(who.pid, who.user), kProcess).first->second;
}

StreamGuard::Conduct& StreamGuard::OfUser(const UserKey& user, SteadyTime now) {
  if (remembered() >= forget_at_) EvictIdle(now);
  return users_.try_emplace(user, kUser).first->second;
}

void StreamGuard::EvictIdle(SteadyTime now) {
  const auto is_quiet = [now](auto& entry) {
    return entry.second.open == 0 && entry.second.banned_until <= now && entry.second.resets.IsFull(now) &&
           entry.second.connects.IsFull(now);
  };
  absl::erase_if(processes_, is_quiet);
  absl::erase_if(users_, is_quiet);
  forget_at_ = std::max<size_t>(64, 2 * remembered());
}

absl::Status StreamGuard::Began(Who who, size_t open, SteadyTime now) {
  Conduct& user = OfUser(who.user, now);
  ++user.open;
  const size_t open_of_user = user.open;
  Conduct& process = OfProcess(who, now);
  ++process.open;
  const bool user_has_too_many = open_of_user > kUser.open && process.open > kSparedOpen;
  if (open <= kMaxOpenOfConnection && process.open <= kProcess.open && !user_has_too_many) return absl::OkStatus();
  process.banned_until = now + kBanTime;
  return absl::ResourceExhaustedError(absl::StrCat("it has ", open, " streams open, its process ", process.open,
                                                   ", and its user ", open_of_user, "; the most are ",
                                                   kMaxOpenOfConnection, ", ", kProcess.open, " and ", kUser.open));
}

void StreamGuard::Completed(Who who) {
  if (const auto it = processes_.find(ProcessKey(who.pid, who.user)); it != processes_.end()) {
    End(it->second.open, 1);
    it->second.resets.Give(1);
  }
  if (const auto it = users_.find(who.user); it != users_.end()) {
    End(it->second.open, 1);
    it->second.resets.Give(1);
  }
}

absl::Status StreamGuard::Reset(Who who, size_t streams, SteadyTime now) {
  if (streams == 0) return absl::OkStatus();
  Conduct& user = OfUser(who.user, now);
  End(user.open, streams);
  const bool user_attacks = !TakeResets(user.resets, kUser, streams, now);
  if (user_attacks) user.banned_until = now + kBanTime;
  Conduct& process = OfProcess(who, now);
  End(process.open, streams);
  const bool process_attacks = !TakeResets(process.resets, kProcess, streams, now);
  if (process_attacks) process.banned_until = now + kBanTime;
  const bool is_spared = process.resets.Has(now, kProcess.resets - kSparedResets);
  if (!process_attacks && (!user_attacks || is_spared)) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat(process_attacks ? "its process" : "its user", " gave up more than ",
                                                   process_attacks ? kProcess.resets : kUser.resets,
                                                   " calls beyond those that were answered"));
}

absl::Status StreamGuard::CheckConnect(Who who, SteadyTime now) const {
  if (const auto it = processes_.find(ProcessKey(who.pid, who.user));
      it != processes_.end() && it->second.banned_until > now) {
    return absl::ResourceExhaustedError("its process attacked the daemon a moment ago");
  }
  if (const auto it = users_.find(who.user); it != users_.end() && it->second.banned_until > now) {
    return absl::ResourceExhaustedError("processes of its user attacked the daemon a moment ago");
  }
  return absl::OkStatus();
}

}  // namespace vrambroker
