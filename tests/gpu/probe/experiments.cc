// SPDX-License-Identifier: Apache-2.0
// experiments.cc - the experiments. Controllers never call CUDA; agents do.
#include "common.h"

#include <functional>
#include <memory>

// ---------------------------------------------------------------- NVML (optional, dlopen)
struct NvmlProc {
  unsigned pid;
  unsigned long long mem;
  unsigned gi, ci;
};
struct Nvml {
  void* dev = nullptr;
  int (*procs)(void*, unsigned*, NvmlProc*) = nullptr;
  int (*memInfo)(void*, void*) = nullptr;
  char driver[96] = "";
  bool ok = false;
  Nvml() {
    void* h = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    if (!h) return;
    auto init = (int (*)())dlsym(h, "nvmlInit_v2");
    auto byIdx = (int (*)(unsigned, void**))dlsym(h, "nvmlDeviceGetHandleByIndex_v2");
    auto ver = (int (*)(char*, unsigned))dlsym(h, "nvmlSystemGetDriverVersion");
    procs = (int (*)(void*, unsigned*, NvmlProc*))dlsym(h, "nvmlDeviceGetComputeRunningProcesses_v3");
    memInfo = (int (*)(void*, void*))dlsym(h, "nvmlDeviceGetMemoryInfo");
    if (!init || !byIdx || init()) return;
    if (ver) ver(driver, sizeof driver);
    ok = byIdx(0, &dev) == 0;
  }
  double procMiB(pid_t pid) {  // -1 unknown, -2 not listed
    if (!ok || !procs) return -1;
    std::vector<NvmlProc> v(256);
    unsigned n = v.size();
    if (procs(dev, &n, v.data())) return -1;
    for (unsigned i = 0; i < n; i++)
      if (v[i].pid == (unsigned)pid) return v[i].mem == ~0ull ? -3 : v[i].mem / 1048576.0;
    return -2;
  }
  double usedMiB() {
    struct {
      unsigned long long total, free, used;
    } m{};
    if (!ok || !memInfo || memInfo(dev, &m)) return -1;
    return m.used / 1048576.0;
  }
  double freeMiB() {
    struct {
      unsigned long long total, free, used;
    } m{};
    if (!ok || !memInfo || memInfo(dev, &m)) return -1;
    return m.free / 1048576.0;
  }
};
static Nvml& nvml() {
  static Nvml n;
  return n;
}

// ---------------------------------------------------------------- agents
struct AgentOpt {
  int uid = -1;
  bool newPidNs = false;
  bool noCtx = false;
  bool noInit = false;
};
struct Agent {
  pid_t pid = -1;
  int sock = -1;
  bool dead = false;
  Rep init;
  ~Agent() {
    kill9();
    if (sock >= 0) close(sock);
  }
  void kill9() {
    if (pid > 0) {
      kill(pid, SIGKILL);
      int st;
      waitpid(pid, &st, 0);
      pid = -1;
    }
    dead = true;
  }
  double killTimed() {
    double t0 = nowUs();
    kill9();
    return (nowUs() - t0) * 1e-3;
  }
  void quit() {  // normal exit
    Req q;
    q.op = OP_EXIT;
    sendFds(sock, &q, sizeof q, nullptr, 0);
    int st;
    waitpid(pid, &st, 0);
    pid = -1;
    dead = true;
  }
  Rep call(Op op, std::vector<int64_t> a = {}, const unsigned char* blob = nullptr, std::vector<int> fds = {},
           std::vector<int>* out = nullptr, int timeoutMs = 20000) {
    Req q;
    Rep r;
    q.op = op;
    for (size_t i = 0; i < a.size() && i < 6; i++) q.a[i] = a[i];
    if (blob) memcpy(q.blob, blob, sizeof q.blob);
    if (dead || !sendFds(sock, &q, sizeof q, fds.data(), (int)fds.size())) {
      r.rc = 995;
      snprintf(r.err, sizeof r.err, "agent-gone");
      return r;
    }
    int n = recvFds(sock, &r, sizeof r, out, (int)(timeoutMs * patience()));
    if (n == -2) {
      r = Rep();
      r.rc = 996;
      snprintf(r.err, sizeof r.err, "timeout");
    } else if (n <= 0) {
      r = Rep();
      r.rc = 995;
      snprintf(r.err, sizeof r.err, "agent-died");
      dead = true;
    }
    return r;
  }
};
using A = std::unique_ptr<Agent>;

static A spawn(AgentOpt o = {}) {
  A a(new Agent);
  int sv[2];
  if (socketpair(AF_UNIX, SOCK_SEQPACKET, 0, sv)) {
    a->dead = true;
    return a;
  }
  fcntl(sv[0], F_SETFD, FD_CLOEXEC);
  int self = open("/proc/self/exe", O_RDONLY);
  pid_t p = fork();
  if (p == 0) {
    if (o.newPidNs) {
      if (unshare(CLONE_NEWPID)) _exit(90);
      pid_t g = fork();
      if (g < 0) _exit(91);
      if (g > 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        close(sv[1]);
        int st;
        waitpid(g, &st, 0);
        _exit(0);
      }
    }
    if (o.uid >= 0) {
      if (setgid(o.uid) || setuid(o.uid)) _exit(92);
    }
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    char n[16];
    snprintf(n, sizeof n, "%d", sv[1]);
    char* argv[] = {(char*)"probe", (char*)"agent", n, nullptr};
    extern char** environ;
    fexecve(self, argv, environ);
    _exit(93);
  }
  close(self);
  close(sv[1]);
  a->pid = p;
  a->sock = sv[0];
  if (!o.noInit) {
    a->init = a->call(OP_INIT, {o.noCtx ? 1 : 0}, nullptr, {}, nullptr, 30000);
    if (a->init.rc) fprintf(stderr, "agent init: %s\n", a->init.err);
  }
  return a;
}

// ---------------------------------------------------------------- reporting
struct Report {
  std::string outcome = "ok";
  std::vector<std::pair<std::string, std::string>> kv;  // the second string is already JSON
  void add(const std::string& k, const std::string& v) {
    kv.push_back({k, v});
    printf("@@P \"%s\":%s\n", k.c_str(), v.c_str());  // the orchestrator keeps this line if it cuts the experiment off
    fflush(stdout);
  }
  void num(const std::string& k, double v, int prec = 1) {
    char b[64];
    if (std::isnan(v) || std::isinf(v))
      snprintf(b, sizeof b, "null");
    else
      snprintf(b, sizeof b, "%.*f", prec, v);
    add(k, b);
  }
  void i(const std::string& k, long long v) { add(k, std::to_string(v)); }
  void s(const std::string& k, const std::string& v) {
    std::string e = "\"";
    for (char c : v) {
      if (c == '"' || c == '\\') e += '\\';
      if ((unsigned char)c >= 32) e += c;
    }
    add(k, e + "\"");
  }
  void rc(const std::string& k, const Rep& r) { s(k, r.rc == 0 ? "ok" : r.err); }
};
static Report R;
static const char* yn(bool b) {
  return b ? "yes" : "no";
}
static int64_t freeBytes(Agent& a) {
  Rep r = a.call(OP_MEMINFO);
  return r.rc ? -1 : r.v[0];
}
static std::string szName(size_t b) {
  char t[32];
  if (b >= GiB)
    snprintf(t, sizeof t, "%zuG", b / GiB);
  else if (b >= MiB)
    snprintf(t, sizeof t, "%zuM", b / MiB);
  else
    snprintf(t, sizeof t, "%zuK", b / KiB);
  return t;
}
// Waits until agent a sees at least want bytes free again; returns ms or -1.
static double waitFree(Agent& a, int64_t want, int limitMs = 5000) {
  double t0 = nowUs();
  while ((nowUs() - t0) * 1e-3 < limitMs) {
    if (freeBytes(a) >= want) return (nowUs() - t0) * 1e-3;
    sleepMs(2);
  }
  return -1;
}
#define NEED(agent)                                             \
  do {                                                          \
    if ((agent)->init.rc || (agent)->dead) {                    \
      R.outcome = std::string("no-agent:") + (agent)->init.err; \
      return;                                                   \
    }                                                           \
  } while (0)
#define MUST(rep, what)                                             \
  do {                                                              \
    if ((rep).rc) {                                                 \
      R.outcome = std::string("failed ") + what + ": " + (rep).err; \
      return;                                                       \
    }                                                               \
  } while (0)

