/* SPDX-License-Identifier: Apache-2.0
 *
 * Units of this process on each device: given by the driver, and charged by the daemon. A unit is 2 MiB, like the
 * driver's blocks. Charged and unused units are slack: slack serves the next request without a call. At most one unit
 * of slack is kept, and none while a thread waits for memory.
 */
#ifndef VRAMBROKER_CLIENT_PRELOAD_LEDGER_H_
#define VRAMBROKER_CLIENT_PRELOAD_LEDGER_H_

#include <stdint.h>

#include "client/preload/driver_api.h"
#include "client/preload/settings.h"
#include "proto/vrambroker/v1/count_socket.h"

enum { LEDGER_DEVICES = 64 };

struct account; /* account of a device */

/* Finds the account of a driver's device. Returns 0, or a CUDA error for the program. `account` is NULL if the device
 * is not counted: the daemon does not serve the device, or is missing and optional. `quiet`: errors print no line. */
int account_of(cu_device device, int quiet, struct account** account);
/* Finds the account of the calling thread's context. Without a context nothing is counted: the driver refuses the
 * call. */
int current_account(struct account** account, cu_context* context);
/* Finds the device for memory of a type at a location. -1: known host memory; managed memory may move to a device.
 * Otherwise returns the location's device, or else the calling thread's, or the first device. */
cu_device device_of_location(const cu_location* location, int type);
/* Finds the account of device_of_location(); NULL for host memory, too. */
int account_of_location(const cu_location* location, int type, int quiet, struct account** account);

uint64_t units_of(uint64_t bytes);

enum patience {
  FROM_SLACK, /* takes slack, without calling the daemon */
  NOW,        /* calls the daemon, if present */
  AT_ONCE,    /* asks other programs for merely cached memory */
  MAY_WAIT    /* waits for other programs, and for a missing daemon */
};
/* Takes units, from slack or from the daemon. 0: taken; `waited` says whether other programs had the units before.
 * Otherwise `message`, of MESSAGE_BYTES, says why not. */
int ledger_take(struct account* account, uint64_t units, enum patience patience, int* waited, char* message);
/* Gives back units freed by the driver, or refused by the driver. */
void ledger_give(struct account* account, uint64_t units);
/* Counts units already given by the driver; the daemon charges them as soon as possible. */
void ledger_owe(struct account* account, uint64_t units);

/* Reads the process's limit on the device, and the bytes still available. 0: `limit` and `left` are valid. */
int ledger_figures(struct account* account, uint64_t* limit, uint64_t* left);
/* Like ledger_figures(), by the device's UUID as text. -1: not counted. */
int ledger_figures_by_uuid(const char* uuid, uint64_t* limit, uint64_t* left);

/* Prints a refused allocation's line on stderr: the first, and then at most one a minute. Returns CU_OUT_OF_MEMORY. */
int refuse(const char* message);
/* Like refuse() if the settings refuse managed memory; else returns 0. */
int refuse_managed(void);

/* --- for the session: a new session begins, with the devices of its daemon --- */
void ledger_session_begins(void);
/* Ends the list of devices. Before the end, no memory is taken. */
void ledger_session_is_open(void);
/* Adds a device. Returns the bytes of the process on the device. */
uint64_t ledger_device(uint32_t ordinal, const struct vrambroker_count_answer* answer);
void ledger_held(uint32_t ordinal, uint64_t charged_bytes);
uint64_t ledger_generation(void);
int ledger_has_slack(void);
/* Gives back slack not needed since the last call. */
void ledger_tidy(void);
/* Forgets everything, in a child after fork(). */
void ledger_forget(void);

#endif /* VRAMBROKER_CLIENT_PRELOAD_LEDGER_H_ */
