// SPDX-License-Identifier: Apache-2.0
// agent.cu - the CUDA side of the probe. Executes a command at a time.
#include "common.h"

#define S2(x) #x
#define S1(x) S2(x)
#define DRV_LIST(X)                                                                             \
  X(cuInit) X(cuDriverGetVersion) X(cuDeviceGet) X(cuDeviceGetAttribute) X(cuGetErrorName)      \
  X(cuMemCreate) X(cuMemRelease) X(cuMemAddressReserve) X(cuMemAddressFree) X(cuMemMap)         \
  X(cuMemUnmap) X(cuMemSetAccess) X(cuMemExportToShareableHandle)                               \
  X(cuMemImportFromShareableHandle) X(cuMemGetAllocationGranularity) X(cuPointerGetAttribute)   \
  X(cuMemGetAddressRange) X(cuDeviceGetUuid)

struct Drv {
#define X(n) decltype(&::n) n##_p = nullptr;
  DRV_LIST(X)
#undef X
  bool load() {
    void* h = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    if (!h) return false;
    bool ok = true;
#define X(n)                                                            \
  n##_p = reinterpret_cast<decltype(&::n)>(dlsym(h, S1(n)));            \
  if (!n##_p) { fprintf(stderr, "missing %s\n", S1(n)); ok = false; }
    DRV_LIST(X)
#undef X
    return ok;
  }
};
static Drv D;

// ---------------------------------------------------------------- kernels
__device__ __forceinline__ unsigned long long gtimer() {
  unsigned long long t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}
__global__ void kFill(uint32_t* p, size_t n, uint32_t v) {
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) p[i] = v;
}
__global__ void kCount(const uint32_t* p, size_t n, uint32_t v, unsigned long long* out) {
  unsigned long long eq = 0, nz = 0;
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
    uint32_t x = p[i];
    eq += x == v;
    nz += x != 0;
  }
  if (eq) atomicAdd(out, eq);
  if (nz) atomicAdd(out + 1, nz);
}
__global__ void kPoke(uint32_t* p, uint32_t v) { *p = v; }
__global__ void kCopy(const uint4* a, uint4* b, size_t n) {
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) b[i] = a[i];
}
__global__ void kSum(const uint4* a, size_t n, unsigned long long* out) {
  unsigned long long s = 0;
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
    uint4 x = a[i];
    s += x.x ^ x.y ^ x.z ^ x.w;
  }
  if (s == 0x1234567890abcdefULL) *out = s;  // keeps the loads alive
}
__global__ void kSpin(unsigned long long ns) {
  unsigned long long t0 = gtimer();
  while (gtimer() - t0 < ns) __nanosleep(1000);
}
__global__ void kInc(volatile unsigned long long* p, unsigned long long ns) {
  unsigned long long t0 = gtimer();
  while (gtimer() - t0 < ns) { *p = *p + 1; __threadfence_system(); }
}

// ---------------------------------------------------------------- state
struct Slot {
  bool used = false;
  CUdeviceptr ptr = 0;
  size_t size = 0;
  CUmemGenericAllocationHandle h = 0;
  bool hasH = false, mapped = false, reserved = false;
  cudaEvent_t ev = nullptr;
  cudaMemPool_t pool = nullptr;
};
static std::vector<Slot> S;
static cudaStream_t ST = nullptr;
static unsigned long long* CNT = nullptr;
static int DEV = 0;

static int newSlot() {
  for (size_t i = 0; i < S.size(); i++)
    if (!S[i].used) { S[i] = Slot(); S[i].used = true; return (int)i; }
  S.emplace_back();
  S.back().used = true;
  return (int)S.size() - 1;
}
static CUmemAllocationProp prop(bool exportable) {
  CUmemAllocationProp p{};
  p.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  p.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  p.location.id = DEV;
  p.requestedHandleTypes = exportable ? CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR : CU_MEM_HANDLE_TYPE_NONE;
  return p;
}
static CUmemAccessDesc access(int flags) {
  CUmemAccessDesc d{};
  d.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  d.location.id = DEV;
  d.flags = (CUmemAccess_flags)flags;
  return d;
}
static void setRc(Rep& r, CUresult e) {
  r.rc = (int)e;
  r.kind = 1;
  const char* s = nullptr;
  if (D.cuGetErrorName_p) D.cuGetErrorName_p(e, &s);
  snprintf(r.err, sizeof r.err, "%s", s ? s : "?");
}
static void setRc(Rep& r, cudaError_t e) {
  r.rc = (int)e;
  r.kind = 2;
  snprintf(r.err, sizeof r.err, "%s", cudaGetErrorName(e));
}
static cudaError_t syncRc() {
  cudaError_t e = cudaStreamSynchronize(ST);
  cudaError_t l = cudaGetLastError();
  return e != cudaSuccess ? e : l;
}
#define RT(x) do { cudaError_t e_ = (x); if (e_ != cudaSuccess) { setRc(r, e_); return; } } while (0)
#define DR(x) do { CUresult e_ = (x); if (e_ != CUDA_SUCCESS) { setRc(r, e_); return; } } while (0)

