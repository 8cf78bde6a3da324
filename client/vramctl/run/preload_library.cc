// SPDX-License-Identifier: Apache-2.0
#include "client/vramctl/run/preload_library.h"

#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <system_error>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"

namespace vrambroker::vramctl {
namespace {

constexpr char kName[] = "libvrambroker-preload.so";

// Folders relative to this program: as installed, in a bundle, and in a build folder.
constexpr const char* kFolders[] = {VRAMBROKER_LIBRARY_FOLDER, "../lib", "preload"};

// The dynamic linker treats a space or ':' as the end of a name.
absl::StatusOr<std::string> Loadable(const std::string& path) {
  if (path.find_first_of(" :") == std::string::npos) return path;
  return absl::FailedPreconditionError(
      absl::StrCat("LD_PRELOAD cannot have the path '", path,
                   "', because of its spaces or colons; copy the library elsewhere, and "
                   "name it in VRAMBROKER_PRELOAD"));
}

}  // namespace

absl::StatusOr<std::string> FindPreloadLibrary() {
  std::error_code error;
  if (const char* const named = std::getenv("VRAMBROKER_PRELOAD"); named != nullptr && *named != '\0') {
    const std::filesystem::path path = std::filesystem::absolute(named, error);
    if (access(path.c_str(), R_OK) == 0) return Loadable(path.string());
    return absl::NotFoundError(absl::StrCat("VRAMBROKER_PRELOAD: there is no library ", path.string()));
  }
  const std::filesystem::path program = std::filesystem::read_symlink("/proc/self/exe", error);
  std::vector<std::string> looked;
  for (const char* const folder : kFolders) {
    const std::string path = (program.parent_path() / folder / kName).lexically_normal().string();
    if (access(path.c_str(), R_OK) == 0) return Loadable(path);
    if (!absl::c_linear_search(looked, path)) looked.push_back(path);
  }
  return absl::NotFoundError(absl::StrCat("there is no ", kName, " (looked for ", absl::StrJoin(looked, ", "),
                                          "); install it with vramctl, or name it in VRAMBROKER_PRELOAD"));
}

std::string LdPreloadWith(const std::string& library, const std::string& before) {
  std::vector<std::string> all = {library};
  for (const absl::string_view other : absl::StrSplit(before, absl::ByAnyChar(" :"), absl::SkipEmpty())) {
    if (other != library) all.emplace_back(other);
  }
  return absl::StrJoin(all, ":");
}

}  // namespace vrambroker::vramctl
