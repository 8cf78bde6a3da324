/* SPDX-License-Identifier: Apache-2.0 */
#include "client/preload/settings.h"

#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "allocator/base/amount_parser.h"
#include "allocator/base/clean_name.h"
#include "client/preload/lock.h"
#include "client/preload/runtime.h"
#include "proto/vrambroker/v1/count_socket.h"

static void read_limit(struct settings* to, const char* name, struct limit* limit) {
  const char* text = getenv(name);
  struct amount_limit read;
  char why[AMOUNT_WHY_BYTES];
  if (text == NULL || *text == '\0') return;
  if (amount_read_limit(text, strlen(text), &read, why) != 0) {
    snprintf(to->error, sizeof to->error, "%s: %s", name, why);
  }
  limit->kind = read.is_share ? VRAMBROKER_COUNT_LIMIT_FRACTION : VRAMBROKER_COUNT_LIMIT_BYTES;
  limit->fraction = read.share;
  limit->bytes = read.bytes;
}

static void read_duration(struct settings* to, const char* name, uint64_t* milliseconds) {
  const char* text = getenv(name);
  char why[AMOUNT_WHY_BYTES];
  if (text == NULL || *text == '\0') return;
  if (amount_read_milliseconds(text, strlen(text), milliseconds, why) != 0) {
    snprintf(to->error, sizeof to->error, "%s: %s", name, why);
  }
}

static int is_yes(struct settings* to, const char* name, const char* no, const char* yes) {
  const char* text = getenv(name);
  if (text == NULL || *text == '\0' || strcmp(text, no) == 0) return 0;
  if (strcmp(text, yes) != 0) snprintf(to->error, sizeof to->error, "%s='%.60s': write %s or %s", name, text, yes, no);
  return 1;
}

static void read_settings(struct settings* to) {
  memset(to, 0, sizeof *to);
  const char* folder = getenv("VRAMBROKER_SOCKET_DIR");
  if (folder == NULL || *folder == '\0') folder = "/run/vrambroker";
  const int length = snprintf(to->socket_path, sizeof to->socket_path, "%s/%s", folder, VRAMBROKER_COUNT_SOCKET);
  if (length < 0 || (size_t)length >= sizeof to->socket_path) {
    snprintf(to->error, sizeof to->error,
             "VRAMBROKER_SOCKET_DIR='%.200s' is too long for a socket: use at most %zu bytes", folder,
             sizeof to->socket_path - sizeof VRAMBROKER_COUNT_SOCKET - 1);
  }
  read_limit(to, "VRAMBROKER_LIMIT", &to->limit);
  read_limit(to, "VRAMBROKER_GUARANTEE", &to->guarantee);
  const char* name = getenv("VRAMBROKER_NAME");
  if (name != NULL) (void)name_clean(name, strlen(name), to->name, to->note);
  to->reconnect_ms = 60000;
  read_duration(to, "VRAMBROKER_WAIT", &to->wait_ms);
  read_duration(to, "VRAMBROKER_RECONNECT", &to->reconnect_ms);
  to->refuse_managed = is_yes(to, "VRAMBROKER_MANAGED", "count", "refuse");
  to->if_available = is_yes(to, "VRAMBROKER_IF_AVAILABLE", "0", "1");
}

const struct settings* settings(void) {
  static struct settings read;
  static struct lock reading;
  static int is_read;
  if (!__atomic_load_n(&is_read, __ATOMIC_ACQUIRE)) {
    lock(&reading);
    if (!is_read) {
      read_settings(&read);
      if (read.note[0] != '\0') say("%s", read.note);
      __atomic_store_n(&is_read, 1, __ATOMIC_RELEASE);
    }
    unlock(&reading);
  }
  return &read;
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

  sigset_t pipe;
  sigset_t before;
  sigset_t pending;
  sigemptyset(&pipe);
  sigaddset(&pipe, SIGPIPE);
  sigpending(&pending);
  sigprocmask(SIG_BLOCK, &pipe, &before);
  if (write(STDERR_FILENO, line, bytes) < 0 && errno == EPIPE && !sigismember(&pending, SIGPIPE)) {
    const struct timespec now = {0, 0};
    sigtimedwait(&pipe, NULL, &now); /* the signal of this write */
  }
  sigprocmask(SIG_SETMASK, &before, NULL);
  calm_end(calm);
}
