// SPDX-License-Identifier: Apache-2.0
#include "server/wire/claim_file.h"

#include <fcntl.h>
#include <google/protobuf/text_format.h>
#include <sys/stat.h>
#include <unistd.h>

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

// More than twice the size of kMaxClaims claims of the largest size.
constexpr size_t kMostBytes = size_t{128} << 20;
constexpr char kHeader[] =
    "# Claims of vrambrokerd, which replaces this file at each change. Change them with vramctl claim.\n"
    "# state: 0 is active, 1 draining, 2 revoked.\n";
// Missing from a truncated file.
constexpr char kFooter[] = "# The end.\n";

// Text before a claim's state, a digit; BehindState() returns the text behind. Finding both allows changing the state
// in place, by a single byte.
constexpr char kBeforeState[] = "claims {\n  state: ";

std::string BehindState(absl::string_view name) {
  return absl::StrCat("\n  name: \"", name, "\"\n");
}

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

// Text of a claim without its name and state.
std::string TermsTextOf(const Claim& claim) {
  SavedClaims::Claim saved;
  *saved.mutable_terms() = ToProto(claim.terms);
  saved.set_created_us(std::chrono::duration_cast<std::chrono::microseconds>(claim.created.time_since_epoch()).count());
  saved.set_own(claim.is_own);
  if (claim.maker.has_value()) {
    saved.set_maker_pid(claim.maker->pid);
    saved.set_maker_started(claim.maker->started);
  }
  google::protobuf::TextFormat::Printer printer;
  printer.SetInitialIndentLevel(1);
  printer.SetUseUtf8StringEscaping(true);
  std::string text;
  printer.PrintToString(saved, &text);
  return text;
}

void AppendTo(std::string& text, const Claim& claim, absl::string_view terms) {
  absl::StrAppend(&text, kBeforeState, static_cast<int>(SavedStateOf(claim.state)), BehindState(claim.name), terms,
                  "}\n");
}

std::string TextOf(const std::vector<Claim>& claims) {
  std::string text = kHeader;
  for (const Claim& claim : claims) AppendTo(text, claim, TermsTextOf(claim));
  return text + kFooter;
}

// Renames a file not written by any daemon. The daemon then at least serves, without its claims.
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
    // No caller: the file always names the owner.
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
  // Rewrites a file of an older daemon or an editor: states are changed in place from now on.
  if (const std::string own = TextOf(claims); own != *text) {
    if (absl::Status status = ReplaceFile(path, own, /*outlives_machine=*/true); !status.ok()) {
      LogLine("the file of claims stays as it is").Add("why", status.message()).Write(spdlog::level::warn);
    }
  }
  return claims;
}

absl::Status SaveClaims(const std::string& path, const std::vector<Claim>& claims) {
  return ReplaceFile(path, TextOf(claims), /*outlives_machine=*/true);
}

absl::Status ClaimSaver::Save(const std::string& path, const std::vector<Claim>& claims) {
  absl::flat_hash_map<ClaimId, Printed> printed;
  std::string text = kHeader;
  for (const Claim& claim : claims) {
    const auto before = printed_.find(claim.id);
    const bool is_same = before != printed_.end() && before->second.terms == claim.terms;
    Printed& now = printed[claim.id];
    now = is_same ? std::move(before->second) : Printed{.terms = claim.terms, .text = TermsTextOf(claim)};
    AppendTo(text, claim, now.text);
  }
  printed_ = std::move(printed);
  return ReplaceFile(path, text + kFooter, /*outlives_machine=*/true);
}

absl::Status SaveClaimState(const std::string& path, const Claim& claim) {
  const absl::StatusOr<UniqueFd> file = OpenOwnFile(path, O_RDWR);
  if (!file.ok()) return file.status();
  const absl::StatusOr<std::string> text = ReadOpenFile(*file, path, kMostBytes);
  if (!text.ok()) return text.status();
  const size_t behind = text->find(BehindState(claim.name));
  const bool has_state = behind != std::string::npos && behind > 0 &&
                         absl::EndsWith(absl::string_view(*text).substr(0, behind - 1), kBeforeState);
  if (!has_state) {
    return absl::NotFoundError(absl::StrCat(path, " does not have the claim as the daemon has written it"));
  }
  const std::string state = absl::StrCat(static_cast<int>(SavedStateOf(claim.state)));
  if (pwrite(file->get(), state.data(), 1, static_cast<off_t>(behind - 1)) != 1 || fdatasync(file->get()) != 0) {
    return absl::ErrnoToStatus(errno, absl::StrCat("cannot write ", path));
  }
  return absl::OkStatus();
}

}  // namespace vrambroker
