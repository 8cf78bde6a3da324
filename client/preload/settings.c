/* SPDX-License-Identifier: Apache-2.0 */
#include "client/preload/settings.h"

#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <time.h>
#include <unistd.h>

#include "client/preload/lock.h"
#include "client/preload/runtime.h"
#include "proto/vrambroker/v1/count_socket.h"

/* --- Numbers with units. strtod and strtoull follow the program's locale, and have newer versions in newer C
 * libraries. --- */

struct unit {
  const char* name;
  uint64_t factor;
};

static const struct unit sizes[] = {{"B", 1},
                                    {"KiB", UINT64_C(1) << 10},
                                    {"MiB", UINT64_C(1) << 20},
                                    {"GiB", UINT64_C(1) << 30},
                                    {"TiB", UINT64_C(1) << 40},
                                    {NULL, 0}};
static const struct unit durations[] = {{"ms", 1}, {"s", 1000}, {"m", 60000}, {"h", 3600000}, {NULL, 0}};

/* "1.5" and a unit's name, or nothing where `bare` is 1. Returns 0, or -1: not a number, or too large. */
static int read_number(const char* text, const struct unit* units, int bare, double* number, uint64_t* whole) {
  double value = 0;
  double place = 1;
  int digits = 0;
  int has_point = 0;
  const char* at = text;
  for (; (*at >= '0' && *at <= '9') || (*at == '.' && !has_point); at++) {
    if (*at == '.') {
      has_point = 1;
      continue;
    }
    digits++;
    value = value * 10 + (*at - '0');
    if (has_point) place *= 10;
  }
  if (digits == 0 || digits > 18) return -1;
  while (*at == ' ') at++;
  uint64_t factor = *at == '\0' && bare ? 1 : 0;
  for (; units->name != NULL; units++) {
    if (strcasecmp(at, units->name) == 0) factor = units->factor;
  }
  if (factor == 0 || value / place * (double)factor >= 9e18) return -1;
  *number = value / place;
  *whole = (uint64_t)(value / place * (double)factor);
  return 0;
}

static void read_limit(struct settings* to, const char* text) {
  double number = 0;
  uint64_t bytes = 0;
  const char* end = text + strspn(text, "0123456789.");
  end += strspn(end, " ");
  if (read_number(text, sizes, 1, &number, &bytes) != 0) {
    snprintf(to->error, sizeof to->error,
             "VRAMBROKER_LIMIT='%.60s': write a fraction such as 0.5, or a size such as 512MiB or plain bytes", text);
  } else if (*end == '\0' && strchr(text, '.') != NULL) {
    to->limit_kind = VRAMBROKER_COUNT_LIMIT_FRACTION;
    to->limit_fraction = number;
    if (number > 1) {
      snprintf(to->error, sizeof to->error,
               "VRAMBROKER_LIMIT='%.60s': a fraction of the capacity must be between 0.0 and 1.0", text);
    }
  } else if (*end == '\0' && bytes > 0 && bytes < UINT64_C(1) << 20) {
    snprintf(to->error, sizeof to->error,
             "VRAMBROKER_LIMIT='%.60s' is ambiguous: write %.60sB for bytes, %.60sGiB, or a fraction such as 0.5", text,
             text, text);
  } else {
    to->limit_kind = VRAMBROKER_COUNT_LIMIT_BYTES;
    to->limit_bytes = bytes;
  }
}

static void read_duration(struct settings* to, const char* name, uint64_t* milliseconds) {
  const char* text = getenv(name);
  double number = 0;
  if (text == NULL || *text == '\0') return;
  if (read_number(text, durations, strcmp(text, "0") == 0, &number, milliseconds) != 0) {
    snprintf(to->error, sizeof to->error, "%s='%.60s': write a duration such as 500ms, 30s or 10m", name, text);
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
  const char* limit = getenv("VRAMBROKER_LIMIT");
  if (limit != NULL && *limit != '\0') read_limit(to, limit);
  const char* name = getenv("VRAMBROKER_NAME");
  if (name != NULL && strlen(name) >= sizeof to->name) {
    snprintf(to->error, sizeof to->error, "VRAMBROKER_NAME is too long: use at most %zu bytes", sizeof to->name - 1);
  } else if (name != NULL) {
    strcpy(to->name, name);
  }
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
