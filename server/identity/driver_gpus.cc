// SPDX-License-Identifier: Apache-2.0
#include "server/identity/driver_gpus.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <system_error>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace vrambroker {

DriverGpus FindDriverGpus(const std::string& proc) {
  DriverGpus gpus;
  std::error_code error;
  for (std::filesystem::directory_iterator it(proc + "/driver/nvidia/gpus", error), end; !error && it != end;
       it.increment(error)) {
    gpus.addresses.push_back(it->path().filename().string());
  }
  std::sort(gpus.addresses.begin(), gpus.addresses.end());
  std::ifstream devices(proc + "/devices");  // lines like "510 nvidia-uvm"
  for (std::string line; std::getline(devices, line);) gpus.has_uvm |= absl::EndsWith(line, " nvidia-uvm");
  return gpus;
}

std::string AdviceFor(const DriverGpus& gpus) {
  if (gpus.addresses.empty()) return "";
  if (gpus.has_uvm) return "nvidia-smi, and the kernel log (dmesg, 'NVRM' or 'Xid'), may say more";
  return "the kernel module nvidia_uvm is not loaded: as root, 'modprobe nvidia_uvm' and 'nvidia-modprobe -u -c0' load "
         "it and make its device files; a line nvidia_uvm in /etc/modules-load.d/nvidia-uvm.conf does at each start";
}

absl::Status CheckMayServeHost(const DriverGpus& gpus, const absl::Status& cuda) {
  if (gpus.addresses.empty()) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("device auto: this machine has ", gpus.addresses.size() == 1 ? "the GPU " : "the GPUs ",
                   absl::StrJoin(gpus.addresses, ", "), ", but CUDA cannot use ",
                   gpus.addresses.size() == 1 ? "it: " : "them: ", cuda.message(), "; ", AdviceFor(gpus),
                   "; to serve memory of the host all the same, set the device to host (--device=host)"));
}

}  // namespace vrambroker
