/* SPDX-License-Identifier: Apache-2.0 */
#include "client/preload/driver.h"

#include <string.h>

#include "client/preload/lock.h"
#include "client/preload/runtime.h"
#include "client/preload/settings.h"

enum library { DRIVER, MANAGEMENT };

struct entry {
  const char* name;
  void* hook; /* NULL: only called */
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

static int found_already[2];
static struct driver driver_functions;
static struct management management_functions;
static struct lock finding;

static const struct entry* entry_of(int hook) {
  return hook < DRIVER_HOOKS ? &driver_entries[hook] : &management_entries[hook - DRIVER_HOOKS];
}

static enum library library_of(int hook) {
  return hook < DRIVER_HOOKS ? DRIVER : MANAGEMENT;
}

static void* function_at(const void* functions, const struct entry* entry) {
  void* function;
  memcpy(&function, (const char*)functions + entry->slot, sizeof function);
  return function;
}

/* No lock is held while symbols are looked up: the dynamic linker may be waiting for this thread's caller. */
static void take(enum library which, void* handle) {
  struct driver found_driver;
  struct management found_management;
  char* found = which == DRIVER ? (char*)&found_driver : (char*)&found_management;
  const struct entry* entries = which == DRIVER ? driver_entries : management_entries;
  const size_t count = which == DRIVER ? sizeof driver_entries / sizeof *driver_entries
                                       : sizeof management_entries / sizeof *management_entries;
  for (size_t i = 0; i < count; i++) {
    void* function = find_symbol(handle, entries[i].name);
    memcpy(found + entries[i].slot, &function, sizeof function);
  }
  clear_dlerror();
  lock(&finding);
  if (!found_already[which]) {
    if (which == DRIVER) {
      driver_functions = found_driver;
    } else {
      management_functions = found_management;
    }
    __atomic_store_n(&found_already[which], 1, __ATOMIC_RELEASE);
  }
  unlock(&finding);
}

static int is_found(enum library which) {
  return __atomic_load_n(&found_already[which], __ATOMIC_ACQUIRE);
}

static const void* real(enum library which) {
  if (!is_found(which)) {
    void* handle = loaded_library(which == DRIVER ? "libcuda.so.1" : "libnvidia-ml.so.1");
    if (handle == NULL) return NULL;
    take(which, handle);
  }
  return which == DRIVER ? (const void*)&driver_functions : (const void*)&management_functions;
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
  const void* functions = real(library_of(hook));
  return functions == NULL ? NULL : function_at(functions, entry_of(hook));
}

int is_hook(int hook, const void* function) {
  return entry_of(hook)->hook == function;
}

void* hook_for(int hook, void* function) {
  const enum library which = library_of(hook);
  const char* file = which == DRIVER ? "libcuda.so" : "libnvidia-ml.so";
  if (real(which) == NULL) {
    /* In a namespace of its own (dlmopen)? */
    void* handle = library_at(function, file);
    if (handle != NULL && find_symbol(handle, entry_of(hook)->name) == function) take(which, handle);
    if (!is_found(which)) return function;
  }
  if (hooked_function(hook) == function) return entry_of(hook)->hook;
  static int said;
  if (library_at(function, file) != NULL && !__atomic_exchange_n(&said, 1, __ATOMIC_RELAXED)) {
    say("a second copy of %s is in this process: what it allocates is not counted", file);
  }
  return function;
}

void* hook_for_address(void* function) {
  if (real(DRIVER) == NULL) return function;
  for (int i = 0; i < DRIVER_HOOKS; i++) {
    if (function_at(&driver_functions, &driver_entries[i]) == function) return driver_entries[i].hook;
  }
  return function;
}
