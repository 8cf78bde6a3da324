// SPDX-License-Identifier: Apache-2.0
#include "client/vramctl/views/status_text.h"

#include <algorithm>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "allocator/base/bytes.h"
#include "allocator/wire/admin_json.h"
#include "allocator/wire/device_kind.h"
#include "client/vramctl/views/output.h"

namespace vrambroker::vramctl {
namespace {

constexpr size_t kWidth = 100;

std::string StatusTable(const Overview& overview, absl::FunctionRef<std::string(uint64_t bytes)> size) {
  std::vector<std::vector<std::string>> rows = {{"DEVICE", ">CAPACITY", ">RESERVED", ">ALLOCATED", ">FRAGMENTED",
                                                 ">RECLAIMABLE", ">CACHED", ">LEFT BEHIND", ">FRAG"}};
  for (const v1::Device& device : overview.devices.devices()) {
    const PartBytes parts = PartsOf(overview, device);
    rows.push_back({absl::StrCat(device.ordinal()), size(device.capacity_bytes()), size(device.reserved_bytes()),
                    size(parts[Part::kAllocated]), size(parts[Part::kFragmented]), size(parts[Part::kReclaimable]),
                    size(parts[Part::kCached]), size(parts[Part::kLeftBehind]), Percent(FragmentedShare(parts))});
  }
  return Table(rows);
}

// Describes the processes' use of the device beyond the table.
std::string ProcessesText(const v1::Device& device) {
  uint64_t overhead = 0;
  size_t clients = 0;
  std::string others;
  for (const v1::DeviceProcess& process : device.processes()) {
    const std::string used = absl::StrCat("  ", Printable(process.name()), ", pid ", process.pid(), ", uid ",
                                          process.uid(), ": uses ", FormatBytes(process.used_bytes()));
    if (process.kind() == v1::DeviceProcess::UNCOUNTED) {
      absl::StrAppend(&others, used, ", which nobody counts\n");
      continue;
    }
    overhead += process.overhead_bytes() - std::min(process.drift_bytes(), process.overhead_bytes());
    if (process.kind() == v1::DeviceProcess::CLIENT) ++clients;
    if (process.drift_bytes() > 0) {
      absl::StrAppend(&others, used, " and is charged for ", FormatBytes(process.charged_bytes()), "\n");
    }
  }
  std::string text;
  if (!device.processes().empty()) {
    absl::StrAppend(&text, "\nDevice ", device.ordinal(), ": ", FormatBytes(overhead),
                    " for CUDA contexts and libraries of the daemon",
                    clients == 0 ? "" : absl::StrCat(" and ", clients, clients == 1 ? " client" : " clients"), "\n",
                    others);
  }
  if (!device.processes_fault().empty()) {
    absl::StrAppend(&text, "\nDevice ", device.ordinal(),
                    ": what each process uses is not known: ", Printable(device.processes_fault()), "\n");
  }
  return text;
}

}  // namespace

std::string StatusText(const Overview& overview) {
  std::string text;
  for (const v1::Device& device : overview.devices.devices()) {
    absl::StrAppend(&text, "Device ", device.ordinal(), ": ", KindName(device.kind()), ", ", Printable(device.name()),
                    ", ", FormatBytes(FreeBytes(device)), " free\n");
    if (device.kept_free_bytes() == 0) continue;
    absl::StrAppend(&text, "  ", FormatBytes(device.kept_free_bytes()), " more is kept free for guarantees\n");
  }
  const std::string exact = StatusTable(overview, FormatBytes);
  absl::StrAppend(&text, "\n", WidthOf(exact) <= kWidth ? exact : StatusTable(overview, ShortBytes));
  for (const v1::Device& device : overview.devices.devices()) {
    if (device.carried_over_bytes() == 0) continue;
    const uint64_t unknown = PartsOf(overview, device)[Part::kUnknown];
    absl::StrAppend(&text, "\nDevice ", device.ordinal(), ": ", FormatBytes(device.carried_over_bytes()),
                    " carried over from an earlier run of the daemon",
                    unknown > 0 ? absl::StrCat(", ", FormatBytes(unknown), " of it unknown") : "",
                    "\n(see vramctl sessions and vramctl quarantine), until processes free it\n");
    if (device.carried_over_bytes() > device.capacity_bytes()) {
      absl::StrAppend(&text, "That is more than the capacity: nobody gets more memory until ",
                      FormatBytes(device.carried_over_bytes() - device.capacity_bytes()), " of it is back\n");
    }
  }
  for (const v1::Device& device : overview.devices.devices()) absl::StrAppend(&text, ProcessesText(device));
  for (const v1::Device& device : overview.devices.devices()) {
    if (device.fault().empty()) continue;
    absl::StrAppend(&text, "\nDevice ", device.ordinal(), " cannot be used: ", device.fault(), "\n");
  }
  return text;
}

}  // namespace vrambroker::vramctl
