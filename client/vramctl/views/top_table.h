// SPDX-License-Identifier: Apache-2.0
//
// The table of vramctl top: what is in it, in which order, and which columns fit. Pure: no terminal, no daemon.
#ifndef VRAMBROKER_CLIENT_VRAMCTL_VIEWS_TOP_TABLE_H_
#define VRAMBROKER_CLIENT_VRAMCTL_VIEWS_TOP_TABLE_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "client/vramctl/views/bars.h"
#include "vrambroker/v1/admin.pb.h"

namespace vrambroker::vramctl {

enum class Column : uint8_t {  // in the order in which they are shown
  kName,
  kTenant,
  kPid,
  kUser,
  kState,
  kPriority,
  kDevice,
  kLimit,
  kGuarantee,
  kReserved,
  kAllocated,
  kReclaimable,
  kFragmentation,
  kWaiting,
  kAge,
  kLastUse,
  kCommand,
};
inline constexpr int kColumns = static_cast<int>(Column::kCommand) + 1;

const char* ColumnName(Column column);  // as --sort knows it
char SortKey(Column column);            // '\0': only < and > sort by it
// InvalidArgument lists the names.
absl::StatusOr<Column> ParseColumn(absl::string_view name);

// A session, or a claim, on one device.
struct TopRow {
  uint64_t session = 0;  // 0: it is a claim
  std::string tree;      // before its name, where rows are grouped
  std::string name;      // texts are printable
  std::string claim;     // its own name, or that of the claim that the session is in; empty: none
  std::string tenant;
  int32_t pid = 0;
  std::string user;
  std::string command;  // empty: not known
  std::string state;
  int32_t priority = 0;
  uint32_t device = 0;
  uint64_t limit_bytes = 0;
  uint64_t guarantee_bytes = 0;
  uint64_t reserved_bytes = 0;
  uint64_t allocated_bytes = 0;
  uint64_t reclaimable_bytes = 0;
  double fragmentation = 0;  // FragmentedShare() of its parts
  std::optional<absl::Duration> age;
  std::optional<absl::Duration> last_use;  // since its process last allocated or freed memory
  uint64_t waited_ms = 0;                  // of the request that has waited longest; 0: none waits
  uint64_t waiting_bytes = 0;              // of all
  std::string waits_for;                   // in words; "-": nothing
  uint64_t ooms = 0;
  PartBytes parts;

  bool is_claim() const { return session == 0; }
  // Of no other row, and the same in later rows.
  struct Key {
    uint64_t session = 0;
    std::string claim;  // of claims
    uint32_t device = 0;
    bool operator==(const Key&) const = default;
    bool IsOfSame(const Key& other) const { return session == other.session && claim == other.claim; }
  };
  Key key() const { return {session, is_claim() ? claim : "", device}; }
};

// Whether a session holds, is promised or waits for something there.
bool IsUsed(const v1::SessionDevice& device);

// The time since `started`; nullopt where that is not known.
std::optional<absl::Duration> AgeOf(const google::protobuf::Timestamp& started, absl::Time now);

// A row for each device in use; one for sessions that use none.
// `user_name`: of users whose names the daemon does not say.
std::vector<TopRow> RowsOf(const v1::ListSessionsResponse& sessions,
                           const std::function<std::string(uint32_t uid)>& user_name, absl::Time now);

// Only those with `filter` in their names or their claims', in any case, and the claims of these.
void Filter(std::vector<TopRow>& rows, absl::string_view filter);

// Figures: the highest first; texts, numbers of processes and devices: the lowest first; `reverse` the other way. Equal
// ones by name and device.
void Sort(std::vector<TopRow>& rows, Column column, bool reverse);

struct TableLayout {
  struct Shown {
    Column column;
    int width;
  };
  std::vector<Shown> columns;
  int bar_width = 0;  // 0: no bar
};
// What fits into `width` cells. Columns in which all rows say the same nothing (no guarantee, nobody waits) go first,
// then the least important ones. Long names give way to what matters more, down to kLeastName cells. A bar has at least
// kLeastBar cells, and more when names and commands are whole.
TableLayout LayOut(const std::vector<TopRow>& rows, int width, bool several_devices);
inline constexpr int kLeastBar = 12;
inline constexpr int kLeastName = 12;

Line HeadingLine(const TableLayout& layout, Column sorted_by, int width);
Line RowLine(const TableLayout& layout, const TopRow& row, bool utf8);

}  // namespace vrambroker::vramctl

#endif  // VRAMBROKER_CLIENT_VRAMCTL_VIEWS_TOP_TABLE_H_
