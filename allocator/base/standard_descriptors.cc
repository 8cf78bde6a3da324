// SPDX-License-Identifier: Apache-2.0
//
// A program may be started with standard input, output or error closed, as by `vramctl status >&-`. The next file or
// socket that it opens would get that descriptor, and its output would go there. This opens /dev/null in each such
// place first. It runs from .preinit_array, because some libraries open files in their own initializers. (ELF
// specification, "Initialization and Termination Functions".)
#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace vrambroker {
namespace {

// By what can only be used the wrong way: reading and printing fail, as they do when nothing is open. Straight to the
// kernel, and built without sanitizers, which are not there yet.
void TakeStandardDescriptors() {
  for (int descriptor = STDIN_FILENO; descriptor <= STDERR_FILENO; ++descriptor) {
    if (syscall(SYS_fcntl, descriptor, F_GETFD) >= 0) continue;
    syscall(SYS_openat, AT_FDCWD, "/dev/null", descriptor == STDIN_FILENO ? O_WRONLY : O_RDONLY);
  }
}

[[gnu::section(".preinit_array"), gnu::used]] void (*const take_standard_descriptors)() = TakeStandardDescriptors;

}  // namespace
}  // namespace vrambroker