static const uint32_t PAT = 0xC0FFEE11u, PAT2 = 0x5EC2E7AAu;

// ---------------------------------------------------------------- experiments
static void e_env() {
  utsname u;
  uname(&u);
  A a = spawn();
  NEED(a);
  Rep r = a->call(OP_ATTR);
  MUST(r, "attr");
  R.s("gpu", (char*)r.blob);
  R.s("driver", nvml().driver);
  R.s("kernel", std::string(u.sysname) + " " + u.release);
  R.i("cudaDriverApi", (long long)r.d[2]);
  R.i("cudart", (long long)r.d[3]);
  R.i("cc", (long long)r.d[4]);
  R.i("sms", (long long)r.d[5]);
  R.num("totalGiB", r.d[6] / GiB, 2);
  const char* n[] = {"vmm",    "posixFd", "fabric",    "mempoolHandleMask", "ipcEvent",
                     "gdrVmm", "dmabuf",  "multicast", "computeMode"};
  for (int i = 0; i < 9; i++) R.i(n[i], r.v[i]);
  R.num("granMinKiB", r.d[0] / KiB, 0);
  R.num("granRecKiB", r.d[1] / KiB, 0);
  Rep m = a->call(OP_MEMINFO);
  R.num("freeGiB", m.v[0] / (double)GiB, 2);
  R.num("memGetInfoUs", m.d[0]);
  rlimit l;
  getrlimit(RLIMIT_NOFILE, &l);
  R.i("nofile", (long long)l.rlim_cur);
  R.i("euid", geteuid());
}

static void e_context_overhead() {
  double n0 = nvml().usedMiB();
  double t0 = nowUs();
  A obs = spawn();
  NEED(obs);
  double n1 = nvml().usedMiB();
  R.num("firstInitMs", (nowUs() - t0) * 1e-3, 0);
  int64_t f0 = freeBytes(*obs);
  std::vector<A> v;
  std::vector<double> d, p;
  int64_t prev = f0;
  std::vector<double> initMs;
  for (int i = 0; i < 3; i++) {
    v.push_back(spawn());
    NEED(v.back());
    initMs.push_back(v.back()->init.d[1] * 1e-3);
    int64_t f = freeBytes(*obs);
    d.push_back((prev - f) / 1048576.0);
    prev = f;
    p.push_back(nvml().procMiB(v.back()->pid));
  }
  R.num("deviceMiBPerContext", median(d));
  R.num("nvmlMiBPerContext", median(p));
  R.num("cudaFree0Ms", median(initMs), 0);
  R.num("firstContextDeviceMiB", n1 - n0);
  A nc = spawn({-1, false, true, false});
  int64_t f1 = freeBytes(*obs);
  R.num("cuInitOnlyMiB", (prev - f1) / 1048576.0);
  R.num("cuInitOnlyNvmlMiB", nvml().procMiB(nc->pid));
  v.clear();
  R.num("backAfterKillMs", waitFree(*obs, f0 - 64 * (int64_t)MiB), 0);
}

