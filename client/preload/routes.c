/* SPDX-License-Identifier: Apache-2.0
 *
 * Routes of a program's calls to the hooks. (1) Linking: the hooks are exported under the driver's names, and this
 * library comes first. (2) dlsym and dlvsym, exported here as well. (3, 4) The driver's own cuGetProcAddress and
 * cuGetProcAddress_v2.
 *
 * The real resolver answers first. Only the driver's own function is replaced as an answer, by the hook of the
 * function: so a hook always has the interface of the replaced function, for any requested name and version. A missing
 * answer stays missing.
 */
#include <dlfcn.h>

#include "client/preload/driver.h"
#include "client/preload/runtime.h"

/* --- dlsym and dlvsym --- */

/* Next step: jump to `jump`, as if called by the program, or return `result` to the program. */
struct route {
  void* jump;
  void* result;
};

/* Kept as separate functions by the assembly below. */
struct route route_dlsym(void* handle, const char* name, const char* version);
struct route route_dlvsym(void* handle, const char* name, const char* version);

/* Returns the answer to a lookup by handle; `found`: the real answer. */
static void* answer(int hook, void* found, const char* name) {
  if (found == NULL) return NULL;
  if (!is_hook(hook, found)) return hook_for(hook, found);
  /* The lookup found the hook. A program testing for a function must not find it because of this library. */
  return hooked_function(hook) != NULL ? found : find_next(name);
}

static struct route route(void* handle, const char* name, const char* version, void* next) {
  const int hook = name == NULL ? -1 : hook_named(name);
  if (hook < 0) return (struct route){next, NULL};
  if (handle == RTLD_DEFAULT || handle == RTLD_NEXT) {
    /* The real function's search depends on the calling library. So we jump to the real resolver, which finds the hook,
     * because this library comes before the driver. A library behind this library and asking for the next function gets
     * the hook, too. */
    void* behind = find_next(name);
    if (behind != NULL && behind == hooked_function(hook)) return (struct route){NULL, hook_function(hook)};
    if (hooked_function(hook) != NULL) return (struct route){next, NULL};
    return (struct route){NULL, find_next(name)};
  }
  void* found =
      version == NULL ? ((dlsym_function*)next)(handle, name) : ((dlvsym_function*)next)(handle, name, version);
  return (struct route){NULL, answer(hook, found, name)};
}

struct route route_dlsym(void* handle, const char* name, const char* version) {
  (void)version; /* unset register */
  return route(handle, name, NULL, (void*)next_dlsym());
}

struct route route_dlvsym(void* handle, const char* name, const char* version) {
  return route(handle, name, version, (void*)next_dlvsym());
}

/* RTLD_NEXT and RTLD_DEFAULT refer to the library at the return address. C cannot guarantee a jump instead of a
 * call. */
#if defined(__x86_64__)
#define BASE_VERSION "GLIBC_2.2.5"
#define ENTRY(name)                                                                             \
  __asm__(".text\n.p2align 4\n.globl entry_" name "\n.hidden entry_" name "\n.type entry_" name \
          ",@function\n"                                                                        \
          "entry_" name                                                                         \
          ":\n.cfi_startproc\n endbr64\n"                                                       \
          " push %rdi\n .cfi_adjust_cfa_offset 8\n push %rsi\n .cfi_adjust_cfa_offset 8\n"      \
          " push %rdx\n .cfi_adjust_cfa_offset 8\n"                                             \
          " call route_" name                                                                   \
          "\n mov %rdx, %rcx\n"                                                                 \
          " pop %rdx\n .cfi_adjust_cfa_offset -8\n pop %rsi\n .cfi_adjust_cfa_offset -8\n"      \
          " pop %rdi\n .cfi_adjust_cfa_offset -8\n"                                             \
          " test %rax, %rax\n jz 1f\n jmp *%rax\n"                                              \
          "1: mov %rcx, %rax\n ret\n.cfi_endproc\n.size entry_" name ", .-entry_" name "\n")
#elif defined(__aarch64__)
#define BASE_VERSION "GLIBC_2.17"
#define ENTRY(name)                                                                                           \
  __asm__(".text\n.p2align 4\n.globl entry_" name "\n.hidden entry_" name "\n.type entry_" name               \
          ",%function\n"                                                                                      \
          "entry_" name                                                                                       \
          ":\n.cfi_startproc\n hint #34\n" /* bti c */                                                        \
          " stp x29, x30, [sp, #-48]!\n .cfi_def_cfa_offset 48\n .cfi_offset 29, -48\n .cfi_offset 30, -40\n" \
          " mov x29, sp\n stp x0, x1, [sp, #16]\n str x2, [sp, #32]\n"                                        \
          " bl route_" name                                                                                   \
          "\n mov x16, x0\n mov x17, x1\n"                                                                    \
          " ldp x0, x1, [sp, #16]\n ldr x2, [sp, #32]\n ldp x29, x30, [sp], #48\n"                            \
          " .cfi_restore 30\n .cfi_restore 29\n .cfi_def_cfa_offset 0\n"                                      \
          " cbz x16, 1f\n br x16\n"                                                                           \
          "1: mov x0, x17\n ret\n.cfi_endproc\n.size entry_" name ", .-entry_" name "\n")
#else
#error "this library knows x86-64 and aarch64"
#endif

ENTRY("dlsym");
ENTRY("dlvsym");

/* Exports the functions with the C library's versions: another preloaded library asking dlvsym for the next function
 * finds ours. */
#define EXPORT(name, version, at)                                                                                    \
  __asm__(".globl " name "_" version "\n.type " name "_" version ",STT_FUNC\n.set " name "_" version ", entry_" name \
          "\n.symver " name "_" version ", " name at version)
EXPORT("dlsym", "GLIBC_2.34", "@@");
EXPORT("dlvsym", "GLIBC_2.34", "@@");
__asm__(
    ".globl dlsym_base\n.type dlsym_base,STT_FUNC\n.set dlsym_base, entry_dlsym\n.symver dlsym_base, "
    "dlsym@" BASE_VERSION);
__asm__(
    ".globl dlvsym_base\n.type dlvsym_base,STT_FUNC\n.set dlvsym_base, entry_dlvsym\n.symver dlvsym_base, "
    "dlvsym@" BASE_VERSION);

/* --- cuGetProcAddress --- */

int cuGetProcAddress(const char* symbol, void** function, int version, uint64_t flags) {
  const struct driver* driver = real_driver();
  if (driver == NULL || driver->cuGetProcAddress == NULL) return CU_NOT_FOUND;
  const int error = driver->cuGetProcAddress(symbol, function, version, flags);
  if (error == CU_OK && function != NULL && *function != NULL) *function = hook_for_address(*function);
  return error;
}

int cuGetProcAddress_v2(const char* symbol, void** function, int version, uint64_t flags, int* status) {
  const struct driver* driver = real_driver();
  if (driver == NULL || driver->cuGetProcAddress_v2 == NULL) return CU_NOT_FOUND;
  const int error = driver->cuGetProcAddress_v2(symbol, function, version, flags, status);
  if (error == CU_OK && function != NULL && *function != NULL) *function = hook_for_address(*function);
  return error;
}
