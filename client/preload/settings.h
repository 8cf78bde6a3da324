/* SPDX-License-Identifier: Apache-2.0
 *
 * Settings from the environment.
 */
#ifndef VRAMBROKER_CLIENT_PRELOAD_SETTINGS_H_
#define VRAMBROKER_CLIENT_PRELOAD_SETTINGS_H_

#include <stdint.h>

#include "client/preload/say.h"

struct limit {
  uint32_t kind; /* enum vrambroker_count_limit */
  uint64_t bytes;
  double fraction;
};

struct settings {
  char socket_path[108];     /* VRAMBROKER_SOCKET_DIR and the socket's name */
  struct limit limit;        /* VRAMBROKER_LIMIT */
  struct limit guarantee;    /* VRAMBROKER_GUARANTEE */
  char devices[512];         /* VRAMBROKER_DEVICES; empty: all */
  char name[128];            /* VRAMBROKER_NAME */
  char note[192];            /* says how the name was changed; empty: unchanged */
  uint64_t wait_ms;          /* VRAMBROKER_WAIT; 0: no waiting */
  uint64_t reconnect_ms;     /* VRAMBROKER_RECONNECT: how long an allocation waits for a lost daemon */
  int refuse_managed;        /* VRAMBROKER_MANAGED=refuse */
  int if_available;          /* VRAMBROKER_IF_AVAILABLE=1 */
  char error[MESSAGE_BYTES]; /* last invalid setting; empty: none */
};

/* Reads the environment at the first call. */
const struct settings* settings(void);

#endif /* VRAMBROKER_CLIENT_PRELOAD_SETTINGS_H_ */
