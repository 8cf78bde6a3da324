/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Stands in for libcudart.so.12 (CUDA 12, x86-64), for the whole of PyTorch. The GPU has compute capability 8.0, and
 * its memory is ordinary memory, zero at first. Copies copy; kernels do nothing. Each call does its work at once;
 * streams only have names. Real behaviour: out of memory, IPC handles (for cudaMalloc()'s own memory only), calls
 * forbidden during a stream capture, and a runtime that fails in a forked child once the parent has used it.
 *
 * Environment variables, read at the first call. Each variable is an `int standin_...` as well, and a program may
 * change the integer at any time:
 *   STANDIN_CAPACITY_MIB  the GPU's memory (8192)
 *   STANDIN_MALLOC_MS     time of a cudaMalloc() (0)
 *   STANDIN_FREE_MS       time of a cudaFree() (0)
 *   STANDIN_IPC_ERROR     error of cudaIpcGetMemHandle() (0: the call succeeds)
 *   STANDIN_LOG           a file; lines for each cudaMalloc(), cudaFree(), cudaIpcGetMemHandle(), begin and end of a
 *                         capture, and call that a capture forbids
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum {
  kSuccess = 0,
  kInvalidValue = 1,
  kMemoryAllocation = 2,
  kInitializationError = 3,
  kInvalidDevice = 101,
  kNotSupported = 801,
  kStreamCaptureUnsupported = 900,
  kStreamCaptureInvalidated = 901,
};

int standin_capacity_mib = 8192;
int standin_malloc_ms;
int standin_free_ms;
int standin_ipc_error;
int standin_mallocs_; /* counter */
int standin_frees_;
int standin_launches;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static int log_file = -1;
static int used;   /* this process or its parent has used the runtime */
static int forked; /* a child of a parent that has used the runtime */
static __thread int last_error;

int standin_mallocs(void) {
  return standin_mallocs_;
}
int standin_frees(void) {
  return standin_frees_;
}

static void read_environment_int(const char* name, int* value) {
  const char* const text = getenv(name);
  if (text != NULL && *text != '\0') *value = atoi(text);
}
static void in_child(void) {
  pthread_mutex_init(&mutex, NULL);
  forked = used;
}
__attribute__((constructor)) static void start(void) {
  read_environment_int("STANDIN_CAPACITY_MIB", &standin_capacity_mib);
  read_environment_int("STANDIN_MALLOC_MS", &standin_malloc_ms);
  read_environment_int("STANDIN_FREE_MS", &standin_free_ms);
  read_environment_int("STANDIN_IPC_ERROR", &standin_ipc_error);
  const char* const file = getenv("STANDIN_LOG");
  if (file != NULL && *file != '\0') log_file = open(file, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  pthread_atfork(NULL, NULL, in_child);
}

__attribute__((format(printf, 1, 2))) static void record(const char* format, ...) {
  if (log_file < 0) return;
  char line[256];
  int length = snprintf(line, sizeof line, "%ld %ld ", (long)getpid(), (long)syscall(SYS_gettid));
  va_list arguments;
  va_start(arguments, format);
  length += vsnprintf(line + length, sizeof line - (size_t)length - 1, format, arguments);
  va_end(arguments);
  line[length++] = '\n';
  (void)!write(log_file, line, (size_t)length);
}

static int result(int code) {
  if (code != kSuccess) last_error = code;
  return code;
}
/* Marks the runtime as used; fails in a forked child. Calls that need a context call use(). */
static int use(void) {
  if (forked) return kInitializationError;
  used = 1;
  return kSuccess;
}
static void wait_ms(int milliseconds) {
  if (milliseconds <= 0) return;
  const struct timespec time = {milliseconds / 1000, milliseconds % 1000 * 1000000L};
  nanosleep(&time, NULL);
}

/* ---- Errors ---- */

int cudaGetLastError(void) {
  const int code = last_error;
  last_error = kSuccess;
  return code;
}
int cudaPeekAtLastError(void) {
  return last_error;
}
const char* cudaGetErrorString(int error) {
  switch (error) {
    case kSuccess:
      return "no error";
    case kInvalidValue:
      return "invalid argument";
    case kMemoryAllocation:
      return "out of memory";
    case kInitializationError:
      return "initialization error";
    case kInvalidDevice:
      return "invalid device ordinal";
    case kNotSupported:
      return "operation not supported";
    case kStreamCaptureUnsupported:
      return "operation not permitted when stream is capturing";
    case kStreamCaptureInvalidated:
      return "operation failed due to a previous error during capture";
    default:
      return "unrecognized error code";
  }
}
const char* cudaGetErrorName(int error) {
  return cudaGetErrorString(error);
}

/* ---- Devices ---- */

int cudaGetDeviceCount(int* count) {
  *count = 1;
  return result(forked ? kInitializationError : kSuccess);
}
int cudaGetDevice(int* device) {
  *device = 0;
  return result(use());
}
int cudaSetDevice(int device) {
  return result(device == 0 ? use() : kInvalidDevice);
}
int cudaDriverGetVersion(int* version) {
  *version = 12040;
  return kSuccess;
}
int cudaRuntimeGetVersion(int* version) {
  *version = 12040;
  return kSuccess;
}

/* Layout of CUDA 12, up to the last field that PyTorch reads. */
struct cudaDeviceProp {
  char name[256];
  char uuid[16];
  char luid[8];
  unsigned luidDeviceNodeMask;
  size_t totalGlobalMem;
  size_t sharedMemPerBlock;
  int regsPerBlock;
  int warpSize;
  size_t memPitch;
  int maxThreadsPerBlock;
  int maxThreadsDim[3];
  int maxGridSize[3];
  int clockRate;
  size_t totalConstMem;
  int major;
  int minor;
  size_t textureAlignment;
  size_t texturePitchAlignment;
  int deviceOverlap;
  int multiProcessorCount;
  int kernelExecTimeoutEnabled;
  int integrated;
  int canMapHostMemory;
  int computeMode;
  int textures[40]; /* sizes of textures and surfaces */
  size_t surfaceAlignment;
  int concurrentKernels;
  int ECCEnabled;
  int pciBusID;
  int pciDeviceID;
  int pciDomainID;
  int tccDriver;
  int asyncEngineCount;
  int unifiedAddressing;
  int memoryClockRate;
  int memoryBusWidth;
  int l2CacheSize;
  int persistingL2CacheMaxSize;
  int maxThreadsPerMultiProcessor;
  int streamPrioritiesSupported;
  int globalL1CacheSupported;
  int localL1CacheSupported;
  size_t sharedMemPerMultiprocessor;
  int regsPerMultiprocessor;
  int managedMemory;
  int isMultiGpuBoard;
  int multiGpuBoardGroupID;
  int hostNativeAtomicSupported;
  int singleToDoublePrecisionPerfRatio;
  int pageableMemoryAccess;
  int concurrentManagedAccess;
  int computePreemptionSupported;
  int canUseHostPointerForRegisteredMem;
  int cooperativeLaunch;
  int cooperativeMultiDeviceLaunch;
  size_t sharedMemPerBlockOptin;
};
_Static_assert(__builtin_offsetof(struct cudaDeviceProp, totalGlobalMem) == 288, "");
_Static_assert(__builtin_offsetof(struct cudaDeviceProp, major) == 360, "");
_Static_assert(__builtin_offsetof(struct cudaDeviceProp, multiProcessorCount) == 388, "");
_Static_assert(__builtin_offsetof(struct cudaDeviceProp, surfaceAlignment) == 568, "");

int cudaGetDeviceProperties_v2(struct cudaDeviceProp* properties, int device) {
  if (device != 0) return result(kInvalidDevice);
  memset(properties, 0, 1008);
  strcpy(properties->name, "stand-in");
  memcpy(properties->uuid, "stand-in, no GPU", 16);
  properties->totalGlobalMem = (size_t)standin_capacity_mib << 20;
  properties->sharedMemPerBlock = 48 << 10;
  properties->regsPerBlock = properties->regsPerMultiprocessor = 64 << 10;
  properties->warpSize = 32;
  properties->maxThreadsPerBlock = properties->maxThreadsDim[0] = properties->maxThreadsDim[1] = 1024;
  properties->maxThreadsDim[2] = 64;
  properties->maxGridSize[0] = 0x7fffffff;
  properties->maxGridSize[1] = properties->maxGridSize[2] = 65535;
  properties->major = 8;
  properties->textureAlignment = 512;
  properties->multiProcessorCount = 108;
  properties->canMapHostMemory = properties->concurrentKernels = properties->unifiedAddressing = 1;
  properties->l2CacheSize = 40 << 20;
  properties->maxThreadsPerMultiProcessor = 2048;
  properties->sharedMemPerMultiprocessor = 164 << 10;
  properties->cooperativeLaunch = 1;
  properties->sharedMemPerBlockOptin = 163 << 10;
  return kSuccess;
}
int cudaDeviceGetAttribute(int* value, int attribute, int device) {
  if (device != 0) return result(kInvalidDevice);
  static const struct {
    int attribute, value;
  } known[] = {{1, 1024},     {2, 1024},       {3, 1024},   {4, 64},    {5, 0x7fffffff}, {6, 65535},      {7, 65535},
               {8, 48 << 10}, {10, 32},        {12, 65536}, {14, 512},  {16, 108},       {19, 1},         {31, 1},
               {39, 2048},    {41, 1},         {75, 8},     {76, 0},    {78, 1},         {81, 164 << 10}, {82, 65536},
               {95, 1},       {97, 163 << 10}, {106, 32},   {111, 1024}};
  *value = 0;
  for (size_t i = 0; i < sizeof known / sizeof *known; ++i) {
    if (known[i].attribute == attribute) *value = known[i].value;
  }
  return kSuccess;
}
int cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  (void)device, (void)peer;
  *can = 0;
  return kSuccess;
}
int cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -3;
  return kSuccess;
}

