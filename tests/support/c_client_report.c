/* SPDX-License-Identifier: Apache-2.0 */
/* Scenarios of c_client: the whole report of a refusal. */
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>

#include "c_client.h"

/* Returns the report of this thread's last refusal. The caller frees the text. */
static char* last_report(void) {
  size_t needed = 0;
  CHECK(vrambroker_last_out_of_memory_json(NULL, 0, &needed) == VRAMBROKER_OUT_OF_RANGE);
  char* const json = malloc(needed);
  CHECK(json != NULL);
  memset(json, '#', needed);
  CHECK(vrambroker_last_out_of_memory_json(json, needed - 1, NULL) == VRAMBROKER_OUT_OF_RANGE);
  CHECK(json[0] == '#');
  CHECK_OK(vrambroker_last_out_of_memory_json(json, needed, NULL));
  CHECK(strlen(json) + 1 == needed);
  CHECK(vrambroker_last_error_code() == VRAMBROKER_RESOURCE_EXHAUSTED); /* reading the report changes no error */
  return json;
}

static void* no_report(void* unused) {
  (void)unused;
  size_t needed = 7;
  char text[100];
  CHECK(vrambroker_last_out_of_memory_json(text, sizeof text, &needed) == VRAMBROKER_NOT_FOUND && needed == 0);
  return NULL;
}

struct refused {
  vrambroker_client* client;
  uint64_t bytes;
};

static void* refuse(void* argument) {
  const struct refused* refused = argument;
  void* pointer = NULL;
  CHECK_FAILS(vrambroker_malloc(refused->client, refused->bytes, 0, &pointer), VRAMBROKER_RESOURCE_EXHAUSTED, "");
  return last_report();
}

static void run_oom_report(uint32_t placement) {
  vrambroker_options options = VRAMBROKER_OPTIONS_INIT;
  options.name = placement == VRAMBROKER_LEASED ? "scoped" : "scoped-remote";
  options.limit = "64MiB";
  options.placement = placement;
  vrambroker_client* client = NULL;
  CHECK_OK(vrambroker_connect(&options, &client));
  no_report(NULL);
  void* blocks[6] = {NULL};
  const uint32_t outer = vrambroker_scope_begin("forward", NULL, 0);
  for (int i = 0; i < 6; ++i) CHECK_OK(vrambroker_malloc(client, 4 * MIB, 0, &blocks[i]));
  vrambroker_scope_end(outer);
  for (int i = 0; i < 6; i += 2) CHECK_OK(vrambroker_free(client, blocks[i]));
  vrambroker_scope_begin("backward", NULL, 0);
  struct refused refused = {client, 28 * MIB};
  char* const first = refuse(&refused);
  vrambroker_scope_end(outer);
  char text[200];
  snprintf(text, sizeof text, "{\"client\":\"%s\",\"reserved_bytes\":", options.name);
  const char* const parts[] = {
      "\"scope\":\"backward\",\"scopes\":[{\"scope\":\"forward\",\"allocated_bytes\":12582912,",
      "\"longest_held\":[{\"address\":", "\"scope\":\"forward\"}", "\"idle_holders\":[", text};
  for (size_t i = 0; i < sizeof parts / sizeof *parts; ++i) {
    if (strstr(first, parts[i]) != NULL) continue;
    fprintf(stderr, "no %s in %s\n", parts[i], first);
    _exit(1);
  }
  /* Each thread has a separate report, which ends with the thread. */
  pthread_t thread;
  refused.bytes = 29 * MIB;
  for (int i = 0; i < 3; ++i) {
    void* of_thread = NULL;
    CHECK(pthread_create(&thread, NULL, refuse, &refused) == 0 && pthread_join(thread, &of_thread) == 0);
    CHECK(strstr(of_thread, "\"requested_bytes\":30408704,") != NULL);
    free(of_thread);
  }
  CHECK(pthread_create(&thread, NULL, no_report, NULL) == 0 && pthread_join(thread, NULL) == 0);
  char* const again = last_report();
  CHECK(strcmp(first, again) == 0);
  free(again);
  free(first);
  /* Makes a refusal with another report, and then an error that is no refusal. */
  CHECK_FAILS(vrambroker_malloc(client, UINT64_C(1) << 40, 0, &blocks[0]), VRAMBROKER_RESOURCE_EXHAUSTED, "");
  char* const larger = last_report();
  CHECK(strstr(larger, "\"cause\":\"LARGER_THAN_DEVICE\"") != NULL);
  free(larger);
  CHECK_FAILS(vrambroker_last_out_of_memory_json(NULL, 100, NULL), VRAMBROKER_INVALID_ARGUMENT, "buffer is NULL");
  no_report(NULL);
  for (int i = 1; i < 6; i += 2) CHECK_OK(vrambroker_free(client, blocks[i]));
  CHECK_OK(vrambroker_disconnect(client));
}

void run_oom_report_leased(void) {
  run_oom_report(VRAMBROKER_LEASED);
}

void run_oom_report_remote(void) {
  run_oom_report(VRAMBROKER_REMOTE);
}
