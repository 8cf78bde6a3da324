// SPDX-License-Identifier: Apache-2.0
#include "client/vramctl/views/top_details.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "allocator/base/bytes.h"
#include "allocator/wire/admin_json.h"
#include "client/heap/out_of_memory.h"
#include "client/vramctl/views/map_layout.h"
#include "client/vramctl/views/output.h"
#include "client/vramctl/views/overview.h"
#include "client/vramctl/views/session_change.h"
#include "client/vramctl/views/session_output.h"
#include "client/vramctl/views/sessions_table.h"
#include "client/vramctl/views/top_table.h"

namespace vrambroker::vramctl {
namespace {

constexpr int kIndent = 2;
constexpr int kMostBarCells = 60;

void AppendText(std::vector<Line>& lines, const std::string& text, int columns, Style style = Style::kPlain,
                int indent = kIndent) {
  const std::string margin(static_cast<size_t>(indent), ' ');
  for (const std::string& part : Wrap(text, columns - indent)) lines.push_back({{margin}, {part, style}});
}

Line Fact(const char* name, const std::string& value) {
  return {{absl::StrCat(name, " "), Style::kDim}, {value}};
}

// Facts stand side by side; a fact longer than a line is wrapped.
void AppendFacts(std::vector<Line>& lines, const std::vector<Line>& facts, int columns) {
  for (Line& line : Pack(facts, columns - kIndent)) {
    if (Cells(line) > columns - kIndent) {
      AppendText(lines, Render(line, /*colour=*/false), columns);
      continue;
    }
    line.insert(line.begin(), Span{std::string(kIndent, ' ')});
    lines.push_back(std::move(line));
  }
}

std::string OrDash(const std::string& text) {
  return text.empty() ? "-" : Printable(text);
}

}  // namespace

TopDetails::TopDetails(v1::Session session, Options options)
    : options_(std::move(options)), session_(std::make_unique<v1::Session>(std::move(session))) {}

TopDetails::TopDetails(v1::Claim claim, Options options)
    : options_(std::move(options)), claim_(std::make_unique<v1::Claim>(std::move(claim))) {}

void TopDetails::SetData(const v1::ListSessionsResponse& sessions, const v1::ListClaimsResponse& claims,
                         absl::Time now) {
  now_ = now;
  if (session_ != nullptr) {
    const v1::Session* const found = FindSession(sessions, *session_);
    has_ended_ = found == nullptr;
    if (found != nullptr) {
      *session_ = *found;
      run_id_ = sessions.run_id();
    }
  }
  const std::string name = session_ != nullptr ? session_->claim() : claim_->name();
  const auto claim = std::find_if(claims.claims().begin(), claims.claims().end(),
                                  [&](const v1::Claim& each) { return each.name() == name; });
  if (claim != claims.claims().end()) claim_ = std::make_unique<v1::Claim>(*claim);
  if (session_ != nullptr) return;
  has_ended_ = claim == claims.claims().end();
  if (has_ended_) return;
  run_id_ = sessions.run_id();
  members_.clear_sessions();
  for (const v1::Session& each : sessions.sessions()) {
    if (each.claim() == name) *members_.add_sessions() = each;
  }
}

void TopDetails::SetDetails(DetailsData data) {
  if (!data.request.IsOfSame(request())) return;
  // Keep the last segments: an ended session has no segments, and may be gone before it is missing in the list.
  const bool is_gone = std::any_of(data.maps.begin(), data.maps.end(),
                                   [](const DetailsData::Map& map) { return absl::IsNotFound(map.heap.status()); });
  if (details_.has_value() && (has_ended_ || is_gone)) return;
  details_ = std::move(data);
}

std::string TopDetails::claim() const {
  return claim_ != nullptr ? Printable(claim_->name()) : "";
}

DetailsRequest TopDetails::request() const {
  if (session_ == nullptr) return {.session = 0, .claim = claim_->name(), .run_id = run_id_, .devices = {}};
  DetailsRequest request = {.session = session_->id(), .claim = "", .run_id = run_id_, .devices = {}};
  for (const v1::SessionDevice& device : session_->devices()) {
    if (device.reserved_bytes() > 0) request.devices.push_back(device.device());
  }
  return request;
}

Line TopDetails::Title(int columns) const {
  const std::string id = session_ != nullptr ? absl::StrCat(" (id ", session_->id(), ")") : std::string(" (claim)");
  const std::string end = has_ended_ ? " has ended: its last figures" : "";
  const std::string name = Printable(session_ != nullptr ? session_->name() : claim_->name());
  return {{ShortenMiddle(name, std::max(columns - Cells(id) - Cells(end), kLeastName), options_.utf8), Style::kTitle},
          {id},
          {end, Style::kAlarm}};
}

std::vector<Line> TopDetails::Lines(int rows, int columns) {
  return scroll_.Window(AllLines(columns), rows);
}

std::vector<Line> TopDetails::AllLines(int columns) const {
  std::vector<Line> lines;
  if (session_ != nullptr) {
    AppendSession(lines, columns);
    const bool uses_none = std::none_of(session_->devices().begin(), session_->devices().end(), IsUsed);
    for (const v1::SessionDevice& device : session_->devices()) {
      if (IsUsed(device) || (uses_none && &device == &session_->devices(0))) AppendDevice(lines, device, columns);
    }
  } else {
    AppendClaim(lines, columns);
  }
  AppendRefusals(lines, columns);
  return lines;
}

void TopDetails::AppendSession(std::vector<Line>& lines, int columns) const {
  const v1::Session& session = *session_;
  const std::string user = session.user().empty() ? options_.user_name(session.uid()) : session.user();
  AppendFacts(lines,
              {Fact("name", Printable(session.name())), Fact("pid", absl::StrCat(session.pid())),
               Fact("user", absl::StrCat(Printable(user), " (uid ", session.uid(), ")")),
               Fact("state", StateName(session.state())), Fact("priority", absl::StrCat(session.priority())),
               Fact("tenant", OrDash(session.tenant())), Fact("rule", OrDash(session.rule())),
               Fact("placement", OrDash(session.placement()))},
              columns);
  std::vector<Line> times = {Fact("command", OrDash(session.command()))};
  if (const std::optional<absl::Duration> age = AgeOf(session.started(), now_); age.has_value()) {
    const absl::Time started = absl::FromUnixSeconds(session.started().seconds());
    times.push_back(Fact("started", absl::FormatTime("%Y-%m-%d %H:%M:%S", started, options_.time_zone)));
    times.push_back(Fact("age", ShortAge(*age)));
  }
  if (session.has_idle_ms()) {
    times.push_back(
        Fact("last use", absl::StrCat(ShortAge(absl::Milliseconds(static_cast<int64_t>(session.idle_ms()))), " ago")));
  }
  AppendFacts(lines, times, columns);
  if (session.claim().empty()) return;
  AppendFacts(lines, {Fact("claim", Printable(session.claim()))}, columns);
  if (claim_ == nullptr) return;
  for (const std::string& line : ClaimLines(*claim_)) AppendText(lines, line, columns, Style::kPlain, 2 * kIndent);
}

void TopDetails::AppendDevice(std::vector<Line>& lines, const v1::SessionDevice& device, int columns) const {
  const PartBytes parts = PartsOf(device);
  const v1::MemoryStats& stats = device.stats();
  lines.emplace_back();
  Line title = {{absl::StrCat("device ", device.device(), " "), Style::kTitle}};
  for (Span& span : Bar(parts, std::min(columns - Cells(title), kMostBarCells), options_.utf8)) {
    title.push_back(std::move(span));
  }
  lines.push_back(std::move(title));
  std::vector<Line> facts = {Fact("limit", FormatBytes(device.limit_bytes())),
                             Fact("guarantee", FormatBytes(device.guarantee_bytes())),
                             Fact("reserved", FormatBytes(device.reserved_bytes()))};
  for (const Part part : {Part::kAllocated, Part::kPending, Part::kFragmented, Part::kReclaimable, Part::kUnknown}) {
    if (part == Part::kPending && parts[part] == 0) continue;
    facts.push_back({{Glyph(part, options_.utf8), StyleOf(part)},
                     {absl::StrCat(" ", PartName(part), " "), Style::kDim},
                     {FormatBytes(parts[part])}});
  }
  facts.push_back(Fact("peak allocated", FormatBytes(stats.allocated_bytes().all().peak())));
  facts.push_back(Fact("peak reserved", FormatBytes(stats.reserved_bytes().all().peak())));
  facts.push_back(Fact("largest free block", FormatBytes(stats.largest_free_block_bytes())));
  facts.push_back(Fact("FRAG", Percent(FragmentedShare(parts))));
  facts.push_back(Fact("refused", Counted(stats.num_ooms(), "request")));
  facts.push_back(Fact("waits for", Waiting(device)));
  AppendFacts(lines, facts, columns);
  AppendMap(lines, device.device(), columns);
}

void TopDetails::AppendMap(std::vector<Line>& lines, uint32_t device, int columns) const {
  if (!details_.has_value()) {
    AppendText(lines, "its segments are being read", columns, Style::kDim);
    return;
  }
  const auto map = std::find_if(details_->maps.begin(), details_->maps.end(),
                                [&](const DetailsData::Map& each) { return each.device == device; });
  if (map == details_->maps.end()) return;  // the device holds nothing of the session
  if (!map->heap.ok()) {
    AppendText(lines, absl::StrCat("its segments are missing here: ", Printable(map->heap.status().message())), columns,
               Style::kAlarm);
    return;
  }
  for (const Line& item : Pack(MapLegend(options_.utf8), columns - kIndent)) {
    lines.push_back({{std::string(kIndent, ' ')}, {Render(item, /*colour=*/false), Style::kDim}});
  }
  for (Line& line : SegmentLines(*map->heap, columns, StyleOf(Part::kAllocated), options_.utf8)) {
    if (Cells(line) <= columns) {
      lines.push_back(std::move(line));
      continue;
    }
    const Span figures = line.back();  // figures go in lines of their own
    line.pop_back();
    lines.push_back(std::move(line));
    AppendText(lines, std::string(absl::StripLeadingAsciiWhitespace(figures.text)), columns, figures.style,
               2 * kIndent);
  }
}

void TopDetails::AppendClaim(std::vector<Line>& lines, int columns) const {
  const std::string text = ClaimText(*claim_, options_.user_name);
  for (const absl::string_view line : absl::StrSplit(text, '\n', absl::SkipEmpty())) {
    AppendText(lines, std::string(line), columns);
  }
  lines.emplace_back();
  lines.push_back({{"its sessions", Style::kTitle}});
  for (const v1::Session& session : members_.sessions()) {
    std::vector<Line> facts = {{{Printable(session.name())}, {absl::StrCat(" (id ", session.id(), ")")}},
                               Fact("pid", absl::StrCat(session.pid()))};
    if (!session.command().empty()) facts.push_back(Fact("command", Printable(session.command())));
    for (const v1::SessionDevice& device : session.devices()) {
      if (!IsUsed(device)) continue;
      facts.push_back({{absl::StrCat(StateOn(session, device), ", ", FormatBytes(device.reserved_bytes()),
                                     " on device ", device.device())}});
    }
    AppendFacts(lines, facts, columns);
  }
  if (members_.sessions().empty()) AppendText(lines, "no sessions", columns, Style::kDim);
}

void TopDetails::AppendRefusals(std::vector<Line>& lines, int columns) const {
  lines.emplace_back();
  lines.push_back({{"last refusals", Style::kTitle}});
  if (!details_.has_value()) {
    AppendText(lines, "they are being read", columns, Style::kDim);
    return;
  }
  const auto& refusals = details_->refusals;
  if (!refusals.ok()) {
    AppendText(lines, absl::StrCat("they are missing here: ", Printable(refusals.status().message())), columns,
               Style::kAlarm);
    return;
  }
  if (refusals->empty()) AppendText(lines, "no request was refused", columns, Style::kDim);
  for (const v1::OutOfMemoryEvent& event : *refusals) {
    const OutOfMemory oom = client_internal::FromProto(event.out_of_memory());
    AppendText(lines,
               absl::StrCat(absl::FormatTime("%Y-%m-%d %H:%M:%S", TimeOf(event.time()), options_.time_zone), " ",
                            session_ != nullptr ? "" : absl::StrCat(Printable(event.client()), " "), "wanted ",
                            FormatBytes(oom.requested_bytes), " on device ", oom.device, ": ",
                            absl::AsciiStrToLower(OutOfMemoryCauseName(oom.cause))),
               columns);
    if (!oom.explanation.empty()) {
      AppendText(lines, absl::StrCat("why: ", Printable(oom.explanation)), columns, Style::kPlain, 2 * kIndent);
    }
    if (!oom.advice.empty()) {
      AppendText(lines, absl::StrCat("do:  ", Printable(oom.advice)), columns, Style::kPlain, 2 * kIndent);
    }
  }
}

}  // namespace vrambroker::vramctl