/* ---- Streams and captures ---- */

enum { kModeGlobal = 0, kModeThreadLocal = 1, kModeRelaxed = 2 };
enum { kNotCapturing = 0, kCapturing = 1, kInvalidated = 2 };

struct stream {
  struct stream* next; /* `mutex` guards all fields */
  int priority;
  int status;
  int mode;
  pthread_t origin;
  unsigned long long id;
};
static struct stream* streams;
static unsigned long long captures;
static __thread int thread_mode = kModeGlobal;

/* Fails a call that a capture forbids; the call invalidates the capture. */
static int forbidden_by_capture(const char* what) {
  int code = kSuccess;
  pthread_mutex_lock(&mutex);
  for (struct stream* stream = streams; stream != NULL; stream = stream->next) {
    if (stream->status == kNotCapturing || thread_mode == kModeRelaxed) continue;
    const int own = pthread_equal(stream->origin, pthread_self());
    if ((stream->mode == kModeGlobal && thread_mode == kModeGlobal) || (own && stream->mode != kModeRelaxed)) {
      stream->status = kInvalidated;
      code = kStreamCaptureUnsupported;
    }
  }
  pthread_mutex_unlock(&mutex);
  if (code != kSuccess) record("%s is forbidden by a capture", what);
  return code;
}

