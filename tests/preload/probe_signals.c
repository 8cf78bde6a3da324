// SPDX-License-Identifier: Apache-2.0
//
// Signals, standard error and the end of a program.
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/preload/probe.h"

static sigjmp_buf target;

static void tell(int number) {
  char line[] = "signal 00\n";
  line[7] = (char)('0' + number / 10);
  line[8] = (char)('0' + number % 10);
  if (write(STDOUT_FILENO, line, sizeof line - 1) < 0) _exit(3);
}

static void jump(int number) {
  siglongjmp(target, number);
}

static int handle(const char* number, void (*handler)(int)) {
  struct sigaction action;
  memset(&action, 0, sizeof action);
  action.sa_handler = handler;
  action.sa_flags = SA_RESTART;
  return sigaction(atoi(number), &action, NULL);
}

static void say_end(void) {
  if (write(STDOUT_FILENO, "at exit\n", 8) < 0) _exit(3);
}

static void* end_thread(void* nothing) {
  return nothing;
}

int probe_signals(const char* word, const char* first, const char* second) {
  if (strcmp(word, "handle") == 0) { /* handles a signal; the handler writes a line */
    printf("%d\n", handle(first, tell));
  } else if (strcmp(word, "ignore") == 0) { /* ignores a signal */
    printf("%d\n", handle(first, SIG_IGN));
  } else if (strcmp(word, "jump") == 0) { /* allocates; the signal's handler jumps out of the call */
    address_t address;
    handle(first, jump);
    if (sigsetjmp(target, 1) == 0) {
      printf("%d\n", driver.cuMemAlloc_v2(&address, strtoull(second, NULL, 10) << 20));
    } else {
      printf("jumped\n");
    }
  } else if (strcmp(word, "open") == 0) { /* opens a file, and prints its descriptor */
    printf("0 %d\n", open(first, O_WRONLY | O_CREAT | (strcmp(second, "append") == 0 ? O_APPEND : 0), 0600));
  } else if (strcmp(word, "pthread_exit") == 0) { /* ends the main thread before another thread */
    pthread_t thread;
    atexit(say_end);
    pthread_create(&thread, NULL, end_thread, NULL);
    pthread_exit(NULL);
  } else {
    return 0;
  }
  return 1;
}
