// SPDX-License-Identifier: Apache-2.0
#include "server/identity/saved_settings.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>
#include <variant>

#include "absl/algorithm/container.h"
#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "allocator/base/names.h"
#include "allocator/device/process_files.h"
#include "server/base/replace_file.h"

namespace vrambroker {
namespace {

constexpr size_t kMostSettingsBytes = size_t{16} << 20;  // of the file
constexpr size_t kWordsOfLine = 10;                      // plus another with the token of an earlier session
constexpr char kNotSet[] = "-";

bool IsRunning(const ProcessId& process) {
  return process.started != 0 && StartOf(process.pid) == process.started;
}

// "4096B", or "0.4" in full precision.
std::string WordOf(const std::optional<Limit>& limit) {
  if (!limit.has_value()) return kNotSet;
  if (const double* const fraction = std::get_if<double>(&*limit)) return absl::StrFormat("%.17g", *fraction);
  return absl::StrCat(std::get<uint64_t>(*limit), "B");
}

// False: the word is not valid.
bool ParseWord(absl::string_view word, std::optional<Limit>* limit) {
  if (word == kNotSet) return true;
  uint64_t bytes = 0;
  double fraction = 0;
  if (absl::ConsumeSuffix(&word, "B")) {
    if (!absl::SimpleAtoi(word, &bytes)) return false;
    *limit = bytes;
    return true;
  }
  if (!absl::SimpleAtod(word, &fraction) || !(fraction >= 0 && fraction <= 1)) return false;
  *limit = fraction;
  return true;
}

template <typename Number>
std::string WordOf(const std::optional<Number>& number) {
  return number.has_value() ? absl::StrCat(*number) : kNotSet;
}

template <typename Number>
bool ParseWord(absl::string_view word, std::optional<Number>* number) {
  if (word == kNotSet) return true;
  return absl::SimpleAtoi(word, &number->emplace());
}

std::string WordOf(const std::optional<RandomToken>& token) {
  return token.has_value() ? absl::BytesToHexString({token->data(), token->size()}) : kNotSet;
}

bool ParseWord(absl::string_view word, std::optional<RandomToken>* token) {
  if (word == kNotSet) return true;
  if (word.size() != 2 * std::tuple_size_v<RandomToken> || !absl::c_all_of(word, absl::ascii_isxdigit)) return false;
  // By hand: Debian 12's absl::HexStringToBytes() is deprecated in Debian 13.
  RandomToken& read = token->emplace();
  for (size_t i = 0; i < read.size(); ++i) {
    uint32_t byte = 0;
    if (!absl::SimpleHexAtoi(word.substr(2 * i, 2), &byte)) return false;
    read[i] = static_cast<char>(byte);
  }
  return true;
}

bool AreOfOneSession(const SavedSession& left, const SavedSession& opened) {
  if (left.process != opened.process || left.kind != opened.kind || left.name != opened.name) return false;
  return !opened.earlier.has_value() || !left.token.has_value() || opened.earlier == left.token ||
         opened.earlier == left.earlier;
}

}  // namespace

// pid, start, kind, name, token, limit, guarantee, priority, recorded events, "ended", perhaps the earlier token:
// "4711 123456 leased trainer 0f..e1 0.4 67108864B 10 - -".
std::string SavedSettings::Line(const Entry& entry) {
  const SavedSession& session = entry.session;
  return absl::StrCat(session.process.pid, " ", session.process.started, " ", session.kind, " ", session.name, " ",
                      WordOf(session.token), " ", WordOf(entry.set.limit), " ", WordOf(entry.set.guarantee), " ",
                      WordOf(entry.set.priority), " ", WordOf(entry.set.recorded_events), " ",
                      entry.set.is_ended ? "ended" : kNotSet,
                      session.earlier.has_value() ? absl::StrCat(" ", WordOf(session.earlier)) : "", "\n");
}

std::optional<SavedSettings::Entry> SavedSettings::ParseLine(absl::string_view line) {
  const std::vector<absl::string_view> words = absl::StrSplit(line, ' ');
  if (words.size() != kWordsOfLine && words.size() != kWordsOfLine + 1) return std::nullopt;
  Entry entry;
  SavedSession& session = entry.session;
  SessionSettings& set = entry.set;
  session.kind = std::string(words[2]);
  session.name = std::string(words[3]);
  const bool is_whole =
      absl::SimpleAtoi(words[0], &session.process.pid) && absl::SimpleAtoi(words[1], &session.process.started) &&
      !session.name.empty() && CheckName(session.name).ok() && ParseWord(words[4], &session.token) &&
      ParseWord(words[5], &set.limit) && ParseWord(words[6], &set.guarantee) && ParseWord(words[7], &set.priority) &&
      ParseWord(words[8], &set.recorded_events) && (words[9] == "ended" || words[9] == kNotSet) &&
      (words.size() == kWordsOfLine || ParseWord(words[10], &session.earlier));
  set.is_ended = words[9] == "ended";
  const int priority = set.priority.value_or(0);
  if (!is_whole || priority < -kMaxPriority || priority > kMaxPriority) return std::nullopt;
  return entry;
}

SavedSettings::SavedSettings(std::string path) : path_(std::move(path)) {
  if (path_.empty()) return;
  MutexLock lock(mu_);
  Read();
  Save();
}

void SavedSettings::Read() {
  const absl::StatusOr<std::string> text = ReadOwnFile(path_, kMostSettingsBytes);
  if (absl::IsNotFound(text.status())) return;
  if (!text.ok()) {
    spdlog::warn("what operators had set of sessions is not known: {}", std::string(text.status().message()));
    return;
  }
  size_t damaged = 0;
  for (const absl::string_view line : absl::StrSplit(*text, '\n', absl::SkipEmpty())) {
    std::optional<Entry> entry = ParseLine(line);
    if (!entry.has_value()) {
      ++damaged;
    } else if (IsRunning(entry->session.process)) {
      earlier_.push_back(*std::move(entry));
    }
  }
  if (damaged > 0) {
    spdlog::warn("{} has {} damaged lines: what operators had set of these sessions is not known", path_, damaged);
  }
}

void SavedSettings::Save() {
  if (path_.empty()) return;
  std::erase_if(earlier_, [](const Entry& entry) { return !IsRunning(entry.session.process); });
  std::string text;
  for (const Entry& entry : earlier_) text += Line(entry);
  for (const auto& [id, entry] : open_) {
    if (entry.set != SessionSettings()) text += Line(entry);
  }
  // Needs no durability: sessions end with the machine.
  absl::Status status = ReplaceFile(path_, text, /*outlives_machine=*/false);
  if (!status.ok() && status_.ok()) {
    spdlog::error("what operators set of sessions is not kept for the next start: {}", std::string(status.message()));
  }
  status_ = std::move(status);
}

SessionSettings SavedSettings::Opened(SessionId id, SavedSession session) {
  MutexLock lock(mu_);
  SessionSettings set;
  const auto left =
      absl::c_find_if(earlier_, [&](const Entry& entry) { return AreOfOneSession(entry.session, session); });
  if (left != earlier_.end()) {
    set = left->set;
    earlier_.erase(left);
  } else if (session.earlier.has_value()) {
    // The session may still be open here: its client could not resume the session, or does not know of it.
    const auto lost = absl::c_find_if(open_, [&](const auto& entry) {
      return entry.second.session.token.has_value() && AreOfOneSession(entry.second.session, session);
    });
    if (lost != open_.end()) set = lost->second.set;
  }
  open_.insert_or_assign(id, Entry{.session = std::move(session), .set = set});
  if (set != SessionSettings()) Save();  // the session has a new token
  return set;
}

void SavedSettings::Change(SessionId id, absl::FunctionRef<void(SessionSettings&)> change) {
  MutexLock lock(mu_);
  const auto it = open_.find(id);
  if (it == open_.end()) return;
  const SessionSettings before = it->second.set;
  change(it->second.set);
  if (it->second.set != before || !status_.ok()) Save();
}

SessionSettings SavedSettings::Get(SessionId id) const {
  MutexLock lock(mu_);
  const auto it = open_.find(id);
  return it == open_.end() ? SessionSettings() : it->second.set;
}

void SavedSettings::Ended(SessionId id) {
  MutexLock lock(mu_);
  const auto entry = open_.extract(id);
  if (!entry.empty() && entry.mapped().set != SessionSettings()) Save();
}

void SavedSettings::Left(SessionId id) {
  MutexLock lock(mu_);
  auto entry = open_.extract(id);
  if (!entry.empty() && entry.mapped().set != SessionSettings()) earlier_.push_back(std::move(entry.mapped()));
}

bool SavedSettings::HasEnded(pid_t pid, absl::string_view kind) const {
  MutexLock lock(mu_);
  return absl::c_any_of(earlier_, [&](const Entry& entry) {
    return entry.set.is_ended && entry.session.kind == kind && entry.session.process.pid == pid &&
           IsRunning(entry.session.process);
  });
}

absl::Status SavedSettings::status() const {
  MutexLock lock(mu_);
  return status_;
}

}  // namespace vrambroker
