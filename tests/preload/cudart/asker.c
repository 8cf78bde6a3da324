// SPDX-License-Identifier: Apache-2.0
//
// Asks the driver for the functions named by its arguments: by both resolvers, for every CUDA version with a change,
// and with all flags. The witness records the answers.
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>

int main(int argc, char** argv) {
  static const int versions[] = {1000,  2000,  3020,  4000,  4010,  5000,  6000,  6050,  7000,
                                 8000,  9000,  9020,  10000, 10020, 11000, 11020, 11030, 11040,
                                 11060, 12000, 12010, 12020, 12030, 12080, 13000, 13010, 99000};
  void* library = dlopen("libcuda.so.1", RTLD_NOW);
  if (library == NULL) return fprintf(stderr, "%s\n", dlerror()), 1;
  int (*first)(const char*, void**, int, uint64_t) =
      (int (*)(const char*, void**, int, uint64_t))dlsym(library, "cuGetProcAddress");
  int (*second)(const char*, void**, int, uint64_t, int*) =
      (int (*)(const char*, void**, int, uint64_t, int*))dlsym(library, "cuGetProcAddress_v2");
  for (int i = 1; i < argc; i++) {
    dlsym(library, argv[i]);
    for (size_t v = 0; v < sizeof versions / sizeof *versions; v++) {
      for (uint64_t flags = 0; flags < 4; flags++) {
        void* function = NULL;
        int status = 0;
        first(argv[i], &function, versions[v], flags);
        function = NULL;
        second(argv[i], &function, versions[v], flags, &status);
      }
    }
  }
  return 0;
}
