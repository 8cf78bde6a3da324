// SPDX-License-Identifier: Apache-2.0
#include "client/connection/connection.h"

#include <fcntl.h>
#include <grp.h>
#include <grpcpp/create_channel_posix.h>
#include <pwd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <utility>

#include "absl/strings/cord.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "allocator/base/room_to_start.h"
#include "client/connection/deadline.h"
#include "client/connection/grpc_use.h"

namespace vrambroker::client_internal {
namespace {

constexpr absl::string_view kNoDaemon = "no vrambrokerd: ";
// Threads of a client: the reporting thread, and threads for work forbidden on gRPC's threads.
constexpr int kOwnThreads = 3;
std::atomic<int> live_channels{0};  // while above zero, gRPC has all of its threads

std::shared_ptr<grpc::Channel> Counted(std::shared_ptr<grpc::Channel> channel) {
  ++live_channels;
  grpc::Channel* const counted = channel.get();
  return {counted, [channel = std::move(channel)](grpc::Channel*) mutable {
            channel.reset();
            --live_channels;
          }};
}

struct User {
  std::string name;  // the number of a user without a name
  gid_t group = static_cast<gid_t>(-1);
};

User FindUser(uid_t uid) {
  passwd entry = {};
  passwd* found = nullptr;
  std::array<char, 4096> text;
  const bool known = getpwuid_r(uid, &entry, text.data(), text.size(), &found) == 0 && found != nullptr;
  return known ? User{.name = entry.pw_name, .group = entry.pw_gid} : User{.name = absl::StrCat(uid)};
}

std::string GroupName(gid_t gid) {
  group entry = {};
  group* found = nullptr;
  std::array<char, 4096> text;
  const bool known = getgrgid_r(gid, &entry, text.data(), text.size(), &found) == 0 && found != nullptr;
  return known ? std::string(entry.gr_name) : absl::StrCat(gid);
}

// Returns the claim of socket `path`, judging by the place: SOCKET_DIR/claims/NAME/SOCKET. Empty: no claim.
std::string ClaimOf(const std::string& path) {
  const std::filesystem::path dir = std::filesystem::path(path).parent_path();
  return dir.parent_path().filename() == "claims" ? dir.filename().string() : "";
}

// Says which users the socket, or the folder hiding it, admits, and how to become such a user.
absl::Status MayNotConnect(const std::string& path) {
  struct stat info = {};
  std::string barrier = path;
  while (stat(barrier.c_str(), &info) != 0) {
    const size_t slash = barrier.rfind('/');
    if (slash == std::string::npos || slash == 0) {
      return absl::PermissionDeniedError(absl::StrCat("this user may not connect to ", path));
    }
    barrier.resize(slash);
  }
  constexpr uid_t kFirstPerson = 1000;  // smaller uids are system users
  const bool is_folder = S_ISDIR(info.st_mode);
  const bool group_may = (info.st_mode & (is_folder ? S_IXGRP : S_IWGRP)) != 0;
  const User user = FindUser(geteuid());
  const User owner = FindUser(info.st_uid);
  const std::string group = GroupName(info.st_gid);
  std::string remedy;
  if (const std::string claim = ClaimOf(path); !claim.empty() && is_folder && barrier.ends_with("/" + claim)) {
    return absl::PermissionDeniedError(
        absl::StrCat("user ", user.name, " may not connect to ", path, ": the claim '", claim, "' is for user ",
                     owner.name, "; ask an operator for one of your own (vramctl claim create --owner)"));
  }
  if (!group_may) {
    remedy = is_folder ? absl::StrCat("ask ", owner.name, " for a folder of sockets that others may enter")
                       : "let its group in (socket_mode: \"0660\" in the daemon's configuration)";
  } else if (info.st_gid == 0 || (info.st_uid >= kFirstPerson && info.st_gid == owner.group)) {
    // Root's group, or a personal group: membership gives access to more than the socket.
    remedy =
        "run the daemon with a group for its users, or let everyone in (socket_mode: \"0666\" in the daemon's "
        "configuration)";
  } else {
    remedy = absl::StrCat("join the group (sudo adduser ", user.name, " ", group, ") and log in again");
  }
  return absl::PermissionDeniedError(absl::StrCat("user ", user.name, " may not connect to ", path, ": ", barrier,
                                                  " belongs to user ", owner.name, " and group ", group, "; ", remedy));
}

// The longest sleep in the kernel; `give_up` cannot end a sleep.
constexpr absl::Duration kConnectSlice = absl::Milliseconds(100);

// For connecting, and for each send. Rounded up to 1 ms, since zero would mean no limit.
void SetSendTimeout(int socket, absl::Duration timeout) {
  const timeval limit = absl::ToTimeval(std::max(timeout, absl::Milliseconds(1)));
  setsockopt(socket, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
}

}  // namespace

absl::StatusOr<UniqueFd> ConnectSocket(const std::string& path, int type, absl::Duration timeout,
                                       const std::function<bool()>& give_up) {
  const Deadline deadline = DeadlineAfter(timeout);
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof address.sun_path) {
    return absl::InvalidArgumentError(absl::StrCat("socket path ", path, " is too long"));
  }
  std::memcpy(address.sun_path, path.c_str(), path.size());
  UniqueFd fd(socket(AF_UNIX, type | SOCK_CLOEXEC, 0));
  if (!fd.valid()) return absl::ErrnoToStatus(errno, "socket failed");
  int error = 0;
  do {  // waits while the daemon is slow to accept
    SetSendTimeout(fd.get(), std::min(TimeUntil(deadline), kConnectSlice));
    error = connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0 ? 0 : errno;
  } while ((error == EAGAIN || error == EINTR) && TimeUntil(deadline) > absl::ZeroDuration() &&
           !(give_up && give_up()));
  switch (error) {
    case 0:
      SetSendTimeout(fd.get(), timeout);
      return fd;
    case ENOENT:
    case ENOTDIR:
      if (const std::string claim = ClaimOf(path); !claim.empty()) {
        return absl::UnavailableError(absl::StrCat(kNoDaemon, "there is no socket ", path, "; is there a claim '",
                                                   claim, "' (vramctl claim ls), and does the daemon run?"));
      }
      return absl::UnavailableError(
          absl::StrCat(kNoDaemon, "there is no socket ", path, "; start the daemon, or ", kSocketDirAdvice));
    case ECONNREFUSED:
      return absl::UnavailableError(
          absl::StrCat(kNoDaemon, "nobody listens on ", path, "; the daemon has died, start it again"));
    case EACCES:
    case EPERM:
      return MayNotConnect(path);
    case EAGAIN:
    case EINTR:
      return absl::DeadlineExceededError(
          absl::StrCat("the daemon did not accept a connection on ", path, " within ", absl::FormatDuration(timeout)));
    default:
      return absl::UnavailableError(absl::StrCat("cannot connect to ", path, ": ", std::strerror(error)));
  }
}

absl::StatusOr<std::shared_ptr<grpc::Channel>> ConnectChannel(const std::string& socket_dir, absl::Duration timeout,
                                                              const std::function<bool()>& give_up) {
  if (IsForkedFromGrpc()) {
    return absl::FailedPreconditionError(
        absl::StrCat("this process was made by fork() after process ", GrpcUser(),
                     " had connected, and gRPC does not survive that: fork before the first Connect(), or exec"));
  }
  // Connect here rather than in gRPC: the errors of connect(2) tell the user the cause.
  absl::StatusOr<UniqueFd> fd =
      ConnectSocket(absl::StrCat(socket_dir, "/vrambroker.sock"), SOCK_STREAM, timeout, give_up);
  if (!fd.ok()) return fd.status();
  if (fcntl(fd->get(), F_SETFL, O_NONBLOCK) != 0) return absl::ErrnoToStatus(errno, "fcntl(O_NONBLOCK) failed");
  if (live_channels == 0) {
    if (absl::Status status = CheckRoomForGrpc(kOwnThreads); !status.ok()) return status;
  }
  UseGrpc();
  return Counted(grpc::CreateInsecureChannelFromFd("vrambrokerd", fd->Release()));
}

bool IsNoDaemon(const absl::Status& status) {
  return absl::IsUnavailable(status) && absl::StartsWith(status.message(), kNoDaemon);
}

void SetTimeout(grpc::ClientContext& context, absl::Duration timeout) {
  const gpr_timespec span = gpr_time_from_millis(absl::ToInt64Milliseconds(ClampDuration(timeout)), GPR_TIMESPAN);
  context.set_deadline(gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC), span));
}

