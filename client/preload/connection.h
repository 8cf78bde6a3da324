/* SPDX-License-Identifier: Apache-2.0
 *
 * A connection to the daemon's count socket. Programs close descriptors opened by libraries, and get the number again
 * for a file of their own. So each use first compares the file behind the descriptor: the program's files never get a
 * byte of this library.
 */
#ifndef VRAMBROKER_CLIENT_PRELOAD_CONNECTION_H_
#define VRAMBROKER_CLIENT_PRELOAD_CONNECTION_H_

#include <stdint.h>

#include "client/preload/runtime.h"
#include "proto/vrambroker/v1/count_socket.h"

struct connection {
  int descriptor; /* valid if is_open */
  int is_open;
  struct file file; /* file behind the descriptor */
};

/* Returns 0 or an errno. ENOENT, ENOTDIR, ECONNREFUSED: no daemon. */
int connection_open(struct connection* connection, const char* path);
int connection_is_ours(const struct connection* connection);
/* Sends one packet, and waits for the answer. 0: the answer has the right size, version and call. -1: no valid answer.
 * INTERRUPTED: a signal ended the wait. Both close the connection. */
int connection_call(struct connection* connection, const struct vrambroker_count_request* request, uint64_t timeout_ms,
                    enum holding holding, struct vrambroker_count_answer* answer);
void connection_close(struct connection* connection);
/* Closes the connections of all threads, in a child after fork(): open copies would hide the parent's close from the
 * daemon. */
void connections_forget(void);

#endif /* VRAMBROKER_CLIENT_PRELOAD_CONNECTION_H_ */
