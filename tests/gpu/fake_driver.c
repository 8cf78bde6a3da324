// SPDX-License-Identifier: Apache-2.0
//
// Stands in for libcuda.so.1, for the test of capabilities.py: the driver's calls work on memory files. $FAKE_DRIVER
// names the failing call and its code, for example "cuIpcOpenMemHandle_v2=801": 0 kills the process, -1 makes the call
// hang.
#define _GNU_SOURCE
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct {
  unsigned char bytes[64];
} Handle;

static int Fails(const char* call) {
  const char* const wanted = getenv("FAKE_DRIVER");
  const size_t length = strlen(call);
  if (wanted == NULL || strncmp(wanted, call, length) != 0 || wanted[length] != '=') return 0;
  const int code = atoi(wanted + length + 1);
  if (code == 0) raise(SIGKILL);
  while (code < 0) pause();
  return code;
}
#define BEGIN                         \
  const int failed = Fails(__func__); \
  if (failed) return failed

static int last_file = -1;  // file of the last cuMemAlloc

int cuInit(unsigned flags) {
  BEGIN;
  return (int)flags;
}
int cuGetErrorName(int code, const char** name) {
  *name = code == 801 ? "CUDA_ERROR_NOT_SUPPORTED" : "CUDA_ERROR_UNKNOWN";
  return 0;
}
int cuDevicePrimaryCtxRetain(void** context, int device) {
  BEGIN;
  *context = (void*)1;
  return device;
}
int cuCtxSetCurrent(void* context) {
  return context == (void*)1 ? 0 : 201;
}
int cuCtxSynchronize(void) {
  return 0;
}
int cuMemAlloc_v2(uint64_t* address, size_t bytes) {
  BEGIN;
  last_file = memfd_create("fake", MFD_CLOEXEC);
  if (ftruncate(last_file, (off_t)bytes) != 0) return 2;
  *address = (uint64_t)(uintptr_t)mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, last_file, 0);
  return 0;
}
int cuMemFree_v2(uint64_t address) {
  return address == 0 ? 1 : 0;
}
int cuMemsetD32_v2(uint64_t address, unsigned value, size_t count) {
  for (size_t i = 0; i < count; ++i) ((unsigned*)(uintptr_t)address)[i] = value;
  return 0;
}
int cuMemcpyDtoH_v2(void* to, uint64_t from, size_t bytes) {
  memcpy(to, (const void*)(uintptr_t)from, bytes);
  return 0;
}
int cuIpcGetMemHandle(Handle* handle, uint64_t address) {
  BEGIN;
  snprintf((char*)handle->bytes, sizeof handle->bytes, "/proc/%d/fd/%d", getpid(), last_file);
  return address == 0 ? 1 : 0;
}
int cuIpcOpenMemHandle_v2(uint64_t* address, Handle handle, unsigned flags) {
  BEGIN;
  FILE* const file = fopen((const char*)handle.bytes, "r+");
  if (file == NULL || flags != 1) return 1;
  struct stat status;
  if (fstat(fileno(file), &status) != 0) return 1;
  *address =
      (uint64_t)(uintptr_t)mmap(NULL, (size_t)status.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fileno(file), 0);
  return 0;
}
int cuIpcCloseMemHandle(uint64_t address) {
  return address == 0 ? 1 : 0;
}

typedef struct {  // layout of cuda.h
  int type, handle_types, place, device;
  void* windows;
  unsigned char flags[8];
} Properties;

int cuMemCreate(uint64_t* allocation, size_t bytes, const Properties* properties, uint64_t flags) {
  BEGIN;
  if (properties->type != 1 || properties->handle_types != 1 || properties->place != 1 || flags != 0) return 1;
  const int fd = memfd_create("fake", MFD_CLOEXEC);
  *allocation = (uint64_t)fd;
  return ftruncate(fd, (off_t)bytes) == 0 ? 0 : 2;
}
int cuMemExportToShareableHandle(int* fd, uint64_t allocation, int type, uint64_t flags) {
  BEGIN;
  *fd = dup((int)allocation);
  return type == 1 ? (int)flags : 1;
}
int cuMemImportFromShareableHandle(uint64_t* allocation, void* fd, int type) {
  BEGIN;
  *allocation = (uint64_t)dup((int)(intptr_t)fd);
  return type == 1 ? 0 : 1;
}
int cuMemAddressReserve(uint64_t* address, size_t bytes, size_t alignment, uint64_t wanted, uint64_t flags) {
  if (alignment != 0 || wanted != 0 || flags != 0) return 1;
  *address = (uint64_t)(uintptr_t)mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return 0;
}
int cuMemMap(uint64_t address, size_t bytes, size_t offset, uint64_t allocation, uint64_t flags) {
  if (offset != 0 || flags != 0) return 1;
  void* const at = (void*)(uintptr_t)address;
  return mmap(at, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, (int)allocation, 0) == at ? 0 : 1;
}
int cuMemSetAccess(uint64_t address, size_t bytes, const int* access, size_t count) {
  if (access[0] != 1 || access[2] != 3 || count != 1) return 1;
  return mprotect((void*)(uintptr_t)address, bytes, PROT_READ | PROT_WRITE) == 0 ? 0 : 1;
}
