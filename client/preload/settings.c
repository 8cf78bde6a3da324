/* SPDX-License-Identifier: Apache-2.0 */
#include "client/preload/settings.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "allocator/base/amount_parser.h"
#include "allocator/base/clean_name.h"
#include "client/preload/say.h"
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

static void read_devices(struct settings* to) {
  const char* text = getenv("VRAMBROKER_DEVICES");
  if (text == NULL) return;
  if (strlen(text) >= sizeof to->devices) {
    snprintf(to->error, sizeof to->error, "VRAMBROKER_DEVICES is longer than %zu bytes", sizeof to->devices - 1);
    return;
  }
  strcpy(to->devices, text);
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
  read_devices(to);
  const char* name = getenv("VRAMBROKER_NAME");
  if (name != NULL) (void)name_clean(name, strlen(name), to->name, to->note);
  to->reconnect_ms = 60000;
  read_duration(to, "VRAMBROKER_WAIT", &to->wait_ms);
  read_duration(to, "VRAMBROKER_RECONNECT", &to->reconnect_ms);
  to->refuse_managed = is_yes(to, "VRAMBROKER_MANAGED", "count", "refuse");
  to->if_available = is_yes(to, "VRAMBROKER_IF_AVAILABLE", "0", "1");
}

/* Takes no lock, which a child after fork() might find held forever. After a race of several threads, the first
 * thread's settings stay. */
const struct settings* settings(void) {
  static const struct settings* read;
  static const struct settings no_memory = {.error = "no memory is left"};
  const struct settings* known = __atomic_load_n(&read, __ATOMIC_ACQUIRE);
  if (known != NULL) return known;
  struct settings* own = mmap(NULL, sizeof *own, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (own == MAP_FAILED) return &no_memory;
  read_settings(own);
  if (!__atomic_compare_exchange_n(&read, &known, own, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
    munmap(own, sizeof *own);
    return known;
  }
  if (own->note[0] != '\0') say("%s", own->note);
  return own;
}