static void e_malloc_latency() {
  A a = spawn();
  NEED(a);
  int64_t fr = freeBytes(*a);
  for (size_t s : {4 * KiB, 1 * MiB, 2 * MiB, 16 * MiB, 64 * MiB, 256 * MiB, 1 * GiB, 4 * GiB, 16 * GiB}) {
    if ((int64_t)s > fr / 2) continue;
    Rep r = a->call(OP_BENCH_MALLOC, {(int64_t)s, s >= GiB ? 7 : 25}, nullptr, {}, nullptr, 30000);
    if (r.rc) {
      R.rc("rc_" + szName(s), r);
      continue;
    }
    R.num("m" + szName(s) + "us", r.d[0]);
    R.num("f" + szName(s) + "us", r.d[1]);
    if (s == 1 * GiB || s == 2 * MiB) {
      R.num("m" + szName(s) + "first", r.d[2]);
      R.num("m" + szName(s) + "max", r.d[3]);
    }
  }
}
static void e_malloc_async() {
  A a = spawn();
  NEED(a);
  for (size_t s : {64 * KiB, 2 * MiB, 64 * MiB, 1 * GiB, 4 * GiB}) {
    Rep r = a->call(OP_BENCH_ASYNC, {(int64_t)s, 30});
    if (r.rc) {
      R.rc("rc_" + szName(s), r);
      continue;
    }
    R.num("a" + szName(s) + "us", r.d[0], 2);
    R.num("f" + szName(s) + "us", r.d[1], 2);
    R.num("cold" + szName(s) + "us", r.d[2]);
  }
}
static void e_ipc_latency() {
  A a = spawn(), b = spawn();
  NEED(a);
  NEED(b);
  for (size_t s : {2 * MiB, 64 * MiB, 512 * MiB, 1 * GiB, 4 * GiB, 16 * GiB}) {
    Rep m = a->call(OP_MALLOC, {(int64_t)s});
    if (m.rc) {
      R.rc("rc_" + szName(s), m);
      continue;
    }
    Rep g = a->call(OP_IPC_GET, {m.v[0], 0});
    Rep g2 = a->call(OP_IPC_GET, {m.v[0], 0});
    MUST(g, "get");
    Rep o = b->call(OP_BENCH_IPC, {s >= GiB ? 7 : 15}, g.blob);
    if (o.rc) {
      R.rc("open_" + szName(s), o);
      R.outcome = std::string("open failed: ") + o.err;
      a->call(OP_FREE, {m.v[0]});
      continue;
    }
    R.num("get" + szName(s) + "us", g2.d[0], 2);
    R.num("open" + szName(s) + "us", o.d[0]);
    R.num("close" + szName(s) + "us", o.d[1]);
    R.num("first" + szName(s) + "us", o.d[2]);
    a->call(OP_FREE, {m.v[0]});
  }
}
static int lowBits(int64_t p) {
  return p ? __builtin_ctzll((unsigned long long)p) : 64;
}
static void e_ipc_second_open() {
  A a = spawn(), b = spawn(), c = spawn();
  NEED(a);
  NEED(b);
  NEED(c);
  Rep m = a->call(OP_MALLOC, {64 * (int64_t)MiB});
  MUST(m, "malloc");
  a->call(OP_FILL, {m.v[0], (int64_t)PAT});
  Rep g = a->call(OP_IPC_GET, {m.v[0], 0});
  Rep gi = a->call(OP_IPC_GET, {m.v[0], 4096});
  MUST(g, "get");
  R.s("interiorHandleSame", gi.rc ? gi.err : yn(!memcmp(g.blob, gi.blob, 64)));
  Rep self = a->call(OP_IPC_OPEN, {64 * (int64_t)MiB}, g.blob);
  R.rc("openInExporter", self);
  Rep o1 = b->call(OP_IPC_OPEN, {64 * (int64_t)MiB}, g.blob);
  MUST(o1, "open1");
  Rep o2 = b->call(OP_IPC_OPEN, {64 * (int64_t)MiB}, g.blob);
  R.rc("secondOpen", o2);
  R.s("samePtr", yn(o2.rc == 0 && o1.v[1] == o2.v[1]));
  R.rc("close1", b->call(OP_IPC_CLOSE, {o1.v[0]}));
  Rep k = o2.rc ? Rep() : b->call(OP_COUNT, {o2.v[0], (int64_t)PAT});
  R.s("readAfterOneClose", o2.rc ? "n/a" : (k.rc ? k.err : yn(k.v[0] == k.v[2])));
  Rep re = b->call(OP_IPC_GET, {o2.rc ? o1.v[0] : o2.v[0], 0});
  R.rc("reexportByImporter", re);
  R.i("importedLegacyCapable", re.v[2]);
  if (!re.rc) {
    R.s("reexportSameHandle", yn(!memcmp(re.blob, g.blob, 64)));
    Rep oc = c->call(OP_IPC_OPEN, {64 * (int64_t)MiB}, re.blob);
    R.rc("thirdOpensReexport", oc);
  }
  Rep oc2 = c->call(OP_IPC_OPEN, {64 * (int64_t)MiB}, g.blob);
  R.rc("thirdOpensOriginal", oc2);
  R.s("vaExporter==importer", yn(m.v[1] == o1.v[1]));
  R.i("importerVaAlignBits", lowBits(o1.v[1]));
  unsigned pidIn = 0;  // does the handle carry the exporter pid in clear?
  for (int i = 0; i + 4 <= 64; i++) {
    uint32_t w;
    memcpy(&w, g.blob + i, 4);
    if ((pid_t)w == a->pid) {
      pidIn = i + 1;
      break;
    }
  }
  R.s("pidInHandle", pidIn ? "at byte " + std::to_string(pidIn - 1) : "no");
  std::string hx;
  char t[4];
  for (int i = 0; i < 64; i++) {
    snprintf(t, sizeof t, "%02x", g.blob[i]);
    hx += t;
  }
  R.s("handleHex", hx);
}
static void e_ipc_exporter_killed() {
  A a = spawn(), b = spawn(), obs = spawn();
  NEED(a);
  NEED(b);
  NEED(obs);
  const int64_t n = 2 * (int64_t)GiB;
  int64_t f00 = freeBytes(*obs);
  Rep m = a->call(OP_MALLOC, {n});
  MUST(m, "malloc");
  a->call(OP_FILL, {m.v[0], (int64_t)PAT});
  Rep g = a->call(OP_IPC_GET, {m.v[0], 0});
  Rep o = b->call(OP_IPC_OPEN, {n}, g.blob);
  MUST(o, "open");
  double nvB0 = nvml().procMiB(b->pid), nvA0 = nvml().procMiB(a->pid);
  R.num("killMs", a->killTimed());
  sleepMs(200);
  Rep k = b->call(OP_COUNT, {o.v[0], (int64_t)PAT});
  R.s("readAfterKill", k.rc ? k.err : (k.v[0] == k.v[2] ? "data intact" : "data CHANGED"));
  Rep w = b->call(OP_FILL, {o.v[0], (int64_t)PAT2});
  R.rc("writeAfterKill", w);
  R.num("heldMiB", (f00 - freeBytes(*obs)) / 1048576.0, 0);
  R.num("nvmlA_before", nvA0, 0);
  R.num("nvmlB_before", nvB0, 0);
  R.num("nvmlB_after", nvml().procMiB(b->pid), 0);
  R.outcome = k.rc == 0 && k.v[0] == k.v[2] ? "survives exporter SIGKILL" : "lost on exporter SIGKILL";
  {
    A d = spawn();  // a new agent: the call may hang
    R.rc("newOpenOfDeadExportersHandle", d->call(OP_IPC_OPEN, {n}, g.blob, {}, nullptr, 4000));
  }
  R.rc("close", b->call(OP_IPC_CLOSE, {o.v[0]}));
  R.num("freedAfterCloseMs", waitFree(*obs, f00 - 64 * (int64_t)MiB), 0);
}
static void e_ipc_exporter_free() {
  A a = spawn(), b = spawn(), obs = spawn();
  NEED(a);
  NEED(b);
  NEED(obs);
  const int64_t n = 1 * (int64_t)GiB;
  int64_t f0 = freeBytes(*obs);
  Rep m = a->call(OP_MALLOC, {n});
  MUST(m, "malloc");
  a->call(OP_FILL, {m.v[0], (int64_t)PAT});
  Rep g = a->call(OP_IPC_GET, {m.v[0], 0});
  Rep o = b->call(OP_IPC_OPEN, {n}, g.blob);
  MUST(o, "open");
  Rep fr = a->call(OP_FREE, {m.v[0]});
  R.rc("exporterCudaFree", fr);
  R.num("freeUs", fr.d[0]);
  R.num("stillHeldMiB", (f0 - freeBytes(*obs)) / 1048576.0, 0);
  Rep k = b->call(OP_COUNT, {o.v[0], (int64_t)PAT});
  R.s("importerReads", k.rc ? k.err : (k.v[0] == k.v[2] ? "data intact" : "data CHANGED"));
  Rep m2 = a->call(OP_MALLOC, {n});
  if (!m2.rc) {
    R.s("newAllocSameVa", yn(m2.v[1] == m.v[1]));
    a->call(OP_FILL, {m2.v[0], (int64_t)PAT2});
    Rep k2 = b->call(OP_COUNT, {o.v[0], (int64_t)PAT2});
    R.s("importerSeesNewData", k2.rc ? k2.err : yn(k2.v[0] > 0));
    Rep g2 = a->call(OP_IPC_GET, {m2.v[0], 0});
    R.s("handleDiffers", yn(!g2.rc && memcmp(g.blob, g2.blob, 64)));
    Rep st = obs->call(OP_IPC_OPEN, {n}, g.blob);
    R.rc("openStaleHandle", st);
    if (!st.rc) {
      Rep k3 = obs->call(OP_COUNT, {st.v[0], (int64_t)PAT2});
      R.s("staleHandleAliasesNew", k3.rc ? k3.err : yn(k3.v[0] > 0));
      obs->call(OP_IPC_CLOSE, {st.v[0]});
    }
    a->call(OP_FREE, {m2.v[0]});
  }
  R.rc("close", b->call(OP_IPC_CLOSE, {o.v[0]}));
  R.num("freedAfterCloseMs", waitFree(*obs, f0 - 64 * (int64_t)MiB), 0);
  R.outcome = k.rc == 0 && k.v[0] == k.v[2] ? "importer keeps the memory" : "importer loses the memory";
}
static void e_ipc_importer_killed() {
  A a = spawn(), b = spawn(), obs = spawn();
  NEED(a);
  NEED(b);
  NEED(obs);
  int64_t f0 = freeBytes(*obs);
  const int64_t n = 1 * (int64_t)GiB;
  Rep m = a->call(OP_MALLOC, {n});
  a->call(OP_FILL, {m.v[0], (int64_t)PAT});
  Rep g = a->call(OP_IPC_GET, {m.v[0], 0});
  Rep o = b->call(OP_IPC_OPEN, {n}, g.blob);
  MUST(o, "open");
  b->call(OP_MALLOC, {4 * (int64_t)GiB});
  R.num("killMs", b->killTimed());
  R.num("ownMemBackMs", waitFree(*obs, f0 - n - 64 * (int64_t)MiB), 1);
  Rep k = a->call(OP_COUNT, {m.v[0], (int64_t)PAT});
  R.s("exporterData", k.rc ? k.err : (k.v[0] == k.v[2] ? "intact" : "CHANGED"));
  Rep fr = a->call(OP_FREE, {m.v[0]});
  R.rc("exporterFree", fr);
  R.num("sharedMemBackMs", waitFree(*obs, f0 - 64 * (int64_t)MiB), 1);
}
static void e_kill_inflight() {  // Do GPU writes of a SIGKILLed process stop at the signal, socket EOF, or waitpid?
  A a = spawn(), b = spawn();
  NEED(a);
  NEED(b);
  Rep m = a->call(OP_MALLOC, {2 * (int64_t)MiB});
  MUST(m, "malloc");
  a->call(OP_FILL, {m.v[0], 0});
  Rep g = a->call(OP_IPC_GET, {m.v[0], 0});
  Rep o = b->call(OP_IPC_OPEN, {2 * (int64_t)MiB}, g.blob);
  MUST(o, "open");
  MUST(b->call(OP_INC_LOOP, {o.v[0], 4000}), "inc");
  sleepMs(300);
  Rep c1 = a->call(OP_READ64, {m.v[0]});
  sleepMs(100);
  Rep c2 = a->call(OP_READ64, {m.v[0]});
  R.i("aliveDelta100ms", c2.v[0] - c1.v[0]);
  double t0 = nowUs(), eof = -1, exited = -1, lastChange = 0;
  kill(b->pid, SIGKILL);
  int64_t prev = c2.v[0], atEof = -1, atExit = -1;
  int reads = 0;
  while ((nowUs() - t0) * 1e-3 < 1500) {  // sample the word while watching both signs of death
    if (eof < 0) {
      pollfd p{b->sock, POLLIN, 0};
      char c;
      if (poll(&p, 1, 0) > 0 && ((p.revents & POLLHUP) || recv(b->sock, &c, 1, MSG_PEEK | MSG_DONTWAIT) == 0))
        eof = (nowUs() - t0) * 1e-3;
    }
    if (exited < 0) {
      int st;
      if (waitpid(b->pid, &st, WNOHANG) == b->pid) {
        exited = (nowUs() - t0) * 1e-3;
        b->pid = -1;
        b->dead = true;
      }
    }
    bool sawEof = eof >= 0, sawExit = exited >= 0;
    Rep c = a->call(OP_READ64, {m.v[0]});
    reads++;
    if (c.rc) {
      R.rc("readError", c);
      break;
    }
    if (sawEof && atEof < 0) atEof = c.v[0];
    if (sawExit && atExit < 0) atExit = c.v[0];
    if (c.v[0] != prev) {
      lastChange = (nowUs() - t0) * 1e-3;
      prev = c.v[0];
    }
    if (sawEof && sawExit && (nowUs() - t0) * 1e-3 > std::max(eof, exited) + 300) break;
  }
  R.num("socketEofMs", eof, 2);
  R.num("waitpidMs", exited, 2);
  R.num("lastChangeSeenMs", lastChange, 2);
  R.i("samples", reads);
  R.i("writesAfterEof", atEof < 0 ? -1 : prev - atEof);
  R.i("writesAfterWaitpid", atExit < 0 ? -1 : prev - atExit);
  R.outcome = atExit < 0                    ? "process did not exit"
              : prev != atExit              ? "WRITES CONTINUE after waitpid"
              : atEof >= 0 && prev != atEof ? "writes stop by waitpid, NOT by socket EOF"
                                            : "writes had stopped at socket EOF and at waitpid";
}
static void e_meminfo_deltas() {
  A a = spawn(), b = spawn(), obs = spawn();
  NEED(a);
  NEED(b);
  NEED(obs);
  const int64_t n = 2 * (int64_t)GiB;
  auto snap = [&](const char* tag, int64_t fa, int64_t fb, int64_t fo) {
    std::string t = tag;
    R.num(t + ".A", (fa - freeBytes(*a)) / 1048576.0, 0);
    R.num(t + ".B", (fb - freeBytes(*b)) / 1048576.0, 0);
    R.num(t + ".obs", (fo - freeBytes(*obs)) / 1048576.0, 0);
    R.num(t + ".nvmlA", nvml().procMiB(a->pid), 0);
    R.num(t + ".nvmlB", nvml().procMiB(b->pid), 0);
  };
  int64_t fa = freeBytes(*a), fb = freeBytes(*b), fo = freeBytes(*obs);
  snap("base", fa, fb, fo);
  Rep m = a->call(OP_MALLOC, {n});
  MUST(m, "malloc");
  snap("malloc", fa, fb, fo);
  Rep g = a->call(OP_IPC_GET, {m.v[0], 0});
  Rep o = b->call(OP_IPC_OPEN, {n}, g.blob);
  MUST(o, "open");
  snap("ipcOpen", fa, fb, fo);
  b->call(OP_IPC_CLOSE, {o.v[0]});
  a->call(OP_FREE, {m.v[0]});
  Rep v = a->call(OP_VMM_CREATE, {n, 1});
  MUST(v, "vmm create");
  snap("vmmCreate", fa, fb, fo);
  std::vector<int> fd;
  Rep x = a->call(OP_VMM_EXPORT, {v.v[0]}, nullptr, {}, &fd);
  MUST(x, "export");
  Rep im = b->call(OP_VMM_IMPORT, {n}, nullptr, fd);
  MUST(im, "import");
  b->call(OP_VMM_MAP, {im.v[0], 3});
  snap("vmmImport", fa, fb, fo);
  a->call(OP_VMM_RELEASE, {v.v[0]});
  for (int f : fd) close(f);
  snap("ownerReleased", fa, fb, fo);
}
static void e_vmm_latency() {
  A a = spawn(), b = spawn();
  NEED(a);
  NEED(b);
  for (size_t s : {2 * MiB, 64 * MiB, 1 * GiB, 4 * GiB, 16 * GiB}) {
    Rep r = a->call(OP_BENCH_VMM, {(int64_t)s, 1, s >= GiB ? 7 : 15, 1}, nullptr, {}, nullptr, 30000);
    if (r.rc) {
      R.rc("rc_" + szName(s), r);
      continue;
    }
    std::string z = szName(s);
    const char* nm[] = {"create", "reserve", "map", "setaccess", "export", "unmap", "release", "addrfree"};
    for (int i = 0; i < 8; i++) R.num(z + "." + nm[i], r.d[i]);
    Rep v = a->call(OP_VMM_CREATE, {(int64_t)s, 1});
    if (v.rc) continue;
    std::vector<int> fd;
    a->call(OP_VMM_EXPORT, {v.v[0]}, nullptr, {}, &fd);
    if (!fd.empty()) {
      Rep im = b->call(OP_BENCH_VMM_IMPORT, {(int64_t)s, 7}, nullptr, fd, nullptr, 30000);
      if (im.rc)
        R.rc(z + ".import_rc", im);
      else {
        R.num(z + ".import", im.d[0]);
        R.num(z + ".imap", im.d[1]);
        R.num(z + ".isetaccess", im.d[2]);
        R.num(z + ".iunmap+release", im.d[3]);
      }
    }
    for (int f : fd) close(f);
    a->call(OP_VMM_RELEASE, {v.v[0]});
  }
  Rep c = a->call(OP_BENCH_VMM, {2 * (int64_t)MiB, 512, 3, 0}, nullptr, {}, nullptr, 30000);
  if (!c.rc) {
    R.num("512x2M.create", c.d[0]);
    R.num("512x2M.map", c.d[2]);
    R.num("512x2M.setaccess", c.d[3]);
    R.num("512x2M.unmap", c.d[5]);
    R.num("512x2M.release", c.d[6]);
  }
}
static void fdOutlives(bool noCtx, bool useNvml) {
  auto used = [&] { return useNvml ? nvml().usedMiB() : NAN; };
  double u0 = used();
  A a = spawn({-1, false, noCtx, false});
  NEED(a);
  const int64_t n = 2 * (int64_t)GiB;
  Rep v = a->call(OP_VMM_CREATE, {n, 1});
  R.rc("create", v);
  MUST(v, "create");
  if (!noCtx) {
    MUST(a->call(OP_VMM_MAP, {v.v[0], 3}), "map");
    MUST(a->call(OP_FILL, {v.v[0], (int64_t)PAT}), "fill");
  }
  std::vector<int> fd;
  Rep x = a->call(OP_VMM_EXPORT, {v.v[0]}, nullptr, {}, &fd);
  R.rc("export", x);
  MUST(x, "export");
  if (noCtx) {  // a client with a context writes the pattern through the fd, then leaves
    if (useNvml) R.num("nvmlOwnerMiB", nvml().procMiB(a->pid), 0);
    A w = spawn();
    Rep im = w->call(OP_VMM_IMPORT, {n}, nullptr, fd);
    MUST(im, "writer import");
    MUST(w->call(OP_VMM_MAP, {im.v[0], 3}), "writer map");
    MUST(w->call(OP_FILL, {im.v[0], (int64_t)PAT}), "writer fill");
    w->quit();
  }
  double u1 = used();
  a->kill9();
  sleepMs(1500);  // no CUDA process of the probe exists now; only this controller holds the fd
  double u2 = used();
  A b = spawn();
  NEED(b);
  Rep im = b->call(OP_VMM_IMPORT, {n}, nullptr, fd);
  R.rc("importAfterDeath", im);
  Rep k;
  k.rc = -1;
  if (!im.rc) {
    R.rc("map", b->call(OP_VMM_MAP, {im.v[0], 3}));
    k = b->call(OP_COUNT, {im.v[0], (int64_t)PAT});
    R.s("data", k.rc ? k.err : (k.v[0] == k.v[2] ? "intact" : "CHANGED"));
  }
  R.num("usedMiB.start", u0, 0);
  R.num("usedMiB.ownerAlive", u1, 0);
  R.num("usedMiB.onlyFdHeld", u2, 0);
  b->kill9();
  for (int f : fd) close(f);
  sleepMs(500);
  R.num("usedMiB.fdClosed", used(), 0);
  R.outcome =
      k.rc == 0 && k.v[0] == k.v[2] ? "memory outlives its creator while the fd is held" : "memory did NOT survive";
}
static void e_vmm_fd_outlives() {
  fdOutlives(false, true);
}
static void e_vmm_fd_outlives_no_nvml() {
  fdOutlives(false, false);
}  // only the fd keeps the device open
static void e_vmm_no_context_owner() {
  fdOutlives(true, true);
}
static void e_vmm_readonly() {
  A a = spawn();
  NEED(a);
  const int64_t n = 64 * (int64_t)MiB;
  Rep v = a->call(OP_VMM_CREATE, {n, 1});
  MUST(v, "create");
  a->call(OP_VMM_MAP, {v.v[0], 3});
  a->call(OP_FILL, {v.v[0], (int64_t)PAT});
  std::vector<int> fd;
  MUST(a->call(OP_VMM_EXPORT, {v.v[0]}, nullptr, {}, &fd), "export");
  const char* how[] = {"kernel", "memset", "h2d"};
  bool enforced = true;
  for (int t = 0; t < 3; t++) {
    A b = spawn();
    NEED(b);
    Rep im = b->call(OP_VMM_IMPORT, {n}, nullptr, fd);
    MUST(im, "import");
    Rep mp = b->call(OP_VMM_MAP, {im.v[0], CU_MEM_ACCESS_FLAGS_PROT_READ});
    if (t == 0) R.rc("mapProtRead", mp);
    if (mp.rc) {
      R.outcome = std::string("PROT_READ refused: ") + mp.err;
      for (int f : fd) close(f);
      return;
    }
    Rep k = b->call(OP_COUNT, {im.v[0], (int64_t)PAT});
    if (t == 0) R.s("read", k.rc ? k.err : yn(k.v[0] == k.v[2]));
    Rep w = t == 0   ? b->call(OP_POKE, {im.v[0], 1, 0})
            : t == 1 ? b->call(OP_MEMSET, {im.v[0], 7})
                     : b->call(OP_H2D, {im.v[0], 9});
    R.s(std::string("write.") + how[t], w.rc ? w.err : "SUCCEEDED");
    if (!w.rc) enforced = false;
  }
  Rep own = a->call(OP_COUNT, {v.v[0], (int64_t)PAT});
  R.s("ownerData", own.rc ? own.err : (own.v[0] == own.v[2] ? "intact" : "CHANGED"));
  A u = spawn();
  Rep im = u->call(OP_VMM_IMPORT, {n}, nullptr, fd);
  u->call(OP_VMM_MAP, {im.v[0], CU_MEM_ACCESS_FLAGS_PROT_READ});
  R.rc("importerUpgradesToRW", u->call(OP_VMM_SETACCESS, {im.v[0], CU_MEM_ACCESS_FLAGS_PROT_READWRITE}));
  Rep w = u->call(OP_POKE, {im.v[0], 1, 0});
  R.rc("writeAfterUpgrade", w);
  for (int f : fd) close(f);
  R.outcome = std::string(enforced ? "PROT_READ enforced" : "PROT_READ NOT enforced") +
              (w.rc ? "" : ", but the importer can lift it");
}
static void e_vmm_revoke() {
  A a = spawn(), b = spawn(), obs = spawn();
  NEED(a);
  NEED(b);
  NEED(obs);
  int64_t f0 = freeBytes(*obs);
  const int64_t n = 1 * (int64_t)GiB;
  Rep v = a->call(OP_VMM_CREATE, {n, 1});
  MUST(v, "create");
  a->call(OP_VMM_MAP, {v.v[0], 3});
  a->call(OP_FILL, {v.v[0], (int64_t)PAT});
  std::vector<int> fd;
  MUST(a->call(OP_VMM_EXPORT, {v.v[0]}, nullptr, {}, &fd), "export");
  Rep im = b->call(OP_VMM_IMPORT, {n}, nullptr, fd);
  MUST(im, "import");
  b->call(OP_VMM_MAP, {im.v[0], 3});
  for (int f : fd) close(f);
  Rep rx;
  std::vector<int> fd2;
  rx = b->call(OP_VMM_EXPORT, {im.v[0]}, nullptr, {}, &fd2);
  R.rc("importerReexportsFd", rx);
  if (!fd2.empty()) {
    Rep im3 = obs->call(OP_VMM_IMPORT, {n}, nullptr, fd2);
    R.rc("thirdImportsReexport", im3);
    if (!im3.rc) obs->call(OP_VMM_RELEASE, {im3.v[0]});
    for (int f : fd2) close(f);
  }
  R.rc("ownerUnmap", a->call(OP_VMM_UNMAP, {v.v[0]}));
  R.rc("ownerRelease", a->call(OP_VMM_RELEASE, {v.v[0]}));
  a->kill9();
  sleepMs(200);
  Rep k = b->call(OP_COUNT, {im.v[0], (int64_t)PAT});
  R.s("importerStillReads", k.rc ? k.err : yn(k.v[0] == k.v[2]));
  R.num("heldMiB", (f0 - freeBytes(*obs)) / 1048576.0, 0);
  b->kill9();
  R.num("freedAfterImporterDeathMs", waitFree(*obs, f0 - 64 * (int64_t)MiB), 0);
  R.outcome = k.rc == 0 ? "owner cannot revoke a mapping" : "mapping revoked";
}
static void e_vmm_partial_map() {
  A a = spawn(), b = spawn();
  NEED(a);
  NEED(b);
  Rep v = a->call(OP_VMM_CREATE, {64 * (int64_t)MiB, 1});
  MUST(v, "create");
  Rep p = a->call(OP_VMM_PARTIAL, {v.v[0]});
  MUST(p, "partial");
  R.i("mapHalf_rc", p.v[0]);
  R.i("mapAtOffset_rc", p.v[1]);
  R.i("setAccessAtOffset_rc", p.v[2]);
  std::vector<int> fd;
  a->call(OP_VMM_EXPORT, {v.v[0]}, nullptr, {}, &fd);
  Rep im = b->call(OP_VMM_IMPORT, {64 * (int64_t)MiB}, nullptr, fd);
  if (!im.rc) {
    Rep q = b->call(OP_VMM_PARTIAL, {im.v[0]});
    R.i("imported.mapHalf_rc", q.v[0]);
    R.i("imported.mapAtOffset_rc", q.v[1]);
  }
  for (int f : fd) close(f);
  R.outcome = p.v[0] == 0 && p.v[1] == 0 ? "part maps allowed" : "only whole allocations can be mapped";
}
static void zeroRound(const char* tag, const std::function<bool(Agent&, int64_t&, size_t)>& mk,
                      const std::function<void(Agent&, int64_t)>& rel, bool killOwner, size_t n) {
  std::string t = tag;
  A a = spawn();
  if (a->init.rc) return;
  int64_t s;
  if (!mk(*a, s, n)) {
    R.s(t, "alloc failed");
    return;
  }
  a->call(OP_FILL, {s, (int64_t)PAT2}, nullptr, {}, nullptr, 30000);
  if (killOwner)
    a->kill9();
  else
    rel(*a, s);
  A b = spawn();
  int64_t s2;
  if (b->init.rc || !mk(*b, s2, n)) {
    R.s(t, "alloc2 failed");
    return;
  }
  Rep k = b->call(OP_COUNT, {s2, (int64_t)PAT2}, nullptr, {}, nullptr, 30000);
  if (k.rc) {
    R.rc(t, k);
    return;
  }
  R.num(t + ".patternMiB", k.v[0] * 4.0 / MiB, 2);
  R.num(t + ".nonzeroMiB", k.v[1] * 4.0 / MiB, 2);
  if (k.v[0]) R.outcome = "OLD DATA SEEN in another process";
}
static bool mkMalloc(Agent& x, int64_t& s, size_t n) {
  Rep r = x.call(OP_MALLOC, {(int64_t)n});
  s = r.v[0];
  return !r.rc;
}
static bool mkVmm(Agent& x, int64_t& s, size_t n) {
  Rep r = x.call(OP_VMM_CREATE, {(int64_t)n, 1});
  s = r.v[0];
  return !r.rc && !x.call(OP_VMM_MAP, {s, 3}).rc;
}
static void e_fresh_zero() {
  R.outcome = "no old data seen across processes";
  size_t n = 12 * GiB;
  {
    A p = spawn();
    NEED(p);
    int64_t f = freeBytes(*p);
    if ((int64_t)n > f / 3) n = (size_t)(f / 3) / (2 * MiB) * (2 * MiB);
  }
  R.num("sizeGiB", n / (double)GiB, 1);
  zeroRound(
      "malloc.freed", mkMalloc, [](Agent& x, int64_t s) { x.call(OP_FREE, {s}); }, false, n);
  zeroRound("malloc.killed", mkMalloc, nullptr, true, n);
  zeroRound(
      "vmm.released", mkVmm,
      [](Agent& x, int64_t s) {
        x.call(OP_VMM_UNMAP, {s});
        x.call(OP_VMM_RELEASE, {s});
      },
      false, n);
  zeroRound("vmm.killed", mkVmm, nullptr, true, n);
  // Does the user-mode driver clear its own freed blocks for the same process?
  A a = spawn();
  NEED(a);
  for (size_t s : {1 * MiB, 64 * MiB, 2 * GiB}) {
    Rep m = a->call(OP_MALLOC, {(int64_t)s});
    a->call(OP_FILL, {m.v[0], (int64_t)PAT2});
    a->call(OP_FREE, {m.v[0]});
    Rep m2 = a->call(OP_MALLOC, {(int64_t)s});
    Rep k = a->call(OP_COUNT, {m2.v[0], (int64_t)PAT2});
    R.s("sameProc" + szName(s), k.rc ? k.err : (k.v[0] ? "old data" : k.v[1] ? "nonzero" : "zero"));
    a->call(OP_FREE, {m2.v[0]});
  }
}
static void e_small_alloc_leak() {  // does exporting a small cudaMalloc expose its neighbours?
  A a = spawn(), b = spawn();
  NEED(a);
  NEED(b);
  Rep x = a->call(OP_MALLOC, {512 * (int64_t)KiB}), y = a->call(OP_MALLOC, {512 * (int64_t)KiB});
  MUST(x, "malloc");
  MUST(y, "malloc");
  a->call(OP_FILL, {x.v[0], (int64_t)PAT});
  a->call(OP_FILL, {y.v[0], (int64_t)PAT2});
  R.num("neighbourDistanceKiB", (y.v[1] - x.v[1]) / (double)KiB, 0);
  Rep g = a->call(OP_IPC_GET, {x.v[0], 0});
  MUST(g, "get");
  Rep o = b->call(OP_IPC_OPEN, {512 * (int64_t)KiB}, g.blob);
  MUST(o, "open");
  Rep rg = b->call(OP_RANGE, {o.v[0], 0});
  R.num("rangeSeenKiB", rg.v[1] / (double)KiB, 0);
  R.num("offsetInRangeKiB", (rg.v[2] - rg.v[0]) / (double)KiB, 0);
  b->call(OP_RANGE, {o.v[0], 1 * (int64_t)MiB});  // read past the exported block
  Rep k = b->call(OP_COUNT, {o.v[0], (int64_t)PAT2});
  R.s("readNeighbour", k.rc ? k.err : (k.v[0] ? "SECRET VISIBLE" : "not found"));
  R.outcome = k.rc == 0 && k.v[0] ? "small exports leak neighbours" : "no leak seen at this distance";
}
static void e_event_order() {
  A a = spawn(), b = spawn();
  NEED(a);
  NEED(b);
  const int64_t n = 64 * (int64_t)MiB;
  Rep m = a->call(OP_MALLOC, {n});
  a->call(OP_FILL, {m.v[0], 0});
  Rep g = a->call(OP_IPC_GET, {m.v[0], 0});
  Rep o = b->call(OP_IPC_OPEN, {n}, g.blob);
  MUST(o, "open");
  Rep e = a->call(OP_EV_CREATE);
  MUST(e, "event create");
  Rep eh = a->call(OP_EV_HANDLE, {e.v[0]});
  MUST(eh, "event handle");
  Rep eo = b->call(OP_EV_OPEN, {}, eh.blob);
  MUST(eo, "event open");
  R.num("evHandleUs", eh.d[0]);
  R.num("evOpenUs", eo.d[0]);
  MUST(a->call(OP_SPIN_WRITE, {m.v[0], (int64_t)PAT, 400}), "spin");
  MUST(a->call(OP_EV_RECORD, {e.v[0]}), "record");
  Rep q = b->call(OP_EV_QUERY, {eo.v[0]});
  R.s("queryWhileRunning", q.err);
  Rep early = b->call(OP_COUNT, {o.v[0], (int64_t)PAT});
  R.s("unorderedReadSees", early.v[0] == early.v[2] ? "new" : "old");
  double t0 = nowUs();
  Rep k = b->call(OP_WAIT_COUNT, {o.v[0], (int64_t)PAT, eo.v[0]});
  R.num("waitMs", (nowUs() - t0) * 1e-3);
  R.outcome =
      k.rc ? k.err : (k.v[0] == k.v[2] ? "stream wait on an IPC event orders across processes" : "ORDER VIOLATED");
}
static void e_event_exporter_killed() {
  A a = spawn(), b = spawn();
  NEED(a);
  NEED(b);
  Rep m = a->call(OP_MALLOC, {2 * (int64_t)MiB});
  Rep e = a->call(OP_EV_CREATE);
  Rep eh = a->call(OP_EV_HANDLE, {e.v[0]});
  Rep eo = b->call(OP_EV_OPEN, {}, eh.blob);
  MUST(eo, "event open");
  a->call(OP_SPIN_WRITE, {m.v[0], 1, 3000});
  a->call(OP_EV_RECORD, {e.v[0]});
  Rep q0 = b->call(OP_EV_QUERY, {eo.v[0]});
  R.s("queryBefore", q0.err);
  a->kill9();
  Rep q1 = b->call(OP_EV_QUERY, {eo.v[0]}, nullptr, {}, nullptr, 4000);
  R.s("queryAfterKill", q1.err);
  double t0 = nowUs();
  Rep s = b->call(OP_EV_SYNC, {eo.v[0]}, nullptr, {}, nullptr, 6000);
  R.num("syncMs", (nowUs() - t0) * 1e-3, 0);
  R.outcome = s.rc == 996 ? "WAITER HANGS on a dead exporter's event"
              : s.rc      ? std::string("waiter gets ") + s.err
                          : "waiter completes";
  if (s.rc != 996) R.rc("waiterContextAfter", b->call(OP_SYNC));
}
static void e_memset_bw() {
  A a = spawn(), b = spawn();
  NEED(a);
  NEED(b);
  Rep m = a->call(OP_MALLOC, {4 * (int64_t)GiB});
  MUST(m, "malloc");
  for (size_t s : {2 * MiB, 64 * MiB, 1 * GiB, 4 * GiB}) {
    Rep r = a->call(OP_BENCH_MEMSET, {m.v[0], 7, (int64_t)s});
    if (r.rc) continue;
    R.num(szName(s) + ".us", r.d[0]);
    R.num(szName(s) + ".wallUs", r.d[1]);
    R.num(szName(s) + ".GBps", r.d[2], 0);
  }
  Rep g = a->call(OP_IPC_GET, {m.v[0], 0});
  Rep o = b->call(OP_IPC_OPEN, {4 * (int64_t)GiB}, g.blob);
  if (!o.rc) {
    Rep r = b->call(OP_BENCH_MEMSET, {o.v[0], 7, 4 * (int64_t)GiB});
    R.num("imported4G.GBps", r.d[2], 0);
  }
}
static void e_access_speed() {
  A a = spawn(), b = spawn();
  NEED(a);
  NEED(b);
  const int64_t n = 4 * (int64_t)GiB;
  Rep m = a->call(OP_MALLOC, {n});
  MUST(m, "malloc");
  a->call(OP_FILL, {m.v[0], 1});
  Rep l = a->call(OP_BW, {m.v[0], 9});
  Rep g = a->call(OP_IPC_GET, {m.v[0], 0});
  Rep o = b->call(OP_IPC_OPEN, {n}, g.blob);
  MUST(o, "open");
  Rep i = b->call(OP_BW, {o.v[0], 9});
  R.num("local.copyGBps", l.d[0], 0);
  R.num("local.readGBps", l.d[1], 0);
  R.num("ipc.copyGBps", i.d[0], 0);
  R.num("ipc.readGBps", i.d[1], 0);
  Rep v = a->call(OP_VMM_CREATE, {n, 1});
  std::vector<int> fd;
  if (!v.rc && !a->call(OP_VMM_EXPORT, {v.v[0]}, nullptr, {}, &fd).rc) {
    Rep im = b->call(OP_VMM_IMPORT, {n}, nullptr, fd);
    if (!im.rc && !b->call(OP_VMM_MAP, {im.v[0], 3}).rc) {
      Rep w = b->call(OP_BW, {im.v[0], 9});
      R.num("vmm.copyGBps", w.d[0], 0);
      R.num("vmm.readGBps", w.d[1], 0);
    }
    for (int f : fd) close(f);
  }
  double rel = l.d[0] > 0 ? i.d[0] / l.d[0] : 0;
  R.outcome = std::fabs(rel - 1) < 0.05 ? "equal within 5%" : "DIFFERENT";
}
static void e_many_handles() {
  A a = spawn(), b = spawn();
  NEED(a);
  NEED(b);
  const int N = 1000;
  std::vector<int64_t> slots;
  std::vector<double> t;
  int opened = 0;
  std::string err;
  double t0 = nowUs();
  for (int i = 0; i < N; i++) {
    Rep m = a->call(OP_MALLOC, {2 * (int64_t)MiB});
    if (m.rc) {
      err = std::string("malloc ") + m.err;
      break;
    }
    Rep g = a->call(OP_IPC_GET, {m.v[0], 0});
    Rep o = b->call(OP_IPC_OPEN, {2 * (int64_t)MiB}, g.blob);
    if (o.rc) {
      err = std::string("open ") + o.err;
      break;
    }
    slots.push_back(o.v[0]);
    t.push_back(o.d[0]);
    opened++;
  }
  R.i("opened", opened);
  if (opened >= 200) {
    R.num("first100us", median({t.begin(), t.begin() + 100}));
    R.num("last100us", median({t.end() - 100, t.end()}));
  }
  R.num("totalMs", (nowUs() - t0) * 1e-3, 0);
  t0 = nowUs();
  int bad = 0;
  for (auto s : slots) bad += b->call(OP_IPC_CLOSE, {s}).rc != 0;
  R.num("closeAllMs", (nowUs() - t0) * 1e-3, 0);
  R.i("closeErrors", bad);
  int fdOk = 0;
  std::vector<int> fds;
  for (int i = 0; i < N; i++) {  // 1000 VMM fds, each imported and mapped
    Rep v = a->call(OP_VMM_CREATE, {2 * (int64_t)MiB, 1});
    if (v.rc) break;
    std::vector<int> fd;
    if (a->call(OP_VMM_EXPORT, {v.v[0]}, nullptr, {}, &fd).rc || fd.empty()) break;
    Rep im = b->call(OP_VMM_IMPORT, {2 * (int64_t)MiB}, nullptr, fd);
    for (int f : fd) close(f);
    if (im.rc || b->call(OP_VMM_MAP, {im.v[0], 3}).rc) break;
    fdOk++;
  }
  R.i("vmmImported", fdOk);
  if (!err.empty()) R.s("error", err);
  R.outcome = opened == N && fdOk == N ? "1000 of each" : "limit met";
}
static void e_scm_limit() {
  int sv[2];
  if (socketpair(AF_UNIX, SOCK_SEQPACKET, 0, sv)) {
    R.outcome = "socketpair failed";
    return;
  }
  int d = open("/dev/null", O_RDONLY), e = 0;
  char c = 0;
  for (int n : {253, 254}) {
    std::vector<int> f(n, d);
    bool ok = sendFds(sv[0], &c, 1, f.data(), n, &e);
    R.s("send" + std::to_string(n), ok ? "ok" : strerror(e));
  }
  std::vector<int> got;
  recvFds(sv[1], &c, 1, &got, 1000);
  R.i("received", (long long)got.size());
  for (int f : got) close(f);
  close(sv[0]);
  close(sv[1]);
  close(d);
}
static void shareWith(AgentOpt o) {
  A a = spawn();
  NEED(a);
  A b = spawn(o);
  if (b->init.rc || b->dead) {
    R.outcome = std::string("peer could not start: ") + b->init.err;
    return;
  }
  const int64_t n = 64 * (int64_t)MiB;
  Rep m = a->call(OP_MALLOC, {n});
  a->call(OP_FILL, {m.v[0], (int64_t)PAT});
  Rep g = a->call(OP_IPC_GET, {m.v[0], 0});
  Rep op = b->call(OP_IPC_OPEN, {n}, g.blob);
  R.rc("legacyOpen", op);
  if (!op.rc) {
    Rep k = b->call(OP_COUNT, {op.v[0], (int64_t)PAT});
    R.s("legacyRead", k.rc ? k.err : yn(k.v[0] == k.v[2]));
  }
  Rep v = a->call(OP_VMM_CREATE, {n, 1});
  a->call(OP_VMM_MAP, {v.v[0], 3});
  a->call(OP_FILL, {v.v[0], (int64_t)PAT});
  std::vector<int> fd;
  a->call(OP_VMM_EXPORT, {v.v[0]}, nullptr, {}, &fd);
  Rep im = b->call(OP_VMM_IMPORT, {n}, nullptr, fd);
  R.rc("fdImport", im);
  if (!im.rc) {
    R.rc("fdMap", b->call(OP_VMM_MAP, {im.v[0], 3}));
    Rep k = b->call(OP_COUNT, {im.v[0], (int64_t)PAT});
    R.s("fdRead", k.rc ? k.err : yn(k.v[0] == k.v[2]));
  }
  for (int f : fd) close(f);
  Rep ev = a->call(OP_EV_CREATE);
  Rep eh = a->call(OP_EV_HANDLE, {ev.v[0]});
  if (!eh.rc) R.rc("eventOpen", b->call(OP_EV_OPEN, {}, eh.blob));
  R.outcome = std::string("legacy ") + (op.rc ? "NO" : "yes") + ", fd " + (im.rc ? "NO" : "yes");
}
static void e_cross_uid() {
  if (geteuid()) {
    R.outcome = "skipped (not root)";
    return;
  }
  AgentOpt o;
  o.uid = 65534;
  shareWith(o);
}
static void e_new_pid_namespace() {
  if (geteuid()) {
    R.outcome = "skipped (not root)";
    return;
  }
  AgentOpt o;
  o.newPidNs = true;
  shareWith(o);
}
static void e_mempool_ipc() {
  A a = spawn(), b = spawn();
  NEED(a);
  NEED(b);
  const int64_t n = 256 * (int64_t)MiB;
  Rep p = a->call(OP_POOL_CREATE);
  MUST(p, "pool create");
  Rep m = a->call(OP_POOL_ALLOC, {p.v[0], n});
  MUST(m, "pool alloc");
  a->call(OP_FILL, {m.v[0], (int64_t)PAT});
  std::vector<int> fd;
  Rep x = a->call(OP_POOL_EXPORT, {p.v[0]}, nullptr, {}, &fd);
  MUST(x, "pool export");
  Rep xp = a->call(OP_POOL_EXPORT_PTR, {m.v[0]});
  MUST(xp, "export ptr");
  Rep im = b->call(OP_POOL_IMPORT, {}, nullptr, fd);
  MUST(im, "pool import");
  Rep ip = b->call(OP_POOL_IMPORT_PTR, {im.v[0], n}, xp.blob);
  MUST(ip, "import ptr");
  Rep k = b->call(OP_COUNT, {ip.v[0], (int64_t)PAT});
  R.s("read", k.rc ? k.err : yn(k.v[0] == k.v[2]));
  R.num("exportUs", x.d[0]);
  R.num("importPoolUs", im.d[0]);
  R.num("importPtrUs", ip.d[0]);
  R.rc("allocFromImportedPool", b->call(OP_POOL_ALLOC, {im.v[0], n}));
  Rep lg = a->call(OP_IPC_GET, {m.v[0], 0});
  R.rc("legacyIpcOnPoolPtr", lg);
  R.i("legacyCapable", lg.v[2]);
  for (int f : fd) close(f);
  a->kill9();
  sleepMs(200);
  Rep k2 = b->call(OP_COUNT, {ip.v[0], (int64_t)PAT});
  R.s("readAfterExporterKilled", k2.rc ? k2.err : yn(k2.v[0] == k2.v[2]));
}
static void e_ipc_capable_types() {
  A a = spawn();
  NEED(a);
  Rep m = a->call(OP_MALLOC, {4 * (int64_t)MiB});
  Rep g = a->call(OP_IPC_GET, {m.v[0], 0});
  R.rc("cudaMalloc", g);
  R.i("cudaMalloc.cap", g.v[2]);
  Rep as = a->call(OP_ASYNC_ALLOC, {4 * (int64_t)MiB});
  if (!as.rc) {
    g = a->call(OP_IPC_GET, {as.v[0], 0});
    R.rc("cudaMallocAsync", g);
    R.i("cudaMallocAsync.cap", g.v[2]);
  }
  Rep v = a->call(OP_VMM_CREATE, {4 * (int64_t)MiB, 1});
  if (!v.rc && !a->call(OP_VMM_MAP, {v.v[0], 3}).rc) {
    g = a->call(OP_IPC_GET, {v.v[0], 0});
    R.rc("vmm", g);
    R.i("vmm.cap", g.v[2]);
  }
}
static void e_crash_isolation() {
  A a = spawn(), b = spawn();
  NEED(a);
  NEED(b);
  Rep m = a->call(OP_MALLOC, {64 * (int64_t)MiB});
  a->call(OP_FILL, {m.v[0], (int64_t)PAT});
  Rep g = a->call(OP_IPC_GET, {m.v[0], 0});
  Rep o = b->call(OP_IPC_OPEN, {64 * (int64_t)MiB}, g.blob);
  MUST(o, "open");
  Rep w = b->call(OP_WILD);
  R.rc("importerFault", w);
  R.rc("importerContextAfter", b->call(OP_SYNC));
  Rep k = a->call(OP_COUNT, {m.v[0], (int64_t)PAT});
  R.s("owner", k.rc ? k.err : (k.v[0] == k.v[2] ? "unharmed" : "CHANGED"));
  R.outcome = k.rc ? "FAULT SPREADS to the owner" : "fault stays in the importer";
}
static void e_graph_imported() {
  A a = spawn(), b = spawn();
  NEED(a);
  NEED(b);
  const int64_t n = 64 * (int64_t)MiB;
  Rep m = a->call(OP_MALLOC, {n});
  Rep g = a->call(OP_IPC_GET, {m.v[0], 0});
  Rep o = b->call(OP_IPC_OPEN, {n}, g.blob);
  MUST(o, "open");
  Rep x = b->call(OP_GRAPH, {o.v[0], (int64_t)PAT});
  MUST(x, "graph");
  Rep k = a->call(OP_COUNT, {m.v[0], (int64_t)PAT});
  R.outcome = k.v[0] == k.v[2] ? "graph replay on imported memory works" : "WRONG DATA";
}

