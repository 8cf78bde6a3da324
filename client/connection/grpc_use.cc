// SPDX-License-Identifier: Apache-2.0
#include "client/connection/grpc_use.h"

#include <pthread.h>
#include <unistd.h>

#include <atomic>

namespace vrambroker::client_internal {
namespace {

std::atomic<pid_t> grpc_user{0};
std::atomic<bool> forked_from_grpc{false};

// Registered at load, not at first use: fork() in another thread might find the first use half done.
[[gnu::constructor]] void WatchForks() {
  pthread_atfork(nullptr, nullptr, [] { forked_from_grpc = grpc_user != 0; });
}

}  // namespace

void UseGrpc() {
  pid_t nobody = 0;
  grpc_user.compare_exchange_strong(nobody, getpid());
}

pid_t GrpcUser() {
  return grpc_user;
}

bool IsForkedFromGrpc() {
  return forked_from_grpc;
}

}  // namespace vrambroker::client_internal
