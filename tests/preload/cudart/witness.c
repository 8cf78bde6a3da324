// SPDX-License-Identifier: Apache-2.0
//
// Records a program's questions to the driver, and the answers. An LD_PRELOAD library in front of dlsym, and of the
// driver's cuGetProcAddress and cuGetProcAddress_v2. Writes a line to the file WITNESS for each question:
//
//     HOW NAME VERSION FLAGS ERROR STATUS ANSWER
//
// ANSWER is "-" for NULL, or the library's file and the function's name. Supports programs with one thread only.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef __x86_64__
#define OLDEST "GLIBC_2.2.5"
#else
#define OLDEST "GLIBC_2.17"
#endif
__asm__(".symver dlvsym,dlvsym@" OLDEST);

typedef int get_proc(const char*, void**, int, uint64_t);
typedef int get_proc_v2(const char*, void**, int, uint64_t, int*);
static get_proc* real_get;
static get_proc_v2* real_get_v2;

static void say_answer(FILE* file, const void* function) {
  Dl_info info;
  if (function == NULL) {
    fprintf(file, " -\n");
  } else if (dladdr(function, &info) == 0) {
    fprintf(file, " %p\n", function);
  } else {
    const char* slash = strrchr(info.dli_fname, '/');
    fprintf(file, " %s:", slash == NULL ? info.dli_fname : slash + 1);
    if (info.dli_sname != NULL && info.dli_saddr == function) {
      fprintf(file, "%s\n", info.dli_sname);
    } else {
      fprintf(file, "+%zx\n", (size_t)((const char*)function - (const char*)info.dli_fbase));
    }
  }
}

static void write_down(const char* how, const char* name, int version, uint64_t flags, int error, int status,
                       const void* function) {
  const char* path = getenv("WITNESS");
  FILE* file = path == NULL ? NULL : fopen(path, "a");
  if (file == NULL) return;
  fprintf(file, "%s %s %d %llu %d %d", how, name, version, (unsigned long long)flags, error, status);
  say_answer(file, function);
  fclose(file);
}

static int witness_get(const char* name, void** function, int version, uint64_t flags);
static int witness_get_v2(const char* name, void** function, int version, uint64_t flags, int* status);

/* Records later questions to a resolver, too. `is_second`: the resolver is cuGetProcAddress_v2. */
static void* seen(void* function, int is_second) {
  if (function == NULL) return NULL;
  if (is_second) {
    real_get_v2 = (get_proc_v2*)function;
    return (void*)witness_get_v2;
  }
  real_get = (get_proc*)function;
  return (void*)witness_get;
}

static int witness_get(const char* name, void** function, int version, uint64_t flags) {
  const int error = real_get(name, function, version, flags);
  write_down("cuGetProcAddress", name, version, flags, error, -1, error == 0 ? *function : NULL);
  if (error == 0 && strcmp(name, "cuGetProcAddress") == 0) *function = seen(*function, version >= 12000);
  return error;
}

static int witness_get_v2(const char* name, void** function, int version, uint64_t flags, int* status) {
  int own_status = -1;
  const int error = real_get_v2(name, function, version, flags, status == NULL ? &own_status : status);
  write_down("cuGetProcAddress_v2", name, version, flags, error, status == NULL ? own_status : *status,
             error == 0 ? *function : NULL);
  if (error == 0 && strcmp(name, "cuGetProcAddress") == 0) *function = seen(*function, version >= 12000);
  return error;
}

__attribute__((visibility("default"))) void* dlsym(void* handle, const char* name) {
  static void* (*next)(void*, const char*);
  if (next == NULL) next = (void* (*)(void*, const char*))dlvsym(RTLD_NEXT, "dlsym", OLDEST);
  void* function = next(handle, name);
  if (strncmp(name, "cu", 2) != 0) return function;
  write_down("dlsym", name, 0, 0, 0, 0, function);
  if (strcmp(name, "cuGetProcAddress") == 0) return seen(function, 0);
  if (strcmp(name, "cuGetProcAddress_v2") == 0) return seen(function, 1);
  return function;
}
