// SPDX-License-Identifier: Apache-2.0
#ifndef VRAMBROKER_SERVER_OOM_REFUSAL_LINE_H_
#define VRAMBROKER_SERVER_OOM_REFUSAL_LINE_H_

#include "absl/strings/string_view.h"
#include "allocator/base/ids.h"
#include "server/base/log_line.h"
#include "server/oom/out_of_memory.h"

namespace vrambroker {

// Log line of a refusal: the error's figures, cause and advice, the blocks pinning segments, and the scopes holding
// most. The log remains when daemon and program have gone. At most kMaxRefusalLine bytes.
LogLine RefusalLine(SessionId session, absl::string_view name, const OomReport& report);
inline constexpr size_t kMaxRefusalLine = size_t{6} << 10;

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_OOM_REFUSAL_LINE_H_
