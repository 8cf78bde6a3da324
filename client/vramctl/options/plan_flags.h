// SPDX-License-Identifier: Apache-2.0
//
// The options of plan train, serve and share, as given.
#ifndef VRAMBROKER_CLIENT_VRAMCTL_OPTIONS_PLAN_FLAGS_H_
#define VRAMBROKER_CLIENT_VRAMCTL_OPTIONS_PLAN_FLAGS_H_

#include <cstdint>
#include <string>
#include <vector>

namespace vrambroker::vramctl {

// Empty: not given, unless a default is here. Numbers stay text until used, so that errors can quote them.
struct PlanFlags {
  std::string config;
  std::string params, layers, hidden, heads, kv_heads, vocab;
  std::string batch = "1";
  std::string seq;
  std::string precision = "bf16-mixed";
  std::string optimizer = "adamw";
  std::string checkpoint = "none";
  std::string zero = "0";
  std::string gpus = "1";
  std::string lora;
  bool flash = false;
  bool eager = false;
  std::string sequences = "1";
  std::string quantization = "bf16";
  std::string kv = "bf16";
  std::string prefill_tokens;
  std::string utilization = "0.9";
  std::vector<std::string> jobs;  // of plan share
};

}  // namespace vrambroker::vramctl

#endif  // VRAMBROKER_CLIENT_VRAMCTL_OPTIONS_PLAN_FLAGS_H_
