// SPDX-License-Identifier: Apache-2.0
#ifndef VRAMBROKER_TESTS_SUPPORT_ANY_LIBRARY_H_
#define VRAMBROKER_TESTS_SUPPORT_ANY_LIBRARY_H_

#include <dlfcn.h>
#include <link.h>

#include <filesystem>
#include <string>

namespace vrambroker::testing_support {

// Returns the path of a library that any program can load. Tests use the library in place of libvrambroker-preload.so
// where the preloaded code does not matter.
inline std::string AnyLibrary() {
  void* const library = dlopen("libm.so.6", RTLD_NOW);
  link_map* map = nullptr;
  if (library == nullptr || dlinfo(library, RTLD_DI_LINKMAP, &map) != 0) return "";
  return std::filesystem::canonical(map->l_name).string();
}

}  // namespace vrambroker::testing_support

#endif  // VRAMBROKER_TESTS_SUPPORT_ANY_LIBRARY_H_
