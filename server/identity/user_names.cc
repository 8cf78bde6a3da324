// SPDX-License-Identifier: Apache-2.0
#include "server/identity/user_names.h"

#include <pwd.h>

#include <algorithm>
#include <cerrno>
#include <utility>
#include <vector>

#include "allocator/base/utf8.h"

namespace vrambroker {
namespace {

constexpr size_t kMostNameBytes = 64;

}  // namespace

std::optional<std::string> LookUpUserName(uid_t uid) {
  constexpr size_t kMostEntryBytes = size_t{1} << 20;
  std::vector<char> buffer(1024);
  passwd entry = {};
  passwd* found = nullptr;
  int error = 0;
  while (true) {
    error = getpwuid_r(uid, &entry, buffer.data(), buffer.size(), &found);
    if (error == ERANGE && buffer.size() < kMostEntryBytes) {
      buffer.resize(2 * buffer.size());
    } else if (error != EINTR) {
      break;
    }
  }
  if (found != nullptr) return CleanText(found->pw_name, kMostNameBytes);
  // Some name services return these codes for unknown users: getpwuid_r(3).
  if (error == 0 || error == ENOENT || error == ESRCH) return std::string();
  return std::nullopt;
}

UserNames::UserNames(Lookup look_up, std::function<SteadyTime()> clock)
    : look_up_(std::move(look_up)), clock_(std::move(clock)) {}

std::string UserNames::Get(uid_t uid) {
  const SteadyTime now = clock_();
  std::string name;
  {
    MutexLock lock(mu_);
    const auto known = names_.find(uid);
    if (known != names_.end()) name = known->second.name;
    if (known != names_.end() && now - known->second.wanted_since < kAge) return name;
    if (known == names_.end() && names_.size() >= kMostUsers) ForgetOldest();
    names_[uid].wanted_since = now;
  }
  thread_.Submit([self = shared_from_this(), uid] { self->LookUp(uid); });
  return name;
}

size_t UserNames::size() const {
  MutexLock lock(mu_);
  return names_.size();
}

void UserNames::LookUp(uid_t uid) {
  const std::optional<std::string> name = look_up_(uid);
  MutexLock lock(mu_);
  // Does not restore a user forgotten meanwhile. Keeps the known name when the lookup fails.
  if (const auto known = names_.find(uid); known != names_.end() && name.has_value()) known->second.name = *name;
}

void UserNames::ForgetOldest() {
  const auto oldest = std::min_element(names_.begin(), names_.end(), [](const auto& a, const auto& b) {
    return a.second.wanted_since < b.second.wanted_since;
  });
  names_.erase(oldest);
}

}  // namespace vrambroker
