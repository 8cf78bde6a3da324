// SPDX-License-Identifier: Apache-2.0
//
// NVIDIA's GPUs as listed by the kernel. CUDA may be unable to use the GPUs, or not be installed.
#ifndef VRAMBROKER_SERVER_IDENTITY_DRIVER_GPUS_H_
#define VRAMBROKER_SERVER_IDENTITY_DRIVER_GPUS_H_

#include <string>
#include <vector>

#include "absl/status/status.h"

namespace vrambroker {

struct DriverGpus {
  std::vector<std::string> addresses;  // on the PCI bus, in ascending order
  bool has_uvm = false;                // the module nvidia_uvm is loaded; CUDA cannot start without it
};

// `proc`: /proc, or a substitute in a test.
DriverGpus FindDriverGpus(const std::string& proc = "/proc");

// Advises a remedy when CUDA cannot use GPUs known to the kernel's driver; "" without such GPUs.
std::string AdviceFor(const DriverGpus& gpus);

// Whether the device `auto` may be memory of the host when CUDA is unusable, for the reason `cuda`. FailedPrecondition,
// with the reason and a remedy, on a machine with GPUs: the machine was meant to serve GPUs.
absl::Status CheckMayServeHost(const DriverGpus& gpus, const absl::Status& cuda);

}  // namespace vrambroker

#endif  // VRAMBROKER_SERVER_IDENTITY_DRIVER_GPUS_H_
