// SPDX-License-Identifier: Apache-2.0
//
// Questions of vramctl top before it changes a session. Pure: no terminal, no daemon.
#ifndef VRAMBROKER_CLIENT_VRAMCTL_VIEWS_TOP_QUESTION_H_
#define VRAMBROKER_CLIENT_VRAMCTL_VIEWS_TOP_QUESTION_H_

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "client/vramctl/views/bars.h"
#include "client/vramctl/views/session_change.h"

namespace vrambroker::vramctl {

// First shows a field for the new limit or priority, if needed, then a question naming the session and the effect.
class TopQuestion {
 public:
  enum class Kind : uint8_t { kLimit, kTrim, kEnd, kPriority };
  enum class Answer : uint8_t { kNone, kNo, kYes };

  // `session`: as shown to the user.
  TopQuestion(Kind kind, v1::Session session);

  Answer HandleKey(int key);  // a key of top_view.h

  // Returns lines of at most `columns` cells.
  std::vector<Line> Lines(int columns) const;

  const v1::Session& session() const { return session_; }
  // Returns the order confirmed by kYes; nullopt: still being typed.
  std::optional<SessionOrder> order() const;

 private:
  void EditField(int key);
  void ReadField();  // sets change_ or error_
  std::string Consequence(const SessionChange& change) const;

  const Kind kind_;
  const v1::Session session_;
  std::string field_;
  std::string error_;                    // why the field is invalid
  std::optional<SessionChange> change_;  // nullopt: the field is being edited
};

}  // namespace vrambroker::vramctl

#endif  // VRAMBROKER_CLIENT_VRAMCTL_VIEWS_TOP_QUESTION_H_
