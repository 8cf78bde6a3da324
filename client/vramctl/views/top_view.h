// SPDX-License-Identifier: Apache-2.0
//
// The lines of vramctl top: its state, the effects of keys, and the picture. Pure: no terminal, no daemon.
#ifndef VRAMBROKER_CLIENT_VRAMCTL_VIEWS_TOP_VIEW_H_
#define VRAMBROKER_CLIENT_VRAMCTL_VIEWS_TOP_VIEW_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/vramctl/views/bars.h"
#include "client/vramctl/views/overview.h"
#include "client/vramctl/views/session_change.h"
#include "client/vramctl/views/top_details.h"
#include "client/vramctl/views/top_question.h"
#include "client/vramctl/views/top_scroll.h"
#include "client/vramctl/views/top_table.h"

namespace vrambroker::vramctl {

// The daemon's last answers.
struct TopData {
  Overview overview;
  v1::ListClaimsResponse claims;
  v1::ListOutOfMemoryResponse refusals;  // the last refusal
  absl::Time read_at;
  absl::Status status;       // of the last attempt; the remaining fields may be older
  absl::Time failing_since;  // while `status` is not OK
};

// A key: its character, or a constant below.
enum Key : int {
  kKeyUp = 0x110000,  // beyond all characters
  kKeyDown,
  kKeyPageUp,
  kKeyPageDown,
  kKeyHome,
  kKeyEnd,
  kKeyEnter,
  kKeyEscape,
  kKeyBackspace,
  kKeyHelp,
  kKeyQuit,
  kKeyOther,
};

class TopView {
 public:
  struct Options {
    Column sort = Column::kReserved;
    bool utf8 = false;
    std::function<std::string(uint32_t uid)> user_name;
    absl::TimeZone time_zone = absl::LocalTimeZone();
  };
  explicit TopView(Options options) : options_(std::move(options)) {}

  // Updates the data. While frozen, takes only the status: a frozen picture still shows a stopped daemon. Closes a
  // question about an ended session.
  void SetData(const TopData& data);

  // False: quit.
  bool HandleKey(int key);

  // Returns the user's confirmed order, once; nullopt: none. No further question comes up before SetResult() reports
  // the result.
  std::optional<SessionOrder> TakeOrder();
  void SetResult(const absl::StatusOr<std::vector<std::string>>& lines);

  // Returns the request for the open details; nullopt: no details are open.
  std::optional<DetailsRequest> WantedDetails() const;
  void SetDetails(DetailsData data);

  // Returns exactly `rows` lines of at most `columns` cells.
  std::vector<Line> Draw(int rows, int columns);
  // Returns all devices and sessions as plain text, without hints for keyboard users.
  std::string Write(int columns);

 private:
  bool NothingRead() const { return data_.read_at == absl::Time(); }  // the daemon has never answered
  std::vector<Line> Head(int most_lines, int columns) const;
  Line TitleLine(int columns) const;
  void AppendStatus(std::vector<Line>& lines, int columns) const;  // if the daemon does not answer
  Line SelectedLine(int columns) const;
  Line RefusalLine(int columns) const;
  Line KeysLine(int columns) const;
  Line DetailsKeysLine(int columns) const;
  std::vector<Line> Notice(int columns) const;  // the question, or else the last result; may be empty
  std::vector<Line> Foot(int rows, int columns) const;
  void Ask(TopQuestion::Kind kind);
  bool AskForKey(int key);  // false: the key starts no change
  void OpenDetails();       // of the selected row
  void HandleDetailsKey(int key);
  void AnswerQuestion(int key);
  void Say(std::string text, Style style);
  std::vector<Line> TableLines(int lines, int columns);
  std::vector<Line> DetailsLines(int rows, int columns);
  std::vector<Line> HelpScreen(int rows);
  void CollapseSelected();  // collapses or expands the selected claim
  void CollapseAll();       // collapses all claims, or expands them if all are collapsed
  void Refresh();           // makes rows_ from data_, sorted and filtered
  size_t SelectedIndex() const;
  const v1::Session* SelectedSession() const;  // null: none, or a claim
  std::string SelectedClaim() const;           // empty: none, or a session
  void Select(int64_t index);
  void EditFilter(int key);

  const Options options_;
  TopData data_;
  std::vector<TopRow> rows_;
  Column sort_ = options_.sort;
  bool reverse_ = false;
  std::string filter_;
  bool edits_filter_ = false;
  bool frozen_ = false;
  bool helps_ = false;
  Scroll help_scroll_;
  std::unique_ptr<TopDetails> details_;  // null: not open
  std::set<std::string> collapsed_;      // claims with hidden sessions
  TopRow::Key selected_;                 // stays selected when the row moves
  std::optional<TopQuestion> question_;  // nullopt: not open
  std::optional<SessionOrder> order_;    // confirmed; kept until the result arrives
  bool order_is_new_ = false;            // not yet returned by TakeOrder()
  Span notice_;                          // stays until Escape or the next question; empty: none
  size_t first_ = 0;                     // row at the top of the table
  size_t page_ = 1;                      // rows with room
  bool shows_all_ = true;                // no row is out of sight
};

}  // namespace vrambroker::vramctl

#endif  // VRAMBROKER_CLIENT_VRAMCTL_VIEWS_TOP_VIEW_H_