static void e_free_blocks() {  // finds the calls that wait for running kernels, own or another process's
  A a = spawn(), b = spawn();
  NEED(a);
  NEED(b);
  const int64_t n = 64 * (int64_t)MiB;
  const int spin = 400;  // ms
  Rep work = a->call(OP_MALLOC, {n}), x = a->call(OP_MALLOC, {n}), y = a->call(OP_MALLOC, {n});
  Rep v = a->call(OP_VMM_CREATE, {n, 1});
  a->call(OP_VMM_MAP, {v.v[0], 3});
  MUST(y, "malloc");
  Rep g = a->call(OP_IPC_GET, {y.v[0], 0});
  Rep o = b->call(OP_IPC_OPEN, {n}, g.blob);
  MUST(o, "open");
  Rep bw = b->call(OP_MALLOC, {n});
  auto ms = [&](const char* k, const Rep& r) {
    if (r.rc)
      R.rc(k, r);
    else
      R.num(k, r.d[0] * 1e-3, 2);
  };
  a->call(OP_SPIN_WRITE, {work.v[0], 1, spin});
  Rep m = a->call(OP_MALLOC, {n});
  ms("own.cudaMallocMs", m);
  ms("own.cudaFreeMs", a->call(OP_FREE, {x.v[0]}));
  a->call(OP_SYNC);
  a->call(OP_SPIN_WRITE, {work.v[0], 1, spin});
  ms("own.cuMemUnmapMs", a->call(OP_VMM_UNMAP, {v.v[0]}));
  a->call(OP_SYNC);
  b->call(OP_SPIN_WRITE, {bw.v[0], 1, spin});
  ms("importer.ipcCloseMs", b->call(OP_IPC_CLOSE, {o.v[0]}));
  b->call(OP_SYNC);
  b->call(OP_SPIN_WRITE, {bw.v[0], 1, spin});
  Rep m2 = a->call(OP_MALLOC, {n});
  ms("otherProcBusy.cudaMallocMs", m2);
  ms("otherProcBusy.cudaFreeMs", a->call(OP_FREE, {m2.v[0]}));
  Rep ms2 = a->call(OP_MEMSET, {work.v[0], 0});
  R.rc("otherProcBusy.memset", ms2);
  b->call(OP_SYNC);
  R.outcome = "spin was " + std::to_string(spin) + " ms";
}

