// SPDX-License-Identifier: Apache-2.0
#ifndef VRAMBROKER_SERVER_CONFIG_CONFIG_CHECKER_H_
#define VRAMBROKER_SERVER_CONFIG_CONFIG_CHECKER_H_

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "server/config/config_text.h"
#include "server/identity/policy.h"
#include "vrambroker/config/v1/config.pb.h"

namespace vrambroker {

// Reads the values of configuration fields and collects all faults, to report all of them at once.
class Checker {
 public:
  using Places = ConfigText::Places;
  // `places` outlives this object. `faults` are already known.
  Checker(const Places& places, std::vector<std::string> faults) : places_(places), faults_(std::move(faults)) {}

  void Fault(absl::string_view field, absl::string_view what);
  // "FILE:LINE:COLUMN"; empty when not known.
  std::string PlaceOf(absl::string_view field) const;

  // `fallback` when `text` is empty or wrong.
  uint64_t Size(absl::string_view field, const std::string& text, uint64_t fallback);
  absl::Duration Time(absl::string_view field, const std::string& text, absl::Duration fallback,
                      absl::Duration most = absl::Hours(24));
  // nullopt when `limit` is null or wrong.
  std::optional<Limit> LimitOf(const std::string& field, const config::v1::SessionLimit* limit);

  // InvalidArgument lists the faults, one a line.
  absl::Status status() const;

 private:
  const Places& places_;
  std::vector<std::string> faults_;
};

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_CONFIG_CONFIG_CHECKER_H_
