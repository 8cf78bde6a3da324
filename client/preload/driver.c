/* SPDX-License-Identifier: Apache-2.0 */
#include "client/preload/driver.h"

#include <string.h>
#include <sys/mman.h>

#include "client/preload/runtime.h"
#include "client/preload/say.h"

enum library { DRIVER, MANAGEMENT };

struct entry {
  const char* name;
  void* hook; /* NULL: called but not hooked */
  size_t slot;
};

#define HOOKED(name, arguments) {#name, (void*)name, offsetof(struct driver, name)},
#define CALLED(name, arguments) {#name, NULL, offsetof(struct driver, name)},
static const struct entry driver_entries[] = {CUDA_HOOKS(HOOKED) CUDA_CALLS(CALLED)};
#undef HOOKED
#undef CALLED
#define HOOKED(name, arguments) {#name, (void*)name, offsetof(struct management, name)},
#define CALLED(name, arguments) {#name, NULL, offsetof(struct management, name)},
static const struct entry management_entries[] = {NVML_HOOKS(HOOKED) NVML_CALLS(CALLED)};
#undef HOOKED
#undef CALLED

#define COUNT(name, arguments) +1
enum { DRIVER_HOOKS = 0 CUDA_HOOKS(COUNT), MANAGEMENT_HOOKS = 0 NVML_HOOKS(COUNT) };
#undef COUNT

static void* functions[2]; /* struct driver, struct management; NULL: not found yet */

static const struct entry* entry_of(int hook) {
  return hook < DRIVER_HOOKS ? &driver_entries[hook] : &management_entries[hook - DRIVER_HOOKS];
}

static enum library library_of(int hook) {
  return hook < DRIVER_HOOKS ? DRIVER : MANAGEMENT;
}

static void* function_at(const void* table, const struct entry* entry) {
  void* function;
  memcpy(&function, (const char*)table + entry->slot, sizeof function);
  return function;
}

/* Takes no lock: the dynamic linker may be waiting for this thread's caller, and a child after fork() might find the
 * lock held forever. The first thread's table stays. */
static void take(enum library which, void* handle) {
  const size_t size = which == DRIVER ? sizeof(struct driver) : sizeof(struct management);
  const struct entry* entries = which == DRIVER ? driver_entries : management_entries;
  const size_t count = which == DRIVER ? sizeof driver_entries / sizeof *driver_entries
                                       : sizeof management_entries / sizeof *management_entries;
  char* found = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (found == MAP_FAILED) return;
  for (size_t i = 0; i < count; i++) {
    void* function = find_symbol(handle, entries[i].name);
    memcpy(found + entries[i].slot, &function, sizeof function);
  }
  clear_dlerror();
  void* none = NULL;
  if (!__atomic_compare_exchange_n(&functions[which], &none, found, 0, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED)) {
    munmap(found, size);
  }
}

static const void* real(enum library which) {
  const void* known = __atomic_load_n(&functions[which], __ATOMIC_ACQUIRE);
  if (known != NULL) return known;
  void* handle = loaded_library(which == DRIVER ? "libcuda.so.1" : "libnvidia-ml.so.1");
  if (handle != NULL) take(which, handle);
  return __atomic_load_n(&functions[which], __ATOMIC_ACQUIRE);
}

const struct driver* real_driver(void) {
  return real(DRIVER);
}

const struct management* real_management(void) {
  return real(MANAGEMENT);
}

int hook_named(const char* name) {
  if (name[0] == 'c' && name[1] == 'u') {
    for (int i = 0; i < DRIVER_HOOKS; i++) {
      if (is_same_text(name + 2, driver_entries[i].name + 2)) return i;
    }
  } else if (name[0] == 'n' && name[1] == 'v') {
    for (int i = 0; i < MANAGEMENT_HOOKS; i++) {
      if (is_same_text(name + 2, management_entries[i].name + 2)) return DRIVER_HOOKS + i;
    }
  }
  return -1;
}

void* hook_function(int hook) {
  return entry_of(hook)->hook;
}

void* hooked_function(int hook) {
  const void* table = real(library_of(hook));
  return table == NULL ? NULL : function_at(table, entry_of(hook));
}

int is_hook(int hook, const void* function) {
  return entry_of(hook)->hook == function;
}

void* hook_for(int hook, void* function) {
  const enum library which = library_of(hook);
  const char* file = which == DRIVER ? "libcuda.so" : "libnvidia-ml.so";
  if (real(which) == NULL) {
    /* The library may have its own namespace (dlmopen). */
    void* handle = library_at(function, file);
    if (handle != NULL && find_symbol(handle, entry_of(hook)->name) == function) take(which, handle);
    if (real(which) == NULL) return function;
  }
  if (hooked_function(hook) == function) return entry_of(hook)->hook;
  static int said;
  if (library_at(function, file) != NULL && !__atomic_exchange_n(&said, 1, __ATOMIC_RELAXED)) {
    say("a second copy of %s is in this process: what it allocates is not counted", file);
  }
  return function;
}

void* hook_for_address(void* function) {
  const void* table = real(DRIVER);
  for (int i = 0; i < DRIVER_HOOKS && table != NULL; i++) {
    if (function_at(table, &driver_entries[i]) == function) return driver_entries[i].hook;
  }
  return function;
}
