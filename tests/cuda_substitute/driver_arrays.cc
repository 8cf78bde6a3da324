// SPDX-License-Identifier: Apache-2.0
#include "tests/cuda_substitute/driver_state.h"

namespace vrambroker::cuda_substitute {

void EndArrays(Driver& /*driver*/, int /*context*/) {}

}  // namespace vrambroker::cuda_substitute
