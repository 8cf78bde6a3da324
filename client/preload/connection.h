/* SPDX-License-Identifier: Apache-2.0
 *
 * One connection to the daemon's count socket. Programs close descriptors that they did not open, and get the number
 * for a file of their own. So what the number stands for is compared before each use: the program's files never get a
 * byte of this library.
 */
#ifndef VRAMBROKER_CLIENT_PRELOAD_CONNECTION_H_
#define VRAMBROKER_CLIENT_PRELOAD_CONNECTION_H_

#include <stdint.h>

#include "client/preload/runtime.h"
#include "proto/vrambroker/v1/count_socket.h"

struct connection {
  int descriptor; /* meaningful where is_open */
  int is_open;
  struct file file; /* what the descriptor stands for */
};

/* 0, or an errno. ENOENT, ENOTDIR, ECONNREFUSED: no daemon. */
int connection_open(struct connection* connection, const char* path);
int connection_is_ours(const struct connection* connection);
/* Sends one packet, and waits for its answer. 0: answered, and the answer is of the right size, version and call. -1:
   it was not, or INTERRUPTED; the connection is closed. */
int connection_call(struct connection* connection, const struct vrambroker_count_request* request, uint64_t timeout_ms,
                    enum holding holding, struct vrambroker_count_answer* answer);
void connection_close(struct connection* connection);
/* In a child after fork(): closes those of all threads. The daemon would not notice that its parent closes one. */
void connections_forget(void);

#endif /* VRAMBROKER_CLIENT_PRELOAD_CONNECTION_H_ */
