// SPDX-License-Identifier: Apache-2.0
//
// libvrambroker.so: finds or loads the core at first use, and detects a fork() that has made the core unusable.
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <link.h>
#include <pthread.h>
#include <sys/file.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "client/c/core_api.h"
#include "client/c/library.h"

namespace vrambroker::c_library {
namespace {

constexpr char kCoreName[] = "libvrambroker-core.so";

char own_path[PATH_MAX];  // links resolved; empty when unknown

std::atomic<const vrambroker_core*> loaded{nullptr};
pthread_mutex_t load_mutex = PTHREAD_MUTEX_INITIALIZER;
std::atomic<bool> loading{false};
std::atomic<bool> forked{false};

// Runs in a child made by fork(). A core without gRPC's threads works in the child; a core being loaded by another
// thread does not.
void AfterFork() {
  const vrambroker_core* const core = loaded.load(std::memory_order_relaxed);
  if (loading.load(std::memory_order_relaxed) || (core != nullptr && core->uses_grpc())) forked.store(true);
  pthread_mutex_init(&load_mutex, nullptr);  // another thread may have held the lock
}

// Runs at load: a relative path may be invalid later.
[[gnu::constructor]] void AtLoad() {
  Dl_info info;
  if (dladdr(reinterpret_cast<const void*>(&AtLoad), &info) == 0 || realpath(info.dli_fname, own_path) == nullptr) {
    own_path[0] = '\0';
  }
  pthread_atfork(nullptr, nullptr, &AfterFork);
}

// The file defining `name`, as found by the program's own libraries. Null: not found.
const void* FileWith(void* program, const char* name) {
  Dl_info info;
  void* const found = dlsym(program, name);
  return found != nullptr && dladdr(found, &info) != 0 ? info.dli_fbase : nullptr;
}

// A program with gRPC or protobuf in its global symbols would make the core use the program's copy. RTLD_DEEPBIND
// separates the copies, but also separates the core's malloc() from a replacement of the C library's, and these cannot
// be mixed.
int DeepBindIfNeeded() {
  int flag = 0;
#ifdef RTLD_DEEPBIND
  void* const program = dlopen(nullptr, RTLD_LAZY);
  if (program == nullptr) return 0;
  const bool own_grpc = FileWith(program, "grpc_init") != nullptr ||
                        FileWith(program, "_ZN6google8protobuf8internal13VerifyVersionEiiPKc") != nullptr;
  const bool own_malloc = FileWith(program, "malloc") != FileWith(program, "getenv") ||
                          FileWith(program, "_Znwm") != FileWith(program, "__cxa_throw");
  if (own_grpc && !own_malloc) flag = RTLD_DEEPBIND;
  dlclose(program);
#endif
  return flag;
}

// ---- Another copy of this library in the process ----

// Two cores would register the same messages with one protobuf, and protobuf would end the process. So a second copy of
// this library uses the core loaded by the first copy.

// Makes copies exclude each other while finding and loading the core: locks a file owned by this process and its user,
// since the copies share no known memory. Without /proc, two copies loading their cores at the same moment are not kept
// apart.
class OneCopyAtATime {
 public:
  OneCopyAtATime() : file_(open("/proc/self/maps", O_RDONLY | O_CLOEXEC)) {
    while (file_ >= 0 && flock(file_, LOCK_EX) != 0 && errno == EINTR) {
    }
  }
  ~OneCopyAtATime() {
    if (file_ < 0) return;
    (void)flock(file_, LOCK_UN);  // a child forked meanwhile also has the file open
    close(file_);
  }
  OneCopyAtATime(const OneCopyAtATime&) = delete;
  OneCopyAtATime& operator=(const OneCopyAtATime&) = delete;

