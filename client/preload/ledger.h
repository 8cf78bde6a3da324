/* SPDX-License-Identifier: Apache-2.0
 *
 * What this process has of each device: how many units the driver has given it, and how many the daemon has charged it.
 * A unit is 2 MiB, as the driver's blocks. What is charged and not used is slack: it serves the next request without a
 * call. At most one unit of it is kept, and not while a thread waits for memory.
 */
#ifndef VRAMBROKER_CLIENT_PRELOAD_LEDGER_H_
#define VRAMBROKER_CLIENT_PRELOAD_LEDGER_H_

#include <stdint.h>

#include "client/preload/driver_api.h"
#include "client/preload/settings.h"
#include "proto/vrambroker/v1/count_socket.h"

enum { LEDGER_DEVICES = 64 };

struct account; /* of one device */

/* The account of a device of the driver. Returns 0, or an error of CUDA for the program. `account` is NULL where the
   device is not counted: the daemon does not serve it, or there is none and need not be. `quiet`: an error writes no
   line. */
int account_of(cu_device device, int quiet, struct account** account);
/* Of the calling thread's context. Without one that is not counted: the driver refuses the call. */
int current_account(struct account** account, cu_context* context);
/* Finds the device for memory of a type at a location. -1: it is known to be the host's; managed memory may move to a
   device. Other memory counts to the device that the location names. If none is known by it, that is the calling
   thread's, or the first one. */
cu_device device_of_location(const cu_location* location, int type);
/* The account of that device; NULL for the host's memory, too. */
int account_of_location(const cu_location* location, int type, int quiet, struct account** account);

uint64_t units_of(uint64_t bytes);

enum patience {
  FROM_SLACK, /* without a call to the daemon */
  NOW,        /* with one, if there is a daemon */
  AT_ONCE,    /* others are asked for what they only cache */
  MAY_WAIT    /* for others, and for a daemon that is away */
};
/* Takes units, from slack or from the daemon. 0: taken, and `waited` says whether others had them before. Otherwise
   `message`, of MESSAGE_BYTES, says why not. */
int ledger_take(struct account* account, uint64_t units, enum patience patience, int* waited, char* message);
/* Units that the driver has back, or did not give. */
void ledger_give(struct account* account, uint64_t units);
/* Units that the driver has given already: they are charged as soon as that is possible. */
void ledger_owe(struct account* account, uint64_t units);

/* What the process may have of the device, and may still get. 0: `limit` and `left` are true. */
int ledger_figures(struct account* account, uint64_t* limit, uint64_t* left);
/* Of the device with this UUID, as text. -1: it is not counted. */
int ledger_figures_by_uuid(const char* uuid, uint64_t* limit, uint64_t* left);

/* A refused allocation's line on stderr: the first, and then one a minute at most. Returns CU_OUT_OF_MEMORY. */
int refuse(const char* message);
/* Returns the same where managed memory is refused, else 0. */
int refuse_managed(void);

/* --- for the session: a new one begins, with the devices that its daemon has --- */
void ledger_session_begins(void);
/* It has said all of them. Until then no memory is taken. */
void ledger_session_is_open(void);
/* Returns how many bytes the process has of the device. */
uint64_t ledger_device(uint32_t ordinal, const struct vrambroker_count_answer* answer);
void ledger_held(uint32_t ordinal, uint64_t charged_bytes);
uint64_t ledger_generation(void);
int ledger_has_slack(void);
/* Gives slack back that has not been needed since the last call. */
void ledger_tidy(void);
/* In a child after fork(). */
void ledger_forget(void);

#endif /* VRAMBROKER_CLIENT_PRELOAD_LEDGER_H_ */
