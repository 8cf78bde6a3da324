// SPDX-License-Identifier: Apache-2.0
// fake_agent.cc - a CPU stand-in for agent.cu, used only to dry-run the controllers on a machine
// without a GPU (harness test: message flow, timeouts, kills). The stand-in's numbers mean nothing.
#include <sys/mman.h>
#include <thread>
#include "common.h"
struct FS {
  bool used = false;
  int fd = -1;
  volatile uint64_t* p = nullptr;
  int64_t size = 0;
  int prot = 0;
};
static std::vector<FS> S;
static double busyUntil = 0;
static int ns() {
  for (size_t i = 0; i < S.size(); i++)
    if (!S[i].used) {
      S[i] = FS();
      S[i].used = true;
      return i;
    }
  S.push_back(FS());
  S.back().used = true;
  return S.size() - 1;
}
static volatile uint64_t* mp(int fd, int prot) {
  void* p = mmap(nullptr, 4096, prot, MAP_SHARED, fd, 0);
  return p == MAP_FAILED ? nullptr : (volatile uint64_t*)p;
}
static int mk(int64_t size) {
  int i = ns();
  S[i].fd = memfd_create("fake", MFD_CLOEXEC);
  if (ftruncate(S[i].fd, 4096)) {
  }
  S[i].p = mp(S[i].fd, PROT_READ | PROT_WRITE);
  S[i].size = size;
  S[i].prot = 3;
  return i;
}
static void err(Rep& r, int c, const char* s) {
  r.rc = c;
  snprintf(r.err, sizeof r.err, "%s", s);
}
int agentMain(int sock) {
  const char* hang = getenv("FAKE_HANG_OP");
  const char* crash = getenv("FAKE_CRASH_OP");
  for (;;) {
    Req q;
    std::vector<int> fds, out;
    int n = recvFds(sock, &q, sizeof q, &fds, -1);
    if (n <= 0) return 0;
    if (q.op == OP_EXIT) return 0;
    if (hang && (int)q.op == atoi(hang)) pause();
    if (crash && (int)q.op == atoi(crash)) abort();
    Rep r;
    auto bad = [&] { return q.a[0] < 0 || q.a[0] >= (int64_t)S.size() || !S[q.a[0]].used; };
    for (auto& d : r.d) d = 1;
    switch (q.op) {
      case OP_MEMINFO:
        r.v[0] = 100ll << 30;
        r.v[1] = 140ll << 30;
        break;
      case OP_MALLOC:
      case OP_ASYNC_ALLOC:
        r.v[0] = mk(q.a[0]);
        r.v[1] = 0x700000000000 + r.v[0] * 0x200000;
        break;
      case OP_VMM_CREATE:
        r.v[0] = mk(q.a[0]);
        break;
      case OP_FREE:
      case OP_IPC_CLOSE:
      case OP_VMM_RELEASE:
        if (bad()) {
          err(r, 1, "badslot");
          break;
        }
        S[q.a[0]].used = false;
        break;
      case OP_FILL:
        if (bad()) {
          err(r, 1, "badslot");
          break;
        }
        if (!(S[q.a[0]].prot & 2)) {
          err(r, 700, "ro");
          break;
        }
        S[q.a[0]].p[0] = (uint32_t)q.a[1];
        break;
      case OP_POKE:
      case OP_MEMSET:
      case OP_H2D:
        if (bad()) {
          err(r, 1, "badslot");
          break;
        }
        if (!(S[q.a[0]].prot & 2)) err(r, 700, "ro");
        break;
      case OP_COUNT:
      case OP_WAIT_COUNT:
      case OP_GRAPH: {
        if (bad()) {
          err(r, 1, "badslot");
          break;
        }
        if (q.op == OP_GRAPH) S[q.a[0]].p[0] = (uint32_t)q.a[1];
        if (q.op == OP_WAIT_COUNT)
          while (nowUs() < (double)S[q.a[2]].p[0]) sleepMs(1);
        r.v[2] = S[q.a[0]].size / 4;
        r.v[0] = S[q.a[0]].p[0] == (uint32_t)q.a[1] ? r.v[2] : 0;
        r.v[1] = S[q.a[0]].p[0] ? r.v[2] : 0;
        break;
      }
      case OP_READ64:
        if (bad()) {
          err(r, 1, "badslot");
          break;
        }
        r.v[0] = S[q.a[0]].p[0];
        break;
      case OP_IPC_GET: {
        if (bad()) {
          err(r, 1, "badslot");
          break;
        }
        int w[3] = {(int)getpid(), S[q.a[0]].fd, 7};
        memcpy(r.blob, w, 12);
        r.v[2] = 1;
        break;
      }
      case OP_IPC_OPEN: {
        int w[3];
        memcpy(w, q.blob, 12);
        char t[64];
        snprintf(t, sizeof t, "/proc/%d/fd/%d", w[0], w[1]);
        int f = open(t, O_RDWR | O_CLOEXEC);
        if (f < 0) {
          err(r, 201, "open failed");
          break;
        }
        int i = ns();
        S[i].fd = f;
        S[i].p = mp(f, 3);
        S[i].size = q.a[0];
        S[i].prot = 3;
        r.v[0] = i;
        r.v[1] = 0x710000000000 + i * 0x200000;
        break;
      }
      case OP_VMM_EXPORT:
        if (bad()) {
          err(r, 1, "badslot");
          break;
        }
        out.push_back(dup(S[q.a[0]].fd));
        break;
      case OP_VMM_IMPORT: {
        if (fds.empty()) {
          err(r, 998, "nofd");
          break;
        }
        int i = ns();
        S[i].fd = dup(fds[0]);
        S[i].size = q.a[0];
        r.v[0] = i;
        break;
      }
      case OP_VMM_MAP:
      case OP_VMM_SETACCESS:
        if (bad()) {
          err(r, 1, "badslot");
          break;
        }
        S[q.a[0]].prot = q.a[1];
        S[q.a[0]].p = mp(S[q.a[0]].fd, 3);
        break;
      case OP_RANGE:
        if (bad()) {
          err(r, 1, "badslot");
          break;
        }
        if (q.a[1]) S[q.a[0]].size = q.a[1];
        r.v[1] = 2 << 20;
        break;
      case OP_SPIN_WRITE: {
        auto* p = S[q.a[0]].p;
        double t = nowUs() + q.a[2] * 1e3;
        busyUntil = t;
        uint32_t v = q.a[1];
        std::thread([=] {
          while (nowUs() < t) sleepMs(1);
          p[0] = v;
        }).detach();
        break;
      }
      case OP_INC_LOOP: {
        auto* p = S[q.a[0]].p;
        double t = nowUs() + q.a[1] * 1e3;
        std::thread([=] {
          while (nowUs() < t) p[0] = p[0] + 1;
        }).detach();
        break;
      }
      case OP_EV_CREATE:
        r.v[0] = mk(8);
        break;
      case OP_EV_RECORD:
        S[q.a[0]].p[0] = (uint64_t)busyUntil + 5000;
        break;
      case OP_EV_HANDLE: {
        int w[3] = {(int)getpid(), S[q.a[0]].fd, 9};
        memcpy(r.blob, w, 12);
        break;
      }
      case OP_EV_OPEN: {
        int w[3];
        memcpy(w, q.blob, 12);
        char t[64];
        snprintf(t, sizeof t, "/proc/%d/fd/%d", w[0], w[1]);
        int f = open(t, O_RDWR | O_CLOEXEC);
        if (f < 0) {
          err(r, 1, "evopen");
          break;
        }
        int i = ns();
        S[i].fd = f;
        S[i].p = mp(f, 3);
        r.v[0] = i;
        break;
      }
      case OP_EV_QUERY:
        if (nowUs() < (double)S[q.a[0]].p[0]) err(r, 600, "notready");
        break;
      case OP_EV_SYNC:
        while (nowUs() < (double)S[q.a[0]].p[0]) sleepMs(1);
        break;
      case OP_WILD:
        err(r, 700, "illegal");
        break;
      case OP_POOL_CREATE:
        r.v[0] = mk(0);
        break;
      case OP_POOL_ALLOC:
        r.v[0] = mk(q.a[1]);
        break;
      case OP_POOL_EXPORT:
        out.push_back(dup(S[q.a[0]].fd));
        break;
      case OP_POOL_EXPORT_PTR: {
        int w[3] = {(int)getpid(), S[q.a[0]].fd, 7};
        memcpy(r.blob, w, 12);
        break;
      }
      case OP_POOL_IMPORT:
        r.v[0] = mk(0);
        break;
      case OP_POOL_IMPORT_PTR: {
        int w[3];
        memcpy(w, q.blob, 12);
        char t[64];
        snprintf(t, sizeof t, "/proc/%d/fd/%d", w[0], w[1]);
        int f = open(t, O_RDWR | O_CLOEXEC);
        int i = ns();
        S[i].fd = f;
        S[i].p = mp(f, 3);
        S[i].size = q.a[1];
        r.v[0] = i;
        break;
      }
      default:
        break;
    }
    for (int f : fds) close(f);
    if (!sendFds(sock, &r, sizeof r, out.data(), out.size())) return 0;
    for (int f : out) close(f);
  }
}