static int new_stream(struct stream** stream, int priority) {
  *stream = calloc(1, sizeof **stream);
  (*stream)->priority = priority;
  pthread_mutex_lock(&mutex);
  (*stream)->next = streams;
  streams = *stream;
  pthread_mutex_unlock(&mutex);
  return result(use());
}
int cudaStreamCreate(struct stream** stream) {
  return new_stream(stream, 0);
}
int cudaStreamCreateWithFlags(struct stream** stream, unsigned flags) {
  (void)flags;
  return new_stream(stream, 0);
}
int cudaStreamCreateWithPriority(struct stream** stream, unsigned flags, int priority) {
  (void)flags;
  return new_stream(stream, priority);
}
int cudaStreamDestroy(struct stream* stream) {
  pthread_mutex_lock(&mutex);
  struct stream** place = &streams;
  while (*place != NULL && *place != stream) place = &(*place)->next;
  if (*place != NULL) *place = stream->next;
  pthread_mutex_unlock(&mutex);
  free(stream);
  return kSuccess;
}
/* The default streams are 0, 1 and 2, and never capture. */
static int is_own(const struct stream* stream) {
  return (size_t)stream > 2;
}
int cudaStreamGetPriority(struct stream* stream, int* priority) {
  *priority = is_own(stream) ? stream->priority : 0;
  return kSuccess;
}
static int capturing(const struct stream* stream) {
  return is_own(stream) && stream->status != kNotCapturing;
}
int cudaStreamQuery(struct stream* stream) {
  return result(capturing(stream) ? kStreamCaptureUnsupported : forbidden_by_capture("cudaStreamQuery"));
}
int cudaStreamSynchronize(struct stream* stream) {
  return result(capturing(stream) ? kStreamCaptureUnsupported : forbidden_by_capture("cudaStreamSynchronize"));
}
int cudaDeviceSynchronize(void) {
  return result(forbidden_by_capture("cudaDeviceSynchronize"));
}
int cudaStreamIsCapturing(struct stream* stream, int* status) {
  *status = is_own(stream) ? stream->status : kNotCapturing;
  return kSuccess;
}
int cudaStreamGetCaptureInfo_v2(struct stream* stream, int* status, unsigned long long* id, void** graph,
                                const void*** dependencies, size_t* count) {
  *status = is_own(stream) ? stream->status : kNotCapturing;
  if (id != NULL) *id = is_own(stream) ? stream->id : 0;
  if (graph != NULL) *graph = NULL;
  if (dependencies != NULL) *dependencies = NULL;
  if (count != NULL) *count = 0;
  return kSuccess;
}
int cudaThreadExchangeStreamCaptureMode(int* mode) {
  const int old = thread_mode;
  thread_mode = *mode;
  *mode = old;
  return kSuccess;
}
int cudaStreamBeginCapture(struct stream* stream, int mode) {
  if (!is_own(stream) || stream->status != kNotCapturing) return result(kStreamCaptureUnsupported);
  pthread_mutex_lock(&mutex);
  stream->status = kCapturing;
  stream->mode = mode;
  stream->origin = pthread_self();
  stream->id = ++captures;
  pthread_mutex_unlock(&mutex);
  record("cudaStreamBeginCapture mode %d", mode);
  return kSuccess;
}
int cudaStreamEndCapture(struct stream* stream, void** graph) {
  if (!is_own(stream) || stream->status == kNotCapturing) return result(kInvalidValue);
  pthread_mutex_lock(&mutex);
  const int lost = stream->status == kInvalidated;
  stream->status = kNotCapturing;
  pthread_mutex_unlock(&mutex);
  *graph = lost ? NULL : calloc(1, 1);
  const int code = lost ? kStreamCaptureInvalidated : kSuccess;
  record("cudaStreamEndCapture = %d", code);
  return result(code);
}
int cudaGraphGetNodes(void* graph, void** nodes, size_t* count) {
  (void)graph;
  if (nodes == NULL) *count = 1;
  return kSuccess;
}
int cudaGraphInstantiate(void** executable, void* graph, unsigned long long flags) {
  (void)graph, (void)flags;
  *executable = calloc(1, 1);
  return kSuccess;
}
int cudaGraphInstantiateWithFlags(void** executable, void* graph, unsigned long long flags) {
  return cudaGraphInstantiate(executable, graph, flags);
}
int cudaGraphDestroy(void* graph) {
  free(graph);
  return kSuccess;
}
int cudaGraphExecDestroy(void* executable) {
  free(executable);
  return kSuccess;
}

