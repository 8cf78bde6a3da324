// SPDX-License-Identifier: Apache-2.0
//
// A program may be started with standard input, output or error closed, as by `vramctl status >&-`. The next file or
// socket opened would get the closed descriptor, and with it the program's output. So /dev/null is opened in each
// closed place first, from .preinit_array, because some libraries open files in their own initializers. (ELF
// specification, "Initialization and Termination Functions".)
#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace vrambroker {
namespace {

// Opens /dev/null for the wrong direction only: reading and printing fail, as with a closed descriptor. Calls the
// kernel directly, and is built without sanitizers: sanitizers are not initialized yet.
void TakeStandardDescriptors() {
  for (int descriptor = STDIN_FILENO; descriptor <= STDERR_FILENO; ++descriptor) {
    if (syscall(SYS_fcntl, descriptor, F_GETFD) >= 0) continue;
    syscall(SYS_openat, AT_FDCWD, "/dev/null", descriptor == STDIN_FILENO ? O_WRONLY : O_RDONLY);
  }
}

[[gnu::section(".preinit_array"), gnu::used]] void (*const take_standard_descriptors)() = TakeStandardDescriptors;

}  // namespace
}  // namespace vrambroker
