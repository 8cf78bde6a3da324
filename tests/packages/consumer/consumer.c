/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <vrambroker/vrambroker.h>

int main(void) {
  vrambroker_client* client = NULL;
  void* memory = NULL;
  int code = vrambroker_connect(NULL, &client);
  if (code == VRAMBROKER_OK) code = vrambroker_malloc(client, 1 << 20, 0, &memory);
  if (code != VRAMBROKER_OK) fprintf(stderr, "%s\n", vrambroker_last_error_message());
  if (code == VRAMBROKER_OK) puts("1 MiB, in C");
  vrambroker_free(client, memory);
  vrambroker_disconnect(client);
  return code;
}