/* ---- Events ---- */

struct event {
  struct timespec time;
};

int cudaEventCreateWithFlags(struct event** event, unsigned flags) {
  (void)flags;
  *event = calloc(1, sizeof **event);
  return result(use());
}
int cudaEventCreate(struct event** event) {
  return cudaEventCreateWithFlags(event, 0);
}
int cudaEventDestroy(struct event* event) {
  free(event);
  return kSuccess;
}
int cudaEventRecord(struct event* event, struct stream* stream) {
  (void)stream;
  clock_gettime(CLOCK_MONOTONIC, &event->time);
  return kSuccess;
}
int cudaEventQuery(struct event* event) {
  (void)event;
  return result(forbidden_by_capture("cudaEventQuery"));
}
int cudaEventSynchronize(struct event* event) {
  (void)event;
  return result(forbidden_by_capture("cudaEventSynchronize"));
}
int cudaEventElapsedTime(float* milliseconds, struct event* from, struct event* to) {
  *milliseconds =
      (float)(to->time.tv_sec - from->time.tv_sec) * 1e3f + (float)(to->time.tv_nsec - from->time.tv_nsec) / 1e6f;
  return kSuccess;
}
int cudaIpcGetEventHandle(void* handle, struct event* event) {
  (void)event;
  memset(handle, 0, 64);
  return kSuccess;
}

