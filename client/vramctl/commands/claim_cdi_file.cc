// SPDX-License-Identifier: Apache-2.0
#include "client/vramctl/commands/claim_cdi_file.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "allocator/wire/admin_json.h"
#include "client/vramctl/commands/snapshot_file.h"
#include "client/vramctl/options/refusal.h"
#include "client/vramctl/views/output.h"

namespace vrambroker::vramctl {
namespace {

using Json = nlohmann::ordered_json;

// Returns the directory of sockets mounted by the file at `path`; empty: no such file.
std::string MountedBy(const std::string& path) {
  std::ifstream file(path);
  const Json json = Json::parse(file, nullptr, /*allow_exceptions=*/false);
  const Json::json_pointer mounted("/devices/0/containerEdits/mounts/0/hostPath");
  return json.is_object() && json.contains(mounted) && json[mounted].is_string() ? json[mounted].get<std::string>()
                                                                                 : "";
}

// Adds advice for users to errors.
absl::Status WriteForRuntimes(const std::string& path, const std::string& text) {
  const std::string folder = std::filesystem::path(path).parent_path();
  absl::Status status;
  if (mkdir(folder.c_str(), 0755) != 0 && errno != EEXIST) {
    status = absl::ErrnoToStatus(errno, absl::StrCat("cannot create ", folder));
  }
  if (status.ok()) status = WriteFile(path, text);
  if (!absl::IsPermissionDenied(status)) return status;
  return absl::PermissionDeniedError(absl::StrCat(
      "cannot write ", path, ": it is for root; run vramctl with sudo, or write elsewhere with --output FILE"));
}

}  // namespace

absl::Status WriteCdiFile(const v1::Claim& claim, const std::string& output, const std::string& preload) {
  const absl::StatusOr<Json> cdi = ClaimCdi(claim, preload);
  if (!cdi.ok()) return Refusal(cdi.status());
  // Runtimes resolve the path on this machine. A daemon in a container may know its directory by another path.
  if (const std::string& dir = claim.socket_dir(); access(dir.c_str(), F_OK) != 0 && errno == ENOENT) {
    return Refusal(absl::FailedPreconditionError(absl::StrCat(
        "there is no ", dir,
        " here, where the daemon has the claim's sockets: mount the daemon's socket directory into its container at "
        "the path that it has outside")));
  }
  const std::string text = absl::StrCat(JsonText(*cdi, 2), "\n");
  if (output == "-") return WriteFile(output, text);
  const std::string path = output.empty() ? CdiPath(claim.name()) : output;
  if (const std::string other = MountedBy(path); !other.empty() && other != claim.socket_dir()) {
    return Refusal(absl::AlreadyExistsError(
        absl::StrCat(path, " gives containers ", other, ", another claim: remove the file if nothing needs it")));
  }
  umask(022);  // let runtimes of all users read the file; the daemon checks who connects
  return output.empty() ? WriteForRuntimes(path, text) : WriteFile(path, text);
}

void RemoveCdiFile(const std::string& claim, const std::string& socket_dir) {
  const std::string path = CdiPath(claim);
  std::error_code unknown;
  const auto dir = (std::filesystem::absolute(socket_dir, unknown) / "claims" / claim).lexically_normal();
  if (std::filesystem::path(MountedBy(path)).lexically_normal() != dir) return;
  if (unlink(path.c_str()) == 0 || errno == ENOENT) return;
  std::fprintf(stderr, "vramctl: cannot remove %s: %s; remove it: no container starts with it any more\n", path.c_str(),
               std::strerror(errno));
}

}  // namespace vrambroker::vramctl
