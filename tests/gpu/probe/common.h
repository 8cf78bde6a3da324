// SPDX-License-Identifier: Apache-2.0
// common.h - shared pieces of the CUDA sharing probe (own code, no third-party source).
//
// Layout of the suite
//   probe run            orchestrator; never touches CUDA; one child process per experiment
//   probe exp NAME       a controller runs an experiment; never touches CUDA either
//   probe agent FD       a CUDA process that executes commands sent over a SEQPACKET socket
// A hang or a crash therefore only loses an agent, and at most an experiment.
#pragma once
#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include <dlfcn.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/utsname.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

constexpr size_t KiB = 1024, MiB = 1024 * KiB, GiB = 1024 * MiB;

inline double nowUs() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1e6 + t.tv_nsec * 1e-3;
}
inline void sleepMs(int ms) {
  timespec t{ms / 1000, (ms % 1000) * 1000000L};
  nanosleep(&t, nullptr);
}
// Multiplies the usual time limits: a context takes many seconds on some machines.
inline double patience() {
  const char* t = getenv("VRAMBROKER_TEST_PATIENCE");
  return t ? std::max(1.0, atof(t)) : 1;
}
inline double median(std::vector<double> v) {
  if (v.empty()) return -1;
  std::sort(v.begin(), v.end());
  size_t n = v.size();
  return n % 2 ? v[n / 2] : 0.5 * (v[n / 2 - 1] + v[n / 2]);
}

// ---------------------------------------------------------------- wire format
enum Op : uint32_t {
  OP_PING = 1,
  OP_INIT,
  OP_ATTR,
  OP_MALLOC,
  OP_FREE,
  OP_FILL,
  OP_COUNT,
  OP_READ64,
  OP_MEMINFO,
  OP_IPC_GET,
  OP_IPC_OPEN,
  OP_IPC_CLOSE,
  OP_RANGE,
  OP_BENCH_MALLOC,
  OP_BENCH_ASYNC,
  OP_BENCH_IPC,
  OP_VMM_CREATE,
  OP_VMM_MAP,
  OP_VMM_SETACCESS,
  OP_VMM_EXPORT,
  OP_VMM_IMPORT,
  OP_VMM_UNMAP,
  OP_VMM_RELEASE,
  OP_BENCH_VMM,
  OP_BENCH_VMM_IMPORT,
  OP_VMM_PARTIAL,
  OP_POKE,
  OP_MEMSET,
  OP_H2D,
  OP_BW,
  OP_BENCH_MEMSET,
  OP_SPIN_WRITE,
  OP_INC_LOOP,
  OP_EV_CREATE,
  OP_EV_RECORD,
  OP_EV_HANDLE,
  OP_EV_OPEN,
  OP_EV_QUERY,
  OP_EV_SYNC,
  OP_EV_DESTROY,
  OP_WAIT_COUNT,
  OP_SYNC,
  OP_POOL_CREATE,
  OP_POOL_ALLOC,
  OP_POOL_EXPORT,
  OP_POOL_EXPORT_PTR,
  OP_POOL_IMPORT,
  OP_POOL_IMPORT_PTR,
  OP_GRAPH,
  OP_WILD,
  OP_ASYNC_ALLOC,
  OP_EXIT
};
struct Req {
  uint32_t op = 0;
  int64_t a[6] = {};
  unsigned char blob[128] = {};
};
struct Rep {
  int32_t rc = 0;    // 0 = success, else CUresult / cudaError_t (same numbering for common codes)
  int32_t kind = 0;  // 1 = CUresult, 2 = cudaError_t
  int64_t v[10] = {};
  double d[16] = {};
  unsigned char blob[128] = {};
  char err[64] = {};  // symbolic name of rc
};

inline bool sendFds(int sock, const void* p, size_t n, const int* fds, int nfd, int* err = nullptr) {
  iovec io{const_cast<void*>(p), n};
  std::vector<char> ctl(CMSG_SPACE(sizeof(int) * std::max(nfd, 1)));
  msghdr m{};
  m.msg_iov = &io;
  m.msg_iovlen = 1;
  if (nfd > 0) {
    m.msg_control = ctl.data();
    m.msg_controllen = CMSG_SPACE(sizeof(int) * nfd);
    cmsghdr* c = CMSG_FIRSTHDR(&m);
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(sizeof(int) * nfd);
    memcpy(CMSG_DATA(c), fds, sizeof(int) * nfd);
  }
  ssize_t r = sendmsg(sock, &m, MSG_NOSIGNAL);
  if (err) *err = r < 0 ? errno : 0;
  return r == (ssize_t)n;
}
// Returns bytes, 0 on EOF, -1 on error, -2 on timeout.
inline int recvFds(int sock, void* p, size_t n, std::vector<int>* fds, int timeoutMs) {
  pollfd pf{sock, POLLIN, 0};
  int pr;
  do pr = poll(&pf, 1, timeoutMs);
  while (pr < 0 && errno == EINTR);
  if (pr == 0) return -2;
  if (pr < 0) return -1;
  iovec io{p, n};
  std::vector<char> ctl(CMSG_SPACE(sizeof(int) * 256));
  msghdr m{};
  m.msg_iov = &io;
  m.msg_iovlen = 1;
  m.msg_control = ctl.data();
  m.msg_controllen = ctl.size();
  ssize_t r = recvmsg(sock, &m, MSG_CMSG_CLOEXEC);
  if (r <= 0) return r == 0 ? 0 : -1;
  for (cmsghdr* c = CMSG_FIRSTHDR(&m); c; c = CMSG_NXTHDR(&m, c))
    if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS) {
      int k = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
      const int* f = reinterpret_cast<const int*>(CMSG_DATA(c));
      for (int i = 0; i < k; i++)
        if (fds)
          fds->push_back(f[i]);
        else
          close(f[i]);
    }
  return (int)r;
}

// ---------------------------------------------------------------- entry points
int agentMain(int sock);
int expMain(const char* name);
const std::vector<std::pair<std::string, int>>& experimentList();  // name, timeout seconds
