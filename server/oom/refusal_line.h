// SPDX-License-Identifier: Apache-2.0
#ifndef VRAMBROKER_SERVER_OOM_REFUSAL_LINE_H_
#define VRAMBROKER_SERVER_OOM_REFUSAL_LINE_H_

#include "absl/strings/string_view.h"
#include "allocator/base/ids.h"
#include "server/base/log_line.h"
#include "server/oom/out_of_memory.h"

namespace vrambroker {

// What the log says of a refusal: the same figures, cause and advice as the error, and which blocks pin segments and
// which scopes hold most. The log is what is left when daemon and program have gone. At most kMaxRefusalLine bytes.
LogLine RefusalLine(SessionId session, absl::string_view name, const OomReport& report);
inline constexpr size_t kMaxRefusalLine = size_t{6} << 10;

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_OOM_REFUSAL_LINE_H_
