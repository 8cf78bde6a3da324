/* SPDX-License-Identifier: Apache-2.0 */
#include "client/preload/say.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "client/preload/runtime.h"

static struct file at_start;
static int was_open;

/* Runs before the program opens any file. */
__attribute__((constructor)) static void remember(void) {
  was_open = file_of_descriptor(STDERR_FILENO, &at_start) == 0;
}

static int is_for_people(const struct file* file) {
  struct file output;
  if (was_open && is_same_file(file, &at_start)) return 1;
  if (file_of_descriptor(STDOUT_FILENO, &output) == 0 && is_same_file(file, &output)) return 1;
  return S_ISREG(file->mode) && (fcntl(STDERR_FILENO, F_GETFL) & O_APPEND) != 0;
}

/* Other processes share the open pipe or terminal, whose flags must not change for them. So we open it once more. */
static ssize_t write_now(const struct file* file, const char* line, size_t bytes) {
  if (S_ISSOCK(file->mode)) return send(STDERR_FILENO, line, bytes, MSG_DONTWAIT | MSG_NOSIGNAL);
  if (!S_ISFIFO(file->mode) && !S_ISCHR(file->mode)) return write(STDERR_FILENO, line, bytes);
  const int again = open("/proc/self/fd/2", O_WRONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
  if (again >= 0) {
    const ssize_t written = write(again, line, bytes);
    const int error = errno;
    close(again);
    errno = error;
    return written;
  }
  struct pollfd writable = {STDERR_FILENO, POLLOUT, 0};
  return poll(&writable, 1, 0) > 0 ? write(STDERR_FILENO, line, bytes) : 0;
}

void say(const char* format, ...) {
  const struct calm calm = calm_begin();
  char line[MESSAGE_BYTES + 256] = "vrambroker: ";
  const size_t start = strlen(line);
  va_list arguments;
  va_start(arguments, format);
  const int length = vsnprintf(line + start, sizeof line - start - 1, format, arguments);
  va_end(arguments);
  size_t bytes = start + (length < 0 ? 0 : (size_t)length);
  if (bytes > sizeof line - 2) bytes = sizeof line - 2;
  line[bytes++] = '\n';

  struct file file;
  sigset_t pipe; /* blocked, like all signals */
  sigset_t pending;
  sigemptyset(&pipe);
  sigaddset(&pipe, SIGPIPE);
  sigpending(&pending);
  if (file_of_descriptor(STDERR_FILENO, &file) == 0 && is_for_people(&file) && write_now(&file, line, bytes) < 0 &&
      errno == EPIPE && !sigismember(&pending, SIGPIPE)) {
    const struct timespec now = {0, 0};
    sigtimedwait(&pipe, NULL, &now); /* takes the signal raised by the write */
  }
  calm_end(calm);
}
