// SPDX-License-Identifier: Apache-2.0
//
// What the kernel says of NVIDIA's GPUs. CUDA may be unable to use them, or not be there.
#ifndef VRAMBROKER_SERVER_IDENTITY_DRIVER_GPUS_H_
#define VRAMBROKER_SERVER_IDENTITY_DRIVER_GPUS_H_

#include <string>
#include <vector>

#include "absl/status/status.h"

namespace vrambroker {

struct DriverGpus {
  std::vector<std::string> addresses;  // on the PCI bus, in ascending order
  bool has_uvm = false;                // the module nvidia_uvm is loaded, without which CUDA does not start
};

// `proc`: /proc, or what stands for it in a test.
DriverGpus FindDriverGpus(const std::string& proc = "/proc");

// What to do when CUDA cannot use GPUs that the kernel's driver has; "" when it has none.
std::string AdviceFor(const DriverGpus& gpus);

// Whether the device `auto` may be memory of the host when CUDA cannot be used, for the reason `cuda`.
// FailedPrecondition, with the reason and what to do, on a machine that has GPUs: it was meant to serve them.
absl::Status CheckMayServeHost(const DriverGpus& gpus, const absl::Status& cuda);

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_IDENTITY_DRIVER_GPUS_H_
