// SPDX-License-Identifier: Apache-2.0
//
// A server as an allocation trace, for plan share: the memory held at all times, and the temporaries of its passes.
#ifndef VRAMBROKER_CLIENT_VRAMCTL_PLAN_SERVING_TRACE_H_
#define VRAMBROKER_CLIENT_VRAMCTL_PLAN_SERVING_TRACE_H_

#include "allocator/replay/trace.h"
#include "client/vramctl/plan/model_config.h"
#include "client/vramctl/plan/serving_memory.h"

namespace vrambroker::plan {

// Allocates the weights, and each layer's cache of keys and values for options.sequences as a single block, as vLLM
// does. Then three passes run, each marked as StepTrace() marks its steps: layer by layer, then the logits. Uses a
// single stream. REQUIRES: ServingMemoryOf() accepts these arguments.
Trace ServingTrace(const ModelShape& shape, const ServingOptions& options);

}  // namespace vrambroker::plan

#endif  // VRAMBROKER_CLIENT_VRAMCTL_PLAN_SERVING_TRACE_H_
