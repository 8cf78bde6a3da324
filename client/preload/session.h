/* SPDX-License-Identifier: Apache-2.0
 *
 * This process's session with the daemon. It begins when it is first needed, is begun again when the daemon was lost,
 * and a child after fork() begins its own. Its main connection is "the line": one thread at a time has it.
 */
#ifndef VRAMBROKER_CLIENT_PRELOAD_SESSION_H_
#define VRAMBROKER_CLIENT_PRELOAD_SESSION_H_

#include <stdint.h>

#include "client/preload/settings.h"
#include "proto/vrambroker/v1/count_socket.h"

enum line {
  LINE_OPEN,      /* this thread has the line, until line_leave() */
  LINE_UNCOUNTED, /* there was no daemon at first, and VRAMBROKER_IF_AVAILABLE says that this is no fault */
  LINE_REFUSED    /* see `message` */
};

/* `patient`: waits for a daemon that was lost, for VRAMBROKER_RECONNECT. `message`: of MESSAGE_BYTES. */
enum line line_enter(int patient, char* message);
/* 1: this thread has the line. 0: another has it, or there is none just now. */
int line_try_enter(void);
void line_leave(void);
/* By who has the line. -1: it is broken; line_enter() begins the session again. */
int line_call(uint32_t call, uint32_t device, uint64_t bytes, struct vrambroker_count_answer* answer);

enum { NO_CONNECTION = -2 };
/* WAIT on a connection of its own, which may not be had. The sessions are numbered: `generation` is the one that the
   answer is of. -1: it was lost. INTERRUPTED: the program is to end. */
int session_wait(uint32_t device, uint64_t bytes, uint64_t wait_ms, uint64_t* generation,
                 struct vrambroker_count_answer* answer);
uint64_t session_generation(void);

/* From now on a thread looks after the session. */
void session_keep(void);

enum { CODE_OK = 0, CODE_NOT_FOUND = 5, CODE_NO_MEMORY = 8, CODE_ABORTED = 10, CODE_UNAVAILABLE = 14 };

#endif /* VRAMBROKER_CLIENT_PRELOAD_SESSION_H_ */
