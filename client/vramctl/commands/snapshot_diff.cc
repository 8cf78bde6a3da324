// SPDX-License-Identifier: Apache-2.0
//
// vramctl snapshot --diff: shows the growth from one snapshot to the next.
#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "client/vramctl/commands/commands.h"
#include "client/vramctl/commands/heap_file.h"
#include "client/vramctl/daemon/daemon_calls.h"
#include "client/vramctl/views/heap_sums.h"
#include "client/vramctl/views/output.h"

namespace vrambroker::vramctl {

absl::Status DiffSnapshots(const Context& context, const std::string& before, const std::string& after) {
  const absl::StatusOr<std::vector<HeapSnapshot>> first = ReadHeapFile(before);
  if (!first.ok()) return first.status();
  const absl::StatusOr<std::vector<HeapSnapshot>> second = ReadHeapFile(after);
  if (!second.ok()) return second.status();
  const HeapSums sums[] = {SumsOf(*first), SumsOf(*second)};
  const std::vector<HeapGrowth> growth = GrowthOf(*first, *second);
  if (context.json) {
    nlohmann::ordered_json places = nlohmann::ordered_json::array();
    for (const HeapGrowth& each : growth) {
      places.push_back({{"scope", each.scope},
                        {"stack", each.stack},
                        {"growth_bytes", each.growth_bytes()},
                        {"before_bytes", each.before_bytes},
                        {"after_bytes", each.after_bytes},
                        {"before_blocks", each.before_blocks},
                        {"after_blocks", each.after_blocks}});
    }
    Print({{"before_file", before},
           {"after_file", after},
           {"before", HeapSumsJson(sums[0])},
           {"after", HeapSumsJson(sums[1])},
           {"places", std::move(places)}});
    return absl::OkStatus();
  }
  std::printf("before, %s: %s\nafter, %s: %s\n\n", before.c_str(), SumsText(sums[0]).c_str(), after.c_str(),
              SumsText(sums[1]).c_str());
  constexpr size_t kMostPlaces = 20;
  if (growth.empty()) {
    std::printf("The same blocks are in use in both, by size and place.\n");
  } else {
    std::fputs(GrowthTable(growth, kMostPlaces).c_str(), stdout);
  }
  return absl::OkStatus();
}

}  // namespace vrambroker::vramctl
