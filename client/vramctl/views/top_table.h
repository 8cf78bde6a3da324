// SPDX-License-Identifier: Apache-2.0
//
// The table of vramctl top: its rows, their order, and the columns with room. Pure: no terminal, no daemon.
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

enum class Column : uint8_t {  // in display order
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

const char* ColumnName(Column column);  // name for --sort
char SortKey(Column column);            // '\0': only < and > sort by the column
// InvalidArgument lists the names.
absl::StatusOr<Column> ParseColumn(absl::string_view name);

// A session, or a claim, on a device.
struct TopRow {
  uint64_t session = 0;  // 0: the row is a claim
  std::string tree;      // prefix of the name, if rows are grouped
  std::string name;      // texts are printable
  std::string claim;     // name of the claim, or of the session's claim; empty: none
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
  double fragmentation = 0;  // FragmentedShare() of `parts`
  std::optional<absl::Duration> age;
  std::optional<absl::Duration> last_use;  // since the process last allocated or freed memory
  uint64_t waited_ms = 0;                  // of the request with the longest wait; 0: none waits
  uint64_t waiting_bytes = 0;              // of all requests
  std::string waits_for;                   // in words; "-": nothing
  uint64_t ooms = 0;
  PartBytes parts;

  bool is_claim() const { return session == 0; }
  // Identifies a row, also in later rows.
  struct Key {
    uint64_t session = 0;
    std::string claim;  // set for claims
    uint32_t device = 0;
    bool operator==(const Key&) const = default;
    bool IsOfSame(const Key& other) const { return session == other.session && claim == other.claim; }
  };
  Key key() const { return {session, is_claim() ? claim : "", device}; }
};

// Whether a session holds, is promised or waits for memory on the device.
bool IsUsed(const v1::SessionDevice& device);

// Returns the time since `started`; nullopt: unknown.
std::optional<absl::Duration> AgeOf(const google::protobuf::Timestamp& started, absl::Time now);

// Returns a row for each device in use; a single row for sessions using none. `user_name`: for users not named by the
// daemon.
std::vector<TopRow> RowsOf(const v1::ListSessionsResponse& sessions,
                           const std::function<std::string(uint32_t uid)>& user_name, absl::Time now);

// Keeps the rows with `filter` in their names or their claims' names, ignoring case, and the claims of these rows.
void Filter(std::vector<TopRow>& rows, absl::string_view filter);

// Sorts figures in descending order; texts, numbers of processes and devices in ascending order; `reverse` swaps the
// order. Ties are sorted by name and device.
void Sort(std::vector<TopRow>& rows, Column column, bool reverse);

struct TableLayout {
  struct Shown {
    Column column;
    int width;
  };
  std::vector<Shown> columns;
  int bar_width = 0;  // 0: no bar
};
// Returns the columns fitting into `width` cells. Drops columns in which all rows are empty first (no guarantee, nobody
// waits), then the least important columns. Long names give way to more important columns, down to kLeastName cells. A
// bar has at least kLeastBar cells, and more when names and commands are whole.
TableLayout LayOut(const std::vector<TopRow>& rows, int width, bool several_devices);
inline constexpr int kLeastBar = 12;
inline constexpr int kLeastName = 12;

Line HeadingLine(const TableLayout& layout, Column sorted_by, int width);
Line RowLine(const TableLayout& layout, const TopRow& row, bool utf8);

}  // namespace vrambroker::vramctl

#endif  // VRAMBROKER_CLIENT_VRAMCTL_VIEWS_TOP_TABLE_H_
