// SPDX-License-Identifier: Apache-2.0
#include "server/wire/claim_file.h"

#include <google/protobuf/text_format.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstdio>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "server/base/log_line.h"
#include "server/base/replace_file.h"
#include "server/wire/convert.h"
#include "vrambroker/config/v1/claims.pb.h"

namespace vrambroker {
namespace {

using config::v1::SavedClaims;

// More than twice what kMaxClaims of the largest claims take.
constexpr size_t kMostBytes = size_t{128} << 20;
constexpr char kHeader[] =
    "# Claims of vrambrokerd, which replaces this file at each change. Change them with vramctl claim.\n";
// A file that was cut off has no such line.
constexpr char kFooter[] = "# The end.\n";

SavedClaims::State SavedStateOf(ClaimState state) {
  switch (state) {
    case ClaimState::kActive:
      return SavedClaims::ACTIVE;
    case ClaimState::kDraining:
      return SavedClaims::DRAINING;
    case ClaimState::kRevoked:
      return SavedClaims::REVOKED;
  }
  return SavedClaims::ACTIVE;
}

ClaimState StateOf(SavedClaims::State state) {
  return state == SavedClaims::REVOKED    ? ClaimState::kRevoked
         : state == SavedClaims::DRAINING ? ClaimState::kDraining
                                          : ClaimState::kActive;
}

// A file that no daemon has written. Without its claims the daemon serves, at least.
absl::Status PutAside(const std::string& path, const absl::Status& why) {
  const std::string aside = absl::StrCat(path, ".too-large");
  if (rename(path.c_str(), aside.c_str()) != 0) return absl::ErrnoToStatus(errno, absl::StrCat("cannot rename ", path));
  LogLine("the file of claims is put aside, and the daemon has no claims: make them again (vramctl claim create)")
      .Add("file", aside)
      .Add("why", why.message())
      .Write(spdlog::level::err);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::vector<Claim>> LoadClaims(const std::string& path) {
  const absl::StatusOr<std::string> text = ReadOwnFile(path, kMostBytes);
  if (absl::IsNotFound(text.status())) {
    const std::string folder = path.substr(0, path.rfind('/'));
    struct stat found = {};
    if (folder.empty() || (stat(folder.c_str(), &found) == 0 && S_ISDIR(found.st_mode))) return std::vector<Claim>();
    return absl::FailedPreconditionError(
        absl::StrCat("claims_file: there is no directory ", folder, "; create it, or choose another file"));
  }
  const auto unreadable = [&path](absl::string_view why) {
    return absl::FailedPreconditionError(absl::StrCat("the claims in ", path, " cannot be read: ", why,
                                                      "; mend the file, or remove it to start without claims"));
  };
  if (absl::IsResourceExhausted(text.status())) {
    const absl::Status aside = PutAside(path, text.status());
    return aside.ok() ? absl::StatusOr<std::vector<Claim>>(std::vector<Claim>()) : unreadable(aside.message());
  }
  if (!text.ok()) return unreadable(text.status().message());
  if (!absl::EndsWith(*text, kFooter)) return unreadable("its last line is missing");
  SavedClaims saved;
  if (!google::protobuf::TextFormat::ParseFromString(*text, &saved)) return unreadable("it is damaged");
  std::vector<Claim> claims;
  absl::flat_hash_set<std::string> names;
  for (const SavedClaims::Claim& from : saved.claims()) {
    if (absl::Status status = CheckClaimName(from.name()); !status.ok()) return unreadable(status.message());
    if (!names.insert(from.name()).second) return unreadable(absl::StrCat("'", from.name(), "' is there twice"));
    // Nobody's: who owns a claim is always in the file.
    absl::StatusOr<ClaimTerms> terms = FromProto(from.terms(), /*caller=*/0);
    if (!terms.ok()) return unreadable(absl::StrCat("claim '", from.name(), "': ", terms.status().message()));
    Claim claim{.name = from.name(),
                .terms = *std::move(terms),
                .state = StateOf(from.state()),
                .created = std::chrono::system_clock::time_point(std::chrono::microseconds(from.created_us()))};
    if (from.maker_pid() != 0) {
      claim.maker = ProcessId{.pid = from.maker_pid(), .started = from.maker_started()};
    }
    claim.is_own = from.own();
    claims.push_back(std::move(claim));
  }
  return claims;
}

absl::Status SaveClaims(const std::string& path, const std::vector<Claim>& claims) {
  SavedClaims saved;
  for (const Claim& claim : claims) {
    SavedClaims::Claim* to = saved.add_claims();
    to->set_name(claim.name);
    *to->mutable_terms() = ToProto(claim.terms);
    to->set_state(SavedStateOf(claim.state));
    to->set_created_us(std::chrono::duration_cast<std::chrono::microseconds>(claim.created.time_since_epoch()).count());
    to->set_own(claim.is_own);
    if (claim.maker.has_value()) {
      to->set_maker_pid(claim.maker->pid);
      to->set_maker_started(claim.maker->started);
    }
  }
  std::string text;
  google::protobuf::TextFormat::PrintToString(saved, &text);
  return ReplaceFile(path, absl::StrCat(kHeader, text, kFooter), /*outlives_machine=*/true);
}

}  // namespace vrambroker
