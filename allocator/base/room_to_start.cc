// SPDX-License-Identifier: Apache-2.0
#include "allocator/base/room_to_start.h"

#include <fcntl.h>
#include <malloc.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <latch>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "allocator/base/unique_fd.h"

namespace vrambroker {
namespace {

// gRPC 1.51 opens five descriptors when it starts. Three more are for later versions, and for the first segments.
constexpr int kDescriptors = 8;
// Address space for gRPC's allocations, beside its threads.
constexpr size_t kAddressBytes = size_t{16} << 20;
// Address space reserved by the C library, where possible, for the memory of each thread.
constexpr size_t kArenaBytes = size_t{128} << 20;
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

// SignalsBlocked keeps signals from threads started meanwhile: signals are for the program's own threads.
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

bool HasAddressSpace(size_t bytes) {
  void* const room = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (room == MAP_FAILED) return false;
  munmap(room, bytes);
  return true;
}

size_t StackBytes() {
  pthread_attr_t attributes;
  size_t bytes = 0;
  if (pthread_getattr_default_np(&attributes) != 0) return bytes;
  pthread_attr_getstacksize(&attributes, &bytes);
  pthread_attr_destroy(&attributes);
  return bytes;
}

// With little address space, the first threads would get so much for their memory that the next threads could not
// start. All threads then share the space.
void ShareMemoryIfThereIsLittle(int threads) {
  if (HasAddressSpace(kAddressBytes + static_cast<size_t>(threads) * (kArenaBytes + StackBytes()))) return;
  mallopt(M_ARENA_MAX, 1);
}

struct Threads {
  explicit Threads(int wanted) : here(wanted), end(1) {}
  std::latch here;
  std::latch end;
};

// Avoids allocations, unlike a std::thread: the C library would give an allocating thread memory of its own.
void* BeThere(void* argument) {
  auto* const threads = static_cast<Threads*>(argument);
  threads->here.count_down();
  threads->end.wait();
  return nullptr;
}

absl::Status CheckThreads(int wanted) {
  Threads all(wanted);
  std::vector<pthread_t> threads;
  threads.reserve(static_cast<size_t>(wanted));
  int error = 0;
  {
    const SignalsBlocked blocked;
    while (threads.size() < static_cast<size_t>(wanted) && error == 0) {
      pthread_t thread = 0;
      error = pthread_create(&thread, nullptr, BeThere, &all);
      if (error == 0) threads.push_back(thread);
    }
  }
  const auto started = static_cast<int>(threads.size());
  all.here.count_down(wanted - started);
  all.here.wait();
  const bool has_room = HasAddressSpace(kAddressBytes);
  all.end.count_down();
  for (const pthread_t thread : threads) pthread_join(thread, nullptr);
  if (error != 0) {
    return absl::ResourceExhaustedError(absl::StrCat("gRPC and its users need ", wanted, " threads to start, and ",
                                                     started, " can be had (", std::strerror(error),
                                                     "): ", MoreThreads()));
  }
  if (has_room) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat("gRPC needs ", kAddressBytes >> 20,
                                                   " MiB of address space to start, beside that of its threads: allow ",
                                                   kMoreAddressSpace));
}

}  // namespace

absl::Status CheckRoomForGrpc(int own_threads) {
  if (absl::Status status = CheckDescriptors(); !status.ok()) return status;
  const int threads = GrpcThreads() + own_threads;
  ShareMemoryIfThereIsLittle(threads);
  return CheckThreads(threads);
}

absl::Status NoThreadError() {
  return absl::ResourceExhaustedError(absl::StrCat("no thread can be started: ", MoreThreads()));
}

}  // namespace vrambroker
