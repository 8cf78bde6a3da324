// SPDX-License-Identifier: Apache-2.0
#include "client/vramctl/options/users.h"

#include <grp.h>
#include <pwd.h>

#include <map>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace vrambroker::vramctl {

absl::StatusOr<uint32_t> ParseUser(const std::string& flag, const std::string& text) {
  uint32_t uid = 0;
  if (absl::SimpleAtoi(text, &uid)) return uid;
  const passwd* const entry = getpwnam(text.c_str());
  if (entry == nullptr) return absl::InvalidArgumentError(absl::StrCat(flag, ": no user '", text, "' is known"));
  return entry->pw_uid;
}

absl::StatusOr<uint32_t> ParseGroup(const std::string& flag, const std::string& text) {
  uint32_t gid = 0;
  if (absl::SimpleAtoi(text, &gid)) return gid;
  const group* const entry = getgrnam(text.c_str());
  if (entry == nullptr) return absl::InvalidArgumentError(absl::StrCat(flag, ": no group '", text, "' is known"));
  return entry->gr_gid;
}

std::string UserName(uint32_t uid) {
  static auto* const known = new std::map<uint32_t, std::string>;  // a lookup may query another machine
  const auto [it, is_new] = known->try_emplace(uid);
  if (is_new) {
    const passwd* const entry = getpwuid(uid);
    it->second = entry == nullptr ? absl::StrCat(uid) : entry->pw_name;
  }
  return it->second;
}

}  // namespace vrambroker::vramctl
