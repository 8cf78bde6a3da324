/* SPDX-License-Identifier: Apache-2.0
 *
 * Session of this process with the daemon. The session begins when first needed, and begins again after the daemon was
 * lost. A child after fork() begins its own session. The main connection is "the line": one thread at a time holds the
 * line.
 */
#ifndef VRAMBROKER_CLIENT_PRELOAD_SESSION_H_
#define VRAMBROKER_CLIENT_PRELOAD_SESSION_H_

#include <stdint.h>

#include "client/preload/settings.h"
#include "proto/vrambroker/v1/count_socket.h"

enum line {
  LINE_OPEN,      /* the calling thread holds the line until line_leave() */
  LINE_UNCOUNTED, /* no daemon at first, as VRAMBROKER_IF_AVAILABLE permits */
  LINE_REFUSED    /* see `message` */
};

/* Takes the line. `patient`: waits for a lost or restarting daemon, up to VRAMBROKER_RECONNECT. `message`: of
 * MESSAGE_BYTES. */
enum line line_enter(int patient, char* message);
/* 1: the calling thread holds the line. 0: another thread holds the line, or no session is open. */
int line_try_enter(void);
void line_leave(void);
/* Call while holding the line. -1: the line is broken; line_enter() begins the session again. */
int line_call(uint32_t call, uint32_t device, uint64_t bytes, struct vrambroker_count_answer* answer);

enum { NO_CONNECTION = -2 };
/* Sends WAIT on a separate connection; NO_CONNECTION: no connection is possible. `generation`: number of the answering
 * session. -1: the session was lost. INTERRUPTED: the program is to end. */
int session_wait(uint32_t device, uint64_t bytes, uint64_t wait_ms, uint64_t* generation,
                 struct vrambroker_count_answer* answer);
uint64_t session_generation(void);

/* Starts a thread to look after the session, once. */
void session_keep(void);

enum { CODE_OK = 0, CODE_NOT_FOUND = 5, CODE_NO_MEMORY = 8, CODE_ABORTED = 10, CODE_UNAVAILABLE = 14 };

#endif /* VRAMBROKER_CLIENT_PRELOAD_SESSION_H_ */
