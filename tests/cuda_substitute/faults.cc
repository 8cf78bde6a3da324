// SPDX-License-Identifier: Apache-2.0
#include "tests/cuda_substitute/faults.h"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <sstream>
#include <thread>

#include "tests/cuda_substitute/substitute.h"

namespace vrambroker::cuda_substitute {
namespace {

std::string Environment(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

std::vector<std::string> Entries(const std::string& text) {
  std::vector<std::string> entries;
  std::istringstream stream(text);
  for (std::string entry; std::getline(stream, entry, ',');) entries.push_back(entry);
  return entries;
}

[[noreturn]] void NotUnderstood(const std::string& entry) {
  std::fprintf(stderr, "CUDA substitute: cannot understand '%s'; see substitute.h\n", entry.c_str());
  std::abort();
}

}  // namespace

Faults::Faults() : faults_(Parse(Environment(kFaultsVariable))) {
  for (const std::string& entry : Entries(Environment(kDelaysVariable))) {
    const size_t equals = entry.find('=');
    constexpr char kUntil[] = "until:";
    if (equals != std::string::npos && entry.compare(equals + 1, sizeof kUntil - 1, kUntil) == 0) {
      until_[entry.substr(0, equals)] = entry.substr(equals + sizeof kUntil);
      continue;
    }
    char* end = nullptr;
    const long ms = equals == std::string::npos  // NOLINT(google-runtime-int): strtol's type
                        ? 0
                        : std::strtol(entry.c_str() + equals + 1, &end, 10);
    if (end == nullptr || std::string(end) != "ms" || ms < 0) NotUnderstood(entry);
    delays_[entry.substr(0, equals)] = std::chrono::milliseconds(ms);
  }
}

std::vector<Faults::Fault> Faults::Parse(const std::string& text) {
  std::vector<Fault> faults;
  for (const std::string& entry : Entries(text)) {
    const size_t colon = entry.find(':');
    if (colon == std::string::npos) NotUnderstood(entry);
    Fault fault;
    fault.function = entry.substr(0, colon);
    char* end = nullptr;
    fault.from = std::strtoul(entry.c_str() + colon + 1, &end, 10);
    fault.to = *end == '+' ? std::numeric_limits<uint64_t>::max() : fault.from;
    if (*end == '+') ++end;
    if (fault.from == 0 || *end != '=') NotUnderstood(entry);
    fault.error = static_cast<CUresult>(std::strtoul(end + 1, &end, 10));
    fault.sticky = *end == '!';
    if (fault.sticky) ++end;
    if (*end != '\0' || fault.error == CUDA_SUCCESS) NotUnderstood(entry);
    faults.push_back(fault);
  }
  return faults;
}

void Faults::Set(const std::string& faults) {
  const std::lock_guard<std::mutex> lock(mu_);
  faults_ = Parse(faults);
  calls_since_.clear();
  sticky_ = CUDA_SUCCESS;
}

CUresult Faults::Count(const std::string& function) {
  std::chrono::milliseconds delay(0);
  std::string until;
  CUresult error = CUDA_SUCCESS;
  {
    const std::lock_guard<std::mutex> lock(mu_);
    ++calls_[function];
    const uint64_t call = ++calls_since_[function];
    error = sticky_;
    for (const Fault& fault : faults_) {
      if (fault.function != function || call < fault.from || call > fault.to || error != CUDA_SUCCESS) continue;
      error = fault.error;
      if (fault.sticky) sticky_ = error;
    }
    const auto it = delays_.find(function);
    if (it != delays_.end()) delay = it->second;
    if (const auto file = until_.find(function); file != until_.end()) until = file->second;
  }
  if (!until.empty()) std::ofstream(until + ".waits").put('\n');
  while (!until.empty() && access(until.c_str(), F_OK) != 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  if (delay.count() > 0) std::this_thread::sleep_for(delay);
  return error;
}

uint64_t Faults::calls(const std::string& function) {
  const std::lock_guard<std::mutex> lock(mu_);
  return calls_[function];
}

}  // namespace vrambroker::cuda_substitute
