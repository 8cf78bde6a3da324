/* SPDX-License-Identifier: Apache-2.0 */
/* A program that defines another version of gRPC and protobuf: libvrambroker.so must not use these definitions. */
#include <stdio.h>
#include <stdlib.h>
#include <vrambroker/vrambroker.h>

void grpc_init(void);
void grpc_init(void) {
  fprintf(stderr, "the program's own gRPC was called\n");
  abort();
}
void _ZN6google8protobuf8internal13VerifyVersionEiiPKc(void);
void _ZN6google8protobuf8internal13VerifyVersionEiiPKc(void) {
  fprintf(stderr, "the program's own protobuf was called\n");
  abort();
}

int main(void) {
  vrambroker_client* client = NULL;
  void* pointer = NULL;
  if (vrambroker_connect(NULL, &client) != VRAMBROKER_OK ||
      vrambroker_malloc(client, 1, 0, &pointer) != VRAMBROKER_OK || vrambroker_free(client, pointer) != VRAMBROKER_OK ||
      vrambroker_disconnect(client) != VRAMBROKER_OK) {
    fprintf(stderr, "%s\n", vrambroker_last_error_message());
    return 1;
  }
  return 0;
}
