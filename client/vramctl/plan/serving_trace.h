// SPDX-License-Identifier: Apache-2.0
//
// A server as an allocation trace, for plan share: what it holds at all times, and what its passes need besides.
#ifndef VRAMBROKER_CLIENT_VRAMCTL_PLAN_SERVING_TRACE_H_
#define VRAMBROKER_CLIENT_VRAMCTL_PLAN_SERVING_TRACE_H_

#include "allocator/replay/trace.h"
#include "client/vramctl/plan/model_config.h"
#include "client/vramctl/plan/serving_memory.h"

namespace vrambroker::plan {

// The weights are made, and each layer's cache of keys and values for options.sequences as one block, as vLLM does.
// Then three passes run, each marked as StepTrace() marks its steps: layer by layer, then the logits. One stream.
// REQUIRES: ServingMemoryOf() accepts these arguments.
Trace ServingTrace(const ModelShape& shape, const ServingOptions& options);

}  // namespace vrambroker::plan

#endif  // VRAMBROKER_CLIENT_VRAMCTL_PLAN_SERVING_TRACE_H_