static void countOn(cudaStream_t st, Slot& s, uint32_t val, Rep& r) {
  RT(cudaMemsetAsync(CNT, 0, 16, st));
  kCount<<<1024, 256, 0, st>>>((const uint32_t*)s.ptr, s.size / 4, val, CNT);
  RT(cudaGetLastError());
  unsigned long long h[2];
  RT(cudaMemcpyAsync(h, CNT, 16, cudaMemcpyDeviceToHost, st));
  RT(cudaStreamSynchronize(st));
  r.v[0] = (int64_t)h[0];       // words equal to val
  r.v[1] = (int64_t)h[1];       // nonzero words
  r.v[2] = (int64_t)(s.size / 4);
}

static void handle(const Req& q, const std::vector<int>& fds, Rep& r, std::vector<int>& outFds) {
  auto slot = [&](int64_t i) -> Slot& {
    static Slot dummy;
    return i >= 0 && i < (int64_t)S.size() ? S[i] : (dummy = Slot(), dummy);
  };
  switch (q.op) {
    case OP_PING: return;
    case OP_INIT: {  // a0: 0 = full context, 1 = cuInit only
      if (!D.cuInit_p && !D.load()) { r.rc = 999; snprintf(r.err, sizeof r.err, "no libcuda.so.1"); return; }
      double t0 = nowUs();
      DR(D.cuInit_p(0));
      r.d[0] = nowUs() - t0;
      CUdevice d;
      DR(D.cuDeviceGet_p(&d, DEV));
      if (q.a[0] == 1) return;
      t0 = nowUs();
      RT(cudaSetDevice(DEV));
      RT(cudaFree(nullptr));
      r.d[1] = nowUs() - t0;
      t0 = nowUs();
      RT(cudaStreamCreateWithFlags(&ST, cudaStreamNonBlocking));
      RT(cudaMalloc(&CNT, 4096));
      kPoke<<<1, 1, 0, ST>>>((uint32_t*)CNT, 1u);  // loads the module
      RT(syncRc());
      r.d[2] = nowUs() - t0;
      return;
    }
    case OP_ATTR: {
      int v = 0;
      CUdevice d;
      DR(D.cuDeviceGet_p(&d, DEV));
      const CUdevice_attribute at[] = {
          CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
          CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
          CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED,
          CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES,
          CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED,
          CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED,
          CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED,
          CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED,
          CU_DEVICE_ATTRIBUTE_COMPUTE_MODE};
      for (int i = 0; i < 9; i++) { v = -1; D.cuDeviceGetAttribute_p(&v, at[i], d); r.v[i] = v; }
      CUmemAllocationProp p = prop(true);
      size_t g = 0, g2 = 0;
      D.cuMemGetAllocationGranularity_p(&g, &p, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
      D.cuMemGetAllocationGranularity_p(&g2, &p, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
      r.d[0] = (double)g;
      r.d[1] = (double)g2;
      int dv = 0;
      D.cuDriverGetVersion_p(&dv);
      r.d[2] = dv;
      int rv = 0;
      cudaRuntimeGetVersion(&rv);
      r.d[3] = rv;
      cudaDeviceProp dp;
      if (cudaGetDeviceProperties(&dp, DEV) == cudaSuccess) {
        snprintf((char*)r.blob, sizeof r.blob, "%.100s", dp.name);
        r.d[4] = dp.major * 10 + dp.minor;
        r.d[5] = dp.multiProcessorCount;
        r.d[6] = (double)dp.totalGlobalMem;
      }
      return;
    }
    case OP_MALLOC: {  // a0 size
      void* p = nullptr;
      double t0 = nowUs();
      cudaError_t e = cudaMalloc(&p, (size_t)q.a[0]);
      r.d[0] = nowUs() - t0;
      RT(e);
      int i = newSlot();
      S[i].ptr = (CUdeviceptr)p;
      S[i].size = (size_t)q.a[0];
      r.v[0] = i;
      r.v[1] = (int64_t)p;
      return;
    }
    case OP_ASYNC_ALLOC: {  // a0 size, from the default pool
      void* p = nullptr;
      RT(cudaMallocAsync(&p, (size_t)q.a[0], ST));
      RT(syncRc());
      int i = newSlot();
      S[i].ptr = (CUdeviceptr)p;
      S[i].size = (size_t)q.a[0];
      r.v[0] = i;
      return;
    }
    case OP_FREE: {
      Slot& s = slot(q.a[0]);
      double t0 = nowUs();
      cudaError_t e = cudaFree((void*)s.ptr);
      r.d[0] = nowUs() - t0;
      s.used = false;
      RT(e);
      return;
    }
    case OP_FILL: {  // a0 slot, a1 value
      Slot& s = slot(q.a[0]);
      kFill<<<1024, 256, 0, ST>>>((uint32_t*)s.ptr, s.size / 4, (uint32_t)q.a[1]);
      RT(syncRc());
      return;
    }
    case OP_COUNT: countOn(ST, slot(q.a[0]), (uint32_t)q.a[1], r); return;
    case OP_READ64: {
      Slot& s = slot(q.a[0]);
      unsigned long long v = 0;
      RT(cudaMemcpyAsync(&v, (void*)s.ptr, 8, cudaMemcpyDeviceToHost, ST));
      RT(cudaStreamSynchronize(ST));
      r.v[0] = (int64_t)v;
      return;
    }
    case OP_MEMINFO: {
      size_t f = 0, t = 0;
      double t0 = nowUs();
      RT(cudaMemGetInfo(&f, &t));
      r.d[0] = nowUs() - t0;
      r.v[0] = (int64_t)f;
      r.v[1] = (int64_t)t;
      return;
    }
    case OP_IPC_GET: {  // a0 slot, a1 byte offset added to the pointer
      Slot& s = slot(q.a[0]);
      cudaIpcMemHandle_t h;
      double t0 = nowUs();
      cudaError_t e = cudaIpcGetMemHandle(&h, (void*)(s.ptr + q.a[1]));
      r.d[0] = nowUs() - t0;
      int cap = -1;
      D.cuPointerGetAttribute_p(&cap, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, s.ptr);
      r.v[2] = cap;
      (void)cudaGetLastError();
      RT(e);
      memcpy(r.blob, &h, 64);
      return;
    }
    case OP_IPC_OPEN: {  // blob handle, a0 size for later checks
      cudaIpcMemHandle_t h;
      memcpy(&h, q.blob, 64);
      void* p = nullptr;
      double t0 = nowUs();
      cudaError_t e = cudaIpcOpenMemHandle(&p, h, cudaIpcMemLazyEnablePeerAccess);
      r.d[0] = nowUs() - t0;
      (void)cudaGetLastError();
      RT(e);
      int i = newSlot();
      S[i].ptr = (CUdeviceptr)p;
      S[i].size = (size_t)q.a[0];
      r.v[0] = i;
      r.v[1] = (int64_t)p;
      return;
    }
    case OP_IPC_CLOSE: {
      Slot& s = slot(q.a[0]);
      double t0 = nowUs();
      cudaError_t e = cudaIpcCloseMemHandle((void*)s.ptr);
      r.d[0] = nowUs() - t0;
      (void)cudaGetLastError();
      s.used = false;
      RT(e);
      return;
    }
    case OP_RANGE: {  // a0 slot, a1 new size to set; returns the driver's view of the slot's allocation
      Slot& s = slot(q.a[0]);
      CUdeviceptr b = 0;
      size_t n = 0;
      if (q.a[1]) { s.size = (size_t)q.a[1]; }
      DR(D.cuMemGetAddressRange_p(&b, &n, s.ptr));
      r.v[0] = (int64_t)b;
      r.v[1] = (int64_t)n;
      r.v[2] = (int64_t)s.ptr;
      return;
    }
    case OP_BENCH_MALLOC: {  // a0 size, a1 N
      std::vector<double> m, f;
      for (int i = 0; i < q.a[1]; i++) {
        void* p;
        double t0 = nowUs();
        RT(cudaMalloc(&p, (size_t)q.a[0]));
        double t1 = nowUs();
        RT(cudaFree(p));
        double t2 = nowUs();
        m.push_back(t1 - t0);
        f.push_back(t2 - t1);
      }
      r.d[0] = median(m); r.d[1] = median(f);
      r.d[2] = m.front(); r.d[3] = *std::max_element(m.begin(), m.end());
      r.d[4] = *std::max_element(f.begin(), f.end());
      r.d[5] = *std::min_element(m.begin(), m.end());
      return;
    }
    case OP_BENCH_ASYNC: {  // a0 size, a1 N
      cudaMemPool_t pool;
      RT(cudaDeviceGetDefaultMemPool(&pool, DEV));
      uint64_t thr = ~0ull;
      RT(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &thr));
      std::vector<double> m, f;
      double first = 0;
      for (int i = 0; i <= q.a[1]; i++) {
        void* p;
        double t0 = nowUs();
        RT(cudaMallocAsync(&p, (size_t)q.a[0], ST));
        double t1 = nowUs();
        RT(cudaFreeAsync(p, ST));
        double t2 = nowUs();
        RT(cudaStreamSynchronize(ST));
        if (i == 0) { first = t1 - t0; continue; }
        m.push_back(t1 - t0);
        f.push_back(t2 - t1);
      }
      r.d[0] = median(m); r.d[1] = median(f); r.d[2] = first;
      RT(cudaMemPoolTrimTo(pool, 0));
      return;
    }
    case OP_BENCH_IPC: {  // blob handle, a0 N: open/close loop in the importer
      cudaIpcMemHandle_t h;
      memcpy(&h, q.blob, 64);
      std::vector<double> o, c;
      for (int i = 0; i < q.a[0]; i++) {
        void* p;
        double t0 = nowUs();
        RT(cudaIpcOpenMemHandle(&p, h, cudaIpcMemLazyEnablePeerAccess));
        double t1 = nowUs();
        RT(cudaIpcCloseMemHandle(p));
        double t2 = nowUs();
        o.push_back(t1 - t0);
        c.push_back(t2 - t1);
      }
      r.d[0] = median(o); r.d[1] = median(c); r.d[2] = o.front();
      r.d[3] = *std::max_element(o.begin(), o.end());
      return;
    }
    case OP_VMM_CREATE: {  // a0 size, a1 exportable
      CUmemAllocationProp p = prop(q.a[1] != 0);
      CUmemGenericAllocationHandle h;
      double t0 = nowUs();
      CUresult e = D.cuMemCreate_p(&h, (size_t)q.a[0], &p, 0);
      r.d[0] = nowUs() - t0;
      DR(e);
      int i = newSlot();
      S[i].h = h;
      S[i].hasH = true;
      S[i].size = (size_t)q.a[0];
      r.v[0] = i;
      return;
    }
    case OP_VMM_MAP: {  // a0 slot, a1 access flags (0 = leave without access)
      Slot& s = slot(q.a[0]);
      CUdeviceptr p = 0;
      double t0 = nowUs();
      DR(D.cuMemAddressReserve_p(&p, s.size, 2 * MiB, 0, 0));
      double t1 = nowUs();
      CUresult e = D.cuMemMap_p(p, s.size, 0, s.h, 0);
      double t2 = nowUs();
      if (e != CUDA_SUCCESS) { D.cuMemAddressFree_p(p, s.size); setRc(r, e); return; }
      s.ptr = p;
      s.mapped = s.reserved = true;
      r.d[0] = t1 - t0; r.d[1] = t2 - t1;
      if (q.a[1]) {
        CUmemAccessDesc d = access((int)q.a[1]);
        t0 = nowUs();
        e = D.cuMemSetAccess_p(p, s.size, &d, 1);
        r.d[2] = nowUs() - t0;
        DR(e);
      }
      r.v[0] = (int64_t)p;
      return;
    }
    case OP_VMM_SETACCESS: {
      Slot& s = slot(q.a[0]);
      CUmemAccessDesc d = access((int)q.a[1]);
      DR(D.cuMemSetAccess_p(s.ptr, s.size, &d, 1));
      return;
    }
    case OP_VMM_EXPORT: {  // a0 slot
      Slot& s = slot(q.a[0]);
      int fd = -1;
      double t0 = nowUs();
      CUresult e = D.cuMemExportToShareableHandle_p(&fd, s.h, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
      r.d[0] = nowUs() - t0;
      DR(e);
      outFds.push_back(fd);
      return;
    }
    case OP_VMM_IMPORT: {  // fds[0], a0 size
      if (fds.empty()) { r.rc = 998; snprintf(r.err, sizeof r.err, "no fd"); return; }
      CUmemGenericAllocationHandle h;
      double t0 = nowUs();
      CUresult e = D.cuMemImportFromShareableHandle_p(&h, (void*)(uintptr_t)fds[0], CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
      r.d[0] = nowUs() - t0;
      DR(e);
      int i = newSlot();
      S[i].h = h;
      S[i].hasH = true;
      S[i].size = (size_t)q.a[0];
      r.v[0] = i;
      return;
    }
    case OP_VMM_UNMAP: {
      Slot& s = slot(q.a[0]);
      double t0 = nowUs();
      DR(D.cuMemUnmap_p(s.ptr, s.size));
      r.d[0] = nowUs() - t0;
      DR(D.cuMemAddressFree_p(s.ptr, s.size));
      s.mapped = s.reserved = false;
      s.ptr = 0;
      return;
    }
    case OP_VMM_RELEASE: {
      Slot& s = slot(q.a[0]);
      double t0 = nowUs();
      DR(D.cuMemRelease_p(s.h));
      r.d[0] = nowUs() - t0;
      s.hasH = false;
      if (!s.mapped) s.used = false;
      return;
    }
    case OP_VMM_PARTIAL: {  // a0 slot with handle: try to map a part, and a part at an offset
      Slot& s = slot(q.a[0]);
      CUdeviceptr p = 0;
      DR(D.cuMemAddressReserve_p(&p, s.size, 2 * MiB, 0, 0));
      CUresult e1 = D.cuMemMap_p(p, s.size / 2, 0, s.h, 0);
      if (e1 == CUDA_SUCCESS) D.cuMemUnmap_p(p, s.size / 2);
      CUresult e2 = D.cuMemMap_p(p, s.size / 2, s.size / 2, s.h, 0);
      CUresult e3 = CUDA_SUCCESS;
      if (e2 == CUDA_SUCCESS) {
        CUmemAccessDesc d = access(CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
        e3 = D.cuMemSetAccess_p(p, s.size / 2, &d, 1);
        D.cuMemUnmap_p(p, s.size / 2);
      }
      D.cuMemAddressFree_p(p, s.size);
      r.v[0] = e1; r.v[1] = e2; r.v[2] = e3;
      return;
    }
    case OP_BENCH_VMM: {  // a0 size of each chunk, a1 chunks, a2 N, a3 exportable
      size_t sz = (size_t)q.a[0], n = (size_t)q.a[1];
      std::vector<double> t[8];
      for (int it = 0; it < q.a[2]; it++) {
        CUmemAllocationProp p = prop(q.a[3] != 0);
        std::vector<CUmemGenericAllocationHandle> h(n);
        CUdeviceptr va = 0;
        double a = nowUs();
        for (auto& x : h) DR(D.cuMemCreate_p(&x, sz, &p, 0));
        double b = nowUs(); t[0].push_back(b - a);
        DR(D.cuMemAddressReserve_p(&va, sz * n, 2 * MiB, 0, 0));
        a = nowUs(); t[1].push_back(a - b);
        for (size_t i = 0; i < n; i++) DR(D.cuMemMap_p(va + i * sz, sz, 0, h[i], 0));
        b = nowUs(); t[2].push_back(b - a);
        CUmemAccessDesc d = access(CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
        DR(D.cuMemSetAccess_p(va, sz * n, &d, 1));
        a = nowUs(); t[3].push_back(a - b);
        if (q.a[3] && n == 1) {
          int fd = -1;
          double e0 = nowUs();
          DR(D.cuMemExportToShareableHandle_p(&fd, h[0], CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
          t[4].push_back(nowUs() - e0);
          close(fd);
        }
        a = nowUs();
        for (size_t i = 0; i < n; i++) DR(D.cuMemUnmap_p(va + i * sz, sz));
        b = nowUs(); t[5].push_back(b - a);
        for (auto& x : h) DR(D.cuMemRelease_p(x));
        a = nowUs(); t[6].push_back(a - b);
        DR(D.cuMemAddressFree_p(va, sz * n));
        b = nowUs(); t[7].push_back(b - a);
      }
      for (int i = 0; i < 8; i++) r.d[i] = median(t[i]);
      return;
    }
    case OP_BENCH_VMM_IMPORT: {  // fds[0], a0 size, a1 N
      if (fds.empty()) { r.rc = 998; return; }
      size_t sz = (size_t)q.a[0];
      std::vector<double> t[4];
      for (int it = 0; it < q.a[1]; it++) {
        CUmemGenericAllocationHandle h;
        CUdeviceptr va;
        double a = nowUs();
        DR(D.cuMemImportFromShareableHandle_p(&h, (void*)(uintptr_t)fds[0], CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
        double b = nowUs(); t[0].push_back(b - a);
        DR(D.cuMemAddressReserve_p(&va, sz, 2 * MiB, 0, 0));
        a = nowUs();
        DR(D.cuMemMap_p(va, sz, 0, h, 0));
        b = nowUs(); t[1].push_back(b - a);
        CUmemAccessDesc d = access(CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
        DR(D.cuMemSetAccess_p(va, sz, &d, 1));
        a = nowUs(); t[2].push_back(a - b);
        DR(D.cuMemUnmap_p(va, sz));
        DR(D.cuMemRelease_p(h));
        b = nowUs(); t[3].push_back(b - a);
        DR(D.cuMemAddressFree_p(va, sz));
      }
      for (int i = 0; i < 4; i++) r.d[i] = median(t[i]);
      return;
    }
    case OP_POKE: {  // a0 slot, a1 value, a2 offset
      Slot& s = slot(q.a[0]);
      kPoke<<<1, 1, 0, ST>>>((uint32_t*)(s.ptr + q.a[2]), (uint32_t)q.a[1]);
      RT(syncRc());
      return;
    }
    case OP_WILD: {  // deliberate illegal address in this context only
      kPoke<<<1, 1, 0, ST>>>((uint32_t*)0x10, 1u);
      RT(syncRc());
      return;
    }
    case OP_MEMSET: {
      Slot& s = slot(q.a[0]);
      cudaError_t e = cudaMemsetAsync((void*)s.ptr, (int)q.a[1], std::min<size_t>(s.size, 4096), ST);
      if (e == cudaSuccess) e = syncRc();
      (void)cudaGetLastError();
      RT(e);
      return;
    }
    case OP_H2D: {
      Slot& s = slot(q.a[0]);
      uint32_t v = (uint32_t)q.a[1];
      cudaError_t e = cudaMemcpyAsync((void*)s.ptr, &v, 4, cudaMemcpyHostToDevice, ST);
      if (e == cudaSuccess) e = syncRc();
      (void)cudaGetLastError();
      RT(e);
      return;
    }
    case OP_BW: {  // a0 slot, a1 N : copy first half to second half, and read all
      Slot& s = slot(q.a[0]);
      size_t half = s.size / 2;
      cudaEvent_t a, b;
      RT(cudaEventCreate(&a)); RT(cudaEventCreate(&b));
      std::vector<double> c, rd;
      for (int i = 0; i < q.a[1] + 1; i++) {
        float ms;
        RT(cudaEventRecord(a, ST));
        kCopy<<<2048, 512, 0, ST>>>((const uint4*)s.ptr, (uint4*)(s.ptr + half), half / 16);
        RT(cudaEventRecord(b, ST));
        RT(syncRc());
        RT(cudaEventElapsedTime(&ms, a, b));
        if (i) c.push_back(2.0 * half / ms * 1e-6);
        RT(cudaEventRecord(a, ST));
        kSum<<<2048, 512, 0, ST>>>((const uint4*)s.ptr, s.size / 16, CNT);
        RT(cudaEventRecord(b, ST));
        RT(syncRc());
        RT(cudaEventElapsedTime(&ms, a, b));
        if (i) rd.push_back((double)s.size / ms * 1e-6);
      }
      r.d[0] = median(c);   // GB/s, bytes read plus written
      r.d[1] = median(rd);  // GB/s read
      cudaEventDestroy(a); cudaEventDestroy(b);
      return;
    }
    case OP_BENCH_MEMSET: {  // a0 slot, a1 N, a2 bytes
      Slot& s = slot(q.a[0]);
      size_t n = std::min<size_t>(s.size, (size_t)q.a[2]);
      std::vector<double> w, k;
      cudaEvent_t a, b;
      RT(cudaEventCreate(&a)); RT(cudaEventCreate(&b));
      for (int i = 0; i < q.a[1] + 1; i++) {
        float ms;
        double t0 = nowUs();
        RT(cudaEventRecord(a, ST));
        RT(cudaMemsetAsync((void*)s.ptr, 0, n, ST));
        RT(cudaEventRecord(b, ST));
        RT(syncRc());
        double wall = nowUs() - t0;
        RT(cudaEventElapsedTime(&ms, a, b));
        if (i) { k.push_back(ms * 1e3); w.push_back(wall); }
      }
      r.d[0] = median(k);                  // us on the device
      r.d[1] = median(w);                  // us wall
      r.d[2] = n / (median(k) * 1e-6) * 1e-9;  // GB/s
      cudaEventDestroy(a); cudaEventDestroy(b);
      return;
    }
    case OP_SPIN_WRITE: {  // a0 slot, a1 value, a2 ms : returns at once
      Slot& s = slot(q.a[0]);
      kSpin<<<1, 1, 0, ST>>>((unsigned long long)q.a[2] * 1000000ull);
      kFill<<<1024, 256, 0, ST>>>((uint32_t*)s.ptr, s.size / 4, (uint32_t)q.a[1]);
      RT(cudaGetLastError());
      return;
    }
    case OP_INC_LOOP: {  // a0 slot, a1 ms : returns at once
      Slot& s = slot(q.a[0]);
      kInc<<<1, 1, 0, ST>>>((volatile unsigned long long*)s.ptr, (unsigned long long)q.a[1] * 1000000ull);
      RT(cudaGetLastError());
      return;
    }
    case OP_EV_CREATE: {
      cudaEvent_t e;
      RT(cudaEventCreateWithFlags(&e, cudaEventInterprocess | cudaEventDisableTiming));
      int i = newSlot();
      S[i].ev = e;
      r.v[0] = i;
      return;
    }
    case OP_EV_RECORD: RT(cudaEventRecord(slot(q.a[0]).ev, ST)); return;
    case OP_EV_HANDLE: {
      cudaIpcEventHandle_t h;
      double t0 = nowUs();
      RT(cudaIpcGetEventHandle(&h, slot(q.a[0]).ev));
      r.d[0] = nowUs() - t0;
      memcpy(r.blob, &h, 64);
      return;
    }
    case OP_EV_OPEN: {
      cudaIpcEventHandle_t h;
      memcpy(&h, q.blob, 64);
      cudaEvent_t e;
      double t0 = nowUs();
      RT(cudaIpcOpenEventHandle(&e, h));
      r.d[0] = nowUs() - t0;
      int i = newSlot();
      S[i].ev = e;
      r.v[0] = i;
      return;
    }
    case OP_EV_QUERY: {
      cudaError_t e = cudaEventQuery(slot(q.a[0]).ev);
      if (e == cudaErrorNotReady) (void)cudaGetLastError();
      setRc(r, e);
      return;
    }
    case OP_EV_SYNC: {
      double t0 = nowUs();
      RT(cudaEventSynchronize(slot(q.a[0]).ev));
      r.d[0] = nowUs() - t0;
      return;
    }
    case OP_EV_DESTROY: RT(cudaEventDestroy(slot(q.a[0]).ev)); slot(q.a[0]).used = false; return;
    case OP_WAIT_COUNT: {  // a0 mem slot, a1 value, a2 event slot : device-side wait then count
      RT(cudaStreamWaitEvent(ST, slot(q.a[2]).ev, 0));
      countOn(ST, slot(q.a[0]), (uint32_t)q.a[1], r);
      return;
    }
    case OP_SYNC: RT(syncRc()); return;
    case OP_POOL_CREATE: {
      cudaMemPoolProps p{};
      p.allocType = cudaMemAllocationTypePinned;
      p.handleTypes = cudaMemHandleTypePosixFileDescriptor;
      p.location.type = cudaMemLocationTypeDevice;
      p.location.id = DEV;
      cudaMemPool_t pool;
      RT(cudaMemPoolCreate(&pool, &p));
      int i = newSlot();
      S[i].pool = pool;
      r.v[0] = i;
      return;
    }
    case OP_POOL_ALLOC: {  // a0 pool slot, a1 size
      void* p;
      double t0 = nowUs();
      cudaError_t e = cudaMallocFromPoolAsync(&p, (size_t)q.a[1], slot(q.a[0]).pool, ST);
      if (e == cudaSuccess) e = syncRc();
      r.d[0] = nowUs() - t0;
      (void)cudaGetLastError();
      RT(e);
      int i = newSlot();
      S[i].ptr = (CUdeviceptr)p;
      S[i].size = (size_t)q.a[1];
      r.v[0] = i;
      return;
    }
    case OP_POOL_EXPORT: {
      int fd = -1;
      double t0 = nowUs();
      RT(cudaMemPoolExportToShareableHandle(&fd, slot(q.a[0]).pool, cudaMemHandleTypePosixFileDescriptor, 0));
      r.d[0] = nowUs() - t0;
      outFds.push_back(fd);
      return;
    }
    case OP_POOL_EXPORT_PTR: {
      cudaMemPoolPtrExportData x;
      static_assert(sizeof x <= sizeof r.blob, "blob too small");
      RT(cudaMemPoolExportPointer(&x, (void*)slot(q.a[0]).ptr));
      memcpy(r.blob, &x, sizeof x);
      return;
    }
    case OP_POOL_IMPORT: {
      if (fds.empty()) { r.rc = 998; return; }
      cudaMemPool_t pool;
      double t0 = nowUs();
      RT(cudaMemPoolImportFromShareableHandle(&pool, (void*)(uintptr_t)fds[0], cudaMemHandleTypePosixFileDescriptor, 0));
      r.d[0] = nowUs() - t0;
      cudaMemAccessDesc d{};
      d.location.type = cudaMemLocationTypeDevice;
      d.location.id = DEV;
      d.flags = cudaMemAccessFlagsProtReadWrite;
      RT(cudaMemPoolSetAccess(pool, &d, 1));
      int i = newSlot();
      S[i].pool = pool;
      r.v[0] = i;
      return;
    }
    case OP_POOL_IMPORT_PTR: {  // a0 pool slot, a1 size
      cudaMemPoolPtrExportData x;
      memcpy(&x, q.blob, sizeof x);
      void* p;
      double t0 = nowUs();
      RT(cudaMemPoolImportPointer(&p, slot(q.a[0]).pool, &x));
      r.d[0] = nowUs() - t0;
      int i = newSlot();
      S[i].ptr = (CUdeviceptr)p;
      S[i].size = (size_t)q.a[1];
      r.v[0] = i;
      return;
    }
    case OP_GRAPH: {  // a0 slot, a1 value : capture a fill of the slot, replay it twice
      Slot& s = slot(q.a[0]);
      cudaGraph_t g;
      cudaGraphExec_t x;
      RT(cudaStreamBeginCapture(ST, cudaStreamCaptureModeThreadLocal));
      kFill<<<1024, 256, 0, ST>>>((uint32_t*)s.ptr, s.size / 4, (uint32_t)q.a[1]);
      RT(cudaStreamEndCapture(ST, &g));
      RT(cudaGraphInstantiate(&x, g, 0));
      RT(cudaGraphLaunch(x, ST));
      RT(cudaGraphLaunch(x, ST));
      RT(syncRc());
      cudaGraphExecDestroy(x);
      cudaGraphDestroy(g);
      countOn(ST, s, (uint32_t)q.a[1], r);
      return;
    }
    default: r.rc = 997; snprintf(r.err, sizeof r.err, "bad op"); return;
  }
}

int agentMain(int sock) {
  signal(SIGPIPE, SIG_IGN);
  for (;;) {
    Req q;
    std::vector<int> fds, out;
    int n = recvFds(sock, &q, sizeof q, &fds, -1);
    if (n <= 0) return 0;
    if (q.op == OP_EXIT) return (int)q.a[0];
    Rep r;
    handle(q, fds, r, out);
    for (int f : fds) close(f);
    if (!sendFds(sock, &r, sizeof r, out.data(), (int)out.size())) return 0;
    for (int f : out) close(f);
  }
}