/* ---- Memory ---- */

enum { kUnregistered = 0, kHost = 1, kDevice = 2 };

struct block {
  struct block* next; /* `mutex` guards the list */
  char* begin;
  size_t bytes;
  int kind;
  int file;   /* file of device memory; -1: memory without an IPC handle */
  int mapped; /* cudaIpcOpenMemHandle() mapped the memory */
};
static struct block* blocks;
static size_t taken; /* bytes of the GPU's memory */

static void add(void* begin, size_t bytes, int kind, int file, int mapped) {
  struct block* const block = malloc(sizeof *block);
  pthread_mutex_lock(&mutex);
  *block = (struct block){blocks, begin, bytes, kind, file, mapped};
  blocks = block;
  pthread_mutex_unlock(&mutex);
}
/* Removes the block from the list and returns it; `bytes` is 0 if the list has no such block. */
static struct block take_out(const void* begin, int kind) {
  struct block found = {0};
  pthread_mutex_lock(&mutex);
  for (struct block** place = &blocks; *place != NULL; place = &(*place)->next) {
    struct block* const block = *place;
    if (block->begin != begin || block->kind != kind) continue;
    found = *block;
    *place = block->next;
    free(block);
    break;
  }
  pthread_mutex_unlock(&mutex);
  return found;
}
static struct block find(const void* pointer) {
  struct block found = {0};
  pthread_mutex_lock(&mutex);
  for (const struct block* block = blocks; block != NULL && found.bytes == 0; block = block->next) {
    if ((const char*)pointer >= block->begin && (const char*)pointer < block->begin + block->bytes) found = *block;
  }
  pthread_mutex_unlock(&mutex);
  return found;
}

static int allocate(void** pointer, size_t bytes) {
  const size_t capacity = (size_t)standin_capacity_mib << 20;
  bytes = (bytes + 4095) & ~(size_t)4095;
  pthread_mutex_lock(&mutex);
  const int fits = bytes <= capacity && taken <= capacity - bytes;
  if (fits) taken += bytes;
  pthread_mutex_unlock(&mutex);
  if (!fits) return kMemoryAllocation;
  const int file = memfd_create("standin", MFD_CLOEXEC);
  void* const begin = file >= 0 && ftruncate(file, (off_t)bytes) == 0
                          ? mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0)
                          : MAP_FAILED;
  if (begin == MAP_FAILED) {
    perror("stand-in: memory");
    abort();
  }
  add(begin, bytes, kDevice, file, 0);
  *pointer = begin;
  return kSuccess;
}

