// SPDX-License-Identifier: Apache-2.0
//
// A program gets the library's hook for each form of a function, also for a newer or older CUDA than the driver's.
#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stddef.h>
#include <stdint.h>

#include <array>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "tests/preload/preload_fixture.h"
#include "tests/support/nvidia_driver.h"
#include "tests/support/util.h"

// The namespace separates the library's declarations from the substitute's different declarations.
namespace preload {
#include "client/preload/driver_api.h"
#define NAME(name, arguments) #name,
constexpr auto kHooks = std::to_array<const char*>({CUDA_HOOKS(NAME)});
#undef NAME
}  // namespace preload

namespace vrambroker::testing_support {
namespace {

constexpr auto kVersions = std::to_array<int>({-1, 2000, 3010, 3019, 3020, 4000, 7000, 10000, 11000, 11030, 11040,
                                               12000, 12020, 12030, 12050, 13000, 13040, 14000, 99990});

// Removes the suffixes of a name, as in "cuMemAllocAsync_ptsz" and "cuMemAlloc_v2".
std::string BaseOf(std::string name) {
  if (absl::EndsWith(name, "_ptsz")) name.resize(name.size() - 5);
  if (const size_t suffix = name.rfind("_v"); suffix != std::string::npos) name.resize(suffix);
  return name;
}

std::set<std::string> Bases() {
  std::set<std::string> bases;
  for (const char* const name : preload::kHooks) bases.insert(BaseOf(name));
  return bases;
}

class PreloadNewer : public PreloadTest {
 protected:
  // Asks for all forms of all hooks. The driver is in the folder `driver`.
  void ExpectHooks(const std::string& driver) const {
    Program program = Run("dlsym", {{"LD_LIBRARY_PATH", driver}});
    int found = 0;
    for (const std::string& base : Bases()) {
      for (const int version : kVersions) {
        for (int flags = 0; flags <= 3; ++flags) {
          const std::string question = absl::StrCat("resolve ", base, " ", version, " ", flags);
          const std::string answer = program.Ask(question);
          const std::vector<std::string> words = absl::StrSplit(answer, ' ');
          ASSERT_EQ(words.size(), 5u) << question << ": " << answer;
          EXPECT_EQ(words[1], words[3]) << question << ": " << answer;
          EXPECT_EQ(words[2], words[4]) << question << ": " << answer;
          if (words[1] == "none") continue;
          ++found;
          EXPECT_EQ(words[1], "libvrambroker-preload.so") << question << ": " << answer;
        }
      }
    }
    EXPECT_GT(found, 1000);
  }
};

TEST_F(PreloadNewer, EveryFormOfAFunctionIsAHook) {
  ExpectHooks(FolderOf(paths::kPlainCudaSubstitute));
}

TEST_F(PreloadNewer, EveryFormOfAFunctionOfTheRealDriverIsAHook) {
  NEEDS_REAL_CUDA_LIBRARY(file);
  ExpectHooks(FolderOf(file));
}

// Exported names have hooks, too.
TEST_F(PreloadNewer, EveryVariantThatTheRealDriverExportsHasAHook) {
  NEEDS_REAL_CUDA_LIBRARY(file);
  if (kSanitized) GTEST_SKIP() << "the real driver is built without sanitizers";
  void* const library = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  ASSERT_NE(library, nullptr) << dlerror();
  const std::set<std::string> known(preload::kHooks.begin(), preload::kHooks.end());
  int found = 0;
  for (const std::string& base : Bases()) {
    for (const char* const version : {"", "_v2", "_v3", "_v4", "_v5"}) {
      for (const char* const stream : {"", "_ptsz", "_ptds"}) {
        const std::string name = absl::StrCat(base, version, stream);
        if (dlsym(library, name.c_str()) == nullptr) continue;
        ++found;
        EXPECT_EQ(known.count(name), 1u) << name;
      }
    }
  }
  EXPECT_GT(found, 50);
}

}  // namespace
}  // namespace vrambroker::testing_support