// ---------------------------------------------------------------- table
struct Exp {
  const char* name;
  int timeout;
  void (*fn)();
};
static const Exp TABLE[] = {
    {"env", 40, e_env},
    {"context_overhead", 40, e_context_overhead},
    {"vmm_fd_outlives_creator", 30, e_vmm_fd_outlives},
    {"vmm_fd_outlives_no_nvml", 30, e_vmm_fd_outlives_no_nvml},
    {"vmm_owner_without_context", 30, e_vmm_no_context_owner},
    {"ipc_exporter_killed", 30, e_ipc_exporter_killed},
    {"ipc_exporter_free", 30, e_ipc_exporter_free},
    {"ipc_importer_killed", 30, e_ipc_importer_killed},
    {"kill_inflight_writes", 30, e_kill_inflight},
    {"event_order", 30, e_event_order},
    {"event_exporter_killed", 30, e_event_exporter_killed},
    {"fresh_memory_zero", 60, e_fresh_zero},
    {"small_alloc_leak", 20, e_small_alloc_leak},
    {"vmm_readonly", 40, e_vmm_readonly},
    {"vmm_revoke", 30, e_vmm_revoke},
    {"vmm_partial_map", 20, e_vmm_partial_map},
    {"meminfo_deltas", 30, e_meminfo_deltas},
    {"ipc_second_open", 30, e_ipc_second_open},
    {"cross_uid", 20, e_cross_uid},
    {"new_pid_namespace", 20, e_new_pid_namespace},
    {"crash_isolation", 20, e_crash_isolation},
    {"free_blocks_on_kernels", 20, e_free_blocks},
    {"malloc_latency", 40, e_malloc_latency},
    {"malloc_async_latency", 30, e_malloc_async},
    {"ipc_latency", 40, e_ipc_latency},
    {"vmm_latency", 50, e_vmm_latency},
    {"memset_bandwidth", 30, e_memset_bw},
    {"access_speed", 30, e_access_speed},
    {"many_handles", 45, e_many_handles},
    {"mempool_ipc", 20, e_mempool_ipc},
    {"ipc_capable_types", 20, e_ipc_capable_types},
    {"graph_on_imported", 20, e_graph_imported},
    {"scm_rights_limit", 5, e_scm_limit},
};
const std::vector<std::pair<std::string, int>>& experimentList() {
  static std::vector<std::pair<std::string, int>> v;
  if (v.empty())
    for (auto& e : TABLE) v.push_back({e.name, e.timeout});
  return v;
}
int expMain(const char* name) {
  signal(SIGPIPE, SIG_IGN);
  rlimit l;  // an experiment uses 1000 fds
  if (!getrlimit(RLIMIT_NOFILE, &l) && l.rlim_cur < 8192) {
    l.rlim_cur = std::min<rlim_t>(8192, l.rlim_max);
    setrlimit(RLIMIT_NOFILE, &l);
  }
  for (auto& e : TABLE)
    if (!strcmp(e.name, name)) {
      double t0 = nowUs();
      e.fn();
      double sec = (nowUs() - t0) * 1e-6;
      std::string line = std::string("@@LINE ") + name + ": " + R.outcome + " (";
      std::string js = std::string("@@JSON {\"name\":\"") + name + "\",\"outcome\":\"";
      for (char c : R.outcome) {
        if (c == '"' || c == '\\') js += '\\';
        js += c;
      }
      char b[64];
      snprintf(b, sizeof b, "\",\"seconds\":%.2f,\"figures\":{", sec);
      js += b;
      bool first = true;
      for (auto& k : R.kv) {
        std::string val = k.second;
        if (!val.empty() && val[0] == '"') val = val.substr(1, val.size() - 2);
        line += (first ? "" : ", ") + k.first + "=" + val;
        js += std::string(first ? "" : ",") + "\"" + k.first + "\":" + k.second;
        first = false;
      }
      printf("%s)\n%s}}\n", line.c_str(), js.c_str());
      fflush(stdout);
      return 0;
    }
  return 2;
}