absl::Status FromProto(const v1::StatusDetails& details) {
  absl::Status result(static_cast<absl::StatusCode>(details.code()), details.message());
  for (const v1::StatusDetails::Any& detail : details.details()) {
    result.SetPayload(detail.type_url(), absl::Cord(detail.value()));
  }
  return result;
}

absl::Status FromGrpc(const grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  v1::StatusDetails details;
  if (status.error_details().empty() || !details.ParseFromString(status.error_details())) details.Clear();
  details.set_code(static_cast<int>(status.error_code()));
  details.set_message(status.error_message());
  // gRPC has no text for these errors.
  if (details.message().empty() && status.error_code() == grpc::StatusCode::UNIMPLEMENTED) {
    details.set_message(
        "the daemon does not know this call, since it is of an earlier version (vramctl status shows which): update "
        "it");
  } else if (details.message().empty()) {
    details.set_message("the daemon has given no reason");
  }
  return FromProto(details);
}

absl::Status NoAnswerError(absl::Duration timeout) {
  return absl::DeadlineExceededError(
      absl::StrCat("the daemon accepted the connection but did not answer within ", absl::FormatDuration(timeout)));
}

absl::Status ExplainClosed(const absl::Status& status) {
  if (!absl::IsUnavailable(status)) return status;
  for (const char* words : {"Transport closed", "Socket closed", "Connection reset by peer", "Broken pipe"}) {
    if (!absl::StrContains(status.message(), words)) continue;
    return absl::UnavailableError(absl::StrCat(
        "the daemon closed the connection before it answered (", status.message(),
        "): this user has as many connections as it may (max_connections_per_uid, LimitNOFILE) or connects "
        "too often, or the daemon stops; its log says which"));
  }
  return status;
}

}  // namespace vrambroker::client_internal