int cudaMalloc(void** pointer, size_t bytes) {
  int code = use();
  if (code == kSuccess) code = forbidden_by_capture("cudaMalloc");
  record("cudaMalloc %zu MiB begins", bytes >> 20);
  wait_ms(standin_malloc_ms);
  *pointer = NULL;
  if (code == kSuccess && bytes > 0) code = allocate(pointer, bytes);
  __atomic_add_fetch(&standin_mallocs_, 1, __ATOMIC_RELAXED);
  record("cudaMalloc %zu MiB = %d", bytes >> 20, code);
  return result(code);
}
int cudaFree(void* pointer) {
  int code = use();
  if (code == kSuccess) code = forbidden_by_capture("cudaFree");
  struct block block = {0};
  if (code == kSuccess && pointer != NULL) {
    record("cudaFree begins");
    wait_ms(standin_free_ms);
    block = take_out(pointer, kDevice);
    if (block.bytes == 0) {
      code = kInvalidValue;
    } else {
      munmap(block.begin, block.bytes);
      close(block.file);
      pthread_mutex_lock(&mutex);
      taken -= block.bytes;
      pthread_mutex_unlock(&mutex);
    }
  }
  __atomic_add_fetch(&standin_frees_, 1, __ATOMIC_RELAXED);
  record("cudaFree %zu MiB = %d", block.bytes >> 20, code);
  return result(code);
}
int cudaMallocAsync(void** pointer, size_t bytes, struct stream* stream) {
  (void)stream;
  return cudaMalloc(pointer, bytes);
}
int cudaFreeAsync(void* pointer, struct stream* stream) {
  (void)stream;
  return cudaFree(pointer);
}
int cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  *total_bytes = (size_t)standin_capacity_mib << 20;
  pthread_mutex_lock(&mutex);
  *free_bytes = *total_bytes - taken;
  pthread_mutex_unlock(&mutex);
  return result(use());
}
int cudaHostAlloc(void** pointer, size_t bytes, unsigned flags) {
  (void)flags;
  const int code = forbidden_by_capture("cudaHostAlloc");
  if (code != kSuccess) return result(code);
  if (posix_memalign(pointer, 4096, bytes) != 0) return result(kMemoryAllocation);
  add(*pointer, bytes, kHost, -1, 0);
  return result(use());
}
int cudaFreeHost(void* pointer) {
  if (pointer == NULL) return kSuccess;
  const struct block block = take_out(pointer, kHost);
  if (block.bytes == 0) return result(kInvalidValue);
  free(pointer);
  return kSuccess;
}
int cudaHostRegister(void* pointer, size_t bytes, unsigned flags) {
  (void)flags;
  add(pointer, bytes, kHost, -1, 0);
  return result(use());
}
int cudaHostUnregister(void* pointer) {
  return result(take_out(pointer, kHost).bytes == 0 ? kInvalidValue : kSuccess);
}
int cudaHostGetDevicePointer(void** device, void* host, unsigned flags) {
  (void)flags;
  *device = host;
  return kSuccess;
}
struct attributes {
  int type, device;
  void *device_pointer, *host_pointer;
};
int cudaPointerGetAttributes(struct attributes* attributes, const void* pointer) {
  const int kind = find(pointer).kind;
  *attributes = (struct attributes){kind, kind == kUnregistered ? -2 : 0, kind == kUnregistered ? NULL : (void*)pointer,
                                    kind == kDevice ? NULL : (void*)pointer};
  return result(use());
}
int cudaMemcpyAsync(void* to, const void* from, size_t bytes, int kind, struct stream* stream) {
  (void)kind;
  if (bytes > 0 && !capturing(stream)) memmove(to, from, bytes);
  return result(use());
}
int cudaMemcpy(void* to, const void* from, size_t bytes, int kind) {
  const int code = forbidden_by_capture("cudaMemcpy");
  return code != kSuccess ? result(code) : cudaMemcpyAsync(to, from, bytes, kind, NULL);
}
int cudaMemcpyPeerAsync(void* to, int to_device, const void* from, int from_device, size_t bytes,
                        struct stream* stream) {
  (void)to_device, (void)from_device;
  return cudaMemcpyAsync(to, from, bytes, 0, stream);
}
int cudaMemsetAsync(void* to, int value, size_t bytes, struct stream* stream) {
  if (bytes > 0 && !capturing(stream)) memset(to, value, bytes);
  return result(use());
}
int cudaMemset(void* to, int value, size_t bytes) {
  return cudaMemsetAsync(to, value, bytes, NULL);
}
int cudaMemPoolGetAttribute(void* pool, int attribute, void* value) {
  (void)pool, (void)attribute;
  memset(value, 0, 8);
  return kSuccess;
}

