/* SPDX-License-Identifier: Apache-2.0
 *
 * without_pidfds PROGRAM ARGUMENT...: runs the program and hides the kernel's pidfds from the program.
 */
#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <stdio.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77
#endif

#define LOAD(field) BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, field))
#define SKIP_UNLESS(value, lines) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, value, 0, lines)
#define ANSWER(action) BPF_STMT(BPF_RET | BPF_K, action)

int main(int argc, char** argv) {
  struct sock_filter lines[] = {
      LOAD(nr),
      SKIP_UNLESS(SYS_pidfd_open, 1),
      ANSWER(SECCOMP_RET_ERRNO | ENOSYS),
      SKIP_UNLESS(SYS_getsockopt, 3),
      LOAD(args[2]), /* the lower half, on a machine with the low bytes first */
      SKIP_UNLESS(SO_PEERPIDFD, 1),
      ANSWER(SECCOMP_RET_ERRNO | ENOPROTOOPT),
      ANSWER(SECCOMP_RET_ALLOW),
  };
  const struct sock_fprog program = {.len = sizeof lines / sizeof *lines, .filter = lines};
  if (argc < 2 || prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 ||
      prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0) {
    perror("without_pidfds");
    return 1;
  }
  execv(argv[1], argv + 1);
  perror(argv[1]);
  return 1;
}
