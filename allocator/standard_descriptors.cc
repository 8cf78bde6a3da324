// SPDX-License-Identifier: Apache-2.0
//
// Programs may be started with standard input, output or error closed: `vramctl ls >&-`. What they open next, as a
// socket, would get such a number, and what they print would go there. So the numbers are taken before: from
// .preinit_array, which runs before the initializers of all libraries, some of which open things themselves. (ELF
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
