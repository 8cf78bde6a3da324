/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A client in C. Takes memory, uses the memory, requests more than available, and shows the answers. Needs a running
 * daemon:
 *
 *   VRAMBROKER_SOCKET_DIR=/tmp/vrambroker vrambroker-c-client
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <vrambroker/vrambroker.h>

static void check(int code, const char* what) {
  if (code == VRAMBROKER_OK) return;
  fprintf(stderr, "%s: %s: %s\n", what, vrambroker_code_name(code), vrambroker_last_error_message());
  exit(1);
}

int main(void) {
  const char text[] = "written by a C program";
  const uint64_t size = UINT64_C(24) << 20;

  vrambroker_options options = VRAMBROKER_OPTIONS_INIT;
  options.name = "c-client";
  options.limit = "0.25";
  vrambroker_client* client = NULL;
  check(vrambroker_connect(&options, &client), "connect");

  vrambroker_device device = {.struct_size = sizeof device};
  check(vrambroker_get_device(client, 0, &device), "get_device");
  printf("device 0: %s, %s, %" PRIu64 " bytes, of which up to %" PRIu64 " for this program\n", device.kind, device.name,
         device.capacity_bytes, device.limit_bytes);

  void* memory = NULL;
  check(vrambroker_malloc(client, size, 0, &memory), "malloc");
  char back[sizeof text];
  check(vrambroker_write(client, memory, size - sizeof text, text, sizeof text), "write");
  check(vrambroker_read(client, memory, size - sizeof text, back, sizeof back), "read");
  printf("at the end of %" PRIu64 " bytes: %s\n", size, back);

  uint64_t free_bytes = 0;
  uint64_t total_bytes = 0;
  check(vrambroker_memory_info(client, 0, &free_bytes, &total_bytes), "memory_info");
  printf("free: %" PRIu64 " of %" PRIu64 " bytes\n", free_bytes, total_bytes);

  void* too_much = NULL;
  vrambroker_out_of_memory oom = {.struct_size = sizeof oom};
  if (vrambroker_malloc(client, total_bytes + 1, 0, &too_much) != VRAMBROKER_RESOURCE_EXHAUSTED ||
      vrambroker_last_out_of_memory(&oom) != VRAMBROKER_OK) {
    fprintf(stderr, "more than the limit was not refused\n");
    return 1;
  }
  printf("one byte more than all: %s, %s\n", vrambroker_cause_name(oom.cause), vrambroker_last_error_message());

  check(vrambroker_free(client, memory), "free");
  printf("freed twice: %s\n", vrambroker_code_name(vrambroker_free(client, memory)));
  check(vrambroker_disconnect(client), "disconnect");
  return strcmp(back, text) == 0 ? 0 : 1;
}
