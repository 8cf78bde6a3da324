/* SPDX-License-Identifier: Apache-2.0 */
#include "client/preload/connection.h"

#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

/* Last file opened per descriptor. Lock-free, because a child might find a lock held. A program with very many
 * descriptors may have connections beyond the table. */
static struct file files[2048];
enum { FILES = sizeof files / sizeof *files };

/* Moves a descriptor to a number unlikely to be expected by programs. */
static int out_of_the_way(int descriptor) {
  struct rlimit limit = {256, 256};
  getrlimit(RLIMIT_NOFILE, &limit);
  const int top = limit.rlim_cur > 1024 ? 1024 : (int)limit.rlim_cur;
  const int moved = fcntl(descriptor, F_DUPFD_CLOEXEC, top * 7 / 8);
  if (moved < 0) return descriptor;
  close(descriptor);
  return moved;
}

int connection_open(struct connection* connection, const char* path) {
  connection->is_open = 0;
  struct sockaddr_un address = {.sun_family = AF_UNIX};
  if (strlen(path) >= sizeof address.sun_path) return ENAMETOOLONG;
  strcpy(address.sun_path, path);
  int descriptor = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (descriptor < 0) return errno;
  descriptor = out_of_the_way(descriptor);
  file_of_descriptor(descriptor, &connection->file);
  if (descriptor < FILES) files[descriptor] = connection->file;
  connection->descriptor = descriptor;
  connection->is_open = 1;
  int result;
  do {
    result = connect(descriptor, (const struct sockaddr*)&address, sizeof address);
  } while (result != 0 && errno == EINTR);
  const int error = result == 0 ? 0 : errno;
  if (error != 0) connection_close(connection);
  return error;
}

int connection_is_ours(const struct connection* connection) {
  struct file file;
  return connection->is_open && file_of_descriptor(connection->descriptor, &file) == 0 &&
         is_same_file(&file, &connection->file);
}

void connection_close(struct connection* connection) {
  if (connection_is_ours(connection)) close(connection->descriptor);
  connection->is_open = 0;
}

void connections_forget(void) {
  for (int i = 0; i < FILES; i++) {
    struct connection connection = {.descriptor = i, .is_open = files[i].inode != 0, .file = files[i]};
    connection_close(&connection);
  }
  memset(files, 0, sizeof files);
}

_Static_assert(offsetof(struct vrambroker_count_request, guarantee_kind) == VRAMBROKER_COUNT_SHORT_REQUEST_BYTES &&
                   offsetof(struct vrambroker_count_request, devices) == VRAMBROKER_COUNT_NO_DEVICES_REQUEST_BYTES,
               "older daemons' packets");

/* Older daemons accept only the shorter packets. */
static size_t size_of(const struct vrambroker_count_request* request) {
  if (request->devices[0] != '\0') return sizeof *request;
  return request->guarantee_kind == VRAMBROKER_COUNT_LIMIT_NONE ? VRAMBROKER_COUNT_SHORT_REQUEST_BYTES
                                                                : VRAMBROKER_COUNT_NO_DEVICES_REQUEST_BYTES;
}

static int exchange(struct connection* connection, const struct vrambroker_count_request* request, uint64_t timeout_ms,
                    enum holding holding, struct vrambroker_count_answer* answer) {
  if (!connection_is_ours(connection)) return -1;
  ssize_t bytes;
  const size_t size = size_of(request);
  do {
    bytes = send(connection->descriptor, request, size, MSG_NOSIGNAL | MSG_DONTWAIT);
  } while (bytes < 0 && errno == EINTR);
  /* A daemon without room for the connection has already sent the reason, and reads nothing. */
  if (bytes != (ssize_t)size && (bytes >= 0 || errno != EPIPE)) return -1;
  const uint64_t until = now_ms() + timeout_ms;
  for (;;) {
    const uint64_t now = now_ms();
    if (now >= until) return -1;
    const uint64_t left = until - now;
    const int found = wait_calmly(connection->descriptor, left > 1000 ? 1000 : left, holding);
    if (found == INTERRUPTED) return INTERRUPTED;
    if (!connection_is_ours(connection)) return -1;
    if (found == 0) continue;
    /* MSG_TRUNC: returns the packet's real size, even if larger. */
    bytes = recv(connection->descriptor, answer, sizeof *answer, MSG_DONTWAIT | MSG_TRUNC);
    if (bytes < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    break;
  }
  if (bytes != (ssize_t)sizeof *answer || answer->version != VRAMBROKER_COUNT_VERSION) return -1;
  const int is_refused = answer->call == VRAMBROKER_COUNT_HELLO && answer->code != 0; /* connection refused */
  if (answer->call != request->call && !is_refused) return -1;
  answer->uuid[sizeof answer->uuid - 1] = '\0';
  answer->message[sizeof answer->message - 1] = '\0';
  return 0;
}

int connection_call(struct connection* connection, const struct vrambroker_count_request* request, uint64_t timeout_ms,
                    enum holding holding, struct vrambroker_count_answer* answer) {
  const int result = exchange(connection, request, timeout_ms, holding, answer);
  if (result != 0) connection_close(connection);
  return result;
}
