// SPDX-License-Identifier: Apache-2.0
#include "allocator/base/room_to_start.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <latch>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "allocator/base/unique_fd.h"

namespace vrambroker {
namespace {

// gRPC 1.51 opens five descriptors when it starts. Three more are for later versions, and for the first segments.
constexpr int kDescriptors = 8;
// Address space that is left when all threads are there. The C library reserves up to 128 MiB for the memory of a
// thread and goes without where it cannot: with so much left, it has done that for all of these, and takes none later.
constexpr size_t kAddressBytes = size_t{160} << 20;
constexpr absl::string_view kMoreAddressSpace = "the process more address space (ulimit -v)";

// GrpcThreads counts as gRPC 1.51 does: executors and timers, a thread for events for each processor, and a thread for
// callbacks for every second processor.
int GrpcThreads() {
  const auto processors = static_cast<int>(std::clamp(sysconf(_SC_NPROCESSORS_CONF), 1L, 1024L));
  return 6 + std::clamp(processors, 2, 32) + std::clamp(processors / 2, 2, 16);
}

std::string MoreThreads() {
  return absl::StrCat("allow the user more processes (ulimit -u), the cgroup more of them (pids.max), or ",
                      kMoreAddressSpace);
}

absl::Status CheckDescriptors() {
  std::vector<UniqueFd> opened;
  for (int i = 0; i < kDescriptors; ++i) {
    UniqueFd fd(open("/dev/null", O_RDONLY | O_CLOEXEC));
    const int error = errno;
    if (!fd.valid() && (error == EMFILE || error == ENFILE)) {
      return absl::ResourceExhaustedError(
          absl::StrCat("gRPC needs ", kDescriptors, " file descriptors to start, and ", i, " can be opened (",
                       std::strerror(error), "): close some, or allow more (ulimit -n, LimitNOFILE of a unit)"));
    }
    opened.push_back(std::move(fd));
  }
  return absl::OkStatus();
}

// SignalsBlocked keeps signals from threads that are started meanwhile: signals are for the program's own threads.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

absl::Status CheckAddressSpace() {
  void* const room = mmap(nullptr, kAddressBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (room != MAP_FAILED) {
    munmap(room, kAddressBytes);
    return absl::OkStatus();
  }
  return absl::ResourceExhaustedError(absl::StrCat("gRPC needs ", kAddressBytes >> 20,
                                                   " MiB of address space to start, beside that of its threads: allow ",
                                                   kMoreAddressSpace));
}

absl::Status CheckThreads(int wanted) {
  std::latch here(wanted);
  std::latch end(1);
  const auto wait = [&here, &end] {
    void* volatile const memory =
        std::malloc(1);  // the C library gives each thread a part of the address space with it
    std::free(memory);
    here.count_down();
    end.wait();
  };
  std::vector<std::thread> threads;
  std::string why;
  {
    const SignalsBlocked blocked;
    try {
      threads.reserve(static_cast<size_t>(wanted));
      while (threads.size() < static_cast<size_t>(wanted)) threads.emplace_back(wait);
    } catch (const std::exception& error) {
      why = error.what();
    }
  }
  const auto started = static_cast<int>(threads.size());
  here.count_down(wanted - started);
  here.wait();
  absl::Status status = CheckAddressSpace();
  end.count_down();
  for (std::thread& thread : threads) thread.join();
  if (started == wanted) return status;
  return absl::ResourceExhaustedError(absl::StrCat("gRPC and its users need ", wanted, " threads to start, and ",
                                                   started, " can be had (", why, "): ", MoreThreads()));
}

}  // namespace

absl::Status CheckRoomForGrpc(int own_threads) {
  if (absl::Status status = CheckDescriptors(); !status.ok()) return status;
  return CheckThreads(GrpcThreads() + own_threads);
}

absl::Status NoThreadError() {
  return absl::ResourceExhaustedError(absl::StrCat("no thread can be started: ", MoreThreads()));
}

}  // namespace vrambroker