 private:
  const int file_;
};

struct LoadedFile {
  size_t skip;  // matches to skip
  char path[PATH_MAX];
};

int TakeIfCore(dl_phdr_info* info, size_t /*size*/, void* argument) {
  LoadedFile& file = *static_cast<LoadedFile*>(argument);
  if (info->dlpi_name == nullptr || !IsFileNamed(info->dlpi_name, kCoreName) || file.skip-- > 0) return 0;
  std::snprintf(file.path, sizeof file.path, "%s", info->dlpi_name);
  return 1;
}

// The core already loaded, with its path. Null: no core is loaded.
void* FindLoadedCore(char (&path)[PATH_MAX]) {
  for (size_t i = 0;; ++i) {
    LoadedFile file = {.skip = i, .path = {}};
    if (dl_iterate_phdr(&TakeIfCore, &file) == 0) return nullptr;
    void* const library = dlopen(file.path, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
    if (library == nullptr) continue;
    if (dlsym(library, "vrambroker_core_v1") != nullptr) {
      std::memcpy(path, file.path, sizeof path);
      return library;
    }
    dlclose(library);
  }
}

// ---- Loading ----

// The function table of `library`, the core at `path`. Null: the error says why.
const vrambroker_core* TableOf(void* library, const char* path, bool is_anothers) {
  const auto get = reinterpret_cast<VrambrokerCoreV1>(dlsym(library, "vrambroker_core_v1"));
  const vrambroker_core* const core = get == nullptr ? nullptr : get(kVrambrokerCoreVersion);
  if (core != nullptr && core->is_forked()) {
    CheckNotForked(/*is_forked=*/true);
    return nullptr;
  }
  if (core != nullptr) return core;
  if (!is_anothers) {
    Fail(VRAMBROKER_FAILED_PRECONDITION, "%s and %s have different versions: install both from one build of vrambroker",
         path, own_path);
    return nullptr;
  }
  const auto release = reinterpret_cast<VrambrokerCoreRelease>(dlsym(library, "vrambroker_core_release"));
  Fail(
      VRAMBROKER_FAILED_PRECONDITION,
      "another copy of vrambroker in this process has loaded %s, version %s, which %s, version %s, cannot use, and a "
      "process can have only one: let all of the program use the same libvrambroker.so, or install one version of both",
      path, release == nullptr ? "unknown" : release(), own_path, VRAMBROKER_VERSION);
  return nullptr;
}

// Reports dlerror()'s text `why`; libstdc++'s version names appear in every translation.
void FailToLoad(const char* core, const char* why) {
  if (why == nullptr) why = "unknown";
  if (std::strstr(why, "GLIBCXX_") != nullptr || std::strstr(why, "CXXABI_") != nullptr) {
    Fail(
        VRAMBROKER_FAILED_PRECONDITION,
        "cannot load %s, because this program's C++ library is too old: %s; use the libvrambroker.so of a vrambroker "
        "bundle, which brings its own libstdc++, or give the program a newer one: conda install 'libstdcxx-ng>=%d', or "
        "the full path of the system's in LD_PRELOAD",
        core, why, _GLIBCXX_RELEASE);
    return;
  }
  Fail(VRAMBROKER_FAILED_PRECONDITION,
       "cannot load %s: %s; install the same version of it beside libvrambroker.so, with the gRPC that it needs", core,
       why);
}

// Null: the error says why. REQUIRES: load_mutex is held.
const vrambroker_core* Load() {
  char path[PATH_MAX];
  char own_core[PATH_MAX];
  const char* const slash = std::strrchr(own_path, '/');
  const int directory = slash == nullptr ? 0 : static_cast<int>(slash - own_path + 1);
  if (std::snprintf(own_core, sizeof own_core, "%.*s%s", directory, own_path, kCoreName) >=
      static_cast<int>(sizeof own_core)) {
    Fail(VRAMBROKER_FAILED_PRECONDITION, "%s: the path is too long", own_path);
    return nullptr;
  }
  const OneCopyAtATime lock;
  if (void* const library = FindLoadedCore(path)) {
    return TableOf(library, path, /*is_anothers=*/std::strcmp(path, own_core) != 0);
  }
  // Local: keeps the core's, gRPC's and protobuf's symbols out of the program. Never closed: gRPC has threads.
  void* const library = dlopen(own_core, RTLD_NOW | RTLD_LOCAL | DeepBindIfNeeded());
  if (library == nullptr) {
    FailToLoad(own_core, dlerror());
    return nullptr;
  }
  return TableOf(library, own_core, /*is_anothers=*/false);
}

}  // namespace

int CheckNotForked(bool is_forked) {
  if (!is_forked && !forked.load(std::memory_order_relaxed)) return VRAMBROKER_OK;
  return Fail(VRAMBROKER_FAILED_PRECONDITION,
              "this process was made by fork() after its parent had connected to vrambrokerd: use vrambroker in the "
              "parent only, fork before the first vrambroker_connect(), or exec");
}

const vrambroker_core* Core() {
  if (CheckNotForked() != VRAMBROKER_OK) return nullptr;
  if (const vrambroker_core* core = loaded.load(std::memory_order_acquire)) return core;
  pthread_mutex_lock(&load_mutex);
  const vrambroker_core* core = loaded.load(std::memory_order_relaxed);
  if (core == nullptr) {
    loading.store(true);
    core = Load();
    loaded.store(core, std::memory_order_release);
    loading.store(false);
  }
  pthread_mutex_unlock(&load_mutex);
  return core;
}

const char* OwnPath() {
  return own_path;
}

}  // namespace vrambroker::c_library