/* A handle names the process and the file; the importing process opens the file. */
struct handle {
  long magic, process, file;
  size_t bytes;
  char rest[32];
};
int cudaIpcGetMemHandle(struct handle* handle, void* pointer) {
  const struct block block = find(pointer);
  int code = standin_ipc_error;
  if (code == kSuccess && (block.kind != kDevice || block.mapped)) code = kInvalidValue;
  record("cudaIpcGetMemHandle = %d", code);
  if (code != kSuccess) return result(code);
  *handle = (struct handle){0x57a4d14, getpid(), block.file, block.bytes, {0}};
  return kSuccess;
}
int cudaIpcOpenMemHandle(void** pointer, struct handle handle, unsigned flags) {
  (void)flags;
  char path[64];
  snprintf(path, sizeof path, "/proc/%ld/fd/%ld", handle.process, handle.file);
  const int file = open(path, O_RDWR | O_CLOEXEC);
  if (file < 0) return result(kInvalidValue);
  *pointer = mmap(NULL, handle.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  add(*pointer, handle.bytes, kDevice, file, 1);
  return result(use());
}
int cudaIpcCloseMemHandle(void* pointer) {
  const struct block block = take_out(pointer, kDevice);
  if (block.bytes == 0) return result(kInvalidValue);
  munmap(block.begin, block.bytes);
  close(block.file);
  return kSuccess;
}
int cudaIpcOpenEventHandle(struct event** event, struct handle handle) {
  (void)handle;
  return cudaEventCreate(event);
}

/* ---- Kernels ---- */

struct dim3 {
  unsigned x, y, z;
};
static __thread struct {
  struct dim3 grid, block;
  size_t shared;
  void* stream;
} configurations[16];
static __thread int pushed;

unsigned __cudaPushCallConfiguration(struct dim3 grid, struct dim3 block, size_t shared, void* stream) {
  if (pushed == 16) return 1;
  configurations[pushed].grid = grid;
  configurations[pushed].block = block;
  configurations[pushed].shared = shared;
  configurations[pushed++].stream = stream;
  return 0;
}
int __cudaPopCallConfiguration(struct dim3* grid, struct dim3* block, size_t* shared, void** stream) {
  if (pushed == 0) return kInvalidValue;
  *grid = configurations[--pushed].grid;
  *block = configurations[pushed].block;
  *shared = configurations[pushed].shared;
  *stream = configurations[pushed].stream;
  return kSuccess;
}
void** __cudaRegisterFatBinary(void* binary) {
  (void)binary;
  static void* handle;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void** handle) {
  (void)handle;
}
void __cudaUnregisterFatBinary(void** handle) {
  (void)handle;
}
void __cudaRegisterFunction(void) {}
void __cudaRegisterVar(void) {}
int cudaLaunchKernel(void) {
  __atomic_add_fetch(&standin_launches, 1, __ATOMIC_RELAXED);
  return result(use());
}
int cudaLaunchKernelExC(void) {
  return cudaLaunchKernel();
}
int cudaLaunchHostFunc(void* stream, void (*function)(void*), void* argument) {
  (void)stream;
  function(argument);
  return kSuccess;
}
struct function_attributes {
  size_t shared, constant, local;
  int threads_per_block, registers, ptx_version, binary_version, rest[25];
};
int cudaFuncGetAttributes(struct function_attributes* attributes, const void* function) {
  (void)function;
  *attributes =
      (struct function_attributes){.threads_per_block = 1024, .registers = 32, .ptx_version = 80, .binary_version = 80};
  return kSuccess;
}
int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks_each, const void* function, int threads,
                                                           size_t shared, unsigned flags) {
  (void)function, (void)threads, (void)shared, (void)flags;
  *blocks_each = 8;
  return kSuccess;
}
