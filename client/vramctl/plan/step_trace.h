// SPDX-License-Identifier: Apache-2.0
//
// Training steps as an allocation trace: the requests to the allocator, in order.
#ifndef VRAMBROKER_CLIENT_VRAMCTL_PLAN_STEP_TRACE_H_
#define VRAMBROKER_CLIENT_VRAMCTL_PLAN_STEP_TRACE_H_

#include <string>

#include "allocator/replay/trace.h"
#include "client/vramctl/plan/training_memory.h"

namespace vrambroker::plan {

// The optimizer makes its states in the first step, so the second and the third show the steady state.
inline constexpr int kSteps = 3;

// Allocates the weights, then runs kSteps steps: forward pass (each layer's kept tensors), loss in fp32, backward pass
// (recomputes dropped tensors, makes gradients, frees kept tensors, last layer first), optimizer, and gradients freed
// as by zero_grad(set_to_none=True). Uses a single stream. Peaks are reset at the start of each step, which marks the
// step for plan share. REQUIRES: TrainingMemoryOf() accepts these arguments.
Trace StepTrace(const ModelShape& shape, const TrainingOptions& options);

// Returns the text form of allocator/replay/trace.h, after `heading` as a comment of a single line.
std::string TraceText(const Trace& trace, const std::string& heading);

}  // namespace vrambroker::plan

#endif  // VRAMBROKER_CLIENT_VRAMCTL_PLAN_STEP_TRACE_H_
